"""Optimizers whose state a plan has not counted: said when they first step, if the budget may not hold then.

A plan counts the state of the optimizer that it was given. A loop may have left it out, or make another one later, with
more state (AMSGrad) or beside the old one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from jettison.capture.tensor_subclasses import plain
from jettison.units import format_bytes


class OptimizerWatch:
    """Of one applied plan. Holds neither models nor optimizers.

    Args:
        models: that are planned.
        optimizer: that was planned with, if one was.
        predicted: peak of the plan that holds now.
        elsewhere_bytes: that the plan counts on the device beside the step's own, which may be such a state.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        *,
        budget_bytes: int,
        predicted: Callable[[], int],
        elsewhere_bytes: int,
    ) -> None:
        self.models = [weakref.ref(model) for model in models]
        self.planned = None if optimizer is None else weakref.ref(optimizer)
        self.kinds = [] if optimizer is None else [_kind(one) for one in _inside(optimizer)]
        self.budget_bytes, self.predicted, self.elsewhere_bytes = budget_bytes, predicted, elsewhere_bytes
        self.seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _watching.append(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_stepped))

    def stepped(self, stepping: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, anybody's: looked at once."""
        if stepping in self.seen:
            return
        models = [model for ref in self.models if (model := ref()) is not None]
        if not models:
            _watching.remove(self)
            return
        self.seen.add(stepping)
        own = {id(p) for model in models for p in model.parameters()}
        if not any(id(p) in own for group in stepping.param_groups for p in group["params"]):
            return
        nbytes = self._uncounted_bytes(stepping, own)
        if nbytes > 0 and self.predicted() + nbytes > self.budget_bytes:
            self._say(stepping, nbytes)

    def _uncounted_bytes(self, stepping: torch.optim.Optimizer, own: set[int]) -> int:
        planned = None if self.planned is None else self.planned()
        counted = _storages(planned, own) if planned is not None else {}
        if not counted and _kind(stepping) in self.kinds:
            return 0  # in the place of the one that was planned with, which has no state
        mine = _storages(stepping, own)
        return sum(nbytes for key, nbytes in mine.items() if key not in counted) - self.elsewhere_bytes

    def _say(self, stepping: torch.optim.Optimizer, nbytes: int) -> None:
        made = f"the {self.kinds[0][0].__name__} that it was given" if self.kinds else "no optimizer"
        warnings.warn(
            f"a {type(stepping).__name__} steps with {format_bytes(nbytes)} of state that the plan for "
            f"{format_bytes(self.budget_bytes)} does not count: it was made with {made}, so that the peak may be above "
            "the budget (gradients are not affected). To have it held: plan with optimizer=, and that one",
            stacklevel=4,
        )

    def remove(self) -> None:
        """Nothing is looked at any more."""
        if self in _watching:
            _watching.remove(self)
        if not _watching and _hooks:
            _hooks.pop().remove()


_watching: list[OptimizerWatch] = []
_hooks: list[RemovableHandle] = []
"""One for all: torch goes through its table of hooks while they run, so that none may take itself out."""


def _stepped(stepping: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watching):
        watch.stepped(stepping)


def _inside(optimizer: Any) -> list[Any]:
    """Those that step: wrappers (Accelerate's, torchtitan's) have them inside."""
    several = getattr(optimizer, "optimizers", None)
    return list(several) if several else [getattr(optimizer, "optimizer", optimizer)]


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
