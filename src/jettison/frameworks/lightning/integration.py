"""Lightning's Trainer: a callback that plans at the first batch.

The plan covers the module's ``training_step``, loss included.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, SupportsIndex

from lightning.pytorch import Callback
from torch import Tensor, nn

from jettison.core.errors import UnsupportedModule
from jettison.frameworks.trainer_integration import Planned
from jettison.planner.auto_checkpoint import auto_checkpoint


class AutoCheckpoint(Planned, Callback):
    """Make a `lightning.Trainer` train under ``memory_budget``: ``Trainer(callbacks=[AutoCheckpoint("8GiB")])``.

    ``applied`` is set at the first batch; `report` and `memory` are its own.

    Args:
        memory_budget: as in `jettison.auto_checkpoint`.
        options: of `jettison.auto_checkpoint`: ``check``, ``shapes``, ``progress``, ...
    """

    def __init__(self, memory_budget: str | SupportsIndex, **options: Any) -> None:
        super().__init__(memory_budget, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning's hook. `UnsupportedModule`: manual optimization, or a training_step not of its class."""
        if not pl_module.automatic_optimization:
            raise UnsupportedModule(
                f"{type(pl_module).__name__} uses manual optimization, so its training_step may have several "
                "backwards; use jettison.auto_checkpoint(module, batch, budget, step=...) with a function that runs "
                "its forwards and backwards"
            )
        own = vars(pl_module).get("training_step")
        if own is not None and not isinstance(own, _First | _Following):
            raise UnsupportedModule(
                f"training_step was set on this {type(pl_module).__name__} instance (as torch.compile does), and the "
                "plan is for that of its class; give the Trainer the module itself, and define training_step in a "
                "subclass"
            )
        pl_module.training_step = _First(self, trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See Lightning's hook. Removes the plan, since Lightning does not call `on_train_end` then."""
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning's hook."""
        if self.applied is not None:
            self.applied.remove()
        if isinstance(vars(pl_module).get("training_step"), _First | _Following):
            del pl_module.training_step


class _First:
    """Replaces ``training_step`` until its first call."""

    def __init__(self, callback: AutoCheckpoint, trainer: Any, module: Any) -> None:
        self.callback, self.trainer, self.module = callback, trainer, module

    def __call__(self, *batch: Any) -> Any:
        callback, module = self.callback, self.module
        del module.training_step
        step, optimizers = TrainingStep(module), self.trainer.optimizers
        with _quiet():
            callback.applied = auto_checkpoint(
                step,
                batch,
                callback.memory_budget,
                optimizer=optimizers[0] if len(optimizers) == 1 else None,
                loss_fn=_loss_of,
                keep_output=False,
                gradients_preallocated=True,  # Lightning frees them between a forward and its backward
                **callback.options,
            )
        plans = callback.applied.batches
        if plans is not None:
            plans.describe = _quiet()(plans.describe)
        module.training_step = _Following(step)
        return step(*batch)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of logging: planning runs a copy of the module, which has no trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        yield


class _Following(partial[Any]):
    """Replaces ``training_step`` after its first call; no module, since a module would register it."""


class TrainingStep(nn.Module):
    """Module that calls a Lightning module's ``training_step``."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Any) -> Any:
        """Return the loss, or a dict with it."""
        return type(self.module).training_step(self.module, *batch)


def _loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output
