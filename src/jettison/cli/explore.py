"""`explore`: one page of interactive figures about models, written to a file or served."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jettison.cli.app import Figures, Force, Switch, refuse_to_overwrite
from jettison.core.errors import UsageError
from jettison.core.files import write_whole
from jettison.core.process import cores
from jettison.core.units import format_bytes
from jettison.report.console import hint, progress
from jettison.report.explorer import explorer_page
from jettison.report.explorer_models import page_models
from jettison.report.headless import require_browser, save_figures


def command(
    models: Annotated[
        tuple[str, ...], Parameter(help="Presets such as llama3-8b, config.json files or their folders.")
    ] = (),
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The page's file: explore.html.")] = None,
    figures: Figures = None,
    force: Force = False,
    open_page: Annotated[Switch, Parameter(name="--open", help="Show it in the browser.")] = False,
    serve: Annotated[
        Switch, Parameter(help="Serve it on this machine, and answer plans, ledgers, estimates and searches.")
    ] = False,
    port: Annotated[int | None, Parameter(help="Of 127.0.0.1, with --serve: a free one.")] = None,
) -> None:
    """Write one page of interactive figures: what a layer keeps, and the effect of layouts and recompute.

    The page works offline, from a disk. Without MODEL it is about the published GPTs of 22B to 1T and Llama 3.
    """
    if serve:
        if figures is not None:
            raise UsageError(f"got --figures {figures} and --serve; figures are of a page in a file: leave one away")
        _serve(models, out=out, port=port, show=open_page)
        return
    if port is not None:
        raise UsageError(f"got --port {port} without --serve; give both, or neither")
    out = Path("explore.html") if out is None else out
    refuse_to_overwrite(out, force=force)
    if figures is not None:
        require_browser()
    with progress() as say:
        page = explorer_page(models, jobs=cores(), progress=say)
    write_whole(out, page)
    hint(f"wrote {out} ({format_bytes(len(page.encode()))})")
    if figures is not None:
        hint(f"wrote {len(save_figures(page, figures))} files to {figures}")
    if open_page:
        webbrowser.open(out.resolve().as_uri())


def _serve(models: tuple[str, ...], *, out: Path | None, port: int | None, show: bool) -> None:
    """Until Ctrl-C; the URL is what is printed.

    Raises:
        UsageError: a file was named as well, the port cannot be used, or the extra is not installed.
    """
    if out is not None:
        raise UsageError(f"got --out {out} and --serve; a page that is served is no file: leave one away")
    from jettison.cli.served import SERVICE
    from jettison.report.server import serve_page

    page_models(models)  # what is no model is refused before anything is served
    with ExitStack() as spinner:

        def started(url: str) -> None:
            print(url, flush=True)
            hint("Ctrl-C ends it")
            if show:
                webbrowser.open(url)

        def say(text: str) -> None:
            if not spinning:
                spinning.append(spinner.enter_context(progress()))
            spinning[0](text)

        spinning: list[Callable[[str], None]] = []
        with suppress(KeyboardInterrupt):  # that is how it ends; the server itself has a handler once it is loaded
            serve_page(
                models,
                service=SERVICE,
                port=0 if port is None else port,
                started=started,
                progress=say,
                ready=spinner.close,
            )
