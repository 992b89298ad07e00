"""Watches on a training loop: real peaks above the predicted one, and optimizers that a plan does not count.

The counters of the caching allocator only rise. They are read at the end of each phase, so that a rise belongs to that
phase. They are reset only once, when the plan is applied, since planning has its own peaks.

A plan counts the state of the optimizer that it was given. A loop may have omitted it, or create another one later,
with more state (AMSGrad) or in addition to the old one. At its first step a warning follows if the budget may not hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import warn
from jettison.core.units import format_bytes
from jettison.planner.readiness import inside_of

FOLLOWS = "what follows the optimizer's step"
PLANNING = "planning"
SLACK_BYTES = 1 << 20
"""Tolerance above the prediction before a warning: the allocator rounds its blocks."""


@dataclass(frozen=True, kw_only=True)
class CudaPeaks:
    """Peaks of a device since `begin`, in bytes: of tensors, and of memory that the allocator reserved."""

    device: torch.device

    def begin(self) -> None:
        """Release memory that planning left cached, so that reserved memory is that of the steps."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory of the steps so far, in bytes.

    Args:
        predicted_bytes: of the plan during the highest peak.
        allocated_peak_bytes: of tensors, as the allocator counts them.
        reserved_peak_bytes: reserved by the allocator.
        phase: of the highest peak.
    """

    budget_bytes: int
    predicted_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    phase: str

    @property
    def fragmentation_bytes(self) -> int:
        """Peak reserved bytes beyond peak allocated bytes: cached blocks that fitted no request."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


@dataclass(kw_only=True)
class PeakWatch:
    """Watch on the peaks of one applied plan on one device. ``exceeded`` is called with the bytes above a budget, and
    returns whether they are planned for. ``sees_steps``: the optimizer's steps are reported. Otherwise work after a
    backward may be anything (an unplanned step, an evaluation), and is only recorded.
    """

    meter: CudaPeaks
    predicted: Callable[[], int]
    budget_bytes: int
    exceeded: Callable[[int], bool]
    sees_steps: bool = True
    reserved_budget_bytes: int | None = None
    running: str = ""  # the current phase
    phase: str = ""
    highest: int = 0
    highest_reserved: int = 0
    predicted_then: int = 0

    def begin(self) -> None:
        self.meter.begin()

    def enter(self, phase: str) -> None:
        """Begin another phase; evaluate the one before."""
        peak, reserved = self.meter.allocated(), self.meter.reserved()
        before, self.running = self.running, phase
        higher, more = peak > self.highest, reserved > self.highest_reserved
        self.highest_reserved = max(reserved, self.highest_reserved)
        if higher:
            self.highest, self.phase, self.predicted_then = peak, before, self.predicted()
            if self._is_of_a_step(before) and peak > self.predicted_then + SLACK_BYTES:
                over = peak > self.budget_bytes
                more_bytes = peak - self.predicted_then
                what = f"a step took {format_bytes(peak)}, {format_bytes(more_bytes)} more than the plan predicted"
                limit_text = f", and its budget is {format_bytes(self.budget_bytes)}" if over else ""
                self._warn(f"{what}, in {self.phase}{limit_text}", over and self.exceeded(more_bytes))
        limit = self.reserved_budget_bytes
        if more and self._is_of_a_step(before) and limit is not None and reserved > limit:
            above = reserved - limit
            what = f"reserved memory rose to {format_bytes(reserved)} in {before or 'a step'}"
            self._warn(f"{what}, {format_bytes(above)} above its budget of {format_bytes(limit)}", self.exceeded(above))

    def _is_of_a_step(self, phase: str) -> bool:
        return phase not in ("", FOLLOWS, PLANNING) and (self.sees_steps or phase != "backward")

    def report(self) -> MemoryReport:
        return MemoryReport(
            budget_bytes=self.budget_bytes if self.reserved_budget_bytes is None else self.reserved_budget_bytes,
            predicted_bytes=self.predicted_then,
            allocated_peak_bytes=max(self.highest, self.meter.allocated()),
            reserved_peak_bytes=max(self.highest_reserved, self.meter.reserved()),
            phase=self.phase or self.running,
        )

    def _warn(self, what: str, planned: bool) -> None:
        then = ". Later plans use a budget reduced by that" if planned else ""
        warn(f"{what}{then}")


def phase_hooks(watch: PeakWatch, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Report the optimizer's steps to a watch; return handles of the hooks. They see all optimizers: wrappers
    (Accelerate's) step one inside, which is recognized by its parameters; copies on fake tensors have others.
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


# optimizers -----------------------------------------------------------------------------------------------------------

DONE = -1
"""Marks an optimizer that need not be checked again."""


class OptimizerWatch:
    """Watch on optimizers for one applied plan. Holds neither models nor optimizers. ``elsewhere_bytes`` on the device,
    which the plan counts outside the step, may be such a state. ``plan``: the current one; state of planned optimizers
    after its first step is assumed to be counted. ``again``: plans again before the next step; None: not possible.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        *,
        budget_bytes: int,
        predicted: Callable[[], int],
        elsewhere_bytes: int,
        plan: Callable[[], object] = lambda: None,
        again: Callable[[], None] | None = None,
    ) -> None:
        self.models = [weakref.ref(model) for model in models]
        given = [] if optimizer is None else inside_of(optimizer)
        self.given, self.kinds = [weakref.ref(one) for one in given], [_kind(one) for one in given]
        self.budget_bytes, self.predicted, self.elsewhere_bytes = budget_bytes, predicted, elsewhere_bytes
        self.plan, self.again = plan, again
        self.states: weakref.WeakKeyDictionary[torch.optim.Optimizer, _States] = weakref.WeakKeyDictionary()
        self.seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        _watching.append(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_stepped))

    def planned(self) -> list[torch.optim.Optimizer]:
        return [one for ref in self.given if (one := ref()) is not None]

    def stepped(self, stepping: torch.optim.Optimizer) -> None:
        """Check any optimizer after its step, until its state grows no more (LBFGS: after some steps)."""
        before, states = self.seen.get(stepping), self.states.get(stepping)
        if states is not None and len(stepping.state) > len(states.reached):
            self._look_at_late(stepping, states)
        if before == DONE:
            return
        models = [model for ref in self.models if (model := ref()) is not None]
        if not models:
            _watching.remove(self)
            return
        if states is None and any(one is stepping for one in self.planned()):
            self.states[stepping] = _States(self.plan(), set(map(id, stepping.state)))
        own = {id(p) for model in models for p in model.parameters()}
        nbytes = self._uncounted_bytes(stepping, own) if _has_any(stepping, own) else 0
        self.seen[stepping] = DONE if before is not None and nbytes <= before else max(0, nbytes)
        if nbytes > 0 and self.predicted() + nbytes > self.budget_bytes:
            self.seen[stepping] = DONE
            self._warn(stepping, nbytes)

    def _look_at_late(self, stepping: torch.optim.Optimizer, states: _States) -> None:
        """Warn of parameters whose first gradients, and with them state, appeared after the planned step."""
        late = [p for p in stepping.state if id(p) not in states.reached]
        states.reached.update(map(id, late))
        if states.plan is not self.plan():  # a newer plan exists, for a step that reaches them
            states.plan, states.late_bytes = self.plan(), 0
            return
        state_bytes = _storages(stepping, {id(p) for p in late})
        states.late_bytes += sum(state_bytes.values()) + sum(plain(p).nbytes for p in late)
        if self.predicted() + states.late_bytes <= self.budget_bytes:
            return
        if self.again is not None:
            self.again()
            return
        warn(
            f"{len(late)} parameters got their first gradients after planning; {format_bytes(states.late_bytes)} of "
            f"gradients and optimizer state are not counted by the plan for {format_bytes(self.budget_bytes)}, so that "
            "the peak may be above the budget (gradients are not affected). To have it held: remove() the plan and "
            "plan again now, when their state is there"
        )

    def _uncounted_bytes(self, stepping: torch.optim.Optimizer, own: set[int]) -> int:
        planned = self.planned()
        counted = {key for one in planned for key in _storages(one, own)}
        if _kind(stepping) in self.kinds:
            its = {id(p) for group in stepping.param_groups for p in group["params"]}
            idle = [one for one in planned if _has_any(one, its) and not _storages(one, own)]
            if idle or not planned:
                return 0  # it replaces a planned one without state
        mine = _storages(stepping, own)
        return sum(nbytes for key, nbytes in mine.items() if key not in counted) - self.elsewhere_bytes

    def _warn(self, stepping: torch.optim.Optimizer, nbytes: int) -> None:
        made = f"the {self.kinds[0][0].__name__} that it was given" if self.kinds else "no optimizer"
        warn(
            f"a {type(stepping).__name__} steps with {format_bytes(nbytes)} of state that the plan for "
            f"{format_bytes(self.budget_bytes)} does not count: it was made with {made}, so that the peak may be above "
            "the budget (gradients are not affected). To have it held: plan with optimizer= and that one; several "
            "go as optimizer=(first, second)"
        )

    def remove(self) -> None:
        if self in _watching:
            _watching.remove(self)
        if not _watching and _hooks:
            _hooks.pop().remove()


@dataclass
class _States:
    """State of one planned optimizer: ids of parameters that have some, and bytes that came after planning."""

    plan: object
    reached: set[int]
    late_bytes: int = 0


_watching: list[OptimizerWatch] = []
_hooks: list[RemovableHandle] = []
"""One hook for all watches: torch iterates over its hooks while they run, so none may remove itself."""


def _stepped(stepping: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watching):
        watch.stepped(stepping)


def _has_any(optimizer: torch.optim.Optimizer, ids: set[int]) -> bool:
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _kind(optimizer: Any) -> tuple[type, dict[str, Any]]:
    """Key that is equal for optimizers with equal state: options, and whether there is a momentum."""
    told = {key: bool(v) for key, v in optimizer.defaults.items() if isinstance(v, bool) or key == "momentum"}
    return type(optimizer), told


def _storages(optimizer: torch.optim.Optimizer, own: set[int]) -> dict[int, int]:
    """Bytes of its state for these parameters, on their devices, by storage."""
    found: dict[int, int] = {}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in own:
            continue
        for leaf in tree_leaves(state):
            if isinstance(leaf, Tensor) and leaf.device == parameter.device:
                storage = plain(leaf).untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found
