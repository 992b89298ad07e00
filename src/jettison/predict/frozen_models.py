"""Memory of frozen models: their weights and the peak of a forward without saved tensors.

See NOTE [ When a frozen model runs ] in `spec.fine_tuning`. Such a model is forecast as a run with frozen weights,
without dropout (TRL's ``disable_dropout_in_model``), with the policy's layout and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from jettison.families.family import kernels_for
from jettison.formula.liveness import forward_height
from jettison.formula.model_states import model_states, together
from jettison.formula.region import Region, held_over, score_region
from jettison.ledger.program import Source
from jettison.predict.fsdp import FsdpGroups
from jettison.predict.stages import RegionGroup, outline
from jettison.spec.fine_tuning import Base, FrozenModel, Role, Tuning, When
from jettison.spec.kernels import WORKSPACES, Kernels, Loss
from jettison.spec.layout import Reshard
from jettison.spec.precision import NO_OFFLOAD, Gradients, Optimizer, Precision
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenBytes:
    """Bytes of one frozen model on one rank.

    Args:
        parameters: permanent, with weights that ZeRO 3 all-gathers and does not reshard.
        forward: peak of its forward above the bytes allocated before it.
    """

    frozen: FrozenModel
    parameters: int
    forward: int


def frozen_bytes(run: Run) -> tuple[FrozenBytes, ...]:
    """Bytes of all frozen models of a run, in the given order."""
    return tuple(_bytes(_told_apart(run), frozen) for frozen in run.frozen)


def highest_forward(run: Run, when: When) -> int:
    """Highest peak of the forwards that run then."""
    return max((found.forward for found in frozen_bytes(run) if found.frozen.when is when), default=0)


def frozen_run(run: Run, frozen: FrozenModel) -> Run:
    """Return a frozen model as a run."""
    return _frozen_run(_told_apart(run), frozen)


def _told_apart(run: Run) -> Run:
    """Reset the fields that do not change a frozen model's bytes, for the cache."""
    return replace(run, recompute=Recompute(), gradients=Gradients.ONE_BY_ONE)


@lru_cache(maxsize=256)
def _frozen_run(run: Run, frozen: FrozenModel) -> Run:
    layout = run.layout
    if not (frozen.sharded and layout.zero == 3):
        layout = replace(layout, zero_replicas=1, zero_redundancy_optimizer=False).at_zero(0)
    compute, base = _held(run, frozen)
    return replace(
        run,
        model=run.model if frozen.model is None else frozen.model,
        layout=layout,
        precision=Precision(name="frozen", compute=compute, parameter=compute, gradient=compute),
        optimizer=Optimizer.NONE,
        optimizer_offload=NO_OFFLOAD,
        kernels=_kernels(run, frozen),
        dropout=0.0,
        workspaces=WORKSPACES["none"],
        tuning=Tuning(rank=1, targets=frozenset(), base=base),  # frozen, without adapters
        frozen=(),
    )


def _held(run: Run, frozen: FrozenModel) -> tuple[str, Base]:
    precision = run.precision
    if not frozen.dtype and run.tuning is not None:
        return precision.compute, run.tuning.base
    dtype = frozen.dtype or precision.parameter
    autocast = precision.parameter == "float32" and precision.compute != "float32"
    compute = precision.compute if autocast else dtype
    return compute, Base.FP32 if dtype == "float32" != compute else Base.PLAIN


def _kernels(run: Run, frozen: FrozenModel) -> Kernels:
    """The policy's kernels, with chunked loss for a fused one, since there are no gradients."""
    own = run.kernels
    loss = Loss.CHUNKED if own.loss is Loss.FUSED else own.loss
    if frozen.model is None or frozen.model.family == run.model.family:
        return replace(own, loss=loss)
    found = replace(kernels_for(frozen.model, own.name), attention=own.attention, loss=loss)
    return replace(found, device=own.device, byte_masks=own.byte_masks, loss_chunks=own.loss_chunks)


def frozen_groups(run: Run, frozen: FrozenModel) -> tuple[RegionGroup, ...]:
    """Regions in order; a reward model has one column of scores instead of logits."""
    own = frozen_run(run, frozen)
    ((groups,),) = outline(own)
    if frozen.role is not Role.REWARD:
        return groups
    region, last = score_region(own.signature), groups[-1]
    held = model_states(
        region.weights, precision=own.precision, optimizer=own.optimizer, layout=own.layout.sharding, in_layer=False
    )
    return (*groups[:-1], replace(last, part=replace(last.part, region=region, static=held)))


@lru_cache(maxsize=256)
def _bytes(run: Run, frozen: FrozenModel) -> FrozenBytes:
    groups = frozen_groups(run, frozen)
    own = frozen_run(run, frozen)
    total = together((group.part.static, len(group.names)) for group in groups)
    tables, names = held_over(groups[0].part.region), own.kernels.forward_names
    embedded = groups[0].part.region.output.nbytes if names else 0  # its ``inputs_embeds``
    heights = {group.part.region: _height(group.part.region, own.kernels.named_attention) for group in groups}
    whole, forward = _gathered(own, groups, heights, tables + embedded, embedded)
    own_bytes = 0 if frozen.model is None else total.parameters + whole
    return FrozenBytes(frozen=frozen, parameters=own_bytes, forward=forward)


def _gathered(
    run: Run, groups: Sequence[RegionGroup], heights: Mapping[Region, tuple[int, int]], common: int, embedded: int
) -> tuple[int, int]:
    """Weights that stay unsharded, since there is no backward; and the peak, with all-gathered weights.

    See NOTE [ What FSDP2 holds ] in `fsdp2`.

    Args:
        heights: peaks of each region, while it reads weights and after that.
        common, embedded: bytes that live through all layers; the part that is the embedding's output.
    """
    chunk = FsdpGroups.of(run, [group.part for group in groups for _ in group.names])
    outer = chunk.outer if run.layout.reshard is Reshard.ALWAYS else 0  # of the root group, resharded at the end
    highest, left = 2 * outer, 0
    for part in chunk.parts:
        (reading, behind), gathered = heights[part.region], chunk.again(part)
        there = 2 * gathered + outer + (common if part.is_layer else 0)
        highest = max(highest, reading + there, left + there, behind)
        left = gathered + part.region.output.nbytes - (0 if part.is_layer else embedded)
    return sum(map(chunk.left, chunk.parts)) - outer, highest


def _height(region: Region, named: bool) -> tuple[int, int]:
    """Peaks of a forward that saves only its output, without the batch, which it shares with the policy."""
    program = region.program
    batch = sum(
        b.nbytes for b in program.buffers if b.source is Source.INPUT and b.name in _OF_THE_BATCH and not b.free
    )
    working = max((step.workspace for step in region.tape.steps if step.name in _IN_CHUNKS), default=0)
    reading, behind = forward_height(region, names_outputs=named)
    more = working - batch
    return reading + more, behind + more if behind else 0


_OF_THE_BATCH = ("labels", "token ids", "segment ids")
_IN_CHUNKS = ("chunked_cross_entropy", "chunked_output_cross_entropy")
"""Losses whose forward has the logits of one chunk at a time, as its backward has."""
