"""The answer for one run: every stage's bytes, which phase of which stage is worst, and the ledger behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from operator import mul
from typing import Any, Final

from jettison.core.objects import summary
from jettison.core.units import format_bytes
from jettison.formula.region import embedding_region, parameter_count
from jettison.formula.static import Static
from jettison.ledger.ledger import Ledger
from jettison.ledger.record import SavedTensor
from jettison.memory.actions import DeviceOrder, OrderOptions, Weights, device_order
from jettison.memory.step import Event, Known, Moment, StageLoad, lifetimes, moments, peak, peak_bytes
from jettison.memory.unit import Unit
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.fsdp2 import freed, reducing, whole_in_flight
from jettison.predict.optimizer_state import (
    HostStates,
    bucket_bytes,
    host_buffer_bytes,
    host_states,
    stage_state,
    step_bytes,
)
from jettison.predict.stage_buffers import buffers_of, packed_batch, sending, workspace_bytes
from jettison.predict.stages import Chosen, Chunk, StageRegion, outline, segment_length, walk
from jettison.predict.units import stream_bytes, units
from jettison.spec.layout import Reshard, Schedule
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run, expect_run

Units = tuple[Unit, ...]
GRADIENT_COPIES: Final = "copies of gradients"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage on one rank."""

    index: int
    groups: tuple[Chunk, ...]  # by virtual stage
    load: StageLoad
    static: Static
    known: Known = field(default_factory=dict, repr=False, compare=False)  # chunks of all stages

    @cached_property
    def parts(self) -> tuple[tuple[StageRegion, ...], ...]:
        """Its regions one by one, by virtual stage."""
        return tuple(tuple(part for group in chunk for part in group.parts()) for chunk in self.groups)

    @cached_property
    def peak_bytes(self) -> int:
        """Of its worst moment from the second step on."""
        return peak_bytes(self.load, known=self.known)

    @cached_property
    def peak(self) -> Moment:
        """Its worst moment from the second step on."""
        return peak(self.load)

    @cached_property
    def first_step_peak(self) -> Moment:
        """Its worst moment in the first step."""
        return peak(self.load, first_step=True)

    @property
    def in_flight(self) -> int:
        """Micro-batches between forward and backward at once, at most, of the virtual stage that has most."""
        own = len(self.groups)
        return max(sum(state.alive[chunk::own]) for state in self.load.occupancies for chunk in range(own))

    @cached_property
    def activation_bytes(self) -> int:
        """Held between forwards and backwards, at most."""
        whole = [sum(len(unit.names) * unit.whole for unit in units) for units in self.load.chunks]
        held = [self.load.held(chunk) - whole[chunk] + self.load.sent for chunk in range(len(self.load.chunks))]
        half = [self.load.held_half(chunk) - whole[chunk] + self.load.sent for chunk in range(len(self.load.chunks))]
        return max(sum(map(mul, o.forward, held)) + sum(map(mul, o.weight, half)) for o in self.load.occupancies)

    def timeline(self, *, first_step: bool = False) -> tuple[Moment, ...]:
        """Its moments in order."""
        return tuple(moments(self.load, first_step=first_step))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A run, and what each rank of it allocates. Ranks of one stage are alike."""

    run: Run
    stages: tuple[Stage, ...]

    def __repr__(self) -> str:
        return summary(
            self, f"{self.run.model.name}, {len(self.stages)} pipeline stages, peak {format_bytes(self.peak_bytes)}"
        )

    @cached_property
    def worst(self) -> Stage:
        """The stage that needs most; the first of equals."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Allocated on the worst rank from the second step on."""
        return self.worst.peak_bytes

    @property
    def first_step_peak_bytes(self) -> int:
        """Allocated on the worst rank in the first step, before optimizer state is there."""
        return max(peak_bytes(stage.load, first_step=True, known=stage.known) for stage in self.stages)

    @cached_property
    def parameters(self) -> int:
        """Of the whole model."""
        return parameter_count(self.run.model)

    @property
    def host_states(self) -> HostStates | None:
        """Of the rank that has most of its optimizer's states on the host, where a run has any there."""
        if not self.run.states_on_host.moves:
            return None
        return max((host_states(self.run, s.static) for s in self.stages), key=lambda found: found.host_bytes)

    @property
    def parts(self) -> Iterator[StageRegion]:
        """Every region, in the order of the model."""
        layout = self.run.layout
        parts: dict[int, tuple[StageRegion, ...]] = {}
        for stage in self.stages:
            parts |= dict(zip(layout.places(stage.index), stage.parts, strict=True))
        for place in sorted(parts):
            yield from parts[place]

    def layer_bytes(self) -> list[tuple[str, int]]:
        """(layer, bytes saved for backward by one micro-batch on one rank), in the order of the model."""
        first = self._first_of_segment()
        rows = []
        for part in self.parts:
            kept = part.kept if first.get(part.name, True) else frozenset()
            rows.append((part.name, part.region.program.kept_bytes(kept)))
        return rows

    def ledger(self) -> Ledger:
        """What one micro-batch leaves behind for its backward, under the run's recompute mode; shapes are logical."""
        entries: list[SavedTensor] = []
        first = self._first_of_segment()
        names = []
        for part in self.parts:
            names.append(part.name)
            if first.get(part.name, True):
                entries += part.region.entries(part.name, part.kept)
        return Ledger(tuple(entries), layers=tuple(names))

    def _first_of_segment(self) -> dict[str, bool]:
        """For layers in segments: is it the one whose input stays?"""
        size = segment_length(self.run)
        if size == 1:
            return {part.name: False for part in self.parts if not part.first}
        found = {}
        for stage in self.stages:
            for chunk in stage.parts:
                for position, part in enumerate(part for part in chunk if part.is_layer):
                    found[part.name] = position % size == 0
        return found


def forecast(run: Run, chosen: Chosen | None = None) -> Forecast:
    """What a run needs.

    Args:
        chosen: what a planner keeps of layers.

    Raises:
        UsageError: no run; layers do not divide over the stages, or micro-batches do not suit the schedule.
    """
    expect_run(run)
    return _forecast(run, walk(run, chosen), walk(plain(run)) if run.recompute.whole else ())


def forecast_sizes(run: Run, chosen: Chosen | None = None) -> Forecast:
    """The same, some times as fast, where nobody asks for names: regions that are alike go by the names of the first.

    Raises:
        UsageError: layers do not divide over the stages, or micro-batches do not suit the schedule.
    """
    return _forecast(run, outline(run, chosen), outline(plain(run)) if run.recompute.whole else ())


def stage_sizes(run: Run, index: int, chosen: Chosen | None = None) -> Stage:
    """One stage of `forecast_sizes`."""
    (chunks,) = outline(run, chosen, only=index)
    (whole,) = outline(plain(run), only=index) if run.recompute.whole else ((),)
    return _stage(run, index, chunks, whole, {}, {})


def plain(run: Run) -> Run:
    """The same with everything kept."""
    return replace(run, recompute=Recompute())


def _forecast(run: Run, walked: Sequence[tuple[Chunk, ...]], whole: Sequence[tuple[Chunk, ...]]) -> Forecast:
    """Args: whole: the same regions with everything kept, where some micro-batches are."""
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
    """One stage.

    Args:
        whole: its chunks with everything kept, where some micro-batches are.
        known: units of chunks, and totals of stages, by the objects that they are of; ``passes``: those of all stages.
    """
    layout = run.layout
    made: tuple[Units, ...] = ()
    for own, priced in ((chunks, run), (whole, plain(run))) if whole else ((chunks, run),):
        for chunk, beside in zip(own, layout.neighbours(index), strict=True):
            key = id(chunk), beside
            if key not in known:
                known[key] = units(priced, chunk, beside)
            made += (known[key],)
    alike = tuple(map(id, chunks))
    if alike not in known:
        known[alike] = stage_state(run, chunks)
    total: Static = known[alike]
    reduces_once = layout.stage_buffers and layout.keeps_whole_gradients
    buffers, order = buffers_of(run, index), stage_order(run, index)
    before, late = workspace_bytes(run, chunks)
    aside = before + late + sum(nbytes for row, nbytes in buffers if row.until is None)
    # a chunk is sent the residual stream and its gradient, which stay (megatron/core/transformer/transformer_block.py,
    # ``set_input_tensor``; megatron/core/pipeline_parallel/schedules.py has the gradient retained there)
    received = 2 * stream_bytes(run) if layout.keeps_received and layout.pp > 1 else 0
    in_flight = sum(whole_in_flight(run, chunk) for chunk in chunks) if layout.resharding_differs else 0
    outputs = layout.keeps_stage_outputs and not layout.stage_buffers and index < layout.pp - 1
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
        sent=_output_bytes(run, chunks[0]) if outputs else 0,
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
        reducing=tuple(reducing(run, chunk) for chunk in chunks) if reduces_once else (),
        freed=tuple(freed(run, chunk) for chunk in chunks) if reduces_once else (),
        whole_chunks=tuple(_while_whole(run, index, (*chunks, *whole), made)) if layout.regathers else (),
    )
    return Stage(index=index, groups=chunks, load=load, static=total, known=passes)


def stage_order(run: Run, index: int, *, every: bool = False) -> DeviceOrder:
    """Return the order of a stage's passes. ``every``: of all micro-batches, however many there are."""
    layout = run.layout
    weights = Weights.RESIDENT
    if layout.regathers:  # interleaved and split schedules are run by ``_PipelineScheduleRuntime``
        weights = Weights.FETCHED if layout.virtual_stages > 1 or layout.schedule.splits else Weights.GATHERED
    reduces_once = layout.stage_buffers and layout.keeps_whole_gradients
    receiving = layout.keeps_received and layout.pp > 1
    learning = run.gradients is not Gradients.UPFRONT or reduces_once or (receiving and layout.virtual_stages > 1)
    return device_order(
        layout.schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B,
        stage=index,
        stages=layout.pp,
        micro_batches=run.micro_batches,
        virtual_stages=layout.virtual_stages,
        group=layout.micro_batch_group,
        whole=run.recompute.whole,
        walk=OrderOptions(sending(run, index), learning, reduces_once, weights, receiving),
        every=every,
    )


def played_load(run: Run, stage: Stage) -> StageLoad:
    """Return a stage's load with the order of all micro-batches, which `memory.step.actions` may walk through."""
    return replace(stage.load, order=stage_order(run, stage.index, every=True))


def _output_bytes(run: Run, chunk: Chunk) -> int:
    """What a chunk returns; a stage without layers hands on what the embedding returned."""
    return (chunk[-1].part.region if chunk else embedding_region(run.scene)).output.nbytes


def _while_whole(run: Run, index: int, groups: Sequence[Chunk], made: Sequence[Units]) -> Iterator[Units]:
    """Units of chunks while weights are unsharded, with what each of them shards again."""
    stays = replace(run, layout=replace(run.layout, reshard=Reshard.NEVER, reshard_ranks=0))
    beside = (*run.layout.neighbours(index),) * 2  # the same with everything kept
    for chunk, gathering, near in zip(groups, made, beside, strict=False):
        weights = {name: unit.weights for unit in gathering for name in unit.names}
        yield tuple(replace(unit, weights=weights[unit.names[0]]) for unit in units(stays, chunk, near))
