"""Which bytes of a recording go to the host, and the box that a recipe finds them in.

NOTE [ Storages move ]
What moves is a range of bytes of one storage: all that any saved slot, and any op that runs again, sees of it. It moves
once, however many views there are, and each view is taken again from what came back, with its own strides. Of a storage
of which only a part is ever asked for, that part goes alone. Where one view is asked for, and it sees less than half of
the bytes that it lies among, those that it sees are gathered first, and put back in their places afterwards: kernels
hang on strides, and gradients must not.

NOTE [ Saved in pieces ]
Recurrent cells cut one buffer by ``unsafe_chunk`` and write to each piece in turn. Autograd saves the first before the
last is written, and a box is filled where autograd first saves anything of its buffer: such a buffer stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from jettison.capture.recording import RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import arrived, version_of
from jettison.ledger.program import Source
from jettison.runtime.offload import Group, Moved, flat_bytes, stale
from jettison.runtime.views import Within, view_of


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRange:
    """A range of a buffer, in bytes from where its storage begins in the recording."""

    seen: TensorRef  # how the tensor sees the buffer that is at hand when it goes
    begin: int
    nbytes: int
    gathered: TensorRef | None = None  # the only view that is asked for, where its elements go alone

    @property
    def host_bytes(self) -> int:
        if self.gathered is None:
            return self.nbytes
        return _count(self.gathered) * self.gathered.dtype.itemsize


def moves_of(
    trace: RegionTrace, offloaded: Iterable[int], reads: Mapping[int, list[TensorRef]], written: frozenset[int]
) -> dict[int, BufferRange]:
    """Those of ``offloaded`` that can move, and what of each.

    Args:
        reads: by buffer, how ops that run again see it.
        written: buffers that somebody overwrites before backward, or when it runs ops again. Past the version counters
            that is no error, and backward wants what stands there by then.
    """
    found = {}
    written |= _saved_in_pieces(trace) if offloaded else frozenset()
    for b in sorted(offloaded):
        refs = [ref for ref in trace.slots if ref.buffer == b] + reads.get(b, [])
        buffer = trace.program.buffers[b]
        if buffer.free or buffer.source in (Source.RANDOM, Source.PARAMETER, Source.OUTER) or b in written:
            continue
        seen = _at_hand(trace, b)
        refs = [ref for ref in refs if _count(ref)]
        if seen is None or not refs:
            continue
        move = _range(seen, refs)
        if move is not None:
            found[b] = move
    return found


def _saved_in_pieces(trace: RegionTrace) -> frozenset[int]:
    """Buffers of which autograd saves a part before all is written. See NOTE [ Saved in pieces ]."""
    producers = [trace.program.buffers[ref.buffer].producer for ref in trace.slots]
    saved = zip(
        trace.slots, producers, trace.saved_after, strict=False
    )  # a trace may lie: that is found when it is followed
    return frozenset(ref.buffer for ref, made_by, ran in saved if made_by is not None and ran <= made_by)


def _at_hand(trace: RegionTrace, b: int) -> TensorRef | None:
    """How a buffer is seen by what fills its box, in the order in which `recipe._fill` looks."""
    if b in trace.inputs or b in trace.blocks:
        return trace.given.get(b)
    slot = next((ref for ref in trace.slots if ref.buffer == b), None)
    if slot is not None:
        return slot
    return trace.taps[b].ref if b in trace.taps else None


def _range(seen: TensorRef, refs: list[TensorRef]) -> BufferRange | None:
    if len({ref.dtype.itemsize for ref in (seen, *refs)}) > 1:
        return None  # seen as elements of several sizes, which need not begin at the same places
    begin = min(ref.offset * ref.dtype.itemsize for ref in refs)
    end = max((ref.offset + _reach(ref)) * ref.dtype.itemsize for ref in refs)
    move = BufferRange(seen=seen, begin=begin, nbytes=end - begin)
    only = {(ref.size, ref.stride, ref.offset, ref.dtype, ref.conj, ref.neg) for ref in refs}
    one = refs[0]
    if len(only) == 1 and not (one.conj or one.neg) and 2 * _count(one) * one.dtype.itemsize < move.nbytes:
        return replace(move, gathered=Within(0, one.size, one.stride, 0, one.dtype))
    return move


def _count(ref: TensorRef) -> int:
    return prod(ref.size)


def _reach(ref: TensorRef) -> int:
    return sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True)) + 1


class Away:
    """A box whose value is elsewhere until it is asked for. What it gives is flat, and begins where the move does."""

    __slots__ = ("away", "flat", "move", "stays", "version")

    def __init__(self, move: BufferRange, *, stays: bool = False) -> None:
        self.move, self.stays = move, stays
        self.flat: Tensor | None = None  # where it stays as it is
        self.away: Any = None  # what holds it meanwhile
        self.version = 0

    @property
    def is_empty(self) -> bool:
        return self.flat is None and self.away is None

    @property
    def on_device(self) -> Tensor | None:
        """What it holds there at the moment."""
        return self.flat

    def stay(self) -> None:
        """It lives anyway: nothing would be gained."""
        self.stays = True

    def fill(self, tensor: Tensor) -> None:
        """Take the value. Raises `HostBudgetExceeded` without room on the host."""
        part, seen = arrived(tensor), self.move.seen
        shift = part.storage_offset() * part.element_size() - seen.offset * seen.dtype.itemsize
        flat = flat_bytes(part, shift + self.move.begin, self.move.nbytes)
        with torch.no_grad():
            self.away = None if self.stays else self._send(flat)
        if self.away is None:
            self.flat, self.version = flat, version_of(flat)

    def open(self) -> Tensor:
        """What it was. Raises `StaleTensor` where it was written to, staying or before it had gone."""
        if self.flat is None:
            return self._back()
        if version_of(self.flat) != self.version:
            raise stale("a kept tensor", "a planned region", self.version, version_of(self.flat))
        return self.flat

    def _send(self, flat: Tensor) -> Any:
        raise NotImplementedError

    def _back(self) -> Tensor:
        raise NotImplementedError


class Transit(Away):
    """A box whose value may be on the host; without a group nothing moves in this call."""

    __slots__ = ("group",)

    def __init__(self, move: BufferRange, group: Group | None) -> None:
        super().__init__(move, stays=group is None)
        self.group = group

    @property
    def on_device(self) -> Tensor | None:
        return self.flat if self.away is None else self.away.on_device

    def _send(self, flat: Tensor) -> Moved | None:
        """A gathered copy is made here, in the stream that made the tensor."""
        group, self.group = self.group, None
        if group is None or flat.device != group.engine.place:
            return None
        if self.move.gathered is not None:
            flat = view_of(flat, self.move.gathered).contiguous().view(-1).view(torch.uint8)
        return group.engine.send(flat, group)

    def _back(self) -> Tensor:
        found: Tensor = self.away.open()
        ref = self.move.gathered
        if ref is None:
            return found
        whole = found.new_empty(self.move.nbytes)
        view_of(whole, ref).copy_(found.view(ref.dtype).view(ref.size))
        return whole
