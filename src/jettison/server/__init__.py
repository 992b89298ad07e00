"""What `jettison explore --serve` serves: a page on loopback, with the planner behind it.

Starlette and uvicorn are the extra ``serve``, imported when a server starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from jettison.core.errors import UsageError, install
from jettison.core.progress import Progress, silent
from jettison.server.limits import Limits
from jettison.server.listening import ADDRESS, listening
from jettison.server.questions import Service, offer


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
    """Serve a page and the planner on 127.0.0.1 until Ctrl-C.

    Args:
        page: its text; or the models that the explorer is about, whose page a process makes meanwhile.
        service: what may be asked, and who answers.
        port: 0 is a free one.
        started: is told the URL as soon as somebody listens there; requests wait for what is still being loaded.
        progress: is told what is worked out for the page.
        ready: is called when the page is there.

    Raises:
        UsageError: the port cannot be used, the extra is not installed, or a model is none.
    """
    absent = next((name for name in ("uvicorn", "starlette") if find_spec(name) is None), None)
    if absent is not None:
        raise UsageError(f"--serve needs {absent}: {install('serve')}")
    with listening(port) as listener:
        started(f"http://{ADDRESS}:{listener.getsockname()[1]}/")
        from jettison.server.serving import run

        run(
            page,
            listener,
            service=service,
            limits=Limits() if limits is None else limits,
            progress=progress,
            ready=ready,
        )


__all__ = ["Limits", "Service", "offer", "serve_page"]
