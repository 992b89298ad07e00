"""`explore`: one page of interactive figures about models, written to a file or served."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

from jettison.cli.app import ON, Figures, Force, option, refuse_to_overwrite, verb
from jettison.core.errors import UsageError
from jettison.core.files import write_whole
from jettison.core.process import cores
from jettison.core.units import format_bytes
from jettison.report.console import hint, progress
from jettison.report.explorer import explorer_page
from jettison.report.explorer_models import page_models
from jettison.report.page import require_browser, save_figures


@verb("explore")
def command(
    models: Annotated[
        tuple[str, ...],
        option("Model", "Presets, config.json files or folders [default: published ones].", show_default=False),
    ] = (),
    /,
    *,
    out: Annotated[Path | None, option("Output", "File of the page [default: explore.html].")] = None,
    figures: Figures = None,
    force: Force = False,
    open_page: Annotated[bool, option("Output", "Open the page in the browser.", name="--open", **ON)] = False,
    serve: Annotated[
        bool, option("Output", "Serve the page here, and answer its plans, ledgers, estimates and searches.", **ON)
    ] = False,
    port: Annotated[int | None, option("Output", "With --serve: port of 127.0.0.1 [default: a free one].")] = None,
) -> None:
    """Write one HTML page of interactive figures: saved tensors of a layer, layouts, recompute. It works offline."""
    if serve:
        if figures is not None:
            raise UsageError(f"got --figures {figures} and --serve; figures are of a page in a file: drop one")
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
    """Until Ctrl-C; the URL is what is printed. Raise `UsageError` if a file was named as well, the port cannot be
    used, or the extra is not installed.
    """
    if out is not None:
        raise UsageError(f"got --out {out} and --serve; a page that is served is no file: drop one")
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
