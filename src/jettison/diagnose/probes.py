"""Probes of a machine: matmuls, fused attention, copies, ordinary ops, collectives; and how their seconds are taken.

Calls are timed in rounds over all of them, so that what disturbs a machine for a while disturbs all of them.

NOTE [ Whose seconds ]
A single thread is timed by the seconds that it ran, so that what else a shared machine does is not counted. Several
threads wait for each other, and a device is not asked: their seconds are the wall's, those of a device with an end that
waits for it. Either way others share caches and memory, and can only make a call longer: of many samples the lower
quartile counts.

NOTE [ Cold data ]
A training step seldom finds a weight, or what a layer saved, in a cache. So operands come from a pool that is larger
than caches, each call from another place of it, and results stay for a while before their memory is used again.
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
from jettison.cost.kernel import Product
from jettison.diagnose.finding import table
from jettison.diagnose.fit import LinkFit
from jettison.runtime.install import install
from jettison.solve.policy import KeepAll

# seconds --------------------------------------------------------------------------------------------------------------

SAMPLE_SECONDS = 2e-3
"""A sample repeats a call until it takes about as long as this: clocks are coarse, and starting one costs."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
GIVE_UP_SECONDS = 0.5
"""A call that takes longer is left out: it would eat the time of all others."""


class Clock(StrEnum):
    """Whose seconds: see NOTE [ Whose seconds ]."""

    THREAD = "seconds of one CPU thread"
    WALL = "wall-clock seconds"
    CUDA = "wall-clock seconds of the device"

    def now(self) -> float:
        """A moment, the device's work included."""
        if self is Clock.THREAD:
            return time.thread_time()
        if self is Clock.CUDA:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Probe:
    """One call whose seconds are wanted. ``run`` is given a number that grows, so that data need not be the same."""

    name: str
    run: Callable[[int], object]


def clock_for(device: torch.device) -> Clock:
    """The clock that suits a device."""
    if device.type == "cuda":
        return Clock.CUDA
    return Clock.THREAD if torch.get_num_threads() == 1 else Clock.WALL


def undisturbed(
    probes: Sequence[Probe], clock: Clock, *, seconds: float, needed: bool = False, say: Progress = silent
) -> dict[str, float]:
    """Seconds of each call: the lower quartile over rounds.

    Args:
        seconds: on the wall after which no further round begins; three there are anyway, and at most 25.
        needed: there is no doing without any of them; otherwise those that fail or take too long are left out.
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
    """A probe, and how many calls make a sample of it."""

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
"""In a step of blocks or layers: together, blocks hold more than caches do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large the work is that suits a device.

    Args:
        products: (rows, outputs, inputs) of y = x W^T.
        attention: (batch, heads, sequence, width of a head).
        streamed: elements of a copy that no cache holds.
        block: (rows, width) of the block of ordinary ops.
        layer: (rows, width, heads) of layers that are run with and without the runtime's hooks: on a CPU, more weights
            than caches hold, so that Python finds them as cold as between the products of a model.
        pool_bytes: of operands and of results; see NOTE [ Cold data ].
    """

    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    streamed: int
    block: tuple[int, int]
    layer: tuple[int, int, int]
    pool_bytes: int


def sizes_for(device: torch.device, *, short: bool) -> Sizes:
    """Return what suits a device, as `probes.toml` says; ``short``: every second matmul and attention."""
    row = table("probes")["cuda" if device.type == "cuda" else "cpu"]
    sizes = Sizes(**{name: _frozen(value) for name, value in row.items()})
    return replace(sizes, products=sizes.products[1::2], attention=sizes.attention[1::2]) if short else sizes


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class OperandPool:
    """Operands from a stretch of memory that moves on with every turn, and results that stay for a while."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = nbytes
        self._flat = torch.rand(nbytes // dtype.itemsize, dtype=torch.float32, device=device).to(dtype)
        self._at = 0
        self._kept: deque[Any] = deque()
        self._kept_bytes = 0

    def take(self, *shape: int) -> Tensor:
        """A tensor whose elements were not used lately."""
        size = prod(shape)
        if self._at + size > self._flat.numel():
            self._at = 0
        found = self._flat[self._at : self._at + size].view(shape)
        self._at += size
        return found

    def keep(self, result: Tensor) -> None:
        """Hold a result until as many bytes came after it as the pool has."""
        self._kept.append(result)
        self._kept_bytes += result.nbytes
        while self._kept_bytes > self._nbytes:
            self._kept_bytes -= self._kept.popleft().nbytes


# matrix products ------------------------------------------------------------------------------------------------------


def product_probes(sizes: Sizes, pool: OperandPool, dtype: str) -> Iterator[tuple[Product, Probe]]:
    """Each y = x W^T, and both products of its backward, as autograd calls them."""
    for m, n, k in sizes.products:
        forms: tuple[tuple[str, Product, Callable[[int], None]], ...] = (
            ("y", Product(1, m, n, k, dtype), _call(pool, (m, k), (n, k), lambda x, w: x @ w.t())),
            ("dx", Product(1, m, k, n, dtype), _call(pool, (m, n), (n, k), lambda g, w: g @ w)),
            ("dW", Product(1, n, k, m, dtype), _call(pool, (m, n), (m, k), lambda g, x: g.t() @ x)),
        )
        for form, product, run in forms:
            yield product, Probe(f"{dtype} product {form} {m} x {n} x {k}", run)


def _call(
    pool: OperandPool, first: tuple[int, int], second: tuple[int, int], op: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[int], None]:
    def run(_turn: int) -> None:
        pool.keep(op(pool.take(*first), pool.take(*second)))

    return run


# attention ------------------------------------------------------------------------------------------------------------


def attention_probes(sizes: Sizes, pool: OperandPool) -> Iterator[tuple[str, float, Probe, Probe]]:
    """Causal attention: its name, its forward's FLOPs that are not masked, its forward, and both passes."""
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
        yield name, flops, Probe(name, forward), Probe(f"{name}, both passes", both)


# memory ---------------------------------------------------------------------------------------------------------------


def stream_probe(sizes: Sizes, device: torch.device) -> tuple[int, Probe]:
    """A sum of two large tensors into a third: bytes, and the call."""
    a, b, out = (torch.ones(sizes.streamed, device=device) for _ in range(3))
    return 3 * out.nbytes, Probe("streaming", lambda _turn: torch.add(a, b, out=out))


def host_probes(nbytes: int, device: torch.device) -> tuple[Probe, Probe]:
    """Copies to the device and from it, from memory that the device reads by itself."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return (
        Probe("host to device", lambda _turn: there.copy_(here, non_blocking=True)),
        Probe("device to host", lambda _turn: here.copy_(there, non_blocking=True)),
    )


# ordinary ops ---------------------------------------------------------------------------------------------------------


def step_of_blocks(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Callable[[int], None]:
    """Forward and backward of a few gated blocks without their matrix products: norms, activations and sums."""
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
    """A layer as models have them, modules and views included: what its ops cost is not their kernels alone."""

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
    """Forward and backward of a few layers; and how many tensors they save, where hooks keep all of them."""
    model = nn.Sequential(*(_ProbeLayer(width, heads) for _ in range(BLOCKS))).to(device, dtype)
    x = torch.randn(1, rows, width, device=device).to(dtype)
    slots = 0
    if hooked:
        traced = trace_model(model, (x,), loss_fn=torch.sum)
        for region in install(model, traced, {call.name: KeepAll() for call in traced.calls}, KeepAll()):
            region.live()  # where nobody counts, what keeps everything runs without hooks
        slots = len(traced.root.program.slots) + sum(len(traced.program(call).slots) for call in traced.calls)

    def step(_turn: int) -> None:
        model(x).sum().backward()
        model.zero_grad()

    return slots, step


class KernelCounter(TorchDispatchMode):
    """Kernels that run, views aside, and the bytes that they read and write."""

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
            self.nbytes += sum(map(_extent, [*read, *written]))
        return out


def _extent(tensor: Tensor) -> int:
    """Bytes of it in memory: what is expanded counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def counted(step: Callable[[int], None]) -> KernelCounter:
    """What one step runs."""
    with KernelCounter() as found:
        step(0)
    return found


# collectives ----------------------------------------------------------------------------------------------------------

SMALL_BYTES, LARGE_BYTES = 4 << 10, 32 << 20
WARM_UP, ROUNDS = 2, 9


def measure_link(ranks: int, device: str) -> LinkFit:
    """All-gather and all-reduce, small and large.

    Args:
        ranks: processes to start; where a process group is initialised it is used, and all its ranks must call this.
        device: "cuda", one device for each rank, or "cpu".

    Raises:
        UsageError: fewer than two ranks, fewer devices than ranks, or a torch without distribution.
    """
    if not distributed.is_available():
        raise UsageError("this torch was built without torch.distributed; leave --ranks out")
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
    """One process."""
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
    """A ring moves (n - 1) / n of a tensor in n - 1 steps to gather it, and twice that to reduce it."""
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
