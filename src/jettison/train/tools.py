"""What the loop is lent by the rooms above it: how a model is made of its section, and how it is planned.

`jettison.api.training` has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jettison.measure.rehearse import Scene
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
class Part:
    """What planning looks at: one module of a rank, and a micro-batch as it is called.

    Args:
        regions: names of its blocks; those that repeat where left out.
        mode: of the module's twin in a scene.
        in_flight: the most micro-batches that it has between forward and backward.
        number: of the stages of a pipeline, which it is; None where it is the whole model.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    regions: Sequence[str] | None = None
    mode: FakeTensorMode | None = None
    in_flight: int = 1
    number: int | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done on a rank, as text that travels: a plan document for each part, or a policy word.

    Args:
        likenesses: what a rank's parts have to be like for the plans.
        predicted_peak_bytes: of a rank that follows the plans.
    """

    plans: tuple[str, ...] = ()
    likenesses: tuple[str, ...] = ()
    policy: str | None = None
    predicted_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was done.

    Args:
        recomputed_flops: of one micro-batch, on this rank.
        plans: of every part of the model, in its order; none where a policy was applied.
        predicted_peak_bytes: of the rank where it is highest; None where nothing is predicted.
    """

    recomputed_flops: int
    plans: tuple[str, ...] = ()
    predicted_peak_bytes: int | None = None


class Tools(Protocol):
    """See the module."""

    def build(self, section: ModelSection, *, seq: int, device: torch.device) -> Built:
        """The whole model, its weights drawn from torch's default generators."""
        ...

    def decide(self, parts: Sequence[Part], section: PlanSection, scene: Scene | None, say: Say) -> Decision:
        """What a budget, a plan file or a policy comes to on one rank. Changes nothing.

        Args:
            scene: the step, over twins of the parts; where there is a budget.
        """
        ...

    def apply(self, parts: Sequence[Part], decision: Decision) -> int:
        """Do it to the modules; FLOPs that backwards of a micro-batch then compute again."""
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
