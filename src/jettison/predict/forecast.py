"""The answer for one run: every stage's bytes, which phase of which stage is worst, and the ledger behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from operator import mul
from typing import Any, Final

from jettison.core.dtypes import DTYPE_BYTES
from jettison.core.objects import summary
from jettison.core.units import format_bytes
from jettison.formula.region import embedding_region, parameter_count
from jettison.formula.static import Static, static
from jettison.ledger.ledger import Ledger
from jettison.ledger.record import SavedTensor
from jettison.memory.actions import Walk, Weights, device_order
from jettison.memory.step import Event, Known, Moment, StageLoad, lifetimes, moments, peak, peak_bytes
from jettison.memory.unit import Unit
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.gathered import freed, reducing, whole_in_flight
from jettison.predict.halves import left_bytes
from jettison.predict.set_aside import deferred_head, kept_batches, loader_mask, packed_batch, set_aside
from jettison.predict.stage_buffers import buffer_bytes, sending, sent_last, stream_bytes
from jettison.predict.stages import Chosen, Chunk, StageRegion, outline, walk
from jettison.predict.states_on_host import HostStates, device_buffer, host_states
from jettison.predict.timeline_units import units
from jettison.predict.whole_parameters import with_whole_parameters
from jettison.predict.whole_tensors import muon_step_bytes, with_whole_tensors
from jettison.spec.kernels import Device
from jettison.spec.layout import Reshard, Schedule
from jettison.spec.precision import Gradients, Optimizer
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run, expect_run

Units = tuple[Unit, ...]
STEP, FORWARD, BACKWARD, OPTIMIZER = Event
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
        size = self.run.recompute.number
        if str(self.run.recompute.mode) != "every" or size == 1:
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
        _stage(run, index, chunks, twins, known, passes)
        for index, (chunks, twins) in enumerate(zip_longest(walked, whole, fillvalue=()))
    )
    return Forecast(run=run, stages=tuple(stages))


def _stage(
    run: Run, index: int, chunks: tuple[Chunk, ...], twins: tuple[Chunk, ...], known: dict[object, Any], passes: Known
) -> Stage:
    """One stage.

    Args:
        twins: its chunks with everything kept, where some micro-batches are.
        known: units of chunks, and totals of stages, by the objects that they are of; ``passes``: those of all stages.
    """
    layout = run.layout
    keys = []
    for own, priced in ((chunks, run), (twins, plain(run) if twins else run)):
        for chunk, beside in zip(own, layout.neighbours(index), strict=bool(own)):
            keys.append((id(chunk), beside))
            if keys[-1] not in known:
                known[keys[-1]] = units(priced, chunk, beside)
    alike = tuple(map(id, chunks))
    if alike not in known:
        even = sum((g.part.static.times(len(g.names)) for chunk in chunks for g in chunk), Static())
        known[alike] = with_whole_parameters(run, chunks, with_whole_tensors(run, chunks, even))
    total: Static = known[alike]
    gathered = sum(whole_in_flight(run, chunk) for chunk in chunks) if layout.resharding_differs else 0
    before, late = set_aside(run, chunks)
    aside = before + late + buffer_bytes(run, index)
    sends, last = sending(run, index), sent_last(run, index) if layout.stage_buffers else 0
    places, last_place = layout.places(index), layout.pp * layout.virtual_stages - 1
    ends = 0 in places or last_place in places
    mask = loader_mask(run) if run.loader_masks and ends else 0
    kept = kept_batches(run) if run.keep_batches and ends else 0
    kept_head = deferred_head(run) if layout.deferred_head and last_place in places else 0
    whole = layout.stage_buffers and layout.keeps_whole_gradients
    made: tuple[Units, ...] = tuple(known[key] for key in keys)
    weights = Weights.RESIDENT
    if layout.regathers:  # interleaved and split schedules are run by ``_PipelineScheduleRuntime``
        weights = Weights.FETCHED if layout.virtual_stages > 1 or layout.schedule.splits else Weights.GATHERED
    learning = run.gradients is not Gradients.UPFRONT or (layout.keeps_received and layout.virtual_stages > 1)
    received = _received(run) if layout.keeps_received and layout.pp > 1 else 0
    load = StageLoad(
        chunks=made,
        order=device_order(
            layout.schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B,
            stage=index,
            stages=layout.pp,
            micro_batches=run.micro_batches,
            virtual_stages=layout.virtual_stages,
            group=layout.micro_batch_group,
            whole=run.recompute.whole,
            walk=Walk(sends, learning or whole, whole, weights, received > 0),
        ),
        micro_batches=run.micro_batches,
        fixed=total.parameters + aside + device_buffer(run, chunks) + _frozen(run) + _buckets(run, total, chunks),
        state=total.state,
        gradients=run.gradients,
        optimizer_transient=_transient(run, total, chunks),
        sent=_output_bytes(run, chunks[0]) if _keeps_outputs(run) and index < layout.pp - 1 else 0,
        master=total.state if run.gradients is Gradients.IN_BACKWARD else total.master,  # made in the first backward
        aside=aside,
        late=late,
        lifetimes=lifetimes(
            ("document mask", mask, FORWARD, OPTIMIZER),
            ("packed batch", packed_batch(run, chunks), FORWARD, OPTIMIZER),
            ("last sends", last, FORWARD, OPTIMIZER),
            ("all-gathered weights", gathered, FORWARD, OPTIMIZER),
            ("deferred head", kept_head, FORWARD, OPTIMIZER),
            ("batches before", (run.micro_batches - 1) * kept, FORWARD, OPTIMIZER),
            ("all batches", run.micro_batches * kept, OPTIMIZER, STEP),
            ("schedule's variables", _variables(run, index), BACKWARD, OPTIMIZER),
            (GRADIENT_COPIES, total.copies, OPTIMIZER, STEP),
            ("gradients of inputs", left_bytes(run, index), OPTIMIZER, FORWARD),
        ),
        received=received,
        receives=1 if index == 0 else 0,
        transfers=tuple(stream_bytes(run) * count for count in sends),
        shards=total.gradients if whole else 0,
        reducing=tuple(reducing(run, chunk) for chunk in chunks) if whole else (),
        freed=tuple(freed(run, chunk) for chunk in chunks) if whole else (),
        whole_chunks=tuple(_while_whole(run, index, (*chunks, *twins), made)) if layout.regathers else (),
    )
    return Stage(index=index, groups=chunks, load=load, static=total, known=passes)


def _while_whole(run: Run, index: int, groups: Sequence[Chunk], made: Sequence[Sequence[Unit]]) -> Iterator[Units]:
    """Units of chunks while weights are whole, with what each of them shards again."""
    stays = replace(run, layout=replace(run.layout, reshard=Reshard.NEVER, reshard_ranks=0))
    beside = (*run.layout.neighbours(index),) * 2  # of twins the same
    for chunk, gathering, near in zip(groups, made, beside, strict=False):
        weights = {name: unit.weights for unit in gathering for name in unit.names}
        yield tuple(replace(unit, weights=weights[unit.names[0]]) for unit in units(stays, chunk, near))


def _frozen(run: Run) -> int:
    """Weights of models beside the trained one."""
    return sum(found.parameters for found in frozen_bytes(run))


def _buckets(run: Run, total: Static, chunks: Sequence[Chunk]) -> int:
    """DistributedDataParallel's: a place for each gradient, beside which it comes.

    ``torch/csrc/distributed/c10d/reducer.cpp``, ``mark_variable_ready_dense``: what autograd made is copied into its
    bucket, and the mean is copied back (``finalize_bucket_dense``). With ``gradient_as_bucket_view`` a gradient becomes
    its place, but those of micro-batches under ``no_sync`` come beside it after ``zero_grad(set_to_none=True)``.
    Experts that are spread over ranks have none: a mean over all ranks would mix different ones
    (``_set_params_and_buffers_to_ignore_for_model``).
    """
    if run.gradients is not Gradients.BUCKETS:
        return 0
    parts = [(group.part, len(group.names)) for chunk in chunks for group in chunk] if run.layout.ep > 1 else []
    apart = sum(
        count
        * static(
            [w for w in part.region.weights if w.expert],
            precision=run.precision,
            optimizer=run.optimizer,
            layout=run.layout,
            in_layer=part.is_layer,
        ).gradients
        for part, count in parts
    )
    return total.gradients - apart


def _keeps_outputs(run: Run) -> bool:
    """Beside buffers, which count what a stage returns as well."""
    return run.layout.keeps_stage_outputs and not run.layout.stage_buffers


def _output_bytes(run: Run, chunk: Chunk) -> int:
    """What a chunk returns; a stage without layers hands on what the embedding returned."""
    return (chunk[-1].part.region if chunk else embedding_region(run.scene)).output.nbytes


def _received(run: Run) -> int:
    """The residual stream that a chunk is sent, and its gradient.

    ``megatron/core/transformer/transformer_block.py``: ``set_input_tensor`` leaves the received tensor at the module,
    and ``megatron/core/pipeline_parallel/schedules.py`` has its gradient retained there, until the next one comes.
    """
    return 2 * stream_bytes(run)


def _variables(run: Run, index: int) -> int:
    """What a schedule's own variables hold of the passes before, from the first backward on.

    ``megatron/core/pipeline_parallel/schedules.py``: ``input_tensor_grad``, which was sent back, until the next
    backward has returned one; with virtual stages ``output_tensor`` of the forward before a backward, too, since both
    are sent when both have run.
    """
    layout = run.layout
    if not layout.keeps_received or layout.pp == 1 or run.micro_batches == 1:
        return 0
    each = _received(run) // 2
    if layout.virtual_stages > 1:
        return 2 * each
    return each if index else 0


SUB_GROUP: Final = 10**9
"""Elements: ``sub_group_size`` of DeepSpeed, ``deepspeed/runtime/zero/config.py``."""


def _copied_gradients(run: Run, total: Static) -> int:
    """What DeepSpeed's step makes of a rank's gradients: one flat copy, and another in the dtype of the master.

    ``deepspeed/runtime/zero/stage3.py``, ``_prepare_fp32_grad_for_sub_group``: ``self.flatten(...).to(dtype)`` of a
    sub-group, which is closed by the parameter that makes it a billion elements or more; ``stage_1_and_2.py``,
    ``step``, the same of the whole partition. The gradients themselves stay until then.
    """
    held = run.precision
    if run.layout.zero == 0 or held.master is None:
        return 0
    wide = DTYPE_BYTES[held.master]
    elements = total.master // wide
    elements = min(elements, SUB_GROUP) if run.layout.zero == 3 else elements
    return elements * (DTYPE_BYTES[held.gradient] + (wide if held.master != held.gradient else 0))


def _transient(run: Run, total: Static, chunks: tuple[Chunk, ...]) -> int:
    """What an optimizer step allocates for its own arithmetic.

    On the CPU PyTorch walks through the parameters one by one: NOTE [ A loop's names ] in `formula.static`; fused
    kernels, which training on accelerators uses, need nothing. torch's default on CUDA is neither:
    ``torch/optim/adam.py``, ``_multi_tensor_adam``, makes the roots of all second moments at once (``_foreach_sqrt``).
    """
    if run.gradients is Gradients.IN_BACKWARD:
        return 0  # it is among a backward's
    if run.states_on_host.steps_there:
        return 0
    if run.optimizer is Optimizer.ADAMW_FOREACH:
        return (total.state - total.master) // 2
    if run.optimizer is Optimizer.ADAMW_DEEPSPEED:
        return _copied_gradients(run, total)
    if muon := muon_step_bytes(run, chunks):
        return muon
    adaptive = run.optimizer in (Optimizer.ADAMW, Optimizer.MUON)
    if run.kernels.device is not Device.CPU or not adaptive:
        return 0
    return total.stepping if run.optimizer is Optimizer.ADAMW else 2 * total.largest
