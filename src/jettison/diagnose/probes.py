"""Probes of a machine: matmuls, fused attention, copies, ordinary ops, collectives; and their timing.

Calls are timed in rounds over all of them, so that a temporary disturbance affects all of them.

NOTE [ Clocks ]
A single thread is timed by its CPU time, which excludes other processes of a shared machine. Several threads, and
devices after a synchronization, are timed by the wall clock. Other processes share caches and memory, and can only make
a call longer: the lower quartile of the samples counts.

NOTE [ Cold data ]
Weights and saved tensors of a training step are seldom in a cache. So operands come from a pool that is larger than
caches, at another offset for each call, and results are kept for a while before their memory is reused.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jettison.capture.tracer import trace_model
from jettison.core.errors import UsageError
from jettison.core.process import uncollected
from jettison.core.progress import Progress, silent
from jettison.cost.kernel import Gemm
from jettison.diagnose.finding import table
from jettison.runtime.install import install
from jettison.solve.checkpoint_policy import KeepAll

# seconds --------------------------------------------------------------------------------------------------------------

SAMPLE_SECONDS = 2e-3
"""Length of a sample, which repeats a call: clocks have a coarse resolution and an overhead."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
GIVE_UP_SECONDS = 0.5
"""Limit of a call, above which it is skipped."""


class Clock(StrEnum):
    """Clock of a measurement: see NOTE [ Clocks ]."""

    THREAD = "seconds of one CPU thread"
    WALL = "wall-clock seconds"
    CUDA = "wall-clock seconds of the device"

    def now(self) -> float:
        """Return the time, after the device's queued work."""
        if self is Clock.THREAD:
            return time.thread_time()
        if self is Clock.CUDA:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Probe:
    """A call to measure. ``run`` gets an increasing number, so that calls can use different data."""

    name: str
    run: Callable[[int], object]


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a device."""
    if device.type == "cuda":
        return Clock.CUDA
    return Clock.THREAD if torch.get_num_threads() == 1 else Clock.WALL


def time_probes(
    probes: Sequence[Probe], clock: Clock, *, seconds: float, needed: bool = False, say: Progress = silent
) -> dict[str, float]:
    """Return the seconds of each call: the lower quartile over rounds.

    Args:
        seconds: wall-clock limit, after which no round begins, within 3 to 25 rounds.
        needed: all calls are required; otherwise those that fail or take too long are skipped.
    """
    deadline = time.perf_counter() + seconds
    samplers = []
    for probe in probes:
        say(f"trying {probe.name}")
        sampler = _Sampler(probe, clock, needed)
        if sampler.usable:
            samplers.append(sampler)
    samples: dict[str, list[float]] = {sampler.name: [] for sampler in samplers}
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        say(f"round {number + 1} of {len(samplers)} calls")
        gc.collect()
        with uncollected():
            for sampler in samplers[:: 1 if number % 2 == 0 else -1]:
                samples[sampler.name].append(sampler.sample())
    return {name: statistics.quantiles(found, n=4, method="inclusive")[0] for name, found in samples.items()}


class _Sampler:
    """A probe, and the number of calls in one of its samples."""

    def __init__(self, probe: Probe, clock: Clock, needed: bool) -> None:
        self.name, self._run, self._clock, self._turn = probe.name, probe.run, clock, 0
        self.usable, self._calls = True, 1
        try:
            self.sample()  # warms up
            once = self.sample()
        except (RuntimeError, NotImplementedError):  # an op that this device or this build does not have
            if needed:
                raise
            self.usable = False
            return
        self.usable = needed or once < GIVE_UP_SECONDS
        self._calls = max(1, min(1000, round(SAMPLE_SECONDS / max(once, 1e-7))))

    def sample(self) -> float:
        start = self._clock.now()
        for _ in range(self._calls):
            self._run(self._turn)
            self._turn += 1
        return (self._clock.now() - start) / self._calls


# sizes and data -------------------------------------------------------------------------------------------------------

BLOCKS = 6
"""Number of blocks or layers in a step: together larger than caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the probes for a device.

    Args:
        gemms: (rows, outputs, inputs) of matmuls y = x W^T.
        attention: (batch, heads, sequence, head dim).
        streamed: elements of a copy, larger than caches.
        block: (rows, width) of the block of ordinary ops.
        layer: (rows, width, heads) of layers with and without the runtime's hooks: on CPU, with more weights than
            caches, so that Python's own data is as cold as between the matmuls of a model.
        pool_bytes: of operands and of results; see NOTE [ Cold data ].
    """

    gemms: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    streamed: int
    block: tuple[int, int]
    layer: tuple[int, int, int]
    pool_bytes: int


def sizes_for(device: torch.device, *, short: bool) -> Sizes:
    """Return the sizes of `probes.toml` for a device; ``short``: every second matmul and attention."""
    row = table("probes")["cuda" if device.type == "cuda" else "cpu"]
    sizes = Sizes(**{name: _frozen(value) for name, value in row.items()})
    return replace(sizes, gemms=sizes.gemms[1::2], attention=sizes.attention[1::2]) if short else sizes


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class OperandPool:
    """Pool of operands at changing offsets, and of results that are kept for a while."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = nbytes
        self._flat = torch.rand(nbytes // dtype.itemsize, dtype=torch.float32, device=device).to(dtype)
        self._at = 0
        self._kept: deque[Any] = deque()
        self._kept_bytes = 0

    def take(self, *shape: int) -> Tensor:
        """Return a tensor at the next offset, whose elements are cold."""
        size = prod(shape)
        if self._at + size > self._flat.numel():
            self._at = 0
        found = self._flat[self._at : self._at + size].view(shape)
        self._at += size
        return found

    def keep(self, result: Tensor) -> None:
        """Keep a result until later ones fill the pool's size."""
        self._kept.append(result)
        self._kept_bytes += result.nbytes
        while self._kept_bytes > self._nbytes:
            self._kept_bytes -= self._kept.popleft().nbytes


def gemm_probes(sizes: Sizes, pool: OperandPool, dtype: str) -> Iterator[tuple[Gemm, Probe]]:
    """Yield each y = x W^T, and both matmuls of its backward, as autograd calls them."""
    for m, n, k in sizes.gemms:
        forms: tuple[tuple[str, Gemm, Callable[[int], None]], ...] = (
            ("y", Gemm(1, m, n, k, dtype), _call(pool, (m, k), (n, k), lambda x, w: x @ w.t())),
            ("dx", Gemm(1, m, k, n, dtype), _call(pool, (m, n), (n, k), lambda g, w: g @ w)),
            ("dW", Gemm(1, n, k, m, dtype), _call(pool, (m, n), (m, k), lambda g, x: g.t() @ x)),
        )
        for form, gemm, run in forms:
            yield gemm, Probe(f"{dtype} matmul {form} {m} x {n} x {k}", run)


def _call(
    pool: OperandPool, first: tuple[int, int], second: tuple[int, int], op: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[int], None]:
    def run(_turn: int) -> None:
        pool.keep(op(pool.take(*first), pool.take(*second)))

    return run


def attention_probes(sizes: Sizes, pool: OperandPool) -> Iterator[tuple[str, float, Probe, Probe]]:
    """Yield causal attention: name, unmasked FLOPs of its forward, the forward, and forward with backward."""
    for b, a, s, d in sizes.attention:
        shape = (b, a, s, d)

        def forward(_turn: int, shape: tuple[int, ...] = shape) -> None:
            q, k, v = (pool.take(*shape) for _ in range(3))
            pool.keep(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))

        def both(_turn: int, shape: tuple[int, ...] = shape) -> None:
            q, k, v = (pool.take(*shape).detach().requires_grad_() for _ in range(3))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), pool.take(*shape))

        flops = 4.0 * b * a * s * s * d * (s + 1) / (2 * s)
        name = f"attention {b} x {a} x {s} x {d}"
        yield name, flops, Probe(name, forward), Probe(f"{name}, forward and backward", both)


def stream_probe(sizes: Sizes, device: torch.device) -> tuple[int, Probe]:
    """Return bytes and probe of the sum of two large tensors into a third."""
    a, b, out = (torch.ones(sizes.streamed, device=device) for _ in range(3))
    return 3 * out.nbytes, Probe("streaming", lambda _turn: torch.add(a, b, out=out))


def host_probes(nbytes: int, device: torch.device) -> tuple[Probe, Probe]:
    """Return copies between pinned memory and the device, in both directions."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return (
        Probe("host to device", lambda _turn: there.copy_(here, non_blocking=True)),
        Probe("device to host", lambda _turn: here.copy_(there, non_blocking=True)),
    )


# ordinary ops ---------------------------------------------------------------------------------------------------------


def step_of_blocks(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Callable[[int], None]:
    """Return forward and backward of a few gated blocks without their matmuls: norms, activations and sums."""
    weights = [torch.ones(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2 * BLOCKS)]
    given = torch.randn(rows, width, device=device).to(dtype).requires_grad_()

    def step(_turn: int) -> None:
        x = given
        for number in range(BLOCKS):
            scale, gate = weights[2 * number : 2 * number + 2]
            normed = scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
            x = x + torch.nn.functional.silu(normed) * (normed * gate)
        torch.autograd.grad(x, (given, *weights), given.detach())

    return step


class _ProbeLayer(nn.Module):
    """A layer with modules and views, as in models, whose ops have costs in addition to their kernels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        normed = self._norm(x, 0)
        q, k, v = (m(normed).view(b, s, self.heads, -1).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        normed = self._norm(x, 1)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))

    def _norm(self, x: Tensor, number: int) -> Tensor:
        return self.scale[number] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def step_of_layers(
    rows: int, width: int, heads: int, device: torch.device, dtype: torch.dtype, *, hooked: bool = False
) -> tuple[int, Callable[[int], None]]:
    """Return forward and backward of a few layers; and the number of tensors they save, if hooks keep all of them."""
    model = nn.Sequential(*(_ProbeLayer(width, heads) for _ in range(BLOCKS))).to(device, dtype)
    x = torch.randn(1, rows, width, device=device).to(dtype)
    slots = 0
    if hooked:
        traced = trace_model(model, (x,), loss_fn=torch.sum)
        for region in install(model, traced, {call.name: KeepAll() for call in traced.calls}, KeepAll()):
            region.live()  # a counter; otherwise regions that keep everything run without hooks
        slots = len(traced.root.program.slots) + sum(len(traced.program(call).slots) for call in traced.calls)

    def step(_turn: int) -> None:
        model(x).sum().backward()
        model.zero_grad()

    return slots, step


class KernelCounter(TorchDispatchMode):
    """Counter of kernels, without views, and of the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.nbytes = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values()
        given = {t.untyped_storage().data_ptr() for t in read}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        written = [t for t in made if func._schema.is_mutable or t.untyped_storage().data_ptr() not in given]
        if written:
            self.kernels += 1
            # expanded elements once
            self.nbytes += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*read, *written))
        return out


def counted(step: Callable[[int], None]) -> KernelCounter:
    """Count the kernels and bytes of one step."""
    with KernelCounter() as found:
        step(0)
    return found


# collectives ----------------------------------------------------------------------------------------------------------

SMALL_BYTES, LARGE_BYTES = 4 << 10, 32 << 20
WARM_UP, ROUNDS = 2, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFit:
    """Link between ranks of this machine: bytes per second of a ring at each rank, and latency of one of its steps."""

    ranks: int
    bytes_per_second: float
    step_seconds: float


def measure_link(ranks: int, device: str, say: Progress = silent) -> LinkFit:
    """Measure small and large all-gathers and all-reduces. Raise `UsageError` for fewer than two ranks, fewer devices
    than ranks, or a torch without distribution.

    Args:
        ranks: processes to start; an initialized process group is used instead, and all its ranks must call this.
        device: "cuda", one device for each rank, or "cpu".
    """
    say(f"collectives between {ranks} ranks")
    if not distributed.is_available():
        raise UsageError("this torch was built without torch.distributed; drop --ranks")
    if distributed.is_initialized():
        return _measured_link(distributed.get_world_size(), device)
    if ranks < 2:
        raise UsageError(f"got {ranks} ranks; collectives take 2 or more")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise UsageError(f"got {ranks} ranks for {torch.cuda.device_count()} devices; expected at most as many")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, device, folder), nprocs=ranks)
        found = json.loads((Path(folder) / "link.json").read_text(encoding="utf-8"))
    return LinkFit(**found)


def _rank(rank: int, ranks: int, device: str, folder: str) -> None:
    """Measure in one process."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    try:
        link = _measured_link(ranks, device)
        if rank == 0:
            (Path(folder) / "link.json").write_text(json.dumps(asdict(link)), encoding="utf-8")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _measured_link(ranks: int, device: str) -> LinkFit:
    """Fit a ring: an all-gather moves (n - 1) / n of a tensor in n - 1 steps, an all-reduce twice that."""
    steps = ranks - 1
    gather, reduce = (_seconds(call, SMALL_BYTES, ranks, device) for call in (_gather, _reduce))
    step = min(gather / steps, reduce / (2 * steps))
    large = [_seconds(call, LARGE_BYTES, ranks, device) for call in (_gather, _reduce)]
    moved = LARGE_BYTES * steps / ranks
    rates = [moved * passes / max(s - passes * steps * step, 0.1 * s) for s, passes in zip(large, (1, 2), strict=True)]
    return LinkFit(ranks=ranks, bytes_per_second=statistics.mean(rates), step_seconds=step)


def _gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    newer = getattr(distributed, "all_gather_single", None)  # the name that torch 2.13 prefers
    (newer or distributed.all_gather_into_tensor)(whole, part)


def _reduce(whole: torch.Tensor, _part: torch.Tensor) -> None:
    distributed.all_reduce(whole)


def _seconds(call: Callable[[torch.Tensor, torch.Tensor], None], nbytes: int, ranks: int, device: str) -> float:
    """Median over rounds of the slowest rank's seconds."""
    part = torch.zeros(nbytes // 4 // ranks, device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    samples = []
    for number in range(WARM_UP + ROUNDS):
        distributed.barrier()
        start = time.perf_counter()
        call(whole, part)
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            samples.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(samples)], device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return float(slowest.item())
