"""Report of a region's kept, dropped and offloaded tensors, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jettison.core.objects import summary
from jettison.core.units import format_bytes
from jettison.runtime.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class SlotReport:
    """A tensor that autograd saved: ``keep``, ``drop`` (recomputed), ``offload``, ``pack`` or ``parameter``."""

    index: int
    path: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCalls:
    """Calls of a region whose backward is not over, and the bytes that their recipes keep."""

    calls: int
    nbytes: int


@dataclass(kw_only=True)
class RegionReport:
    """A region's tensors and calls so far.

    ``check`` is the share of recomputed values that is compared with the forward's, and ``rounded`` the number of
    tensors that differed in their last bits (on accelerators, where a recomputed matmul may use another kernel).
    """

    name: str
    word: str
    calls: int
    recordings: int
    fallback: str
    check: str
    rounded: int
    slots_kept: int
    slots_dropped: int
    slots_parameter: int
    slots_offloaded: int
    slots_packed: int
    kept_bytes: int
    host_bytes: int
    recomputed_ops: tuple[str, ...] = field(default=())
    slots: tuple[SlotReport, ...] = field(default=())

    def __repr__(self) -> str:
        name = self.name or "around the blocks"
        return summary(self, f"{name}, {self.word}, calls: {self.calls}, {format_bytes(self.kept_bytes)} kept")

    @classmethod
    def of(cls, recipe: Recipe | None, *, stays: bool = False, **known: Any) -> RegionReport:
        """Build from the recipe that ran (None: it fell back); with ``stays`` no call offloads what it might."""
        kinds = [_action(s.kind, stays) for s in recipe.slots] if recipe else []
        ops = recipe.trace.program.ops if recipe else ()
        return cls(
            **known,
            slots_kept=kinds.count("keep"),
            slots_dropped=kinds.count("drop"),
            slots_parameter=kinds.count("parameter"),
            slots_offloaded=kinds.count("offload"),
            slots_packed=kinds.count("pack"),
            kept_bytes=recipe.held_bytes(moves=not stays) if recipe else 0,
            host_bytes=recipe.host_bytes if recipe and not stays else 0,
            recomputed_ops=tuple(ops[i].name for i in recipe.recomputed_ops) if recipe else (),
            slots=_slot_reports(recipe, stays) if recipe else (),
        )


def _action(kind: str, stays: bool) -> str:
    return "keep" if stays and kind == "offload" else kind


def _slot_reports(recipe: Recipe, stays: bool) -> tuple[SlotReport, ...]:
    program = recipe.trace.program
    return tuple(
        SlotReport(
            index=slot.index,
            path=slot.path,
            op=slot.op,
            shape=slot.shape,
            dtype=slot.dtype,
            nbytes=program.buffers[slot.buffer].nbytes,
            action=_action(action.kind, stays),
        )
        for slot, action in zip(program.slots, recipe.slots, strict=True)
    )
