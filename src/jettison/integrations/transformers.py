"""The Trainer of transformers, and TRL's that are made of it: planned when the first batch comes, as that step is.

What is dry-run is the trainer's own ``training_step``: its loss, its autocast, its scaler, its reference model. So a
plan holds for whatever a subclass does there.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from jettison.errors import UnsupportedModule
from jettison.planner.handle import Applied
from jettison.planner.live import auto_checkpoint

_REFERENCES = ("ref_model", "reward_model", "value_model")
"""Attributes of TRL's trainers that hold models of their own."""


class TrainerPlan:
    """What becomes of a trainer: ``applied`` is there once its first batch was."""

    def __init__(self, trainer: Any, memory_budget: str | int, options: dict[str, Any]) -> None:
        self.trainer, self.memory_budget, self.options = trainer, memory_budget, options
        self.applied: Applied | None = None
        self._own = trainer.training_step
        trainer.training_step = self._step

    def _step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Plan the first step; and later ones, where they come with a larger batch."""
        if self.applied is None:
            self.applied = self._plan(model, inputs, *args, **kwargs)
        self.applied.expect(inputs)
        return self._own(model, inputs, *args, **kwargs)

    def _plan(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Applied:
        others = {name: found for name in _REFERENCES if isinstance(found := self._attribute(name), nn.Module)}

        def step(*given: Any) -> Any:
            *models, batch = given
            before = {name: self._attribute(name) for name in others}
            for name, copied in zip(others, models[1:], strict=True):
                setattr(self.trainer, name, copied)
            try:
                return self._own(models[0], batch, *args, **kwargs)
            finally:
                for name, own in before.items():
                    setattr(self.trainer, name, own)

        optimizer = self.trainer.optimizer
        return auto_checkpoint(
            model,
            inputs,
            self.memory_budget,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate's wrapper has it inside
            step=step,
            models=(model, *others.values()) if others else (),
            gradients_held=self.trainer.args.gradient_accumulation_steps > 1,
            **self.options,
        )

    def _attribute(self, name: str) -> Any:
        return getattr(self.trainer, name, None)

    def remove(self) -> None:
        """The trainer trains plainly again."""
        if self.applied is not None:
            self.applied.remove()
        vars(self.trainer).pop("training_step", None)


def auto_checkpoint_trainer(trainer: Any, memory_budget: str | int, **options: Any) -> TrainerPlan:
    """Make a `transformers.Trainer`, or one of TRL's, train under ``memory_budget``.

    Args:
        trainer: before its ``train()``.
        memory_budget: as in `jettison.auto_checkpoint`, on each rank.
        options: of `jettison.auto_checkpoint`: ``check``, ``shapes``, ``progress``, ...

    Raises:
        UnsupportedModule: the trainer checkpoints by itself.
    """
    if getattr(trainer.args, "gradient_checkpointing", False):
        raise UnsupportedModule(
            "the trainer's arguments switch gradient checkpointing on (TRL's do by default); say "
            "gradient_checkpointing=False: Jettison would recompute inside what is recomputed"
        )
    return TrainerPlan(trainer, memory_budget, options)
