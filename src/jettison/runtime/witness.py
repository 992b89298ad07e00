"""Witnesses: samples of dropped tensors, to compare with the recomputed ones.

NOTE [ The promise ]
A planned step and a plain one run the same forward, build the same graph and call the same backward kernels. They can
differ in one way only: if `unpack` gives the engine other bits than `pack` got. A recording can be outdated in
countless ways (numbers read out of tensors, Python state, random streams, instances that run other code), so the
promise does not depend on noticing those. Every tensor that will be recomputed leaves a witness, the bits of some of
its elements, taken in `pack`; `unpack` compares. Wrong values stay unnoticed only if every sampled element is equal. A
change of a share f of a tensor's elements escapes with probability (1 - f)^32 in one step, and other elements are
sampled in each call, so that a lasting error is caught. Tensors of up to 64 elements are compared completely; ``full``
compares a digest of every element.

NOTE [ When a difference is raised ]
On the CPU at once, in `unpack`. On an accelerator a comparison would synchronize with the device at every tensor: there
both samples are collected, compared together when backward is over, before the gradients can be used, and read once.
There, too, a recomputed matmul may use another kernel: differences within rounding are only counted, unless the check
is ``exact``. In a captured CUDA graph samples are compared in the graph, and `tell_replays` raises.

NOTE [ Where a witness is stored ]
On the CPU in a ``bytes`` object. Small tensors would be cut out of the large blocks that the last step gave back to
malloc, which would then be too small for tensors of their size: a GPT-2 took 20 % longer, all of it page faults. On an
accelerator, whose allocator has separate pools for small blocks, in a tensor, which the budget counts.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, prod
from operator import itemgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.core.errors import UsageError, WrongValue
from jettison.runtime import cuda_graphs

numpy: Any
try:
    import numpy
except ImportError:  # torch can be installed without it
    numpy = None
_ndarray: Any = getattr(numpy, "ndarray", None)

WHOLE_BELOW = 64  # elements up to which a tensor is compared completely
LOOKS = 32  # elements that are sampled of a larger one
SAMPLED_SHARE = 8  # with `sampled`, one slot in this many is compared in a step
SAMPLED_AFTER = 3  # with `sampled`, first runs of a recording in which every slot is compared
ROUNDING = 4.0  # units in the last place, of the largest sampled element, by which two runs of a matmul may differ
SALT = 7919  # shift of the sampled positions from one call of a region to the next
PIECE = 1 << 20  # elements of a tensor that are digested at a time


class Check(StrEnum):
    """Share of recomputed values that is compared with the forward's."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    FULL = "full"
    EXACT = "exact"
    OFF = "off"


def check_of(word: str | Check) -> Check:
    """The check of that name, or `UsageError`."""
    try:
        return Check(word)
    except ValueError:
        raise UsageError(f"check: got {word!r}; expected one of {', '.join(Check)}") from None


MEMORY: Final[Any] = (ctypes.c_char * 2**62).from_address(1)  # NumPy takes a buffer at 0 for none
Cut: TypeAlias = tuple[tuple[int, ...], Any, tuple[int, ...], int, int, int]
"""NumPy's arguments for elements of `MEMORY`: shape; dtype; strides in bytes; item size; if the start may move along
one line, the number of its positions, and the elements between them (0: several lines).
"""


@dataclass(frozen=True, slots=True)
class SamplePositions:
    """Sampled positions of a tensor of some layout: ``size`` and ``stride`` pick the elements; ``slack`` has the
    possible shifts of their start, as pairs of a number of positions and the elements between them.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    slack: tuple[tuple[int, int], ...]
    cuts: dict[torch.dtype, Cut | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cut(self, dtype: torch.dtype) -> Cut | None:
        """Return how to read elements of a dtype in place; None for dtypes that NumPy lacks, or without NumPy."""
        if dtype not in self.cuts:
            readable = dtype in _NUMBERS and numpy is not None and self.count > 0
            self.cuts[dtype] = self._cut(dtype.itemsize) if readable else None
        return self.cuts[dtype]

    def _cut(self, itemsize: int) -> Cut:
        strides = tuple(step * itemsize for step in self.stride)
        places, step = self.slack[0] if len(self.slack) == 1 else (0 if self.slack else 1, 0)
        return self.size, numpy.dtype(_WORDS[itemsize]), strides, itemsize, places, step

    @property
    def count(self) -> int:
        return prod(self.size)


@functools.lru_cache(maxsize=4096)
def spots_of(size: tuple[int, ...], stride: tuple[int, ...]) -> SamplePositions:
    """Positions to sample in a tensor of this size and stride: spread over all of it, never outside of it."""
    dims = [(n, step) for n, step in zip(size, stride, strict=True) if n != 1 and (step or n == 0)]
    count = prod(n for n, _ in dims)
    if count <= WHOLE_BELOW:
        return SamplePositions(tuple(n for n, _ in dims), tuple(step for _, step in dims), ())
    if _is_dense(dims):
        step = (count // LOOKS - 1) | 1  # odd: rows have lengths with many factors of two
        return SamplePositions((LOOKS,), (step,), ((count - (LOOKS - 1) * step, 1),))
    looks = LOOKS
    chosen = []  # a grid, with as many positions in each dim as their product needs
    for left, (n, step) in zip(range(len(dims), 0, -1), sorted(dims), strict=True):
        places = min(n, ceil(looks ** (1 / left) - 1e-9))
        looks = ceil(looks / places)
        chosen.append((places, n // places, n - (places - 1) * (n // places), step))
    return SamplePositions(
        tuple(places for places, _, _, _ in chosen),
        tuple(by * step for _, by, _, step in chosen),
        tuple((slack, step) for _, _, slack, step in chosen),
    )


def _is_dense(dims: Sequence[tuple[int, int]]) -> bool:
    expected = 1
    for n, step in sorted(dims, key=itemgetter(1)):
        if step != expected:
            return False
        expected *= n
    return True


def look(tensor: Tensor, spots: SamplePositions, salt: int) -> Tensor:
    """Sample a plain tensor's elements, as a new tensor. ``salt`` shifts the positions, equally for both samples."""
    if isinstance(tensor, FakeTensor):  # a dry run: only the bytes matter
        return tensor.detach().new_empty(spots.count)  # derived from it: an outer mode may make a bare `empty` real
    if tensor.is_conj() or tensor.is_neg():
        return _strided(tensor.detach(), spots, salt).clone()
    start = tensor.storage_offset() + _start(spots, salt)
    if tensor.requires_grad:
        tensor = tensor.detach()
    return torch.as_strided_copy(tensor, spots.size, spots.stride, start)  # one call, to save launches on a GPU


def peek(tensor: Tensor, spots: SamplePositions, salt: int) -> bytes | None:
    """Return the bytes of the same elements, read in place without calls of torch, of a plain tensor on the CPU or a
    subclass of one. None without NumPy, and for tensors without memory or of a dtype that NumPy lacks.
    """
    cut = spots.cuts.get(tensor.dtype) or spots.cut(tensor.dtype)
    if cut is None:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a transform's or a fake tensor, which wraps another one, or has no memory
        return None
    if not address:
        return None
    size, word, strides, itemsize, _, _ = cut
    address += _start(spots, salt) * itemsize
    return _ndarray(size, word, MEMORY, address - 1, strides).tobytes()


def _start(spots: SamplePositions, salt: int) -> int:
    start = 0
    for places, step in spots.slack:
        start += salt % places * step
        salt = salt * 31 + 7
    return start


def _strided(tensor: Tensor, spots: SamplePositions, salt: int) -> Tensor:
    return tensor.as_strided(spots.size, spots.stride, tensor.storage_offset() + _start(spots, salt))


def digest(tensor: Tensor, spots: SamplePositions) -> Tensor:
    """Digest of a plain tensor that changes with any element and position, with probability 1 - 2^-32."""
    if spots.slack == ():
        return look(tensor, spots, 0)
    tensor = tensor.detach()
    on_host = is_told_at_once(tensor)
    if isinstance(tensor, FakeTensor):
        if on_host:
            return tensor.new_empty(1, dtype=torch.int64)
        held = [tensor.new_empty(min(tensor.numel(), PIECE), dtype=torch.int64) for _ in range(2)]
        if not _is_dense([(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and step]):
            held.append(torch.empty_like(tensor, memory_format=torch.contiguous_format))
        sums = held[0].new_empty(-(-tensor.numel() // PIECE))
        return torch.empty_like(sums)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    bits = bits_of(tensor)
    dims = [(n, step) for n, step in zip(bits.shape, bits.stride(), strict=True) if n != 1 and step]
    dims.sort(key=itemgetter(1), reverse=True)
    ordered = bits.as_strided([n for n, _ in dims], [step for _, step in dims], bits.storage_offset())
    return torch.tensor([_checksum(ordered)]) if on_host else _weighted(ordered.reshape(-1))


def _checksum(bits: Tensor) -> int:
    """CRC-32 of a tensor in the order of its memory. A non-contiguous one is copied a piece at a time, not by torch."""
    if bits.is_contiguous() or bits.dim() == 1 or bits[0].numel() <= PIECE:
        rows = [bits] if bits.is_contiguous() else bits.split(max(1, PIECE // max(1, bits[0].numel())))
        return functools.reduce(lambda found, row: zlib.crc32(_buffer(row), found), rows, 0)
    found = 0
    for part in bits:
        found = found * 0x9E3779B1 + _checksum(part) & 0x7FFFFFFFFFFFFFFF
    return found


def _buffer(bits: Tensor) -> Any:
    """The bytes of a tensor on the CPU, in the order of its elements; without a copy if it is contiguous."""
    if numpy is not None:
        return numpy.ascontiguousarray(bits.numpy()).data
    dense = bits.contiguous()
    found = (ctypes.c_char * (dense.numel() * dense.element_size())).from_address(dense.data_ptr() or id(dense))
    found.tensor = dense  # keeps its memory alive
    return found


def _weighted(bits: Tensor) -> Tensor:
    """For every piece of a contiguous tensor the sum of its elements, weighted by position, modulo 2^64."""
    place = torch.arange(min(bits.numel(), PIECE), device=bits.device)
    weights = place.mul(0x9E3779B97F4A7C1).add_(0x2545F4914F6CDD1D).bitwise_xor_(place.bitwise_left_shift_(32))
    del place
    sums = []
    for piece in bits.split(PIECE):
        part = piece.to(torch.int64, copy=True).mul_(weights[: piece.numel()])
        sums.append(part.sum())
        del part
    return torch.stack(sums)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN equals itself there, and zero is not minus zero."""
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
_REAL = frozenset({Tensor, nn.Parameter})
_NUMBERS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.bfloat16, torch.float16, torch.float32, torch.float64}
)
Seen: TypeAlias = Tensor | bytes


class Witness:
    """Sample of one dropped tensor."""

    __slots__ = ("dtype", "full", "salt", "seen", "spots")

    def __init__(self, tensor: Tensor, spots: SamplePositions, salt: int, *, full: bool) -> None:
        self.spots = spots
        self.salt = salt
        self.full = full
        self.dtype = tensor.dtype
        self.seen: Seen = self._bytes(tensor) if is_told_at_once(tensor) else self.look(tensor)

    @classmethod
    def of_bytes(cls, seen: bytes, spots: SamplePositions, salt: int, dtype: torch.dtype) -> Witness:
        """Build from the bytes that `peek` returned."""
        found = object.__new__(cls)
        found.seen, found.spots, found.salt, found.dtype, found.full = seen, spots, salt, dtype, False
        return found

    def agrees(self, tensor: Tensor) -> bool:
        """Whether a plain tensor equals the sampled one in every sampled element."""
        return is_same(self.seen, self._bytes(tensor) if isinstance(self.seen, bytes) else self.look(tensor))

    def look(self, tensor: Tensor) -> Tensor:
        """Sample another tensor for a comparison, perhaps a deferred one."""
        return digest(tensor, self.spots) if self.full else look(tensor, self.spots, self.salt)

    def _bytes(self, tensor: Tensor) -> bytes:
        if tensor.__class__ in _REAL and not self.full and not tensor.is_neg():
            found = peek(tensor, self.spots, self.salt)
            if found is not None:
                return found
        if self.full or tensor.is_complex() or tensor.is_neg():
            bits = bits_of(self.look(tensor))
        elif isinstance(tensor, FakeTensor):
            return b""
        else:
            bits = bits_of(_strided(tensor.detach(), self.spots, self.salt))
        return b"" if isinstance(bits, FakeTensor) else bytes(_buffer(bits))


def is_same(first: Seen, second: Seen) -> bool:
    if isinstance(first, bytes) or isinstance(second, bytes):
        return first == second
    return torch.equal(bits_of(first), bits_of(second))


Describe = Callable[[], WrongValue]


@dataclass(kw_only=True)
class Rounded:
    """Number of tensors that differed by no more than rounding so far."""

    tensors: int = 0


Look: TypeAlias = tuple[Witness, Tensor, Rounded | None, Describe]


class PendingSamples(list[Look]):
    """Samples to compare at the end of their backward. Its callback owns them: a failing backward frees them."""


class _PendingByTask(threading.local):
    """Waiting samples of this thread, by graph task. A backward may run in several threads, and end in another one."""

    def __init__(self) -> None:
        self.waiting: weakref.WeakValueDictionary[int, PendingSamples] = weakref.WeakValueDictionary()


_pending = _PendingByTask()


def compare(witness: Witness, tensor: Tensor, rounded: Rounded | None, describe: Describe) -> None:
    """Compare a recomputed tensor with its witness, now or when backward is over. Raises `WrongValue` from
    ``describe``, or with ``rounded`` counts differences within rounding.
    """
    task = torch._C._current_graph_task_id()
    if task == -1 or isinstance(witness.seen, bytes):
        # in a dry run a real tensor that something fake was written into (`RealUntilFake`) has no values either
        is_dry = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if is_dry or isinstance(tensor, FakeTensor) or isinstance(witness.seen, FakeTensor):
            witness.look(tensor)  # only its bytes matter
        elif not witness.agrees(tensor):
            raise describe()
        return
    waiting = _pending.waiting.get(task)
    if waiting is None:
        waiting = _pending.waiting[task] = PendingSamples()
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(settle, waiting))
    waiting.append((witness, witness.look(tensor), rounded, describe))


def is_told_at_once(tensor: Tensor) -> bool:
    """Whether comparing needs no synchronization; see NOTE [ When a difference is raised ]."""
    return tensor.is_cpu or tensor.is_meta


def settle(waiting: PendingSamples) -> None:
    """Compare all samples of a backward, at its end. Raises `WrongValue` for the first tensor that was recomputed
    wrongly, or one in a replayed graph; `UsageError` in a capture without a backward before.
    """
    looks = list(waiting)
    waiting.clear()
    if cuda_graphs.is_capturing():
        _compare_in_graph(looks)
    elif _any_difference(looks):
        for witness, found, rounded, describe in looks:
            if is_same(witness.seen, found):
                continue
            assert isinstance(witness.seen, Tensor)
            rows = witness.seen.reshape(1, -1), found.reshape(1, -1)
            if rounded is None or witness.full or bool(exceeds_rounding(*rows)):
                raise describe()
            rounded.tensors += 1
        tell_replays()


@dataclass(kw_only=True)
class _Flag:
    """Flag on one device that a replayed graph has recomputed a wrong value. Its memory is in no graph's pool."""

    is_wrong: Tensor
    captured: bool = False


_flags: dict[torch.device, _Flag] = {}
"""By device, from the first plan or uncaptured backward on: replays would clear a flag created in a graph."""


def _by_kind(
    looks: list[Look], more: Callable[[Look], tuple[Any, ...]]
) -> Iterator[tuple[Any, list[Tensor], list[Tensor]]]:
    """Both samples of tensors, flat, grouped by device, dtype and ``more``."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for one in looks:
        witness, found, _, _ = one
        assert isinstance(witness.seen, Tensor)
        lists = kinds.setdefault((found.device, found.dtype, *more(one)), ([], []))
        lists[0].append(witness.seen.reshape(-1))
        lists[1].append(found.reshape(-1))
    return ((kind, *both) for kind, both in kinds.items())


def _any_difference(looks: list[Look]) -> bool:
    """Whether any samples differ; one read per device, whatever the number of tensors."""
    differs: dict[torch.device, Tensor] = {}
    for (device, _), before_all, after_all in _by_kind(looks, lambda look: ()):
        one = torch.ne(bits_of(torch.cat(before_all)), bits_of(torch.cat(after_all))).any()
        differs[device] = one if device not in differs else differs[device] | one
    real = {device: one for device, one in differs.items() if not isinstance(one, FakeTensor)}
    return any(bool(one | have_flag(device).is_wrong) for device, one in real.items())


def have_flag(device: torch.device) -> _Flag:
    """Allocate the flag of a device, outside of a capture. A planner does before it counts the memory in use."""
    if device not in _flags:
        _flags[device] = _Flag(is_wrong=torch.zeros((), dtype=torch.bool, device=device))
    return _flags[device]


def _compare_in_graph(looks: list[Look]) -> None:
    """Compare on the device, in a few ops for tensors of one kind, and set its flag."""
    kinds = _by_kind(looks, lambda look: (look[1].numel(), look[2] is None or look[0].full))
    for (device, _, count, exact), before_all, after_all in kinds:
        flag = _flags.get(device)
        if flag is None:
            cuda_graphs.refuse_capture("no backward of a planned step has run before")
            raise AssertionError
        first, second = torch.stack(before_all), torch.stack(after_all)
        if count:
            differs = bits_of(first) != bits_of(second) if exact else exceeds_rounding(first, second)
            flag.is_wrong.logical_or_(differs.any())
            flag.captured = True


def tell_replays() -> None:
    """Read the flags of captured steps, which synchronizes. Raise `WrongValue` if a replay recomputed a wrong value."""
    for flag in _flags.values():
        if flag.captured and not cuda_graphs.is_capturing() and bool(flag.is_wrong):
            flag.is_wrong.zero_()
            raise WrongValue(
                "a replayed CUDA graph of a planned step recomputed a saved tensor that is not what its forward had: "
                "something that its forward read was written to before its backward, inside of the graph or between "
                "two graphs. The gradients of the replays since the last look must not be used. Run the step without "
                "the graph, which names the tensor, and capture it again"
            )


def exceeds_rounding(first: Tensor, second: Tensor) -> Tensor:
    """Whether two samples, by row, differ by more than another order of summation explains."""
    if not first.dtype.is_floating_point:
        return (bits_of(first) != bits_of(second)).any(1)
    a, b = first.double(), second.double()
    unlike = (torch.isfinite(a) != torch.isfinite(b)).any(1)
    a, b = a.nan_to_num(), b.nan_to_num()
    bound = ROUNDING * torch.finfo(first.dtype).eps * torch.maximum(a.abs().amax(1), b.abs().amax(1))
    return unlike | ((a - b).abs() > bound[:, None]).any(1)
