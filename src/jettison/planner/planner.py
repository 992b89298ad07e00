"""From traces and a budget to plans whose step was dry-run on fake tensors.

The solver adds up levels of blocks; a dry run of the whole step is the judge (`solve.solver`).

NOTE [ Several parts ]
One module is planned alone, with the loop's own step as the judge. In a pipeline the bytes that a stage holds are
held once for every micro-batch in flight. So its solver is given as many times the bytes, and is asked for answers
between the fewest bytes and the fewest seconds, for all of a rank's stages at the same share of the range; a dry run of
the whole schedule judges each. Within a stage the answers are the solver's best; the equal share for all stages of a
rank is a design choice.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any, TypeVar

import torch
from torch import nn

from jettison.capture.ledger_entries import Roles
from jettison.capture.model_trace import BlockCall, BlockClass, ModelTrace
from jettison.capture.randomness import ADVANCE
from jettison.capture.recorder import RecordedOp, RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import Infeasible
from jettison.core.progress import Progress, silent
from jettison.cost.kernel import memory_seconds, op_seconds
from jettison.dryrun.block_levels import dry_run_block, dry_run_root, observe_block
from jettison.dryrun.compiled_blocks import MeasuredChoice, measure_choices, options_of_levels, seconds_of_levels
from jettison.dryrun.composed_peaks import Judge, why_whole
from jettison.dryrun.kernel_trial import OpRequest, TensorMeta
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks, step_of
from jettison.ledger.program import Program, Source
from jettison.planner.cpu_offload import (
    SEND,
    Host,
    is_timed,
    less_on_host,
    movable,
    option_at,
    with_moves,
    with_moves_of_compiled,
)
from jettison.planner.frontier_policies import (
    PACK,
    compiled_points,
    exactly,
    packing_seconds,
    policy_kept,
    policy_of,
    seconds_by_traffic,
    with_packs,
)
from jettison.runtime.lossless_packing import Pack
from jettison.runtime.recipe import costs_like
from jettison.solve.checkpoint_policy import Full, KeepAll
from jettison.solve.frontier import NONE_KEY, FrontierPoint, pareto_frontier
from jettison.solve.offload_options import MOST_CUTS, is_lean, lean_points
from jettison.solve.plan import LayerPlan, Plan, PlanTensor, PolicyName, Predicted, SolverReport, policy_name
from jettison.solve.problem import Choice, ProblemRegion, RegionOption, RootOption, SegmentOption, StepProblem
from jettison.solve.solver import Offer, Solution, fastest, refine
from jettison.spec.hardware import Hardware, usual_hardware
from jettison.spec.kernels import Device

UNSEEN_BYTES = 256  # Python numbers that C++ wraps into tensors live for one op, invisible to dispatch modes

Option = TypeVar("Option", RegionOption, RootOption)
Held = TypeVar("Held", RegionOption, SegmentOption)


@dataclass(frozen=True, kw_only=True)
class DryRunChoice:
    solutions: tuple[Solution, ...]
    parts: tuple[ModulePolicy, ...]
    step: StepPeaks

    @property
    def solution(self) -> Solution:
        return self.solutions[0]

    @property
    def part(self) -> ModulePolicy:
        return self.parts[0]

    @property
    def needs(self) -> int:
        """The smallest budget that it is sure to fit."""
        return self.step.peak_bytes + UNSEEN_BYTES

    @property
    def level(self) -> int:
        """The solver's peak; the sum over several parts."""
        return sum(solution.levels.peak_bytes for solution in self.solutions)

    @property
    def added_seconds(self) -> float:
        return sum(solution.levels.seconds for solution in self.solutions)


def make_planner(
    trace: ModelTrace,
    *,
    measure: bool = True,
    hardware: Hardware | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dry_step: DryStep | None = None,
    host: Host | None = None,
    composes: bool = False,
    progress: Progress = silent,
) -> Planner:
    """Return a planner, which measures and dry-runs one step. Takes seconds.

    Args:
        measure: measure the time of ops by running them; else estimate it from FLOPs and bytes.
        hardware: rates for these estimates; by default `usual_hardware`'s.
        optimizer: over the fake copy's parameters.
        dry_step: the loop's step, over a module like the trace's fake copy, in its mode; by default one batch through
            the fake copy, and ``optimizer``.
        host: host memory for offloading; None: nothing is offloaded.
        composes: many budgets will be requested: peaks are composed from dry runs of the step's parts.
    """
    pricing = Pricing(run=measure)
    step = dry_step or OneBatch(trace=trace, optimizer=optimizer)
    judge = Judge(trace=trace, dry_step=step, pricing=pricing)
    if composes:
        judge.problem = why_whole(trace, step, offloads=host is not None)
    hardware = hardware or usual_hardware(Device.CPU if trace.device_type is None else Device.CUDA)
    options = OptionsBuilder(judge=judge, hardware=hardware, host=host, progress=progress).options()
    for key, points in options.points.items():  # from the most bytes down; packed points are the least likely
        likely = sorted(points.values(), key=lambda p: (bool(p.packed), -p.kept_bytes))
        judge.offers[key] = [policy_of(trace.classes[key], point) for point in likely]
    say_what_was_bounded(trace, pricing)
    return Planner(trace=trace, options=options, judge=judge, host=host, progress=progress)


def say_what_was_bounded(trace: ModelTrace, pricing: Pricing) -> None:
    """Warn of ops that could not be priced by running them."""
    for name, problem in sorted(pricing.problems().items()):
        text = (
            f"{name} could not be run by itself ({problem}): its time is an estimate, and the memory that its kernel "
            "allocates inside is assumed to equal all its inputs and outputs"
        )
        if text not in trace.warnings:
            trace.warnings.append(text)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Planner of one step, made once by `make_planner`, for any number of budgets."""

    trace: ModelTrace
    options: Options
    judge: Judge
    host: Host | None = None
    progress: Progress = silent
    _choices: dict[Choice, DryRunChoice] = field(default_factory=dict, init=False)
    _answers: list[DryRunChoice] = field(default_factory=list, init=False)  # answers so far

    @functools.cached_property
    def tensors(self) -> tuple[PlanTensor, ...]:
        return plan_tensors(self.trace)

    def candidate(self, solution: Solution) -> DryRunChoice:
        """Dry-run a choice; each choice once."""
        choice = solution.choice
        if choice not in self._choices:
            part = self.part(choice)
            self._choices[choice] = DryRunChoice(solutions=(solution,), parts=(part,), step=self.judge.step(part))
        return self._choices[choice]

    def part(self, choice: Choice) -> ModulePolicy:
        chosen: dict[str, tuple[BlockClass, FrontierPoint]] = {}
        for call, key in zip(self.trace.calls, choice.regions, strict=True):
            point = self._point(call.class_key, key, self.trace.program(call))
            if call.name not in chosen or point.kept_bytes < chosen[call.name][1].kept_bytes:
                chosen[call.name] = self.trace.classes[call.class_key], point
        opaque = {
            c.name: next(o for o in r.options if o.key == key)
            for c, r, key in zip(self.trace.calls, self.options.problem.regions, choice.regions, strict=True)
            if self.trace.classes[c.class_key].stood_in
        }
        return ModulePolicy(
            trace=self.trace,
            policies={name: policy_of(cls, point) for name, (cls, point) in chosen.items()},
            root=exactly(self.trace.root.program, self.options.root_points[choice.root].kept),
            segments=[[c.name for c in self.trace.calls[a:b]] for a, b in choice.segments],
            opaque=opaque,
        )

    def _point(self, class_key: str, key: str, program: Program) -> FrontierPoint:
        if key != "segment":
            return self.options.points[class_key][key]
        kept = Full().kept(program)
        return FrontierPoint(key=key, kept=kept, kept_bytes=program.kept_bytes(kept), seconds=0.0)

    @functools.cached_property
    def smallest(self) -> DryRunChoice:
        return min(self._least(self._offer), self._least_untimed, key=lambda one: one.needs)

    @functools.cached_property
    def _offer(self) -> Offer:
        return Offer(self.options.problem)

    def _least(self, offer: Offer) -> DryRunChoice:
        """The choice with the fewest bytes. Segments are not dry-run but added up, which may be too low."""
        alone = [Offer(replace(offer.problem, segments=()))] if offer.problem.segments else []
        first, *others = sorted([offer, *alone], key=lambda one: one.least_bytes)
        least = self._answer(first, first.least_bytes)
        found = [self._answer(one, one.least_bytes) for one in others if one.least_bytes < least.needs]
        return min([least, *found], key=lambda one: one.needs)

    def _answer(self, offer: Offer, asked: int) -> DryRunChoice:
        return within_host(self.host, [offer], [asked], lambda solutions: self.candidate(*solutions))

    @functools.cached_property
    def minimum_budget_bytes(self) -> int:
        """A budget for which there is always a plan; a slightly smaller one may have one too."""
        return min(self.plain_budget_bytes, self._least_untimed.needs)

    @functools.cached_property
    def _least_untimed(self) -> DryRunChoice:
        return self._least(Offer(untimed(self.options.problem)))

    @property
    def plain_budget_bytes(self) -> int:
        return self.options.baseline.peak_bytes + UNSEEN_BYTES

    def plan(self, budget_bytes: int) -> DryRunChoice:
        """Return the fastest plan whose dry run fits. Raise `Infeasible` with the smallest plan's peak if none does."""
        if self.minimum_budget_bytes > budget_bytes:
            # no plan fits below the bytes allocated before a step
            fewest = self._least_untimed if self.options.baseline.static_bytes > budget_bytes else self.smallest
            if fewest.needs > budget_bytes:
                raise _infeasible(budget_bytes, self.minimum_budget_bytes, fewest)
        if self.plain_budget_bytes <= budget_bytes:  # no plan is needed, whatever the rounding of the solver's sums
            return self.candidate(self._offer.choose(2 * budget_bytes))

        def ask(asked: int) -> DryRunChoice:
            self.progress("choosing")
            return self._answer(self._offer, asked)

        self._answers.extend(refine(ask, budget_bytes, self._offer.least_bytes, known=self._answers))
        say_what_was_bounded(self.trace, self.judge.pricing)
        return fastest_held(self.host, self._choices.values(), budget_bytes)

    def plans(self, budget_bytes: int) -> list[Plan]:
        return [self.as_plan(self.plan(budget_bytes), budget_bytes)]

    def as_plan(self, found: DryRunChoice, budget_bytes: int, *, minimum_budget_bytes: int | None = None) -> Plan:
        """Return the plan as a document. ``minimum_budget_bytes``: if it is known."""
        trace, choice = self.trace, found.solution.choice
        layers: dict[str, LayerPlan] = {}
        followers = {name for run in found.part.segments for name in run[1:]}
        for call, key in zip(trace.calls, choice.regions, strict=True):
            program = trace.program(call)
            point = self._point(call.class_key, key, program)
            if call.name in followers:  # the block before recomputes this one's input
                linked = {position for position, _ in call.links}
                inputs = trace.classes[call.class_key].trace.inputs
                held = frozenset(b for b in point.kept - point.offloaded if inputs.get(b) not in linked)
                point = replace(point, kept_bytes=program.kept_bytes(held))
            if call.name not in layers or point.kept_bytes < layers[call.name].kept_bytes:
                layers[call.name] = layer_plan(call.name, program, point)
        unplanned, added = self.options.problem.plain_seconds, found.solution.levels.seconds
        return Plan(
            budget_bytes=budget_bytes,
            minimum_budget_bytes=self.minimum_budget_bytes if minimum_budget_bytes is None else minimum_budget_bytes,
            predicted=Predicted(
                peak_bytes=found.step.peak_bytes,
                step_seconds=unplanned + added,
                overhead_fraction=added / unplanned if unplanned else 0.0,
                host_bytes=found.step.host_bytes,
                composed=found.step.composed,
            ),
            solver=SolverReport(gap=found.solution.gap, seconds=found.solution.solver_seconds),
            layers=tuple(layers.values()),
            segments=tuple((run[0], run[-1]) for run in found.part.segments),
            root=layer_plan("", trace.root.program, self.options.root_points[choice.root]),
            model=fingerprint(trace),
            torch_version=torch.__version__,
            gradients_preallocated=trace.loop.gradients_preallocated,
            chunked_loss=trace.loop.chunked_loss,
            tensors=self.tensors,
            levels=found.step.levels,
        )


def within_host(
    host: Host | None,
    offers: Sequence[Offer],
    budgets: Sequence[int],
    dry_run: Callable[[tuple[Solution, ...]], DryRunChoice],
) -> DryRunChoice:
    """Solve each part for its budget; with a smaller host budget, step by step, if pinning exceeds it."""
    while True:
        pairs = zip(offers, budgets, strict=True)
        found = dry_run(tuple(offer.choose(max(budget, offer.least_bytes)) for offer, budget in pairs))
        if host is None or host.holds(found.step.pinned_bytes):
            return found
        each = zip(offers, found.solutions, strict=True)
        offers = [Offer(less_on_host(o.problem, s.levels, host, found.step.pinned_bytes)) for o, s in each]


def fastest_held(host: Host | None, found: Iterable[DryRunChoice], budget_bytes: int) -> DryRunChoice:
    """The fastest choice that fits the budget and the host; there is one."""
    best = fastest((one for one in found if host is None or host.holds(one.step.pinned_bytes)), budget_bytes)
    assert best is not None, "the smallest fits"
    return best


def _infeasible(budget_bytes: int, minimum_bytes: int, fewest: DryRunChoice) -> Infeasible:
    reason = f"The {fewest.step.phase} pass sets the peak."
    return Infeasible(minimum_budget_bytes=minimum_bytes, budget_bytes=budget_bytes, reason=reason)


def untimed(problem: StepProblem) -> StepProblem:
    """Keep options that no measured second decides: both ends, and those that lower the lower end's peak."""
    regions = tuple(replace(r, options=_ends(r.options)) for r in problem.regions)
    return replace(problem, regions=regions, root=_ends(problem.root))


def _ends(options: tuple[Option, ...]) -> tuple[Option, ...]:
    keys: list[str] = [o.key for o in options if SEND not in o.key and not o.key.endswith(PACK)]
    ends = {keys[0], keys[-1], *(key for key in keys if is_lean(key))}
    return tuple(o for o in options if o.key.removesuffix(PACK).partition(SEND)[0] in ends and not is_timed(o.key))


# plans as documents ---------------------------------------------------------------------------------------------------


def module_policy(traced: ModelTrace, plan: Plan) -> ModulePolicy:
    """A plan that was made for this trace, as policies. Stand-ins for opaque blocks in a dry run are left out."""
    names = list(dict.fromkeys(c.name for c in traced.calls))
    policies = {
        entry.layer: policy_kept(
            _class_of(traced, entry), entry.option, *map(frozenset, (entry.kept, entry.offloaded, entry.packed))
        )
        for entry in plan.layers
    }
    root = exactly(traced.root.program, frozenset(plan.root.kept), frozenset(plan.root.offloaded))
    segments = [names[names.index(a) : names.index(b) + 1] for a, b in plan.segments]
    return ModulePolicy(trace=traced, policies=policies, root=root, segments=segments)


def _class_of(traced: ModelTrace, entry: LayerPlan) -> BlockClass:
    """The class of a block; if it runs several programs in one forward (one for each adapter), that of the entry."""
    found = [traced.classes[call.class_key] for call in traced.calls if call.name == entry.layer]
    return next((cls for cls in found if cls.program.digest() == entry.digest), found[-1])


def digests_of(traced: ModelTrace, plan: Plan) -> dict[str, str]:
    """Digest of each block's program in the plan, if it is among those that the block runs."""
    last = {call.name: traced.program(call).digest() for call in traced.calls}
    entries = [entry for entry in plan.layers if entry.layer in last]
    return last | {entry.layer: _class_of(traced, entry).program.digest() for entry in entries}


def layer_plan(name: str, program: Program, point: FrontierPoint) -> LayerPlan:
    named = point.key in ("none", "full")
    policy = PolicyName(point.key) if named else policy_name(program, point.kept, point.offloaded, point.packed)
    again = () if policy is PolicyName.NONE else program.recompute_set(point.kept)
    return LayerPlan(
        layer=name,
        policy=policy,
        kept_bytes=point.kept_bytes,
        offloaded_bytes=point.offloaded_bytes,
        recompute_flops=sum(program.ops[o].flops for o in again),
        digest=program.digest(),
        option=point.key,
        kept=tuple(sorted(point.kept)),
        offloaded=tuple(sorted(point.offloaded)),
        packed=tuple(sorted(point.packed)),
        price=point.price,
    )


def fingerprint(trace: ModelTrace) -> str:
    """Digest of a model: its class, and names, shapes and dtypes of its parameters."""
    text = [type(trace.fake_model).__qualname__]
    for name, p in trace.fake_model.named_parameters():
        text.append(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def plan_tensors(traced: ModelTrace) -> tuple[PlanTensor, ...]:
    """Saved tensors for a plan's readers, of the root and one example of each program; parameters left out."""
    found = dict.fromkeys(_tensors_of(traced.root.program, traced.root, traced.fake_model))
    for call in traced.calls:
        cls, program = traced.classes[call.class_key], traced.program(call)
        if any(tensor.digest == program.digest() for tensor in found):
            continue
        region = cls.trace if cls.program is cls.trace.program else None  # a compiled block has ops only
        found |= dict.fromkeys(_tensors_of(program, region, traced.fake_model.get_submodule(call.name)))
    return tuple(found)


def _tensors_of(program: Program, region: RegionTrace | None, module: nn.Module) -> Iterator[PlanTensor]:
    roles = None if region is None else Roles(trace=region, module=module)
    refs = dict(zip(program.slots, region.slots, strict=True)) if region is not None else {}
    for slot in program.slots:
        buffer = program.buffers[slot.buffer]
        if buffer.source is Source.PARAMETER or (region is not None and slot.buffer in region.names):
            continue
        yield PlanTensor(
            digest=program.digest(),
            buffer=slot.buffer,
            path=slot.path,
            op=slot.op if roles is None else roles.saver(slot),
            role="" if roles is None else roles.role(slot, refs[slot]),
            shape=slot.shape,
            dtype=slot.dtype,
            nbytes=buffer.nbytes,
            free=buffer.free,
        )


# several parts --------------------------------------------------------------------------------------------------------


def planner_of(
    traces: Sequence[ModelTrace],
    in_flight: Sequence[int],
    dry_step: DryStep,
    *,
    hardware: Hardware | None = None,
    host: Host | None = None,
    progress: Callable[[str], None],
) -> Planner | StagesPlanner:
    """Return the planner for the parts of a rank: one module, or the stages of a pipeline, which share the host's
    memory equally. ``in_flight``: the most micro-batches in flight of each part.
    """
    if len(traces) == 1 and in_flight[0] == 1:
        return make_planner(traces[0], dry_step=dry_step, hardware=hardware, host=host, progress=progress)
    share = None if host is None else host.shared(len(traces))
    planners = [make_planner(trace, hardware=hardware, host=share, progress=progress) for trace in traces]
    progress("choosing")
    offers = [Offer(_times(one.options.problem, count)) for one, count in zip(planners, in_flight, strict=True)]
    return StagesPlanner(dry_step=dry_step, planners=planners, offers=offers, host=host)


@dataclass(kw_only=True)
class StagesPlanner:
    """Plans of a rank's stages; see NOTE [ Several parts ]."""

    dry_step: DryStep
    planners: list[Planner]
    offers: list[Offer]
    host: Host | None = None
    seen: dict[tuple[Choice, ...], DryRunChoice] = field(default_factory=dict)
    pricing: Pricing = field(default_factory=Pricing)

    @functools.cached_property
    def ends(self) -> list[tuple[int, int]]:
        """For each stage the fewest bytes, and the bytes of the choice with the least recomputation."""
        return [(offer.least_bytes, max(offer.least_bytes, _fastest_peak(offer))) for offer in self.offers]

    def at(self, share: float) -> DryRunChoice:
        """Solve at this share of the range from the fewest bytes (0) to the fewest seconds (1)."""
        budgets = [low + round(share * (high - low)) for low, high in self.ends]
        return within_host(self.host, self.offers, budgets, self._dry_run)

    @functools.cached_property
    def sure(self) -> DryRunChoice:
        """The answers with the fewest bytes that exist in every planning.

        The root's bytes for calls in flight are bounded from above (`_times`), with different slack in each option, so
        each option is solved separately.
        """
        problems = [untimed(offer.problem) for offer in self.offers]
        found = [self.at(1.0)]
        for number in range(max(len(problem.root) for problem in problems)):
            alone = [Offer(replace(p, root=(p.root[min(number, len(p.root) - 1)],))) for p in problems]
            found.append(within_host(self.host, alone, [offer.least_bytes for offer in alone], self._dry_run))
        return min(found, key=lambda one: one.needs)

    def _dry_run(self, solutions: tuple[Solution, ...]) -> DryRunChoice:
        choices = tuple(solution.choice for solution in solutions)
        if choices not in self.seen:
            parts = tuple(planner.part(choice) for planner, choice in zip(self.planners, choices, strict=True))
            step = step_of(parts, self.dry_step, self.pricing)
            self.seen[choices] = DryRunChoice(solutions=solutions, parts=parts, step=step)
        return self.seen[choices]

    def plans(self, budget_bytes: int) -> list[Plan]:
        """Return a plan a part, together under the budget. Raise `Infeasible` with the smallest peak if none fit."""
        if min(self.sure.needs, self.at(0.0).needs) > budget_bytes:
            raise _infeasible(budget_bytes, self.sure.needs, self.sure)
        fewest_bytes, most_bytes = (sum(ends) for ends in zip(*self.ends, strict=True))
        way = max(1, most_bytes - fewest_bytes)
        refine(lambda asked: self.at(min(1.0, (asked - fewest_bytes) / way)), budget_bytes, fewest_bytes)
        best = fastest_held(self.host, self.seen.values(), budget_bytes)
        return [
            planner.as_plan(
                DryRunChoice(solutions=(solution,), parts=(part,), step=best.step),
                budget_bytes,
                minimum_budget_bytes=self.sure.needs,
            )
            for planner, solution, part in zip(self.planners, best.solutions, best.parts, strict=True)
        ]


def _fastest_peak(offer: Offer) -> int:
    problem = offer.problem
    unbounded = sum(o.resident_bytes + o.backward_peak_bytes for r in problem.regions for o in r.options)
    unbounded += sum(r.gradient_bytes for r in problem.regions) + 2 * offer.least_bytes
    unbounded += max(root.loss_peak_bytes + root.tail_peak_bytes for root in problem.root)
    return offer.choose(unbounded).levels.peak_bytes


def _times(problem: StepProblem, count: int) -> StepProblem:
    """The problem with so many micro-batches in flight, during the last one's passes.

    The root's bytes for each of them are at most its peak at the loss.
    """
    more = count - 1

    def held(option: Held) -> Held:
        resident = option.resident_bytes
        forward = option.forward_peak_bytes + more * resident
        return replace(option, resident_bytes=count * resident, forward_peak_bytes=forward)

    def root(option: RootOption) -> RootOption:
        others = more * option.loss_peak_bytes
        return replace(
            option,
            loss_peak_bytes=option.loss_peak_bytes + others,
            held_forward_bytes=tuple(n + others for n in option.held_forward_bytes),
            held_backward_bytes=tuple(n + others for n in option.held_backward_bytes),
        )

    return replace(
        problem,
        regions=tuple(replace(r, options=tuple(map(held, r.options)), copies=count) for r in problem.regions),
        segments=tuple(map(held, problem.segments)),
        root=tuple(map(root, problem.root)),
    )


# options of each region, from dry runs ------------------------------------------------------------------------------

BLOCK_POINTS = 12
ROOT_POINTS = 6
ROOT_CUTS = 8  # cuts of what is around the blocks, if it is wider than they are
SHORT_ROOT = 250  # ops up to which that many are tried, which takes seconds
SEGMENT_SIZES = (2, 3, 4, 6, 8, 12, 16)
PYTHON_SECONDS_PER_OP = 6e-6  # overhead of replaying one op (measured, 2 CPU cores)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The solver's problem and, by class of blocks and option, its kept tensors. ``baseline``: without a plan."""

    baseline: StepPeaks
    problem: StepProblem
    points: Mapping[str, Mapping[str, FrontierPoint]]
    root_points: Mapping[str, FrontierPoint]


ClassOptions = tuple[Mapping[str, FrontierPoint], tuple[RegionOption, ...]]
"""Points of a class of blocks by key, and their levels."""


@dataclass(frozen=True, kw_only=True)
class OptionsBuilder:
    """Makes `Options`; the judge dry-runs the step without a plan, and remembers prices. No host: nothing moves."""

    judge: Judge
    hardware: Hardware
    host: Host | None
    progress: Progress
    _classes: dict[str, ClassOptions] = field(default_factory=dict, init=False)
    _measured: dict[str, Mapping[str, MeasuredChoice]] = field(default_factory=dict, init=False)
    _dry_runs: dict[tuple[str, frozenset[int], frozenset[int]], RegionOption] = field(default_factory=dict, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)

    @property
    def trace(self) -> ModelTrace:
        return self.judge.trace

    @property
    def pricing(self) -> Pricing:
        return self.judge.pricing

    def options(self) -> Options:
        """Run the plain step, and every option of its regions, on fake tensors."""
        self.progress("dry-running options")
        trace, calls = self.trace, self.trace.calls
        opaque = {c.name: plain_of(self._options(c.class_key)) for c in calls if trace.classes[c.class_key].stood_in}
        recorded = [cls.trace for cls in trace.classes.values() if not cls.stood_in]
        # points depend on measured times, so each op is run before anything is chosen
        self.pricing.learn(
            request
            for region in (*recorded, trace.root)
            for call in region.calls
            for request in ((_request(call),) if costs_like(call) is None else (_request(call), _again(call)))
            if isinstance(call.func, torch._ops.OpOverload)
            and (call.args or call.kwargs)  # ops that only update statistics
        )
        options = {key: self._options(key) for key in trace.classes}
        root_points = self._points_of_root()
        plain = {key: plain_of(of_class) for key, of_class in options.items()}
        root, logs = [], not self.judge.problem
        for p in root_points:
            option, alone = self.pricing.known(
                lambda w, p=p: dry_run_root(trace, p.kept, p.key, p.seconds, w, plain=plain, logs=logs)  # type: ignore[misc]
            )
            root.append(option)
            if alone is not None:
                self.judge.roots[p.kept] = alone
        segments = tuple(self._segments(options))
        # the step without a plan comes last: blocks have shown nearly all ops by then, and a run with ops
        # without a price has to be repeated
        everything = dict.fromkeys((c.name for c in calls), KeepAll())
        baseline = self.judge.whole(ModulePolicy(trace=trace, policies=everything, root=KeepAll(), opaque=opaque))
        forward = sum(self._block_seconds(c.class_key) for c in calls) + self._forward_seconds(trace.root)
        problem = StepProblem(
            static_bytes=baseline.static_bytes,
            optimizer_peak_bytes=max(0, baseline.optimizer_peak_bytes - baseline.static_bytes),
            regions=tuple(self._regions(options)),
            root=tuple(root),
            segments=segments,
            plain_seconds=3 * forward,  # a matmul has two in its backward
            link=self.host.link(self.host.usable_bytes) if self.host is not None else None,
        )
        points = {key: of_class for key, (of_class, _) in self._classes.items()}
        return Options(baseline=baseline, problem=problem, points=points, root_points={p.key: p for p in root_points})

    # blocks -----------------------------------------------------------------------------------------------------------

    def _options(self, key: str) -> tuple[RegionOption, ...]:
        if key not in self._classes:
            cls = self.trace.classes[key]
            of = self._compiled if cls.compiled is not None else self._observed if cls.stood_in else self._recorded
            self._classes[key] = of(cls)
        return self._classes[key][1]

    def _recorded(self, cls: BlockClass) -> ClassOptions:
        seconds, program, key = self.seconds_of(cls.trace), cls.trace.program, cls.key
        smallest, *more = pareto_frontier(program, seconds, max_points=BLOCK_POINTS)
        found: Iterable[FrontierPoint] = (smallest, *lean_points(program, smallest.kept, seconds), *more)
        if self.host is not None and movable(self.trace, key):
            found = tuple(with_moves(self.trace, key, found, self._kinks(key)))
        found = tuple(with_packs(cls.trace, found, seconds, self._packing_seconds))
        options = []
        for p in found:  # offloaded tensors count like kept ones, except in `resident_bytes`
            seen = self._block(key, p.kept, p.key, p.seconds, p.packed)
            if (left := seen.resident_bytes - p.offloaded_bytes) >= 0:
                options.append(replace(seen, resident_bytes=left, offloaded_bytes=p.offloaded_bytes))
        return {p.key: p for p in found}, tuple(options)

    def _observed(self, cls: BlockClass) -> ClassOptions:
        """Options of a block without a program: no checkpointing or full checkpointing."""
        options = self.pricing.known(lambda w: observe_block(self.trace, cls, w))
        nothing = frozenset[int]()
        points = (
            FrontierPoint(key=o.key, kept=nothing, kept_bytes=o.resident_bytes, seconds=o.seconds) for o in options
        )
        return {p.key: p for p in points}, options

    def _compiled(self, cls: BlockClass) -> ClassOptions:
        assert cls.compiled is not None
        levels = self._levels(cls.key)
        saved = {key: level.saved for key, level in levels.items()}
        found: Iterable[FrontierPoint] = compiled_points(cls.compiled, self.hardware)
        if self.host is not None and movable(self.trace, cls.key):
            found = with_moves_of_compiled(self.trace, cls.key, found, saved, self._kinks(cls.key))
        points = {p.key: p for p in found}
        measured = {option.key: option for option in options_of_levels(levels)}
        return points, tuple(option_at(p, measured, saved) for p in points.values())

    def _levels(self, key: str) -> Mapping[str, MeasuredChoice]:
        if key not in self._measured:
            cls = self.trace.classes[key]
            assert cls.compiled is not None
            policies = {p.key: policy_of(cls, p) for p in compiled_points(cls.compiled, self.hardware)}
            may_move = self.host is not None
            self._measured[key] = measure_choices(self.trace, cls, policies, self.progress, may_move=may_move)
        return self._measured[key]

    def _block(
        self, key: str, kept: frozenset[int], name: str, seconds: float, packed: frozenset[int] = frozenset()
    ) -> RegionOption:
        if (key, kept, packed) not in self._dry_runs:
            cls = self.trace.classes[key]
            policy = exactly(cls.program, kept, packed=packed)
            logs = not self.judge.problem
            found, alone = self.pricing.known(
                lambda w: dry_run_block(self.trace, cls, policy, name, seconds, w, logs=logs)
            )
            self._dry_runs[key, kept, packed] = found
            if logs:
                self.judge.calls[key, kept, packed, frozenset()] = alone
        return replace(self._dry_runs[key, kept, packed], key=name, seconds=seconds)

    def _kinks(self, key: str) -> list[int]:
        """Bytes whose copy is as long as the work that hides it: a pass of a block after one of this class."""
        assert self.host is not None
        if not self.host.hides:
            return []
        after = {late.class_key for early, late in pairwise(self.trace.calls) if early.class_key == key}
        forward = [self._block_seconds(k) for k in sorted(after)]
        return [int(s * self.host.bytes_per_second) for f in forward for s in (f / 2, f, 2 * f, 3 * f)]

    def _regions(self, options: Mapping[str, tuple[RegionOption, ...]]) -> Iterator[ProblemRegion]:
        seen: set[str] = set()
        sends = {key: movable(self.trace, key) for key in options}
        names = [call.name for call in self.trace.calls]
        for call in self.trace.calls:
            module = self.judge.dry_step.modules[0].get_submodule(call.name)
            trained = [p for p in module.parameters() if p.requires_grad and not self.trace.loop.gradients_preallocated]
            offered, key = options[call.class_key], call.class_key
            if any(o.offloaded_bytes for o in offered) and call.name not in sends[key]:
                offered, key = tuple(o for o in offered if not o.offloaded_bytes), f"{key}, stays"
            if names.count(call.name) > 1:
                key = call.name  # one policy for all of its calls
            forward = self._block_seconds(call.class_key)
            yield ProblemRegion(
                name=call.name,
                class_key=key,
                options=offered,
                gradient_bytes=sum(plain(p).nbytes for p in trained) if call.name not in seen else 0,
                forward_seconds=forward,
                backward_seconds=2 * forward,
            )
            seen.add(call.name)

    # the root, and runs of blocks -------------------------------------------------------------------------------------

    def _points_of_root(self) -> tuple[FrontierPoint, ...]:
        root = self.trace.root
        seconds = self.seconds_of(root)
        found = pareto_frontier(root.program, seconds, max_points=ROOT_POINTS)
        if root.problem:  # nothing of it may be recomputed
            return tuple(p for p in found if p.kept >= root.program.saved_buffers())
        cuts = ROOT_CUTS if len(root.program.ops) <= SHORT_ROOT else MOST_CUTS
        saved = (c.program.kept_bytes(c.program.saved_buffers()) for c in self.trace.classes.values() if not c.stood_in)
        lean = lean_points(root.program, found[0].kept, seconds, most=cuts, enough_bytes=max(saved, default=0))
        return (found[0], *lean, *found[1:])

    def _segments(self, options: Iterable[str]) -> Iterator[SegmentOption]:
        """Runs of blocks of which only the first holds its input: recomputed tensors add up along the run.

        Levels follow from the blocks' own: a block in a run holds plain autograd's saved tensors until its backward.
        By then they have left the caches: the cost includes one more pass to memory and back.
        """
        calls = self.trace.calls
        if len({c.name for c in calls}) < len(calls):
            return  # a block that is called twice has one policy, not a place in one run
        full = {key: member for key in options if (member := self._full_option(key)) is not None}
        longest = 2 * isqrt(len(calls))
        for size in (n for n in SEGMENT_SIZES if n <= longest):
            for start in range(len(calls) - size + 1):
                run = calls[start : start + size]
                if not all(c.links for c in run[1:]) or any(c.class_key not in full for c in run):
                    continue
                members = [full[c.class_key] for c in run]
                resident = members[0][0].resident_bytes + sum(self._link_bytes(c) for c in run[1:])
                held = [0, *accumulate(saved for _, saved, _ in members[:-1])]
                yield SegmentOption(
                    key="segment",
                    start=start,
                    stop=start + size,
                    resident_bytes=resident,
                    forward_peak_bytes=resident + max(o.forward_peak_bytes for o, _, _ in members),
                    backward_peak_bytes=tuple(
                        o.backward_peak_bytes + before for (o, _, _), before in zip(members, held, strict=True)
                    ),
                    seconds=members[-1][0].seconds
                    + sum(along + memory_seconds(2 * saved, self.hardware) for _, saved, along in members[:-1]),
                )

    def _link_bytes(self, call: BlockCall) -> int:
        """Bytes that a later block of a run holds: unrecomputable buffers, and inputs from outside the run."""
        cls = self.trace.classes[call.class_key]
        linked = {position for position, _ in call.links}
        program = cls.trace.program
        return program.kept_bytes(frozenset(b for b in Full().kept(program) if cls.trace.inputs.get(b) not in linked))

    def _full_option(self, key: str) -> tuple[RegionOption, int, float] | None:
        """Option that keeps only the input, with the output's seconds; None if the output cannot be recomputed."""
        cls = self.trace.classes[key]
        program = cls.trace.program
        kept = Full().kept(program)  # excludes an input that only the output needs
        if cls.stood_in or not all(program.can_compute(b, kept) for b in program.outputs):
            return None
        seconds = self.seconds_of(cls.trace)
        computed = frozenset(b for b in program.outputs if program.buffers[b].producer is not None)
        alone = sum(seconds[i] for i in program.recompute_set(kept))
        along = sum(seconds[i] for i in program.recompute_set(kept, also=computed))
        return self._block(key, kept, "full", alone), program.kept_bytes(program.saved_buffers()), along

    # seconds ----------------------------------------------------------------------------------------------------------

    def seconds_of(self, trace: RegionTrace, request: Callable[[RecordedOp], OpRequest] | None = None) -> list[float]:
        """Seconds to recompute each op of a region, or of another ``request``: measured, or from FLOPs and bytes."""
        asked, out = request or _again, []
        for op, call in zip(trace.program.ops, trace.calls, strict=True):
            price = self.pricing.prices.get(asked(call).key) if self.pricing.prices else None
            measured = price.seconds if price is not None else None
            out.append(PYTHON_SECONDS_PER_OP + (measured if measured is not None else op_seconds(op, self.hardware)))
        return out

    def _packing_seconds(self, pack: Pack) -> float:
        device = self.trace.device_type or "cpu"
        can_run = self.pricing.run and (device == "cpu" or torch.cuda.is_available())
        return packing_seconds(pack, device) if can_run else seconds_by_traffic(pack, self.hardware)

    def _block_seconds(self, key: str) -> float:
        """Seconds of a block's forward; of a compiled one, a third of its fastest forward and backward."""
        if key not in self._seconds:
            cls = self.trace.classes[key]
            if not cls.stood_in:
                self._seconds[key] = self._forward_seconds(cls.trace)
            elif cls.compiled is not None:
                self._seconds[key] = min(seconds_of_levels(self._levels(key)).values()) / 3
            else:
                self._seconds[key] = self._options(key)[1].seconds
        return self._seconds[key]

    def _forward_seconds(self, trace: RegionTrace) -> float:
        """Seconds of the ops that a forward runs, without those of a recipe that only advance a random state."""
        seconds = zip(trace.program.ops, self.seconds_of(trace, _request), strict=True)
        return sum(s for op, s in seconds if op.name != ADVANCE)


def plain_of(options: tuple[RegionOption, ...]) -> RegionOption:
    """The option that keeps what plain autograd keeps."""
    return next(option for option in options if option.key == NONE_KEY)


def _again(call: RecordedOp) -> OpRequest:
    """The request of a call when it is recomputed."""
    other = costs_like(call)
    return _request(call if other is None else replace(call, func=other[0], args=other[1]))


def _request(call: RecordedOp) -> OpRequest:
    def meta(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return TensorMeta(leaf.size, leaf.stride, leaf.dtype, call.device)
        if isinstance(leaf, list | tuple):
            return type(leaf)(meta(v) for v in leaf)
        return leaf

    return OpRequest(func=call.func, args=meta(call.args), kwargs={k: meta(v) for k, v in call.kwargs.items()})
