"""The loop of a case by chance: its models under their wrapper, its steps, and what each step leaves behind."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.model_trace import call_model, loss_of
from jettison.dryrun.counter import allocation_deltas, measured_peak, static_tensors, unique_bytes
from jettison.dryrun.op_costs import MeasuredWorkspace, OpPrice, measure_ops
from jettison.train.engine import alive
from jettison.train.phase_memory import MemoryMeter
from support.random_programs import VOCABULARY, Case, LossFn, Program
from zoo.harness import SEED, Step, seed, state_of, streams

MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "SGD": torch.optim.SGD,
    "SGD momentum": partial(torch.optim.SGD, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}
OwnStep = Callable[..., Any]


@contextlib.contextmanager
def world(case: Case) -> Iterator[None]:
    """A process group of one rank, where the wrapper wants one."""
    if case.wrapper not in ("ddp", "fsdp2", "pipeline"):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        store = distributed.FileStore(str(Path(folder) / "store"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()


@dataclass(kw_only=True)
class Loop:
    """A case's models, wrapped, with the optimizer over what is trained.

    Args:
        models: as the loop calls them; of a pipeline its schedule.
        modules: those whose parameters are there.
        step: forwards and backwards; None where the loop runs one of each.
        kernels: what they take inside a call, where nothing else shows it.
    """

    models: list[Any]
    modules: list[nn.Module]
    optimizer: torch.optim.Optimizer | None
    step: OwnStep | None
    planning: list[str] = field(default_factory=list)
    kernels: dict[str, OpPrice] = field(default_factory=dict)


def loop_of(case: Case, program: Program) -> Loop:
    """The same bits at every call."""
    seed(case.seed)
    modules = [program.model().train()]
    _freeze(modules[0], case.frozen)
    if case.wrapper == "models":
        modules.append(program.model().requires_grad_(False))
    models: list[Any] = list(modules)
    if case.wrapper == "ddp":
        views = case.seed % 2 == 0
        # the profiler knows what it sees freed only if it saw it made: buckets are made anew in the second forward
        made: list[Any] = []
        allocation_deltas(lambda: made.append(DistributedDataParallel(modules[0], gradient_as_bucket_view=views)))
        models = made
    elif case.wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (1,))
        for block in _blocks(modules[0]) if case.seed % 4 else ():
            fully_shard(block, mesh=mesh, reshard_after_forward=case.seed % 3 > 0)
        fully_shard(modules[0], mesh=mesh)
    elif case.wrapper == "pipeline":
        kind = Schedule1F1B if case.seed % 2 else ScheduleGPipe
        stage = PipelineStage(modules[0], 0, 1, torch.device("cpu"))
        models = [kind(stage, case.parts, _next_word)]
    trained = [p for p in modules[0].parameters() if p.requires_grad]
    optimizer = MADE[case.optimizer](trained, lr=1e-3) if case.optimizer != "none" else None
    return Loop(models=models, modules=modules, optimizer=optimizer, step=step_of(case, program.loss_fn))


def _freeze(model: nn.Module, share: float) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters[: min(int(share * len(parameters)), len(parameters) - 1)]:
        parameter.requires_grad_(False)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules in it."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=len, default=[])


def _next_word(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def step_of(case: Case, loss_fn: LossFn | None) -> OwnStep | None:
    """What `auto_checkpoint` is given as ``step=``."""

    def loss(model: Any, batch: Any) -> Tensor:
        return loss_of(call_model(model, batch), loss_fn)

    def once(model: Any, batch: Any) -> Tensor:
        found = loss(model, batch)
        found.backward()
        return found.detach()

    def accumulated(model: Any, batch: Any) -> Tensor:
        total = torch.zeros(())
        for part in cut(batch, case.parts):
            found = loss(model, part) / case.parts
            found.backward()
            total += found.detach()
        return total

    def two_forwards(model: Any, batch: Any) -> Tensor:
        first, *_, last = cut(batch, max(2, case.parts)) if case.parts > 1 else [batch, batch]
        found = loss(model, first) + 0.5 * loss(model, last)
        found.backward()
        return found.detach()

    def autocast(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(model, batch)
        found.backward()
        return found.detach()

    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def scaled(model: Any, batch: Any) -> Tensor:
        found = loss(model, batch)
        scaler.scale(found).backward()
        return found.detach()

    def clipped(model: Any, batch: Any) -> Tensor:
        found = once(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return found

    def preferred(policy: Any, reference: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            before = loss(reference, batch)
        found = functional.softplus(loss(policy, batch) - before)
        found.backward()
        return found.detach()

    def scheduled(schedule: Any, batch: Any) -> None:
        schedule.step(batch[0], target=batch[0] % VOCABULARY, return_outputs=False)

    if case.wrapper in ("models", "pipeline"):
        return preferred if case.wrapper == "models" else scheduled
    if case.wrapper in ("plain", "changing") or (case.how == "once" and case.wrapper != "changing step"):
        return None
    steps = {"once": once, "accumulated": accumulated, "two forwards": two_forwards}
    return {**steps, "autocast": autocast, "scaler": scaled, "clipped": clipped}[case.how]


def cut(batch: Any, parts: int) -> list[Any]:
    """The batch in parts of as many rows."""
    rows = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)).shape[0] // parts
    return [tree_map(lambda leaf, at=at: leaf[at * rows : (at + 1) * rows], batch) for at in range(parts)]


def untold(batch: Any, step: int) -> None:
    """Nobody asked."""


def train(
    case: Case,
    program: Program,
    loop: Loop,
    tell: Callable[[Any, int], None] = untold,
    ended: Callable[[Any, int], None] = untold,
) -> list[Step]:
    """Every step of the case, and what it left behind.

    Args:
        tell: is told of the batch before its step.
        ended: and after it.
    """
    seed(SEED)
    losses: list[Any] = []
    done: list[Step] = []
    met: list[Any] = []

    def step(batch: Any) -> None:
        output = None
        if loop.step is not None:
            loss = loop.step(*loop.models, batch)
        else:
            output = call_model(loop.models[0], batch)
            loss = loss_of(output, program.loss_fn)
            if not case.keep_output:
                output = None
            loss.backward()
        if loop.optimizer is not None:
            loop.optimizer.step()
        losses.append(torch.zeros(()) if loss is None else loss.detach())

    for number in range(program.steps):
        batch = program.batch(number)
        _zero(case, loop)
        if case.evaluates and number and case.wrapper != "pipeline":
            _evaluate(loop, batch, keeps_whole=case.seed % 3 == 0)
        tell(batch, number)
        shape = tree_map(lambda leaf: leaf.shape if isinstance(leaf, Tensor) else leaf, batch)
        if loop.step is None and case.wrapper != "shapes" and met and shape not in met:
            step(batch)  # planned in: the kernels that are tried use the profiler themselves
            peak = 0
        else:
            peak = peak_of(case, loop, batch, partial(step, batch))
        ended(batch, number)
        met.append(shape)
        state = {name: _whole(t).clone() for name, t in _state(loop).items()}
        done.append(Step(loss=losses.pop().clone(), state=state, streams=streams(), peak_bytes=peak))
    return done


def peak_of(case: Case, loop: Loop, batch: Any, step: Callable[[], None]) -> int:
    """Of one step. Buckets of DistributedDataParallel are there all along, and no operator makes them."""
    if case.wrapper == "fsdp2":
        held = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
        optimizer = loop.optimizer or torch.optim.SGD(loop.modules[0].parameters())  # one without a state
        inside = MeasuredWorkspace(loop.kernels)
        meter = MemoryMeter(
            torch.device("cpu"), 1, lambda: [*alive(loop.modules, optimizer), *held], storages=True, workspace=inside
        )
        with meter.step() as peaks, meter.phase("step"):
            step()
        found = peaks()
        assert found is not None
        with torch.random.fork_rng(devices=[]):
            loop.kernels.update(measure_ops(inside.unknown.values()))  # the first step runs without what it finds
        return found.peak_bytes
    static_bytes = _static_bytes(case, loop, batch)  # nothing may hold gradients in the step: buckets replace them
    return static_bytes + measured_peak(step, static_tensors=()).peak_bytes


def _static_bytes(case: Case, loop: Loop, batch: Any) -> int:
    static = [t for module in loop.modules for t in static_tensors(module)]
    nbytes = unique_bytes([*static, *static_tensors(nn.Module(), batch, loop.optimizer)])
    if case.wrapper != "ddp":
        return nbytes
    trained = [p for p in loop.modules[0].parameters() if p.requires_grad]
    beside = sum(p.nbytes for p in trained)
    if case.seed % 2 == 0:  # gradients are views of buckets
        beside -= unique_bytes(p.grad for p in trained if p.grad is not None)
    return nbytes + beside


def _zero(case: Case, loop: Loop) -> None:
    for parameter in (p for module in loop.modules for p in module.parameters()):
        if parameter.grad is None:
            continue
        if case.gradients_preallocated:
            parameter.grad.zero_()
        else:
            parameter.grad = None


def _evaluate(loop: Loop, batch: Any, *, keeps_whole: bool) -> None:
    for model in loop.models:
        model.eval()
        with torch.no_grad():
            call_model(model, batch)
        model.train()
        for block in model.modules() if keeps_whole else ():
            if isinstance(block, FSDPModule) and block is not model:
                block.reshard()  # else the step begins with what an evaluation left whole


def _state(loop: Loop) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, module in enumerate(loop.modules):
        found |= {f"{name} of model {number}": t for name, t in state_of(module).items()}
    return found


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
