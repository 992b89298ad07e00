"""Setup of a run from its recipe, up to its next step."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.capture.fake_copies import fake_copy, fake_mode
from jettison.capture.tracer import trace_model
from jettison.core.errors import Infeasible, TraceError, UsageError
from jettison.core.parse_units import parse_bytes
from jettison.core.progress import Progress, silent
from jettison.cost.flops import PASSES, forward_flops, utilisation
from jettison.dryrun.step import DryStep
from jettison.models.pretrained import HubForm, hub_form
from jettison.parallel.recompute_agreement import BudgetVerdict
from jettison.parallel.styles import can_split_backward
from jettison.planner.budget import AskedBudget
from jettison.planner.kept_plans import Keeping
from jettison.spec.hardware import hardware
from jettison.spec.layout import Layout, Schedule
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run
from jettison.train.build_model import Built, build, check_occurs, fill, in_parts, keep_apart, vocabulary
from jettison.train.checkpoint import Checkpoints, RunState, described_model, optimizer_state, schedule
from jettison.train.data import Batches, ShuffledOrder, TextDigest, derived_seed, open_corpus, surveyed
from jettison.train.engine import Engine, EvaluationSet, LoopStep, WholeModel, alive, evaluation_set, named_parameters
from jettison.train.optim import ensure_state, make_optimizer, saved_tensors
from jettison.train.phase_memory import MemoryMeter
from jettison.train.pipeline import PipelineEngine
from jettison.train.rank_layout import Places
from jettison.train.rank_plan import RankDecision, RankModule, RankPlans, carry_out, decide
from jettison.train.ranks import World, agreed, joined, same_everywhere
from jettison.train.recipe import LogSection, PlanSection, TrainRecipe
from jettison.train.run_folder import claimed, require_place


@dataclass(kw_only=True)
class Session:
    """State of a run: the objects of a step, and the number of steps done."""

    recipe: TrainRecipe
    world: World
    layout: Layout
    accumulation: int
    data_rank: int
    batches: Batches
    text: TextDigest
    model: Mapping[str, Any]
    engine: Engine
    optimizer: torch.optim.Optimizer
    hub: HubForm | None
    evaluation: EvaluationSet | None
    planned: RankPlans | None
    work: StepWork
    meter: MemoryMeter
    checkpoints: Checkpoints | None
    say: Progress
    warn: Progress
    step: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        return _sizes(self.recipe, self.layout)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in named_parameters(self.engine) if p.requires_grad]

    def eval_meter(self) -> MemoryMeter:
        """Meter for evaluations; on a CPU it measures the first, if steps are measured."""
        steps = min(1, self.recipe.log.memory_steps)
        return _meter(self.world, steps, self.engine, self.optimizer, self.recipe.model.compile)

    def tensors(self) -> Mapping[str, Tensor]:
        return saved_tensors(named_parameters(self.engine), self.engine.parts, self.optimizer)

    def state(self) -> RunState:
        return replace(_first_state(self.recipe, self.layout, self.text, self.model), step=self.step)


def _sizes(recipe: TrainRecipe, layout: Layout) -> dict[str, int]:
    _, shards = recipe.layout.spread(layout.dp)
    names = ("dp", "zero", "shards", "tp", "sp", "cp", "pp")
    return {name: shards if name == "shards" else getattr(layout, name) for name in names}


def _first_state(recipe: TrainRecipe, layout: Layout, text: TextDigest, model: Mapping[str, Any]) -> RunState:
    return RunState(
        step=0,
        steps=recipe.steps,
        seed=recipe.seed,
        global_batch=recipe.batch.global_batch,
        seq=recipe.batch.seq,
        data=text.digest,
        world=layout.world,
        layout=" ".join(f"{name} {size}" for name, size in _sizes(recipe, layout).items()),
        model=model,
        optimizer=optimizer_state(recipe.optimizer),
        schedule=schedule(recipe),
    )


@contextmanager
def prepared(
    make: Callable[[], TrainRecipe], *, must_resume: bool = False, say: Progress = silent, warn: Progress = silent
) -> Iterator[Session]:
    """Context of a run: all ranks join, read one recipe, and prepare; the leading one shows progress and warnings."""
    with joined() as world, ExitStack() as held:
        if not world.leads:
            say = warn = silent
        recipe = world.together(make)
        same_everywhere(recipe, world)
        yield prepare(recipe, world, held, must_resume=must_resume, say=say, warn=warn)


def prepare(
    recipe: TrainRecipe, world: World, held: ExitStack, *, must_resume: bool, say: Progress, warn: Progress
) -> Session:
    """Build, shard and plan the model, and resume from a checkpoint, if any; ``held`` releases the run's folders. Raise
    `UsageError` if the recipe does not fit this machine or these files, `Infeasible` if no plan fits the budget.
    """
    layout, accumulation = world.together(lambda: _layout(recipe, world.size))
    world.together(lambda: held.enter_context(_folders(recipe, world, warn)))
    checkpoints = Checkpoints(recipe.checkpoint, world, warn) if recipe.checkpoint.folder else None
    found = world.together(lambda: _found(checkpoints, recipe, must_resume=must_resume))
    if checkpoints is not None and found is not None:
        say(f"checking {found}")
        checkpoints.check(found)
    say("reading the data")
    batches = world.together(lambda: _batches(recipe))
    text = surveyed(batches.corpus, world)
    say("building the model")
    torch.manual_seed(derived_seed(recipe.seed, "weights"))
    built = world.together(lambda: build(recipe.model, seq=recipe.batch.seq, device=world.device))
    if built.whole_since and world.size > 1:
        warn(f"every rank builds the full model before it keeps its shard: {built.whole_since}")
    world.together(lambda: text.check_vocabulary(vocabulary(built)))
    evaluation = evaluation_set(recipe, vocabulary(built), world)
    if recipe.data.document_end is not None:
        built = world.together(lambda: _apart(recipe, built, batches))
    model = described_model(recipe.model, built.model)
    if checkpoints is not None and found is not None:
        checkpoints.require_same_run(found, _first_state(recipe, layout, text, model))
    hub = world.together(lambda: _hub_form(recipe, built, world))
    work = _work(recipe, layout, accumulation, built, batches)
    spread = recipe.layout.spread(layout.dp)
    places = Places.of(layout, world, spread=spread, mixed=recipe.precision == "bf16")
    world.together(lambda: places.split_layers(built.model))
    if (context := places.context) is not None:
        bf16 = recipe.precision != "fp32"
        built = world.together(lambda: in_parts(built, context, end=recipe.data.document_end, bf16=bf16))
    engine = world.together(lambda: _engine(recipe, replace(built, weights=None), places, world.device))
    example = batches.rows(0, 0).to(world.device)
    dry_step = None
    if recipe.plan.budget is not None:
        given = engine, places, recipe.optimizer, example, accumulation
        dry_step = world.together(partial(LoopStep, *given, evaluates=recipe.eval.data is not None))
    for part in engine.parts:
        places.shard(part)
    fill(engine.parts, dict(named_parameters(engine)), built, world, say)
    calls = world.together(lambda: list(engine.calls(example, accumulation)))
    mode = None if dry_step is None else dry_step.mode
    parts = [replace(part, mode=mode, compile=recipe.model.compile) for part in calls]
    with engine.context():
        planned = _plan(recipe, world, places, parts, dry_step, say)
    del dry_step
    gc.collect()  # real tensors in the cycles of planning would stay into the first steps
    flops = world.merged(planned.recomputed_flops if planned else 0, operator.add) * accumulation
    work = replace(work, recomputed_flops=flops)
    optimizer = make_optimizer(recipe.optimizer, (p for part in engine.parts for p in part.parameters()))
    world.together(lambda: engine.start(accumulation))
    session = Session(
        recipe=recipe,
        world=world,
        layout=layout,
        accumulation=accumulation,
        data_rank=places.data_rank,
        batches=batches,
        text=text,
        model=model,
        engine=engine,
        optimizer=optimizer,
        hub=hub,
        evaluation=evaluation,
        planned=planned,
        work=work,
        meter=_meter(world, recipe.log.memory_steps, engine, optimizer, recipe.model.compile),
        checkpoints=checkpoints,
        say=say,
        warn=warn,
    )
    if checkpoints is not None and found is not None:
        say(f"resuming from {found}")
        ensure_state(optimizer)
        session.step = checkpoints.load(found, session.tensors(), session.state()).step
    return session


def _meter(
    world: World, steps_on_cpu: int, engine: Engine, optimizer: torch.optim.Optimizer, compiling: str | None
) -> MemoryMeter:
    storages = world.size > 1 and compiling is None  # dispatch modes do not see allocations of compiled code
    return MemoryMeter(world.device, steps_on_cpu, lambda: alive(engine.parts, optimizer), storages=storages)


def _folders(recipe: TrainRecipe, world: World, warn: Progress) -> AbstractContextManager[None]:
    wanted = {"log.folder": Path(recipe.log.folder)} if world.leads else {}  # other ranks write no log
    if recipe.checkpoint.folder is not None:
        wanted["checkpoint.folder"] = Path(recipe.checkpoint.folder)
    return claimed(wanted, leads=world.leads, rank=world.rank, warn=warn)


def _layout(recipe: TrainRecipe, ranks: int) -> tuple[Layout, int]:
    layout = recipe.layout.over(ranks)
    if layout.schedule is Schedule.ZERO_BUBBLE and layout.zero == 3:
        raise UsageError(
            "layout: with zero 3, torch's split backward misses gradients of parameters that were all-gathered again; "
            "expected zero 2 with the schedule zero-bubble"
        )
    if layout.schedule is Schedule.ZERO_BUBBLE and layout.sp and not can_split_backward():
        raise UsageError(
            f"layout: torch {torch.__version__} loses sequence-parallel layers between the halves of a split backward; "
            "expected sp = false with the schedule zero-bubble, the schedule 1f1b, or torch 2.13 or newer"
        )
    recipe.layout.spread(layout.dp)
    return layout, recipe.batch.accumulation(layout.dp)


def _apart(recipe: TrainRecipe, built: Built, batches: Batches) -> Built:
    end = recipe.data.document_end
    assert end is not None
    check_occurs(batches.corpus, end)
    return keep_apart(built, end, bf16=recipe.precision != "fp32")


def _hub_form(recipe: TrainRecipe, built: Built, world: World) -> HubForm | None:
    """Return the Hub format of the exported weights, tested before training."""
    if recipe.export.folder is None:
        return None
    if world.leads:
        require_place(recipe.export)
    source, config = recipe.model.pretrained, recipe.model.pretrained or recipe.model.config
    return hub_form(
        built.model,
        described=None if config is None else Path(config),
        source=None if source is None else Path(source),
        positions=recipe.batch.seq,
    )


def _engine(recipe: TrainRecipe, built: Built, places: Places, device: torch.device) -> Engine:
    autocast = recipe.precision == "bf16-autocast"
    if places.layout.pp > 1:
        end = recipe.data.document_end
        return PipelineEngine.of(built.model, places, recipe.batch, device, autocast=autocast, document_end=end)
    return WholeModel(built, places, device, autocast=autocast)


def _batches(recipe: TrainRecipe) -> Batches:
    corpus = open_corpus(recipe.data, recipe.batch.seq)
    order = ShuffledOrder(corpus.windows, recipe.seed)
    return Batches(corpus, order, recipe.batch.global_batch, recipe.batch.micro_batch)


KEPT_PLAN: Final = "kept-plan.json"
"""File of the kept plan, in the checkpoints' folder."""


def _plan(
    recipe: TrainRecipe, world: World, places: Places, parts: list[RankModule], dry_step: DryStep | None, say: Progress
) -> RankPlans | None:
    """Plan on one rank for all ranks of the same stage, since two ranks would measure different times."""
    wanted = recipe.plan
    if not wanted.given or wanted.policy == "none":
        if recipe.model.compile is None:
            return None
        wanted = PlanSection(policy="none")  # compiled, each as without a plan

    def decided() -> tuple[RankDecision | None, BudgetVerdict]:
        try:
            own = decide(parts, wanted, dry_step, say, _keeping(recipe, places)) if places.plans else None
            return own, BudgetVerdict.fits(())
        except Infeasible as error:
            if places.layout.pp > 1:
                error.reason = f"Stage {places.stage} of the pipeline needs this. {error.reason}"
            return None, BudgetVerdict.refuses(error)

    own, verdict = world.together(decided)
    refusal = world.merged(verdict, operator.or_).error
    if refusal is not None:
        raise agreed(refusal)
    highest = int(world.most(max((plan.predicted.peak_bytes for plan in own.plans), default=0) if own else 0))
    if own is not None:
        world.publish(f"plan of stage {places.stage}", own)
    # rank 0, which is in stage 0, keeps the plans of all stages; other ranks apply that of their own
    stages = range(places.layout.pp) if world.leads else (places.stage,)
    made: list[RankDecision] = [world.published(f"plan of stage {stage}") for stage in stages]
    decision = made[0]
    flops = world.together(lambda: carry_out(parts, decision, wanted.host_budget))
    rounds = range(len(decision.plans))  # chunks go round the stages
    return RankPlans(
        recomputed_flops=flops,
        plans=tuple(found.plans[chunk] for chunk in rounds for found in made),
        predicted_peak_bytes=highest or None,
    )


def _keeping(recipe: TrainRecipe, places: Places) -> Keeping | None:
    """Keep plans next to checkpoints for resumed runs; settings that only read, write or end a run do not count."""
    if recipe.checkpoint.folder is None or recipe.plan.budget is None:
        return None
    asked = AskedBudget(nbytes=parse_bytes(recipe.plan.budget))
    left_out = {"lr", "min_lr", "warmup_steps", "decay_steps", "budget"}  # no bytes depend on rates
    options = {"budget": str(asked.nbytes), "layout": repr(places.layout), "stage": str(places.stage)}
    for name in ("model", "batch", "optimizer", "layout", "plan"):
        section = asdict(getattr(recipe, name))
        options[f"the recipe's {name}"] = repr({key: value for key, value in section.items() if key not in left_out})
    options |= {"the recipe's precision": recipe.precision, "evaluation": str(recipe.eval.data is not None)}
    return Keeping(where=Path(recipe.checkpoint.folder) / KEPT_PLAN, asked=asked, options=options)


def _work(recipe: TrainRecipe, layout: Layout, accumulation: int, built: Built, batches: Batches) -> StepWork:
    peak = peak_flops_per_second(recipe.log, recipe.precision)
    flops: float | None = None
    if built.spec is not None:
        flops = spec_flops(built.spec, sequences=recipe.batch.global_batch, seq=recipe.batch.seq)
    elif peak is not None:
        batch = built.call(batches.rows(0, 0))
        flops = traced_flops(built, batch, micro_batches=accumulation * layout.dp)
    return StepWork(model_flops=flops, devices=layout.world, peak_flops_per_second=peak)


def _found(checkpoints: Checkpoints | None, recipe: TrainRecipe, *, must_resume: bool) -> Path | None:
    found = checkpoints.find() if checkpoints is not None else None
    if found is None and must_resume:
        where = recipe.checkpoint.folder
        if where is None:
            raise UsageError("--resume: the recipe has no checkpoint.folder to resume from; add one")
        raise UsageError(f"--resume: there is no checkpoint in {where}")
    return found


# FLOPs of a step ------------------------------------------------------------------------------------------------------
#
# MFU counts one forward and two for its backward; HFU also counts recomputation. A multiply-add is 2, masked scores of
# attention count, and only matmuls and attention count.


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """FLOPs of a step over all ranks, and its recomputation's; peak FLOP/s of one device. None if unknown."""

    model_flops: float | None
    recomputed_flops: float = 0.0
    devices: int = 1
    peak_flops_per_second: float | None = None

    def mfu(self, seconds: float) -> float | None:
        return self._share(self.model_flops, seconds)

    def hfu(self, seconds: float) -> float | None:
        return self._share(None if self.model_flops is None else self.model_flops + self.recomputed_flops, seconds)

    def _share(self, flops: float | None, seconds: float) -> float | None:
        peak = self.peak_flops_per_second
        if flops is None or peak is None:
            return None
        return utilisation(flops, seconds=seconds, devices=self.devices, peak_flops_per_second=peak)


def spec_flops(spec: ModelSpec, *, sequences: int, seq: int) -> float:
    """FLOPs of training on this many sequences, without recomputation, by the closed form."""
    return PASSES * sequences * forward_flops(Run(model=spec, seq=seq))


def traced_flops(built: Built, batch: Any, *, micro_batches: int) -> float | None:
    """FLOPs from a trace of one micro-batch's forward; None if it cannot be traced."""
    mode = fake_mode(allow_non_fake_inputs=True)
    try:
        traced = trace_model(fake_copy(built.model, mode, "cpu"), batch, loss_fn=built.loss_fn, mode=mode)
    except TraceError:
        return None
    programs = [traced.root.program, *(traced.program(call) for call in traced.calls)]
    return float(PASSES * micro_batches * sum(op.flops for program in programs for op in program.ops))


def peak_flops_per_second(log: LogSection, precision: str) -> float | None:
    """FLOP/s of one device for matmuls of this precision, from the recipe or the accelerator's file."""
    if log.peak_tflops is not None:
        return log.peak_tflops * 1e12
    if log.gpu is None:
        return None
    rates = hardware(log.gpu).flops_per_second
    found = rates.bf16 if precision.startswith("bf16") else rates.fp32  # torch's fp32 matmuls are not tf32
    return None if found is None else float(found)
