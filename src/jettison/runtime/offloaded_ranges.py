"""Ranges of a recording's storages that are offloaded, and the boxes that recipes read them from.

NOTE [ Storages move ]
An offload moves a range of bytes of one storage: all that any saved slot, and any recomputed op, sees of it. It moves
once, however many views there are, and each view is made from the fetched bytes with its own strides. If only a part of
a storage is ever needed, only that part moves. If one view is needed, and it covers less than half of the bytes of its
range, its elements are gathered first, and scattered to their places afterwards: kernels depend on strides, and
gradients must not.

NOTE [ Saved in pieces ]
Recurrent cells cut one buffer by ``unsafe_chunk`` and write to each piece in turn. Autograd saves the first before the
last is written, and a box is filled when autograd first saves anything of its buffer: such a buffer is not moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from jettison.capture.recorder import RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import arrived, reach_of, version_of
from jettison.ledger.program import Source
from jettison.runtime.offload import Group, StorageUse, flat_bytes, stale
from jettison.runtime.views import Within, view_of


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRange:
    """A range of a buffer, in bytes from the start of its storage in the recording."""

    seen: TensorRef  # view of the buffer by the tensor that is offloaded
    begin: int
    nbytes: int
    gathered: TensorRef | None = None  # the only view that is needed, if just its elements move

    @property
    def host_bytes(self) -> int:
        if self.gathered is None:
            return self.nbytes
        return prod(self.gathered.size) * self.gathered.dtype.itemsize


def moves_of(
    trace: RegionTrace, offloaded: Iterable[int], reads: Mapping[int, list[TensorRef]], written: frozenset[int]
) -> dict[int, BufferRange]:
    """The ranges of ``offloaded`` buffers that can move.

    Args:
        reads: by buffer, the views that recomputed ops read.
        written: buffers that are overwritten before backward, or when ops are recomputed. Without a version bump that
            is no error, and backward reads the new values.
    """
    found = {}
    written |= _saved_in_pieces(trace) if offloaded else frozenset()
    for b in sorted(offloaded):
        refs = [ref for ref in trace.slots if ref.buffer == b] + reads.get(b, [])
        buffer = trace.program.buffers[b]
        if buffer.free or buffer.source in (Source.RANDOM, Source.PARAMETER, Source.OUTER) or b in written:
            continue
        seen = _at_hand(trace, b)
        refs = [ref for ref in refs if prod(ref.size)]
        if seen is None or not refs:
            continue
        move = _range(seen, refs)
        if move is not None:
            found[b] = move
    return found


def _saved_in_pieces(trace: RegionTrace) -> frozenset[int]:
    """Buffers of which autograd saves a part before all is written. See NOTE [ Saved in pieces ]."""
    producers = [trace.program.buffers[ref.buffer].producer for ref in trace.slots]
    saved = zip(trace.slots, producers, trace.saved_after, strict=False)  # a wrong trace is noticed when it is used
    return frozenset(ref.buffer for ref, made_by, ran in saved if made_by is not None and ran <= made_by)


def _at_hand(trace: RegionTrace, b: int) -> TensorRef | None:
    """View of a buffer by the tensor that fills its box, in the order of `recipe._fill`."""
    if b in trace.inputs or b in trace.blocks:
        return trace.given.get(b)
    slot = next((ref for ref in trace.slots if ref.buffer == b), None)
    if slot is not None:
        return slot
    return trace.taps[b].ref if b in trace.taps else None


def _range(seen: TensorRef, refs: list[TensorRef]) -> BufferRange | None:
    if len({ref.dtype.itemsize for ref in (seen, *refs)}) > 1:
        return None  # viewed with several element sizes, whose starts need not coincide
    begin = min(ref.offset * ref.dtype.itemsize for ref in refs)
    end = max((ref.offset + reach_of(ref.size, ref.stride)) * ref.dtype.itemsize for ref in refs)
    move = BufferRange(seen=seen, begin=begin, nbytes=end - begin)
    only = {(ref.size, ref.stride, ref.offset, ref.dtype, ref.conj, ref.neg) for ref in refs}
    one = refs[0]
    if len(only) == 1 and not (one.conj or one.neg) and 2 * prod(one.size) * one.dtype.itemsize < move.nbytes:
        return replace(move, gathered=Within(0, one.size, one.stride, 0, one.dtype))
    return move


class Away:
    """A box whose value is stored elsewhere until it is read. Its value is flat, and begins where the range does."""

    __slots__ = ("away", "flat", "move", "stays", "version")

    def __init__(self, move: BufferRange, *, stays: bool = False) -> None:
        self.move, self.stays = move, stays
        self.flat: Tensor | None = None  # the value, if it stays on the device
        self.away: Any = None  # its storage elsewhere
        self.version = 0

    @property
    def is_empty(self) -> bool:
        return self.flat is None and self.away is None

    @property
    def on_device(self) -> Tensor | None:
        """The tensor that it holds on the device now."""
        return self.flat

    def stay(self) -> None:
        """Keep the value on the device: it is alive anyway."""
        self.stays = True

    def fill(self, tensor: Tensor) -> None:
        """Take the value. Raises `HostBudgetExceeded` without room in CPU memory."""
        part, seen = arrived(tensor), self.move.seen
        shift = part.storage_offset() * part.element_size() - seen.offset * seen.dtype.itemsize
        flat = flat_bytes(part, shift + self.move.begin, self.move.nbytes)
        with torch.no_grad():
            self.away = None if self.stays else self._send(flat)
        if self.away is None:
            self.flat, self.version = flat, version_of(flat)

    def open(self) -> Tensor:
        """Return the value. Raises `StaleTensor` if it was written to, on the device or before its copy was over."""
        if self.flat is None:
            return self._back()
        if version_of(self.flat) != self.version:
            raise stale("a kept tensor", "a planned region", self.version, version_of(self.flat))
        return self.flat

    def _send(self, flat: Tensor) -> Any:
        raise NotImplementedError

    def _back(self) -> Tensor:
        raise NotImplementedError


class OffloadableBox(Away):
    """A box whose value may be offloaded; without a group nothing moves in this call."""

    __slots__ = ("group",)

    def __init__(self, move: BufferRange, group: Group | None) -> None:
        super().__init__(move, stays=group is None)
        self.group = group

    @property
    def on_device(self) -> Tensor | None:
        return self.flat if self.away is None else self.away.on_device

    def _send(self, flat: Tensor) -> StorageUse | None:
        """Send the bytes; a gathered copy is made here, in the stream that produced the tensor."""
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
