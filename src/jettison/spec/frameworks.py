"""Training frameworks as data: ``frameworks/NAME/defaults.toml`` has what each sets, writes and calls things.

Its sections: ``presets`` (of ``--like``: fields of a request, ``like`` for another preset's, ``when`` for what a layout
changes), ``targets`` (of ``export --to``), ``trainers`` (planned live) and ``flags`` (ours by theirs; braces
hold an example).
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError

FOLDER: Final = Path(__file__).parents[1] / "frameworks"
_COMPARE: Final = {">": operator.gt, "==": operator.eq}


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    files = sorted(FOLDER.glob("*/defaults.toml"))
    return {file.parent.name: tomllib.loads(file.read_text(encoding="utf-8")) for file in files}


@cache
def named(section: str) -> Mapping[str, Mapping[str, Any]]:
    """Entries of a section by name, of all frameworks, listed by their ``order``; each with its ``folder``."""
    found = [
        (name, entry | {"folder": folder})
        for folder, table in _tables().items()
        for name, entry in table.get(section, {}).items()
    ]
    return dict(sorted(found, key=lambda one: one[1].get("order", len(found))))


def foreign_flags() -> Mapping[str, str]:
    """Our flags by those of other tools."""
    return {flag: ours for table in _tables().values() for flag, ours in table.get("flags", {}).items()}


def rule(name: str, *, tp: int, dp: int = 1, zero: int = 0) -> Mapping[str, Any]:
    """Fields of a request that a framework sets where a run says nothing else.

    Raises:
        UsageError: no such framework.
    """
    presets = named("presets")
    if name not in presets:
        raise UsageError(f"got --like {name!r}; expected one of {', '.join(presets)}")
    own = presets[name]
    found = dict(rule(own["like"], tp=tp, dp=dp, zero=zero)) if "like" in own else {}
    for fields in (own, *(case for case in own.get("when", ()) if _holds(case["if"], tp=tp, dp=dp, zero=zero))):
        found |= {key: value for key, value in fields.items() if key not in ("order", "folder", "like", "when", "if")}
    return found


def _holds(condition: str, **sizes: int) -> bool:
    """Whether a condition such as ``tp > 1 and zero == 0`` is true."""
    parts = re.findall(r"(\w+) (>|==) (\d+)", condition)
    return all(_COMPARE[sign](sizes[name], int(number)) for name, sign, number in parts)
