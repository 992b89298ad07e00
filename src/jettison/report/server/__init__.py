"""The local server of `jettison explore --serve`: a page on loopback, which answers with the planner.

Starlette and uvicorn are the extra ``serve``, imported when a server starts.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from jettison.core.errors import UsageError, install
from jettison.core.progress import Progress, silent
from jettison.report.server.questions import Limits, Service, offer

ADDRESS = "127.0.0.1"
HIGHEST_PORT = 65535


def serve_page(
    page: str | Sequence[str],
    *,
    service: Service,
    port: int,
    started: Callable[[str], None],
    limits: Limits | None = None,
    progress: Progress = silent,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve a page and the planner on 127.0.0.1 until Ctrl-C. Raise `UsageError` if the port cannot be used, the extra
    is not installed, or a model is unknown.

    Args:
        page: its text; or the models that the explorer is about, whose page a process makes meanwhile.
        service: what may be asked, and who answers.
        port: 0 is a free one.
        started: called with the URL once the server listens; requests wait until everything is loaded.
        progress: is told what is worked out for the page.
        ready: is called when the page is there.
    """
    absent = next((name for name in ("uvicorn", "starlette") if find_spec(name) is None), None)
    if absent is not None:
        raise UsageError(f"--serve needs {absent}: {install('serve')}")
    with _listening(port) as listener:
        started(f"http://{ADDRESS}:{listener.getsockname()[1]}/")
        from jettison.report.server.serving import serve

        bounds = limits or Limits()
        asyncio.run(serve(page, listener, service=service, limits=bounds, progress=progress, ready=ready))


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """Listen on loopback alone, before anything else of the server is loaded."""
    if not 0 <= port <= HIGHEST_PORT:
        raise UsageError(f"got --port {port}; expected 1 to {HIGHEST_PORT}, or none for a free one")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        if os.name == "posix":  # a port that was just given up; one that somebody listens on stays refused
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
            listener.listen(1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"port {port} cannot be used ({reason}); give another --port, or none") from None
        yield listener


__all__ = ["Limits", "Service", "offer", "serve_page"]
