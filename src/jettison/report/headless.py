"""The figures of a page as files, drawn by a headless Chrome or Chromium that is on this machine.

The page draws them itself and leaves them, as SVG and PNG, in its own text; the browser is asked for that text. It
runs with a profile that is gone afterwards, and is not asked for anything else.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.files import write_whole

NAMES: Final = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chrome-headless-shell",
    "microsoft-edge",
    "msedge",
)
_MAC: Final = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
)
_FLAGS: Final = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1120,900",
    "--virtual-time-budget=20000",
    "--dump-dom",
)
_SECONDS: Final = 180
_TRIES: Final = 3
_FIGURES: Final = re.compile(r'<pre id="saved-figures">([A-Za-z0-9+/=]*)</pre>')
_NAME: Final = re.compile(r"[a-z0-9-]{1,40}")


def find_browser() -> str | None:
    """Its program: the first of the usual names that there is."""
    return next((path for name in (*NAMES, *_MAC) if (path := shutil.which(name))), None)


def require_browser() -> str:
    """The same, or what to do about it. Raise `UsageError` if there is none."""
    program = find_browser()
    if program is None:
        raise UsageError(
            "--figures needs Chrome, Chromium or Edge on the PATH, and found none; install one, or open the page and "
            "use the SVG and PNG buttons under each figure"
        )
    return program


def save_figures(html: str, folder: Path) -> list[Path]:
    """Each figure of the page as ID.svg and ID.png. `UsageError` without a browser, a drawn page, or a folder."""
    program = require_browser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {folder / name: content for name, content in _drawn(program, html)}
        for path, content in found.items():
            write_whole(path, content)
    except OSError as error:
        raise UsageError(f"--figures: cannot write to {folder}: {error.strerror or error}") from error
    return list(found)


def _drawn(program: str, html: str) -> Iterator[tuple[str, str | bytes]]:
    """Names and contents of files."""
    tries = (_FIGURES.search(_dumped(program, html)) for _ in range(_TRIES))
    found = next(filter(None, tries), None)  # on a busy machine it may leave before the last picture is there
    if found is None:
        raise UsageError(f"--figures: {program} did not draw the page; open it, and use the buttons under each figure")
    for figure in json.loads(base64.b64decode(found[1])):
        if _NAME.fullmatch(figure["id"]):
            yield f"{figure['id']}.svg", figure["svg"]
            yield f"{figure['id']}.png", base64.b64decode(figure["png"])


def _dumped(program: str, html: str) -> str:
    with tempfile.TemporaryDirectory(prefix="jettison-figures-", ignore_cleanup_errors=True) as name:
        page = Path(name) / "page.html"
        page.write_text(html, encoding="utf-8")
        root = ["--no-sandbox"] if sys.platform != "win32" and os.geteuid() == 0 else []  # it refuses to start else
        arguments = [program, *_FLAGS, *root, f"--user-data-dir={name}/profile", f"{page.as_uri()}#save=figures"]
        try:
            done = subprocess.run(arguments, capture_output=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UsageError(f"--figures: {program} did not finish within {_SECONDS} s") from None
        return done.stdout.decode("utf-8", errors="replace")
