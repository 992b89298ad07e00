"""A training run as it is asked for: frozen sections, each of which checks its own values. No torch.

What a run does is a function of its recipe: the order of the data and every random number follow from ``seed`` and the
step (NOTE [ Positions ] in train/data_order.py), so a recipe and a step are all that a checkpoint says beside tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict

from jettison.errors import UsageError
from jettison.parse_units import parse_seconds
from jettison.train.model_sections import STRICT, BatchSection, LayoutSection, ModelSection, PlanSection, positive
from jettison.train.run_sections import (
    CheckpointSection,
    DataSection,
    EvalSection,
    ExportSection,
    LogSection,
    OptimizerSection,
)

__all__ = [
    "BatchSection",
    "CheckpointSection",
    "DataSection",
    "EvalSection",
    "ExportSection",
    "LayoutSection",
    "LogSection",
    "ModelSection",
    "OptimizerSection",
    "PlanSection",
    "TrainRecipe",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecipe:
    """A whole run.

    Args:
        steps: optimizer steps altogether, those before a resume counted.
        seed: of the weights, the order of the data, and dropout.
        precision: "fp32": weights as they are built; "bf16-autocast": fp32 weights, products and activations in bf16;
            "bf16": fp32 weights that forward and backward read as bf16 copies (FSDP2's mixed precision).
        on_nan: what a loss or gradient that is not finite does: "stop" the run before its weights are changed, "skip"
            the step, on all ranks, or "continue" as if nothing had happened. Checkpoints stay finite in each case.
        timeout: how long ranks wait for one that does not move, from the first step on ("120s", "10min").
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: ModelSection
    batch: BatchSection
    steps: int
    seed: int = 0
    precision: Literal["fp32", "bf16-autocast", "bf16"] = "fp32"
    on_nan: Literal["stop", "skip", "continue"] = "stop"
    timeout: str = "10min"
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    layout: LayoutSection = field(default_factory=LayoutSection)
    plan: PlanSection = field(default_factory=PlanSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    export: ExportSection = field(default_factory=ExportSection)
    eval: EvalSection = field(default_factory=EvalSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self) -> None:
        positive(self, "steps")
        if parse_seconds(self.timeout) < 1:
            raise UsageError(f"got timeout {self.timeout}; expected 1s or more")
        if self.seed < 0:
            raise UsageError(f"got seed {self.seed}; expected 0 or more")
        if self.model.compile is not None and max(self.layout.tp, self.layout.cp, self.layout.pp) > 1:
            raise UsageError(
                f'model.compile: got "{self.model.compile}" with tp {self.layout.tp}, cp {self.layout.cp} and pp '
                f"{self.layout.pp}; compiled blocks are measured on one rank alone: expected 1 of each, or no compile"
            )
        if self.layout.cp > 1 and self.batch.seq % (2 * self.layout.cp):
            raise UsageError(
                f"batch.seq: got {self.batch.seq} with cp {self.layout.cp}; expected a multiple of 2 x cp = "
                f"{2 * self.layout.cp}: every rank has two pieces of a sequence"
            )
        positions = self.model.positions
        if positions is not None and self.batch.seq > positions:
            raise UsageError(f"batch.seq: got {self.batch.seq}; expected at most model.positions, {positions}")
