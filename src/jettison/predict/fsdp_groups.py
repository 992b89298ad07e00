"""What FSDP2's groups are of a chunk's regions, and which of their weights stay whole.

See NOTE [ What FSDP2 holds ] in `predict.gathered`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.region import HEAD
from jettison.predict.passes import sums_apart
from jettison.predict.stages import StageRegion
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
        last: numbers of the outermost group's last gradient.
        tied: gradients of a tied table's two uses while they are added up, beside the head's, which is ``late``.
    """

    parts: tuple[StageRegion, ...]
    kept: tuple[StageRegion, ...]
    ranks: int = 0
    in_flight: bool = False
    outer: int = 0
    late: int = 0
    late_shards: int = 0
    last: int = 0
    tied: int = 0

    @classmethod
    def of(cls, run: Run, parts: Sequence[StageRegion]) -> Grouped:
        """As the layout groups them."""
        layout = run.layout
        late = layout.reshard is Reshard.TORCHTITAN
        if not has_outer_ends(run):
            if layout.reshard is Reshard.ALWAYS:
                return cls(parts=tuple(parts), kept=(), ranks=layout.reshard_ranks)
            kept = parts if not layout.resharded else [part for part in parts[-1:] if part.name == HEAD]
            return cls(parts=tuple(parts), kept=tuple(kept), in_flight=layout.pp > 1 and not layout.resharded)
        first, *layers, last = parts
        ends = first.static + last.static
        both = replace(first.static, gathered=ends.gathered, reduced=ends.reduced, gradients=ends.gradients)
        first, end = replace(first, static=both), replace(last, static=replace(last.static, gathered=0, reduced=0))
        tied = sum(w.numel for w in last.region.weights if w.tied and not w.frozen) * DTYPE_BYTES[run.precision.compute]
        if late:
            layers[-1] = replace(layers[-1])  # not the others that are alike
        return cls(
            parts=(first, *layers, end),
            kept=(first, *(layers if not layout.resharded else layers[-1:] if late else ())),
            outer=ends.gathered,
            late=unsharded(run, last) + tied,
            late_shards=last.static.gradients,
            last=last_gradient(run, last),
            tied=2 * tied if sums_apart(run) else tied,
        )

    def named(self, run: Run, part: StageRegion) -> int:
        """Numbers of the gradient that a loop's variable has while a group's are reduced."""
        return self.last if self.outer and not part.is_layer else last_gradient(run, part)

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


def has_outer_ends(run: Run) -> bool:
    """Has one group embedding, norm and head? A tied table is one parameter, which only one group can have."""
    layout = run.layout
    return layout.pp == 1 and (layout.outer_ends or run.model.tied_embeddings) and run.gathers_parameters


def last_gradient(run: Run, part: StageRegion) -> int:
    """Numbers of the last gradient of an end's own group; 0 of a layer's, which is small."""
    twice = run.layout.pp > 1  # a stage has a tied table a second time
    own = [] if part.is_layer else [w.numel for w in part.region.weights if not w.frozen and (twice or not w.tied)]
    return own[-1] if own else 0


def unsharded(run: Run, part: StageRegion, apart: int = 0) -> int:
    """A region's whole gradients, as its backward makes them, without those that are reduced ``apart``."""
    precision = run.precision
    return (part.static.reduced - apart) // DTYPE_BYTES[precision.gradient] * DTYPE_BYTES[precision.compute]
