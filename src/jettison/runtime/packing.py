"""Kept tensors that need fewer bits than they take: masks as bits, indices in the narrowest integers that hold them.

NOTE [ Lossless ]
A buffer packs only where the recording says that nothing can be lost: its op makes bools and everybody sees bools; its
op makes 64-bit positions along a dimension whose size is known, and everybody sees these; or its op draws zeros and
ones as numbers (`bernoulli_`, torch's dropout on a CPU), which at most one division by a number has followed: the bits
are kept, and the division is done again. What somebody writes to stays as it is, as with `moves.moves_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from jettison.capture.recording import Call, RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import arrived, version_of
from jettison.runtime.moves import Move, moves_of
from jettison.runtime.offload import flat_bytes, stale

aten = torch.ops.aten

CHUNK_BYTES: Final = 1 << 23
"""Of a mask that are packed at a time: what packing takes meanwhile."""
GATHER: Final = 0x0102040810204080
"""Times eight bytes that are 0 or 1, as one integer: they become its highest byte, the first of them the lowest bit."""
LOW: Final = 0x7F7F7F7F7F7F7F7F
"""Added to the low bits of each byte, they make a carry into its highest bit where any is set."""
ONES: Final = 0x0101010101010101
ONE_EACH: Final = 0x8040201008040201 - 2**64
"""In the first byte the first bit, in the second one the second: as a signed integer."""
CARRIES: Final = 0x00406070787C7E7F
"""Added to one bit each, they make a carry into the highest bit of the byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What a buffer holds and what holds it meanwhile.

    Args:
        of: the type that everybody sees.
        into: None for bits.
        divided: zeros and ones were divided by this number after they had been drawn; None where they were not.
    """

    of: torch.dtype
    into: torch.dtype | None = None
    divided: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """How a range of a buffer is packed; ``form.into`` is None for bits."""

    move: Move
    form: Form

    @property
    def nbytes(self) -> int:
        """That it takes so."""
        count = self.move.nbytes // self.form.of.itemsize
        return -(-count // 8) if self.form.into is None else count * self.form.into.itemsize

    @property
    def mask_bytes(self) -> int:
        """Of the mask that is packed into bits, a byte each; of what goes into narrow integers, its own."""
        return self.move.nbytes // (self.form.of.itemsize if self.form.into is None else 1)


def packs_of(
    trace: RegionTrace, wanted: Iterable[int], reads: Mapping[int, list[TensorRef]], written: frozenset[int]
) -> dict[int, Pack]:
    """Those of ``wanted`` that can be packed, and how. Arguments are `moves_of`'s."""
    found = {}
    for b, move in moves_of(trace, wanted, reads, written).items():
        refs = [move.seen, *(ref for ref in trace.slots if ref.buffer == b), *reads.get(b, [])]
        form = packs_into(trace, b, refs)
        if form is not None and move.gathered is None:
            found[b] = Pack(move=move, form=form)
    return found


def packs_into(trace: RegionTrace, b: int, refs: Iterable[TensorRef]) -> Form | None:
    """How a buffer can be held in fewer bytes; None where nothing is known to.

    Args:
        refs: how it is seen.
    """
    producer = trace.program.buffers[b].producer
    if producer is None:
        return None
    call = trace.calls[producer]
    made = next((ref for ref in call.outputs if ref is not None and ref.buffer == b), None)
    seen = {ref.dtype for ref in refs}
    if made is None or seen != {made.dtype}:
        return None
    if made.dtype is torch.bool:
        return Form(of=torch.bool)
    if made.dtype.is_floating_point:
        return _drawn(trace, call, made)
    bound = _bound(call) if made.dtype is torch.int64 else None
    if bound is None:
        return None
    for kind in (torch.uint8, torch.int16, torch.int32):
        if bound <= torch.iinfo(kind).max + 1:
            return Form(of=torch.int64, into=kind)
    return None


def _drawn(trace: RegionTrace, call: Call, made: TensorRef) -> Form | None:
    """Of numbers that were drawn as zeros and ones, the whole buffer at once, and perhaps divided since."""
    divided: float | None = None
    if call.func is aten.div_.Scalar and isinstance(call.args[1], int | float):
        divided, before = float(call.args[1]), call.args[0]
        producer = trace.program.buffers[before.buffer].producer
        if producer is None or not divided > 0 or before.dtype is not made.dtype:
            return None
        call = trace.calls[producer]
    whole = prod(made.size) * made.dtype.itemsize == trace.program.buffers[made.buffer].nbytes
    return Form(of=made.dtype, divided=divided) if whole and call.func is aten.bernoulli_.float else None


def _along(place: int) -> Callable[[Call], int]:
    """Positions along the dimension that is the argument at this place; the last one where it is left out."""

    def bound(call: Call) -> int:
        dim = call.kwargs.get("dim", call.args[place] if len(call.args) > place else -1)
        return int(call.args[0].size[dim]) if call.args[0].size else 1

    return bound


def _plane(dims: int) -> Callable[[Call], int]:
    """Positions in the last dimensions of the argument."""
    return lambda call: prod(call.args[0].size[-dims:])


_BOUNDS: Final[Mapping[str, Callable[[Call], int]]] = {
    "max_pool2d_with_indices": _plane(2),
    "max_pool3d_with_indices": _plane(3),
    "adaptive_max_pool2d": _plane(2),
    "adaptive_max_pool3d": _plane(3),
    "topk": _along(2),
    "sort": _along(1),
    "max": _along(1),
    "min": _along(1),
}
"""By op: the number of positions that its second result can name."""


def _bound(call: Call) -> int | None:
    func = call.func
    if getattr(func, "namespace", "") != "aten" or len(call.outputs) < 2 or not isinstance(call.args[0], TensorRef):
        return None
    if func._overloadname == "stable":  # of sort, whose dimension is a keyword
        return _along(len(call.args))(call)
    found = _BOUNDS.get(func._opname)
    return None if found is None else found(call)


class Packed:
    """A box whose value is packed. What it gives is flat, and begins where the move does."""

    __slots__ = ("flat", "pack", "small", "stays", "version")

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.small: Tensor | None = None
        self.flat: Tensor | None = None  # where it stays as it is
        self.stays = False
        self.version = 0

    @property
    def is_empty(self) -> bool:
        """Whether the forward has not come by it."""
        return self.small is None and self.flat is None

    @property
    def on_device(self) -> Tensor | None:
        """What it holds there."""
        return self.flat if self.small is None else self.small

    def stay(self) -> None:
        """It lives anyway: nothing would be gained."""
        self.stays = True

    def fill(self, tensor: Tensor) -> None:
        """Pack it."""
        part, seen, move = arrived(tensor), self.pack.move.seen, self.pack.move
        shift = part.storage_offset() * part.element_size() - seen.offset * seen.dtype.itemsize
        flat = flat_bytes(part, shift + move.begin, move.nbytes)
        if self.stays:
            self.flat, self.version = flat, version_of(flat)
            return
        form = self.pack.form
        with torch.no_grad():
            if form.into is not None:
                self.small = flat.view(form.of).to(form.into)
            else:
                self.small = bits_of(flat if form.of is torch.bool else (flat.view(form.of) != 0).view(torch.uint8))

    def open(self) -> Tensor:
        """What it was.

        Raises:
            StaleTensor: it stayed, and was written to.
        """
        if self.small is None:
            assert self.flat is not None
            if version_of(self.flat) != self.version:
                raise stale("a kept tensor", "a planned region", self.version, version_of(self.flat))
            return self.flat
        form = self.pack.form
        if form.into is not None:
            return self.small.to(form.of).view(torch.uint8)
        mask = from_bits(self.small, self.pack.mask_bytes)
        if form.of is torch.bool:
            return mask
        numbers = mask.to(form.of)
        return (numbers if form.divided is None else numbers.div_(form.divided)).view(torch.uint8)


def bits_of(flat: Tensor) -> Tensor:
    """Eight bytes in one, the first in its lowest bit, which is set where the byte is not 0; the last byte is filled up
    with zeros. Memory that nobody has written to, between what a mask sees, may hold any byte.
    """
    nbytes = flat.numel()
    packed = flat.new_empty(-(-nbytes // 8))
    for begin in range(0, nbytes, CHUNK_BYTES):
        words = _words(flat[begin : begin + CHUNK_BYTES])
        ones = (words & LOW).add_(LOW).bitwise_or_(words).bitwise_right_shift_(7).bitwise_and_(ONES)
        packed[begin // 8 : begin // 8 + words.numel()].copy_(ones.mul_(GATHER).bitwise_right_shift_(56))
    return packed


def from_bits(packed: Tensor, nbytes: int) -> Tensor:
    """The bytes that `bits_of` packed."""
    flat = packed.new_empty(8 * packed.numel())
    for begin in range(0, packed.numel(), CHUNK_BYTES // 8):
        spread = packed[begin : begin + CHUNK_BYTES // 8].to(torch.int64)
        # a copy of it in each byte, of which one bit stays, is carried to the highest place, and goes to the lowest
        spread.mul_(ONES).bitwise_and_(ONE_EACH).add_(CARRIES).bitwise_right_shift_(7).bitwise_and_(ONES)
        flat[8 * begin : 8 * (begin + spread.numel())].view(torch.int64).copy_(spread)
    return flat[:nbytes]


def _words(flat: Tensor) -> Tensor:
    """Bytes as integers of eight; a copy where they do not begin, or end, at one."""
    missing = -flat.numel() % 8
    if missing:
        flat = torch.cat((flat, flat.new_zeros(missing)))
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)
