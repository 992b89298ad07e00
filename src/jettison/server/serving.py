"""A server on loopback from when its socket listens until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import uvicorn
from starlette.applications import Starlette

from jettison.progress import Progress
from jettison.server.app import application
from jettison.server.guard import Guard
from jettison.server.limits import Limits
from jettison.server.page import ServedPage
from jettison.server.patient import PatientProtocol
from jettison.server.pool import Pool
from jettison.server.questions import Service


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
