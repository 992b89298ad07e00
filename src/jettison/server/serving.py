"""A server on loopback from when its port is printed until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from jettison.errors import UsageError
from jettison.server.app import application
from jettison.server.guard import Guard
from jettison.server.limits import Limits
from jettison.server.patient import PatientProtocol
from jettison.server.pool import Pool

ADDRESS = "127.0.0.1"
HIGHEST_PORT = 65535


def run(page: str, *, port: int, limits: Limits, started: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``started`` is told the URL when questions can be asked.

    Raises:
        UsageError: the port is taken, or is none.
    """
    with _listening(port) as listener:
        asyncio.run(_serve(page, listener, limits, started))


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket that listens on loopback alone, on this port or, for 0, on a free one."""
    if not 0 <= port <= HIGHEST_PORT:
        raise UsageError(f"got --port {port}; expected 1 to {HIGHEST_PORT}, or none for a free one")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # a port that was just given up; one that somebody listens on stays refused
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
            listener.listen(1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"port {port} cannot be used ({reason}); give another --port, or none") from None
        yield listener
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn's, with signals left to us: it would raise them again when it has ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(page: str, listener: socket.socket, limits: Limits, started: Callable[[str], None]) -> None:
    port = listener.getsockname()[1]
    pool = Pool(limits)
    protocol = type("Protocol", (PatientProtocol,), {"head_seconds": limits.head_seconds})
    config = uvicorn.Config(
        Guard(application(page, pool, limits), port=port, limits=limits),
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=max(1, round(limits.stop_seconds)),
    )
    server = _Server(config)
    ended = asyncio.Event()
    _on_signals(ended)
    stopping = asyncio.create_task(_stop(ended, server, pool))
    try:
        starting = asyncio.create_task(pool.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            started(f"http://{ADDRESS}:{port}/")
            await server.serve(sockets=[listener])
        else:
            starting.cancel()
    finally:
        stopping.cancel()
        await pool.stop()


async def _stop(ended: asyncio.Event, server: uvicorn.Server, pool: Pool) -> None:
    """When a signal came: end work at once, so that those who wait for it are told, and then the server."""
    await ended.wait()
    server.should_exit = True
    await pool.stop()


def _on_signals(ended: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, ended.set)
        except NotImplementedError:  # Windows: between two events at the latest
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(ended.set))
