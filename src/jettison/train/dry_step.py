"""A step of the loop on fake tensors, for a planner: the same engine, over fake copies of this rank's modules.

NOTE [ Imagined ranks ]
Fake copies are cut and sharded as their originals are, on a mesh whose groups send nothing, and torch's own FSDP2 and
pipeline schedules run on them. So whatever those allocate is counted: gathered parameters, whole gradients before they
are scattered, copies for a collective, micro-batches in flight, buffers that are received into. One rank dry-runs
alone, since nobody is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from jettison.capture.fakes import fake_copy, fake_mode
from jettison.capture.model_trace import ModelTrace
from jettison.capture.sharded import sharded_parameters
from jettison.measure.memory import AllocationCounter
from jettison.train.engine import Engine, MicroBatch
from jettison.train.evaluation import undisturbed
from jettison.train.optim import make_optimizer
from jettison.train.rank_layout import Places
from jettison.train.recipe import OptimizerSection


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
        """Of an engine whose parts are not sharded yet. All ranks call it.

        Args:
            rows: of one micro-batch, as the engine gets them.
            evaluates: between steps; that has to fit as well, and counts as a part of the forward.
        """
        self._evaluates = evaluates
        self.mode: FakeTensorMode = fake_mode(allow_non_fake_inputs=True)
        self.modules: Sequence[nn.Module] = [fake_copy(part, self.mode, rows.device) for part in engine.parts]
        self._imagined = places.imagined()
        for module in self.modules:
            self._imagined.shard(module)
        self.optimizer = make_optimizer(section, (p for module in self.modules for p in module.parameters()))
        self._engine, self._rows = engine, rows
        self._micro_batches = micro_batches
        self._buckets = places.averaging == "ddp"
        self._engines: dict[int, Engine] = {}

    @property
    def last(self) -> Sequence[torch.optim.Optimizer]:
        """See `DryStep`."""
        return (self.optimizer,)

    def around(self, trace: ModelTrace) -> AbstractContextManager[None]:
        """See `DryStep`."""
        return trace.context()

    def alive(self) -> Iterable[Tensor]:
        """Buckets of DistributedDataParallel are gradients that are there from the start."""
        if self._buckets:
            for parameter in (p for module in self.modules for p in module.parameters() if p.requires_grad):
                parameter.grad = torch.empty_like(parameter)
        return alive(self.modules, self.optimizer)

    def leave_gradients(self, counter: AllocationCounter) -> None:
        """See `DryStep`."""
        self.passes(counter)

    def passes(self, counter: AllocationCounter) -> tuple[int, int, None]:
        """See `DryStep`. Where passes alternate, both peaks are that of them all."""
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
        """The peak of an evaluation, which has one micro-batch at a time, beside what steps receive into.

        It comes before the passes, whose gradients the optimizer wants; but for the first ones, which nobody measures.
        """
        if not self._evaluates or not self._engines:
            return 0
        self.optimizer.zero_grad(set_to_none=not self._buckets)
        engine = next(iter(self._engines.values()))
        counter.reset_peak()
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), undisturbed(engine):
            engine.evaluate([MicroBatch(rows=self._rows.clone(), seed=0) for _ in range(self._micro_batches)])
        return counter.peak_bytes + left * engine.micro_batch_bytes()

    def _run(self, micro_batches: int, counter: AllocationCounter, start: int) -> tuple[int, int]:
        peaks: dict[str, int] = {}

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            counter.reset_peak()
            counter.phase(name, first=not peaks)
            yield
            torch.clear_autocast_cache()  # leaving autocast does it, but for the one that the recording was made under
            peaks[name] = max(counter.peak_bytes, peaks.get(name, 0))

        if micro_batches not in self._engines:
            self._engines[micro_batches] = made = self._engine.imagined(self.modules, self._imagined)
            made.start(micro_batches)
        others = counter.live_bytes - start  # what another number of micro-batches was received into
        batches = [MicroBatch(rows=self._rows.clone(), seed=0) for _ in range(micro_batches)]
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            self._engines[micro_batches].forward_backward(batches, phase)
        passes = peaks.get("passes", 0)
        return peaks.get("forward", passes) - others, peaks.get("backward", passes) - others


def alive(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What lives before a step: parameters, buffers, gradients, the optimizer's state."""
    parameters = [p for module in modules for p in module.parameters()]
    # a forward without a backward, as an evaluation is, leaves FSDP's root with whole ones: the parts live beside them
    parameters += [p for module in modules for p in sharded_parameters(module)]
    buffers = [b for module in modules for b in module.buffers()]
    state = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    found = [*parameters, *buffers, *gradients, *state]
    return [t.to_local() if isinstance(t, DTensor) else t for t in found]
