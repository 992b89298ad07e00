"""Findings: a claim, its evidence, and a change that fixes it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any


class FindingKind(StrEnum):
    """Kinds of findings; stable words for programs."""

    PEAK = "peak"
    FRAGMENTATION = "fragmentation"
    LEAK = "leak"
    OTHERS = "other processes"
    OUTSIDE = "outside PyTorch"
    HOST = "host memory"
    SIZE = "size error"
    UNKNOWN = "unknown"
    EXPOSED_COMMUNICATION = "exposed communication"
    GAPS = "gaps"
    BLOCKING_COPIES = "blocking copies"
    FIRST_STEP = "first step"
    OPTIMIZER_STATE = "optimizer state"
    DATA_WAIT = "data wait"
    SMALL_KERNELS = "small kernels"
    AT_RISK_NOW = "at risk now"
    AT_RISK_IF_RUN_AGAIN = "at risk if run again"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change: ``line`` is a command, or a line of the program; ``why`` is its effect."""

    line: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding."""

    kind: FindingKind
    claim: str
    evidence: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@cache
def table(name: str) -> dict[str, Any]:
    """Read a TOML file of this folder."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def change(name: str, **values: str) -> Change:
    """Return a change of `advice.toml` by its section and name ("leak.graph"), with values in place of their names."""
    section, _, key = name.partition(".")
    line, why = table("advice")[section][key]
    for word, value in values.items():
        line, why = line.replace(f"{{{word}}}", value), why.replace(f"{{{word}}}", value)
    return Change(line=line, why=why)


def changes(section: str, *names: str) -> tuple[Change, ...]:
    """Return several changes of one section of `advice.toml`; all of them where none is named."""
    return tuple(change(f"{section}.{name}") for name in names or table("advice")[section])
