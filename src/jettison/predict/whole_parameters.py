"""ZeRO 1 by whole parameters: what the rank has that got most of them.

``torch/distributed/optim/zero_redundancy_optimizer.py``, ``_partition_parameters``: parameters sorted by their numbers,
the largest first, each to the rank that has the fewest so far. A step runs the optimizer over a rank's own, and
``_sync_params`` broadcasts them in place. Where experts are spread over ranks they have an optimizer of their own, of
the ranks that have the same ones: of all ranks a broadcast would write one rank's experts over another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.static import Static, state_bytes
from jettison.formula.tape import Weight
from jettison.predict.stages import Chunk
from jettison.spec.run import Run


def with_whole_parameters(run: Run, chunks: Sequence[Chunk], even: Static) -> Static:
    """The same with the states of the fullest rank, where ``even`` has an even share of all."""
    layout, precision = run.layout, run.precision
    if not layout.zero_whole or layout.shards == 1:
        return even
    found = [
        (weight, group.part.is_layer)
        for chunk in chunks
        for group in chunk
        for _ in group.names
        for weight in group.part.region.weights
        if not weight.frozen and not (weight.tied and layout.pp == 1)
    ]
    most = max(_shares(run, found), key=lambda own: sum(state(run, weight, inside) for weight, inside in own))
    master = sum(weight.numel for weight, _ in most) * (DTYPE_BYTES[precision.master] if precision.master else 0)
    stepping = before = 0
    moment = DTYPE_BYTES[precision.moment or precision.master or precision.parameter]
    for number, (weight, _) in enumerate(most):
        if number and weight.expert and layout.ep > 1 and not most[number - 1][0].expert:
            before = 0  # another optimizer's loop
        size = moment * weight.numel
        stepping, before = max(stepping, before + 2 * size), size
    whole = sum(state(run, weight, inside) for weight, inside in most)
    return replace(even, state=master + whole, master=master, stepping=stepping)


def state(run: Run, weight: Weight, in_layer: bool) -> int:
    """Bytes of the optimizer's own, of all of a parameter that a rank has."""
    return state_bytes(weight, weight.numel, run.precision, run.optimizer, in_layer=in_layer and not weight.tied)


def _shares(run: Run, found: Sequence[tuple[Weight, bool]]) -> list[list[tuple[Weight, bool]]]:
    """What each data-parallel rank has; of ``ep`` beside each other the same places among experts' ranks."""
    layout = run.layout
    if layout.ep == 1:
        return shared_out(found, layout.shards)
    apart = [pair for pair in found if pair[0].expert]
    common = shared_out([pair for pair in found if not pair[0].expert], layout.shards)
    experts, beside = shared_out(apart, layout.expert_shards), layout.shards // layout.expert_shards
    return [[*own, *experts[rank // beside]] for rank, own in enumerate(common)]


def shared_out(weights: Sequence[tuple[Weight, bool]], ranks: int) -> list[list[tuple[Weight, bool]]]:
    """What each rank has."""
    shares: list[list[tuple[Weight, bool]]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for each in sorted(weights, key=lambda pair: pair[0].numel, reverse=True):
        rank = sizes.index(min(sizes))
        shares[rank].append(each)
        sizes[rank] += each[0].numel
    return shares
