"""Seconds of a region in a training step: its passes, and what its weights take.

Weights are all-gathered, their gradients accumulated and reduced, and the optimizer reads and writes all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from jettison.core.dtypes import DTYPE_BYTES
from jettison.cost.collective import group, transfer_seconds
from jettison.cost.execution import Execution
from jettison.cost.flops import recompute_flops
from jettison.cost.layer import PassSeconds, PriceModel, RegionSeconds
from jettison.cost.matmul import memory_seconds
from jettison.formula.region import Region
from jettison.formula.static import state_bytes
from jettison.spec.fp8 import BF16_GEMMS, Library
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Layout
from jettison.spec.precision import Optimizer, Precision

OPTIMIZER_PASSES = 3
"""Memory traffic of an unfused AdamW over a fused one's: 80 bytes of fp32 a parameter, and 28."""
GRADIENT_PASSES = 3
"""Passes over gradients before the optimizer: a read for the norm, a read and a write for clipping."""
BUCKET_BYTES = 25 << 20
"""Bucket size of gradient reductions: ``bucket_cap_mb`` of PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """``count`` equal consecutive regions; seconds and FLOPs are of one.

    Args:
        gathered: seconds of ZeRO 3's all-gather.
        reduced: seconds of the reduction of the region's gradients.
        added: the part of ``seconds`` that accumulates weight gradients, or copies weights and gradients for FSDP.
        offloaded: seconds of copying its kept tensors to the host, one way.
        optimizer_bytes: memory traffic of the optimizer step.
        prices: price model of its kernels.
        segment: number of items, from this one on, that a planner has put into one segment.
        groups: groups of weights for each of which torch's checkpoint recomputes the region in a split backward.
    """

    count: int
    region: Region
    seconds: RegionSeconds
    gathered: float
    reduced: float
    added: float
    recomputed_flops: float
    optimizer_bytes: float
    in_layer: bool
    prices: PriceModel
    offloaded: float = 0.0
    segment: int = 1
    groups: int = 0


price_model = lru_cache(maxsize=4096)(PriceModel)


@lru_cache(maxsize=65536)
def item_of(
    prices: PriceModel,
    region: Region,
    again: frozenset[int],
    planned: bool,
    adds: bool,
    sharding: Layout,
    optimizer: Optimizer,
    in_layer: bool,
) -> Item:
    """Item of one region without offloading.

    Args:
        adds: weight gradients are accumulated over micro-batches.
    """
    precision, seconds = prices.precision, prices.seconds(region, again, planned=planned)
    added = _adding_seconds(region, sharding, precision, prices.execution, prices.hardware) if adds else 0.0
    if adds:
        seconds = seconds._replace(weights=seconds.weights + PassSeconds(compute=added))
    gathered, reduced = _shared_seconds(region, replace(sharding, tp=prices.layout.tp), prices)
    return Item(
        count=1,
        region=region,
        seconds=seconds,
        gathered=gathered,
        reduced=reduced,
        added=added,
        recomputed_flops=recompute_flops(region, again),
        optimizer_bytes=_optimizer_traffic(region, sharding, precision, optimizer, in_layer),
        in_layer=in_layer,
        prices=prices,
    )


# weights --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def pending_share(region: Region) -> float:
    """Share of a region's backward that remains when its first bucket of gradients is full."""
    gradients = sum(w.numel for w in region.weights if not w.tied and not w.frozen) * 4
    return max(0.0, 1 - BUCKET_BYTES / gradients) if gradients else 0.0


def _shared_seconds(region: Region, layout: Layout, prices: PriceModel) -> tuple[float, float]:
    """Seconds of a region's all-gather of weights and reduction of gradients."""
    precision, hardware, execution = prices.precision, prices.hardware, prices.execution
    gathered = reduced = 0.0
    whole = layout.zero == 0 or (layout.zero == 1 and execution.reduces_whole)
    kind = "all_reduce" if whole else "reduce_scatter_tensor"
    sent = "float32" if execution.reduces_float32 else precision.reduce_dtype
    for expert in (False, True):
        shared = [w for w in region.weights if w.expert is expert and not w.tied]
        elements = sum(w.numel for w in shared if not w.frozen)
        frozen = sum(w.packed_bytes or w.numel * DTYPE_BYTES[precision.compute] for w in shared if w.frozen)
        ranks = group(layout, "experts" if expert else "shards", hardware.node)
        weights, gradients = (elements * DTYPE_BYTES[dtype] for dtype in (precision.compute, sent))
        gathered += transfer_seconds("all_gather_into_tensor", weights + frozen, ranks, hardware)
        reduced += transfer_seconds(kind, gradients, ranks, hardware)
    return gathered, reduced


def _adding_seconds(
    region: Region, layout: Layout, precision: Precision, execution: Execution, hardware: Hardware
) -> float:
    """Seconds to accumulate a micro-batch's weight gradients, unless their GEMM does."""
    nbytes = 0
    unsharded = layout.zero == 3 and not execution.reduces_each  # NOTE [ Unsharded gradients ] in `predict.fsdp2`
    kept = precision.reduce_dtype if unsharded else precision.accumulator or precision.gradient
    casts = kept != precision.compute if unsharded else execution.casts_gradients and precision.compute != "float32"
    given, into = DTYPE_BYTES[precision.compute if casts or unsharded else precision.gradient], DTYPE_BYTES[kept]
    for weight in region.weights:
        if not weight.tied and not weight.frozen:
            sharded = layout.zero >= 2 and execution.reduces_each
            ranks = layout.expert_shards if weight.expert else layout.shards
            elements = -(-weight.numel // ranks) if sharded else weight.numel
            nbytes += elements * (into if execution.accumulates_in_gemm else given + 2 * into * (1 + casts))
    return memory_seconds(nbytes, hardware)


@lru_cache(maxsize=16384)
def quantized_bytes(region: Region, precision: Precision, execution: Execution) -> int:
    """Memory traffic of quantizing a layer's weights, where that happens once a step."""
    recipe = precision.recipe or execution.recipe
    if precision.gemm_inputs is None or not (
        execution.delayed_scaling if recipe is None else recipe.library is Library.TE
    ):
        return 0
    each = DTYPE_BYTES[precision.parameter]
    if recipe is None:
        each += DTYPE_BYTES[precision.gemm_inputs]
        return sum(weight.numel * each for weight in region.weights if len(weight.shape) >= 2)
    total = 0
    for w in region.weights:
        own = w.recipe or recipe
        if w.gemm and not w.head and not w.frozen and not w.tied and own != BF16_GEMMS:
            copies = 1 if own.either_way else 2
            total += each * (1 + own.looks) * w.numel + (w.quantized_bytes or copies * w.numel * own.bits // 8)
    return total


def _optimizer_traffic(
    region: Region, layout: Layout, precision: Precision, optimizer: Optimizer, in_layer: bool
) -> float:
    """Memory traffic of the optimizer step on one rank: the norm and clipping of gradients, then the update. A sharded
    optimizer reads shards of gradients only (Megatron-Core, ``DistributedOptimizer._copy_model_grads_to_main_grads``
    and ``MegatronOptimizer.get_main_grads_for_grad_norm``).

    Masters of another dtype than gradients need a copy of these first.
    """
    if optimizer is Optimizer.NONE:
        return 0.0
    total = 0.0
    given = DTYPE_BYTES[precision.accumulator or precision.gradient]
    gradient = max(given, DTYPE_BYTES[precision.master or precision.gradient])
    copied = given + gradient if gradient != given else 0
    parameter = DTYPE_BYTES[precision.parameter] * (1 if precision.master else 2)
    for weight in region.weights:
        if weight.tied or weight.frozen:
            continue
        ranks = layout.expert_shards if weight.expert else layout.shards
        owned = -(-weight.numel // ranks) if layout.zero >= 1 else weight.numel
        state = state_bytes(weight, owned, precision, optimizer, in_layer=in_layer)
        state += owned * (DTYPE_BYTES[precision.master] if precision.master else 0)
        total += owned * (copied + GRADIENT_PASSES * gradient + gradient + parameter) + 2 * state
    return total
