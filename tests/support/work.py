"""How much Python does, in calls: the same on every machine, however busy, which seconds are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def calls(function: Callable[[], object]) -> int:
    """Of Python's functions and of built-in ones, while ``function`` runs."""
    return worked(function)[1]


def worked(function: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and its `calls`."""
    count = 0

    def counted(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        found = function()
    finally:
        sys.setprofile(before)
    return found, count
