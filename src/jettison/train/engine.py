"""Forward and backward of a step's micro-batches on one layout: the loop's only interface to layouts."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.fake_copies import fake_copy, fake_mode
from jettison.capture.fsdp2 import sharded_parameters
from jettison.capture.model_trace import ModelTrace, call_model, loss_of
from jettison.capture.randomness import Streams
from jettison.core.errors import TraceError, UsageError
from jettison.core.objects import swapped_entries
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.parallel.parameters import forget_forwards
from jettison.train.build_model import Built
from jettison.train.data import Batches, InOrder, MicroBatch, TextDigest, open_corpus, surveyed
from jettison.train.optim import local_of, make_optimizer
from jettison.train.rank_layout import Places
from jettison.train.rank_plan import RankModule
from jettison.train.ranks import World
from jettison.train.recipe import OptimizerSection, TrainRecipe

Phase = Callable[[str], AbstractContextManager[None]]
"""Opens a named part of the step, for its peak of memory."""


class Engine(ABC):
    """Forward and backward on one layout; ``parts``: this rank's part of the model, which is trained and saved."""

    def __init__(self, parts: Sequence[nn.Module], places: Places, device: torch.device, *, autocast: bool) -> None:
        self.parts, self._places, self._device, self._autocast = parts, places, device, autocast

    @property
    def tied(self) -> Collection[nn.Parameter]:
        """This rank's copies of parameters that another stage has, too."""
        return ()

    def names(self, name: str) -> str:
        """Return a parameter's name in the full model, from its name in a part."""
        return name

    @abstractmethod
    def calls(self, rows: Tensor, micro_batches: int) -> Iterator[RankModule]:
        """Yield each part with its inputs for token rows like these, in a step of this many micro-batches."""

    def context(self) -> AbstractContextManager[object]:
        """Context of a forward: autocast to bf16, if requested."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext()

    @abstractmethod
    def start(self, micro_batches: int) -> None:
        """Prepare for steps of this many micro-batches, after planning and sharding. `UsageError` if impossible."""

    @abstractmethod
    def on_fakes(self, fake_modules: Sequence[nn.Module], places: Places) -> Engine:
        """Return an engine for fake copies of the parts, without communication."""

    @abstractmethod
    def dry_run_counts(self, micro_batches: int) -> tuple[int, ...]:
        """Numbers of micro-batches to dry-run for a step's peak. With two numbers the peak is linear from there."""

    def micro_batch_bytes(self) -> int:
        """Bytes that each further micro-batch adds to the peak in addition to its rows, if one number is enough."""
        return 0

    @abstractmethod
    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor | None:
        """Set gradients to the global mean loss's; return this rank's mean, detached, or None if it has no loss."""

    @abstractmethod
    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor | None:
        """Return the loss of each micro-batch, in inference mode; None if this rank does not compute it."""

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)


class WholeModel(Engine):
    """Every rank runs the model from end to end; gradients are averaged over data-parallel ranks.

    Gradients of micro-batches are accumulated on each rank and averaged once, after the last. Only with zero 3 each
    micro-batch is reduced: unsharded gradients, kept until the last one, would undo its savings. HSDP all-reduces
    shards once in any case.
    """

    def __init__(self, built: Built, places: Places, device: torch.device, *, autocast: bool) -> None:
        super().__init__((built.model,), places, device, autocast=autocast)
        self._built = built
        self._run: nn.Module = built.model

    def calls(self, rows: Tensor, micro_batches: int) -> Iterator[RankModule]:
        yield RankModule(
            model=self._built.model,
            batch=self._built.call(rows),
            loss_fn=self._built.loss_fn,
            agreeing=self._places.agreeing,
        )

    def start(self, micro_batches: int) -> None:
        """Wrap the model in DistributedDataParallel, if it averages gradients."""
        if self._places.averaging == "ddp":
            ids = [self._device.index] if self._device.type == "cuda" else None
            self._run = run = DistributedDataParallel(
                self.parts[0], device_ids=ids, process_group=self._places.group("replica"), gradient_as_bucket_view=True
            )
            _fill_buckets(run)

    def on_fakes(self, fake_modules: Sequence[nn.Module], places: Places) -> WholeModel:
        (fake_model,) = fake_modules
        return WholeModel(replace(self._built, model=fake_model), places, self._device, autocast=self._autocast)

    def dry_run_counts(self, micro_batches: int) -> tuple[int, ...]:
        """Two: the second micro-batch finds gradients, and may be the last, after which they are averaged."""
        return (min(micro_batches, 2),)

    def forward_backward(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor:
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
        """See `Engine`. Calls the module inside DistributedDataParallel, since there are no gradients."""
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
        """Zero gradients in place if they are views of buckets: new ones would be allocated outside, and copied."""
        optimizer.zero_grad(set_to_none=not isinstance(self._run, DistributedDataParallel))

    def _loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
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
    """Make gradients views of buckets, which DDP otherwise does in the second step, and rebuild the buckets. The first
    round records the order of gradients, from which DDP rebuilds its buckets; the second uses the final ones.
    """
    parameters = [p for p in run.module.parameters() if p.requires_grad]
    for _ in range(2):
        run.reducer._rebuild_buckets()
        run.reducer.prepare_for_backward([])
        torch.autograd.backward(parameters[::-1], [torch.zeros_like(p) for p in parameters[::-1]])


def named_parameters(engine: Engine) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter of this rank once, with its name in the full model."""
    for part in engine.parts:
        for name, parameter in part.named_parameters():
            yield engine.names(name), parameter


@contextmanager
def evaluation_mode(engine: Engine) -> Iterator[None]:
    """Run in inference mode without gradients, and restore modes, buffers and random generators afterwards."""
    evaluating = ((vars(module), "training", False) for part in engine.parts for module in part.modules())
    buffers = [(buffer, buffer.clone()) for part in engine.parts for buffer in part.buffers()]
    streams = Streams.now()
    try:
        with torch.no_grad(), swapped_entries(evaluating):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        streams.restore()


# evaluation: the same on every layout, without effect on training ----------------------------------------------------
#
# Losses of micro-batches are added in the order of their sequences, on whichever rank they were computed, so that
# layouts differ only by the rounding of their kernels.


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    batches: Batches
    count: int
    text: TextDigest

    @property
    def tokens(self) -> int:
        return self.count * self.batches.global_batch * self.batches.corpus.seq


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Mean loss per token, and seconds of the evaluation."""

    loss: float
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluation_set(recipe: TrainRecipe, vocab: int | None, world: World) -> EvaluationSet | None:
    """Open a recipe's evaluation text, if any. All ranks call it. `UsageError` if it is too short or unreadable."""
    section, batch = recipe.eval, recipe.batch
    data = section.data
    if data is None:
        return None
    corpus = world.together(lambda: open_corpus(data, batch.seq))
    text = surveyed(corpus, world)

    def counted() -> int:
        text.check_vocabulary(vocab)
        most = corpus.windows // batch.global_batch
        if most < (section.batches or 1):
            raise UsageError(
                f"eval.data: got {corpus.windows} sequences of {batch.seq} tokens; expected at least batches x "
                f"batch.global_batch = {section.batches or 1} x {batch.global_batch}"
            )
        return section.batches or most

    count = world.together(counted)
    batches = Batches(corpus, InOrder(), batch.global_batch, batch.micro_batch)
    return EvaluationSet(batches=batches, count=count, text=text)


def evaluate(
    found: EvaluationSet, engine: Engine, world: World, *, data_rank: int, accumulation: int
) -> EvaluationResult:
    """Evaluate the model. All ranks call it. ``accumulation``: micro-batches a step on one data-parallel rank."""
    started = time.perf_counter()
    losses: dict[int, float] = {}
    first = data_rank * accumulation
    of_a_batch = accumulation * (found.batches.global_batch // (found.batches.micro_batch * accumulation))
    with evaluation_mode(engine):
        for number in range(found.count):
            micros = range(first, first + accumulation)
            own = engine.evaluate(found.batches.share(number, micros, world.device, "eval"))
            if own is not None:
                losses |= {number * of_a_batch + micro: loss for micro, loss in zip(micros, own.tolist(), strict=True)}
    together = world.merged(losses, lambda earlier, later: later | earlier)  # the first rank's loss counts
    total = math.fsum(together[number] for number in sorted(together))
    return EvaluationResult(loss=total / len(together), seconds=time.perf_counter() - started)


# dry run of a step, for a planner -------------------------------------------------------------------------------------
#
# NOTE [ Fake ranks ]
# Fake copies of this rank's modules are split and sharded like their originals, on a mesh whose groups send nothing,
# and torch's own FSDP2 and pipeline schedules run on them. So all their allocations are counted: unsharded parameters
# and gradients, copies for a collective, micro-batches in flight, receive buffers. Each rank's dry run needs no other.


class LoopStep:
    """See `jettison.dryrun.step.DryStep`."""

    def __init__(
        self,
        engine: Engine,
        places: Places,
        section: OptimizerSection,
        rows: Tensor,
        micro_batches: int,
        *,
        evaluates: bool,
    ) -> None:
        """Make the step of an engine whose parts are not sharded yet, for rows of one micro-batch. All ranks call it.
        ``evaluates``: the run evaluates between steps; that must fit, too, and counts as part of the forward.
        """
        self._evaluates = evaluates
        self.mode: FakeTensorMode = fake_mode(allow_non_fake_inputs=True)
        self.modules: Sequence[nn.Module] = [fake_copy(part, self.mode, rows.device) for part in engine.parts]
        self._fake_places = places.fake()
        for module in self.modules:
            self._fake_places.shard(module)
        self.optimizer = make_optimizer(section, (p for module in self.modules for p in module.parameters()))
        self._engine, self._rows = engine, rows
        self._micro_batches = micro_batches
        self._buckets = places.averaging == "ddp"
        self._engines: dict[int, Engine] = {}

    @property
    def last(self) -> Sequence[torch.optim.Optimizer]:
        return (self.optimizer,)

    def context(self, trace: ModelTrace) -> AbstractContextManager[None]:
        return trace.context()

    def alive(self) -> Iterable[Tensor]:
        """Tensors before the step; buckets of DistributedDataParallel are gradients allocated from the start."""
        if self._buckets:
            for parameter in (p for module in self.modules for p in module.parameters() if p.requires_grad):
                parameter.grad = torch.empty_like(parameter)
        return alive(self.modules, self.optimizer)

    def leave_gradients(self, counter: AllocationCounter) -> None:
        self.passes(counter)

    def passes(self, counter: AllocationCounter) -> tuple[int, int, None]:
        """See `DryStep`. If forwards and backwards alternate, both peaks are those of all passes."""
        counts = self._engine.dry_run_counts(self._micro_batches)
        left = self._micro_batches - counts[-1]
        evaluated = self._evaluated(counter, left)
        start, peaks = counter.live_bytes, []
        for count in counts:
            self.optimizer.zero_grad(set_to_none=not self._buckets)
            peaks.append(self._run(count, counter, start))
        forward, backward = peaks[-1]
        if len(counts) == 1:
            each = self._engines[counts[0]].micro_batch_bytes() + self._rows.numel() * self._rows.element_size()
            more = (left * each,) * 2
        else:
            more = (left * (forward - peaks[0][0]), left * (backward - peaks[0][1]))
        return max(forward + more[0], evaluated), backward + more[1], None

    def _evaluated(self, counter: AllocationCounter, left: int) -> int:
        """Peak of an evaluation, one micro-batch at a time, with the receive buffers of steps allocated.

        It runs before the measured passes, whose gradients the optimizer needs, but after the first, unmeasured ones.
        """
        if not self._evaluates or not self._engines:
            return 0
        self.optimizer.zero_grad(set_to_none=not self._buckets)
        engine = next(iter(self._engines.values()))
        counter.reset_peak()
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), evaluation_mode(engine):
            engine.evaluate([MicroBatch(rows=self._rows.clone(), seed=0) for _ in range(self._micro_batches)])
        return counter.peak_bytes + left * engine.micro_batch_bytes()

    def _run(self, micro_batches: int, counter: AllocationCounter, start: int) -> tuple[int, int]:
        peaks: dict[str, int] = {}

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            counter.reset_peak()
            counter.phase(name, first=not peaks)
            yield
            torch.clear_autocast_cache()  # leaving autocast clears it, except for the recording's own context
            peaks[name] = max(counter.peak_bytes, peaks.get(name, 0))

        if micro_batches not in self._engines:
            self._engines[micro_batches] = made = self._engine.on_fakes(self.modules, self._fake_places)
            made.start(micro_batches)
        others = counter.live_bytes - start  # receive buffers of another number of micro-batches
        batches = [MicroBatch(rows=self._rows.clone(), seed=0) for _ in range(micro_batches)]
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            self._engines[micro_batches].forward_backward(batches, phase)
        passes = peaks.get("passes", 0)
        return peaks.get("forward", passes) - others, peaks.get("backward", passes) - others


def alive(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors that are alive before a step: parameters, buffers, gradients, optimizer state."""
    model = nn.ModuleList(modules)
    # a forward without a backward, as in evaluation, leaves FSDP's root unsharded: its shards are alive, too
    shards = [t for p in sharded_parameters(model) for t in (p, p.grad) if t is not None]
    return list(map(local_of, (*static_tensors(model, (), optimizer), *shards)))
