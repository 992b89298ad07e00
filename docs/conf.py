"""Sphinx: pages are Markdown; references of commands, schemas and recipes are generated from the code first."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
sys.path.insert(0, str(HERE.parent))

import jettison  # noqa: E402 - the path comes first
from jettison.cli.app import flag_sections  # noqa: E402
from jettison.core.documents import schema_names  # noqa: E402
from jettison.train.recipe import TrainRecipe  # noqa: E402

project = "Jettison"
author = "The Jettison developers"
copyright = f"2026, {author}"
version = release = jettison.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Jettison {release}"
html_static_path = ["_static"]
html_css_files = ["site.css", "rows.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("site.js", "rows.js")]
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


# recipes --------------------------------------------------------------------------------------------------------------


def recipe_page() -> str:
    """A table of keys for each section of a recipe."""
    parts = ["# Every key of a recipe\n", "A recipe of [`jettison train`](../train.md) is TOML with these keys.\n"]
    parts.append(section_of("Top level", TrainRecipe))
    for key, hint in get_type_hints(TrainRecipe).items():
        parts += [section_of(f"[{key}]", kind) for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
    return "\n".join(parts)


NO_DEFAULT = {MISSING: "required", None: ""}


def section_of(title: str, section: Any) -> str:
    """Describe a section, and each of its keys with values, default and meaning."""
    about, _, arguments = inspect.cleandoc(section.__doc__).partition("\n\nArgs:\n")
    meanings = {
        name: " ".join(text.split())
        for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n        .*)*)", arguments, re.MULTILINE)
        for name in names.split(", ")
    }
    hints = get_type_hints(section)
    rows = []
    for one in fields(section):
        values = values_of(hints[one.name])
        if one.default_factory is MISSING and values:
            default = NO_DEFAULT.get(one.default, f"`{toml_of(one.default)}`")
            rows.append(f"| `{one.name}` | {values} | {default} | {meanings.get(one.name, '')} |")
    text = " ".join(about.split()).replace("``", "`")
    table = "| key | values | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows).replace("``", "`")
    return f"## {title}\n\n{text}\n\n{table}\n"


def values_of(hint: Any) -> str:
    """Name a key's values in TOML's terms; "" for a section."""
    if get_origin(hint) is Literal:
        return " or ".join(f"`{toml_of(one)}`" for one in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {values_of(get_args(hint)[0])}s"
    if arguments := get_args(hint):
        return " or ".join(filter(None, map(values_of, arguments)))
    return {int: "integer", float: "number", str: "text", bool: "true or false"}.get(hint, "")


def toml_of(value: Any) -> str:
    """Write a default as TOML has it."""
    return json.dumps(value, default=str)


def write_generated(_app: Any) -> None:
    """Before pages are read."""
    GENERATED.mkdir(exist_ok=True)
    pages = (("commands.md", command_pages()), ("schemas.md", schema_page()), ("recipe.md", recipe_page()))
    for name, text in pages:
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
        if place in match[1]:
            return match[1]
        before = match.string[: match.start()]
        within = before.rfind("(") > before.rfind(")")
        return f"{match[1]}: `{place}`" if within else f"{match[1]} (`{place}`)"

    source[0] = _LINK.sub(shown, source[0])


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx asks for."""
    app.connect("builder-inited", write_generated)
    app.connect("source-read", inside)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
