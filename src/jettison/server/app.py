"""The routes: the page, what can be asked, the questions, and how one of them stands."""

from __future__ import annotations

import asyncio
import html
import json
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jettison.server.guard import HEADERS
from jettison.server.limits import Limits
from jettison.server.offer import offer
from jettison.server.page import WAITING, ServedPage
from jettison.server.pool import Job, Pool, cancelled
from jettison.server.problems import MEDIA_TYPE, Problem
from jettison.server.questions import Answer, Form, Service, question

Endpoint = Callable[[Request], Awaitable[Response]]
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')


def application(page: ServedPage, pool: Pool, limits: Limits, service: Service) -> Starlette:
    """What is served: ``page`` at the root, and the service's questions for the pool."""

    async def root(_request: Request) -> Response:
        if page.text is None:
            return Response(WAITING, 503, media_type="text/html", headers={"Retry-After": "1"})
        policy = _policy_of(page.text)
        return Response(page.text, media_type="text/html", headers={"Content-Security-Policy": policy})

    async def offered(_request: Request) -> Response:
        return JSONResponse(offer(limits, service))

    async def standing(request: Request) -> Response:
        return JSONResponse(pool.standing(request.path_params["ident"]))

    async def cancel(request: Request) -> Response:
        if not pool.cancel(request.path_params["ident"]):
            raise Problem(404, "not found", "no such request is being worked on")
        return Response(status_code=204)

    routes = [
        Route("/", root, methods=["GET"]),
        Route("/api", offered, methods=["GET"]),
        Route("/api/requests/{ident}", standing, methods=["GET"]),
        Route("/api/requests/{ident}", cancel, methods=["DELETE"]),
        *(Route(f"/api/{v}", _asking(v, form, pool, limits), methods=["POST"]) for v, form in service.forms.items()),
    ]
    handlers: dict[Any, Any] = {Problem: _problem, HTTPException: _http_problem, Exception: _internal}
    return Starlette(routes=routes, exception_handlers=handlers)


def _policy_of(page: str) -> str:
    """The page's own policy, and what a meta tag cannot say."""
    found = _POLICY.search(page)
    if found is None:
        return HEADERS["Content-Security-Policy"]
    return f"{html.unescape(found[1])}; frame-ancestors 'none'"


def _asking(verb: str, form: Form, pool: Pool, limits: Limits) -> Endpoint:
    async def ask(request: Request) -> Response:
        asked = question(verb, form, await _body(request, limits), limits)
        job = pool.submit(asked.id or str(uuid.uuid4()), asked)
        found = await _outcome(job, request)
        headers = {"Jettison-Exit-Code": str(found.exit_code)}
        return Response(found.text, media_type="application/json", headers=headers)

    return ask


async def _body(request: Request, limits: Limits) -> bytes:
    """A request's body, read no further than is allowed.

    Raises:
        Problem: it is not JSON by its type, too long, or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "unsupported type", "expected Content-Type: application/json")
    long = Problem(413, "too long", f"expected a body of at most {limits.body_bytes} bytes")
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or len(stated) > 20 or int(stated) > limits.body_bytes:
        raise long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body_bytes:
                    raise long
    except TimeoutError:
        raise Problem(408, "too slow", f"the body did not come within {limits.body_seconds:g} seconds") from None
    except ClientDisconnect:
        raise cancelled() from None
    return bytes(body)


async def _outcome(job: Job, request: Request) -> Answer:
    """The job's answer. A client that goes away has cancelled it.

    Raises:
        Problem: what it met instead.
    """
    gone = asyncio.create_task(_disconnected(request))
    try:
        both: set[asyncio.Future[Any]] = {job.outcome, gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:  # the server may be ending, too
        job.finish(cancelled())
        gone.cancel()
    return job.outcome.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _problem(_request: Request, problem: Problem) -> Response:
    headers = problem.headers()
    if problem.status in (408, 413, 415):
        headers["Connection"] = "close"  # what is left of its body is not read
    return Response(json.dumps(problem.document()), problem.status, headers=headers, media_type=MEDIA_TYPE)


def _internal(_request: Request, error: Exception) -> Response:
    """A bug of ours; starlette raises it again, so that the terminal says where."""
    problem = Problem(
        500, "internal error", f"a bug of ours ({type(error).__name__}); the server's terminal says where"
    )
    return Response(json.dumps(problem.document()), problem.status, media_type=MEDIA_TYPE)


def _http_problem(_request: Request, error: HTTPException) -> Response:
    """The router's: no such path, no such method."""
    problem = Problem(
        error.status_code, error.detail.lower(), "GET / and /api, POST /api/VERB, GET or DELETE /api/requests/ID"
    )
    headers = {**problem.headers(), **(error.headers or {})}
    return Response(json.dumps(problem.document()), problem.status, headers=headers, media_type=MEDIA_TYPE)
