"""Untrusted JSON: limits of reading it, and of its text on a page or a terminal.

Files are read as text, never as code. Sizes are looked at before anything is read; numbers, depths and lengths before
anything is made of them. Characters that a terminal would obey, or that turn the direction of writing, are not shown.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any, Final

from jettison.core import files
from jettison.core.errors import UsageError

MOST_BYTES: Final = 64 * 2**20
MOST_DEPTH: Final = 40
MOST_ITEMS: Final = 2_000_000
MOST_TEXT: Final = 20_000
MOST_NUMBER: Final = 2**63


def read_text(path: Path) -> str:
    """A regular file of text that is not too large. Raise `UsageError` if it is not."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file; give a plan, a proof, or the log of a run")
    return files.read_text(path, most=MOST_BYTES)


def parse_json(text: str, where: str) -> Any:
    """A JSON value within the limits. Raise `UsageError` if it is none, or beyond one of them."""
    try:
        value = json.loads(text, parse_constant=no_constant)
    except RecursionError:
        raise UsageError(f"{where}: JSON is nested deeper than {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}; expected a document that jettison wrote") from None
    _check(value, where)
    return value


def no_constant(name: str) -> Any:
    """Refuse NaN and infinities, which Python's parser takes."""
    raise ValueError(f"{name} is not JSON")


def _check(value: Any, where: str) -> None:
    items = 0
    waiting: list[tuple[Any, str, int]] = [(value, "", 0)]
    while waiting:
        one, name, depth = waiting.pop()
        items += 1
        if depth > MOST_DEPTH:
            raise UsageError(f"{where}: JSON is nested deeper than {MOST_DEPTH} levels")
        if items > MOST_ITEMS:
            raise UsageError(f"{where}: more than {MOST_ITEMS:,} values")
        if isinstance(one, str) and len(one) > MOST_TEXT:
            raise UsageError(f"{where}: {printable(name)}: a text of {len(one):,} characters")
        if isinstance(one, int | float) and not isinstance(one, bool):
            if (isinstance(one, float) and not isfinite(one)) or abs(one) > MOST_NUMBER:
                raise UsageError(f"{where}: {printable(name)}: a number beyond 2^63")
            if name.endswith("_bytes") and one < 0:
                raise UsageError(f"{where}: {printable(name)}: {one}; expected 0 or more bytes")
        if isinstance(one, dict):
            waiting.extend((item, str(key), depth + 1) for key, item in one.items())
        elif isinstance(one, list):
            waiting.extend((item, name, depth + 1) for item in one)


def printable(text: str) -> str:
    """The text with every character that would do something else than show replaced; lines become spaces."""
    return "".join(c if c.isprintable() else " " if c in "\n\t\r" else "\N{REPLACEMENT CHARACTER}" for c in text)


def all_printable(value: Any) -> Any:
    """The same, of all texts in lists, tuples and mappings, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {all_printable(key): all_printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(all_printable(item) for item in value)
    return value
