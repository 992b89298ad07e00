"""One self-contained HTML document: kit, panels and data in one file; and its figures, drawn by a headless browser.

NOTE [ What a page may do ]
A page is opened from a disk, by people who were handed it, and shows names out of files that somebody else wrote. Its
policy (CSP) admits the scripts that are in it, by their digests, and nothing from elsewhere: no request leaves it. Data
lie in script elements of type application/json, whose text cannot end the element, and reach the page as text nodes;
large ones are compressed (application/json+deflate, in base64), as the libraries are: ``kit/base.js`` puts them into
script elements, which the policy admits by the digests of their texts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

from jettison import __version__
from jettison.core.errors import UsageError
from jettison.core.files import read_table, write_whole, writing

VENDOR: Final = ("vendor/d3.min.js", "vendor/plot.min.js")
INFLATE: Final = "vendor/pako_inflate.min.js"
LIBRARY: Final = "application/javascript+deflate"
PLAIN_CHARACTERS: Final = 32_000
"""Data that may stand in a page as they are; more are compressed, by ten and more where they repeat themselves."""
KIT: Final = tuple(f"kit/{part}.js" for part in ("base", "state", "controls", "marks", "plot", "save", "figure"))
LAST: Final = ("kit/saved.js",)
STYLES: Final = ("kit/kit.css",)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]*")
_CODE: Final = re.compile(r"`([^`]+)`")
_ENDS_SCRIPT: Final = re.compile(r"</script|<!--|<script", re.IGNORECASE)


@cache
def asset(name: str) -> str:
    """The text of a file in ``report/assets``."""
    return files("jettison.report").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


def page(
    title: str,
    *,
    intro: str,
    scripts: Iterable[str],
    data: Mapping[str, Any],
    styles: Iterable[str] = (),
    served: bool = False,
) -> str:
    """An HTML document that works offline.

    Args:
        title: of the document, as its heading too.
        intro: text below it, with `code`; an empty line begins a new paragraph.
        scripts: files in ``report/assets``, run in this order after d3, Plot and the kit, before `LAST`.
        data: what ``J.data(name)`` gives the scripts; JSON-able, without infinities and NaN.
        styles: files in ``report/assets``, after the kit's.
        served: by a server of ours, whose own origin the page may ask.
    """
    libraries, code = ([*map(_script_text, names)] for names in (VENDOR, (INFLATE, *KIT, *scripts, *LAST)))
    blocks = [f'<script type="{LIBRARY}">{_deflated(text)}</script>\n' for text in libraries]
    blocks += [*_data_blocks(data), *(f"<script>{text}</script>\n" for text in code)]
    policy = html.escape(_policy([*libraries, *code], served=served))
    css = "\n".join(asset(name) for name in (*STYLES, *styles))
    shown = _CODE.sub(r"<code>\1</code>", html.escape(intro))
    paragraphs = "".join(f"<p>{text.strip()}</p>\n" for text in shown.split("\n\n") if text.strip())
    texts = {"title": html.escape(title), "version": html.escape(__version__), "policy": policy, "css": css}
    return Template(asset("page.html")).substitute(texts, paragraphs=paragraphs, blocks="".join(blocks))


def _data_blocks(data: Mapping[str, Any]) -> Iterator[str]:
    """An element for each."""
    for name, value in data.items():
        assert _NAME.fullmatch(name), f"{name!r} cannot be a name of data: small letters, digits, - and _"
        kind, text = "json", json_for_html(value)
        if len(text) > PLAIN_CHARACTERS:
            kind, text = "json+deflate", _deflated(text)
        yield f'<script type="application/{kind}" id="data-{name}">{text}</script>\n'


def _deflated(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def json_for_html(value: Any) -> str:
    """JSON that can stand inside of a script element: nothing in it looks like markup."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _script_text(name: str) -> str:
    text = asset(name)
    assert not _ENDS_SCRIPT.search(text), f"{name} holds what ends or nests a script element"
    return text


def _policy(code: Iterable[str], *, served: bool) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code)
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


_BROWSERS: Final[Mapping[str, list[str]]] = read_table(Path(__file__).with_name("browsers.toml"))
_SECONDS: Final = 180
_TRIES: Final = 3
_FIGURES: Final = re.compile(r'<pre id="saved-figures">([A-Za-z0-9+/=]*)</pre>')
_FIGURE_NAME: Final = re.compile(r"[a-z0-9-]{1,40}")


def find_browser() -> str | None:
    """Its program: the first of the usual names that there is."""
    return next((path for name in _BROWSERS["programs"] if (path := shutil.which(name))), None)


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
    with writing(folder, "--figures: "):
        folder.mkdir(parents=True, exist_ok=True)
        found = {folder / name: content for name, content in _drawn(program, html)}
        for path, content in found.items():
            write_whole(path, content)
    return list(found)


def _drawn(program: str, html: str) -> Iterator[tuple[str, str | bytes]]:
    """Names and contents of files."""
    tries = (_FIGURES.search(_dumped(program, html)) for _ in range(_TRIES))
    found = next(filter(None, tries), None)  # on a busy machine it may leave before the last picture is there
    if found is None:
        raise UsageError(f"--figures: {program} did not draw the page; open it, and use the buttons under each figure")
    for figure in json.loads(base64.b64decode(found[1])):
        if _FIGURE_NAME.fullmatch(figure["id"]):
            yield f"{figure['id']}.svg", figure["svg"]
            yield f"{figure['id']}.png", base64.b64decode(figure["png"])


def _dumped(program: str, html: str) -> str:
    with tempfile.TemporaryDirectory(prefix="jettison-figures-", ignore_cleanup_errors=True) as name:
        page = Path(name) / "page.html"
        page.write_text(html, encoding="utf-8")
        root = ["--no-sandbox"] if sys.platform != "win32" and os.geteuid() == 0 else []  # it refuses to start else
        arguments = [
            program,
            *_BROWSERS["flags"],
            *root,
            f"--user-data-dir={name}/profile",
            f"{page.as_uri()}#save=figures",
        ]
        try:
            done = subprocess.run(arguments, capture_output=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UsageError(f"--figures: {program} did not finish within {_SECONDS} s") from None
        return done.stdout.decode("utf-8", errors="replace")
