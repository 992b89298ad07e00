"""What `jettison explore --serve` serves: a page on loopback, with the planner behind it.

Starlette and uvicorn are the extra ``serve``, imported when a server starts.
"""

from __future__ import annotations

from collections.abc import Callable

from jettison.errors import UsageError
from jettison.extras import install
from jettison.server.limits import Limits
from jettison.server.offer import offer


def serve_page(page: str, *, port: int, started: Callable[[str], None], limits: Limits | None = None) -> None:
    """Serve ``page`` and the planner on 127.0.0.1 until Ctrl-C; ``port`` 0 is a free one.

    Raises:
        UsageError: the port cannot be used, or the extra is not installed.
    """
    try:
        from jettison.server.serving import run
    except ImportError as error:
        raise UsageError(f"--serve needs {error.name}: {install('serve')}") from None
    run(page, port=port, limits=Limits() if limits is None else limits, started=started)


__all__ = ["Limits", "offer", "serve_page"]
