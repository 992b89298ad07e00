"""Bytes of the units that a stage is a chain of: regions, or checkpoint segments of several; and their passes as spans.

A backward may be split: gradients of inputs first, those of weights when the schedule comes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import NamedTuple

from jettison.memory.schedule import Work
from jettison.memory.span import Phase, Span, Where


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightStep:
    """One step of a second half: weights that one op reads, and their gradients.

    Args:
        rise: bytes above what there is before it, without the gradients.
        made: of these gradients where none are there before.
        added: of what is added, where they are.
        released: of what waited for it, freed after it.
        computed: more after it than before of what is recomputed, which may be less.
    """

    rise: int
    made: int
    added: int
    released: int
    computed: int = 0

    @property
    def change(self) -> int:
        """Bytes more after it than before, without the gradients."""
        return self.computed - self.released


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """A unit under a split backward.

    Args:
        waiting: bytes that its first half makes and its second one needs: gradients of what reads weights.
        input_peak: of a first half, above what is there when it comes to the unit.
        detached: of what the unit holds, freed when the first half of all units is over.
        steps: of the second half, in their order.
    """

    waiting: int
    input_peak: int
    detached: int = 0
    steps: tuple[WeightStep, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A region, or a checkpoint segment of several, and its neighbours that are alike: one name each, in order.

    Bytes are of each one; peaks are above what is there when a pass comes to it, its own ``resident`` included in a
    backward. ``backward_peak`` counts its own weight gradients; ``adding_peak`` is the same where gradients are there
    already. ``frozen``: of these peaks, a frozen model's forward, before the first unit's forward or before the last
    one's backward. ``cached``: what autocast's cache has beside it until the forward is over. ``whole``: of what is
    resident, weights that stay all-gathered. ``weights``: those that a chunk's passes all-gather and shard again.
    ``halves``: of a backward that is split; None: it is not, or each half is taken for the full backward.
    ``regions``: of each one, 1 but for segments. ``lingering``: beside it from its backward to the end of the pass.
    """

    names: tuple[str, ...]
    resident: int
    forward_peak: int
    backward_peak: int
    adding_peak: int
    gradient: int
    pending: int = 0  # of it, what cannot be added before a tied weight's other use has passed
    is_loss: bool = False
    frozen: int = 0
    cached: int = 0
    whole: int = 0
    weights: int = 0
    halves: Halves | None = None
    regions: int = 1
    lingering: int = 0

    @property
    def half(self) -> int:
        """Bytes of each one from the first half of its backward to the second."""
        return self.resident if self.halves is None else self.resident + self.halves.waiting - self.halves.detached

    def named(self, names: tuple[str, ...]) -> Unit:
        """Return the same bytes under other names."""
        if names == self.names:
            return self
        return Unit(  # `replace` would make dozens of calls, and every layer is named
            names=names,
            resident=self.resident,
            forward_peak=self.forward_peak,
            backward_peak=self.backward_peak,
            adding_peak=self.adding_peak,
            gradient=self.gradient,
            pending=self.pending,
            is_loss=self.is_loss,
            frozen=self.frozen,
            cached=self.cached,
            whole=self.whole,
            weights=self.weights,
            halves=self.halves,
            regions=self.regions,
            lingering=self.lingering,
        )

    def beside(self, *, resident: int = 0, forward: int = 0, backward: int = 0) -> Unit:
        """Return it with buffers beside it: until its backward is over, and above what is held in either pass."""
        if not (resident or forward or backward):
            return self
        return replace(
            self,
            resident=self.resident + resident,
            forward_peak=self.forward_peak + forward,
            backward_peak=self.backward_peak + backward,
            adding_peak=self.adding_peak + backward,
        )


class PassPiece(NamedTuple):
    """Units that are alike, in one pass; names in the order in which the pass comes to them, bytes of each one.

    Args:
        kept: more after it than before of what is saved for backward.
        gradients: the same of gradients; ``passing``: what goes when the pass is over; ``weights``: unsharded ones.
    """

    names: tuple[str, ...]
    phase: Phase
    peak: int
    kept: int = 0
    gradients: int = 0
    passing: int = 0
    weights: int = 0

    @property
    def net(self) -> int:
        """Bytes more after each one than before."""
        return self.kept + self.gradients + self.passing + self.weights

    @property
    def span(self) -> Span:
        """All of them. Of equally high ones a forward's last has the label, as does a backward's first."""
        net = self.net
        last = net > 0 or (net == 0 and self.phase is Phase.FORWARD)
        return Span(net, self.peak, Where(self.phase, self.names[-1 if last else 0])).times(len(self.names))


class PassKind(NamedTuple):
    """What a pass through a chunk does, beside which chunk it is.

    Args:
        fresh: gradients of weights appear in it, one by one; otherwise they are there already.
        gathers: weights of units, which stay all-gathered; ``reshards``: they were, and are sharded after each unit.
        late: bytes that are not there before the loss is differentiated.
    """

    work: Work
    fresh: bool = False
    gathers: bool = False
    reshards: bool = False
    late: int = 0


def pieces(units: Sequence[Unit], how: PassKind) -> Iterator[PassPiece]:
    """Yield a pass unit by unit."""
    if how.work is Work.FORWARD:
        return _forward(units, how)
    if not any(unit.halves for unit in units):
        return _backward(units, how)
    return _weight_half(units, how) if how.work is Work.WEIGHT else _input_half(units, how)


def span(units: Sequence[Unit], how: PassKind) -> Span:
    """Return the product of a pass's pieces; ``net`` is what is there when the last one is over."""
    return reduce(add, [piece.span for piece in pieces(units, how)] or [Span(0, 0)])


def _forward(units: Sequence[Unit], how: PassKind) -> Iterator[PassPiece]:
    for unit in units:
        phase = Phase.LOSS if unit.is_loss else Phase.FORWARD
        if unit.frozen and unit.frozen == unit.forward_peak and not unit.is_loss:
            phase = Phase.FROZEN
        weights = -unit.weights if how.reshards else 0
        yield PassPiece(unit.names, phase, unit.forward_peak - how.late, unit.resident, 0, unit.cached, weights)


def _backward(units: Sequence[Unit], how: PassKind) -> Iterator[PassPiece]:
    for unit in reversed(units):
        peak = (unit.backward_peak if how.fresh else unit.adding_peak) - (how.late if unit.is_loss else 0)
        phase = Phase.FROZEN if unit.is_loss and unit.frozen and unit.frozen == peak else Phase.BACKWARD
        made = (unit.gradient, unit.lingering) if how.fresh else (0, unit.pending + unit.lingering)
        yield PassPiece(unit.names[::-1], phase, peak, -unit.resident, *made, unit.weights if how.gathers else 0)


def _input_half(units: Sequence[Unit], how: PassKind) -> Iterator[PassPiece]:
    """Nothing that was resident is freed before the half is over, and gradients stay beside it."""
    for unit in reversed(units):
        assert unit.halves is not None
        late = how.late if unit.is_loss else 0
        yield PassPiece(unit.names[::-1], Phase.BACKWARD, unit.halves.input_peak - late, unit.halves.waiting)


def _weight_half(units: Sequence[Unit], how: PassKind) -> Iterator[PassPiece]:
    """A step's gradients are referenced until the next step has made its own.

    ``torch/distributed/pipelining/_backward.py``, ``stage_backward_weight``: ``dweights``.
    """
    named = 0
    for unit in units:
        assert unit.halves is not None
        for name in unit.names:
            for step in unit.halves.steps:
                made = step.made if how.fresh else step.added
                gradients = made if how.fresh else 0
                yield PassPiece((name,), Phase.BACKWARD, step.rise + made + named, step.change, gradients)
                named = made - gradients
