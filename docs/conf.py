"""Sphinx: pages are Markdown, the command line and the schemas are written out of the code before they are read."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
sys.path.insert(0, str(HERE.parent))

import jettison  # noqa: E402 - the path comes first
from jettison.cli.app import flag_sections  # noqa: E402
from jettison.report.schemas import schema_names  # noqa: E402

project = "Jettison"
author = "The Jettison developers"
copyright = f"2026, {author}"
version = release = jettison.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Jettison {release}"
html_static_path = ["_static"]
html_css_files = ["site.css", "rows.css"]
html_js_files = [("rows.js", {"defer": "defer"})]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = [name for name in ("lightning",) if importlib.util.find_spec(name) is None]
"""Other people's trainers are optional; their pages are not."""
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [
    (title, "params_style")
    for title in {
        title
        for request in (jettison.RunRequest, jettison.SearchRequest)
        for owner in request.__mro__
        for _, (title, _) in flag_sections(owner.__doc__ or "")
    }
    if title != "Args"
]
"""Groups of flags in their requests' docstrings."""
default_role = "code"
"""Docstrings say `name` of what is code; not all of it is a page."""
suppress_warnings = ["misc.highlighting_failure"]
"""Commands' output is shown as a console's, with arrows and lines that no lexer knows."""
GENERATED = HERE / "generated"


# the command line -----------------------------------------------------------------------------------------------------


def help_of(*words: str) -> str:
    """Text of ``jettison VERB --help-all``, without frames."""
    from jettison.cli.main import run

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run([*words, "--help-all"])
    return "\n".join(line.strip("│╭╮╰╯─").rstrip() for line in out.getvalue().splitlines()).strip()


def command_pages() -> str:
    """One section a verb."""
    from jettison.cli.main import app

    verbs = sorted(name for name in app if not name.startswith("-"))
    parts = ["# Every verb and flag\n", "Each verb's `--help-all`; `--help` shows the usual flags.\n"]
    for verb in verbs:
        parts.append(f"## jettison {verb}\n\n```text\n{help_of(verb)}\n```\n")
    return "\n".join(parts)


# schemas --------------------------------------------------------------------------------------------------------------


SCHEMAS_SAY = """
`--format json` prints one document, which names its schema. It has all keys of that schema, whatever was asked: what
does not apply is null. Within a version keys are added, and never renamed. Where something goes wrong the document is
a `jettison.error/1`.

Each schema is published as [JSON Schema](https://json-schema.org/), which is generated from the code:
"""


def schema_page() -> str:
    """A table of keys for each schema."""
    parts = ["# JSON documents\n", SCHEMAS_SAY]
    for name in schema_names():
        file = f"{name.replace('/', '-')}.json"
        schema = json.loads((HERE / "schemas" / file).read_text(encoding="utf-8"))
        keys = schema["properties"].items()
        rows = [f"| `{key}` | {kind_of(value)} |" for key, value in keys]
        about = schema["description"].replace("``", "`")
        link = f"{{download}}`{file} <../schemas/{file}>`"
        parts.append(f"## {name}\n\n{about} ({link})\n\n| key | value |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def kind_of(value: dict[str, Any]) -> str:
    """A type in words."""
    if "anyOf" in value:
        return " or ".join(kind_of(one) for one in value["anyOf"])
    if "$ref" in value:
        return f"`{value['$ref'].rsplit('/', 1)[1]}`"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return " or ".join(f"`{one}`" for one in value["enum"])
    kind = value.get("type", "anything")
    if kind == "array":
        return f"list of {kind_of(value['items'])}"
    if kind == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"object of {kind_of(value['additionalProperties'])}"
    return str(kind)


def write_generated(_app: Any) -> None:
    """Before pages are read."""
    GENERATED.mkdir(exist_ok=True)
    for name, text in (("commands.md", command_pages()), ("schemas.md", schema_page())):
        path = GENERATED / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


# links that leave docs/ -----------------------------------------------------------------------------------------------

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*|[a-z]+/)\)")


def inside(_app: Any, name: str, source: list[str]) -> None:
    """A link to a file of the repository that is no page is its name."""
    page = HERE / f"{name}.md"

    def shown(match: re.Match[str]) -> str:
        path, _, _place = match[2].partition("#")
        target = (page.parent / path).resolve()
        if target.is_relative_to(HERE) and target.is_file() and target.suffix in (".md", ".png", ".svg"):
            return match[0]
        place = str(target.relative_to(HERE.parent)) if target.is_relative_to(HERE.parent) else match[2]
        return match[1] if place in match[1] else f"{match[1]} (`{place}`)"

    source[0] = _LINK.sub(shown, source[0])


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx asks for."""
    app.connect("builder-inited", write_generated)
    app.connect("source-read", inside)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
