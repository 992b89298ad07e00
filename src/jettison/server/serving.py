"""A server on loopback from when its socket listens until Ctrl-C."""

from __future__ import annotations

import asyncio
import html
import json
import re
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from jettison.core.progress import Progress
from jettison.server.guard import HEADERS, Guard, as_response
from jettison.server.limits import Limits
from jettison.server.page import WAITING, ServedPage
from jettison.server.pool import Job, Pool, cancelled
from jettison.server.problems import MEDIA_TYPE, Problem
from jettison.server.questions import Answer, Form, Service, offer, question


def run(
    page: str | Sequence[str],
    listener: socket.socket,
    *,
    service: Service,
    limits: Limits,
    progress: Progress,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        page: its text, or the models that it is about.
        progress: is told what is worked out for the page.
        ready: is called when it is there.

    Raises:
        UsageError: a model that is none.
    """
    asyncio.run(_serve(ServedPage(page), listener, service, limits, progress, ready))


class _Server(uvicorn.Server):
    """uvicorn's, with signals left to us: it would raise them again when it has ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    page: ServedPage,
    listener: socket.socket,
    service: Service,
    limits: Limits,
    progress: Progress,
    ready: Callable[[], None],
) -> None:
    pool = Pool(limits, service.answers)
    app = application(page, pool, limits, service)
    server = _Server(_config(app, listener, limits, lambda: len(server.server_state.connections)))
    ended = asyncio.Event()
    _on_signals(ended)

    async def made() -> None:
        await page.make(limits, service.answers, progress)
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
        await page.stop()
        await pool.stop()
        with suppress(asyncio.CancelledError):
            await serving


def _config(app: Starlette, listener: socket.socket, limits: Limits, connections: Callable[[], int]) -> uvicorn.Config:
    def crowded() -> bool:
        return connections() > limits.connections

    return uvicorn.Config(
        Guard(app, port=listener.getsockname()[1], limits=limits, crowded=crowded),
        http=type("Protocol", (PatientProtocol,), {"limits": limits}),
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


def _on_signals(ended: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, ended.set)
        except NotImplementedError:  # Windows: between two events at the latest
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(ended.set))


# The routes: the page, what can be asked, the questions, and how one of them stands -----------------------------------


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


# patient --------------------------------------------------------------------------------------------------------------
#
# uvicorn's HTTP/1.1, with bounds on the head of a request, and problem documents where its bytes are no request


class PatientProtocol(H11Protocol):
    """A connection on which no whole head comes within ``head_seconds`` is closed, whether new or kept; a head of more
    than ``head_bytes`` is refused.

    uvicorn itself bounds the silence of a kept connection, but not a head that comes in drops; and the size of a head
    only until its end has come.
    """

    limits: Limits

    def __init__(self, *arguments: Any, **more: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*arguments, **more)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Part of a head begins the wait, where a connection was kept; a whole one ends it."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_came()
        elif self._head_timer is None:
            self._await_head()

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

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._head_came()
        super().connection_lost(exc)

    def _refuse(self, problem: Problem) -> None:
        headers, body = as_response(problem)
        headers += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        reason = HTTPStatus(problem.status).phrase.encode()
        answer = [h11.Response(status_code=problem.status, headers=headers, reason=reason), h11.Data(data=body)]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (*answer, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_seconds, self._give_up)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


def _head_bytes(pending: bytes) -> int:
    """Bytes up to the empty line that ends a head, or of what has come of it."""
    ends = [at + len(end) for end in (b"\r\n\r\n", b"\n\n") if (at := pending.find(end)) >= 0]
    return min(ends, default=len(pending))
