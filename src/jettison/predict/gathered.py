"""What there is of whole weights and whole gradients beside each unit of a chunk, where ZeRO shards them.

NOTE [ What FSDP2 holds ]
``torch/distributed/fsdp/_fully_shard``, of 2.13: ``_fsdp_param_group.py``; of buffers, ``_fsdp_collectives.py``.
A group is what one ``fully_shard`` was called on: here the embedding, each layer, and the final norm with the head. Its
streams run ahead of each other, but what is allocated follows the host, which goes from group to group.

Forward. ``wait_for_unshard`` copies a group's weights out of what the all-gather returned, and keeps that until the
next group has copied out its own (``AllGatherState``; a variable of ``wait_for_unshard`` has it until that returns):
twice the group's weights beside all of its forward, and before it those of the group before as well. ``reshard`` frees
the weights behind it.

Backward. ``pre_backward`` copies out, frees what was gathered, and gathers the group before (``_backward_prefetch``):
its own weights and as many bytes as its neighbour's. Gradients come whole, in the weights' dtype; ``post_backward``
frees the weights, drops the buffer that the group behind was reduced from, and copies its own gradients into one
(``reduce_scatter_input``, in the dtype that is reduced in), which stays until the next group has come so far. They are
let go of then, but for one: a loop of ``foreach_reduce`` has gone over them (``for i, (fsdp_param, unsharded_grad)``),
and its variable names the last until the function returns. Of a layer that is a norm's or a bias in all code that was
looked at, and nothing is counted; of the ends it is the table or the head. Of a second micro-batch gradients come whole
again, and what is reduced of them is added to the shards.

A segment of several groups gathers each again when it is computed again, and ``post_forward`` shards none of them then
(``is_bw``): each is whole from there to its own backward. Its last was gathered by the group behind, and waits. What
the other gathers returned is gone once it is copied: each group is the outermost of a forward of its own
(``iter_forward_root``). Each group is reduced when its own backward is over, beside what the layers before it keep.

Weights that stay whole after a forward (``reshard_after_forward=False``) are freed by ``post_backward`` all the same:
there are shards alone between steps. Over fewer ranks (an ``int``) a larger shard is there from ``reshard`` until the
weights have been copied out for backward (``to_sharded_post_forward``, ``to_unsharded``). A pipeline's stage has
weights that stay whole while any micro-batch is in flight. The loss is behind the model: where norm and head are
sharded again, none of their weights is there while it is made and differentiated.

In a pipeline of ``torch.distributed.pipelining`` (`Layout.keeps_whole_gradients`) nothing is reduced until a chunk's
last backward (``stage.py``, ``backward_maybe_with_nosync``: ``set_requires_gradient_sync(False)``): gradients stay
whole, in the dtype that is reduced in (``to_accumulated_grad_if_needed``, one parameter after the other), and are added
to. Then group after group lets go of its weights, and of its gradients once they are copied (``post_backward``): the
chunk has shards from there on, while others still work (``schedules.py``, ``_add_reduce_grad``).

Nor are weights sharded again behind a backward there (``set_reshard_after_backward(False)``). Of stages that reshard
after a forward (`Layout.regathers`) they are whole from a chunk's backward to its next forward, which gathers nothing
and lets go of group after group. ``_PipelineScheduleRuntime`` gathers those of the next three chunks when they come up
(``_add_unshard_reshard``), so that the first forward of each finds them whole, too.

Where the ends of a model have no groups of their own (`has_outer_ends`) they belong to the model's: whole from
before the first layer on, and in backward until the engine's last callback, as are the gradients of both. Nothing is
gathered for the head, and for the embedding nothing ahead. Of a tied table the engine adds the gradients of both uses
up before any hook has them, into a third tensor: the head's is a view, which it never adds to in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.region import EMBEDDING, HEAD
from jettison.memory.unit import Unit
from jettison.predict.expert_groups import NOTHING, least_beside_experts, own_experts, phases_of, rise_of_experts
from jettison.predict.fsdp_groups import Grouped, Place, last_gradient, unsharded
from jettison.predict.passes import named_passes, passes_of
from jettison.predict.stages import FULL, NONE, RegionGroup, StageRegion, kept_by
from jettison.spec.kernels import Device
from jettison.spec.layout import Reshard
from jettison.spec.run import Run


def with_shards(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> list[Unit]:
    """Units of a chunk with what is gathered and reduced beside them; those that stand elsewhere are apart."""
    layout = run.layout
    if layout.zero < 2 or (layout.shards == 1 and layout.expert_shards == 1 and not run.gathers_parameters):
        return list(made)
    chunk = Grouped.of(run, [group.part for group in groups for _ in group.names])
    parts = (None, *chunk.parts, None)
    known: dict[tuple[object, ...], Unit] = {}
    found: list[Unit] = []
    at = 0
    for unit in made:
        count, size = len(unit.names), _regions(groups, unit.names[0])
        begin = 0
        before: tuple[object, ...] = ()
        for end in (1, count - 1, count):  # the first and the last have other neighbours than those between
            if end <= begin:
                continue
            first = at + begin * size
            key = size, parts[first], parts[first + 1], parts[first + size], parts[first + size + 1]
            if key not in known:
                known[key] = beside(run, unit, Place.of(chunk, first, first + size))
            names, own = unit.names[begin:end], known[key]
            if key == before:
                found[-1] = own.named((*found[-1].names, *names))
            else:
                found.append(own.named(names))
            before, begin = key, end
        at += count * size
    return found


def _regions(groups: Sequence[RegionGroup], name: str) -> int:
    """How many a unit of this name has: a segment is named after its first and its last."""
    first, _, last = name.partition(" to ")
    if not last or any(name in group.names for group in groups):
        return 1
    names = [name for group in groups for name in group.names]
    return names.index(last) - names.index(first) + 1


def beside(run: Run, unit: Unit, place: Place, treated: StageRegion | None = None) -> Unit:
    """A unit with what is there beside it. See NOTE [ What FSDP2 holds ].

    Args:
        treated: its region as it is treated, where that is otherwise than in its place.
    """
    if run.layout.zero < 3:
        waiting = 0 if place.behind is None else place.behind.static.reduced
        return replace(unit, backward_peak=unit.backward_peak + waiting, adding_peak=unit.adding_peak + waiting)
    return _Sharded(run=run, unit=unit, place=place, treated=treated or place.own[0]).whole()


def beside_last(run: Run, groups: Sequence[RegionGroup], at: int) -> int:
    """What there is beside the backward of the last region of a group, at least."""
    chunk = Grouped.of(run, [group.part for group in groups for _ in group.names])
    last = sum(len(group.names) for group in groups[: at + 1]) - 1
    behind = chunk.parts[last + 1].static.reduced if last + 1 < len(chunk.parts) else 0
    part, before = chunk.parts[last], chunk.parts[last - 1] if last else None
    shard = chunk.left(part) if chunk.ranks else 0
    there, ahead = chunk.again(part), chunk.again(before)
    own = own_experts(run, part) if run.layout.ep > 1 else NOTHING
    if own.gathered:
        ahead -= own_experts(run, before).gathered if ahead else 0
        return least_beside_experts(run, own, there=there, ahead=ahead, waiting=behind) - shard
    return behind - shard + there + ahead


def whole_in_flight(run: Run, groups: Sequence[RegionGroup]) -> int:
    """Weights of a pipeline's chunk that are whole while micro-batches are in flight."""
    if run.layout.pp == 1 or run.layout.resharded:
        return 0
    return sum(group.part.static.gathered * len(group.names) for group in groups)


def reducing(run: Run, chunk: Sequence[RegionGroup]) -> int:
    """How far a chunk's reduction, behind its last backward, rises above its whole gradients and weights.

    Group after group: a buffer, which gloo copies, and shards of those before.
    """
    there = highest = 0
    for part in (group.part for group in chunk for _ in group.names):
        named = last_gradient(run, part) * DTYPE_BYTES[run.precision.gradient]
        copied = named + part.static.gradients + _cloned(run, part)
        there -= part.static.gathered
        highest = max(highest, there + part.static.reduced, there + copied)
        there += part.static.gradients - part.static.reduced
    return highest


def freed(run: Run, chunk: Sequence[RegionGroup]) -> int:
    """What of a chunk is gone once it is reduced: whole weights, and of whole gradients all but the shards."""
    parts = [group.part.static.times(len(group.names)) for group in chunk]
    return whole_in_flight(run, chunk) + sum(part.reduced - part.gradients for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharded:
    run: Run
    unit: Unit
    place: Place
    treated: StageRegion

    def whole(self) -> Unit:
        run, unit, own = self.run, self.unit, self.place.own
        chunk = self.place.chunk
        stays = sum(map(chunk.left, own)) if run.layout.pp == 1 and (chunk.kept or chunk.ranks) else 0
        if len(own) > 1:
            forward, backward, adding = self._segment()
        else:
            forward, backward = self._single(own[0])
            adding = backward + unit.adding_peak - unit.backward_peak
        shards = 0 if own[0].name == HEAD else chunk.late_shards
        found = Unit(
            names=unit.names,
            resident=unit.resident + stays,
            whole=stays,
            forward_peak=forward,
            backward_peak=backward - shards,
            adding_peak=adding,
            gradient=unit.gradient,
            pending=unit.pending + self._reduced_again(),
            is_loss=unit.is_loss,
            frozen=unit.frozen,
            weights=sum(part.static.gathered for part in own) if run.layout.regathers else 0,
        )
        whole = run.layout.stage_buffers and run.layout.keeps_whole_gradients
        return self._whole_gradients(found) if whole else found

    def _reduced_again(self) -> int:
        """What replicas of shards have added up of another micro-batch, which each group holds to the backward's end.

        ``_fsdp_param_group.py``, ``_all_reduce_state``. Of the first one it is the shards themselves, and so it is of a
        pipeline, which reduces once; the outermost group's comes last.
        """
        layout, last = self.run.layout, bool(self.place.chunk.outer) and self.place.own[0].name == HEAD
        return 0 if layout.zero_replicas == 1 or layout.keeps_whole_gradients or last else self.unit.gradient

    def _whole_gradients(self, unit: Unit) -> Unit:
        """With gradients that stay whole: nothing is reduced beside them, and the first become as wide as they stay."""
        run, own = self.run, self.place.own
        rise, adding = self.unit.backward_peak, self.unit.adding_peak
        if run.layout.regathers:
            rise, adding = unit.backward_peak, unit.adding_peak
        before = self.place.before
        given = 0 if before is None or not before.region.output.grad else before.region.output.nbytes
        wide = sum(part.static.reduced for part in own)
        if run.precision.gradient == run.precision.compute:
            return replace(unit, backward_peak=rise, adding_peak=adding, gradient=wide)
        last = min((w.numel for part in own for w in part.region.weights if not w.frozen), default=0)
        turned = given + wide + last * DTYPE_BYTES[run.precision.compute] - unit.resident
        return replace(unit, backward_peak=max(rise, turned), adding_peak=rise, gradient=wide)

    def _single(self, part: StageRegion) -> tuple[int, int]:
        """Of one region: how high its passes rise."""
        run, unit, chunk = self.run, self.unit, self.place.chunk
        before, behind = self.place.before, self.place.behind
        outer = chunk.outer if part.name == HEAD else 0  # weights of the ends that the outermost group has
        passes = passes_of(self.treated, run.gradient_rule)
        (forward, loss), (backward, differentiated) = passes.around.forward, passes.around.backward
        if part.name != HEAD:  # its weights are there until it returns
            (forward, loss), (backward, differentiated) = (passes.forward_peak, 0), (passes.backward_peak, 0)
        gathered, ahead = part.static.gathered, chunk.again(self.place.before)
        after = chunk.whole(part) if chunk.kept else 0
        if chunk.in_flight:
            gathered = after = 0
        shard = chunk.left(part) if chunk.ranks else 0
        there = gathered - after  # what stays is among residents in backward
        lingering = self.place.before.static.gathered if outer and self.place.before is not None else 0
        freed = 0 if run.layout.reshard is not Reshard.ALWAYS else outer
        waiting = 0 if behind is None or run.layout.keeps_whole_gradients else behind.static.reduced
        experts = NOTHING
        if run.layout.ep > 1:
            waiting -= own_experts(run, behind).reduced
            ahead -= own_experts(run, before).gathered if ahead else 0
            experts = own_experts(run, part)
        entering, fetched = 2 * gathered, 0
        if part.static.host_parameters:
            entering = max(entering, gathered + on_its_way(run, part))
            fetched = passes.opening + there + ahead + on_its_way(run, before) if ahead else 0
        if before is not None:  # what it returned, and what was gathered for it
            entering += before.region.output.nbytes + (0 if chunk.in_flight else before.static.gathered)
        rising = (
            backward + there + ahead - shard,
            passes.opening + 2 * there + freed if part.region.output.grad else 0,
            differentiated - freed,
            fetched,
        )
        closing = self._closing(part, before) + ahead - unit.resident - (after + shard if run.layout.pp == 1 else 0)
        if run.layout.keeps_whole_gradients:  # nothing is reduced here
            closing = 0
        late, at_end = 0 if part.name == HEAD else chunk.late, bool(chunk.outer) and part.name == EMBEDDING
        rise = max(*rising, there + chunk.tied if at_end else 0) + waiting + late
        if experts.gathered:
            phases = phases_of(self.treated, run.gradient_rule)
            rise = rise_of_experts(run, part, experts, phases, there=there, ahead=ahead, waiting=waiting)
            rise += late
        moved = unit.forward_peak - passes.forward_peak, unit.backward_peak - passes.backward_peak
        twice = 2 * gathered
        if experts.gathered:
            travels = experts.gathered if run.layout.expert_shards > 1 else 0
            twice = gathered + max(gathered - experts.gathered, travels)
        return (
            max(forward + twice + lingering, loss + after - freed, entering) + moved[0],
            max(rise + moved[1], closing if at_end else closing + late),
        )

    def _closing(self, part: StageRegion, before: StageRegion | None) -> int:
        """What there is while a group's gradients are copied and reduced, and the gradient of its input."""
        given = 0 if before is None or not before.region.output.grad else before.region.output.nbytes
        run = self.run
        apart = own_experts(run, part) if run.layout.ep > 1 else NOTHING
        named = self.place.chunk.named(run, part) * DTYPE_BYTES[run.precision.compute]
        shard = part.static.gradients
        if run.states_on_host.copies_shards:  # reduced on the device, then copied
            shard = part.static.reduced // run.layout.shards
        reducing = named + shard - apart.gradients + _cloned(run, part, apart.reduced)
        whole = unsharded(run, part, apart.reduced)
        return given + apart.gradients + part.static.reduced - apart.reduced + max(whole, reducing)

    def _segment(self) -> tuple[int, int, int]:
        """Of several, each of which is a group; the third where there are gradients already."""
        unit, own, chunk = self.unit, self.place.own, self.place.chunk
        highest = 0 if chunk.in_flight else max(part.static.gathered for part in own)
        earlier = 0 if chunk.in_flight else sum(map(chunk.left, own[:-1]))
        entering = unit.resident + own[0].region.output.nbytes + 3 * highest
        forward = max(unit.forward_peak + 2 * highest, entering) + earlier
        backward = self._segment_backward(stays=1) + chunk.late
        again = self._segment_backward(stays=int(self._reduced_again() > 0)) + chunk.late
        return forward, backward, again

    def _segment_backward(self, *, stays: int) -> int:
        """Forwards again, each with its own weights and those before it, and backwards, each group reduced behind its.

        Args:
            stays: 1: what they were reduced to.
        """
        run, place, chunk, own = self.run, self.place, self.place.chunk, self.place.own
        plain = [named_passes(part.region, NONE, run.gradient_rule, False) for part in own]
        first = own[0].region
        level = -first.program.kept_bytes(kept_by(first, FULL) & kept_by(first, NONE))
        waiting = 0 if place.behind is None else place.behind.static.reduced
        gathered = [0 if chunk.in_flight else part.static.gathered for part in own]
        left = [0 if chunk.in_flight else chunk.left(part) for part in own]
        fetched = 0 if chunk.in_flight else chunk.again(own[-1])  # by the group behind
        peak, before = 0, 0
        for number, (part, passes) in enumerate(zip(own, plain, strict=True)):
            weights = sum(gathered[: number + 1]) - sum(left[: number + 1])
            weights += 0 if number == len(own) - 1 else fetched
            entering = before + (0 if chunk.in_flight else chunk.again(part))
            rise = plain[-1].output + waiting + weights + max(passes.forward_peak, entering)
            peak = max(peak, level + rise)
            level += passes.resident
            before = part.region.output.nbytes
        for number in reversed(range(len(own))):
            ahead = 0 if number or chunk.in_flight else chunk.again(place.before)
            weights = sum(gathered[: number + 1]) - sum(left) + ahead
            peak = max(peak, level + waiting + weights + plain[number].backward_peak)
            level -= plain[number].resident
            closing = self._closing(own[number], own[number - 1] if number else place.before)
            peak = max(peak, level + weights - gathered[number] + closing)
            waiting = own[number].static.reduced
            level += stays * own[number].static.gradients
        return peak


def on_its_way(run: Run, part: StageRegion | None) -> int:
    """Copies of a group's shards that come from the host, until the buffer that is gathered has them.

    See NOTE [ States on the host ]. Of segments of several groups they are not counted.
    """
    if part is None:
        return 0
    cast = run.precision.parameter != run.precision.compute
    return part.static.host_parameters + (part.static.gathered // run.layout.shards if cast else 0)


def _cloned(run: Run, part: StageRegion, apart: int = 0) -> int:
    """gloo reduces a copy (``ProcessGroupGloo.cpp``, ``reduce_scatter_tensor_coalesced``: ``clone``)."""
    return part.static.reduced - apart if run.kernels.device is Device.CPU else 0
