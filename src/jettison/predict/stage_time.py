"""Seconds of a pipeline stage: its regions, what ZeRO and offloading add beside them, and the end of a step.

See NOTE [ A step ] in `predict.time`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from jettison.cost.collective import group, host_seconds, point_seconds, transfer_seconds
from jettison.cost.execution import Execution
from jettison.cost.flops import everything, repeated, to_the_end
from jettison.cost.layer import NOTHING, PassSeconds, PriceModel, RegionSeconds
from jettison.cost.matmul import memory_seconds
from jettison.formula.region import Region, embedding_region
from jettison.formula.split_backward import computing_groups
from jettison.formula.static import Static, static
from jettison.predict.frozen_models import frozen_groups, frozen_run
from jettison.predict.halves import by_torch, splits
from jettison.predict.stage_items import Item, computed_share_of, in_segments, price_model, several
from jettison.predict.stages import FULL, NONE, RegionGroup, StageRegion, again_by, kept_by
from jettison.predict.states_on_host import host_states
from jettison.predict.timeline_units import moved_bytes
from jettison.predict.weight_work import adding_seconds, pending_share, quantised_bytes
from jettison.spec.hardware import Hardware
from jettison.spec.model import AnyLayer
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

OPTIMIZER_PASSES = 3
"""What an AdamW that is not one kernel moves, in units of what a fused one does: its operations read and write 80 bytes
of fp32 a parameter one by one, a fused kernel 28."""


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """One pipeline stage: of one micro-batch through each of its chunks, and what a step adds.

    Args:
        chunks: its regions' seconds, transfers within them included.
        sent: of one micro-batch, by chunk: what sending its output, and its gradient, adds to the device's time.
        end: what is left of the reduction of gradients after the last backward, and parameters gathered again.
        hideable: of it, what a longer last backward could hide.
        optimizer: of its step, clipping included.
        recomputed_flops: of one micro-batch on one rank.
        repeated: by chunk, what the second half of a split backward computes again; empty: nothing.
        late: by chunk, does the second half do it all? Empty: none does.
    """

    chunks: tuple[RegionSeconds, ...]
    sent: tuple[tuple[float, float], ...]
    end: float
    hideable: float
    optimizer: float
    recomputed_flops: float
    repeated: tuple[PassSeconds, ...] = ()
    late: tuple[bool, ...] = ()

    @cached_property
    def forward(self) -> list[float]:
        """By chunk."""
        return [c.forward.seconds + s for c, (s, _) in zip(self.chunks, self.sent, strict=True)]

    @cached_property
    def backward(self) -> list[float]:
        """By chunk, both halves, and what is computed again."""
        plain = [c.backward_seconds + s for c, (_, s) in zip(self.chunks, self.sent, strict=True)]
        return [b + r.seconds for b, r in zip(plain, self.repeated, strict=True)] if self.repeated else plain

    @cached_property
    def weights(self) -> list[float]:
        """By chunk, of the backward the half for weights."""
        if not self.late:
            return [c.weights.seconds for c in self.chunks]
        halves = zip(self.chunks, self.repeated, self.backward, self.late, strict=True)
        return [b if late else c.weights.seconds + r.seconds for c, r, b, late in halves]

    @cached_property
    def inputs(self) -> list[float]:
        """By chunk, of the backward the half for inputs."""
        return [b - w for b, w in zip(self.backward, self.weights, strict=True)]

    @cached_property
    def again(self) -> list[PassSeconds]:
        """By chunk, all that is computed again."""
        if not self.repeated:
            return [c.again for c in self.chunks]
        return [c.again + r for c, r in zip(self.chunks, self.repeated, strict=True)]

    @property
    def total(self) -> RegionSeconds:
        """Of one micro-batch through all chunks."""
        return total_of(self.chunks)


def total_of(parts: Sequence[RegionSeconds]) -> RegionSeconds:
    """One after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Prices the stages of one run on given hardware.

    Args:
        planned: it runs under a plan, whatever its recompute mode.
    """

    run: Run
    hardware: Hardware
    execution: Execution
    planned: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", self.hardware.under(self.execution.stack))

    def prices(self, layer: AnyLayer | None = None) -> PriceModel:
        """Of a layer's kernels, or of the embedding's and the head's."""
        run = self.run
        visible = 1.0 if layer is None else computed_share_of(run, layer)
        return price_model(self.hardware, self.execution, run.precision, run.layout.within_stage, visible)

    # regions ----------------------------------------------------------------------------------------------------------

    def items(self, chunk: Sequence[RegionGroup]) -> list[Item]:
        """Regions of one visit to a stage."""
        segment = self.run.recompute.number if self.run.recompute.mode is Mode.EVERY else 1
        found, begun = [], 0
        for same in chunk:
            part, count = same.part, len(same.names)
            # of a segment, every layer but the last is computed again whole
            inner = count - count // segment if part.is_layer else 0
            inner = count if part.inner else inner
            if part.first:  # what a segment sends goes beside what follows it
                begun = moved_bytes(self.run, part)
            if inner:
                item = self._item(part, inner, everything(part.region), 0)
                found.append(replace(item, segment=part.segment) if part.inner and part.first else item)
            if count > inner:
                found.append(self._item(part, count - inner, self._again(part), begun))
        return found

    def _item(self, part: StageRegion, count: int, again: frozenset[int], moved: int) -> Item:
        run = self.run
        found = several(
            count,
            self.prices(part.layer),
            part.region,
            again,
            self.planned or run.recompute != Recompute(),
            run.micro_batches > 1,
            run.layout.sharding,
            run.optimizer,
            part.is_layer,
        )
        if run.states_on_host.moves_parameters:  # a shard comes from the host before it is gathered
            fetched = host_seconds(self._static(found).host_parameters, self.hardware)
            found = replace(found, gathered=found.gathered + fetched)
        if by_torch(run, part):
            found = replace(found, groups=computing_groups(part.region))
        return replace(found, offloaded=host_seconds(moved, self.hardware)) if moved else found

    def _again(self, part: StageRegion) -> frozenset[int]:
        """Steps that a region's backward runs again."""
        if part.chosen is not None:
            return repeated(part.region, part.chosen.buffers)
        if part.policy == NONE:
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
        """All that one stage does in a step.

        Args:
            share: of its micro-batches, how many compute again.
            known: seconds of chunks, by the objects that their items are, and by share.
        """
        layout = self.run.layout
        seconds = []
        for items in chunks:
            alike = id(items), share
            if alike not in known:
                each = total_of([item.seconds * item.count for item in items] or [NOTHING])
                known[alike] = replace(each, again=each.again * share) + self._beside(items) + self._frozen
            seconds.append(known[alike])
        sends = self.sending()
        last = layout.pp * layout.virtual_stages - 1
        both = list(zip(layout.places(index), layout.neighbours(index), strict=True))
        blocks = 0.0 if self.execution.hides_stages else sends
        every = [item for items in chunks for item in items]
        end, hideable = self._end(every)
        late = [place == 0 for place, _ in both] if splits(self.run) else []
        repeated = [self._repeated([] if first else items) for first, items in zip(late, chunks, strict=False)]
        return StageSeconds(
            chunks=tuple(seconds),
            sent=tuple(
                (blocks if place < last and not behind else 0.0, blocks if place and not before else 0.0)
                for place, (before, behind) in both
            ),
            end=end,
            hideable=hideable,
            optimizer=self.optimizer(every),
            recomputed_flops=share
            * (sum(item.count * item.recomputed_flops for item in every) + sum(flops for _, flops in repeated)),
            repeated=tuple(found * share for found, _ in repeated),
            late=tuple(late),
        )

    def _repeated(self, items: Sequence[Item]) -> tuple[PassSeconds, float]:
        """What torch's checkpoints compute again in a second half, and its FLOPs.

        A whole segment for each group of weights in it: NOTE [ Checkpoints under two halves ] in
        `formula.split_backward`. A model's first stage has no halves, and computes once.
        """
        size = self.run.recompute.number if self.run.recompute.mode is Mode.EVERY else 1
        layers = list(in_segments([item for item in items if item.groups], size))
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
        """The forwards of frozen models, in a micro-batch of the one stage that there is."""
        total = NOTHING
        for beside in self.run.frozen:
            own = Timing(run=frozen_run(self.run, beside), hardware=self.hardware, execution=self.execution)
            items = own.items(frozen_groups(self.run, beside))
            total = total + replace(NOTHING, forward=own.stage(0, [items], 1.0, {}).total.forward)
        return total

    def sending(self) -> float:
        """Of a stage's output to the next one, or of its gradient back: of one residual stream."""
        layout = self.run.layout
        if layout.pp == 1:
            return 0.0
        nbytes = embedding_region(self.run.scene).output.nbytes
        if layout.tp == 1 or layout.sp or not self.execution.splits_outputs:
            return point_seconds(nbytes, layout, self.hardware)
        ranks = group(layout, "tp", self.hardware.node)
        gathering = transfer_seconds("all_gather_into_tensor", nbytes, ranks, self.hardware)
        return point_seconds(nbytes / layout.tp, layout, self.hardware) + gathering

    def _beside(self, items: Sequence[Item]) -> RegionSeconds:
        """What ZeRO 2 and 3 and offloading add to a chunk's passes, where its work does not cover it."""
        layout = self.run.layout
        if not items:
            return NOTHING
        forward = backward = 0.0
        if layout.zero >= 2 and (layout.shards > 1 or self.run.gathers_parameters):
            gathers = layout.zero == 3 and layout.resharded
            if gathers:
                forward += items[0].gathered + self._covered(items, gathers=True, reduces=False, forward=True)
            reduces = self.execution.reduces_each
            backward += self._covered(items[::-1], gathers=gathers, reduces=reduces, forward=False)
        if self.run.recompute.to_host:
            pairs = [(item.count - 1, item, item.seconds.backward_seconds, item) for item in items]
            for at, (item, other) in enumerate(pairwise(items), 1):
                if other.in_layer:  # the last layer's stay
                    behind = sum(each.seconds.backward_seconds for each in items[at : at + other.segment])
                    pairs.append((1, item, behind, other))
            forward += sum(n * self._over(i.offloaded, other.seconds.forward.seconds) for n, i, _, other in pairs)
            backward += sum(n * self._over(i.offloaded, work) for n, i, work, _ in pairs)
        if not (forward or backward):
            return NOTHING
        return replace(NOTHING, forward=PassSeconds(transfers=forward), inputs=PassSeconds(transfers=backward))

    def hideable(self, items: Sequence[Item]) -> float:
        """Of a chunk's backward, what it waits for ZeRO's transfers that more work would hide."""
        layout = self.run.layout
        alone = layout.shards == 1 and not self.run.gathers_parameters
        if not items or layout.zero < 2 or alone or not self.execution.hides_data:
            return 0.0
        gathers, reduces = layout.zero == 3 and layout.resharded, self.execution.reduces_each
        waited, _ = self._loads(items[::-1], gathers=gathers, reduces=reduces, forward=False)
        return waited * (1 - self.hardware.reached.shared)

    def _over(self, transfer: float, work: float) -> float:
        """What copying adds to the next region's work, beside which it runs. Copies need no multiprocessors."""
        return max(0.0, transfer - work) if self.execution.hides_offload else transfer

    def _covered(self, items: Sequence[Item], *, gathers: bool, reduces: bool, forward: bool) -> float:
        """Seconds that transfers add: beside each region the next one is gathered and the one before is reduced.

        The first gathering and the last reduction have nothing beside them and are the caller's.
        """
        waited, every = self._loads(items, gathers=gathers, reduces=reduces, forward=forward)
        return waited + (every - waited) * self.hardware.reached.shared

    def _loads(self, items: Sequence[Item], *, gathers: bool, reduces: bool, forward: bool) -> tuple[float, float]:
        """Of these transfers what work does not cover, and all of them."""
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
        """What is left when backwards are over: gradients are ready region by region, and move one after another. And
        of it, what longer backwards could hide.
        """
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
        """Does a step end with gathering the parameters that it has changed?"""
        layout = self.run.layout
        return layout.zero in (1, 2) or (layout.zero == 3 and not layout.resharded)

    def adding(self, region: Region) -> float:
        """Of a micro-batch's backward: adding a region's weight gradients to those that are there already."""
        run = self.run
        if run.micro_batches == 1:
            return 0.0
        return adding_seconds(region, run.layout.sharding, run.precision, self.execution, self.hardware)

    def optimizer(self, items: Sequence[Item], *, least: bool = False) -> float:
        """Bytes of gradients, parameters and state, over the memory bandwidth; of a step on the host, its copies.

        Args:
            least: as a part of a sum, without what backwards may hide.
        """
        precision = self.run.precision
        if self.run.states_on_host.steps_there:
            return self._host_copies(items, least=least)
        nbytes = sum(item.count * item.optimizer_bytes for item in items)
        passes = 1 if self.execution.fused_optimizer else OPTIMIZER_PASSES
        how = self.execution
        again = sum(item.count * quantised_bytes(item.region, precision, how) for item in items if item.in_layer)
        return memory_seconds(nbytes * passes + again, self.hardware) + self._host_copies(items)

    def _host_copies(self, items: Sequence[Item], *, least: bool = False) -> float:
        """What states on the host make a step wait: gradients go beside backwards and what these wait for, the other
        way; the rest does not.

        The arithmetic of a step on the host is not in it: hardware files know no host's.
        """
        run = self.run
        if not run.states_on_host.moves:
            return 0.0
        total = sum((self._static(item).times(item.count) for item in items), Static())
        moved = host_states(run, total)
        behind = moved.to_device_bytes - moved.gathered_bytes  # the others are with `Item.gathered`
        sent, fetched = (host_seconds(n, self.hardware) for n in (moved.to_host_bytes, behind))
        if not run.states_on_host.steps_there:
            return sent + fetched
        if least:
            return fetched
        work = sum(item.count * item.seconds.backward_seconds for item in items)
        beside = run.micro_batches * (work + self._beside(items).inputs.transfers)
        return max(0.0, sent - beside) + fetched

    def _static(self, item: Item) -> Static:
        run = self.run
        return static(
            [w for w in item.region.weights if not w.tied],
            precision=run.precision,
            optimizer=run.optimizer,
            layout=run.layout.sharding,
            in_layer=item.in_layer,
            on_host=run.states_on_host,
        )
