"""What a region's weights take beside its own forward and backward: gathering, reducing, adding, casting, updating."""

from __future__ import annotations

from functools import lru_cache

from jettison.core.dtypes import DTYPE_BYTES
from jettison.cost.collective import group, transfer_seconds
from jettison.cost.execution import Execution
from jettison.cost.matmul import memory_seconds
from jettison.formula.region import Region
from jettison.formula.static import state_bytes
from jettison.spec.fp8 import WIDE, Library
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Layout
from jettison.spec.precision import Optimizer, Precision

GRADIENT_PASSES = 3
"""Over gradients before the optimizer: read for their norm, read and written to be clipped."""
BUCKET_BYTES = 25 << 20
"""Gradients are reduced in buckets of this size: PyTorch's DistributedDataParallel, bucket_cap_mb."""


@lru_cache(maxsize=4096)
def pending_share(region: Region) -> float:
    """Share of a region's backward that is still to come when its first bucket of gradients is full."""
    gradients = sum(w.numel for w in region.weights if not w.tied and not w.frozen) * 4
    return max(0.0, 1 - BUCKET_BYTES / gradients) if gradients else 0.0


def shared_seconds(region: Region, layout: Layout, precision: Precision, hardware: Hardware) -> tuple[float, float]:
    """Seconds to gather a region's weights, and to reduce its gradients, over the ranks that share them."""
    gathered = reduced = 0.0
    kind = "all_reduce" if layout.zero == 0 else "reduce_scatter_tensor"
    for expert in (False, True):
        shared = [w for w in region.weights if w.expert is expert and not w.tied]
        elements = sum(w.numel for w in shared if not w.frozen)
        frozen = sum(w.packed_bytes or w.numel * DTYPE_BYTES[precision.compute] for w in shared if w.frozen)
        ranks = group(layout, "experts" if expert else "shards", hardware.node)
        weights, gradients = (elements * DTYPE_BYTES[dtype] for dtype in (precision.compute, precision.gradient))
        gathered += transfer_seconds("all_gather_into_tensor", weights + frozen, ranks, hardware)
        reduced += transfer_seconds(kind, gradients, ranks, hardware)
    return gathered, reduced


def adding_seconds(
    region: Region, layout: Layout, precision: Precision, execution: Execution, hardware: Hardware
) -> float:
    """Seconds to add a micro-batch's weight gradients to those that are there, if the product does not."""
    nbytes = 0
    gradient = DTYPE_BYTES[precision.gradient]
    into = DTYPE_BYTES[precision.accumulator or precision.gradient]
    for weight in region.weights:
        if not weight.tied and not weight.frozen:
            sharded = layout.zero >= 2 and execution.reduces_each
            ranks = layout.expert_shards if weight.expert else layout.shards
            elements = -(-weight.numel // ranks) if sharded else weight.numel
            nbytes += elements * (into if execution.adds_in_product else gradient + 2 * into)
    return memory_seconds(nbytes, hardware)


@lru_cache(maxsize=16384)
def quantised_bytes(region: Region, precision: Precision, execution: Execution) -> int:
    """Read and written to have a layer's matrices as products read them, where that is done once a step."""
    recipe = precision.recipe or execution.recipe
    if precision.product is None or not (execution.delayed_scaling if recipe is None else recipe.library is Library.TE):
        return 0
    each = DTYPE_BYTES[precision.parameter]
    if recipe is None:
        each += DTYPE_BYTES[precision.product]
        return sum(weight.numel * each for weight in region.weights if len(weight.shape) >= 2)
    total = 0
    for w in region.weights:
        own = w.recipe or recipe
        if w.product and not w.head and not w.frozen and not w.tied and own != WIDE:
            copies = 1 if own.either_way else 2
            total += each * (1 + own.looks) * w.numel + (w.narrow_bytes or copies * w.numel * own.bits // 8)
    return total


def optimizer_bytes(
    region: Region, layout: Layout, precision: Precision, optimizer: Optimizer, in_layer: bool
) -> float:
    """Read and written on one rank: gradients for their norm and to be clipped, then all that an update needs. Where an
    optimizer is sharded its gradients have been reduced to the shards, and these alone are looked at (Megatron-Core,
    ``DistributedOptimizer._copy_model_grads_to_main_grads`` and ``MegatronOptimizer.get_main_grads_for_grad_norm``).

    Where a master copy has another dtype than gradients, they are copied to its dtype first.
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
