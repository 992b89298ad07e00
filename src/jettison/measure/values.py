"""Every value: each tensor that a plan computes again, or fetches, is held against the forward's, in all bits.

A witness is some elements. Here the whole tensor is kept beside the plan for one step, which takes what plain autograd
takes, so that the first op that departs is named with the elements that do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from jettison.capture.tensor_subclasses import plain
from jettison.measure.departures import Departure, form_of
from jettison.measure.gradients import differing_elements, tensor_bytes
from jettison.runtime.callers import of_a_region
from jettison.runtime.frame import Frame
from jettison.runtime.handles import Handle
from jettison.runtime.witness import Check


@dataclass(kw_only=True)
class ValuesSeen:
    """Of one step: tensors that came back, their bytes, and those that were not what forward had, first ones first."""

    compared: int = 0
    nbytes: int = 0
    departures: list[Departure] = field(default_factory=list)


@dataclass(kw_only=True)
class _Kept:
    handle: Handle
    tensor: Tensor
    position: int


@contextmanager
def every_value() -> Iterator[ValuesSeen]:
    """Of planned steps that run in here. Witnesses are left out: what they would see is seen."""
    seen, kept = ValuesSeen(), dict[int, _Kept]()
    pack: Any = Frame.pack
    recompute: Any = Frame.recompute

    @of_a_region
    def packing(frame: Any, tensor: Tensor) -> Any:
        frame.how, frame.sees = Check.OFF, False
        packed = pack(frame, tensor)
        if isinstance(packed, Handle) and not packed.slot.hollow:
            kept[id(packed)] = _Kept(handle=packed, tensor=plain(tensor).detach().clone(), position=len(kept))
        return packed

    def recomputing(frame: Any, handle: Handle) -> Tensor:
        tensor: Tensor = recompute(frame, handle)
        had = kept.get(id(handle))
        if had is not None:
            _compare(seen, frame, had, plain(tensor).detach())
        return tensor

    Frame.pack, Frame.recompute = packing, recomputing  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        Frame.pack, Frame.recompute = pack, recompute  # type: ignore[method-assign]
        seen.departures.sort(key=lambda one: one.position)


def _compare(seen: ValuesSeen, frame: Frame, had: _Kept, now: Tensor) -> None:
    seen.compared += 1
    seen.nbytes += now.numel() * now.element_size()
    was, became = form_of(had.tensor), form_of(now)
    if was == became and tensor_bytes(had.tensor) == tensor_bytes(now):
        return
    slot = frame.recipe.trace.program.slots[had.handle.index]
    counts = differing_elements(had.tensor, now) if was == became else (None, None)
    seen.departures.append(
        Departure(
            module=".".join(filter(None, (frame.name, slot.path))),
            op=slot.op or "the start",
            position=had.position,
            was=was,
            became=became,
            differing_elements=counts[0],
            max_absolute_difference=counts[1],
        )
    )
