"""Pipeline stages of a reference model, run by schedules of `torch.distributed.pipelining`.

Parameters keep their names of the full model, so that checkpoints fit every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, cast

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

from jettison.capture.model_trace import as_batch
from jettison.core.errors import UsageError
from jettison.dryrun.fake_pipeline import FakeStage, fake_transfers, send_nothing
from jettison.memory.schedule import DeviceOrder, PipelineShape
from jettison.models.reference import Reference, document_numbers
from jettison.parallel.parameters import forget_forwards
from jettison.parallel.pipeline import blocks_of, received, stand_in_loss
from jettison.spec.layout import Layout, Schedule
from jettison.train.data import MicroBatch, derived_seed
from jettison.train.engine import Engine, Phase
from jettison.train.optim import local_of
from jettison.train.rank_layout import Places
from jettison.train.rank_plan import RankModule
from jettison.train.recipe import BatchSection

TIED = ("tokens.weight", "head.weight")
"""Names of a weight that the first and the last stage of a GPT share; checkpoints use the first."""


class StageModule(nn.Module):
    """Stage of consecutive layers: ids [b, s] to logits. ``ends``: is it first, last? By default from its layers."""

    def __init__(self, whole: Reference, layers: range, *, seq: int, ends: tuple[bool, bool] | None = None) -> None:
        super().__init__()
        self.config = whole.config
        self.seq = seq  # activations may be sharded along it
        self.is_first, self.is_last = ends or (layers.start == 0, layers.stop == len(whole.layers))
        self.kind: Any = type(whole)  # its functions, called with the parts that are here
        self.seq_first = whole.seq_first
        if self.is_first:
            for name in ("tokens", "positions", "dropout"):
                if hasattr(whole, name):
                    setattr(self, name, getattr(whole, name))
        self.layers = nn.ModuleDict({str(number): whole.layers[number] for number in layers})
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor, documents_bs: Tensor | None = None) -> Tensor:
        """Run ids, or the previous stage's activations, to activations, or logits."""
        if self.is_first:
            x = self.kind.embedded(self, x, documents_bs)
        inputs = self.kind.layer_inputs(self, self.seq, x, documents_bs)
        for layer in self.layers.values():
            x = layer(x, *inputs)
        return self.head(self.norm(x)) if self.is_last else x

    def loss(self, logits: Tensor, labels_bs: Tensor) -> Tensor:
        return self.kind.loss(self, logits, labels_bs)

    def like(self, micro_batch: int, seq: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor like the activations or the logits."""
        sizes = (seq, micro_batch, width) if self.seq_first else (micro_batch, seq, width)
        return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=True)


def cut(whole: nn.Module, layout: Layout, rank: int, *, seq: int) -> list[StageModule]:
    """Split a model, and return the stages of one pipeline rank in the order of the model: chunk c is on rank c mod pp.
    Raise `UsageError` if it cannot be split, its layers do not divide, or a stage has no layers.
    """
    if not isinstance(whole, Reference):
        raise UsageError(
            f"layout.pp: a {type(whole).__name__} cannot be split into stages; expected a reference model: "
            'model.architecture with code = "reference"'
        )
    counts = layout.layers_per_chunk(len(whole.layers))
    ends = list(accumulate(counts))
    for number, count in enumerate(counts[1:-1], start=1):
        if not count:
            raise UsageError(f"layout.stage_layers: stage {number} has no layers; only the first and the last may")
    return [
        StageModule(whole, range(end - count, end), seq=seq, ends=(number == 0, number == len(counts) - 1))
        for number, (end, count) in enumerate(zip(ends, counts, strict=True))
        if number % layout.pp == rank
    ]


class _RankStage(PipelineStage):
    """Stage whose forwards run in a context, since a schedule's step runs both passes and autocast is for forward."""

    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def forward_maybe_with_nosync(self, *args: Any, **more: Any) -> Any:
        with self.context():
            return super().forward_maybe_with_nosync(*args, **more)


class PipelineEngine(Engine):
    """This rank's stages. Each has its own random generators, seeded by micro-batch and stage."""

    stage_class: type[_RankStage] = _RankStage

    def __init__(
        self,
        stages: Sequence[StageModule],
        places: Places,
        batch: BatchSection,
        device: torch.device,
        *,
        autocast: bool,
        document_end: int | None,
    ) -> None:
        """Make an engine of stages, or of fake copies of them. Plan and shard them next, then call `start`.
        ``autocast``: of forwards; ``document_end``: a document's last token, if attention is masked to documents.
        """
        super().__init__(stages, places, device, autocast=autocast)
        self._batch, self._document_end = batch, document_end
        self.stages = stages
        rank = places.mesh["pp"].get_local_rank()
        self._numbers = [rank + places.layout.pp * chunk for chunk in range(len(stages))]
        self._ends: dist.ProcessGroup | None = None  # of the stages that share a weight
        self._schedule: Any = None
        self._made: list[Any] = []
        self._seeds: list[int] = []
        self._calls = [0] * len(stages)

    @classmethod
    def of(
        cls, whole: nn.Module, places: Places, batch: BatchSection, device: torch.device, **options: Any
    ) -> PipelineEngine:
        stages = cut(whole, places.layout, places.mesh["pp"].get_local_rank(), seq=batch.seq)
        made = cls(stages, places, batch, device, **options)
        if getattr(whole, "tokens", None) is not None and whole.tokens.weight is whole.head.weight:
            pipelines = places.mesh.mesh.flatten(1).t().tolist()  # all ranks make the groups of all
            made._ends, _ = dist.new_subgroups_by_enumeration([[ranks[0], ranks[-1]] for ranks in pipelines])
        for chunk, stage in enumerate(stages):
            stage.register_forward_pre_hook(lambda *_, chunk=chunk: made._seed(chunk))
        return made

    def on_fakes(self, fake_modules: Sequence[nn.Module], places: Places) -> PipelineEngine:
        stages = [cast(StageModule, m) for m in fake_modules]
        batch, end = self._batch, self._document_end
        return _FakeEngine(stages, places, batch, self._device, autocast=self._autocast, document_end=end)

    def dry_run_counts(self, micro_batches: int) -> tuple[int, ...]:
        """Two with GPipe, whose peak is linear in micro-batches; one with other schedules, whose peak is periodic."""
        layout = self._places.layout
        if layout.schedule is Schedule.GPIPE:
            return (3, 4) if micro_batches > 6 else (micro_batches,)
        return (min(micro_batches, (3 if layout.virtual_stages > 1 else 2) * layout.pp),)

    @property
    def tied(self) -> list[nn.Parameter]:
        if self._ends is None:
            return []
        found = [p for stage in self.stages for name, p in stage.named_parameters() if name in TIED]
        return list(dict.fromkeys(found))

    def names(self, name: str) -> str:
        return TIED[0] if self._ends is not None and name == TIED[1] else name

    def calls(self, rows: Tensor, micro_batches: int) -> Iterator[RankModule]:
        """Yield each stage with inputs like those it receives, and a stand-in for its loss."""
        layout = self._places.layout
        shape = PipelineShape(
            layout.schedule,
            stages=layout.pp,
            micro_batches=micro_batches,
            virtual_stages=layout.virtual_stages,
            group=layout.micro_batch_group,
        )
        held = DeviceOrder(
            steps=shape.order(self._numbers[0]), own=layout.virtual_stages, chunks=layout.virtual_stages
        ).most_alive
        for stage, number, alive in zip(self.stages, self._numbers, held, strict=True):
            batch: tuple[Tensor, ...] = (rows[:, :-1],)
            if not stage.is_first:
                batch = received(torch.zeros_like(self._handed(stage), device=self._device))
            yield RankModule(
                model=stage,
                batch=as_batch(batch, self._told(rows)),
                loss_fn=stand_in_loss,
                regions=blocks_of(stage),
                in_flight=min(alive, micro_batches),
                number=number,
            )

    def start(self, micro_batches: int) -> None:
        """Build the schedule. Raise `UsageError` if it cannot run this number of micro-batches."""
        self._made, self._schedule = self._laid_out(micro_batches, self._places.layout.schedule)

    def _laid_out(self, micro_batches: int, kind: Schedule) -> tuple[list[Any], Any]:
        layout = self._places.layout
        count = layout.pp * layout.virtual_stages
        made = [
            self.stage_class(
                stage,
                number,
                count,
                self._device,
                group=self._places.group("pp"),
                input_args=self._ids() if stage.is_first else self._handed(stage),
                output_args=self._handed(stage, logits=stage.is_last),
            )
            for stage, number in zip(self.stages, self._numbers, strict=True)
        ]
        for stage in made:
            stage.context = self.context
        try:
            if kind is Schedule.ZERO_BUBBLE:
                return made, ScheduleInterleavedZeroBubble(list(made), micro_batches, self._loss)
            if layout.virtual_stages > 1:
                return made, ScheduleInterleaved1F1B(list(made), micro_batches, self._loss)
            single = ScheduleGPipe if kind is Schedule.GPIPE else Schedule1F1B
            return made, single(made[0], micro_batches, self._loss)
        except ValueError as error:
            raise UsageError(f"layout.schedule: {error}") from error

    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor | None:
        """See `Engine`. Passes alternate, so they are one phase. Only the last stage computes the loss."""
        rows = torch.cat([batch.rows for batch in batches])
        self._seeds = [batch.seed for batch in batches]
        self._calls = [0] * len(self.stages)
        with phase("passes"):
            losses = self._passes(self._schedule.step, rows)
            parameters = [p for stage in self.stages for p in stage.parameters()]
            self._places.complete(parameters)
            for parameter in self.tied:
                assert parameter.grad is not None
                dist.all_reduce(local_of(parameter.grad), group=self._ends)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor | None:
        """See `Engine`. Runs one micro-batch at a time, since torch's schedules would keep several on a stage."""
        _, schedule = self._laid_out(1, Schedule.GPIPE)
        losses: list[Tensor] = []
        try:
            for batch in batches:
                self._places.seed(batch.seed)
                losses += self._passes(schedule.eval, batch.rows)
        finally:
            for stage in self.stages:
                forget_forwards(stage)
        return torch.stack(losses) if losses else None

    def _passes(self, run: Callable[..., object], rows: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        last = self.stages[-1].is_last
        run(
            *((rows[:, :-1],) if self.stages[0].is_first else ()),
            target=rows[:, 1:] if last else None,
            losses=losses if last else None,
            return_outputs=False,
            **self._told(rows),
        )
        return losses

    def micro_batch_bytes(self) -> int:
        """Bytes of a second copy of the micro-batch's rows."""
        each = self._batch.seq + 1 + (0 if self._document_end is None else self._batch.seq)
        return self._batch.micro_batch * each * torch.int64.itemsize

    def _seed(self, chunk: int) -> None:
        if not torch.is_grad_enabled() or self._calls[chunk] >= len(self._seeds):
            return  # planning
        seed = self._seeds[self._calls[chunk]]
        self._calls[chunk] += 1
        self._places.seed(derived_seed(seed, "stage", self._numbers[chunk]))

    def _loss(self, logits: Tensor, labels_bs: Tensor) -> Tensor:
        with self.context():
            return self.stages[-1].loss(logits, labels_bs)

    def _told(self, rows: Tensor) -> dict[str, Tensor]:
        if self._document_end is None:
            return {}
        return {"documents_bs": document_numbers(rows[:, :-1], self._document_end)}

    def _ids(self) -> Tensor:
        """Return empty ids with the strides of a slice of rows, which torch 2.11 compares."""
        return torch.empty(self._batch.micro_batch, self._batch.seq + 1, dtype=torch.int64, device="meta")[:, :-1]

    def _handed(self, stage: StageModule, *, logits: bool = False) -> Tensor:
        """Return an empty tensor like the activations that stages send, or like a stage's logits."""
        layout, batch = self._places.layout, self._batch
        # under autocast the residual stream keeps the dtype of the parameters
        dtype = torch.bfloat16 if self._places.mixed else next(stage.parameters()).dtype
        if logits:
            bf16 = torch.bfloat16 if self._autocast else dtype
            return stage.like(batch.micro_batch, stage.seq, stage.config.vocab, bf16)
        seq = batch.seq // (layout.tp if layout.sp else 1)
        return stage.like(batch.micro_batch, seq, stage.config.hidden, dtype)


class _FakeRankStage(FakeStage, _RankStage):
    def forward_maybe_with_nosync(self, *args: Any, **more: Any) -> Any:
        try:
            return super().forward_maybe_with_nosync(*args, **more)
        finally:
            torch.clear_autocast_cache()  # inside the recording's autocast, leaving this one does not clear it


class _FakeEngine(PipelineEngine):
    stage_class = _FakeRankStage

    def _laid_out(self, micro_batches: int, kind: Schedule) -> tuple[list[Any], Any]:
        made, schedule = super()._laid_out(micro_batches, kind)
        send_nothing(schedule, made)
        return made, schedule

    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor | None:
        with fake_transfers(self._made) as transfers:
            found = super().forward_backward(batches, phase)
            self._transferred_bytes = transfers.left_bytes()
        return found

    def micro_batch_bytes(self) -> int:
        return super().micro_batch_bytes() + self._transferred_bytes
