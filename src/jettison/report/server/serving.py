"""A server on loopback from when its socket listens until Ctrl-C."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any, Final

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.core.progress import Progress
from jettison.report.page import asset
from jettison.report.server.pool import Job, Pool, cancelled, started_process
from jettison.report.server.questions import (
    PROBLEM_TYPE,
    Limits,
    Problem,
    ServedAnswer,
    Service,
    VerbForm,
    offer,
    question,
)


class _Server(uvicorn.Server):
    """uvicorn's, with signals left to us: it would raise them again when it has ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    page: str | Sequence[str],
    listener: socket.socket,
    *,
    service: Service,
    limits: Limits,
    progress: Progress,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM; arguments: `serve_page`'s. Raise `UsageError` for an unknown model."""
    shown, pool = ServedPage(page, progress), Pool(limits, service.answers)

    def crowded() -> bool:
        return len(server.server_state.connections) > limits.connections

    app = application(shown, pool, limits, service)
    guard = RequestGuard(app, port=listener.getsockname()[1], limits=limits, crowded=crowded)
    server = _Server(
        uvicorn.Config(
            guard,
            http=type("Protocol", (BoundedProtocol,), {"limits": limits}),
            h11_max_incomplete_event_size=limits.head_bytes,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(limits.stop_seconds)),
        )
    )
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, ended.set)
        except NotImplementedError:  # Windows: between two events at the latest
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(ended.set))

    async def made() -> None:
        await shown.make(limits, service.answers)
        ready()

    serving = asyncio.create_task(server.serve(sockets=[listener]))
    needed = {asyncio.create_task(pool.start()), asyncio.create_task(made())}
    stopping = asyncio.create_task(ended.wait())
    try:
        left: set[asyncio.Task[object]] = {serving, stopping, *needed}
        while not (serving.done() or stopping.done()):
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done & needed:
                task.result()
    finally:  # work ends at once, so that those who wait for it are told, and then the server
        server.should_exit = True
        for task in (*needed, stopping):
            task.cancel()
        await shown.stop()
        await pool.stop()
        with suppress(asyncio.CancelledError):
            await serving


# The page: made by a process of its own while requests are answered, since it takes a core for seconds ----------------


class ServedPage:
    """A page's text once it is there; before, None, and ``stands`` says what is being done."""

    def __init__(self, page: str | Sequence[str], progress: Progress) -> None:
        """``page``: its text, or the models that it is about. ``progress`` is told what `stands` says."""
        self.text = page if isinstance(page, str) else None
        self.stands, self.began, self._progress = "starting", time.monotonic(), progress
        self._models = [] if isinstance(page, str) else list(page)
        self._process: asyncio.subprocess.Process | None = None

    def say(self, text: str) -> None:
        """Note what is being done."""
        self.stands = text
        self._progress(text)

    async def make(self, limits: Limits, answers: str) -> None:
        """Have it made.

        Raises:
            UsageError: a model that is none.
            RuntimeError: the process ended instead.
        """
        if self.text is not None:
            return
        self.say("loading the planner")
        self._process = process = await started_process(
            ("page", answers, str(limits.answer_bytes), *self._models), limits.answer_bytes
        )
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            if "refused" in said:
                raise UsageError(said["refused"])
            self.text = said.get("page")
            if self.text is not None:
                return
            self.say(said["progress"])
        raise RuntimeError("the process that makes the page ended without one (its own words are above)")

    async def stop(self) -> None:
        """End its process and those that this one has started."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        await self._process.wait()


# Who may ask: only pages of this server, and programs of this machine -------------------------------------------------
#
# NOTE [ What reaches loopback ]
# Any web page in a browser on this machine can send requests to 127.0.0.1, and after it has moved its own name there
# (DNS rebinding) can read the answers. Therefore a request has to name this server as its Host, by address or as
# localhost and with its port; its Origin, where there is one, has to be this server's; and questions have to be
# application/json, which a foreign page cannot send unasked. Programs send no Origin, and are let through: they could
# run the command line, too.


HEADERS: Final[Mapping[str, str]] = read_table(Path(__file__).with_name("headers.toml"))
"""Headers of every answer; the page has a policy of its own."""


class RequestGuard:
    """Checks each request's Host and Origin, and sets headers."""

    def __init__(self, app: ASGIApp, *, port: int, limits: Limits, crowded: Callable[[], bool]) -> None:
        """``port`` is where the server listens; ``crowded`` says whether it has more connections than it may."""
        self.app = app
        self.limits = limits
        self.crowded = crowded
        self.hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        self.origins = frozenset(f"http://{host}" for host in self.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with a problem."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets here
        sending = self._sending(send)
        problem = self._problem(scope)
        if problem is None:
            await self.app(scope, receive, sending)
        else:
            await _problem(None, problem, CLOSE)(scope, receive, sending)

    def _problem(self, scope: Scope) -> Problem | None:
        if self.crowded():
            detail = f"{self.limits.connections} connections are open, as many as may; close some, or ask again later"
            return Problem(503, "too many connections", detail, retry_seconds=1)
        given = Headers(scope=scope)
        hosts, origins = given.getlist("host"), given.getlist("origin")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return Problem(421, "misdirected", f"expected the host {' or '.join(sorted(self.hosts))}, as it is printed")
        if any(origin not in self.origins for origin in origins) or len(origins) > 1:
            return Problem(403, "foreign origin", "another site's page may not ask this server")
        foreign = set(given.getlist("sec-fetch-site")) - {"same-origin", "none"}
        if foreign and scope["path"] != "/":  # a link to the page is a link
            return Problem(403, "foreign origin", "another site's page may not ask this server")
        return None

    def _sending(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *(h for h in more if h[0] not in there)]}
            await send(message)

        return sending


# The routes: the page, what can be asked, the questions, and how one of them stands -----------------------------------


Endpoint = Callable[[Request], Awaitable[Response]]
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')


def application(page: ServedPage, pool: Pool, limits: Limits, service: Service) -> Starlette:
    """Routes: ``page`` at the root, and the service's questions for the pool."""

    async def root(_request: Request) -> Response:
        if page.text is None:
            stands, seconds = html.escape(page.stands.capitalize()), f"{time.monotonic() - page.began:.0f}"
            waiting = Template(asset("waiting.html")).substitute(stands=stands, seconds=seconds)
            return Response(waiting, 503, media_type="text/html", headers={"Retry-After": "1"})
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


def _asking(verb: str, form: VerbForm, pool: Pool, limits: Limits) -> Endpoint:
    async def ask(request: Request) -> Response:
        asked = question(verb, form, await _body(request, limits), limits)
        job = pool.submit(asked.id or str(uuid.uuid4()), asked)
        found = await _outcome(job, request)
        headers = {"Jettison-Exit-Code": str(found.exit_code)}
        return Response(found.text, media_type="application/json", headers=headers)

    return ask


async def _body(request: Request, limits: Limits) -> bytes:
    """A request's body, read no further than is allowed. Raise `Problem` if it is not JSON by its type, or too long."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "unsupported type", "expected Content-Type: application/json")
    long = Problem(413, "too long", f"expected a body of at most {limits.body_bytes} bytes")
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or len(stated) > 20 or int(stated) > limits.body_bytes:
        raise long
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limits.body_bytes:
                raise long
    except ClientDisconnect:
        raise cancelled() from None
    return bytes(body)


async def _outcome(job: Job, request: Request) -> ServedAnswer:
    """The job's answer, or `Problem`. A client that goes away has cancelled it."""
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


CLOSE: Final = {"Connection": "close"}
"""Header of answers that leave bytes of the client unread."""


def _problem(_: Request | None, problem: Problem, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    own = {**problem.headers(), **headers, **(CLOSE if problem.status in (413, 415) else {})}
    return Response(json.dumps(problem.document()), problem.status, headers=own, media_type=PROBLEM_TYPE)


def _internal(request: Request, error: Exception) -> Response:
    """A bug of ours; starlette raises it again, so that the terminal says where."""
    detail = f"a bug of ours ({type(error).__name__}); the server's terminal says where"
    return _problem(request, Problem(500, "internal error", detail))


def _http_problem(request: Request, error: HTTPException) -> Response:
    """The router's: no such path, no such method."""
    detail = "GET / and /api, POST /api/VERB, GET or DELETE /api/requests/ID"
    return _problem(request, Problem(error.status_code, error.detail.lower(), detail), error.headers or {})


# uvicorn's HTTP/1.1, with a bound on the head of a request, and problem documents where its bytes are no request ------


class BoundedProtocol(H11Protocol):
    """A connection that refuses a head of more than ``head_bytes``, which uvicorn bounds only until its end comes."""

    limits: Limits

    def handle_events(self) -> None:
        """Look at the length of a head before it is read."""
        if self.conn.their_state is h11.IDLE and _head_bytes(self.conn.trailing_data[0]) > self.limits.head_bytes:
            self._refuse(Problem(431, "head too long", f"expected at most {self.limits.head_bytes} bytes of headers"))
            return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        detail = (
            f"{msg.rstrip('.')}: expected HTTP/1.1, such as GET / or POST /api/VERB with Content-Type: application/json"
        )
        self._refuse(Problem(400, "bad request", detail))

    def _refuse(self, problem: Problem) -> None:
        made = _problem(None, problem, {**HEADERS, **CLOSE})
        reason = HTTPStatus(problem.status).phrase.encode()
        head = h11.Response(status_code=problem.status, headers=made.raw_headers, reason=reason)
        answer = [head, h11.Data(data=bytes(made.body))]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (*answer, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _head_bytes(pending: bytes) -> int:
    """Bytes up to the empty line that ends a head, or of what has come of it."""
    ends = [at + len(end) for end in (b"\r\n\r\n", b"\n\n") if (at := pending.find(end)) >= 0]
    return min(ends, default=len(pending))
