"""Regions of a pipeline stage that are alike, with their seconds: what `predict.stage_time` adds up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from jettison.cost.execution import Execution
from jettison.cost.flops import recompute_flops, visible_share
from jettison.cost.layer import PassSeconds, PriceModel, RegionSeconds
from jettison.formula.region import Region
from jettison.predict.weight_work import adding_seconds, optimizer_bytes, shared_seconds
from jettison.spec.hardware import Hardware
from jettison.spec.kernels import Documents
from jettison.spec.layout import Layout
from jettison.spec.model import AnyLayer
from jettison.spec.precision import Optimizer, Precision
from jettison.spec.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """So many neighbouring regions that are alike; seconds and FLOPs are of one.

    Args:
        gathered: bringing ZeRO 3's shards together.
        reduced: of the region's gradients over the ranks that share its weights.
        offloaded: of what stays of it, to the host, one way.
        optimizer_bytes: read and written at the end of a step.
        prices: whose seconds they are.
        segment: items, from this one on, that a planner has put into one segment.
        groups: of weights, in whose second half torch's checkpoint computes everything again; 0: none does.
    """

    count: int
    region: Region
    seconds: RegionSeconds
    gathered: float
    reduced: float
    recomputed_flops: float
    optimizer_bytes: float
    in_layer: bool
    prices: PriceModel
    offloaded: float = 0.0
    segment: int = 1
    groups: int = 0


def in_segments(items: Sequence[Item], size: int) -> Iterator[Item]:
    """Layer by layer: of those that are alike, `Timing.items` has all but the last ones of segments before these."""
    for _, same in groupby(items, key=lambda item: id(item.region)):
        own = list(same)
        for place in range(sum(item.count for item in own)):
            yield own[-1] if size > 1 and place % size == size - 1 else own[0]


@lru_cache(maxsize=4096)
def price_model(
    hardware: Hardware, execution: Execution, precision: Precision, layout: Layout, visible: float
) -> PriceModel:
    return PriceModel(hardware=hardware, execution=execution, precision=precision, layout=layout, visible=visible)


@lru_cache(maxsize=65536)
def several(
    count: int,
    prices: PriceModel,
    region: Region,
    again: frozenset[int],
    planned: bool,
    adds: bool,
    sharding: Layout,
    optimizer: Optimizer,
    in_layer: bool,
) -> Item:
    """So many of `_one`."""
    return replace(_one(prices, region, again, planned, adds, sharding, optimizer, in_layer), count=count)


@lru_cache(maxsize=65536)
def _one(
    prices: PriceModel,
    region: Region,
    again: frozenset[int],
    planned: bool,
    adds: bool,
    sharding: Layout,
    optimizer: Optimizer,
    in_layer: bool,
) -> Item:
    """One region of which nothing is offloaded.

    Args:
        adds: other micro-batches' weight gradients are there already.
    """
    precision, hardware = prices.precision, prices.hardware
    seconds = prices.seconds(region, again, planned=planned)
    if adds:
        adding = adding_seconds(region, sharding, precision, prices.execution, hardware)
        seconds = replace(seconds, weights=seconds.weights + PassSeconds(compute=adding))
    gathered, reduced = shared_seconds(region, replace(sharding, tp=prices.layout.tp), precision, hardware)
    return Item(
        count=1,
        region=region,
        seconds=seconds,
        gathered=gathered,
        reduced=reduced,
        recomputed_flops=recompute_flops(region, again),
        optimizer_bytes=optimizer_bytes(region, sharding, precision, optimizer, in_layer),
        in_layer=in_layer,
        prices=prices,
    )


def computed_share_of(run: Run, layer: AnyLayer) -> float:
    if run.packed and run.kernels.documents is Documents.MASK:
        return 1.0
    return computed_share(layer, run.packed or run.seq, run.kernels.tensor_masks and not run.packed)


@lru_cache(maxsize=4096)
def computed_share(layer: AnyLayer, seq: int, masked: bool) -> float:
    """Share of a layer's scores that a fused kernel computes."""
    window = layer.window
    if masked and window is not None and window <= seq:
        return 1.0  # the mask is a tensor, and nothing is skipped
    return visible_share(layer, seq)
