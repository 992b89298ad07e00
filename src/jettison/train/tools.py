"""What the loop is lent by the rooms above it: how a model is made of its section, and how it is planned.

`jettison.api.training` has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from jettison.spec.model import ModelSpec
from jettison.trace.model import LossFn
from jettison.train.recipe import ModelSection, PlanSection

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model in training mode.

    Args:
        call: what the model is called with for token rows [b, s + 1]: positional arguments, or keywords.
        spec: None where only the code knows what it is.
    """

    model: nn.Module
    call: Callable[[torch.Tensor], Any]
    loss_fn: LossFn | None = None
    spec: ModelSpec | None = None


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What planning looks at: a rank's module, a micro-batch as it is called, and what else a step allocates.

    Args:
        reserve_bytes: gradients that live while a forward runs, which a step of one micro-batch does not have.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    optimizer: torch.optim.Optimizer
    reserve_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done, as text that travels between ranks: a plan document, or a policy word.

    Args:
        likeness: what a rank's model has to be like for the plan.
    """

    plan: str | None = None
    policy: str | None = None
    likeness: str = ""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was done on this rank. For a policy there is no plan, and nothing is predicted."""

    recomputed_flops: int
    plan: str | None = None
    plan_hash: str | None = None
    predicted_peak_bytes: int | None = None


class Tools(Protocol):
    """See the module."""

    def build(self, section: ModelSection, *, seq: int, device: torch.device) -> Built:
        """The whole model, its weights drawn from torch's default generators."""
        ...

    def decide(self, rehearsal: Rehearsal, section: PlanSection, say: Say) -> Decision:
        """What a budget, a plan file or a policy comes to. Changes nothing."""
        ...

    def apply(self, rehearsal: Rehearsal, decision: Decision) -> Planned:
        """Do it to the module."""
        ...

    def forward_flops(self, built: Built, batch: Any) -> int | None:
        """FLOPs of one forward, from a trace; None where there can be none."""
        ...


def silent(_text: str) -> None:
    """Progress for nobody."""


def shifted_within(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """For models that shift labels themselves, as those of transformers do."""
    return {"input_ids": rows[:, :-1], "labels": rows[:, :-1]}


def shifted_before(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For models that are given, at every position, the token that follows it, as the reference models are."""
    return rows[:, :-1], rows[:, 1:]
