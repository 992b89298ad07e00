"""Forecast of a run: each pipeline stage's bytes over a step, its peak, and the ledger of saved tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from operator import mul
from typing import TYPE_CHECKING, Any, Final

from jettison.core.objects import summary
from jettison.core.parse_units import parse_bytes
from jettison.core.units import format_bytes
from jettison.formula.model_states import ModelStates
from jettison.formula.region import embedding_region, parameter_count
from jettison.ledger.ledger import Ledger
from jettison.memory.schedule import DeviceOrder, OrderOptions, Weights, device_order
from jettison.memory.stage_unit import Unit
from jettison.memory.step import Event, Known, Moment, StageLoad, lifetimes, moments, peak, peak_bytes, total_bytes
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.fsdp import freed, reducing, whole_in_flight
from jettison.predict.optimizer_step import (
    OffloadedOptimizer,
    bucket_bytes,
    host_buffer_bytes,
    offloaded_optimizer,
    stage_state,
    step_bytes,
)
from jettison.predict.stage_buffers import buffers_of, packed_batch, sending, workspace_bytes
from jettison.predict.stage_units import sent_to_host, stream_bytes, units
from jettison.predict.stages import Chosen, Chunk, StageRegion, outline, pipeline_shape, walk
from jettison.spec.anchor import BUFFERS, RunAnchor
from jettison.spec.device_allowance import Limit, available_to
from jettison.spec.layout import Reshard
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run, expect_run

if TYPE_CHECKING:
    from jettison.spec.hardware import Hardware

Units = tuple[Unit, ...]
GRADIENT_COPIES: Final = "copies of gradients"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage on one rank."""

    index: int
    groups: tuple[Chunk, ...]  # by virtual stage
    load: StageLoad
    static: ModelStates
    known: Known = field(default_factory=dict, repr=False, compare=False)  # chunks of all stages
    segment: int = 1  # layers of each segment of the recompute mode

    @cached_property
    def parts(self) -> tuple[tuple[StageRegion, ...], ...]:
        """Regions of each virtual stage."""
        found = [[part for group in chunk for part in group.parts()] for chunk in self.groups]
        for parts in found if self.segment > 1 else ():
            numbers = [number for number, part in enumerate(parts) if part.is_layer]
            for at, number in enumerate(numbers):
                first = at - at % self.segment
                layers = min(self.segment, len(numbers) - first)
                parts[number] = replace(parts[number], place=at - first, layers=layers)
        return tuple(map(tuple, found))

    @cached_property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes from the second step on."""
        return peak_bytes(self.load, known=self.known)

    @cached_property
    def peak(self) -> Moment:
        """Moment of the peak from the second step on."""
        return peak(self.load)

    @cached_property
    def first_step_peak(self) -> Moment:
        """Moment of the first step's peak."""
        return peak(self.load, first_step=True)

    @property
    def in_flight(self) -> int:
        """Most micro-batches in flight at once, of the virtual stage with most."""
        own = len(self.groups)
        return max(sum(state.alive[chunk::own]) for state in self.load.occupancies for chunk in range(own))

    @cached_property
    def activation_bytes(self) -> int:
        """Most bytes saved for backward at once."""
        load = self.load
        others = [load.sent - total_bytes(units, "whole") for units in load.chunks]
        held = [load.held(chunk) + more for chunk, more in enumerate(others)]
        half = [load.held_half(chunk) + more for chunk, more in enumerate(others)]
        return max(sum(map(mul, o.forward, held)) + sum(map(mul, o.weight, half)) for o in load.occupancies)

    def timeline(self, *, first_step: bool = False) -> tuple[Moment, ...]:
        """Moments of a step in order."""
        return tuple(moments(self.load, first_step=first_step))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Allocated bytes of a run. Ranks of one stage are equal."""

    run: Run
    stages: tuple[Stage, ...]

    def __repr__(self) -> str:
        return summary(
            self, f"{self.run.model.name}, {len(self.stages)} pipeline stages, peak {format_bytes(self.peak_bytes)}"
        )

    @cached_property
    def worst(self) -> Stage:
        """Stage with the highest peak; the first of equals."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of the worst rank from the second step on."""
        return self.worst.peak_bytes

    @property
    def first_step_peak_bytes(self) -> int:
        """Peak of the worst rank in the first step, before optimizer state is allocated."""
        return max(peak_bytes(stage.load, first_step=True, known=stage.known) for stage in self.stages)

    @cached_property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return parameter_count(self.run.model)

    @property
    def host_bytes(self) -> int:
        """Saved tensors of all micro-batches in flight that are in CPU memory, of the rank with most."""
        sent = ([sum(sent_to_host(self.run, chunk).values()) for chunk in stage.groups] for stage in self.stages)
        return max(stage.load.most(each) for stage, each in zip(self.stages, sent, strict=True))

    @property
    def offloaded_optimizer(self) -> OffloadedOptimizer | None:
        """Offloaded optimizer states of the rank with most; None without optimizer offload."""
        if not self.run.optimizer_offload.moves:
            return None
        return max((offloaded_optimizer(self.run, s.static) for s in self.stages), key=lambda found: found.host_bytes)

    @property
    def parts(self) -> Iterator[StageRegion]:
        """All regions in the order of the model."""
        layout = self.run.layout
        parts: dict[int, tuple[StageRegion, ...]] = {}
        for stage in self.stages:
            parts |= dict(zip(layout.places(stage.index), stage.parts, strict=True))
        for place in sorted(parts):
            yield from parts[place]

    def layer_bytes(self) -> list[tuple[str, int]]:
        """Return (layer, bytes saved for backward by one micro-batch on one rank), in the order of the model."""
        return [(p.name, p.region.program.kept_bytes(p.kept if p.first else frozenset())) for p in self.parts]

    def ledger(self) -> Ledger:
        """Return the saved tensors of one micro-batch under the run's recompute mode; shapes are logical."""
        parts = list(self.parts)
        entries = (entry for part in parts if part.first for entry in part.region.entries(part.name, part.kept))
        return Ledger(tuple(entries), layers=tuple(part.name for part in parts))


def forecast(run: Run, chosen: Chosen | None = None) -> Forecast:
    """Predict the memory of a run.

    Args:
        chosen: a planner's choice of kept tensors for each layer.

    Raises:
        UsageError: not a run; layers do not divide over the stages, or the schedule does not support the micro-batches.
    """
    expect_run(run)
    return _forecast(run, walk(run, chosen), walk(plain(run)) if run.recompute.whole else ())


def forecast_sizes(run: Run, chosen: Chosen | None = None) -> Forecast:
    """`forecast`, several times as fast: equal regions have one name. Raise `UsageError` as that does."""
    return _forecast(run, outline(run, chosen), outline(plain(run)) if run.recompute.whole else ())


def stage_sizes(run: Run, index: int, chosen: Chosen | None = None) -> Stage:
    """Return one stage of `forecast_sizes`."""
    (chunks,) = outline(run, chosen, only=index)
    (whole,) = outline(plain(run), only=index) if run.recompute.whole else ((),)
    return _stage(run, index, chunks, whole, {}, {})


def plain(run: Run) -> Run:
    """Return the run without checkpointing."""
    return replace(run, recompute=Recompute())


def _forecast(run: Run, walked: Sequence[tuple[Chunk, ...]], whole: Sequence[tuple[Chunk, ...]]) -> Forecast:
    """Forecast of walked regions; ``whole``: those of micro-batches without checkpointing."""
    known: dict[object, Any] = {}
    passes: Known = {}
    stages = (
        _stage(run, index, chunks, copies, known, passes)
        for index, (chunks, copies) in enumerate(zip_longest(walked, whole, fillvalue=()))
    )
    return Forecast(run=run, stages=tuple(stages))


def _stage(
    run: Run, index: int, chunks: tuple[Chunk, ...], whole: tuple[Chunk, ...], known: dict[object, Any], passes: Known
) -> Stage:
    """Forecast of one stage.

    Args:
        whole: its chunks for micro-batches without checkpointing; empty: there are none.
        known: cache of chunks' units and stages' totals by object; ``passes``: cache of all stages' passes.
    """
    layout = run.layout
    made: tuple[Units, ...] = ()
    for own, priced in ((chunks, run), (whole, plain(run))) if whole else ((chunks, run),):
        for chunk, near in zip(own, layout.neighbours(index), strict=True):
            key = id(chunk), near
            if key not in known:
                known[key] = units(priced, chunk, near)
            made += (known[key],)
    alike = tuple(map(id, chunks))
    if alike not in known:
        known[alike] = stage_state(run, chunks)
    total: ModelStates = known[alike]
    reduces_once = run.keeps_unsharded_gradients
    buffers, order = buffers_of(run, index), stage_order(run, index)
    before, late = workspace_bytes(run, chunks)
    aside = before + late + sum(nbytes for row, nbytes in buffers if row.until is None)
    # a chunk keeps its received input and that one's gradient (megatron/core/transformer/transformer_block.py,
    # ``set_input_tensor``; megatron/core/pipeline_parallel/schedules.py calls ``retain_grad``)
    received = 2 * stream_bytes(run) if layout.keeps_received and layout.pp > 1 else 0
    in_flight = sum(whole_in_flight(run, chunk) for chunk in chunks) if layout.resharding_differs else 0
    outputs = layout.keeps_stage_outputs and not layout.stage_buffers and index < layout.pp - 1
    last = chunks[0][-1].part.region if chunks[0] else embedding_region(run.signature)
    load = StageLoad(
        chunks=made,
        order=order,
        micro_batches=run.micro_batches,
        fixed=total.parameters
        + aside
        + host_buffer_bytes(run, chunks)
        + (sum(found.parameters for found in frozen_bytes(run)) if run.frozen else 0)
        + bucket_bytes(run, total, chunks),
        state=total.state,
        gradients=run.gradients,
        optimizer_transient=step_bytes(run, total, chunks),
        sent=last.output.nbytes if outputs else 0,
        master=total.state if run.gradients is Gradients.IN_BACKWARD else total.master,  # made in the first backward
        aside=aside,
        late=late,
        lifetimes=lifetimes(
            ("packed batch", packed_batch(run, chunks), Event.FORWARD, Event.OPTIMIZER),
            ("all-gathered weights", in_flight, Event.FORWARD, Event.OPTIMIZER),
            (GRADIENT_COPIES, total.copies, Event.OPTIMIZER, Event.STEP),
            *((row.name, nbytes, row.begin, row.until) for row, nbytes in buffers if row.until is not None),
        ),
        received=received,
        receives=1 if index == 0 else 0,
        transfers=tuple(stream_bytes(run) * count for count in order.walk.sending),
        shards=total.gradients if reduces_once else 0,
        reducing=tuple(reducing(run, chunk) for chunk in chunks) if layout.reduces_chunks else (),
        freed=tuple(freed(run, chunk) for chunk in chunks) if reduces_once else (),
        reducing_chunks=tuple(units(run, chunk, reducing=True) for chunk in chunks) if run.syncs_last else (),
        whole_chunks=tuple(_while_whole(run, index, (*chunks, *whole), made)) if layout.regathers else (),
    )
    return Stage(index=index, groups=chunks, load=load, static=total, known=passes, segment=run.recompute.segment)


def stage_order(run: Run, index: int, *, every: bool = False) -> DeviceOrder:
    """Return the order of a stage's passes. ``every``: of all micro-batches, not only of distinct states."""
    layout = run.layout
    weights = Weights.RESIDENT
    if layout.regathers:  # interleaved and split schedules are run by ``_PipelineScheduleRuntime``
        weights = Weights.FETCHED if layout.virtual_stages > 1 or layout.schedule.splits else Weights.GATHERED
    receiving = layout.keeps_received and layout.pp > 1
    learning = (
        run.gradients is not Gradients.UPFRONT or layout.reduces_chunks or (receiving and layout.virtual_stages > 1)
    )
    walk = OrderOptions(
        sending(run, index), learning, layout.reduces_chunks, run.syncs_last, weights=weights, receiving=receiving
    )
    return device_order(pipeline_shape(run), index, whole=run.recompute.whole, walk=walk, every=every)


def replayed_load(run: Run, stage: Stage) -> StageLoad:
    """Return a stage's load with the order of all micro-batches, for `memory.step.actions`."""
    return replace(stage.load, order=stage_order(run, stage.index, every=True))


def _while_whole(run: Run, index: int, groups: Sequence[Chunk], made: Sequence[Units]) -> Iterator[Units]:
    """Units of chunks while weights are unsharded, with the weights that each of them reshards."""
    stays = replace(run, layout=replace(run.layout, reshard=Reshard.NEVER, reshard_ranks=0))
    neighbours = (*run.layout.neighbours(index),) * 2  # also those without checkpointing
    for chunk, gathering, near in zip(groups, made, neighbours, strict=False):
        weights = {name: unit.weights for unit in gathering for name in unit.names}
        yield tuple(unit._replace(weights=weights[unit.names[0]]) for unit in units(stays, chunk, near))


# copies of buffers that an anchor found: NOTE [ Anchored ] in `anchor` ------------------------------------------------


def extra_bytes(anchor: RunAnchor, run: Run) -> int:
    """Bytes of the copies of a buffer that the anchor found, on the worst rank."""
    if not anchor.copies:
        return 0
    return anchor.copies * dict(buffers(forecast(plain(run)))).get(anchor.buffer, 0)


def buffers(found: Forecast) -> Iterator[tuple[str, int]]:
    """Names and bytes of buffers that a framework may copy, most likely first."""
    run, layout, model = found.run, found.run.layout, found.run.model
    tokens = run.micro_batch * run.seq // layout.cp
    logits = tokens * model.vocab // layout.tp if model.words else 0
    static, stream = found.worst.static, tokens * model.hidden // layout.tp
    yield from zip(BUFFERS, (4 * logits, 2 * logits, static.parameters, static.gradients, 4 * stream), strict=True)


# limits ---------------------------------------------------------------------------------------------------------------


def available_bytes(hardware: Hardware, run: Run) -> int:
    """Usable bytes of a device for tensors: the largest peak that fits with its expected allowance; 0 if none does."""
    anchor = run.anchor
    context = 0 if anchor is None else max(0, anchor.context or 0)
    left = available_to(hardware, run.layout, run.kernels.device, context=context, stack=run.stack)
    return left if anchor is None else max(0, left - extra_bytes(anchor, run))


def limit_of(*, budget: str | None, gpu: str | None, run: Run | None = None) -> Limit | None:
    """Return the smaller of a budget and a GPU's memory for tensors; None without either. Raise `UsageError` for a
    budget without a unit, or an unknown GPU.

    Args:
        run: the run that decides the GPU's allowance; None: no allowance.
    """
    given, there = None if budget is None else parse_bytes(budget), None
    limits = [] if given is None else [Limit(nbytes=given)]
    if gpu is not None:
        from jettison.spec.hardware import hardware  # most ledgers are of no GPU

        device = hardware(gpu)
        left = device.usable_bytes if run is None else available_bytes(device, run)
        there = device.usable_bytes
        limits.append(Limit(nbytes=left, gpu=device.name))
    least = min(limits, key=lambda limit: limit.nbytes, default=None)
    return least and replace(least, budget_bytes=given, device_bytes=there)
