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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import nn

from jettison.capture.ledger_entries import Roles
from jettison.capture.model_trace import BlockClass, ModelTrace
from jettison.capture.recorder import RegionTrace
from jettison.core.errors import Infeasible
from jettison.core.progress import Progress, silent
from jettison.dryrun.composed import Judge, why_whole
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks, step_of
from jettison.ledger.program import Program, Source
from jettison.planner.front_policies import PACK, exactly, policy_kept, policy_of
from jettison.planner.host import SEND, Host, is_timed, less_on_host
from jettison.planner.options import Options, OptionsBuilder
from jettison.solve.frontier import FrontierPoint
from jettison.solve.offload_options import is_lean
from jettison.solve.plan import LayerPlan, Plan, PlanTensor, PolicyName, Predicted, SolverReport, policy_name
from jettison.solve.policy import Full
from jettison.solve.problem import Choice, RegionOption, RootOption, SegmentOption, StepProblem
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

    @property
    def problem(self) -> StepProblem:
        return self.options.problem

    @functools.cached_property
    def tensors(self) -> tuple[PlanTensor, ...]:
        return plan_tensors(self.trace)

    @property
    def baseline(self) -> StepPeaks:
        return self.options.baseline

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
            for c, r, key in zip(self.trace.calls, self.problem.regions, choice.regions, strict=True)
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
        return Offer(self.problem)

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
        return self._least(Offer(untimed(self.problem)))

    @property
    def plain_budget_bytes(self) -> int:
        return self.baseline.peak_bytes + UNSEEN_BYTES

    def plan(self, budget_bytes: int) -> DryRunChoice:
        """Return the fastest plan whose dry run fits. Raise `Infeasible` with the smallest plan's peak if none does."""
        if self.minimum_budget_bytes > budget_bytes:
            # no plan fits below the bytes allocated before a step
            fewest = self._least_untimed if self.baseline.static_bytes > budget_bytes else self.smallest
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
        unplanned, added = self.problem.plain_seconds, found.solution.levels.seconds
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
    offers = [Offer(_times(one.problem, count)) for one, count in zip(planners, in_flight, strict=True)]
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
