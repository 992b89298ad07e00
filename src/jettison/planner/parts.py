"""Plans for the parts of a step: one module, or the stages of a pipeline that one rank runs.

One part is planned as any model is, with the loop's own step as the judge. In a pipeline the bytes that a stage holds
are held once for every micro-batch in flight. There its solver is given as many times the bytes, and is asked for
answers between the fewest bytes and the fewest seconds, for all of a rank's stages at the same share of the way; a
dry run of the whole schedule judges each. Within a stage the answers are the solver's best; that all stages of a rank
go the same share of the way is a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from jettison.capture.model_trace import ModelTrace
from jettison.core.errors import Infeasible
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, StepPeaks
from jettison.planner.host import Host, less_on_host
from jettison.planner.options import step_of
from jettison.planner.planner import UNSEEN_BYTES, Candidate, Planner, make_planner, untimed
from jettison.solve.chain import Solution, choose
from jettison.solve.levels import Choice
from jettison.solve.moves import minimum_budget
from jettison.solve.plan import Plan
from jettison.solve.problem import RegionOption, RootOption, SegmentOption, StepProblem
from jettison.solve.refine import fastest, refine
from jettison.spec.hardware import Hardware

Held = TypeVar("Held", RegionOption, SegmentOption)


def plan_parts(
    traces: Sequence[ModelTrace],
    in_flight: Sequence[int],
    dry_step: DryStep,
    budget_bytes: int,
    *,
    hardware: Hardware | None = None,
    host: Host | None = None,
    progress: Callable[[str], None],
) -> list[Plan]:
    """Plans for all parts of a rank, together under the budget.

    Args:
        in_flight: of each part, the most micro-batches that it holds at a time.
        host: where tensors may wait, if anywhere; several parts have equal shares of it.

    Raises:
        Infeasible: no plans fit; ``minimum_budget_bytes`` says what would.
    """
    if len(traces) == 1 and in_flight[0] == 1:
        planner = make_planner(traces[0], dry_step=dry_step, hardware=hardware, host=host, progress=progress)
        return [planner.as_plan(planner.plan(budget_bytes), budget_bytes)]
    stages = _Stages(dry_step=dry_step, host=host)
    share = None if host is None else host.shared(len(traces))
    for trace, count in zip(traces, in_flight, strict=True):
        stages.add(make_planner(trace, hardware=hardware, host=share, progress=progress), count)
    progress("choosing")
    return stages.plan(budget_bytes)


@dataclass(frozen=True, kw_only=True)
class _Together:
    """A choice for every stage, and the schedule's dry run under them."""

    solutions: tuple[Solution, ...]
    step: StepPeaks

    @property
    def needs(self) -> int:
        """The smallest budget that it is sure to fit."""
        return self.step.peak_bytes + UNSEEN_BYTES

    @property
    def level(self) -> int:
        """The stages' peaks as their solvers have them, added up."""
        return sum(solution.levels.peak_bytes for solution in self.solutions)

    @property
    def added_seconds(self) -> float:
        """That a step takes longer."""
        return sum(solution.certificate.objective_seconds for solution in self.solutions)


@dataclass(kw_only=True)
class _Stages:
    dry_step: DryStep
    host: Host | None = None
    planners: list[Planner] = field(default_factory=list)
    problems: list[StepProblem] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    seen: dict[tuple[Choice, ...], _Together] = field(default_factory=dict)
    pricing: Pricing = field(default_factory=Pricing)

    def add(self, planner: Planner, in_flight: int) -> None:
        problem = _times(planner.problem, in_flight)
        fewest = minimum_budget(problem)
        self.planners.append(planner)
        self.problems.append(problem)
        self.ends.append((fewest, max(fewest, _fastest_peak(problem))))

    def at(self, share: float) -> _Together:
        """The answers at this share of the way from the fewest bytes (0) to the fewest seconds (1)."""
        return self._answers(self.problems, [low + round(share * (high - low)) for low, high in self.ends])

    def sure(self) -> _Together:
        """The fewest bytes that there are answers for whenever they are asked for.

        What a stage's root holds for calls in flight is bounded from above (`_times`), by more in one of its options
        than in another: so each is asked for by itself.
        """
        problems = [untimed(problem) for problem in self.problems]
        found = [self.at(1.0)]
        for number in range(max(len(problem.root) for problem in problems)):
            alone = [replace(p, root=(p.root[min(number, len(p.root) - 1)],)) for p in problems]
            found.append(self._answers(alone, list(map(minimum_budget, alone))))
        return min(found, key=lambda one: one.needs)

    def _answers(self, problems: Sequence[StepProblem], budgets: Sequence[int]) -> _Together:
        """One a stage; with less on the host where pinning takes more than that may give."""
        while True:
            asked = [max(b, minimum_budget(p)) for p, b in zip(problems, budgets, strict=True)]
            found = self._dry_run(map(choose, problems, asked))
            if self.host is None or self.host.holds(found.step.pinned_bytes):
                return found
            host, pinned_bytes = self.host, found.step.pinned_bytes
            pairs = zip(problems, found.solutions, strict=True)
            problems = [less_on_host(p, s.levels, host, pinned_bytes) for p, s in pairs]

    def _dry_run(self, found: Iterable[Solution]) -> _Together:
        solutions = tuple(found)
        choices = tuple(solution.choice for solution in solutions)
        if choices not in self.seen:
            parts = [planner.part(choice) for planner, choice in zip(self.planners, choices, strict=True)]
            step = step_of(parts, self.dry_step, self.pricing)
            self.seen[choices] = _Together(solutions=solutions, step=step)
        return self.seen[choices]

    def plan(self, budget_bytes: int) -> list[Plan]:
        sure, fewest = self.sure(), self.at(0.0)
        if min(sure.needs, fewest.needs) > budget_bytes:
            raise Infeasible(
                minimum_budget_bytes=sure.needs,
                budget_bytes=budget_bytes,
                reason=f"The {sure.step.phase} pass sets the peak.",
            )
        fewest_bytes, most_bytes = (sum(ends) for ends in zip(*self.ends, strict=True))
        way = max(1, most_bytes - fewest_bytes)
        refine(lambda asked: self.at(min(1.0, (asked - fewest_bytes) / way)), budget_bytes, fewest_bytes)
        held = [one for one in self.seen.values() if self.host is None or self.host.holds(one.step.pinned_bytes)]
        best = fastest(held, budget_bytes)
        return [
            planner.as_plan(
                Candidate(solution=solution, part=planner.part(solution.choice), step=best.step),
                budget_bytes,
                minimum_budget_bytes=sure.needs,
            )
            for planner, solution in zip(self.planners, best.solutions, strict=True)
        ]


def _fastest_peak(problem: StepProblem) -> int:
    """Of the choice that computes least again."""
    unbounded = sum(o.resident_bytes + o.backward_peak_bytes for r in problem.regions for o in r.options)
    unbounded += sum(r.gradient_bytes for r in problem.regions) + 2 * minimum_budget(problem)
    unbounded += max(root.loss_peak_bytes + root.tail_peak_bytes for root in problem.root)
    return choose(problem, unbounded).levels.peak_bytes


def _times(problem: StepProblem, count: int) -> StepProblem:
    """The problem of so many micro-batches in flight, as the last of them goes through.

    What the root holds for each is no more than its peak at the loss.
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
