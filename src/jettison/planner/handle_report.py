"""Report of a handle on its regions: a table for the screen, a document for programs, and all details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final, overload

from jettison.core.units import format_bytes
from jettison.runtime.report import RegionReport

SCHEMA: Final = "jettison.applied/1"
MOST_ROWS: Final = 30
"""Most rows of the table; the document has all regions."""
HEADS: Final = ("region", "policy", "calls", "recorded", "kept", "again", "host", "packed", "kept bytes", "host bytes")
LONGEST_NOTE: Final = 66


@dataclass(frozen=True)
class HandleReport(Sequence[RegionReport]):
    """Statistics of every region so far, in the order of the model; the last one is the part around the blocks.

    Prints as a table in which equal neighbours share one row. It is a sequence of `RegionReport`, which list every
    saved tensor.
    """

    regions: tuple[RegionReport, ...]

    @overload
    def __getitem__(self, index: int) -> RegionReport: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RegionReport, ...]: ...
    def __getitem__(self, index: int | slice) -> RegionReport | tuple[RegionReport, ...]:
        return self.regions[index]

    def __len__(self) -> int:
        return len(self.regions)

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.applied/1``: every region with its saved tensors."""
        return {"schema": SCHEMA, "regions": [asdict(one) | {"policy": one.word} for one in self.regions]}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = [HEADS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
        lines = []
        for row in rows:
            texts = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
            figures = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join([*texts, *figures]).rstrip())
        return "\n".join([*lines, *self._notes()])

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [_row(list(group)) for _, group in groupby(self.regions, key=_did)]
        if len(rows) <= MOST_ROWS:
            return rows
        left_out = (f"... {len(rows) - MOST_ROWS + 1} more", *[""] * (len(HEADS) - 1))
        return [*rows[: MOST_ROWS // 2], left_out, *rows[len(rows) - MOST_ROWS // 2 + 1 :]]

    def _notes(self) -> Iterator[str]:
        """Reasons why regions run without their recording, and tensors that came back with other last bits."""
        reasons: dict[str, list[str]] = {}
        for region in self.regions:
            if region.fallback:
                reasons.setdefault(region.fallback, []).append(_name(region))
        for reason, names in reasons.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = " ".join(reason.split())
            short = text if len(text) <= LONGEST_NOTE else f"{text[: LONGEST_NOTE - 4]} ..."
            yield f"without a recording: {names[0]}{others}: {short}"
        rounded = sum(region.rounded for region in self.regions)
        if rounded:
            yield f"{rounded:,} tensors came back with other last bits"


def _name(region: RegionReport) -> str:
    return region.name or "the rest"


def _did(region: RegionReport) -> tuple[object, ...]:
    """Fields that neighbours in one row have in common."""
    slots = (region.slots_kept, region.slots_dropped, region.slots_offloaded, region.slots_packed)
    held = (region.kept_bytes, region.host_bytes)
    return bool(region.name), region.word, region.calls, region.recordings, region.fallback, *slots, *held


def _row(group: list[RegionReport]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    names = _name(first) if len(group) == 1 else f"{_name(first)} to {last.name.rpartition('.')[2]} ({len(group)})"
    slots = (first.slots_kept, first.slots_dropped, first.slots_offloaded, first.slots_packed)
    counts = [str(first.calls), str(first.recordings), *map(str, slots)]
    return (names, first.word, *counts, format_bytes(first.kept_bytes), format_bytes(first.host_bytes))
