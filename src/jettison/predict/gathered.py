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
(``is_bw``): all of them are whole until their own backwards, beside what the last gather returned.

Weights that stay whole after a forward (``reshard_after_forward=False``) are freed by ``post_backward`` all the same:
there are shards alone between steps. A pipeline's stage has them while any micro-batch is in flight. The loss is
behind the model: where norm and head are sharded again, none of their weights is there while it is made and
differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from jettison.dtypes import DTYPE_BYTES
from jettison.formula.region import HEAD
from jettison.ledger.timeline import Unit
from jettison.predict.passes import passes_of
from jettison.predict.stages import RegionGroup, StageRegion
from jettison.spec.kernels import Device
from jettison.spec.layout import Reshard
from jettison.spec.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The regions of a unit, and their neighbours in the chunk."""

    own: tuple[StageRegion, ...]
    before: StageRegion | None
    behind: StageRegion | None

    @property
    def shards(self) -> tuple[object, ...]:
        """What of it decides what is there beside."""
        alone = (None if part is None else (part.static.gathered, part.static.reduced) for part in self._all)
        given = None if self.before is None else self.before.region.output.nbytes
        return (*alone, given)

    @property
    def _all(self) -> tuple[StageRegion | None, ...]:
        return (self.before, *self.own, self.behind)

    @classmethod
    def of(cls, chunk: Sequence[StageRegion], first: int, stop: int) -> Place:
        """Of parts ``first .. stop - 1`` of a chunk."""
        return cls(
            own=tuple(chunk[first:stop]),
            before=chunk[first - 1] if first else None,
            behind=chunk[stop] if stop < len(chunk) else None,
        )


def with_shards(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> list[Unit]:
    """Units of a chunk with what is gathered and reduced beside them; those that stand elsewhere are apart."""
    if run.layout.zero < 2 or not any(g.part.static.gathered or g.part.static.reduced for g in groups):
        return list(made)
    parts = [group.part for group in groups for _ in group.names]
    index = {name: i for i, name in enumerate(name for group in groups for name in group.names)}
    found: list[Unit] = []
    at = 0
    for unit in made:
        first, _, last = unit.names[0].partition(" to ")
        size = index[last] - index[first] + 1 if last and unit.names[0] not in index else 1
        found += _by_place(run, unit, parts, at, size)
        at += size * len(unit.names)
    return found


def _by_place(run: Run, unit: Unit, parts: Sequence[StageRegion], at: int, size: int) -> Iterator[Unit]:
    """The first and the last of those that are alike have other neighbours than those between."""
    count = len(unit.names)
    cuts = sorted({0, min(1, count), max(count - 1, 0), count})
    placed = [(Place.of(parts, at + i * size, at + (i + 1) * size), i, j) for i, j in pairwise(cuts)]
    for _, same in groupby(placed, lambda one: (id(one[0].before), id(one[0].behind))):
        alike = list(same)
        yield beside(run, replace(unit, names=unit.names[alike[0][1] : alike[-1][2]]), alike[0][0])


def beside(run: Run, unit: Unit, place: Place) -> Unit:
    """A unit with what is there beside it. See NOTE [ What FSDP2 holds ]."""
    if run.layout.zero < 3:
        waiting = 0 if place.behind is None else place.behind.static.reduced
        return replace(unit, backward_peak=unit.backward_peak + waiting, adding_peak=unit.adding_peak + waiting)
    return _Sharded(run=run, unit=unit, place=place).whole()


def beside_last(run: Run, groups: Sequence[RegionGroup], at: int) -> int:
    """What there is beside the backward of the last region of a group, at least."""
    group = groups[at]
    before = group if len(group.names) > 1 else groups[at - 1] if at else None
    behind = groups[at + 1].part.static.reduced if at + 1 < len(groups) else 0
    whole = [one.part for one in (group, before) if one is not None and not kept_whole(run, one.part)]
    return behind + sum(part.static.gathered for part in whole)


def kept_whole(run: Run, part: StageRegion) -> bool:
    """Do a region's weights stay whole after its forward?"""
    reshard = run.layout.reshard
    return reshard is Reshard.NEVER or (reshard is Reshard.LAYERS and part.name == HEAD)


def whole_in_flight(run: Run, groups: Sequence[RegionGroup]) -> int:
    """Weights of a pipeline's chunk that are whole while micro-batches are in flight."""
    if run.layout.pp == 1:
        return 0
    return sum(g.part.static.gathered * len(g.names) for g in groups if kept_whole(run, g.part))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharded:
    run: Run
    unit: Unit
    place: Place

    def whole(self) -> Unit:
        run, unit, own = self.run, self.unit, self.place.own
        stays = sum(part.static.gathered for part in own if kept_whole(run, part)) if run.layout.pp == 1 else 0
        forward, backward = self._segment() if len(own) > 1 else self._single(own[0])
        return replace(
            unit,
            resident=unit.resident + stays,
            whole=stays,
            forward_peak=forward,
            backward_peak=backward,
            adding_peak=backward + unit.adding_peak - unit.backward_peak,
        )

    @property
    def _waiting(self) -> int:
        """What the group behind is still reduced from."""
        return 0 if self.place.behind is None else self.place.behind.static.reduced

    def _ahead(self) -> int:
        """What is gathered for the group before."""
        before = self.place.before
        return 0 if before is None or kept_whole(self.run, before) else before.static.gathered

    def _single(self, part: StageRegion) -> tuple[int, int]:
        """Of one region: how high its passes rise."""
        run, unit = self.run, self.unit
        passes = passes_of(part, run.gradient_rule)
        (forward, loss), (backward, differentiated) = passes.around.forward, passes.around.backward
        gathered, kept = part.static.gathered, kept_whole(run, part)
        ahead, waiting = self._ahead(), self._waiting
        there = 0 if kept else gathered  # what stays is among residents in backward
        peaks = (backward + there + ahead, passes.opening + 2 * there if part.region.output.grad else 0, differentiated)
        closing = self._closing(part) + ahead - unit.resident - (gathered if kept and run.layout.pp == 1 else 0)
        entering = 2 * gathered + self._before
        moved = unit.forward_peak - passes.forward_peak, unit.backward_peak - passes.backward_peak
        after = gathered if kept else 0
        return max(forward + 2 * gathered, loss + after, entering) + moved[0], max(
            max(peaks) + waiting + moved[1], closing
        )

    @property
    def _before(self) -> int:
        """What the group before has left when a forward begins: what it returned, and what was gathered for it."""
        before = self.place.before
        return 0 if before is None else before.region.output.nbytes + before.static.gathered

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
        unit, own = self.unit, self.place.own
        gathered = [0 if kept_whole(self.run, part) else part.static.gathered for part in own]
        again = sum(gathered) + max(gathered)
        highest = max(part.static.gathered for part in own)
        return unit.forward_peak + 2 * highest, unit.backward_peak + again + self._waiting


def unsharded(run: Run, part: StageRegion) -> int:
    """A region's whole gradients, as its backward makes them."""
    precision = run.precision
    return part.static.reduced // DTYPE_BYTES[precision.gradient] * DTYPE_BYTES[precision.compute]
