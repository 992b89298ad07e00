"""What a device takes in real steps, held against what the plan said.

The counters of the caching allocator only rise. They are read where a phase ends, so that a rise belongs to the phase
before. Nothing is reset but once, when the plan is applied: planning has peaks of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from jettison.core.units import format_bytes

FOLLOWS = "what follows the optimizer's step"
PLANNING = "planning"
SLACK_BYTES = 1 << 20
"""A step may take so much more than predicted before it is said: blocks of the allocator are rounded."""


class Meter(Protocol):
    """Peaks of a device since `begin`, in bytes."""

    def begin(self) -> None:
        """Forget what was before."""
        ...

    def allocated(self) -> int:
        """Of tensors."""
        ...

    def reserved(self) -> int:
        """Of what the allocator took from the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class CudaMeter:
    """See `Meter`."""

    device: torch.device

    def begin(self) -> None:
        """See `Meter`. What planning left cached is given back, so that reserved memory is that of the steps."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def allocated(self) -> int:
        """See `Meter`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reserved(self) -> int:
        """See `Meter`."""
        return torch.cuda.max_memory_reserved(self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Bytes of the steps so far.

    Args:
        predicted_bytes: of the plan under which the highest peak came.
        allocated_peak_bytes: of tensors, as the allocator counts them.
        reserved_peak_bytes: that the allocator held.
        phase: in which the highest peak came.
    """

    budget_bytes: int
    predicted_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    phase: str

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved at its peak beyond what tensors took at theirs: cached blocks that did not fit what was wanted."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


@dataclass(kw_only=True)
class PeakWatch:
    """Of one applied plan on one device.

    Args:
        predicted: peak of the plan that holds now.
        reserved_budget_bytes: that reserved memory is to stay under, if it is to.
        exceeded: told by how many bytes a budget did not hold; whether it was planned for that.
        sees_steps: it is told where the optimizer steps. Else what follows a backward may be anything (a step that was
            not planned for, an evaluation), and is noted only.
    """

    meter: Meter
    predicted: Callable[[], int]
    budget_bytes: int
    exceeded: Callable[[int], bool]
    sees_steps: bool = True
    reserved_budget_bytes: int | None = None
    running: str = ""  # the phase
    phase: str = ""
    highest: int = 0
    highest_reserved: int = 0
    predicted_then: int = 0

    def begin(self) -> None:
        """Steps begin."""
        self.meter.begin()

    def enter(self, phase: str) -> None:
        """Another phase begins: look at what the one before took."""
        peak, reserved = self.meter.allocated(), self.meter.reserved()
        before, self.running = self.running, phase
        higher, more = peak > self.highest, reserved > self.highest_reserved
        self.highest_reserved = max(reserved, self.highest_reserved)
        if higher:
            self.highest, self.phase, self.predicted_then = peak, before, self.predicted()
            if self._is_of_a_step(before) and peak > self.predicted_then + SLACK_BYTES:
                self._say_higher(peak)
        limit = self.reserved_budget_bytes
        if more and self._is_of_a_step(before) and limit is not None and reserved > limit:
            over = reserved - limit
            what = f"reserved memory rose to {format_bytes(reserved)} in {before or 'a step'}"
            self._say(f"{what}, {format_bytes(over)} above its budget of {format_bytes(limit)}", self.exceeded(over))

    def _is_of_a_step(self, phase: str) -> bool:
        return phase not in ("", FOLLOWS, PLANNING) and (self.sees_steps or phase != "backward")

    def report(self) -> MemoryReport:
        """See there."""
        return MemoryReport(
            budget_bytes=self.budget_bytes if self.reserved_budget_bytes is None else self.reserved_budget_bytes,
            predicted_bytes=self.predicted_then,
            allocated_peak_bytes=max(self.highest, self.meter.allocated()),
            reserved_peak_bytes=max(self.highest_reserved, self.meter.reserved()),
            phase=self.phase or self.running,
        )

    def _say_higher(self, peak: int) -> None:
        more = peak - self.predicted_then
        over = peak > self.budget_bytes
        self._say(
            f"a step took {format_bytes(peak)}, {format_bytes(more)} more than the plan predicted, in {self.phase}"
            + (f", and its budget is {format_bytes(self.budget_bytes)}" if over else ""),
            over and self.exceeded(more),
        )

    def _say(self, what: str, planned: bool) -> None:
        then = ". What comes next is planned with that taken off" if planned else ""
        warnings.warn(f"{what}{then}", stacklevel=4)


def phase_hooks(watch: PeakWatch, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Tell a watch where the optimizer's step begins and ends; handles of the hooks.

    They are told of all optimizers: others' wrappers (Accelerate's) step one inside, which is known by its parameters.
    Those of copies, which planning steps on fake tensors, are others.
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def is_ours(stepping: torch.optim.Optimizer) -> bool:
        return any(id(p) in own for group in stepping.param_groups for p in group["params"])

    def before(stepping: Any, *_: Any) -> None:
        if is_ours(stepping):
            watch.enter("the optimizer's step")

    def after(stepping: Any, *_: Any) -> None:
        if is_ours(stepping):
            watch.enter(FOLLOWS)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
