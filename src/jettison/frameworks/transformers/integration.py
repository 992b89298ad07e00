"""transformers' Trainer and its subclasses in TRL, planned at the first batch.

The dry run executes the trainer's own ``training_step``: its loss, its autocast, its scaler, its reference model. So a
plan covers overrides of subclasses. Trainers that generate their data (GRPO, RLOO) do so before the planned step: a
rollout has no gradients, and on fake tensors it would be random.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

from torch import nn

from jettison.core.errors import UnsupportedModule
from jettison.core.objects import swapped
from jettison.frameworks.trainer_integration import TrainerPlan, unmoved
from jettison.planner.auto_checkpoint import auto_checkpoint
from jettison.planner.handle import Applied

_REFERENCES = ("ref_model", "reward_model", "value_model")
"""Attributes of TRL's trainers that hold models of their own."""

_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
"""Arguments for checkpointing; the second, older, follows the first if both are there (``training_args.py``)."""

_ROLLOUT = "_generate_and_score_completions"
"""Method by which TRL's trainers generate data within ``training_step`` (grpo_trainer.py, rloo_trainer.py)."""


class TransformersPlan(TrainerPlan):
    """See `auto_checkpoint_trainer`."""

    method = "training_step"

    def _step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self.trainer, _ROLLOUT):
            return super()._step(model, inputs, *args, **kwargs)
        model.train()  # `training_step` does both before it prepares its inputs
        if callable(switch := getattr(self.trainer.optimizer, "train", None)):
            switch()
        written = self.trainer._prepare_inputs(inputs)
        with swapped(self.trainer, _prepare_inputs=lambda batch: batch):
            return super()._step(model, written, *args, **kwargs)

    def batch_of(self, _model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        """See `TrainerPlan`."""
        return inputs

    def plan(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Applied:
        """See `TrainerPlan`."""
        trainer = self.trainer
        named = {name: getattr(trainer, name, None) for name in _REFERENCES}
        others = {name: found for name, found in named.items() if isinstance(found, nn.Module)}

        def step(*given: Any) -> Any:
            *models, batch = given
            with unmoved(trainer), swapped(trainer, **dict(zip(others, models[1:], strict=True))):
                return self.own(models[0], batch, *args, **kwargs)

        optimizer = trainer.optimizer
        return auto_checkpoint(
            model,
            inputs,
            self.memory_budget,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # inside accelerate's wrapper
            step=step,
            models=(model, *others.values()) if others else (),
            gradients_preallocated=trainer.args.gradient_accumulation_steps > 1,
            **self.options,
        )


def auto_checkpoint_trainer(trainer: Any, memory_budget: str | SupportsIndex, **options: Any) -> TrainerPlan:
    """Make a `transformers.Trainer`, or one of TRL's, train under ``memory_budget``.

    Args:
        trainer: before its ``train()``.
        memory_budget: as in `jettison.auto_checkpoint`, on each rank.
        options: of `jettison.auto_checkpoint`: ``check``, ``shapes``, ``progress``, ...

    Raises:
        UnsupportedModule: the trainer checkpoints by itself, or compiles its model.
        UsageError: it is no trainer, or the budget is invalid.
    """
    arguments = getattr(trainer, "args", None)
    on = next((name for name in _SWITCHES if getattr(arguments, name, False)), None)
    if on is not None:
        raise UnsupportedModule(
            f"the trainer's arguments switch {on.replace('_', ' ')} on (TRL's do by default); set "
            f"{on}=False: Jettison would recompute inside a recomputed layer"
        )
    if getattr(arguments, "torch_compile", False):
        raise UnsupportedModule(
            "the trainer's arguments compile the entire model; set torch_compile=False, and compile blocks instead: "
            "auto_checkpoint_trainer(trainer, budget, compile='blocks')"
        )
    return TransformersPlan(trainer, memory_budget, options)
