"""Fit of a hardware file to measured seconds: peak rates, and the efficiencies of the cost model.

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

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import torch

from jettison.cost.kernel import Gemm, gemm_seconds
from jettison.cost.launches import FLASH_BACKWARD
from jettison.spec.hardware import Delays, Edges, EdgesOf, Hardware, Reached, Throughput

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
    link: LinkFit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFit:
    """Link between ranks of this machine: bytes per second of a ring at each rank, and latency of one of its steps."""

    ranks: int
    bytes_per_second: float
    step_seconds: float


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
    forward, backward = _attention(measured, rates[first], kernel)
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


def _attention(measured: Measured, rate: float, kernel: float) -> tuple[float, float]:
    """Efficiencies of forward and backward."""
    forward = [flops / max(seconds - kernel, 0.1 * seconds) for flops, seconds, _ in measured.attention]
    backward = [
        FLASH_BACKWARD * flops / max(both - seconds - 2 * kernel, 0.1 * both)
        for flops, seconds, both in measured.attention
    ]
    if not forward:
        return Reached().attention, Reached().attention_backward
    return min(1.0, statistics.median(forward) / rate), min(1.0, statistics.median(backward) / rate)
