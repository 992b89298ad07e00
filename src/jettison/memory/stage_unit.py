"""Units that a stage consists of (regions, or checkpoint segments of several), their bytes, and spans of their passes.

A backward may be split: gradients of inputs first, gradients of weights when the schedule gets to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from jettison.memory.schedule import Work
from jettison.memory.span import Phase, Span, Where


class WeightStep(NamedTuple):
    """One step of the second half of a split backward: weights that one op reads, and their gradients.

    Args:
        rise: bytes above the level before the step, without the gradients.
        made: bytes of gradients that the step allocates.
        added: bytes of temporaries that are added to existing gradients.
        released: bytes kept for the step and freed after it.
        computed: change in bytes of recomputed tensors over the step; may be negative.
    """

    rise: int
    made: int
    added: int
    released: int
    computed: int = 0

    @property
    def change(self) -> int:
        """Change in bytes over the step, without the gradients."""
        return self.computed - self.released


class Halves(NamedTuple):
    """A unit under a split backward.

    Args:
        waiting: bytes that the first half makes and the second needs: gradients of outputs of ops with weights.
        input_peak: highest bytes of the first half, above the level at which it reaches the unit.
        detached: the part of the unit's saved bytes that is freed after the first half of all units.
        steps: steps of the second half, in order.
    """

    waiting: int
    input_peak: int
    detached: int = 0
    steps: tuple[WeightStep, ...] = ()


class Unit(NamedTuple):
    """A region, or a checkpoint segment of several, and equal neighbours: one name each, in order.

    Bytes count one region or segment; peaks are above the level when a pass reaches it, in a backward with its own
    ``resident`` included. ``backward_peak`` counts its weight gradients; ``adding_peak`` is the peak where gradients
    already exist. ``frozen``: the part of these peaks in a frozen model's forward, before the first unit's forward or
    before the last one's backward. ``cached``: autocast's cached casts, until the forward ends. ``whole``: the part of
    ``resident`` that is weights kept all-gathered. ``weights``: weights that a chunk's passes all-gather and reshard.
    ``halves``: the split backward; None: it is not split, or each half is taken for the full backward.
    ``regions``: regions in each one; above 1 only in segments. ``lingering``: bytes from its backward to the end.
    """

    names: tuple[str, ...]
    resident: int
    forward_peak: int
    backward_peak: int
    adding_peak: int
    gradient: int
    pending: int = 0  # part of ``gradient`` that waits for the backward of a tied weight's other use
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
        """Bytes held between the first and the second half of a split backward."""
        return self.resident if self.halves is None else self.resident + self.halves.waiting - self.halves.detached

    def named(self, names: tuple[str, ...]) -> Unit:
        """Return the same bytes under other names."""
        return self if names == self.names else tuple.__new__(Unit, (names, *self[1:]))  # faster than `_replace`

    def plus(self, *, resident: int = 0, forward: int = 0, backward: int = 0) -> Unit:
        """Return the unit with more bytes: until its backward is over, and above either pass's peak."""
        if not (resident or forward or backward):
            return self
        return self._replace(
            resident=self.resident + resident,
            forward_peak=self.forward_peak + forward,
            backward_peak=self.backward_peak + backward,
            adding_peak=self.adding_peak + backward,
        )


class PassPiece(NamedTuple):
    """Equal units in one pass; names in the order of the pass, bytes of each one.

    Args:
        kept: change in bytes saved for backward.
        gradients: change in bytes of gradients; ``passing``: bytes freed at the end; ``weights``: unsharded ones.
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
        """Change in bytes over each one."""
        return self.kept + self.gradients + self.passing + self.weights

    @property
    def span(self) -> Span:
        """Span of all of them. Among equal peaks, the last unit of a forward and the first of a backward is named."""
        net = self.net
        last = net > 0 or (net == 0 and self.phase is Phase.FORWARD)
        return Span(net, self.peak, Where(self.phase, self.names[-1 if last else 0])).times(len(self.names))


class PassKind(NamedTuple):
    """Options of a pass through a chunk.

    Args:
        fresh: the pass allocates weight gradients one by one; otherwise they exist.
        gathers: all-gathers the units' weights and keeps them; ``reshards``: reshards them after each unit.
        late: bytes that do not exist before the loss is differentiated.
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
    """Return the span of a pass; ``net`` is the change over the whole pass."""
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
    """Yield the first half of a split backward: no saved tensor is freed before its end, and gradients accumulate."""
    for unit in reversed(units):
        assert unit.halves is not None
        late = how.late if unit.is_loss else 0
        yield PassPiece(unit.names[::-1], Phase.BACKWARD, unit.halves.input_peak - late, unit.halves.waiting)


def _weight_half(units: Sequence[Unit], how: PassKind) -> Iterator[PassPiece]:
    """Yield the second half of a split backward. A step's gradients are referenced until the next step has its own.

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
