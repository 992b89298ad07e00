"""Seconds of a run's step and of its pipeline stages: regions, exposed transfers, the replay of the schedule.

NOTE [ A step ]
`cost.region` has the seconds of regions; a chunk of a stage is the sum of its regions, of which equal ones are computed
once. A micro-batch also has ZeRO 3's all-gather before each region and the reduction of its gradients after it, which
overlap with neighbouring regions; offloading, which overlaps with the next region; and sending to the next stage.
`cost.pipeline` replays the schedule. The rest of the reduction of gradients after the last backward is exposed, then
the optimizer steps. Ranks of a stage are equal, and nothing else uses the network.

The breakdown is of the busiest stage. Its parts sum to the step: `compute`, the kernels of forwards and backwards;
`communication` that is exposed, or slows compute that it overlaps with; `bubble`, waiting for other stages;
`recompute`, all recomputed ops; `other`, the optimizer, and launch-bound kernels.

NOTE [ Copies of FSDP ]
``_fsdp_collectives.py`` of torch 2.13: FSDP2 copies a group's weights out of the all-gather's output
(``foreach_all_gather_copy_out``), and its gradients, cast, into the reduction's input (``chunk_cat``), on the stream of
compute. FSDP1's weights are views of what was all-gathered; autograd concatenates its gradients. Not priced: copies of
shards, and before a reduction after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from reprlib import repr as short

from jettison.core.dtypes import DTYPE_BYTES
from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.core.units import format_seconds
from jettison.cost.collective import cpu_seconds, group, host_seconds, point_seconds, transfer_seconds
from jettison.cost.execution import Execution, execution_of
from jettison.cost.flops import (
    Counting,
    computed_share,
    everything,
    model_flops,
    repeated,
    to_the_end,
    tokens,
    utilisation,
)
from jettison.cost.kernel import memory_seconds, rate
from jettison.cost.pipeline import Replay, schedule_seconds
from jettison.cost.region import (
    NOTHING,
    OPTIMIZER_PASSES,
    Item,
    PassSeconds,
    PriceModel,
    RegionSeconds,
    item_of,
    pending_share,
    price_model,
    quantized_bytes,
)
from jettison.formula.model_states import ModelStates, model_states, together
from jettison.formula.region import embedding_region
from jettison.formula.split_backward import computing_groups
from jettison.predict.frozen_models import frozen_groups, frozen_run
from jettison.predict.optimizer_step import offloaded_optimizer
from jettison.predict.stage_units import by_torch, moved_bytes, splits
from jettison.predict.stages import (
    COMPILERS,
    FULL,
    NONE,
    Chosen,
    Chunk,
    RegionGroup,
    StageRegion,
    again_by,
    kept_by,
    outline,
    pipeline_shape,
    segment_ends,
)
from jettison.spec.hardware import Hardware, slowest
from jettison.spec.model import AnyLayer
from jettison.spec.precision import Optimizer
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run, anchored, expect_run


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Seconds of a pipeline stage: of one micro-batch in each of its chunks, and of the end of a step.

    Args:
        chunks: seconds of their regions, transfers within them included.
        sent: exposed seconds of sending outputs and their gradients, and of receiving where that blocks, by chunk.
        end: exposed reduction of gradients after the last backward, and all-gather of updated parameters.
        hideable: the part of ``end`` that a longer last backward would hide.
        optimizer: optimizer step with clipping.
        recomputed_flops: of one micro-batch on one rank.
        repeated: recomputation for gradients of weights in a split backward, by chunk.
        late: whether that pass computes the gradients of inputs as well, by chunk.
    """

    chunks: tuple[RegionSeconds, ...]
    sent: tuple[tuple[float, float], ...]
    end: float
    hideable: float
    optimizer: float
    recomputed_flops: float
    repeated: tuple[PassSeconds, ...]
    late: tuple[bool, ...]

    @cached_property
    def forward(self) -> list[float]:
        """Seconds of a forward, by chunk."""
        return [c.forward.seconds + s for c, (s, _) in zip(self.chunks, self.sent, strict=True)]

    @cached_property
    def backward(self) -> list[float]:
        """Seconds of a backward with recomputation, by chunk."""
        every = zip(self.chunks, self.sent, self.repeated, strict=True)
        return [c.backward_seconds + s + r.seconds for c, (_, s), r in every]

    @cached_property
    def weights(self) -> list[float]:
        """Seconds of the backward's gradients of weights, by chunk."""
        halves = zip(self.chunks, self.repeated, self.backward, self.late, strict=True)
        return [b if late else c.weights.seconds + r.seconds for c, r, b, late in halves]

    @cached_property
    def inputs(self) -> list[float]:
        """Seconds of the backward's gradients of inputs, by chunk."""
        return [b - w for b, w in zip(self.backward, self.weights, strict=True)]

    @cached_property
    def again(self) -> list[PassSeconds]:
        """Seconds of recomputation, by chunk."""
        return [c.again + r for c, r in zip(self.chunks, self.repeated, strict=True)]

    @property
    def total(self) -> RegionSeconds:
        """Seconds of one micro-batch in all chunks."""
        return sum(self.chunks, NOTHING)


# regions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one run's stages on given hardware.

    Args:
        planned: it runs under a plan, for every recompute mode.
    """

    run: Run
    hardware: Hardware
    execution: Execution
    planned: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", slowest(self.hardware.under(self.execution.stack), self.run.layout.world))

    def prices(self, layer: AnyLayer | None = None) -> PriceModel:
        """Price model of a layer's kernels; None: of the embedding and the head."""
        run = self.run
        return price_model(
            hardware=self.hardware,
            execution=self.execution,
            precision=run.precision,
            layout=run.layout.within_stage,
            visible=1.0 if layer is None else computed_share(run, layer),
        )

    # regions ----------------------------------------------------------------------------------------------------------

    def items(self, chunk: Sequence[RegionGroup]) -> list[Item]:
        """Items of a chunk's regions."""
        found, begun = [], 0
        for same, ends in zip(chunk, segment_ends(self.run, chunk), strict=True):
            part = same.part
            if part.first:  # a segment's copy to the host overlaps with the next segment
                begun = moved_bytes(self.run, part)
            for last, own in groupby(ends):  # every layer of a segment but the last is fully recomputed
                alone = last and not part.inner
                again = self._again(part) if alone else everything(part.region)
                item = self._item(part, len(list(own)), again, begun if alone else 0)
                found.append(replace(item, segment=part.layers) if part.inner and part.first else item)
        return found

    def item(self, part: StageRegion) -> Item:
        """Item of a region on its own."""
        return self.items([RegionGroup(part=part, names=(part.name,))])[0]

    def _item(self, part: StageRegion, count: int, again: frozenset[int], moved: int) -> Item:
        run = self.run
        found = item_of(
            self.prices(part.layer),
            part.region,
            again,
            self.planned or run.recompute != Recompute(),
            run.micro_batches > 1,
            run.layout.sharding,
            run.optimizer,
            part.is_layer,
        )
        if run.layout.zero == 3:
            copies = self._copies(part.static)
            added = found.added + sum(each.seconds for each in copies)
            found = replace(found, seconds=found.seconds + copies, added=added)
        if run.optimizer_offload.moves_parameters:  # a shard is copied from the host before its all-gather
            fetched = host_seconds(self._static(found).host_parameters, self.hardware)
            found = replace(found, gathered=found.gathered + fetched)
        groups = computing_groups(part.region) if by_torch(run, part) else found.groups
        offloaded = host_seconds(moved, self.hardware) if moved else found.offloaded
        if (count, groups, offloaded) == (found.count, found.groups, found.offloaded):
            return found
        return replace(found, count=count, groups=groups, offloaded=offloaded)

    def _copies(self, of: ModelStates) -> RegionSeconds:
        """Seconds of a region's copies of weights and gradients: NOTE [ Copies of FSDP ]."""
        layout, precision = self.run.layout, self.run.precision
        if not layout.shards_parameters or layout.buckets is not None:
            return NOTHING
        read, flat = DTYPE_BYTES[precision.compute] / DTYPE_BYTES[precision.reduce_dtype], layout.flat_parameters
        moved = 0 if flat or not layout.resharded else 2 * of.gathered
        gradients = of.reduced * (read + (read if flat else 1)) * self.execution.reduces_each
        out, into = (PassSeconds(compute=memory_seconds(nbytes, self.hardware)) for nbytes in (moved, gradients))
        return RegionSeconds(forward=out, inputs=out, weights=into)

    def _again(self, part: StageRegion) -> frozenset[int]:
        if part.chosen is not None:
            return frozenset(part.program.recompute_set(part.chosen.buffers))
        if part.policy == NONE or part.policy in COMPILERS:
            return frozenset()
        if part.policy == FULL and self.execution.repeats_all:
            return everything(part.region)
        parts = again_by(part.region, part.policy)
        if parts is not None:
            return parts.ops
        kept = kept_by(part.region, part.policy)
        if part.policy == Mode.SELECTIVE and self.execution.repeats_all:
            return to_the_end(part.region, kept)
        return repeated(part.region, kept)

    # stages -----------------------------------------------------------------------------------------------------------

    def stage(
        self, index: int, chunks: Sequence[Sequence[Item]], share: float, known: dict[object, RegionSeconds]
    ) -> StageSeconds:
        """Seconds of one stage in a step.

        Args:
            share: share of its micro-batches that recompute.
            known: cache of chunks' seconds by items (object) and share.
        """
        layout = self.run.layout
        seconds = []
        for items in chunks:
            alike = id(items), share
            if alike not in known:
                each = sum((item.seconds * item.count for item in items), NOTHING)
                known[alike] = each._replace(again=each.again * share) + self._exposed_transfers(items) + self._frozen
            seconds.append(known[alike])
        last = layout.pp * layout.virtual_stages - 1
        both = list(zip(layout.places(index), layout.neighbours(index), strict=True))
        blocks, waits = (0.0 if self.execution.hides_stages else self.sending()), self.execution.receives_block
        hops = [(blocks * (p < last and not behind), blocks * (p > 0 and not before)) for p, (before, behind) in both]
        every = [item for items in chunks for item in items]
        end, hideable = self._end(every)
        late = [place == 0 and splits(self.run) for place, _ in both]
        repeated = [self._repeated([] if first else items) for first, items in zip(late, chunks, strict=True)]
        return StageSeconds(
            chunks=tuple(seconds),
            sent=tuple((out + waits * into, into + waits * out) for out, into in hops),
            end=end,
            hideable=hideable,
            optimizer=self.optimizer(every),
            recomputed_flops=share
            * (sum(item.count * item.recomputed_flops for item in every) + sum(flops for _, flops in repeated)),
            repeated=tuple(found * share for found, _ in repeated),
            late=tuple(late),
        )

    def _repeated(self, items: Sequence[Item]) -> tuple[PassSeconds, float]:
        """Seconds and FLOPs of torch's checkpoints that recompute for gradients of weights in a split backward.

        Each group of weights recomputes its full segment: NOTE [ Checkpoints under two halves ] in
        `formula.split_backward`. A model's first stage does not split its backward, and recomputes once.
        """
        size = self.run.recompute.segment
        layers = [item for item in items if item.groups for _ in range(item.count)]
        again, flops = PassSeconds(), 0.0
        for at in range(0, len(layers), size):
            own = layers[at : at + size]
            times = sum(item.groups for item in own)
            for item in own:
                again += item.seconds.again * times
                flops += item.recomputed_flops * times
        return again, flops

    @property
    def _frozen(self) -> RegionSeconds:
        total = NOTHING
        for frozen in self.run.frozen:
            own = Timing(run=frozen_run(self.run, frozen), hardware=self.hardware, execution=self.execution)
            items = own.items(frozen_groups(self.run, frozen))
            total = total + RegionSeconds(forward=own.stage(0, [items], 1.0, {}).total.forward)
        return total

    def sending(self) -> float:
        """Seconds to send a stage's output, or its gradient: of one residual stream."""
        layout = self.run.layout
        if layout.pp == 1:
            return 0.0
        nbytes = embedding_region(self.run.signature).output.nbytes
        if layout.tp == 1 or layout.sp or not self.execution.splits_outputs:
            return point_seconds(nbytes, layout, self.hardware)
        ranks = group(layout, "tp", self.hardware.node)
        gathering = transfer_seconds("all_gather_into_tensor", nbytes, ranks, self.hardware)
        return point_seconds(nbytes / layout.tp, layout, self.hardware) + gathering

    def _exposed_transfers(self, items: Sequence[Item]) -> RegionSeconds:
        """Exposed transfers of ZeRO 2 and 3 and offloading in a chunk's passes."""
        layout, forward, backward = self.run.layout, 0.0, 0.0
        if layout.zero >= 2 and (layout.shards > 1 or self.run.gathers_parameters):
            gathers = layout.zero == 3 and layout.resharded
            if gathers and items:
                forward += items[0].gathered + self._covered(items, gathers=True, reduces=False, forward=True)
            reduces, gathers = self.execution.reduces_each, gathers and not layout.fsdp_one_unit  # a root unit stays
            backward += self._covered(items[::-1], gathers=gathers, reduces=reduces, forward=False)
        if self.run.recompute.to_host:
            pairs = [(item.count - 1, item, item.seconds.backward_seconds, item) for item in items]
            for at, (item, other) in enumerate(pairwise(items), 1):
                if other.in_layer:  # the last layer offloads nothing
                    behind = sum(each.seconds.backward_seconds for each in items[at : at + other.segment])
                    pairs.append((1, item, behind, other))
            forward += sum(n * self._over(i.offloaded, other.seconds.forward.seconds) for n, i, _, other in pairs)
            backward += sum(n * self._over(i.offloaded, work) for n, i, work, _ in pairs)
        return RegionSeconds(forward=PassSeconds(transfers=forward), inputs=PassSeconds(transfers=backward))

    def _over(self, transfer: float, work: float) -> float:
        """Exposed seconds of a copy that overlaps with the next region. Copies need no multiprocessors."""
        return max(0.0, transfer - work) if self.execution.hides_offload else transfer

    def _covered(self, items: Sequence[Item], *, gathers: bool, reduces: bool, forward: bool) -> float:
        """Seconds that transfers add: the next region's all-gather and the previous one's reduction overlap with each.

        Without the first all-gather and the last reduction, which do not overlap: the caller adds them.
        """
        waited, every = self.loads(items, gathers=gathers, reduces=reduces, forward=forward)
        return waited + (every - waited) * self.hardware.reached.shared

    def loads(self, items: Sequence[Item], *, gathers: bool, reduces: bool, forward: bool) -> tuple[float, float]:
        """Exposed seconds of these transfers, and all of them."""
        waited = every = 0.0
        for at, item in enumerate(items):
            work = item.seconds.forward.seconds if forward else item.seconds.backward_seconds
            following = items[at + 1].gathered if gathers and at + 1 < len(items) else 0.0
            before = items[at - 1].reduced if reduces and at else 0.0
            own_gathered, own_reduced = (item.gathered if gathers else 0.0), (item.reduced if reduces else 0.0)
            loads = [(1, following + before)]
            if item.count > 1:
                loads = [
                    (1, own_gathered + before),
                    (item.count - 2, own_gathered + own_reduced),
                    (1, following + own_reduced),
                ]
            for times, load in loads:
                every += times * load
                waited += times * (max(0.0, load - work) if self.execution.hides_data else load)
        return waited, every

    # the end of a step ------------------------------------------------------------------------------------------------

    def _end(self, items: Sequence[Item]) -> tuple[float, float]:
        """Exposed seconds of reductions after the last backward, by region; and what longer backwards would hide."""
        layout = self.run.layout
        if layout.shards == 1 or not items:
            return 0.0, 0.0
        after = sum(item.count * item.gathered for item in items) if self.gathers_after else 0.0
        if layout.zero >= 2 and self.execution.reduces_each:
            return items[0].reduced + after, 0.0
        every = sum(item.count * item.reduced for item in items)
        if not self.execution.hides_data:
            return every + after, 0.0
        now = done = 0.0
        for item in reversed(items):
            took, reduced = item.seconds.backward_seconds, item.reduced
            pending = took * pending_share(item.region)
            for _ in range(item.count):
                now += took
                done = max(done, now - pending) + reduced
        left = max(0.0, done - now)
        shared = self.hardware.reached.shared
        return left + (every - left) * shared + after, left * (1 - shared)

    @property
    def gathers_after(self) -> bool:
        """Whether a step ends with the all-gather of updated parameters."""
        layout = self.run.layout
        return layout.zero in (1, 2) or (layout.zero == 3 and not layout.resharded)

    def optimizer(self, items: Sequence[Item], *, least: bool = False) -> float:
        """Seconds of the optimizer step: its traffic over the memory bandwidth, of the device or of the host.

        Args:
            least: a lower bound, without copies that backwards may hide.
        """
        precision, how = self.run.precision, self.execution
        passes = 1 if how.fused_optimizer and self.run.optimizer is not Optimizer.ADAMW_FOREACH else OPTIMIZER_PASSES
        if self.run.optimizer_offload.steps_on_cpu:
            return self._host_seconds(items, passes=passes, least=least)
        nbytes = sum(item.count * item.optimizer_bytes for item in items)
        again = sum(item.count * quantized_bytes(item.region, precision, how) for item in items if item.in_layer)
        return memory_seconds(nbytes * passes + again, self.hardware) + self._host_seconds(items)

    def _host_seconds(self, items: Sequence[Item], *, passes: int = 1, least: bool = False) -> float:
        """Exposed copies of optimizer offload, and a step on CPU: only copies of gradients overlap with backwards."""
        run = self.run
        if not run.optimizer_offload.moves:
            return 0.0
        moved = offloaded_optimizer(run, together((self._static(item), item.count) for item in items))
        updated = moved.to_device_bytes - moved.gathered_bytes  # the others are part of `Item.gathered`
        sent, fetched = (host_seconds(n, self.hardware) for n in (moved.to_host_bytes, updated))
        if not run.optimizer_offload.steps_on_cpu:
            return sent + fetched
        fetched += cpu_seconds(moved.stepped_bytes * passes, self.hardware)
        if least:
            return fetched
        work = sum(item.count * item.seconds.backward_seconds for item in items)
        backwards = run.micro_batches * (work + self._exposed_transfers(items).inputs.transfers)
        return max(0.0, sent - backwards) + fetched

    def _static(self, item: Item) -> ModelStates:
        run = self.run
        return model_states(
            [w for w in item.region.weights if not w.tied],
            precision=run.precision,
            optimizer=run.optimizer,
            layout=run.layout.sharding,
            in_layer=item.in_layer,
            on_host=run.optimizer_offload,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Seconds of a step by part: NOTE [ A step ]."""

    compute: float
    communication: float
    bubble: float
    recompute: float
    other: float

    @property
    def seconds(self) -> float:
        """Sum of all parts: the step time."""
        return self.compute + self.communication + self.bubble + self.recompute + self.other


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Step time of a run on given hardware.

    Args:
        lagged: the part of the replay's makespan that is due to overlapped transfers between stages.
        recomputed_flops: of a step, on all ranks.
    """

    run: Run
    hardware: Hardware
    execution: Execution
    stages: tuple[StageSeconds, ...]
    replay: Replay
    lagged: float
    step_seconds: float
    recomputed_flops: float

    def __repr__(self) -> str:
        return summary(
            self, f"{self.run.model.name} on {self.hardware.name}, {format_seconds(self.step_seconds)} a step"
        )

    @property
    def busiest(self) -> int:
        """Index of the stage with the longest work; the first of equals."""
        return max(range(len(self.stages)), key=lambda index: self.replay.busy[index])

    @cached_property
    def breakdown(self) -> Breakdown:
        """Breakdown of the busiest stage's time."""
        stage, times = self.stages[self.busiest], self.run.micro_batches
        total = stage.total
        parts = (total.forward, total.inputs, total.weights)
        moved = sum(part.transfers for part in parts) + sum(a + b for a, b in stage.sent)
        optimizer = max(stage.optimizer for stage in self.stages)
        ended = self.step_seconds - optimizer - self.replay.makespan
        return Breakdown(
            compute=times * sum(part.compute for part in parts),
            communication=max(0.0, times * moved + self.lagged + ended),  # a difference of sums: no -1e-16
            bubble=max(0.0, self.replay.makespan - self.replay.busy[self.busiest] - self.lagged),
            recompute=times * sum(part.seconds for part in stage.again),
            other=times * sum(part.dispatch for part in parts) + optimizer,
        )

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one device."""
        return tokens(self.run) / self.step_seconds / self.run.layout.world

    @property
    def peak_flops_per_second(self) -> int:
        """Peak of one device for the dtype of activations."""
        return rate(self.hardware, self.run.precision.compute)

    def model_flops(self, counting: Counting = Counting.LEDGER) -> float:
        """Model FLOPs of a step on all ranks."""
        return model_flops(self.run, counting)

    @property
    def hardware_flops(self) -> float:
        """Hardware FLOPs of a step: model FLOPs and recomputation."""
        return self.model_flops() + self.recomputed_flops

    def mfu_by(self, counting: Counting) -> float:
        """MFU under another convention of model FLOPs."""
        return self._utilization(self.model_flops(counting))

    @property
    def mfu(self) -> float:
        """MFU with the ledger's model FLOPs, attention in full: arXiv 2205.05198 Appendix A."""
        return self.mfu_by(Counting.LEDGER)

    @property
    def hfu(self) -> float:
        """HFU: utilization with recomputation."""
        return self._utilization(self.hardware_flops)

    def _utilization(self, flops: float) -> float:
        world, peak = self.run.layout.world, self.peak_flops_per_second
        return utilisation(flops, seconds=self.step_seconds, devices=world, peak_flops_per_second=peak)


def estimate(
    run: Run,
    hardware: Hardware,
    *,
    execution: Execution | None = None,
    chosen: Chosen | None = None,
    outlined: Sequence[tuple[Chunk, ...]] | None = None,
) -> Estimate:
    """Estimate the step time of a run.

    Args:
        execution: execution model; default: that of the run's kernels, compiled if its layers are.
        chosen: a planner's kept buffers of each layer; None: the run's recompute mode decides.
        outlined: the run's `outline`, if known.

    Raises:
        UsageError: not a run or hardware; a figure missing in the hardware's file, or a layout that does not divide.
    """
    expect_run(run)
    if not isinstance(hardware, Hardware):
        raise UsageError(f"got {short(hardware)}; expected hardware, such as jettison.hardware('h100-80gb')")
    how = execution or execution_of(run)
    _, hardware = anchored(run, hardware)
    given = run
    # without a plan layers are priced as they are written, with the kernels that a compiler makes
    run = replace(run, compiled=run.compiled and chosen is not None)
    timing = Timing(run=run, hardware=hardware, execution=how, planned=chosen is not None)
    layout = run.layout
    items: dict[int, list[Item]] = {}
    passes: dict[object, RegionSeconds] = {}
    known: dict[object, StageSeconds] = {}
    stages = []
    for index, chunks in enumerate(outline(run, chosen) if outlined is None else outlined):
        share, own = recomputing(run, index), tuple(map(id, chunks))
        items |= {at: timing.items(chunk) for at, chunk in zip(own, chunks, strict=True) if at not in items}
        key = own, share, layout.neighbours(index)
        if key not in known:
            known[key] = timing.stage(index, [items[at] for at in own], share, passes)
        stages.append(known[key])
    played, lagged = _play(run, stages, timing)
    over = max(end + stage.end for end, stage in zip(played.ends, stages, strict=True))
    again = sum(stage.recomputed_flops for stage in stages)
    return Estimate(
        run=given,
        hardware=hardware,
        execution=timing.execution,
        stages=tuple(stages),
        replay=played,
        lagged=lagged,
        step_seconds=over + max(stage.optimizer for stage in stages),
        recomputed_flops=again * run.micro_batches * layout.tp * layout.cp * layout.dp,
    )


def recomputing(run: Run, stage: int) -> float:
    """Share of a stage's micro-batches that recompute."""
    whole = run.recompute.whole
    if not whole:
        return 1.0
    return pipeline_shape(run).recomputing_share(stage, whole)


def works(run: Run, stages: Sequence[StageSeconds]) -> list[list[list[float]]]:
    """Seconds of forwards and backwards or, where these are split, of gradients of inputs and of weights, by stage and
    chunk.
    """
    split = run.layout.schedule.splits and run.layout.pp > 1
    kinds = ("forward", "inputs", "weights") if split else ("forward", "backward")
    return [[getattr(stage, kind) for stage in stages] for kind in kinds]


def _play(run: Run, stages: Sequence[StageSeconds], timing: Timing) -> tuple[Replay, float]:
    """Replay of the schedule, and the part of its makespan due to overlapped transfers between stages."""
    if run.layout.pp == 1:
        alone = run.micro_batches * (sum(stages[0].forward) + sum(stages[0].backward))
        return Replay(busy=(alone,), ends=(alone,)), 0.0
    shape, seconds = pipeline_shape(run), works(run, stages)
    lag = timing.sending() if timing.execution.hides_stages else 0.0
    played = schedule_seconds(shape, *seconds, transfer=lag)
    return played, played.makespan - schedule_seconds(shape, *seconds).makespan if lag else 0.0
