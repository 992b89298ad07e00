"""Model states (ZeRO's word): bytes of parameters, gradients and optimizer state, by precision and ZeRO stage.

NOTE [ A loop's names ]
``torch/optim/adam.py``, ``_single_tensor_adam``: ``denom = (exp_avg_sq.sqrt() / ...)`` makes two tensors as large as a
parameter while ``denom`` still references that of the parameter before. Parameters are in declaration order
(``torch.nn.Module.parameters``): region after region, and within a layer as `declared` orders them.

NOTE [ Groups of one rank ]
Experts that are spread over all data-parallel ranks have no replicas, but ``fully_shard`` wraps them over a mesh of
one rank: torchtitan keeps that mesh whenever there is expert parallelism, since 16-bit matmuls need it
(``torchtitan/distributed/parallel_dims.py``, ``_mesh_exist`` of "efsdp"). Nothing is transferred, but unsharded weights
are a copy in the matmuls' dtype (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``, ``wait_for_unshard``,
``world_size == 1``), and gradients are copied into a buffer and out of it (``_fsdp_collectives.py``,
``foreach_reduce``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from operator import attrgetter
from typing import Final

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.tape import Weight
from jettison.spec.layout import Layout, ZeroBuckets
from jettison.spec.precision import NO_OFFLOAD, Optimizer, OptimizerOffload, Precision

SCALE_BLOCK, NARROW_BLOCK = 256, 128
"""8-bit Adam keeps an fp32 scale for each 256 numbers of a moment (arXiv 2110.02861), torchao's 4-bit for each 128."""
SMALL_TENSOR = 4096
"""Smaller tensors have fp32 moments (bitsandbytes, ``optim/optimizer.py``, ``min_8bit_size``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Bytes of model states on one rank.

    ``gathered``: unsharded parameters that ZeRO 3 holds while the region runs.

    ``master``: the part of the state that exists before the first optimizer step: the copy that the optimizer updates.
    ``copies``: copies of gradients that the optimizer makes for its master weights.
    ``host_state``: optimizer state offloaded to CPU, for ``host_elements`` elements; ``host_parameters``: parameter
    shards offloaded to CPU.
    ``reduced``: gradients before they are sharded, under ZeRO 2 and 3; ``largest``: the biggest weight, in the dtype
    of moments. ``stepping``: most temporaries of an AdamW loop: NOTE [ A loop's names ]; and the part of them for the
    ``first`` weight and the ``last``, 0 if there is none.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    master: int = 0
    copies: int = 0
    gathered: int = 0
    reduced: int = 0
    largest: int = 0
    stepping: int = 0
    first: int = 0
    last: int = 0
    host_state: int = 0
    host_elements: int = 0
    host_parameters: int = 0


_COUNTED: Final = tuple(f.name for f in fields(ModelStates) if f.name not in ("largest", "stepping", "first", "last"))
_counted = attrgetter(*_COUNTED)


def together(several: Iterable[tuple[ModelStates, int]]) -> ModelStates:
    """Sum of several regions in order, each with its count."""
    sums, largest, stepping, first, last = [0] * len(_COUNTED), 0, 0, 0, 0
    for each, count in several:
        sums = [n + count * own for n, own in zip(sums, _counted(each), strict=True)]
        largest = each.largest if each.largest > largest else largest
        stepping = each.stepping if each.stepping > stepping else stepping
        if each.first:  # the loop continues with the next region's first weight
            before = each.last if count > 1 and each.last > last else last
            crossing = before + 2 * each.first
            stepping = crossing if crossing > stepping else stepping
        first, last = first or each.first, each.last or last
    counted = dict(zip(_COUNTED, sums, strict=True))
    return ModelStates(**counted, largest=largest, stepping=stepping, first=first, last=last)


def declared(weights: list[Weight], order: Sequence[str]) -> list[Weight]:
    """Weights in the order of their declaration: `spec.kernels.Kernels.declared`."""
    if not order:
        return weights

    def place(weight: Weight) -> int:
        names = [name for name in order if weight.name.startswith(name)]
        return order.index(max(names, key=len)) if names else len(order)

    return sorted(weights, key=place)


def model_states(
    weights: Iterable[Weight],
    *,
    precision: Precision,
    optimizer: Optimizer,
    layout: Layout,
    in_layer: bool,
    on_host: OptimizerOffload = NO_OFFLOAD,
) -> ModelStates:
    """Parameters, gradients and optimizer state of a region's weights on one rank.

    Args:
        in_layer: the weights belong to a transformer layer, which decides whether Muon updates them.
    """

    def states(w: Weight) -> ModelStates:
        if w.frozen:
            return _frozen(w, precision, layout, on_host)
        return _trained(w, precision, optimizer, layout, on_host, in_layer=in_layer)

    return together((states(w), 1) for w in weights)


def _frozen(w: Weight, precision: Precision, layout: Layout, on_host: OptimizerOffload) -> ModelStates:
    """Model states of one frozen weight, which ZeRO 3 shards as well."""
    ranks = layout.expert_shards if w.expert else layout.shards
    sharded = layout.zero == 3 and (ranks > 1 or on_host.moves_parameters)
    quantized_only = bool(w.quantized_bytes) and precision.recipe is not None and precision.recipe.parameters
    held = 0 if quantized_only else w.held_bytes - w.scale_bytes
    shard = (-(-held // ranks) if sharded else held) + w.quantized_bytes
    unsharded = w.packed_bytes - w.scale_bytes if w.packed_bytes else w.numel * DTYPE_BYTES[precision.compute]
    return ModelStates(
        parameters=w.scale_bytes + (0 if on_host.moves_parameters else shard),  # scales are never offloaded
        host_parameters=shard if on_host.moves_parameters else 0,
        gathered=unsharded if sharded else 0,
    )


def _trained(
    w: Weight, precision: Precision, optimizer: Optimizer, layout: Layout, on_host: OptimizerOffload, *, in_layer: bool
) -> ModelStates:
    """Model states of one trained weight."""
    ranks = layout.expert_shards if w.expert else layout.shards
    wrapped = ranks > 1 or (w.expert and layout.shards > 1) or on_host.moves_parameters  # NOTE [ Groups of one rank ]
    own = precision
    if w.dtype:  # a weight in a dtype of its own has no copy in another one
        own = replace(own, parameter=w.dtype, gradient=w.dtype, accumulator=None, master=None, optimizer_gradient=None)
    quantized_parameters = precision.recipe is not None and precision.recipe.parameters
    shard = -(-w.numel // ranks)
    updated = shard if layout.zero >= 1 else w.numel
    moves = on_host.moves and updated >= on_host.least_elements
    parameters = w.quantized_bytes
    if not (w.quantized_bytes and quantized_parameters):
        parameters += (shard if layout.zero == 3 else w.numel) * DTYPE_BYTES[own.parameter]
    summed = shard if layout.zero >= 2 else w.gradient_numel
    accumulated = summed * DTYPE_BYTES[own.accumulator] if own.accumulator else 0
    gradients = summed * DTYPE_BYTES[own.gradient] + (0 if own.apart else accumulated)
    master = updated * (DTYPE_BYTES[own.master] if own.master else 0) + (accumulated if own.apart else 0)
    state = state_bytes(w, updated, own, optimizer, in_layer=in_layer and not w.tied)
    host_state = 0
    if moves:
        # bitsandbytes' two moments: a byte an element plus scales, or fp32, whatever the parameter's dtype
        paged = 2 * updated * (1 if _eight(w, optimizer) else 4)
        moved = state if on_host.steps_on_cpu else paged
        host_state = moved + (master if on_host.moves_masters else 0)
        state, master = max(0, state - moved), 0 if on_host.moves_masters else master
    gathered = reduced = 0
    if layout.zero == 3 and wrapped:
        fp8 = quantized_parameters and w.gemm and not w.head  # NOTE [ Copies in torchao ] in `spec.fp8`
        gathered = w.numel * (1 if fp8 else DTYPE_BYTES[precision.compute])
    if layout.zero >= 2 and (ranks > 1 or (layout.zero == 3 and wrapped)):
        reduced = w.gradient_numel * DTYPE_BYTES[precision.reduce_dtype]
    moment = updated * own.moment_bytes
    return ModelStates(
        parameters=0 if on_host.moves_parameters else parameters,
        host_parameters=parameters if on_host.moves_parameters else 0,
        gradients=0 if moves and on_host.frees_gradients else gradients,
        state=state + master,
        master=master,
        copies=updated * (DTYPE_BYTES[own.optimizer_gradient] if own.optimizer_gradient else 0),
        gathered=gathered,
        reduced=reduced,
        largest=moment,
        stepping=2 * moment,
        first=moment,
        last=moment,
        host_state=host_state,
        host_elements=updated if moves else 0,
    )


def state_bytes(weight: Weight, elements: int, precision: Precision, kind: Optimizer, *, in_layer: bool) -> int:
    """Bytes of the optimizer's state for ``elements`` of a weight, without the master copy.

    Moments have the dtype of the tensor that the optimizer updates (fp32: a master copy), or the precision's.
    """
    moment = precision.moment_bytes
    matrix = len(weight.shape) >= 2
    if kind.moments is not None:
        return kind.moments * moment * elements
    match kind:
        case Optimizer.ADAMW_BF16:
            return 2 * 2 * elements
        case Optimizer.ADAM8BIT | Optimizer.ADAM8BIT_TRAINER:
            return (
                8 * elements
                if elements < SMALL_TENSOR or not _eight(weight, kind)
                else 2 * (elements + 4 * -(-elements // SCALE_BLOCK))
            )
        case Optimizer.ADAM4BIT:  # torchao/optim/adam.py (0372e5f), ``_new_buffer``: whole blocks, else as parameters
            if elements < SMALL_TENSOR or elements % NARROW_BLOCK:
                return 2 * moment * elements
            return 2 * (elements // 2 + 4 * (elements // NARROW_BLOCK))
        case Optimizer.ADAFACTOR:
            return _factored(weight, elements) if matrix else 4 * elements
        case _:  # Muon
            return (1 if matrix and in_layer else 2) * moment * elements


def _eight(weight: Weight, kind: Optimizer) -> bool:
    """Whether moments have 8 bits: ``register_module_override`` in ``trainer.py`` of transformers 5.23."""
    table = weight.name.rpartition(".")[2] in ("tokens", "positions", "segments")  # each an ``nn.Embedding``
    return kind is Optimizer.ADAM8BIT or (kind is Optimizer.ADAM8BIT_TRAINER and not table)


def _factored(weight: Weight, elements: int) -> int:
    """One fp32 number for each row and each column of a matrix, sharded like the weight."""
    rows, columns = weight.shape[-2:]
    matrices = prod(weight.shape[:-2])
    whole = 4 * matrices * (rows + columns)
    return -(-whole * elements // weight.total)


def copied_gradients(layout: Layout, held: Precision, total: ModelStates) -> int:
    """Copies of a rank's gradients in DeepSpeed's step: a flat one, and another in the dtype of the master.

    ``deepspeed/runtime/zero/stage3.py``, ``_prepare_fp32_grad_for_sub_group``: ``self.flatten(...).to(dtype)`` of a
    sub-group, which ends with the parameter that brings it to a billion elements; ``stage_1_and_2.py``, ``step``, the
    same for the full partition. The gradients themselves are live until then.
    """
    if layout.zero == 0 or held.master is None:
        return 0
    wide = DTYPE_BYTES[held.master]
    elements = total.master // wide
    elements = min(elements, (layout.buckets or ZeroBuckets()).sub_group) if layout.zero == 3 else elements
    return elements * (DTYPE_BYTES[held.gradient] + (wide if held.master != held.gradient else 0))
