"""Trials of one kernel on made-up values: seconds, and the workspace that it allocates and frees inside the call.

Floats are random, integers are zeros (a valid index everywhere), offsets of grouped matmuls split the rows evenly,
packed sequences are as long as they can be, and a mask that selects rows has as many true elements as there are rows. A
price therefore does not depend on real values: a gather with equal indices uses caches better than a real one. On the
CPU the workspace of a grouped matmul depends on its largest group: the most of several splits counts.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.op_traits import writes
from jettison.capture.randomness import private_randomness
from jettison.capture.tensor_subclasses import parts_of, reach_of, storage_of
from jettison.dryrun.counter import ALLOCATION_EVENT, quiet_profiler

REPEATS = 3
OPERATOR_BUDGET_SECONDS = 0.006
TOGETHER = 256  # kernels in one profiler session
_BAG_SIZES = {
    torch.ops.aten._embedding_bag_backward.default: 4,
    torch.ops.aten._embedding_bag_dense_backward.default: 3,
}
"""Position of the argument with the rows of each bag."""
_MASKS = (torch.bool, torch.uint8)
_BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default)
_PUTS = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default)

# arguments ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorMeta:
    """A tensor without its data: the template of an argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    conj: bool = False  # a lazy conjugate view, which a kernel may materialize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Describe a real or a fake tensor."""
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(shape, stride, tensor.dtype, str(tensor.device), tensor.is_conj())

    @property
    def storage_elements(self) -> int:
        return reach_of(self.shape, self.stride)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage that the strides need."""
        return self.storage_elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class OpRequest:
    """One operator call whose price is wanted; tensors in `args` and `kwargs` are `TensorMeta`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> OpRequest:
        """From the arguments of a dispatched call, on real or fake tensors."""
        call = (args, dict(kwargs or {}))
        template = tree_map(lambda leaf: TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf, call)
        return cls(func=func, args=template[0], kwargs=template[1])

    @property
    def key(self) -> str:
        """Equal for calls that cost the same, in every process. An optimizer's numbers change from step to step, and
        elementwise work does not depend on them (but powers do)."""
        args, kwargs = self.args, self.kwargs
        if torch.Tag.pointwise in getattr(self.func, "tags", ()) and "pow" not in self.func._schema.name:
            args, kwargs = tree_map(lambda leaf: float if isinstance(leaf, float) else leaf, (args, dict(kwargs)))
        return f"{self.func}{args!r}{sorted(kwargs.items())!r}"

    @property
    def metas(self) -> list[TensorMeta]:
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, TensorMeta)]

    @property
    def device(self) -> str:
        named = [str(leaf) for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.device)]
        devices = [meta.device for meta in self.metas]
        return next((device for device in [*devices, *named] if device != "cpu"), "cpu")


DRAWN = 1 << 16
"""Numbers that a longer tensor repeats. Twice as many are drawn, and each tensor starts elsewhere among them."""
STRIDE = 7919
WORTH_KEEPING_BYTES = 1 << 18
MOST_KEPT_BYTES = 1 << 29


class StandInMemory:
    """Flat tensors on the CPU: floats between 0.1 and 1, everything else zeros.

    To fill an embedding's 150 MB with random numbers takes longer than most kernels that are tried on it. So numbers
    are drawn once, and copied; and what a kernel has only read the next one of the same size is given as it is.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._kept_bytes = 0
        self._drawn: dict[torch.dtype, Tensor] = {}
        self._start = 0

    def take(self, dtype: torch.dtype, elements: int) -> Tensor:
        """A flat tensor of so many elements, on a storage of just its size."""
        free = self._free.get((dtype, elements))
        if free:
            flat = free.pop()
            self._kept_bytes -= flat.nbytes
            return flat
        if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
            return torch.zeros(elements, dtype=dtype)
        flat = torch.empty(elements, dtype=dtype)
        self._fill(torch.view_as_real(flat).view(-1) if dtype.is_complex else flat)
        return flat

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Arguments that nothing was written to."""
        for tensor in tensors:
            storage_bytes = tensor.untyped_storage().nbytes()
            floats = tensor.is_floating_point() and tensor.itemsize >= 2
            if not floats or not WORTH_KEEPING_BYTES <= storage_bytes <= MOST_KEPT_BYTES - self._kept_bytes:
                continue
            elements = storage_bytes // tensor.itemsize
            self._free.setdefault((tensor.dtype, elements), []).append(tensor.as_strided((elements,), (1,), 0))
            self._kept_bytes += storage_bytes

    def _fill(self, flat: Tensor) -> None:
        if flat.dtype not in self._drawn:
            self._drawn[flat.dtype] = torch.empty(2 * DRAWN).uniform_(0.1, 1.0).to(flat.dtype)
        self._start = (self._start + STRIDE) % DRAWN
        drawn = self._drawn[flat.dtype][self._start : self._start + DRAWN]
        whole, rest = divmod(flat.numel(), DRAWN)
        if whole:
            flat[: whole * DRAWN].view(whole, DRAWN).copy_(drawn)
        flat[whole * DRAWN :].copy_(drawn[:rest])


# trials ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelRun:
    """Result of running a kernel here: `seconds` of one run (the first), and its workspace in bytes."""

    seconds: float
    workspace_bytes: int


def workspaces(requests: Sequence[OpRequest]) -> dict[str, KernelRun | Exception]:
    """Each kernel once; what it raised where it refuses its made-up arguments."""
    found: dict[str, KernelRun | Exception] = {}
    with private_randomness(r.device for r in requests), torch.no_grad():
        on_cpu = [request for request in requests if request.device == "cpu"]
        memory = StandInMemory()
        for start in range(0, len(on_cpu), TOGETHER):
            found.update(_cpu_runs(on_cpu[start : start + TOGETHER], memory))
        found.update((request.key, _device_run(request)) for request in requests if request.device != "cpu")
    return found


def least_seconds(request: OpRequest, first_seconds: float, memory: StandInMemory) -> float:
    """Least of a few runs; the first's if a second costs too much. ``memory``: of all timed requests."""
    if first_seconds > 10 * OPERATOR_BUDGET_SECONDS:
        return first_seconds
    samples: list[float] = []
    with torch.no_grad(), _stand_ins(request, memory) as (args, kwargs):
        start = time.perf_counter()
        while len(samples) < REPEATS or (len(samples) < 20 and time.perf_counter() - start < OPERATOR_BUDGET_SECONDS):
            samples.append(one_run(request.func, args, kwargs, request.device))
    return min(samples)  # what disturbs a run only ever adds to it


def one_run(func: Any, args: Any, kwargs: Any, device: str) -> float:
    """Seconds of a call, the device's work included."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    func(*args, **kwargs)
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _cpu_runs(requests: Sequence[OpRequest], memory: StandInMemory) -> dict[str, KernelRun | Exception]:
    """One profiler session for all: each call runs inside a named range, and the range claims its allocations."""
    outputs: dict[str, int] = {}
    found: dict[str, KernelRun | Exception] = {}
    names: dict[str, str] = {}
    with quiet_profiler(), profile(profile_memory=True) as profiler:
        for index, request in enumerate(requests):
            try:
                with _stand_ins(request, memory) as (args, kwargs):
                    for split, largest in enumerate(_largest_groups(request, args)):
                        if largest:  # the last group; the others are even
                            others, rows = args[2].numel() - 1, _grouped_rows(request, args)
                            ends = torch.linspace((rows - largest) / max(1, others), rows - largest, others).tolist()
                            args[2].copy_(torch.tensor([*map(int, ends), rows]))
                        name = f"jettison.op.{index}.{split}"
                        names[name] = request.key
                        with record_function(name):
                            out = request.func(*args, **kwargs)
                        if request.func is torch.ops.aten.convolution_backward.default:
                            # on the CPU it may return gradients that its mask does not want, which fake tensors do not:
                            # they are bytes inside of the call
                            out = [tensor for tensor, wanted in zip(out, args[-1], strict=True) if wanted]
                        outputs[request.key] = _new_bytes(out, (args, kwargs))
                        del out
                del args, kwargs
            except Exception as error:  # a kernel may refuse stand-in values in any way it likes
                found[request.key] = error.with_traceback(None)
    assert profiler.kineto_results is not None, "it has ended"
    events = profiler.kineto_results.events()
    ranges = {event.name(): (event.start_ns(), event.end_ns()) for event in events if event.name() in names}
    allocations = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == ALLOCATION_EVENT)
    starts = [at for at, _ in allocations]
    for name, key in names.items():
        known = found.get(key)
        if isinstance(known, Exception):
            continue
        begin, end = ranges[name]
        inside = allocations[bisect_left(starts, begin) : bisect_right(starts, end)]
        nbytes = max(0, max(accumulate((delta_bytes for _, delta_bytes in inside), initial=0)) - outputs[key])
        seconds = (end - begin) / 1e9
        if known is not None:  # another split of the same rows
            seconds, nbytes = known.seconds, max(known.workspace_bytes, nbytes)
        found[key] = KernelRun(seconds=seconds, workspace_bytes=nbytes)
    return found


def _largest_groups(request: OpRequest, args: tuple[Any, ...]) -> list[int]:
    """Rows of the largest group in each split that is tried; 0 stands for the arguments as they are.

    Powers of two, and one less of each: kernels with tiles of a processor's own (AMX) fill up what these do not divide.
    """
    if not (rows := _grouped_rows(request, args)):
        return [0]
    powers = [1 << n for n in range(rows.bit_length()) if rows >= 1 << n > rows // args[2].numel()]
    return list(dict.fromkeys([0, *(n - less for n in (*powers, rows) for less in (1, 0) if n > less)]))


def _grouped_rows(request: OpRequest, args: tuple[Any, ...]) -> int:
    """Number of rows that the offsets of a grouped matmul divide; 0 for other calls."""
    if request.func is not torch.ops.aten._grouped_mm.default or len(args) < 3 or not isinstance(args[2], Tensor):
        return 0
    return int(args[0].shape[-1] if args[1].dim() == 2 else args[0].shape[0])


def _device_run(request: OpRequest) -> KernelRun | Exception:
    try:
        args, kwargs = _made_up(request, _memory)
        if not request.device.startswith("cuda"):
            return KernelRun(seconds=one_run(request.func, args, kwargs, request.device), workspace_bytes=0)
        torch.cuda.synchronize(device := torch.device(request.device))
        before_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        out = request.func(*args, **kwargs)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        inside_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
        kept_bytes = torch.cuda.memory_allocated(device) - before_bytes if out is not None else 0
        return KernelRun(seconds=seconds, workspace_bytes=max(0, inside_bytes - kept_bytes))
    except Exception as error:  # out of memory, no such device, refused values
        return error.with_traceback(None)


def _new_bytes(out: Any, inputs: Any) -> int:
    """Bytes of distinct storages in `out` that are none of the inputs'."""
    known = {storage_of(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    parts = [part for leaf in tree_leaves(out) if isinstance(leaf, Tensor) for part in parts_of(leaf)]
    new = {storage_of(part): part.untyped_storage().nbytes() for part in parts if storage_of(part) not in known}
    return sum(new.values(), 0)


@contextmanager
def _stand_ins(request: OpRequest, memory: StandInMemory) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Real arguments for a request, whose memory the next one may have."""
    taken: list[Tensor] = []

    def make(meta: TensorMeta) -> Tensor:
        if meta.device != "cpu":
            return _memory(meta)
        taken.append(memory.take(meta.dtype, meta.storage_elements).as_strided(meta.shape, meta.stride))
        return taken[-1]

    args, kwargs = _made_up(request, make)
    try:
        yield args, kwargs
    finally:
        written = {id(tensor) for tensor in writes(request.func, args, kwargs)}
        memory.give_back([tensor for tensor in taken if id(tensor) not in written])


def _made_up(request: OpRequest, make: Callable[[TensorMeta], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real arguments for a request; each spans the storage that its strides need, and no more."""

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):  # the user's own
            return leaf.clone_state()
        if not isinstance(leaf, TensorMeta):
            return leaf
        return make(leaf).conj() if leaf.conj else make(leaf)

    args, kwargs = tree_map(stand_in, (request.args, dict(request.kwargs)))
    if rows := _grouped_rows(request, args):
        args[2].copy_(torch.linspace(rows / args[2].numel(), rows, args[2].numel()).to(args[2].dtype))
    if request.func is torch.ops.aten._scaled_dot_product_efficient_attention_backward.default:
        args = (*args[:7], *(seed.cpu() for seed in args[7:9]), *args[9:])  # the kernel's caller reads them
    if request.func is torch.ops.aten._pack_padded_sequence.default:
        args[1].fill_(args[0].shape[1 if args[2] else 0])
    if request.func in _PUTS:
        _fill_mask(*args[:3])
    if request.func in _BAG_SIZES and (at := _BAG_SIZES[request.func]) < len(args):
        args = (*args[:at], torch.ones_like(args[at]), *args[at + 1 :])  # a row of each bag has a gradient
    if request.func in _BY_MASK:  # all true: the most that there can be
        masks = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor) and leaf.dtype in _MASKS]
        ones = {id(mask): torch.ones_like(mask, memory_format=torch.contiguous_format) for mask in masks}
        args = (args[0], tree_map(lambda leaf: ones.get(id(leaf), leaf), args[1]), *args[2:])
    return args, kwargs


def _fill_mask(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> None:
    """A mask that is the only index is true at as many places as there are values for; at all, where one value goes to
    each. With fewer, aten/src/ATen/native/TensorAdvancedIndexing.cpp refuses the values.
    """
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype not in _MASKS:
        return
    ((dim, mask),) = given
    places = values.dim() - (x.dim() - dim - mask.dim()) - 1  # values are aligned at their last dim
    count = values.shape[places] if places >= 0 else 1
    flat = torch.arange(mask.numel(), device=mask.device) < (mask.numel() if count == 1 else count)
    mask.copy_(flat.view(mask.shape))


def _memory(meta: TensorMeta) -> Tensor:
    flat = torch.zeros(meta.storage_elements, dtype=meta.dtype, device=meta.device)
    if (meta.dtype.is_floating_point or meta.dtype.is_complex) and meta.dtype.itemsize >= 2:
        flat.uniform_(0.1, 1.0)
    return flat.as_strided(meta.shape, meta.stride)
