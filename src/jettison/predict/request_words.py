"""Loose words of a request, made typed."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from jettison.core.errors import UsageError

_T = TypeVar("_T")
_Word = TypeVar("_Word", bound=StrEnum)


def given_or(value: _T | None, default: _T) -> _T:
    """What was given, or else the default."""
    return default if value is None else value


def word(kind: type[_Word], text: str, name: str) -> _Word:
    """One of a kind by its word.

    Raises:
        UsageError: it has no such word.
    """
    if text not in set(kind):
        raise UsageError(f"got --{name} {text!r}; expected one of {', '.join(kind)}")
    return kind(text)
