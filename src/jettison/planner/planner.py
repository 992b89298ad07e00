"""From a trace and a budget to a plan whose step was run on fake tensors.

The solver adds up levels that were found block by block; a dry run of the whole step is the judge (`solve.refine`).
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from jettison.capture.model_trace import ModelTrace
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks
from jettison.errors import Infeasible
from jettison.ledger.program import Program
from jettison.planner.options import Options, options_of, step_of
from jettison.progress import Progress, silent
from jettison.solve.chain import Solution, choose
from jettison.solve.frontier import FrontierPoint
from jettison.solve.levels import Choice
from jettison.solve.moves import minimum_budget
from jettison.solve.plan import LayerPlan, Plan, PolicyWord, Predicted, SolverReport, policy_word, recompute_flops
from jettison.solve.policy import CheckpointPolicy, Exactly, Full, KeepShare, policy_named
from jettison.solve.problem import RegionOption, RootOption, StepProblem
from jettison.solve.refine import fastest, refine
from jettison.solve.transients import is_lean
from jettison.spec.hardware import Hardware

UNSEEN_BYTES = 256  # Python numbers that C++ wraps into tensors live for an op, out of any dispatch mode's sight

Option = TypeVar("Option", RegionOption, RootOption)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One choice, as policies, and what its dry run gave."""

    solution: Solution
    part: ModulePolicy
    step: StepPeaks

    @property
    def needs(self) -> int:
        """The smallest budget that it is sure to fit."""
        return self.step.peak_bytes + UNSEEN_BYTES

    @property
    def level(self) -> int:
        """Its peak as the solver has it."""
        return self.solution.levels.peak_bytes

    @property
    def added_seconds(self) -> float:
        """That a step takes longer."""
        return self.solution.certificate.objective_seconds


def make_planner(
    trace: ModelTrace,
    *,
    measure: bool = True,
    hardware: Hardware | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dry_step: DryStep | None = None,
    progress: Progress = silent,
) -> Planner:
    """Learn everything about one step that a plan needs. Takes seconds.

    Args:
        measure: price ops by running them; else by FLOPs and bytes.
        hardware: whose rates these are divided by; left out, `usual_hardware`'s.
        optimizer: over the fake copy's parameters.
        dry_step: the step as the loop has it, over one module like the trace's fake copy, in its mode; where left
            out, one batch through the fake copy, and ``optimizer``.
    """
    pricing = Pricing(run=measure)
    options = options_of(trace, pricing, hardware=hardware, optimizer=optimizer, dry_step=dry_step, progress=progress)
    say_what_was_bounded(trace, pricing)
    judge = dry_step or OneBatch(trace=trace, optimizer=optimizer)
    return Planner(trace=trace, options=options, pricing=pricing, dry_step=judge, progress=progress)


def say_what_was_bounded(trace: ModelTrace, pricing: Pricing) -> None:
    """Warn of ops that could not be priced by running them."""
    for name, problem in sorted(pricing.problems().items()):
        text = (
            f"{name} could not be run by itself ({problem}): its time is an estimate, and what its kernel "
            "allocates inside is taken to be as much as all that it reads and writes"
        )
        if text not in trace.warnings:
            trace.warnings.append(text)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Everything that is known about one step: made once by `make_planner`, asked for as many budgets as wanted."""

    trace: ModelTrace
    options: Options
    pricing: Pricing
    dry_step: DryStep
    progress: Progress = silent
    _candidates: dict[Any, Candidate] = field(default_factory=dict, init=False)
    _answers: list[Candidate] = field(default_factory=list, init=False)  # for budgets so far

    @property
    def problem(self) -> StepProblem:
        """What the solver is given."""
        return self.options.problem

    @property
    def baseline(self) -> StepPeaks:
        """The step without a plan."""
        return self.options.baseline

    def candidate(self, solution: Solution) -> Candidate:
        """Run a choice on fake tensors; every choice once."""
        choice = solution.choice
        known = self._candidates.get(choice)
        if known is None:
            part = self.part(choice)
            step = step_of([part], self.dry_step, self.pricing)
            known = self._candidates[choice] = Candidate(solution=solution, part=part, step=step)
        return known

    def part(self, choice: Choice) -> ModulePolicy:
        """A choice as policies."""
        policies, root = self._policies(choice)
        opaque = {
            c.name: next(o for o in r.options if o.key == key)
            for c, r, key in zip(self.trace.calls, self.options.problem.regions, choice.regions, strict=True)
            if self.trace.classes[c.class_key].opaque
        }
        segments = [[c.name for c in self.trace.calls[a:b]] for a, b in choice.segments]
        return ModulePolicy(trace=self.trace, policies=policies, root=root, segments=segments, opaque=opaque)

    def _policies(self, choice: Choice) -> tuple[dict[str, CheckpointPolicy], CheckpointPolicy]:
        chosen: dict[str, FrontierPoint] = {}
        programs: dict[str, Program] = {}
        for call, key in zip(self.trace.calls, choice.regions, strict=True):
            program = self.trace.program(call)
            point = self._point(call.class_key, key, program)
            if call.name not in chosen or point.kept_bytes < chosen[call.name].kept_bytes:
                chosen[call.name], programs[call.name] = point, program
        opaque = {c.name for c in self.trace.calls if self.trace.classes[c.class_key].opaque}
        policies: dict[str, CheckpointPolicy] = {
            name: policy_named(p.key) if name in opaque else exactly(programs[name], p.kept)
            for name, p in chosen.items()
        }
        return policies, exactly(self.trace.root.program, self.options.root_points[choice.root].kept)

    def _point(self, class_key: str, key: str, program: Program) -> FrontierPoint:
        if key != "segment":
            return self.options.points[class_key][key]
        kept = Full().kept(program)
        return FrontierPoint(key=key, kept=kept, kept_bytes=program.kept_bytes(kept), seconds=0.0, price=0.0)

    @functools.cached_property
    def smallest(self) -> Candidate:
        """The plan of the fewest bytes."""
        ways = (self.options.problem, untimed(self.options.problem))
        return min(map(self._least, ways), key=lambda one: one.needs)

    def _least(self, problem: StepProblem) -> Candidate:
        """Of the fewest bytes. What runs of blocks need is added up, not dry-run, and may be too little."""
        ways = [problem, replace(problem, segments=())] if problem.segments else [problem]
        first, *others = sorted(
            (choose(way, minimum_budget(way)) for way in ways), key=lambda found: found.levels.peak_bytes
        )
        least = self.candidate(first)
        found = [self.candidate(other) for other in others if other.levels.peak_bytes < least.needs]
        return min([least, *found], key=lambda one: one.needs)

    @functools.cached_property
    def minimum_budget_bytes(self) -> int:
        """A budget for which there is always a plan. Now and then one for a little less can be found."""
        return min(self.plain_budget_bytes, self._least(untimed(self.options.problem)).needs)

    @property
    def plain_budget_bytes(self) -> int:
        """The smallest budget under which nothing needs to be done."""
        return self.options.baseline.peak_bytes + UNSEEN_BYTES

    def plan(self, budget_bytes: int) -> Candidate:
        """The fastest plan whose dry run fits.

        Raises:
            Infeasible: none does; the error carries the dry-run peak of the smallest plan.
        """
        if self.minimum_budget_bytes > budget_bytes and self.smallest.needs > budget_bytes:
            raise Infeasible(
                minimum_budget_bytes=self.minimum_budget_bytes,
                budget_bytes=budget_bytes,
                reason=f"The {self.smallest.step.phase} pass sets the peak.",
            )
        if self.plain_budget_bytes <= budget_bytes:  # nothing to do, however the solver's sums are rounded
            return self.candidate(choose(self.options.problem, 2 * budget_bytes))

        def ask(asked: int) -> Candidate:
            self.progress("choosing")
            return self.candidate(choose(self.options.problem, asked))

        least = minimum_budget(self.options.problem)
        self._answers.extend(refine(ask, budget_bytes, least, known=self._answers))
        say_what_was_bounded(self.trace, self.pricing)
        return fastest(list(self._candidates.values()), budget_bytes)

    def as_plan(self, found: Candidate, budget_bytes: int, *, minimum_budget_bytes: int | None = None) -> Plan:
        """The plan as a document. ``minimum_budget_bytes``: where it is known otherwise."""
        trace, choice = self.trace, found.solution.choice
        layers: dict[str, LayerPlan] = {}
        followers = {name for run in found.part.segments for name in run[1:]}
        for call, key in zip(trace.calls, choice.regions, strict=True):
            program = trace.program(call)
            point = self._point(call.class_key, key, program)
            if call.name in followers:  # the block before computes this one's input again
                linked = {position for position, _ in call.links}
                inputs = trace.classes[call.class_key].trace.inputs
                held = frozenset(b for b in point.kept if inputs.get(b) not in linked)
                point = replace(point, kept_bytes=program.kept_bytes(held))
            if call.name not in layers or point.kept_bytes < layers[call.name].kept_bytes:
                layers[call.name] = layer_plan(call.name, program, point)
        certificate = found.solution.certificate
        unplanned = self.options.problem.plain_seconds
        added = found.added_seconds
        return Plan(
            budget_bytes=budget_bytes,
            minimum_budget_bytes=self.minimum_budget_bytes if minimum_budget_bytes is None else minimum_budget_bytes,
            predicted=Predicted(
                peak_bytes=found.step.peak_bytes,
                step_seconds=unplanned + added,
                overhead_fraction=added / unplanned if unplanned else 0.0,
            ),
            solver=SolverReport(gap=certificate.gap, seconds=certificate.solver_seconds),
            layers=tuple(layers.values()),
            segments=tuple((run[0], run[-1]) for run in found.part.segments),
            root=layer_plan("", trace.root.program, self.options.root_points[choice.root]),
            model=fingerprint(trace),
            torch_version=torch.__version__,
            gradients_held=trace.loop.gradients_held,
        )


def untimed(problem: StepProblem) -> StepProblem:
    """What does not hang on seconds that were measured, and is there whenever a plan is made: both ends, and what
    lowers the peak of the lower one.
    """
    regions = tuple(replace(r, options=_ends(r.options)) for r in problem.regions)
    return replace(problem, regions=regions, root=_ends(problem.root))


def _ends(options: tuple[Option, ...]) -> tuple[Option, ...]:
    last = len(options) - 1
    return tuple(o for i, o in enumerate(options) if i in (0, last) or is_lean(o.key))


def exactly(program: Program, kept: frozenset[int], moved: frozenset[int] = frozenset()) -> Exactly:
    """This decision for this program and its like (a shorter batch); for others as large a share of what they save."""
    total = program.kept_bytes(program.saved_buffers())
    share = KeepShare(program.kept_bytes(kept) / total if total else 1.0)
    return Exactly(program.digest(), kept, share, program.form(), moved=moved)


def module_policy(traced: ModelTrace, plan: Plan) -> ModulePolicy:
    """A plan that was made for this trace, as policies. What stands in for opaque blocks in a dry run is left out."""
    names = list(dict.fromkeys(c.name for c in traced.calls))
    programs = {c.name: traced.program(c) for c in traced.calls}
    opaque = {c.name for c in traced.calls if traced.classes[c.class_key].opaque}
    policies = {
        entry.layer: policy_named(entry.option)
        if entry.layer in opaque
        else exactly(programs[entry.layer], frozenset(entry.kept), frozenset(entry.offloaded))
        for entry in plan.layers
    }
    root = exactly(traced.root.program, frozenset(plan.root.kept), frozenset(plan.root.offloaded))
    segments = [names[names.index(a) : names.index(b) + 1] for a, b in plan.segments]
    return ModulePolicy(trace=traced, policies=policies, root=root, segments=segments)


def layer_plan(name: str, program: Program, point: FrontierPoint) -> LayerPlan:
    """One layer's entry."""
    policy = PolicyWord(point.key) if point.key in ("none", "full") else policy_word(program, point.kept)
    return LayerPlan(
        layer=name,
        policy=policy,
        kept_bytes=point.kept_bytes,
        recompute_flops=recompute_flops(program, point.kept),
        digest=program.digest(),
        option=point.key,
        kept=tuple(sorted(point.kept)),
        price=point.price,
    )


def fingerprint(trace: ModelTrace) -> str:
    """Names the model: its class, and names, shapes and dtypes of its parameters."""
    text = [type(trace.fake_model).__qualname__]
    for name, p in trace.fake_model.named_parameters():
        text.append(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
