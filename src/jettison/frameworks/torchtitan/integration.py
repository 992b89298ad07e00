"""torchtitan's Trainer: an activation checkpointing policy for its configuration.

torchtitan applies such a policy to a model on ``meta``, before FSDP. A plan needs more: real parameters, FSDP's units,
the loss, the optimizers. So the policy finds the Trainer under construction, and plans at its first batch. The dry run
executes the trainer's own ``forward_backward_step``: its loss, chunked or not, its meshes, its units.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from jettison.core.errors import UnsupportedModule
from jettison.core.objects import swapped
from jettison.frameworks.trainer_integration import TrainerPlan
from jettison.planner.auto_checkpoint import auto_checkpoint
from jettison.planner.handle import Applied
from jettison.planner.readiness import as_one


class AutoCheckpoint(ActivationCheckpointing):
    """Make torchtitan train under a budget: ``activation_checkpoint=AutoCheckpoint.Config(budget="8GiB")``.

    The trainer's attribute ``auto_checkpoint`` is its `TrainerPlan`; ``.applied`` is set at the first batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Budget and checks; fields of torchtitan's other policies (``preserve_rng_state``, ...) have no effect."""

        budget: str | int
        """As ``memory_budget`` of `jettison.auto_checkpoint`, on each rank."""

        check: str = "always"
        """As in `jettison.apply`."""

    def apply(self, model: nn.Module) -> None:
        """See torchtitan's; called by a Trainer's ``__init__``. Raise `UnsupportedModule` if no Trainer is under
        construction; or see `auto_checkpoint_trainer`.
        """
        config: Any = self.config
        _check_model(model)
        auto_checkpoint_trainer(_being_built(), config.budget, check=config.check)


class TorchtitanPlan(TrainerPlan):
    """See `auto_checkpoint_trainer`."""

    method = "forward_backward_step"

    def plan(self, **given: Any) -> Applied:
        """See `TrainerPlan`."""
        trainer = self.trainer
        (model,) = trainer.model_parts
        _check_model(model)
        waiting = trainer.gradient_accumulation_steps - 1
        inputs = given["input_dict"], given["labels"]
        # train_step keeps the inputs of all its micro-batches
        batch = {**given, "waiting": [tree_map_only(Tensor, torch.clone, inputs) for _ in range(waiting)]}

        def step(model: Any, batch: dict[str, Any]) -> Any:
            batch.pop("waiting")
            chunked = {"lm_head": model.lm_head} if getattr(trainer.loss_fn, "lm_head", None) is not None else {}
            with swapped(trainer, model_parts=[model], ntokens_seen=0), swapped(trainer.loss_fn, **chunked):
                return self.own(**batch)

        return auto_checkpoint(
            model,
            batch,
            self.memory_budget,
            optimizer=as_one(list(trainer.optimizers)),
            step=step,
            gradients_preallocated=waiting > 0,
            **self.options,
        )


def auto_checkpoint_trainer(trainer: Any, memory_budget: str | SupportsIndex, **options: Any) -> TrainerPlan:
    """Make an existing torchtitan `Trainer` train under ``memory_budget``, as `AutoCheckpoint` does. Raise
    `UnsupportedModule` if the trainer checkpoints, compiles, captures CUDA graphs, or is parallel in more than data.

    Args:
        trainer: before its ``train()``.
        memory_budget: as in `jettison.auto_checkpoint`, on each rank.
        options: of `jettison.auto_checkpoint`: ``check``, ``shapes``, ``progress``, ...
    """
    _check(trainer.config)
    options.setdefault("progress", lambda text: logger.info(f"Jettison: {text}"))
    trainer.auto_checkpoint = TorchtitanPlan(trainer, memory_budget, options)
    return trainer.auto_checkpoint


def _check(config: Any) -> None:
    """Reject settings of the trainer that cannot be planned, by an `UnsupportedModule`."""
    own = config.activation_checkpoint
    if own is not None and not isinstance(own, AutoCheckpoint.Config):
        raise UnsupportedModule(
            f"torchtitan's own {type(own).__qualname__.partition('.')[0]} is on; set activation_checkpoint=None, or "
            "AutoCheckpoint.Config(budget=...) instead: Jettison would recompute inside a recomputed layer"
        )
    if config.compile.enable:
        raise UnsupportedModule(
            f"torchtitan would compile ({', '.join(config.compile.components)}); set compile.enable=False: under "
            "torchtitan Jettison plans eager ops. With compile, its MemoryBudgetAC plans in the compiler"
        )
    if not config.training.disable_cuda_graphs:
        raise UnsupportedModule(
            "torchtitan would capture its steps as CUDA graphs; set training.disable_cuda_graphs=True: recomputation "
            "is chosen, and checked, in Python"
        )
    for axis in ("tensor", "context", "expert"):
        if getattr(config.parallelism, f"{axis}_parallel_degree") > 1:
            raise UnsupportedModule(
                f"torchtitan would run {axis} parallelism, which a dry run cannot repeat yet; set "
                f"parallelism.{axis}_parallel_degree=1: data parallelism (FSDP) is planned"
            )
    if config.parallelism.pipeline_parallel_degree > 1:
        raise UnsupportedModule(
            "torchtitan would run a pipeline, which its Trainer does not expose; set "
            "parallelism.pipeline_parallel_degree=1. In a loop of your own jettison.auto_checkpoint plans torch's "
            "schedules"
        )


def _check_model(model: nn.Module) -> None:
    """Reject models whose attention cannot be recorded, by an `UnsupportedModule`."""
    for name, module in model.named_modules():
        if isinstance(module, FlexAttention):
            raise UnsupportedModule(
                f"{name} is FlexAttention, a compiled higher-order operator, which Jettison cannot record. Set "
                "attn_backend='varlen', or inner_attention=ScaledDotProductAttention.Config() if batches are not "
                "packed from documents"
            )


def _being_built() -> Trainer:
    """Find the Trainer whose ``__init__`` is running, which gives the policy only the model; or raise."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    raise UnsupportedModule(
        "AutoCheckpoint plans for a torchtitan Trainer, and none is being built here; in a loop of your own call "
        "jettison.auto_checkpoint(model, batch, budget, optimizer=..., step=...) once the model is sharded"
    )
