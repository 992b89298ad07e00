"""What plans said that steps would take, held against what they took: of a case by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jettison.capture.model_trace import as_call
from jettison.planner.handle import Applied
from jettison.runtime.loop_assumptions import BatchShape
from support.random_steps import Loop
from zoo.harness import Step

WISHED = 0.02
"""A stated peak is to be no further from the measured one."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """One plan's peak, and the highest of the steps that it was made for.

    Args:
        batch: whose steps these are, in words.
        bounds: it states the most that these take, and no less: the plan was made for a larger batch, or the largest
            came in the first step alone, in which the optimizer has no state yet.
    """

    batch: str
    steps: tuple[int, ...]
    stated_bytes: int
    measured_bytes: int
    bounds: bool

    @property
    def off(self) -> float:
        """By which share of what was measured the stated peak lies above it (below it: negative)."""
        off = self.stated_bytes / self.measured_bytes - 1
        return min(0.0, off) if self.bounds else off

    def __str__(self) -> str:
        bound = ", at most" if self.bounds else ""
        return (
            f"{self.batch}: {self.stated_bytes} bytes were stated{bound}, {self.measured_bytes} measured "
            f"({self.off:+.1%}) in steps {', '.join(map(str, self.steps))}"
        )


@dataclass(frozen=True, kw_only=True)
class _Ran:
    step: int
    shape: BatchShape
    plan: tuple[int, BatchShape | None]  # its number, and the batch that its peak is stated for where there is one
    stated_bytes: int
    made_for: tuple[BatchShape, ...]


class Watcher:
    """Notes under which plan every step runs.

    Args:
        planned: batches that the first plan was made for.
    """

    def __init__(self, handle: Applied, loop: Loop, planned: Sequence[Any]) -> None:
        self.handle = handle
        self.by_itself = loop.step is None
        self.made_for = tuple(map(self._shape, planned))
        self.ran: list[_Ran] = []

    def ended(self, batch: Any, step: int) -> None:
        """A step is over. Nothing is stated for batches that were said to have no plan."""
        plans = self.handle.plans or ((self.handle.plan,) if self.handle.plan is not None else ())
        stated_bytes, made_for = max(plan.predicted.peak_bytes for plan in plans), self.made_for
        shape, plan = self._shape(batch), (0, None)
        now = self.handle.batches.now if self.handle.batches is not None else None
        if now is not None and now.shape not in made_for:
            if not now.shape.covers(shape):
                return
            plan, stated_bytes, made_for = (now.treatment.number, now.shape), now.peak_bytes, (now.shape,)
        self.ran.append(_Ran(step=step, shape=shape, plan=plan, stated_bytes=stated_bytes, made_for=made_for))

    def _shape(self, batch: Any) -> BatchShape:
        return BatchShape.of(*as_call(batch)) if self.by_itself else BatchShape.of((batch,))

    def compared(self, done: Sequence[Step], left_out: set[int]) -> list[Stated]:
        """Every plan beside the steps under it.

        Args:
            left_out: steps whose peaks are those of something else as well. Of those in which may be planned none was
                measured.
        """
        found = []
        for plan in dict.fromkeys(ran.plan for ran in self.ran):
            under = [
                ran for ran in self.ran if ran.plan == plan and ran.step not in left_out and done[ran.step].peak_bytes
            ]
            own = [ran for ran in under if ran.shape in ran.made_for]
            others = [ran for ran in under if ran.shape not in ran.made_for]
            # what is stated is the largest batch's; the first step has no optimizer's state, and no gradients that stay
            whole = any(ran.step and ran.shape == max(ran.made_for, key=lambda one: one.nbytes) for ran in own)
            for runs, bounds in ((own, not whole), (others, True)):
                if runs:
                    found.append(_stated(runs, done, bounds=bounds))
        return found


def _stated(runs: Sequence[_Ran], done: Sequence[Step], *, bounds: bool) -> Stated:
    return Stated(
        batch=" and ".join(dict.fromkeys(str(ran.shape) for ran in runs)),
        steps=tuple(ran.step for ran in runs),
        stated_bytes=runs[0].stated_bytes,
        measured_bytes=max(done[ran.step].peak_bytes for ran in runs),
        bounds=bounds,
    )
