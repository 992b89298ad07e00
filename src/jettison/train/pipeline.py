"""Forward and backward through the stages of a pipeline, by `torch.distributed.pipelining`'s schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from jettison.errors import UsageError
from jettison.parallel.pipeline import received, stand_in_loss
from jettison.spec.layout import Schedule
from jettison.trace.model import LossFn
from jettison.train.engine import MicroBatch, Phase
from jettison.train.order import derived_seed
from jettison.train.places import Places
from jettison.train.recipe import BatchSection
from jettison.train.stages import Stage, cut

TIED = ("tokens.weight", "head.weight")
"""Names of a weight that the first and the last stage of a GPT have in common; checkpoints know the first."""


class Pipeline:
    """This rank's stages. Each draws from streams of its own, seeded by micro-batch and stage."""

    def __init__(self, whole: nn.Module, places: Places, batch: BatchSection, device: torch.device) -> None:
        """Cut the model. Plan and shard the stages next, then call `start`.

        Raises:
            UsageError: see `stages.cut`.
        """
        self._places = places
        self._batch = batch
        self._device = device
        rank = places.mesh["pp"].get_local_rank()
        self.stages = cut(whole, places.layout, rank, seq=batch.seq)
        self.parts: Sequence[nn.Module] = self.stages
        self._numbers = [rank + places.layout.pp * chunk for chunk in range(len(self.stages))]
        self._schedule: Any = None
        self._seeds: list[int] = []
        self._calls = [0] * len(self.stages)
        tied = getattr(whole, "tokens", None) is not None and whole.tokens.weight is whole.head.weight
        self._ends = _group_of_ends(places) if tied else None
        for chunk, stage in enumerate(self.stages):
            stage.register_forward_pre_hook(lambda *_, chunk=chunk: self._seed(chunk))

    @property
    def tied(self) -> list[nn.Parameter]:
        """This rank's copies of a weight that another stage has too."""
        if self._ends is None:
            return []
        found = [p for stage in self.stages for name, p in stage.named_parameters() if name in TIED]
        return list(dict.fromkeys(found))

    def names(self, name: str) -> str:
        """A parameter's name in the whole model."""
        return TIED[0] if self._ends is not None and name == TIED[1] else name

    def calls(self, rows: Tensor) -> Iterator[tuple[nn.Module, Any, LossFn | None]]:
        """Each stage, and tensors like those that come to it; its loss for planning is a stand-in."""
        for stage in self.stages:
            stream = torch.zeros_like(self._stream(stage), device=self._device)
            yield stage, (rows[:, :-1],) if stage.is_first else received(stream), stand_in_loss

    def context(self) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def start(self, micro_batches: int) -> None:
        """Lay out the schedule.

        Raises:
            UsageError: it cannot be run with so many micro-batches.
        """
        layout = self._places.layout
        count = layout.pp * layout.virtual_stages
        made = [
            PipelineStage(
                stage, number, count, self._device, group=self._places.group("pp"),
                input_args=self._input(stage), output_args=self._output(stage),
            )
            for stage, number in zip(self.stages, self._numbers, strict=True)
        ]  # fmt: skip
        loss = self.stages[-1].loss
        try:
            if layout.schedule is Schedule.GPIPE:
                self._schedule = ScheduleGPipe(made[0], micro_batches, loss)
            elif layout.schedule is Schedule.ZERO_BUBBLE:
                self._schedule = ScheduleInterleavedZeroBubble(list(made), micro_batches, loss)
            elif layout.virtual_stages > 1:
                self._schedule = ScheduleInterleaved1F1B(list(made), micro_batches, loss)
            else:
                self._schedule = Schedule1F1B(made[0], micro_batches, loss)
        except ValueError as error:
            raise UsageError(f"layout.schedule: {error}") from error

    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor | None:
        """See `Engine`. Passes alternate, so they are one phase. Only the last stage knows the loss."""
        rows = torch.cat([batch.rows for batch in batches])
        self._seeds = [batch.seed for batch in batches]
        self._calls = [0] * len(self.stages)
        first, last = self.stages[0].is_first, self.stages[-1].is_last
        losses: list[Tensor] = []
        with phase("passes"):
            self._schedule.step(
                *((rows[:, :-1],) if first else ()), target=rows[:, 1:] if last else None,
                losses=losses if last else None, return_outputs=False,
            )  # fmt: skip
            parameters = [p for stage in self.stages for p in stage.parameters()]
            self._places.complete(parameters)
            for parameter in self.tied:
                _summed(parameter, self._ends)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    def settle(self) -> None:
        """Nothing is put off."""

    def _seed(self, chunk: int) -> None:
        if not torch.is_grad_enabled() or self._calls[chunk] >= len(self._seeds):
            return  # planning
        seed = self._seeds[self._calls[chunk]]
        self._calls[chunk] += 1
        self._places.seed(derived_seed(seed, "stage", self._numbers[chunk]))

    def _dtype(self, stage: Stage) -> torch.dtype:
        return torch.bfloat16 if self._places.mixed else next(stage.parameters()).dtype

    def _stream(self, stage: Stage) -> Tensor:
        layout = self._places.layout
        seq = self._batch.seq // (layout.tp if layout.sp else 1)
        return stage.stream(self._batch.micro_batch, seq, self._dtype(stage))

    def _input(self, stage: Stage) -> Tensor:
        if not stage.is_first:
            return self._stream(stage)
        return torch.empty(self._batch.micro_batch, self._batch.seq, dtype=torch.int64, device="meta")

    def _output(self, stage: Stage) -> Tensor:
        if not stage.is_last:
            return self._stream(stage)
        return stage.logits(self._batch.micro_batch, self._dtype(stage))


def _group_of_ends(places: Places) -> dist.ProcessGroup | None:
    """The first and the last rank of this pipeline; None on those between. All ranks call it."""
    pipelines = places.mesh.mesh.flatten(1).t().tolist()
    ends, _ = dist.new_subgroups_by_enumeration([[ranks[0], ranks[-1]] for ranks in pipelines])
    return ends


def _summed(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    gradient = parameter.grad
    assert gradient is not None
    dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)
