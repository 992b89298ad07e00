"""Optimizers whose state a plan has not counted: said when they first step, if the budget may not hold then.

A plan counts the state of the optimizer that it was given. A loop may have left it out, or make another one later, with
more state (AMSGrad) or beside the old one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from jettison.capture.tensor_subclasses import plain
from jettison.core.units import format_bytes
from jettison.planner.optimizers import inside_of

DONE = -1
"""Of an optimizer that need not be looked at again."""


class OptimizerWatch:
    """Of one applied plan. Holds neither models nor optimizers.

    Args:
        models: that are planned.
        optimizer: that was planned with, if one was.
        predicted: peak of the plan that holds now.
        elsewhere_bytes: that the plan counts on the device beside the step's own, which may be such a state.
        plan: that holds now; the state that planned optimizers have after its first step is taken to be counted.
        again: plans anew before the next step; None: nothing can.
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
        """Those of the plan that are still there."""
        return [one for ref in self.given if (one := ref()) is not None]

    def stepped(self, stepping: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, anybody's: looked at until its state grows no more (LBFGS has its history after
        some steps).
        """
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
            self._say(stepping, nbytes)

    def _look_at_late(self, stepping: torch.optim.Optimizer, states: _States) -> None:
        """Parameters got their first gradients, and with them state that stays, after the step that was planned for."""
        late = [p for p in stepping.state if id(p) not in states.reached]
        states.reached.update(map(id, late))
        if states.plan is not self.plan():  # another plan was made meanwhile, for a step that reaches them
            states.plan, states.late_bytes = self.plan(), 0
            return
        state_bytes = _storages(stepping, {id(p) for p in late})
        states.late_bytes += sum(state_bytes.values()) + sum(plain(p).nbytes for p in late)
        if self.predicted() + states.late_bytes <= self.budget_bytes:
            return
        if self.again is not None:
            self.again()
            return
        warnings.warn(
            f"{len(late)} parameters got their first gradients after planning; {format_bytes(states.late_bytes)} of "
            f"gradients and optimizer state are not counted by the plan for {format_bytes(self.budget_bytes)}, so that "
            "the peak may be above the budget (gradients are not affected). To have it held: remove() the plan and "
            "plan again now, when their state is there",
            stacklevel=4,
        )

    def _uncounted_bytes(self, stepping: torch.optim.Optimizer, own: set[int]) -> int:
        planned = self.planned()
        counted = {key for one in planned for key in _storages(one, own)}
        if _kind(stepping) in self.kinds:
            its = {id(p) for group in stepping.param_groups for p in group["params"]}
            idle = [one for one in planned if _has_any(one, its) and not _storages(one, own)]
            if idle or not planned:
                return 0  # in the place of one that was planned with, which has no state
        mine = _storages(stepping, own)
        return sum(nbytes for key, nbytes in mine.items() if key not in counted) - self.elsewhere_bytes

    def _say(self, stepping: torch.optim.Optimizer, nbytes: int) -> None:
        made = f"the {self.kinds[0][0].__name__} that it was given" if self.kinds else "no optimizer"
        warnings.warn(
            f"a {type(stepping).__name__} steps with {format_bytes(nbytes)} of state that the plan for "
            f"{format_bytes(self.budget_bytes)} does not count: it was made with {made}, so that the peak may be above "
            "the budget (gradients are not affected). To have it held: plan with optimizer= and that one; several "
            "go as optimizer=(first, second)",
            stacklevel=4,
        )

    def remove(self) -> None:
        """Nothing is looked at any more."""
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
"""One for all: torch goes through its table of hooks while they run, so that none may take itself out."""


def _stepped(stepping: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watching):
        watch.stepped(stepping)


def _has_any(optimizer: torch.optim.Optimizer, ids: set[int]) -> bool:
    """Whether it steps some of these parameters."""
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _kind(optimizer: Any) -> tuple[type, dict[str, Any]]:
    """Equal for optimizers whose states are alike: what is switched on, and whether there is a momentum."""
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
