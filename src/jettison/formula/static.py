"""Memory for all of training: parameters, gradients and optimizer state, by precision and ZeRO stage.

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
from jettison.spec.layout import Layout
from jettison.spec.precision import NO_OFFLOAD, Optimizer, OptimizerOffload, Precision

SCALE_BLOCK, NARROW_BLOCK = 256, 128
"""8-bit Adam keeps an fp32 scale for each 256 numbers of a moment (arXiv 2110.02861), torchao's 4-bit for each 128."""
SMALL_TENSOR = 4096
"""Smaller tensors have fp32 moments (bitsandbytes, ``optim/optimizer.py``, ``min_8bit_size``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Bytes on one rank. ``gathered``: unsharded parameters that ZeRO 3 holds while the region runs.

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


_COUNTED: Final = tuple(f.name for f in fields(Static) if f.name not in ("largest", "stepping", "first", "last"))
_counted = attrgetter(*_COUNTED)


def together(several: Iterable[tuple[Static, int]]) -> Static:
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
    return Static(**counted, largest=largest, stepping=stepping, first=first, last=last)


def declared(weights: list[Weight], order: Sequence[str]) -> list[Weight]:
    """Weights in the order of their declaration: `spec.kernels.Kernels.declared`."""
    if not order:
        return weights

    def place(weight: Weight) -> int:
        names = [name for name in order if weight.name.startswith(name)]
        return order.index(max(names, key=len)) if names else len(order)

    return sorted(weights, key=place)


def static(
    weights: Iterable[Weight],
    *,
    precision: Precision,
    optimizer: Optimizer,
    layout: Layout,
    in_layer: bool,
    on_host: OptimizerOffload = NO_OFFLOAD,
) -> Static:
    """Parameters, gradients and optimizer state of a region's weights on one rank.

    Args:
        in_layer: the weights belong to a transformer layer, which decides whether Muon updates them.
    """
    parameters = gradients = state = master = copies = gathered = reduced = largest = before = stepping = first = 0
    host_state = host_elements = unsharded = 0
    moves, reduce_bytes = on_host.moves, DTYPE_BYTES[precision.reduce_dtype]
    recipe_parameters = precision.recipe is not None and precision.recipe.parameters
    freed, waits = moves and on_host.frees_gradients, moves and on_host.moves_parameters
    for w in weights:
        ranks = layout.expert_shards if w.expert else layout.shards
        wrapped = ranks > 1 or (w.expert and layout.shards > 1) or waits  # NOTE [ Groups of one rank ]
        owned = -(-w.numel // ranks)  # elements of one rank's shard
        at = [owned if layout.zero >= stage else w.numel for stage in (1, 2, 3)]
        if w.frozen:  # ZeRO 3 shards frozen weights as well
            shared = layout.zero == 3 and (ranks > 1 or waits)
            alone = bool(w.quantized_bytes) and recipe_parameters
            held_bytes = 0 if alone else w.held_bytes - w.scale_bytes
            parameters += (-(-held_bytes // ranks) if shared else held_bytes) + w.quantized_bytes
            unsharded += w.scale_bytes  # which are never offloaded
            whole = w.packed_bytes - w.scale_bytes if w.packed_bytes else w.numel * DTYPE_BYTES[precision.compute]
            gathered += whole if shared else 0
            continue
        held = _own(precision, w.dtype) if w.dtype else precision
        recipe = precision.recipe if w.quantized_bytes else None
        parameters += w.quantized_bytes
        if recipe is None or not recipe.parameters:
            parameters += at[2] * DTYPE_BYTES[held.parameter]
        accumulated = DTYPE_BYTES[held.accumulator] if held.accumulator else 0
        summed = at[1] if layout.zero >= 2 else w.gradient_numel
        if not (freed and at[0] >= on_host.least_elements):
            gradients += summed * (DTYPE_BYTES[held.gradient] + (0 if held.apart else accumulated))
        copy = at[0] * (DTYPE_BYTES[held.master] if held.master else 0) + (summed * accumulated if held.apart else 0)
        own = state_bytes(w, at[0], held, optimizer, in_layer=in_layer and not w.tied)
        if moves and at[0] >= on_host.least_elements:
            # bitsandbytes' two moments: a byte an element plus scales, or fp32, whatever the parameter's dtype
            paged = 2 * at[0] * (1 if _eight(w, optimizer) else 4)
            moved = own if on_host.steps_on_cpu else paged
            host_state += moved + (copy if on_host.moves_masters else 0)
            host_elements += at[0]
            own, copy = max(0, own - moved), 0 if on_host.moves_masters else copy
        master += copy
        copies += at[0] * (DTYPE_BYTES[held.optimizer_gradient] if held.optimizer_gradient else 0)
        state += own
        if layout.zero == 3 and wrapped:
            low_precision = recipe_parameters and w.gemm and not w.head  # NOTE [ Copies in torchao ] in `spec.fp8`
            gathered += w.numel * (1 if low_precision else DTYPE_BYTES[precision.compute])
        if layout.zero >= 2 and (ranks > 1 or (layout.zero == 3 and wrapped)):
            reduced += w.gradient_numel * reduce_bytes
        size = at[0] * DTYPE_BYTES[held.moment or held.master or held.parameter]
        largest, stepping, before, first = max(largest, size), max(stepping, before + 2 * size), size, first or size
    return Static(
        parameters=unsharded if waits else parameters + unsharded,
        host_parameters=parameters if waits else 0,
        gradients=gradients,
        state=state + master,
        master=master,
        copies=copies,
        gathered=gathered,
        reduced=reduced,
        largest=largest,
        stepping=stepping,
        first=first,
        last=before,
        host_state=host_state,
        host_elements=host_elements,
    )


def _own(precision: Precision, dtype: str) -> Precision:
    """Precision of a weight in a dtype of its own: no copy of it in another one."""
    return replace(precision, parameter=dtype, gradient=dtype, accumulator=None, master=None, optimizer_gradient=None)


def state_bytes(weight: Weight, elements: int, precision: Precision, kind: Optimizer, *, in_layer: bool) -> int:
    """Bytes of the optimizer's state for ``elements`` of a weight, without the master copy.

    Moments have the dtype of the tensor that the optimizer updates (fp32: a master copy), or the precision's.
    """
    moment = DTYPE_BYTES[precision.moment or precision.master or precision.parameter]
    matrix = len(weight.shape) >= 2
    match kind:
        case Optimizer.ADAMW | Optimizer.ADAMW_FOREACH | Optimizer.ADAMW_ON_COPIES:
            return 2 * moment * elements
        case Optimizer.ADAMW_BF16:
            return 2 * 2 * elements
        case Optimizer.SGD | Optimizer.NONE:
            return 0
        case Optimizer.SGD_MOMENTUM:
            return moment * elements
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
        case Optimizer.MUON | Optimizer.DIST_MUON | Optimizer.DIST_MUON_PINGPONG:
            return (1 if matrix and in_layer else 2) * moment * elements


def _eight(weight: Weight, kind: Optimizer) -> bool:
    """Are moments bytes? transformers 5.23, ``trainer.py``: ``register_module_override(..., {"optim_bits": 32})``."""
    table = weight.name.rpartition(".")[2] in ("tokens", "positions", "segments")  # each an ``nn.Embedding``
    return kind is Optimizer.ADAM8BIT or (kind is Optimizer.ADAM8BIT_TRAINER and not table)


def _factored(weight: Weight, elements: int) -> int:
    """One fp32 number for each row and each column of a matrix, sharded like the weight."""
    rows, columns = weight.shape[-2:]
    matrices = prod(weight.shape[:-2])
    whole = 4 * matrices * (rows + columns)
    return -(-whole * elements // weight.total)
