"""Calibration: measure this machine, fit peak rates and efficiencies of the cost model, and write a hardware file.

NOTE [ Shares ]
On a device with many multiprocessors the cost model gives a matmul's seconds by tiles, a rate and an efficiency. The
rate is the best one measured, and the efficiency is such that half of the matmuls take longer than the model's seconds.
Other dtypes have the same efficiency, and their rate is fitted. An efficiency above 1 raises the rate instead. Memory
likewise has the bandwidth of a large copy, and the efficiency of ordinary ops in a step.

NOTE [ A curve ]
On CPU the rate and the three `Edges` of each dtype are fitted: seconds per FLOP are a sum of four non-negative terms,
1, 1/m, 1/n and 1/k. The fit minimizes the sum of relative errors, not of their squares, so that one disturbed
measurement hardly matters. The efficiency is 1.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, Final

import torch

from jettison.capture.randomness import private_randomness
from jettison.core.documents import document
from jettison.core.errors import UsageError
from jettison.core.process import cpu_name, told_by_linux
from jettison.core.progress import Progress, silent
from jettison.core.units import MIB, format_bytes
from jettison.cost.kernel import Gemm, gemm_seconds
from jettison.cost.region_kernels import FLASH_BACKWARD
from jettison.diagnose import probes
from jettison.spec.hardware import Delays, Edges, EdgesOf, Hardware, Reached, Throughput

FULL_SECONDS, QUICK_SECONDS = 30.0, 5.0
"""Time limits of measurement rounds, without warmup calls and data generation."""
HOST_BYTES = 256 << 20
CHAIN = 200
"""Kernels in a row, to measure the gap between them."""
_SHARES: Final = {"gemms": 0.6, "attention": 0.15, "rest": 0.25}


def calibrate(device: str | None = None, *, short: bool = False, ranks: int = 0, say: Progress = silent) -> Calibration:
    """Measure one device of this machine. Raise `UsageError` if there is none, or it is too slow to measure.

    Args:
        device: such as "cpu" or "cuda:0"; default: the first accelerator, or the CPU.
        short: fewer shapes and rounds: some 10 seconds instead of 35.
        ranks: processes for measuring collectives; 0: none.
    """
    began = time.perf_counter()
    where = _device(device)
    sizes = probes.sizes_for(where, short=short)
    with private_randomness([where.type]), torch.cuda.device(-1 if where.index is None else where.index):
        measured = _measured(where, sizes, QUICK_SECONDS if short else FULL_SECONDS, ranks, say)
    found = fit(measured, describe(where))
    return replace(found, took_seconds=time.perf_counter() - began)


def _device(name: str | None) -> torch.device:
    have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    wanted = {None: have[:2][-1], "cuda": "cuda:0"}.get(name, name)
    if wanted not in have:
        raise UsageError(f"got the device {name!r}; expected one that is here: {', '.join(have)}")
    return torch.device(wanted)


def _measured(device: torch.device, sizes: probes.Sizes, seconds: float, ranks: int, say: Progress) -> Measured:
    clock = probes.clock_for(device)
    on_gpu = device.type == "cuda"
    gemms = {}
    for dtype in ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16"):
        pool = probes.OperandPool(sizes.pool_bytes, getattr(torch, dtype), device)
        listed = list(probes.gemm_probes(sizes, pool, dtype))
        budget = seconds * _SHARES["gemms"] / 2
        took = probes.time_probes([probe for _, probe in listed], clock, seconds=budget, say=say)
        samples = tuple((gemm, took[probe.name]) for gemm, probe in listed if probe.name in took)
        if samples:
            gemms[dtype] = samples
    if not gemms:
        raise UsageError(f"no matmul took less than {probes.GIVE_UP_SECONDS} s: the machine is too slow, or too busy")
    ordinary = torch.bfloat16 if on_gpu else torch.float32
    attention = _attention(
        sizes, probes.OperandPool(sizes.pool_bytes, ordinary, device), clock, seconds * _SHARES["attention"], say
    )
    stream_bytes, stream = probes.stream_probe(sizes, device)
    (_, small), large = (
        probes.step_of_layers(8, 16, 2, device, ordinary),
        probes.step_of_blocks(*sizes.block, device, ordinary),
    )
    (_, plain), (slots, hooked) = (
        probes.step_of_layers(*sizes.layer, device, ordinary, hooked=on) for on in (False, True)
    )
    calls = [stream, probes.Probe("tiny ops", small), probes.Probe("ordinary ops", large)]
    calls += [probes.Probe("layers", plain), probes.Probe("layers with hooks", hooked)]
    took = probes.time_probes(calls, clock, seconds=seconds * _SHARES["rest"], needed=True, say=say)
    of_small, of_large = probes.counted(small), probes.counted(large)
    return Measured(
        gemms=gemms,
        attention=attention,
        stream=(stream_bytes, took["streaming"]),
        tiny=(of_small.kernels, took["tiny ops"]),
        block=(of_large.kernels, of_large.nbytes, took["ordinary ops"]),
        hooks=(slots, took["layers"], took["layers with hooks"]),
        gap=_gap(device, clock, say) if on_gpu else None,
        host=_host(device, clock, say) if on_gpu else None,
        link=probes.measure_link(ranks, device.type, say) if ranks else None,
    )


def _attention(
    sizes: probes.Sizes, pool: probes.OperandPool, clock: probes.Clock, seconds: float, say: Progress
) -> tuple[tuple[float, float, float], ...]:
    listed = list(probes.attention_probes(sizes, pool))
    took = probes.time_probes(
        [probe for *_, one, both in listed for probe in (one, both)], clock, seconds=seconds, say=say
    )
    known = [(flops, one.name, both.name) for _, flops, one, both in listed if {one.name, both.name} <= took.keys()]
    return tuple((flops, took[one], took[both]) for flops, one, both in known)


def _gap(device: torch.device, clock: probes.Clock, say: Progress) -> float:
    """Seconds of one kernel with next to nothing to do, of many that the device was given at once."""
    x = torch.zeros(8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            x.add_(1.0)
    probe = probes.Probe("gaps between kernels", lambda _turn: graph.replay())
    return probes.time_probes([probe], clock, seconds=1.0, needed=True, say=say)[probe.name] / CHAIN


def _host(device: torch.device, clock: probes.Clock, say: Progress, seconds: float = 2.0) -> tuple[int, float, float]:
    there, back = probes.host_probes(HOST_BYTES, device)
    took = probes.time_probes([there, back], clock, seconds=seconds, needed=True, say=say)
    return HOST_BYTES, took[there.name], took[back.name]


def host_link(device: torch.device) -> float:
    """Bytes a second between an accelerator and its host, in the slower direction: half a second's measuring."""
    with torch.cuda.device(device):  # whose work the clock waits for
        nbytes, there, back = _host(device, probes.clock_for(device), silent, seconds=0.5)
    return nbytes / max(there, back)


def describe(device: torch.device) -> Hardware:
    """Return name, memory and units of a device, with their source."""
    source = f"measured by jettison doctor --calibrate, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        usable = torch.cuda.mem_get_info(device)[1]
        return Hardware(
            name=properties.name,
            memory_bytes=properties.total_memory,
            usable_bytes=usable,
            source=f"{source}, {properties.name}",
            usable_source="torch.cuda.mem_get_info",
            units=properties.multi_processor_count,
            node=torch.cuda.device_count(),
            host_memory_bytes=host_bytes()[0] // torch.cuda.device_count(),
        )
    memory, available = host_bytes()
    threads = torch.get_num_threads()
    return Hardware(
        name=cpu_name(),
        memory_bytes=memory,
        usable_bytes=available,
        source=f"{source}, {cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, {probes.clock_for(device)}",
        usable_source="memory that was available when this was measured",
        units=threads,
        node=1,
        synchronous=True,
    )


def host_bytes() -> tuple[int, int]:
    """Return total and available memory of the machine; equal where Linux's /proc/meminfo is missing."""
    kib = {name: int(rest.split()[0]) for name, rest in told_by_linux("meminfo") if rest}
    if "MemTotal" not in kib:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    return kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemTotal"]) << 10


# a hardware file ------------------------------------------------------------------------------------------------------


def hardware_toml(found: Calibration) -> str:
    """Return the text of a hardware file; comments at its end compare measured and estimated matmuls."""
    h = found.hardware
    sizes = {"memory": h.memory_bytes, "usable": h.usable_bytes, "host_memory": h.host_memory_bytes}
    widths = {
        "memory": h.memory_bytes_per_second,
        "link": h.link_bytes_per_second,
        "host": h.host_bytes_per_second,
        "network": h.network_bytes_per_second,
    }
    sections = {
        "teraflops": {name: rate and rate / 1e12 for name, rate in asdict(h.flops_per_second).items()},
        "gigabytes_per_second": {name: width and width / 1e9 for name, width in widths.items()},
        "reached": asdict(h.reached),
        "microseconds": {name: seconds * 1e6 or None for name, seconds in asdict(h.delays).items()},
        "edges": {name: edges and tuple(edges.values()) for name, edges in asdict(h.edges).items()},
    }
    lines = [f"name = {_toml(h.name)}"]
    lines += [f'{name} = "{nbytes // MIB}MiB"' for name, nbytes in sizes.items() if nbytes is not None]
    lines += [f"units = {h.units}", f"node = {h.node}", *(["synchronous = true"] if h.synchronous else [])]
    lines += [f"source = {_toml(h.source)}", f"usable_source = {_toml(h.usable_source)}"]
    lines += [f"{key} = {_toml(h.source)}" for key in ("reached_source", "delays_source")]
    for section, values in sections.items():
        known = {name: value for name, value in values.items() if value is not None}
        if known or section != "edges":
            lines += ["", f"[{section}]"]
        for name, value in known.items():
            note = "  # none" if section == "microseconds" and value <= NEVER * 1e6 else ""
            lines.append(f"{name} = {_toml(value)}{note}")
    lines += ["", f"# Measured in {found.took_seconds:.0f} s. Matmuls: GFLOP/s, and estimated over measured seconds."]
    for c in found.comparisons:
        p, rate = c.gemm, c.gemm.flops / c.seconds / 1e9
        times = c.estimated_seconds / c.seconds
        lines.append(f"# {p.dtype:9} {p.m:6} x {p.n:6} x {p.k:6}  {rate:10.1f}  {times:5.2f}")
    return "\n".join([*lines, ""])


def _toml(value: str | float | tuple[float, ...]) -> str:
    """A text, numbers of four significant digits without an exponent, or a list of these."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    text = f"{value:.9f}" if value < 0.001 else f"{float(f'{value:.4g}'):.6f}"
    return text.rstrip("0").rstrip(".")


# tables and JSON ------------------------------------------------------------------------------------------------------

DOUBTFUL = 0.25
"""Relative error above which a measurement counts as disturbed."""


def doubtful(found: Calibration) -> str | None:
    """Return a note for a calibration with large errors."""
    if found.error <= DOUBTFUL:
        return None
    return (
        f"note: half of the matmuls differ by {found.error:.0%} or more from these figures: the machine was busy, or "
        "its clock changed; measure again when it is idle"
    )


def figures(found: Calibration) -> list[tuple[str, str]]:
    """Return (name, value) pairs for tables."""
    h = found.hardware
    rows = [("device", h.name), ("memory", f"{format_bytes(h.usable_bytes)} of {format_bytes(h.memory_bytes)} usable")]
    rates = asdict(h.flops_per_second)
    rows += [(f"{dtype} matmuls", f"{rate / 1e12:.4g} TFLOP/s") for dtype, rate in rates.items() if rate is not None]
    reached = h.reached
    attention = f"{reached.attention:.0%} for attention, {reached.attention_backward:.0%} for its backward"
    rows.append(("efficiency", f"{reached.matmul:.0%} of it for matmuls, {attention}"))
    rows.append(("error of matmuls", f"{found.error:.0%} (median of {len(found.comparisons)})"))
    if h.memory_bytes_per_second is not None:
        width = h.memory_bytes_per_second / 1e9
        rows.append(("memory bandwidth", f"{width:.4g} GB/s, {reached.memory:.0%} of it in a training step"))
    for name, value in (("host link", h.host_bytes_per_second), ("link between ranks", h.link_bytes_per_second)):
        if value is not None:
            rows.append((name, f"{value / 1e9:.4g} GB/s"))
    rows.append(("a kernel costs", f"{h.delays.kernel * 1e6:.3g} µs in addition to its work"))
    rows.append(("a hook costs", f"{h.delays.hook * 1e6:.3g} µs for each saved tensor of a planned layer"))
    return [*rows, ("measured in", f"{found.took_seconds:.0f} s")]


def calibration_document(found: Calibration) -> dict[str, Any]:
    """Return the JSON document, with every matmul."""
    compared = [
        {**asdict(c.gemm), "seconds": c.seconds, "estimated_seconds": c.estimated_seconds} for c in found.comparisons
    ]
    return document(
        "jettison.calibration/1", hardware=asdict(found.hardware), elapsed_seconds=found.took_seconds, gemms=compared
    )


_NAMES: Final = {"float32": "fp32", "bfloat16": "bf16", "tf32": "tf32"}
ABOVE_BEST: Final = 1.5
"""Upper limit of a curve's full rate over the best measured one: no extrapolation beyond."""
REWEIGHTED: Final = 30
NEVER = 1e-9
"""Seconds of a latency of 0, since hardware files need numbers above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measured seconds of the probes.

    Args:
        gemms: matmuls by dtype; the first dtype determines the efficiency.
        attention: (FLOPs of a forward without masked ones, seconds of the forward, seconds of forward and backward).
        stream: (bytes, seconds) of a large copy.
        tiny: (kernels, seconds) of a step with tiny tensors.
        block: (kernels, bytes, seconds) of a step with tensors of ordinary size.
        hooks: (saved tensors, seconds, seconds with hooks) of a step of layers.
        gap: between kernels on the device; None on CPU, where ops are synchronous.
        host: (bytes, seconds to the device, seconds from it).
        link: result of `probes.measure_link`.
    """

    gemms: Mapping[str, tuple[tuple[Gemm, float], ...]]
    attention: tuple[tuple[float, float, float], ...]
    stream: tuple[int, float]
    tiny: tuple[int, float]
    block: tuple[int, int, float]
    hooks: tuple[int, float, float]
    gap: float | None = None
    host: tuple[int, float, float] | None = None
    link: probes.LinkFit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulComparison:
    """Measured and estimated seconds of one matmul, with the calibrated figures."""

    gemm: Gemm
    seconds: float
    estimated_seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted figures of a machine, and their errors."""

    hardware: Hardware
    comparisons: tuple[MatmulComparison, ...]
    took_seconds: float = 0.0

    @property
    def error(self) -> float:
        """Median relative error of matmuls."""
        return statistics.median(abs(c.estimated_seconds / c.seconds - 1) for c in self.comparisons)


def fit(measured: Measured, bare: Hardware) -> Calibration:
    """Fit the figures of a machine; ``bare`` has its name, memory and units."""
    edges, (slots, plain, hooked), (kernels, seconds) = EdgesOf(), measured.hooks, measured.tiny
    if measured.gap is None:  # of a CPU, on which all of an op's latency is its kernel's
        (rates, edges), share = _curves(measured), 1.0
        kernel, dispatch = seconds / kernels, NEVER
    else:
        rates, share = _gemms(measured, bare)
        kernel, dispatch = max(NEVER, measured.gap), seconds / kernels
    memory, streamed = _memory(measured, kernel)
    first = next(iter(measured.gemms))
    forward, backward = _attention_reached(measured, rates[first], kernel)
    found = replace(
        bare,
        flops_per_second=_throughput(rates),
        edges=edges,
        memory_bytes_per_second=round(memory),
        reached=replace(
            Reached(), matmul=share, matmul_fp8=share, memory=streamed, attention=forward, attention_backward=backward
        ),
        delays=replace(Delays(), kernel=kernel, dispatch=dispatch, hook=max(NEVER, (hooked - plain) / slots)),
    )
    if measured.host is not None:
        nbytes, *ways = measured.host
        found = replace(
            found, host_bytes_per_second=round(nbytes / max(ways)), reached=replace(found.reached, host=1.0)
        )
    if (link := measured.link) is not None:
        found = replace(
            found,
            node=link.ranks,
            link_bytes_per_second=round(link.bytes_per_second),
            reached=replace(found.reached, link=1.0),
            delays=replace(found.delays, link=max(NEVER, link.step_seconds)),
        )
    compared = (
        MatmulComparison(gemm=gemm, seconds=seconds, estimated_seconds=gemm_seconds(gemm, found))
        for samples in measured.gemms.values()
        for gemm, seconds in samples
    )
    return Calibration(hardware=found, comparisons=tuple(compared))


def _gemms(measured: Measured, bare: Hardware) -> tuple[dict[str, float], float]:
    """FLOP/s by dtype, and the efficiency: see NOTE [ Shares ]."""
    rates: dict[str, float] = {}
    share = 0.0
    for dtype, samples in measured.gemms.items():
        best = max(gemm.flops / seconds for gemm, seconds in samples)
        given = replace(bare, flops_per_second=_throughput({dtype: best}), reached=replace(Reached(), matmul=1.0))
        fitted = statistics.median(gemm_seconds(gemm, given) / seconds for gemm, seconds in samples)
        if not share:
            share = min(1.0, fitted)
        rates[dtype] = best * max(1.0, fitted) if not rates else best * fitted / share
    return rates, share


def _curves(measured: Measured) -> tuple[dict[str, float], EdgesOf]:
    """FLOP/s and edges by dtype: see NOTE [ A curve ]."""
    rates, edges = {}, {}
    for dtype, samples in measured.gemms.items():
        least = min(seconds / gemm.flops for gemm, seconds in samples) / ABOVE_BEST
        terms = torch.tensor([[1.0, 1 / p.m, 1 / p.n, 1 / p.k] for p, _ in samples], dtype=torch.float64)
        terms *= torch.tensor([[gemm.flops / seconds] for gemm, seconds in samples], dtype=torch.float64)
        more, *rest = map(float, least_absolute(terms, 1 - least * terms[:, 0]))
        rates[dtype] = 1 / (least + more)
        edges[_NAMES[dtype]] = Edges(*(each * rates[dtype] for each in rest))
    return rates, EdgesOf(**edges)


def least_absolute(matrix: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return non-negative coefficients with the least sum of absolute errors, by iteratively reweighted squares."""
    weights = torch.ones_like(wanted)
    found = torch.zeros(matrix.shape[1], dtype=matrix.dtype)
    for _ in range(REWEIGHTED):
        found = _least_squares(matrix, wanted, weights)
        weights = 1 / (matrix @ found - wanted).abs().clamp(min=1e-3)
    return found


def _least_squares(matrix: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Non-negative least squares: the best over all subsets of non-zero coefficients."""
    width = matrix.shape[1]
    best, least = torch.zeros(width, dtype=matrix.dtype), float((weights * wanted.square()).sum())
    root = weights.sqrt().unsqueeze(1)
    for chosen in (list(c) for size in range(1, width + 1) for c in combinations(range(width), size)):
        solved = torch.linalg.lstsq(matrix[:, chosen] * root, wanted.unsqueeze(1) * root).solution.squeeze(1)
        left = float((weights * (matrix[:, chosen] @ solved - wanted).square()).sum())
        if left < least and bool((solved >= 0).all()):
            best, least = torch.zeros_like(best).index_put((torch.tensor(chosen),), solved), left
    return best


def _throughput(rates: Mapping[str, float]) -> Throughput:
    return Throughput(**{_NAMES[dtype]: round(rate) for dtype, rate in rates.items()})


def _memory(measured: Measured, kernel: float) -> tuple[float, float]:
    """Bytes per second of a large copy, and the efficiency in a step."""
    nbytes, seconds = measured.stream
    kernels, moved, took = measured.block
    stream, ordinary = nbytes / seconds, moved / max(took - kernels * kernel, 0.1 * took)
    return max(stream, ordinary), min(1.0, ordinary / stream)


def _attention_reached(measured: Measured, rate: float, kernel: float) -> tuple[float, float]:
    """Efficiencies of forward and backward."""
    forward = [flops / max(seconds - kernel, 0.1 * seconds) for flops, seconds, _ in measured.attention]
    backward = [
        FLASH_BACKWARD * flops / max(both - seconds - 2 * kernel, 0.1 * both)
        for flops, seconds, both in measured.attention
    ]
    if not forward:
        return Reached().attention, Reached().attention_backward
    return min(1.0, statistics.median(forward) / rate), min(1.0, statistics.median(backward) / rate)
