"""Forward and backward of a step's micro-batches, over one layout. The loop knows no more of a layout than this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.model_trace import call_model, loss_of
from jettison.core.errors import TraceError, UsageError
from jettison.parallel.fsdp import forget_forwards
from jettison.train.build_model import Built
from jettison.train.rank_layout import Places
from jettison.train.rank_plan import RankModule

Phase = Callable[[str], AbstractContextManager[None]]
"""Opens a named part of the step, for its peak of memory."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Token rows [b, s + 1] on this rank's device, and the seed of every random number drawn on them."""

    rows: Tensor
    seed: int


class Engine(ABC):
    """One layout's way through a step.

    Args:
        parts: this rank's share of the model, whose parameters are trained and saved.
    """

    def __init__(self, parts: Sequence[nn.Module], places: Places, device: torch.device, *, autocast: bool) -> None:
        self.parts, self._places, self._device, self._autocast = parts, places, device, autocast

    @property
    def tied(self) -> Collection[nn.Parameter]:
        """This rank's copies of parameters that another stage has too."""
        return ()

    def names(self, name: str) -> str:
        """A parameter's name in the whole model, from its name in a part."""
        return name

    @abstractmethod
    def calls(self, rows: Tensor, micro_batches: int) -> Iterator[RankModule]:
        """Each part, called with token rows like these, in a step of so many micro-batches."""

    def context(self) -> AbstractContextManager[object]:
        """What a forward runs in: autocast to bf16, if asked for."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext()

    @abstractmethod
    def start(self, micro_batches: int) -> None:
        """Get ready for steps of so many micro-batches; parts are planned and sharded by now.

        Raises:
            UsageError: there can be none.
        """

    @abstractmethod
    def imagined(self, fake_modules: Sequence[nn.Module], places: Places) -> Engine:
        """The same over fake copies of the parts on fake tensors, where nothing is sent."""

    @abstractmethod
    def dry_run_counts(self, micro_batches: int) -> tuple[int, ...]:
        """How many micro-batches show the peak of a step of so many. Two numbers: the peak grows evenly from there."""

    def micro_batch_bytes(self) -> int:
        """What each further micro-batch adds to the peak beside its rows, where one number is enough."""
        return 0

    @abstractmethod
    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor | None:
        """Leave the gradient of the mean loss over all ranks at the parameters; return this rank's mean, detached, if
        this rank knows it.
        """

    @abstractmethod
    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor | None:
        """The loss of each, if this rank knows it; modules are as for inference, and nothing wants a gradient."""

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has used the gradients."""
        optimizer.zero_grad(set_to_none=True)


class WholeModel(Engine):
    """Every rank runs the model from end to end; gradients are averaged over data-parallel ranks.

    Micro-batches are added up on each rank and averaged once, after the last. Only with parameters that are gathered
    twice (zero 3) each one is averaged for itself: whole gradients, held until the last, would undo what that saves.
    Shards of replicas are averaged once in any case.
    """

    def __init__(self, built: Built, places: Places, device: torch.device, *, autocast: bool) -> None:
        super().__init__((built.model,), places, device, autocast=autocast)
        self._built = built
        self._run: nn.Module = built.model

    def calls(self, rows: Tensor, micro_batches: int) -> Iterator[RankModule]:
        """One part."""
        yield RankModule(
            model=self._built.model,
            batch=self._built.call(rows),
            loss_fn=self._built.loss_fn,
            agreeing=self._places.agreeing,
        )

    def start(self, micro_batches: int) -> None:
        """Have DistributedDataParallel average, where it is to."""
        if self._places.averaging == "ddp":
            ids = [self._device.index] if self._device.type == "cuda" else None
            self._run = run = DistributedDataParallel(
                self.parts[0], device_ids=ids, process_group=self._places.group("replica"), gradient_as_bucket_view=True
            )
            _fill_buckets(run)

    def imagined(self, fake_modules: Sequence[nn.Module], places: Places) -> WholeModel:
        """See `Engine`."""
        (fake_model,) = fake_modules
        return WholeModel(replace(self._built, model=fake_model), places, self._device, autocast=self._autocast)

    def dry_run_counts(self, micro_batches: int) -> tuple[int, ...]:
        """In the second one gradients are there already, and it may be the last, after which they are averaged."""
        return (min(micro_batches, 2),)

    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor:
        """See `Engine`."""
        losses = []
        for number, batch in enumerate(batches):
            with self._averaging(last=number == len(batches) - 1):
                self._places.seed(batch.seed)
                with phase("forward"), self.context():
                    loss = self._loss(self._run, batch) / len(batches)
                with phase("backward"):
                    loss.backward()
            losses.append(loss.detach())
        with phase("backward"):
            self._places.complete(self.parts[0].parameters())
        return torch.stack(losses).sum()

    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        """See `Engine`. Past DistributedDataParallel, which has nothing to average."""
        losses = []
        try:
            for batch in batches:
                self._places.seed(batch.seed)
                with self.context():
                    losses.append(self._loss(self.parts[0], batch))
        finally:
            forget_forwards(self.parts[0])
        found, context = torch.stack(losses), self._places.context
        return found if context is None else context.mean(found)

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients stay where they are places in a bucket: others would be made beside the bucket, and copied."""
        optimizer.zero_grad(set_to_none=not isinstance(self._run, DistributedDataParallel))

    def _loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """The scalar to minimise.

        Raises:
            UsageError: the model gives none.
        """
        output = call_model(model, self._built.call(batch.rows))
        try:
            return loss_of(output, self._built.loss_fn)
        except TraceError as error:
            raise UsageError(f"model: called with input_ids and labels, it gave {error}") from error

    def _averaging(self, *, last: bool) -> AbstractContextManager[object]:
        if isinstance(self._run, DistributedDataParallel) and not last:
            return self._run.no_sync()
        if isinstance(self._run, FSDPModule):
            self._run.set_is_last_backward(last)
            self._run.set_requires_gradient_sync(last or self._places.layout.zero == 3)
            self._run.set_requires_all_reduce(last)
        return nullcontext()


def _fill_buckets(run: DistributedDataParallel) -> None:
    """Make gradients places in buckets, as they otherwise become in the second step, and lay out the buckets for good.

    What the first round shows of their order decides about the layout; the second one is over the buckets that stay.
    """
    parameters = [p for p in run.module.parameters() if p.requires_grad]
    for _ in range(2):
        run.reducer._rebuild_buckets()
        run.reducer.prepare_for_backward([])
        torch.autograd.backward(parameters[::-1], [torch.zeros_like(p) for p in parameters[::-1]])


def named_parameters(engine: Engine) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of this rank once, by its name in the whole model."""
    for part in engine.parts:
        for name, parameter in part.named_parameters():
            yield engine.names(name), parameter
