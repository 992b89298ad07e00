"""Claim: its number, the commands that answer it, and rows of both."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from examples.numpy_engine.__main__ import main as engine

from jettison.cli.main import run as jettison

UNITS = {"B": 1, "MB": 1e6, "GB": 1e9, "TB": 1e12, "%": 0.01, "": 1, "GB/s": 1e9, "s": 1, "x": 1, "N": 1}
"""What a number is divided by before it is written."""


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    PARTLY = "partly"
    """Right of some runs and wrong of others: the reason says of which."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A command, and where in its JSON the number is: ``layers[1].bytes``, ``rows[k=8].peak``."""

    command: str
    key: str

    def value(self) -> Any:
        return at(document(self.command), self.key)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``theirs`` is a number or a range. RIGHT is within ``tolerance`` of it, WRONG is not: a test says so."""

    words: str
    theirs: tuple[float, ...]
    unit: str
    asks: tuple[Ask, ...]
    verdict: Verdict
    why: str
    value: Callable[..., float] = lambda only: only
    tolerance: float = 0.05

    def ours(self) -> float:
        return float(self.value(*(ask.value() for ask in self.asks)))

    def is_within(self) -> bool:
        ours = self.ours()
        return min(self.theirs) * (1 - self.tolerance) <= ours <= max(self.theirs) * (1 + self.tolerance)

    def row(self) -> str:
        """Line of the page's table."""
        return f"| {self.words} | {self.claimed()} | {self.computed()} | {self.why} |"

    def cells(self) -> tuple[str, ...]:
        """Row of the CSV, without its source."""
        asked = "; ".join(f"{command}: {', '.join(keys)}" for command, keys in self._by_command().items())
        return self.words, self.claimed(), self.computed(), self.verdict.value, self.why, asked

    def claimed(self) -> str:
        """The source's number or range, with its unit."""
        return f"{' to '.join(dict.fromkeys(_number(value, self.unit) for value in self.theirs))} {self.unit}".rstrip()

    def computed(self) -> str:
        """The commands' number, with its unit."""
        return f"{_number(self.ours(), self.unit)} {self.unit}".rstrip()

    def _by_command(self) -> dict[str, list[str]]:
        keys: dict[str, list[str]] = {}
        for ask in self.asks:
            keys.setdefault(ask.command, []).append(ask.key)
        return keys


def _number(value: float, unit: str) -> str:
    scaled = value / UNITS[unit]
    return f"{scaled:,.0f}" if unit == "B" or abs(scaled) >= 1000 else f"{scaled:.3g}"


@cache
def document(command: str) -> dict[str, Any]:
    """What a command prints with ``--format json``, without a process of its own."""
    words, printed = [*shlex.split(command), "--format", "json"], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = jettison(words[1:]) if words[0] == "jettison" else engine(words[3:])
    if code:
        raise RuntimeError(f"{command} ended with {code}")
    return dict(json.loads(printed.getvalue()))


def at(found: Any, key: str) -> Any:
    """A number inside a document. ``[name=word]`` picks the entry of which that is so, ``[*]`` adds up all."""
    steps = re.findall(r"\[([^\]]+)\]|([^.\[\]]+)", key)
    for number, (picked, name) in enumerate(steps):
        if name:
            found = found[name]
        elif picked == "*":
            rest = "".join(f"[{p}]" if p else f".{n}" for p, n in steps[number + 1 :])
            return sum(at(entry, rest) for entry in found)
        elif "=" in picked:
            field, _, word = picked.partition("=")
            found = next(entry for entry in found if str(entry[field]) == word)
        else:
            found = found[int(picked)]
    return found
