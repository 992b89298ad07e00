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
(``reduce_scatter_input``, in the dtype that is reduced in), which stays until the next group has come so far. Of a
second micro-batch they come whole again, and what is reduced of them is added to the shards.

A segment of several groups gathers each again when it is computed again, and ``post_forward`` shards none of them then
(``is_bw``): all of them are whole until their own backwards. What the gathers returned is gone by then: each group is
the outermost of a forward of its own (``iter_forward_root``).

Weights that stay whole after a forward (``reshard_after_forward=False``) are freed by ``post_backward`` all the same:
there are shards alone between steps. Over fewer ranks (an ``int``) a larger shard is there from ``reshard`` until the
weights have been copied out for backward (``to_sharded_post_forward``, ``to_unsharded``); of a segment that is counted
until the last one's. A pipeline's stage has weights that stay whole while any micro-batch is in flight. The loss is
behind the model: where norm and head are sharded again, none of their weights is there while it is made and
differentiated.

In a pipeline of ``torch.distributed.pipelining`` (`Layout.keeps_whole_gradients`) nothing is reduced until a stage's
last backward (``stage.py``, ``backward_maybe_with_nosync``: ``set_requires_gradient_sync(False)``): gradients stay
whole, in the dtype that is reduced in (``to_accumulated_grad_if_needed``, one parameter after the other), and are added
to. Then group after group lets go of its weights, and of its gradients once they are copied (``post_backward``).

Where the ends of a model have no groups of their own (`Layout.outer_ends`) they belong to the model's: whole from
before the first layer on, and in backward until the engine's last callback, as are the gradients of both. Nothing is
gathered for the head, and for the embedding nothing ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jettison.dtypes import DTYPE_BYTES
from jettison.formula.region import HEAD
from jettison.ledger.timeline import Unit
from jettison.predict.passes import passes_of
from jettison.predict.stages import RegionGroup, StageRegion
from jettison.spec.kernels import Device
from jettison.spec.layout import Reshard
from jettison.spec.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """The regions of a chunk, each with what its own group gathers and reduces.

    Args:
        kept: those whose weights stay whole after a forward.
        ranks: over so many others are sharded again until their backward; 0: over all.
        in_flight: weights are there with micro-batches anyway, see `whole_in_flight`.
        outer: weights of the ends, which the outermost group has; 0: they have groups of their own.
        late: whole gradients of the head, where they are there until the embedding's are; as shards, ``late_shards``.
    """

    parts: tuple[StageRegion, ...]
    kept: tuple[StageRegion, ...]
    ranks: int = 0
    in_flight: bool = False
    outer: int = 0
    late: int = 0
    late_shards: int = 0

    @classmethod
    def of(cls, run: Run, parts: Sequence[StageRegion]) -> Grouped:
        """As the layout groups them."""
        layout = run.layout
        late = layout.reshard is Reshard.TORCHTITAN
        if not layout.outer_ends:
            if layout.reshard is Reshard.ALWAYS:
                return cls(parts=tuple(parts), kept=(), ranks=layout.reshard_ranks)
            kept = parts if not layout.resharded else [part for part in parts[-1:] if part.name == HEAD]
            return cls(parts=tuple(parts), kept=tuple(kept), in_flight=layout.pp > 1 and not layout.resharded)
        first, *layers, last = parts
        ends = first.static + last.static
        both = replace(first.static, gathered=ends.gathered, reduced=ends.reduced, gradients=ends.gradients)
        first, end = replace(first, static=both), replace(last, static=replace(last.static, gathered=0, reduced=0))
        if late:
            layers[-1] = replace(layers[-1])  # not the others that are alike
        return cls(
            parts=(first, *layers, end),
            kept=(first, *(layers if not layout.resharded else layers[-1:] if late else ())),
            outer=ends.gathered,
            late=unsharded(run, last),
            late_shards=last.static.gradients,
        )

    def whole(self, part: StageRegion | None) -> int:
        """Weights of a region that stay whole after its forward."""
        return part.static.gathered if self.kept and part in self.kept and part is not None else 0

    def left(self, part: StageRegion) -> int:
        """What stays of a region's weights after its forward: all, or a shard that is larger than the one for good."""
        return part.static.gathered // self.ranks if self.ranks else self.whole(part)

    def again(self, part: StageRegion | None) -> int:
        """Weights of a region that are gathered a second time, for its backward."""
        if part is None or not self.kept:
            return 0 if part is None else part.static.gathered
        return part.static.gathered - self.whole(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The regions of a unit, and their neighbours in the chunk."""

    own: tuple[StageRegion, ...]
    before: StageRegion | None
    behind: StageRegion | None
    chunk: Grouped

    @property
    def shards(self) -> tuple[object, ...]:
        """What of it decides what is there beside."""
        whole, parts = self.chunk.whole, (self.before, *self.own, self.behind)
        alone = (None if part is None else (part.static.gathered, part.static.reduced, whole(part)) for part in parts)
        given = None if self.before is None else self.before.region.output.nbytes
        return (*alone, given)

    @classmethod
    def of(cls, chunk: Grouped, first: int, stop: int) -> Place:
        """Of parts ``first .. stop - 1`` of a chunk."""
        parts = chunk.parts
        return cls(
            own=parts[first:stop],
            before=parts[first - 1] if first else None,
            behind=parts[stop] if stop < len(parts) else None,
            chunk=chunk,
        )


def with_shards(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> list[Unit]:
    """Units of a chunk with what is gathered and reduced beside them; those that stand elsewhere are apart."""
    if run.layout.zero < 2 or (run.layout.shards == 1 and run.layout.expert_shards == 1):
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
    shard = chunk.left(chunk.parts[last]) if chunk.ranks else 0
    return behind - shard + chunk.again(chunk.parts[last]) + chunk.again(chunk.parts[last - 1] if last else None)


def whole_in_flight(run: Run, groups: Sequence[RegionGroup]) -> int:
    """Weights of a pipeline's chunk that are whole while micro-batches are in flight."""
    if run.layout.pp == 1 or run.layout.resharded:
        return 0
    return sum(group.part.static.gathered * len(group.names) for group in groups)


def reducing(run: Run, chunks: Sequence[Sequence[RegionGroup]]) -> int:
    """Beside fixed bytes, the most while a stage's gradients are reduced at the end of a step, the last chunk's first.

    Whole gradients and weights of groups that come later, a buffer, which gloo copies, and shards of those before.
    """
    left = [group.part for chunk in reversed(chunks) for group in chunk for _ in group.names]
    weights = 0 if run.layout.resharded else sum(part.static.gathered for part in left)
    there, highest = weights + sum(part.static.reduced for part in left), 0
    for part in left:
        copied = part.static.gradients + (part.static.reduced if run.kernels.device is Device.CPU else 0)
        there -= 0 if run.layout.resharded else part.static.gathered
        highest = max(highest, there + part.static.reduced, there + copied)
        there += part.static.gradients - part.static.reduced
    return highest


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
        forward, backward = self._segment() if len(own) > 1 else self._single(own[0])
        late, shards = (0, 0) if own[0].name == HEAD else (chunk.late, chunk.late_shards)
        found = Unit(
            names=unit.names,
            resident=unit.resident + stays,
            whole=stays,
            forward_peak=forward,
            backward_peak=backward + late - shards,
            adding_peak=backward + late + unit.adding_peak - unit.backward_peak,
            gradient=unit.gradient,
            pending=unit.pending,
            is_loss=unit.is_loss,
            frozen=unit.frozen,
        )
        whole = run.layout.stage_buffers and run.layout.keeps_whole_gradients
        return self._whole_gradients(found) if whole else found

    def _whole_gradients(self, unit: Unit) -> Unit:
        """With gradients that stay whole: nothing is reduced beside them, and the first become as wide as they stay."""
        run, own = self.run, self.place.own
        rise = self.unit.backward_peak
        before = self.place.before
        given = 0 if before is None or not before.region.output.grad else before.region.output.nbytes
        wide = sum(part.static.reduced for part in own)
        if run.precision.gradient == run.precision.compute:
            return replace(unit, backward_peak=rise, adding_peak=self.unit.adding_peak, gradient=wide)
        last = min((w.numel for part in own for w in part.region.weights if not w.frozen), default=0)
        turned = given + wide + last * DTYPE_BYTES[run.precision.compute] - unit.resident
        return replace(unit, backward_peak=max(rise, turned), adding_peak=rise, gradient=wide)

    def _single(self, part: StageRegion) -> tuple[int, int]:
        """Of one region: how high its passes rise."""
        run, unit, chunk = self.run, self.unit, self.place.chunk
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
        before, behind = self.place.before, self.place.behind
        waiting = 0 if behind is None else behind.static.reduced
        entering = 2 * gathered
        if before is not None:  # what it returned, and what was gathered for it
            entering += before.region.output.nbytes + (0 if chunk.in_flight else before.static.gathered)
        rising = (
            backward + there + ahead - shard,
            passes.opening + 2 * there + freed if part.region.output.grad else 0,
            differentiated - freed,
        )
        closing = self._closing(part) + ahead - unit.resident - (after + shard if run.layout.pp == 1 else 0)
        moved = unit.forward_peak - passes.forward_peak, unit.backward_peak - passes.backward_peak
        return (
            max(forward + 2 * gathered + lingering, loss + after - freed, entering) + moved[0],
            max(max(rising) + waiting + moved[1], closing),
        )

    def _closing(self, part: StageRegion) -> int:
        """What there is when a group's gradients have been copied: both, and the gradient of its input.

        gloo reduces a copy (``ProcessGroupGloo.cpp``, ``reduce_scatter_tensor_coalesced``: ``clone``).
        """
        before = self.place.before
        given = 0 if before is None or not before.region.output.grad else before.region.output.nbytes
        copied = unsharded(self.run, part)
        if self.run.kernels.device is Device.CPU:
            copied = max(copied, part.static.reduced + part.static.gradients)
        return given + part.static.reduced + copied

    def _segment(self) -> tuple[int, int]:
        unit, own, chunk = self.unit, self.place.own, self.place.chunk
        highest = 0 if self.place.chunk.in_flight else max(part.static.gathered for part in own)
        waiting = 0 if self.place.behind is None else self.place.behind.static.reduced
        earlier = 0 if self.place.chunk.in_flight else sum(map(chunk.left, own[:-1]))
        shard = chunk.left(own[-1]) if chunk.ranks else 0
        entering = unit.resident + own[0].region.output.nbytes + 3 * highest
        forward = max(unit.forward_peak + 2 * highest, entering) + earlier
        return forward, unit.backward_peak + sum(map(chunk.again, own)) - shard + waiting


def unsharded(run: Run, part: StageRegion) -> int:
    """A region's whole gradients, as its backward makes them."""
    precision = run.precision
    return part.static.reduced // DTYPE_BYTES[precision.gradient] * DTYPE_BYTES[precision.compute]
