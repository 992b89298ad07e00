"""Lossless packing of kept tensors: masks as bits, indices as the smallest integers that hold them.

NOTE [ Lossless ]
A buffer is packed only if the recording shows that nothing can be lost: its op makes bools, and all views of it are
bools; its op makes 64-bit positions along a dimension of known size, and all views are 64-bit; or its op draws zeros
and ones as numbers (`bernoulli_`, torch's dropout on a CPU), followed by at most one division by a number: the bits are
kept, and the division is recomputed. Buffers that are written to are not packed, as in `moves.moves_of`.

NOTE [ Bits ]
A number becomes the byte 0 or 1, and eight of these, taken as one integer, are gathered into its highest byte by one
multiplication. They are unpacked by a table of the values of each byte, made by the ops that made the numbers. For the
4.2 million numbers of one attention dropout in fp32 that is 0.8 and 0.9 ms on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from jettison.capture.recorder import RecordedOp, RegionTrace, TensorRef
from jettison.runtime.offloaded_ranges import Away, BufferRange, moves_of

aten = torch.ops.aten

CHUNK: Final = 1 << 20  # numbers that become bits at a time: bytes that packing allocates, twice
HIGHEST: Final = 7 if sys.byteorder == "little" else 0  # position of the highest of an integer's eight bytes
GATHER: Final = 0x0102040810204080
"""Factor that gathers eight bytes of 0 or 1, as one integer, in its highest byte, the first in the lowest bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedForm:
    """Element types of a buffer and of its packed form."""

    of: torch.dtype  # of all views
    into: torch.dtype | None = None  # None: bits
    divided: float | None = None  # the number by which drawn zeros and ones were divided, if any


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Range of a buffer, and its packed form."""

    move: BufferRange
    form: PackedForm

    @property
    def nbytes(self) -> int:
        count = self.move.nbytes // self.form.of.itemsize
        return -(-count // 8) if self.form.into is None else count * self.form.into.itemsize

    @property
    def mask_bytes(self) -> int:
        """Bytes of the bools that become bits, or of the integers that become smaller ones."""
        return self.move.nbytes // (self.form.of.itemsize if self.form.into is None else 1)


def packs_of(
    trace: RegionTrace, wanted: Iterable[int], reads: Mapping[int, list[TensorRef]], written: frozenset[int]
) -> dict[int, Pack]:
    """Packed forms of those ``wanted`` buffers that can be packed. Arguments as for `moves_of`."""
    found = {}
    for b, move in moves_of(trace, wanted, reads, written).items():
        refs = [move.seen, *(ref for ref in trace.slots if ref.buffer == b), *reads.get(b, [])]
        form = packs_into(trace, b, refs)
        if form is not None and move.gathered is None:
            found[b] = Pack(move=move, form=form)
    return found


def packs_into(trace: RegionTrace, b: int, refs: Iterable[TensorRef]) -> PackedForm | None:
    """Packed form of a buffer with the views ``refs``; None if no smaller one is known."""
    producer = trace.program.buffers[b].producer
    if producer is None:
        return None
    call = trace.calls[producer]
    made = next((ref for ref in call.outputs if ref is not None and ref.buffer == b), None)
    seen = {ref.dtype for ref in refs}
    if made is None or seen != {made.dtype}:
        return None
    if made.dtype is torch.bool:
        return PackedForm(of=torch.bool)
    if made.dtype.is_floating_point:
        return _drawn(trace, call, made)
    bound = _bound(call) if made.dtype is torch.int64 else None
    if bound is None:
        return None
    kinds = (torch.uint8, torch.int16, torch.int32)
    return next((PackedForm(of=torch.int64, into=kind) for kind in kinds if bound <= torch.iinfo(kind).max + 1), None)


def _drawn(trace: RegionTrace, call: RecordedOp, made: TensorRef) -> PackedForm | None:
    """Form of numbers that were drawn as zeros and ones, the complete buffer at once, and perhaps divided since."""
    divided: float | None = None
    if call.func is aten.div_.Scalar and isinstance(call.args[1], int | float):
        divided, before = float(call.args[1]), call.args[0]
        producer = trace.program.buffers[before.buffer].producer
        if producer is None or not divided > 0 or before.dtype is not made.dtype:
            return None
        call = trace.calls[producer]
    whole = prod(made.size) * made.dtype.itemsize == trace.program.buffers[made.buffer].nbytes
    return PackedForm(of=made.dtype, divided=divided) if whole and call.func is aten.bernoulli_.float else None


def _along(place: int) -> Callable[[RecordedOp], int]:
    """Number of positions along the dimension that this argument names; the last one by default."""

    def bound(call: RecordedOp) -> int:
        dim = call.kwargs.get("dim", call.args[place] if len(call.args) > place else -1)
        return int(call.args[0].size[dim]) if call.args[0].size else 1

    return bound


def _plane(dims: int) -> Callable[[RecordedOp], int]:
    """Number of positions in the last dimensions of the argument."""
    return lambda call: prod(call.args[0].size[-dims:])


_BOUNDS: Final[Mapping[str, Callable[[RecordedOp], int]]] = {
    "max_pool2d_with_indices": _plane(2),
    "max_pool3d_with_indices": _plane(3),
    "adaptive_max_pool2d": _plane(2),
    "adaptive_max_pool3d": _plane(3),
    "topk": _along(2),
    "sort": _along(1),
    "max": _along(1),
    "min": _along(1),
}
"""By op: the number of positions that its second result can hold."""


def _bound(call: RecordedOp) -> int | None:
    func = call.func
    if getattr(func, "namespace", "") != "aten" or len(call.outputs) < 2 or not isinstance(call.args[0], TensorRef):
        return None
    if func._overloadname == "stable":  # of sort, whose dimension is a keyword
        return _along(len(call.args))(call)
    found = _BOUNDS.get(func._opname)
    return None if found is None else found(call)


class Packed(Away):
    """A box whose value is packed."""

    __slots__ = ("pack",)

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack.move)
        self.pack = pack

    @property
    def on_device(self) -> Tensor | None:
        return self.flat if self.away is None else self.away

    def _send(self, flat: Tensor) -> Tensor:
        return pack_bytes(flat, self.pack.form)

    def _back(self) -> Tensor:
        return unpack_bytes(self.away, self.pack.form, self.move.nbytes)


def pack_bytes(flat: Tensor, form: PackedForm) -> Tensor:
    """Pack bytes into this form."""
    if form.into is not None:
        return flat.view(form.of).to(form.into)
    # memory between the elements of a mask may be uninitialized, and hold any byte
    return bits_of(flat if form.of is torch.bool else flat.view(form.of))


def unpack_bytes(small: Tensor, form: PackedForm, nbytes: int) -> Tensor:
    """Restore the ``nbytes`` bytes that `pack_bytes` packed."""
    if form.into is not None:
        return small.to(form.of).view(torch.uint8)
    return from_bits(small, form).view(torch.uint8).flatten()[:nbytes]


def bits_of(numbers: Tensor) -> Tensor:
    """Pack eight numbers into a byte, the first in its lowest bit, set if it is not 0; the last byte is zero-padded."""
    count = numbers.numel()
    packed = numbers.new_empty(-(-count // 8), dtype=torch.uint8)
    for begin in range(0, count, CHUNK):
        ones = numbers[begin : begin + CHUNK].to(torch.bool)
        if ones.numel() % 8:
            ones = torch.cat((ones, ones.new_zeros(-ones.numel() % 8)))
        gathered = (ones.view(torch.int64) * GATHER).view(torch.uint8)[HIGHEST::8]
        packed[begin // 8 : begin // 8 + gathered.numel()].copy_(gathered)
    return packed


def from_bits(packed: Tensor, form: PackedForm) -> Tensor:
    """Unpack the numbers that `bits_of` got, padding included: of shape (bytes, 8), or flat where that is faster."""
    places = torch.arange(8, device=packed.device)
    table = torch.arange(256, device=packed.device).unsqueeze(1).bitwise_right_shift(places).bitwise_and_(1)
    if form.of is torch.bool:  # eight of them are one integer
        return torch.index_select(table.to(torch.uint8).view(torch.int64).flatten(), 0, packed.int())
    numbers = table.to(form.of)
    return torch.index_select(numbers if form.divided is None else numbers.div_(form.divided), 0, packed.int())
