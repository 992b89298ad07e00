"""Two ledgers of one model, side by side: a formula and a trace, or a trace and a measurement.

Formulas and traces name paths, ops and storages differently, but bytes are bytes. So storages are paired within a
layer: first those of equal role, dtype and bytes, then of equal dtype and bytes, then of equal role. A pair by role
alone is reported as a difference in bytes or dtype; a storage without a pair is missing or extra. Before all that, a
formula's one tensor for all rounds of a loop (`EACH_ROUND`) is paired with as many equal storages of a trace.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from jettison.core.units import format_bytes
from jettison.ledger.ledger import EACH_ROUND, Ledger, SavedTensor

AROUND = "embedding, head and loss"
"""Name of the layer of everything outside of numbered layers."""


class Discrepancy(StrEnum):
    """Kind of difference between two ledgers in one storage."""

    MISSING = "missing"  # the first ledger has it, the second does not
    EXTRA = "extra"  # the second ledger has it, the first does not
    BYTES = "bytes differ"
    DTYPE = "dtype differs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One storage on which two ledgers do not agree. The side that lacks it is None."""

    layer: str
    kind: Discrepancy
    expected: SavedTensor | None
    found: SavedTensor | None

    @property
    def delta_bytes(self) -> int:
        """Bytes of the second ledger minus those of the first."""
        return _bytes(self.found) - _bytes(self.expected)

    def __str__(self) -> str:
        sides = f"expected {describe(self.expected)}, found {describe(self.found)}"
        return f"{self.layer}: {self.kind}: {sides} ({self.delta_bytes:+d} B)"


def in_step(expected: Ledger, found: Ledger) -> tuple[Ledger, Ledger]:
    """Both ledgers with equal layer names, if their numbering agrees: layer n is ``layers.n``, all else is `AROUND`.

    A closed form says ``layers.0``, ``embedding`` and ``head``; a trace has module paths, and one name for the root.
    """
    numbers = [_numbers(ledger) for ledger in (expected, found)]
    if not numbers[0] or set(numbers[0].values()) != set(numbers[1].values()):
        return expected, found
    return _renamed(expected, numbers[0]), _renamed(found, numbers[1])


def _numbers(ledger: Ledger) -> dict[str, int]:
    """Number of each layer; empty where two layers have the same number."""
    found = {name: int(end[1]) for name in ledger.layers if (end := re.search(r"(?:^|\.)(\d+)$", name))}
    return found if len(set(found.values())) == len(found) else {}


def _renamed(ledger: Ledger, numbers: Mapping[str, int]) -> Ledger:
    names = {name: f"layers.{numbers[name]}" if name in numbers else AROUND for name in ledger.layers}
    entries = tuple(replace(entry, layer=names[entry.layer]) for entry in ledger.entries)
    return Ledger(entries, layers=tuple(dict.fromkeys(names[name] for name in ledger.layers)))


def compare(expected: Ledger, found: Ledger) -> list[Difference]:
    """Differences of ``found`` from ``expected``, layer by layer; empty where they agree to the byte.

    Both must be of the same rank: see `Ledger.on_rank`. A storage is compared in the layer that saves it first.
    """
    layers = (*expected.layers, *(layer for layer in found.layers if layer not in set(expected.layers)))
    sides = expected.storages(), found.storages()
    return [one for layer in layers for one in _compare_layer(layer, *(side.get(layer, []) for side in sides))]


def _compare_layer(layer: str, expected: list[SavedTensor], found: list[SavedTensor]) -> list[Difference]:
    expected, found = _without_rounds(expected, found)
    _, expected, found = _pair(expected, found, lambda entry: (entry.role, entry.dtype, entry.storage_bytes))
    _, expected, found = _pair(expected, found, lambda entry: (entry.dtype, entry.storage_bytes))
    pairs, expected, found = _pair(expected, found, lambda entry: entry.role or None)
    differences = [
        Difference(
            layer=layer,
            kind=Discrepancy.BYTES if ours.storage_bytes != theirs.storage_bytes else Discrepancy.DTYPE,
            expected=ours,
            found=theirs,
        )
        for ours, theirs in pairs
    ]
    differences += [Difference(layer=layer, kind=Discrepancy.MISSING, expected=e, found=None) for e in expected]
    differences += [Difference(layer=layer, kind=Discrepancy.EXTRA, expected=None, found=e) for e in found]
    return differences


def _pair(
    expected: list[SavedTensor], found: list[SavedTensor], key: Callable[[SavedTensor], Hashable | None]
) -> tuple[list[tuple[SavedTensor, SavedTensor]], list[SavedTensor], list[SavedTensor]]:
    """Pair entries of equal key, one to one and in order; also return both rests. None pairs with nothing."""
    waiting: dict[Hashable, list[SavedTensor]] = defaultdict(list)
    for entry in found:
        waiting[key(entry)].append(entry)
    pairs, unmatched = [], []
    for entry in expected:
        wanted = key(entry)
        if wanted is not None and waiting.get(wanted):
            pairs.append((entry, waiting[wanted].pop(0)))
        else:
            unmatched.append(entry)
    taken = {id(entry) for _, entry in pairs}
    return pairs, unmatched, [entry for entry in found if id(entry) not in taken]


def _without_rounds(
    expected: list[SavedTensor], found: list[SavedTensor]
) -> tuple[list[SavedTensor], list[SavedTensor]]:
    """Entries left after each tensor of a loop's rounds has taken the equal storages that are its rows."""
    unmatched = []
    for entry in expected:
        count = entry.shape[0] if entry.role.startswith(EACH_ROUND) else 0
        rows = [each for each in found if (each.dtype, each.storage_bytes * count) == (entry.dtype, _bytes(entry))]
        if count and len(rows) >= count:
            taken = {id(each) for each in rows[:count]}
            found = [each for each in found if id(each) not in taken]
        else:
            unmatched.append(entry)
    return unmatched, found


def _bytes(entry: SavedTensor | None) -> int:
    return 0 if entry is None else entry.storage_bytes


def describe(entry: SavedTensor | None) -> str:
    """Describe one side of a difference."""
    if entry is None:
        return "nothing"
    shape = "x".join(str(size) for size in entry.shape) or "scalar"
    return f"{entry.role or entry.op or entry.path} {shape} {entry.dtype} ({format_bytes(entry.storage_bytes)})"
