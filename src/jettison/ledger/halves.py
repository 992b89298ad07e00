"""What a backward in two halves holds: gradients of inputs first, those of weights when the schedule comes to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightStep:
    """One step of a second half: weights that one op reads, and their gradients.

    Args:
        rise: bytes above what there is before it, without the gradients.
        made: of these gradients where none are there before.
        added: of what is added, where they are.
        change: of what else there is, from before it to behind it.
    """

    rise: int
    made: int
    added: int
    change: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """A unit under a split backward.

    Args:
        gradients: bytes of gradients, or of what else its first half makes, that wait for the second.
        input_peak: of a first half, above what is there when it comes to the unit.
        detached: of what the unit holds, let go of when the first half of all units is over.
        steps: of the second half, in their order.
    """

    gradients: int
    input_peak: int
    detached: int = 0
    steps: tuple[WeightStep, ...] = ()
