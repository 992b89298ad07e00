"""What one operator costs on this machine: seconds, and the bytes its kernel takes and gives back inside the call.

Requests hold shapes, not data, so that a trace on fake tensors can ask for prices. Each distinct request is run on
stand-in tensors: floats are random, integers are zeros (a valid index everywhere), offsets of grouped matmuls split the
rows evenly. A price therefore knows nothing of values: a gather with all indices equal is kinder to caches than a
real one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves, tree_map

from jettison.measure.peak import ALLOCATION_EVENT
from jettison.trace.opinfo import is_communication

REPEATS = 3
OPERATOR_BUDGET_SECONDS = 0.006


@dataclass(frozen=True)
class TensorMeta:
    """A tensor without its data: the template of an argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Of a real or a fake tensor."""
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(shape, stride, tensor.dtype, str(tensor.device))

    @property
    def storage_elements(self) -> int:
        """Elements that the strides span; an expanded tensor spans fewer than it has."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


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
        """Equal for equal calls, in every process."""
        return f"{self.func}{self.args!r}{sorted(self.kwargs.items())!r}"


@dataclass(frozen=True, kw_only=True)
class OpPrice:
    """`seconds`: the least of a few runs, None where the operator could not be run. `workspace_bytes`: the allocator's
    peak inside the call, less its outputs (0 where it could not be run)."""

    seconds: float | None
    workspace_bytes: int


UNPRICED = OpPrice(seconds=None, workspace_bytes=0)
_PRICES: dict[str, OpPrice] = {}


def measure_ops(requests: Iterable[OpRequest], *, total_seconds: float = 10.0) -> dict[str, OpPrice]:
    """Prices by `OpRequest.key`. Distinct requests run once a process, in order of their keys; a cache has the rest.

    When `total_seconds` are spent, or an operator fails (out of memory, values it refuses, a fake-only device), the
    price is `UNPRICED`; only failures are remembered. Every random generator is left as it was.
    """
    distinct = {request.key: request for request in requests}
    missing = [distinct[key] for key in sorted(distinct) if key not in _PRICES]
    with _private_randomness(missing), torch.no_grad():
        seconds = _timed(missing, time.perf_counter() + total_seconds)
        timed = [request for request in missing if seconds.get(request.key) is not None]
        workspace = _workspace(timed)
    for request in missing:
        if request.key in seconds:
            bytes_ = workspace.get(request.key, 0)
            _PRICES[request.key] = OpPrice(seconds=seconds[request.key], workspace_bytes=bytes_)
    return {key: _PRICES.get(key, UNPRICED) for key in distinct}


class MeasuredWorkspace:
    """A `workspace` for `AllocationCounter` that looks measured prices up.

    Calls of an operator that has no price at all count as 0 and are listed in `unknown`. An operator whose every priced
    call took nothing is not looked up again: a key costs more than many a fake kernel.
    """

    def __init__(self, prices: Mapping[str, OpPrice]) -> None:
        self._prices = prices
        self._free: dict[str, bool] = {}
        for key, price in prices.items():
            name = key.partition("(")[0]
            self._free[name] = self._free.get(name, True) and not price.workspace_bytes
        self.unknown: dict[str, OpRequest] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes of workspace of this call."""
        if self._free.get(str(func), False):
            return 0
        request = OpRequest.of(func, args, kwargs)
        price = self._prices.get(request.key)
        if price is None:
            self.unknown[request.key] = request
            return 0
        return price.workspace_bytes


def _timed(requests: list[OpRequest], deadline: float) -> dict[str, float | None]:
    """Seconds by key; None for a failure; absent once the deadline has passed."""
    seconds: dict[str, float | None] = {}
    for request in requests:
        if time.perf_counter() > deadline:
            break
        if is_communication(request.func):  # the other ranks may not be asking
            seconds[request.key] = None
            continue
        try:
            args, kwargs = _stand_ins(request)
            seconds[request.key] = _least_seconds(request.func, args, kwargs)
        except Exception:  # an operator may refuse stand-in values in any way it likes; then it has no measured price
            seconds[request.key] = None
    return seconds


def _least_seconds(func: Any, args: Any, kwargs: Any) -> float:
    cuda = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs)))
    samples: list[float] = []
    first = _one_run(func, args, kwargs, cuda)  # warms caches; counts only where a second run is not affordable
    if first > 10 * OPERATOR_BUDGET_SECONDS:
        return first
    start = time.perf_counter()
    while len(samples) < REPEATS or (len(samples) < 20 and time.perf_counter() - start < OPERATOR_BUDGET_SECONDS):
        samples.append(_one_run(func, args, kwargs, cuda))
    return min(samples)  # what disturbs a run only ever adds to it


def _one_run(func: Any, args: Any, kwargs: Any, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    func(*args, **kwargs)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _workspace(requests: list[OpRequest]) -> dict[str, int]:
    """Peak bytes inside each call beyond its outputs."""
    on_cuda = [request for request in requests if _device_of(request).startswith("cuda")]
    on_cpu = [request for request in requests if _device_of(request) == "cpu"]
    found = {request.key: _cuda_workspace(request) for request in on_cuda}
    if on_cpu:
        found.update(_cpu_workspace(on_cpu))
    return found


def _cpu_workspace(requests: list[OpRequest]) -> dict[str, int]:
    """One profiler session for all: each call runs inside a named range, and the range claims its allocations."""
    outputs: dict[str, int] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for index, request in enumerate(requests):
            args, kwargs = _stand_ins(request)
            with record_function(_range_name(index)):
                out = request.func(*args, **kwargs)
            outputs[request.key] = _new_bytes(out, (args, kwargs))
            del out, args, kwargs
    events = profiler.profiler.kineto_results.events()
    names = {_range_name(index): request.key for index, request in enumerate(requests)}
    ranges = {names[event.name()]: (event.start_ns(), event.end_ns()) for event in events if event.name() in names}
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == ALLOCATION_EVENT)
    return {key: max(0, _peak_in(memory, *ranges[key]) - outputs[key]) for key in outputs if key in ranges}


def _peak_in(memory: list[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    live_bytes = peak_bytes = 0
    for at_ns, delta_bytes in memory:
        if start_ns <= at_ns <= end_ns:
            live_bytes += delta_bytes
            peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes


def _cuda_workspace(request: OpRequest) -> int:
    args, kwargs = _stand_ins(request)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = request.func(*args, **kwargs)
    torch.cuda.synchronize()
    inside_bytes = torch.cuda.max_memory_allocated() - before_bytes
    return max(0, inside_bytes - (torch.cuda.memory_allocated() - before_bytes if out is not None else 0))


def _new_bytes(out: Any, inputs: Any) -> int:
    """Bytes of distinct storages in `out` that are none of the inputs'."""
    known = {leaf.untyped_storage()._cdata for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    new = {}
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
            new[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
    return sum(new.values(), 0)


def _stand_ins(request: OpRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real arguments for a request; each spans the storage that its strides need, and no more."""
    args, kwargs = tree_map(
        lambda leaf: _stand_in(leaf) if isinstance(leaf, TensorMeta) else leaf, (request.args, dict(request.kwargs))
    )
    if request.func is torch.ops.aten._grouped_mm.default and len(args) > 2 and isinstance(args[2], Tensor):
        rows = args[0].shape[-1] if args[1].dim() == 2 else args[0].shape[0]
        args[2].copy_(torch.linspace(rows / args[2].numel(), rows, args[2].numel()).to(args[2].dtype))
    return args, kwargs


def _stand_in(meta: TensorMeta) -> Tensor:
    flat = torch.zeros(meta.storage_elements, dtype=meta.dtype, device=meta.device)
    if meta.dtype.is_floating_point and meta.dtype.itemsize >= 2:
        flat.uniform_(0.1, 1.0)
    return flat.as_strided(meta.shape, meta.stride)


def _device_of(request: OpRequest) -> str:
    leaves = tree_leaves((request.args, dict(request.kwargs)))
    devices = [leaf.device for leaf in leaves if isinstance(leaf, TensorMeta)]
    named = [str(leaf) for leaf in leaves if isinstance(leaf, torch.device)]
    return next((device for device in [*devices, *named] if device != "cpu"), "cpu")


def _range_name(index: int) -> str:
    return f"jettison.op.{index}"


@contextmanager
def _private_randomness(requests: list[OpRequest]) -> Iterator[None]:
    devices = {torch.device(device) for device in map(_device_of, requests) if device.startswith("cuda")}
    indices = sorted({device.index or 0 for device in devices})
    with torch.random.fork_rng(devices=indices):
        torch.manual_seed(0)
        yield
