"""The fastest way through a step under a budget in absolute bytes, with a certificate.

What is minimised is the recompute added to a step, in seconds; what is bounded is every level of NOTE [ The step's levels ].
For each root option: the duals of a linear relaxation (HiGHS) give a bound from every position on (bound.py), a beam of labels
gives a good plan, and labels thinned with a known loss (labels.py) prove it, mostly with nothing thinned at all. Root
options whose bound is no better than the best plan are left out. Every answer is replayed by `evaluate` before it is returned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from jettison.errors import Infeasible
from jettison.plan.bound import Bound, BudgetedWalk, best_multipliers, relax
from jettison.plan.labels import Path, fastest_path
from jettison.plan.levels import Choice, Levels, evaluate
from jettison.plan.moves import PICOSECONDS, Walk, minimum_budget, walks
from jettison.plan.problem import StepProblem

DEFAULT_GAP = 0.005
BEAM_WIDTH = 128
PROOF_WIDTHS = (2_048, 16_384)  # labels a position; the second is tried where the first leaves too wide a gap


class Status(StrEnum):
    """How a choice was come by."""

    NOTHING_TO_DO = "nothing to do"  # the fastest options all fit together
    OPTIMAL = "optimal"  # proven, to the picosecond that seconds are counted in
    WITHIN_GAP = "within gap"
    GAP_OPEN = "gap open"  # fits, but the gap asked for was not reached with the widest labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What is proven about a choice.

    ``gap`` is the share of a step's time that a better choice could still save: (objective - lower bound) / (plain step +
    objective), with a plain step of 0 seconds where it is not known.
    """

    lower_bound_seconds: float
    objective_seconds: float
    gap: float
    solver_seconds: float
    minimum_budget_bytes: int
    status: Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A choice, the levels that replaying it gave, and what is proven about it."""

    choice: Choice
    levels: Levels
    certificate: Certificate


def choose(problem: StepProblem, budget_bytes: int, *, gap: float = DEFAULT_GAP) -> Solution:
    """The choice that adds the fewest seconds with every level at or below ``budget_bytes``.

    Equal seconds: where the fastest options all fit, the first listed of each region; else the fewest resident bytes.

    Raises:
        Infeasible: no choice fits; the error carries the smallest budget that one does.
    """
    begin = time.perf_counter()
    minimum = minimum_budget(problem)
    if minimum > budget_bytes:
        raise Infeasible(minimum_budget_bytes=minimum, budget_bytes=budget_bytes)
    unhindered = _fastest_options(problem)
    if unhindered is not None and evaluate(problem, unhindered).peak_bytes <= budget_bytes:
        choice, bound, status = unhindered, float("inf"), Status.NOTHING_TO_DO
    else:
        choice, bound, status = _search(problem, budget_bytes, gap)
    levels = evaluate(problem, choice)
    assert levels.peak_bytes <= budget_bytes, f"the replay peaks at {levels.peak_bytes}, the budget is {budget_bytes}"
    bound = min(bound, levels.seconds)
    certificate = Certificate(
        lower_bound_seconds=bound,
        objective_seconds=levels.seconds,
        gap=_gap(problem, levels.seconds, bound),
        solver_seconds=time.perf_counter() - begin,
        minimum_budget_bytes=minimum,
        status=status,
    )
    return Solution(choice=choice, levels=levels, certificate=certificate)


def _gap(problem: StepProblem, objective: float, bound: float) -> float:
    step = problem.plain_seconds + objective
    return max(0.0, objective - bound) / step if step > 0 else 0.0


def _fastest_options(problem: StepProblem) -> Choice | None:
    """The fastest option everywhere, or None where a segment is faster than its regions' fastest options."""
    fastest = [min(region.options, key=lambda o: o.seconds) for region in problem.regions]
    for segment in problem.segments:
        if segment.seconds < sum(o.seconds for o in fastest[segment.start : segment.stop]):
            return None
    root = min(problem.root, key=lambda o: o.seconds)
    return Choice(root=root.key, regions=tuple(o.key for o in fastest))


@dataclass(kw_only=True)
class _Candidate:
    """A root option under the budget, and what is known of the plans with it."""

    budgeted: BudgetedWalk
    bound: Bound
    proven: float  # picoseconds that no plan with this root goes below

    @property
    def walk(self) -> Walk:
        return self.budgeted.walk


@dataclass(kw_only=True)
class _Best:
    """The best plan so far; of equally fast ones the first found."""

    path: Path | None = None
    walk: Walk | None = None

    @property
    def picoseconds(self) -> int | None:
        return None if self.path is None else self.path.picoseconds

    def offer(self, walk: Walk, path: Path | None) -> None:
        if path is not None and (self.path is None or path.picoseconds < self.path.picoseconds):
            self.path, self.walk = path, walk

    def beats(self, bound: float) -> bool:
        """Whether nothing with this lower bound can be better; seconds are whole numbers of picoseconds."""
        return self.path is not None and bound > self.path.picoseconds - 1 + 1e-9 * (1 + self.path.picoseconds)


def _search(problem: StepProblem, budget_bytes: int, gap: float) -> tuple[Choice, float, Status]:
    """The best choice found, a lower bound in seconds, and the status."""
    best = _Best()
    candidates = list(_candidates(problem, budget_bytes, best))
    bound = 0.0
    for width in PROOF_WIDTHS:
        for candidate in candidates:
            if not best.beats(candidate.proven):
                _prove(candidate, best, width)
        assert best.path is not None and best.walk is not None, "the smallest budget is met, so a beam has found a plan"
        objective = best.path.picoseconds
        bound = min([float(objective), *(c.proven for c in candidates)])
        if _gap(problem, objective / PICOSECONDS, bound / PICOSECONDS) <= gap:
            break
    else:
        return best.walk.choice(best.path.moves), bound / PICOSECONDS, Status.GAP_OPEN
    optimal = bound >= objective
    status = Status.OPTIMAL if optimal else Status.WITHIN_GAP
    return best.walk.choice(best.path.moves), float("inf") if optimal else bound / PICOSECONDS, status


def _candidates(problem: StepProblem, budget_bytes: int, best: _Best) -> Iterator[_Candidate]:
    """Root options that may hold the best plan, most promising first; each one's beam is offered to ``best``."""
    multipliers = None
    fitting = [
        BudgetedWalk.of(walk, budget_bytes) for walk in walks(problem) if walk.minimum_budget_bytes <= budget_bytes
    ]
    no_prices = [0.0] * (len(problem.regions) + 1)
    for budgeted in sorted(fitting, key=lambda b: relax(b, no_prices).picoseconds):
        bound = relax(budgeted, no_prices if multipliers is None else multipliers)
        if best.beats(bound.picoseconds):
            continue  # the multipliers of another root option are valid here, too
        multipliers = best_multipliers(budgeted)
        bound = max(bound, relax(budgeted, multipliers), key=lambda b: b.picoseconds)
        if not best.beats(bound.picoseconds):
            best.offer(budgeted.walk, fastest_path(budgeted, bound, width=BEAM_WIDTH, beam=True).path)
            yield _Candidate(budgeted=budgeted, bound=bound, proven=bound.picoseconds)


def _prove(candidate: _Candidate, best: _Best, width: int) -> None:
    """Search the candidate for something better than the best plan, and note what that proves."""
    found = fastest_path(candidate.budgeted, candidate.bound, width=width, below=best.picoseconds)
    best.offer(candidate.walk, found.path)
    assert best.picoseconds is not None
    candidate.proven = max(candidate.proven, best.picoseconds - found.loss)
