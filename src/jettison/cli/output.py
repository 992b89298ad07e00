"""Delivery of a verb's result: a table, JSON or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jettison.errors import JettisonError, UsageError
from jettison.predict.run_fields import CommonRequest
from jettison.report.console import hint, show
from jettison.report.json_text import json_text
from jettison.whole_files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        UsageError: it is there already, or its folder is not.
    """
    if out is None:
        return
    if out.exists() and not force:
        raise UsageError(f"{out} is there already; give --force to replace it, or another --out")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is not a folder; make it first, or give another --out")


def asked(**arguments: object) -> dict[str, Any]:
    """Return the arguments that were given, by name, as documents have them."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, CommonRequest):
            found |= {field: getattr(value, field) for field in value.given()}
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
) -> None:
    """A table, JSON or CSV on stdout, and JSON or CSV in a file. Nothing is made that nobody sees.

    Args:
        request: what was asked, where the document does not say it itself.
    """
    text = ""
    if form == "csv" and csv is not None:
        text = csv()
    elif form == "json" or out is not None:
        found = document()
        if found.get("request") is None and request is not None:
            found = found | {"request": dict(request)}
        text = json_text(found)
    if form == "human":
        show(table())
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
    if out is not None:
        write_whole(out, text)
        hint(f"wrote {out}")
