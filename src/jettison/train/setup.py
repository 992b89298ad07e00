"""From a recipe to a run that is ready for its next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from jettison.errors import UsageError
from jettison.spec.layout import Layout, Schedule
from jettison.train.checkpoint import Checkpoints, RunState
from jettison.train.data import Batches, open_corpus
from jettison.train.engine import Engine, WholeModel, named_parameters
from jettison.train.flops import StepWork, peak_flops_per_second, spec_flops, traced_flops
from jettison.train.memory import MemoryMeter
from jettison.train.optim import ensure_state, make_optimizer, saved_tensors
from jettison.train.order import Order, derived_seed
from jettison.train.pipeline import Pipeline
from jettison.train.places import Places
from jettison.train.recipe import TrainRecipe
from jettison.train.tools import Built, Planned, Rehearsal, Say, Tools
from jettison.train.world import World


@dataclass(kw_only=True)
class Session:
    """Everything that a step needs, and the number of steps done."""

    recipe: TrainRecipe
    world: World
    layout: Layout
    accumulation: int
    data_rank: int
    batches: Batches
    engine: Engine
    optimizer: torch.optim.Optimizer
    planned: Planned | None
    work: StepWork
    meter: MemoryMeter
    checkpoints: Checkpoints | None
    step: int = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained on this rank."""
        return [p for _, p in named_parameters(self.engine) if p.requires_grad]

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds."""
        return saved_tensors(named_parameters(self.engine), self.engine.parts, self.optimizer)

    def state(self) -> RunState:
        """What a checkpoint says."""
        batch, layout = self.recipe.batch, self.layout
        return RunState(
            step=self.step, steps=self.recipe.steps, seed=self.recipe.seed, global_batch=batch.global_batch,
            seq=batch.seq, data=self.batches.corpus.digest, world=self.world.size,
            layout=f"dp {layout.dp} zero {layout.zero} tp {layout.tp} sp {layout.sp} pp {layout.pp}",
        )  # fmt: skip


def prepare(recipe: TrainRecipe, world: World, tools: Tools, *, must_resume: bool, say: Say, warn: Say) -> Session:
    """Build, spread, plan and perhaps resume.

    Raises:
        UsageError: what was asked makes no sense on this machine or with these files.
        Infeasible: no plan fits the budget.
    """
    layout, accumulation = world.together(lambda: _layout(recipe, world.size))
    say("reading the data")
    batches = world.together(lambda: _batches(recipe))
    say("building the model")
    torch.manual_seed(derived_seed(recipe.seed, "weights"))
    built = world.together(lambda: tools.build(recipe.model, seq=recipe.batch.seq, device=world.device))
    world.together(lambda: batches.corpus.check_vocabulary(built.spec.vocab if built.spec else None))
    work = _work(recipe, layout, accumulation, built, tools, batches)
    places = Places.of(layout, world, mixed=recipe.precision == "bf16")
    world.together(lambda: places.split_layers(built.model))
    engine = world.together(lambda: _engine(recipe, built, places, world.device))
    example = batches.rows(0, 0).to(world.device)
    held = _gradient_bytes(built.model) if layout.dp > 1 or accumulation > 1 else 0
    rehearsals = [
        Rehearsal(
            model=part, batch=batch, loss_fn=loss_fn, reserve_bytes=held,
            optimizer=make_optimizer(recipe.optimizer, part.parameters()),
        )
        for part, batch, loss_fn in engine.calls(example)
    ]  # fmt: skip
    with engine.context():
        planned = _plan(recipe, world, tools, rehearsals, say)
    work = replace(work, recomputed_flops=world.sum(planned.recomputed_flops if planned else 0)[0] * accumulation)
    for part in engine.parts:
        places.shard(part)
    optimizer = make_optimizer(recipe.optimizer, (p for part in engine.parts for p in part.parameters()))
    world.together(lambda: engine.start(accumulation))
    session = Session(
        recipe=recipe, world=world, layout=layout, accumulation=accumulation, data_rank=places.data_rank,
        batches=batches, engine=engine, optimizer=optimizer, planned=planned, work=work,
        meter=MemoryMeter(
            world.device, recipe.log.memory_steps, _alive(engine, optimizer, places.averaging == "ddp"),
            storages=world.size > 1 and places.averaging != "fsdp",
        ),
        checkpoints=Checkpoints(recipe.checkpoint, world, warn) if recipe.checkpoint.folder else None,
    )  # fmt: skip
    _resume(session, must_resume=must_resume, say=say)
    return session


def _layout(recipe: TrainRecipe, ranks: int) -> tuple[Layout, int]:
    """The layout, and the micro-batches of a step on one data-parallel rank."""
    layout = recipe.layout.over(ranks)
    if recipe.plan.budget is not None and (layout.zero or recipe.precision == "bf16"):
        raise UsageError(
            "plan.budget: no rehearsal counts FSDP2's gathered parameters yet, which layout.zero and precision "
            '"bf16" stand for; give plan.policy, such as "selective-op" or "full"'
        )
    if layout.pp > 1 and (recipe.plan.budget or recipe.plan.file):
        raise UsageError(
            f"plan.{recipe.plan.given[0]}: no rehearsal counts the micro-batches that a stage has in flight yet; give "
            'plan.policy, such as "selective-op" or "full"'
        )
    if layout.schedule is Schedule.ZERO_BUBBLE and layout.zero == 3:
        raise UsageError(
            "layout: with zero 3, torch's split backward misses gradients of parameters that were gathered again; "
            "expected zero 2 with the schedule zero-bubble"
        )
    if layout.pp > 1 and recipe.precision == "bf16-autocast":
        raise UsageError('precision: got "bf16-autocast" with layout.pp; expected "bf16" or "fp32"')
    return layout, recipe.batch.accumulation(layout.dp)


def _engine(recipe: TrainRecipe, built: Built, places: Places, device: torch.device) -> Engine:
    if places.layout.pp > 1:
        return Pipeline(built.model, places, recipe.batch, device)
    return WholeModel(built, places, autocast=recipe.precision == "bf16-autocast", device=device)


def _batches(recipe: TrainRecipe) -> Batches:
    corpus = open_corpus(recipe.data, recipe.batch.seq)
    order = Order(corpus.windows, recipe.seed)
    return Batches(corpus, order, recipe.batch.global_batch, recipe.batch.micro_batch)


def _plan(recipe: TrainRecipe, world: World, tools: Tools, rehearsals: list[Rehearsal], say: Say) -> Planned | None:
    """One rank decides for all: prices are timed, and two ranks would not time alike."""
    if not recipe.plan.given or recipe.plan.policy == "none":
        return None
    decision = world.from_leader(lambda: tools.decide(rehearsals[0], recipe.plan, say))
    done = world.together(lambda: [tools.apply(rehearsal, decision) for rehearsal in rehearsals])
    return replace(done[0], recomputed_flops=sum(planned.recomputed_flops for planned in done))


def _work(
    recipe: TrainRecipe, layout: Layout, accumulation: int, built: Built, tools: Tools, batches: Batches
) -> StepWork:
    """Of the whole model, before ranks share it."""
    peak = peak_flops_per_second(recipe.log, recipe.precision)
    flops: float | None = None
    if built.spec is not None:
        flops = spec_flops(built.spec, sequences=recipe.batch.global_batch, seq=recipe.batch.seq)
    elif peak is not None:
        device = next(built.model.parameters()).device
        forward = tools.forward_flops(built, built.call(batches.rows(0, 0).to(device)))
        flops = None if forward is None else traced_flops(forward, micro_batches=accumulation * layout.dp)
    return StepWork(model_flops=flops, devices=layout.world, peak_flops_per_second=peak)


def _resume(session: Session, *, must_resume: bool, say: Say) -> None:
    checkpoints = session.checkpoints
    found = session.world.together(lambda: _found(checkpoints, session.recipe, must_resume=must_resume))
    if found is None or checkpoints is None:
        return
    say(f"resuming from {found}")
    ensure_state(session.optimizer)
    state = checkpoints.load(found, session.tensors(), session.state())
    session.step = state.step


def _found(checkpoints: Checkpoints | None, recipe: TrainRecipe, *, must_resume: bool) -> Path | None:
    found = checkpoints.find() if checkpoints is not None else None
    if found is None and must_resume:
        where = recipe.checkpoint.folder or "no folder: the recipe has no checkpoint.folder"
        raise UsageError(f"--resume: there is no checkpoint in {where}")
    return found


def _gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _alive(engine: Engine, optimizer: torch.optim.Optimizer, buckets: bool) -> Callable[[], list[Tensor]]:
    """What lives before a step. DistributedDataParallel's buckets do from the start, gradients only later point there:
    until then tensors without values stand for them.
    """

    def alive() -> list[Tensor]:
        parameters = [p for part in engine.parts for p in part.parameters()]
        buffers = [b for part in engine.parts for b in part.buffers()]
        state = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if buckets and not gradients:
            gradients = [torch.empty_like(p, device="meta") for p in parameters if p.requires_grad]
        found = [*parameters, *buffers, *state, *gradients]
        return [t.to_local() if isinstance(t, DTensor) else t for t in found]

    return alive


def recipe_folder(recipe: TrainRecipe) -> Path:
    """Where the log goes."""
    return Path(recipe.log.folder)
