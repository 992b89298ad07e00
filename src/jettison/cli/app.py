"""The application, parameters that several verbs have, and how a verb's result reaches the reader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from jettison import __version__
from jettison.core.errors import JettisonError, UsageError
from jettison.core.files import write_whole
from jettison.core.parse_units import Tokens
from jettison.predict.run_fields import CommonRequest
from jettison.report.console import hint, json_text, show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jettison.frameworks.run_file import RunFile

Form = Literal["human", "json"]
Budget = Annotated[str | None, Parameter(help="Peak bytes of a training step, with a unit: 20GiB, 500MB, 123456B.")]
Model = Annotated[
    str | None, Parameter(help="A preset such as llama3-8b, a config.json or its folder, or module:factory.")
]
Seq = Annotated[Tokens | None, Parameter(help="Tokens, such as 8k, for a config: 2048 or as many as it has.")]
MicroBatch = Annotated[int | None, Parameter(help="Sequences or images in a micro-batch, for a config: 1.")]
Precision = Annotated[Literal["fp32", "bf16"] | None, Parameter(help="Of weights and activations, for a config.")]
Attention = Annotated[Literal["eager", "sdpa", "flash"] | None, Parameter(help="Attention kernels, for a config.")]
Out = Annotated[Path | None, Parameter(help="Write the JSON document to this file as well.")]
Force = Annotated[bool, Parameter(negative="", show_default=False, help="Replace the file of --out.")]
Figures = Annotated[
    Path | None, Parameter(help="Folder for each figure as SVG and PNG (needs Chrome, Chromium or Edge).")
]
Format = Annotated[Form, Parameter(name="--format", help="A table for people, or one JSON document.")]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
"""A flag that is given or not."""
RunTokens = Annotated[float | None, Parameter(help="Tokens to train on, such as 1e12: says how many days.")]
Price = Annotated[float | None, Parameter(help="With --tokens: of one GPU, to say what they cost.")]
Flattened = Parameter(name="*")
"""Of a dataclass: each of its fields is a flag."""
LOCAL: Final[Mapping[str, bool]] = {"local": True}
"""Metadata of a flag that names a file or says how this process works: a server is not asked it."""

app = App(
    name="jettison",
    version=__version__,
    help="Train under a byte budget: decide tensor by tensor what to keep or recompute, and prove it.",
    suppress_keyboard_interrupt=False,
)

ERROR_SCHEMA: Final = "jettison.error/1"


class Answered(Exception):
    """The document on stdout says it already: what is left is a line on stderr and the exit code."""

    def __init__(self, error: JettisonError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def answered() -> Iterator[None]:
    """Around what judges a document that has been delivered.

    Raises:
        Answered: it was judged to be no good.
    """
    try:
        yield
    except JettisonError as error:
        raise Answered(error) from error


def error_document(
    arguments: Sequence[str], *, kind: str, message: str, exit_code: int, details: dict[str, Any]
) -> dict[str, Any]:
    """In the place of the document that was asked for; ``details`` are the numbers that the message has in words."""
    return {
        "schema": ERROR_SCHEMA,
        "error": kind,
        "message": message,
        "exit_code": exit_code,
        "details": details,
        "request": {"arguments": list(arguments)},
    }


def refuse_to_overwrite(out: Path | None, *, force: bool) -> None:
    """Before long work: is the file free to be written?

    Raises:
        UsageError: it is there already, it is a folder, or its folder is not.
    """
    if out is None:
        return
    if out.is_dir():
        raise UsageError(f"{out} is a folder; give the name of a file")
    if out.exists() and not force:
        raise UsageError(f"{out} is there already; give --force to replace it, or another --out")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is not a folder; make it first, or give another --out")


def asked(**arguments: object) -> dict[str, Any]:
    """Return the arguments that were given, by name, as documents have them; those in a dataclass among them."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, CommonRequest):
            found |= {field: getattr(value, field) for field in value.given()}
        elif is_dataclass(value):
            found |= asked(**{field.name: getattr(value, field.name) for field in fields(value)})
        elif isinstance(value, list | tuple):
            found[name] = [str(one) for one in value]
        elif value is not None and value is not False:
            found[name] = str(value) if isinstance(value, Path) else value
    return found


def deliver(
    document: Callable[[], dict[str, Any]],
    table: Callable[[], RenderableType],
    *,
    form: str,
    out: Path | None,
    csv: Callable[[], str] | None = None,
    request: Mapping[str, Any] | None = None,
    source: RunFile | None = None,
) -> None:
    """A table, JSON or CSV on stdout, and JSON or CSV in a file. Nothing is made that nobody sees.

    Args:
        request: what was asked, where the document does not say it itself.
        source: the framework's file that the run was read from.
    """
    text = ""
    if form == "csv" and csv is not None:
        text = csv()
    elif form == "json" or out is not None:
        found = document()
        if found.get("request") is None and request is not None:
            found = found | {"request": dict(request)}
        text = json_text(found if source is None else found | {"from": source.document()})
    if form == "human":
        show(table())
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
    if out is not None:
        write_whole(out, text)
        hint(f"wrote {out}")
