"""From seconds to the figures that an estimate takes: a rate, and the share of it that the cost model should count on.

NOTE [ Shares ]
A product's seconds are those of the cost model's tiles at some share of a rate. The rate is the best that was seen, and
the share is such that half of the products take longer than the model says and half less. Further dtypes have the same
share, and their rate is adjusted. A model that is too careful would need a share above one; then the rate is raised
instead. The same goes for memory: what a large copy reaches, and the share that ordinary ops reach in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jettison.cost.kernels import FLASH_BACKWARD, Product
from jettison.cost.matmul import product_seconds
from jettison.spec.hardware import Delays, Hardware, Reached, Throughput

NEVER = 1e-9
"""Seconds of a delay that there is not: a hardware file takes numbers above zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the probes gave, in seconds.

    Args:
        products: by dtype; the first dtype decides on the share.
        attention: (FLOPs of a forward that are not masked, seconds forward, seconds of both passes).
        stream: (bytes, seconds) of a large copy.
        tiny: (kernels, seconds) of a step whose tensors are next to nothing.
        block: (kernels, bytes, seconds) of one whose tensors are of ordinary size.
        gap: between kernels on the device itself; None on a CPU, which runs an op as it is handed over.
        host: (bytes, seconds to the device, seconds from it).
        collectives: what `collectives.measure` gave.
    """

    products: Mapping[str, tuple[tuple[Product, float], ...]]
    attention: tuple[tuple[float, float, float], ...]
    stream: tuple[int, float]
    tiny: tuple[int, float]
    block: tuple[int, int, float]
    gap: float | None = None
    host: tuple[int, float, float] | None = None
    link: Link | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Between ranks of this machine: bytes a second of a ring at each rank, and seconds of one of its steps."""

    ranks: int
    bytes_per_second: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One product: what it took, and what an estimate with the calibrated figures would say."""

    product: Product
    seconds: float
    estimated_seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A machine's figures, and how well they describe what was measured."""

    hardware: Hardware
    comparisons: tuple[Comparison, ...]
    took_seconds: float = 0.0

    @property
    def error(self) -> float:
        """Of products, the median of how far the estimate is off."""
        return statistics.median(abs(c.estimated_seconds / c.seconds - 1) for c in self.comparisons)


def fit(measured: Measured, bare: Hardware) -> Calibration:
    """Figures for a machine of which ``bare`` has the name, the memory and the units."""
    rates, share = _products(measured, bare)
    kernel, dispatch = _delays(measured)
    memory, streamed = _memory(measured, kernel)
    first = next(iter(measured.products))
    forward, backward = _attention(measured, rates[first], kernel)
    found = replace(
        bare, flops_per_second=_throughput(rates),
        memory_bytes_per_second=round(memory),
        reached=replace(
            Reached(), matmul=share, matmul_fp8=share, memory=streamed, attention=forward, attention_backward=backward,
        ),
        delays=replace(Delays(), kernel=kernel, dispatch=dispatch),
    )  # fmt: skip
    if measured.host is not None:
        nbytes, *ways = measured.host
        found = replace(
            found, host_bytes_per_second=round(nbytes / max(ways)), reached=replace(found.reached, host=1.0)
        )  # fmt: skip
    if measured.link is not None:
        found = _linked(found, measured.link)
    return Calibration(hardware=found, comparisons=_compared(measured, found))


def _linked(found: Hardware, link: Link) -> Hardware:
    return replace(
        found, node=link.ranks, link_bytes_per_second=round(link.bytes_per_second),
        reached=replace(found.reached, link=1.0), delays=replace(found.delays, link=max(NEVER, link.step_seconds)),
    )  # fmt: skip


def _products(measured: Measured, bare: Hardware) -> tuple[dict[str, float], float]:
    """FLOP/s by dtype, and the share of them: see NOTE [ Shares ]."""
    rates: dict[str, float] = {}
    share = 0.0
    for dtype, samples in measured.products.items():
        best = max(product.flops / seconds for product, seconds in samples)
        given = replace(bare, flops_per_second=_throughput({dtype: best}), reached=replace(Reached(), matmul=1.0))
        fitted = statistics.median(product_seconds(product, given) / seconds for product, seconds in samples)
        if not share:
            share = min(1.0, fitted)
        rates[dtype] = best * max(1.0, fitted) if not rates else best * fitted / share
    return rates, share


def _throughput(rates: Mapping[str, float]) -> Throughput:
    names = {"float32": "fp32", "bfloat16": "bf16", "tf32": "tf32"}
    return Throughput(**{names[dtype]: round(rate) for dtype, rate in rates.items()})


def _delays(measured: Measured) -> tuple[float, float]:
    """Of a kernel, and of handing it over. A CPU does nothing meanwhile, so that all of it is the kernel's."""
    kernels, seconds = measured.tiny
    if measured.gap is None:
        return seconds / kernels, NEVER
    return max(NEVER, measured.gap), seconds / kernels


def _memory(measured: Measured, kernel: float) -> tuple[float, float]:
    """Bytes a second of a large copy, and the share of it in a step."""
    nbytes, seconds = measured.stream
    kernels, moved, took = measured.block
    stream, ordinary = nbytes / seconds, moved / max(took - kernels * kernel, 0.1 * took)
    return max(stream, ordinary), min(1.0, ordinary / stream)


def _attention(measured: Measured, rate: float, kernel: float) -> tuple[float, float]:
    """Shares of a rate, forward and backward."""
    forward = [flops / max(seconds - kernel, 0.1 * seconds) for flops, seconds, _ in measured.attention]
    backward = [
        FLASH_BACKWARD * flops / max(both - seconds - 2 * kernel, 0.1 * both)
        for flops, seconds, both in measured.attention
    ]
    if not forward:
        return Reached().attention, Reached().attention_backward
    return min(1.0, statistics.median(forward) / rate), min(1.0, statistics.median(backward) / rate)


def _compared(measured: Measured, found: Hardware) -> tuple[Comparison, ...]:
    return tuple(
        Comparison(product=product, seconds=seconds, estimated_seconds=product_seconds(product, found))
        for samples in measured.products.values()
        for product, seconds in samples
    )
