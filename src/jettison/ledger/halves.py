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
        released: of what waited for it, gone behind it.
        computed: more behind it than before of what is computed again, which may be less.
    """

    rise: int
    made: int
    added: int
    released: int
    computed: int = 0

    @property
    def change(self) -> int:
        """Of what there is but for the gradients, from before it to behind it."""
        return self.computed - self.released


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """A unit under a split backward.

    Args:
        waiting: bytes that its first half makes and its second one needs: gradients of what reads weights.
        input_peak: of a first half, above what is there when it comes to the unit.
        detached: of what the unit holds, let go of when the first half of all units is over.
        steps: of the second half, in their order.
    """

    waiting: int
    input_peak: int
    detached: int = 0
    steps: tuple[WeightStep, ...] = ()
