"""Training frameworks as data: ``frameworks/NAME/defaults.toml`` has defaults, export targets and names of flags.

Its sections: ``presets`` (of ``--like``: fields of a request, ``like`` to inherit from another preset, ``when`` for
fields that depend on the layout), ``targets`` (of ``export --to``), ``runs`` (of ``search --runs-on``), ``trainers``
(planned live), ``flags`` (the framework's flags and ours; braces hold an example), ``kernels`` (fields of `Kernels`),
``execution`` (of `cost.execution`), ``optimizer_offload``, ``stacks`` (software stacks with figures in hardware files),
``stage_rules`` (values of ``--stage-layers``), ``explorer`` (kernel sets whose closed forms its page has) and
``packages`` (Python's, and which of them wrap optimizers).
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import known
from jettison.core.files import read_table

FOLDER: Final = Path(__file__).parents[1] / "frameworks"
BASE_STACK: Final = "base"
"""Stack of the hardware file's own figures."""
_COMPARE: Final = {">": operator.gt, "==": operator.eq}


@cache
def _texts() -> Mapping[str, str]:
    return {file.parent.name: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*/defaults.toml"))}


@cache
def _table(folder: str) -> Mapping[str, Any]:
    return tomllib.loads(_texts()[folder])


def _tables(section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Entries of a section by folder; files without it are not parsed."""
    for folder, text in _texts().items():
        if f"[{section}" in text:
            yield folder, _table(folder).get(section, {})


@cache
def read_tables() -> Mapping[str, Mapping[str, Any]]:
    """Load ``read.toml`` by folder: keys of the framework's files."""
    files = sorted(FOLDER.glob("*/read.toml"))
    return {file.parent.name: read_table(file) for file in files}


@cache
def named(section: str) -> Mapping[str, Mapping[str, Any]]:
    """Entries of a section of all frameworks by name, sorted by ``order``; each with its ``folder``."""
    found = [
        (name, entry | {"folder": folder}) for folder, entries in _tables(section) for name, entry in entries.items()
    ]
    return dict(sorted(found, key=lambda one: one[1].get("order", len(found))))


def foreign_flags() -> Mapping[str, str]:
    """Our flags, keyed by other tools' flags."""
    return {flag: ours for _, flags in _tables("flags") for flag, ours in flags.items()}


def software(name: str) -> str:
    """Validate the name of a software stack; raises a `UsageError`."""
    return known(name, (BASE_STACK, *named("stacks")), "--stack")


def rule(name: str, *, tp: int, dp: int = 1, zero: int = 0, lora: int = 0, packed: int = 0) -> Mapping[str, Any]:
    """Default fields of a request in a framework preset; a `UsageError` for an unknown one.

    Args:
        lora: 1: adapters are trained. ``packed``: bits of a quantized base; 0: not quantized.
    """
    case = {"tp": tp, "dp": dp, "zero": zero, "lora": lora, "packed": packed}
    presets = named("presets")
    own = presets[known(name, presets, "--like")]
    found = dict(rule(own["like"], **case)) if "like" in own else {}
    for fields in (own, *(each for each in own.get("when", ()) if _holds(each["if"], **case))):
        found |= {key: value for key, value in fields.items() if key not in ("order", "folder", "like", "when", "if")}
    return found


def _holds(condition: str, **sizes: int) -> bool:
    """Whether a condition such as ``tp > 1 and zero == 0`` is true."""
    parts = re.findall(r"(\w+) (>|==) (\d+)", condition)
    return all(_COMPARE[sign](sizes[name], int(number)) for name, sign, number in parts)
