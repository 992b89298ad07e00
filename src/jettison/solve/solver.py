"""Solver: the fastest choice over a step under a budget in absolute bytes, with a certificate.

It minimizes the seconds that recomputation and waiting for copies add to a step, and bounds every level of
NOTE [ The step's levels ] and the host's bytes. For each root option, the duals of a linear relaxation (HiGHS) give a
bound from every position on (bound.py), a beam of labels gives a good plan, and labels thinned with a known loss
(label_setting.py) prove it, mostly with nothing thinned at all. If the host's budget binds, good plans around the
relaxation's vertex are found first (host_budget.py). Root options whose bound is no better than the best plan are left
out. Every answer is replayed by `evaluate` before it is returned. Contribution of each part:
docs/decisions/0103-what-each-layer-of-the-solver-buys.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, permutations
from typing import Protocol, TypeVar

from jettison.core.errors import Infeasible
from jettison.solve.bound import ROUNDING, Bound, BudgetedWalk, relax, relaxation
from jettison.solve.host_budget import rounded
from jettison.solve.label_setting import fastest_path
from jettison.solve.problem import Choice, ChoiceLevels, StepProblem, chosen_options, evaluate
from jettison.solve.shortest_path import PICOSECONDS, Path, StepWalk, least_of, walks

GAP = 0.005  # share of a step at which the search ends
BEAM_WIDTH = 128
ROUNDED_WIDTH = 64  # labels a position after plans from a rounded relaxation
PROOF_WIDTH = 2_048  # labels a position
ORDERED = 4  # options of one class up to which every order of their runs is tried
LARGE = 1_000  # moves; with more under a host budget, the search only continues if the gap is too wide


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A choice, the levels of its replay, and a proof about it.

    ``gap`` is the share of a step's time that a better choice could still save: (added seconds - lower bound) / (plain
    step + added seconds), with a plain step of 0 seconds if it is not known; 0 if the choice is optimal.
    """

    choice: Choice
    levels: ChoiceLevels
    lower_bound_seconds: float
    gap: float
    solver_seconds: float


Peak = Callable[[Choice], int]
"""Peak of a choice in bytes."""


def choose(
    problem: StepProblem, budget_bytes: int, *, known: tuple[StepWalk, ...] | None = None, peak: Peak | None = None
) -> Solution:
    """Return the choice that adds the fewest seconds with every level at or below ``budget_bytes``. ``known``:
    `walks(problem)`, for repeated calls. ``peak``: judges the order of equal regions; by default the levels do. Raise
    `Infeasible` with the smallest budget if no choice fits, `ValueError` if none fits the host's budget, whatever the
    device's is.

    Ties: if the fastest options all fit, the first listed of each region; else the fewest resident bytes. Equal regions
    are ordered as in `in_runs`.
    """
    begin = time.perf_counter()
    all_walks = walks(problem) if known is None else known
    minimum = least_of(all_walks)
    if minimum > budget_bytes:
        raise Infeasible(minimum_budget_bytes=minimum, budget_bytes=budget_bytes)
    unhindered = _fastest_options(problem)
    if unhindered is not None and _fits(problem, evaluate(problem, unhindered), budget_bytes):
        choice, bound = unhindered, float("inf")
    else:
        choice, bound = _search(problem, all_walks, budget_bytes)
    levels = evaluate(problem, choice)
    assert _fits(problem, levels, budget_bytes), (
        f"the replay peaks at {levels.peak_bytes}, the budget is {budget_bytes}"
    )
    ordered = in_runs(problem, choice, peak or (lambda other: evaluate(problem, other).peak_bytes))
    if ordered != choice:
        choice, levels = ordered, evaluate(problem, ordered)
    bound = min(bound, levels.seconds)
    found, seconds = _gap(problem, levels.seconds, bound), time.perf_counter() - begin
    return Solution(choice=choice, levels=levels, lower_bound_seconds=bound, gap=found, solver_seconds=seconds)


def _fits(problem: StepProblem, levels: ChoiceLevels, budget_bytes: int) -> bool:
    limit = problem.link.host_budget_bytes if problem.link is not None else None
    return levels.peak_bytes <= budget_bytes and (limit is None or levels.host_bytes <= limit)


_Unit = tuple[tuple[str, ...], str, bool]
"""Classes of the regions that an option covers, its key, and whether it is a segment's."""


def in_runs(problem: StepProblem, choice: Choice, peak: Peak) -> Choice:
    """Return the choice with each option of a class of regions in one run, where an order of runs adds no bytes to the
    peak and no seconds: first that from the fewest bytes of a region to the most.
    """
    classes, segments = tuple(region.class_key for region in problem.regions), dict(choice.segments)
    options = dict.fromkeys(chosen_options(problem, choice))
    units = [(classes[o.start : o.stop], o.key, o.start in segments) for o in options]
    sizes = {unit: o.resident_bytes / len(unit[0]) for unit, o in zip(units, options, strict=True)}
    limits: tuple[int, float] | None = None
    for one, count in Counter(unit[0][0] for unit in sizes).items():
        if count == 1 or len(list(groupby(unit for unit in units if unit[0][0] == one))) == count:
            continue
        kinds = sorted((unit for unit in sizes if unit[0][0] == one), key=lambda unit: (sizes[unit], unit))
        others = [unit for unit in units if unit[0][0] != one]
        for order in permutations(kinds) if count <= ORDERED else (kinds, kinds[::-1]):
            ordered = [*others, *(unit for kind in order for unit in units if unit == kind)]
            found = _placed(problem, choice.root, ordered)
            limits = limits or (peak(choice), evaluate(problem, choice).seconds * (1 + ROUNDING))
            if found is not None and evaluate(problem, found).seconds <= limits[1] and peak(found) <= limits[0]:
                choice, units = found, ordered
                break
    return choice


def _placed(problem: StepProblem, root: str, units: Sequence[_Unit]) -> Choice | None:
    """The choice whose regions each have the first unit left for their class; None if one of them is not offered there,
    as where calls of one block have options of their own.
    """
    classes, left = tuple(region.class_key for region in problem.regions), list(units)
    offered = {(s.start, s.stop, s.key) for s in problem.segments}
    offered |= {(n, n + 1, o.key) for n, region in enumerate(problem.regions) for o in region.options}
    regions, segments = list[str](), list[tuple[int, int]]()
    while left:
        at = len(regions)
        unit = next((unit for unit in left if classes[at : at + len(unit[0])] == unit[0]), None)
        if unit is None:
            return None
        left.remove(unit)
        covered, key, is_segment = unit
        regions += [key] * len(covered)
        if (at, len(regions), key) not in offered:
            return None
        if is_segment:
            segments.append((at, len(regions)))
    return Choice(root=root, regions=tuple(regions), segments=tuple(segments))


def _gap(problem: StepProblem, objective: float, bound: float) -> float:
    step = problem.plain_seconds + objective
    return max(0.0, objective - bound) / step if step > 0 else 0.0


def _fastest_options(problem: StepProblem) -> Choice | None:
    """The fastest option everywhere, or None if a segment is faster than its regions' fastest options. Among equally
    fast options the one that moves least: tensors that fit anyway are not offloaded.
    """
    fastest = [min(region.options, key=lambda o: (o.seconds, o.offloaded_bytes)) for region in problem.regions]
    for segment in problem.segments:
        if segment.seconds < sum(o.seconds for o in fastest[segment.start : segment.stop]):
            return None
    root = min(problem.root, key=lambda o: o.seconds)
    return Choice(root=root.key, regions=tuple(o.key for o in fastest))


@dataclass(kw_only=True)
class _Best:
    """The best plan so far and its walk; the first found among equally fast ones."""

    plan: tuple[StepWalk, Path] | None = None

    @property
    def picoseconds(self) -> int | None:
        return None if self.plan is None else self.plan[1].picoseconds

    def offer(self, walk: StepWalk, path: Path | None) -> None:
        if path is not None and (self.plan is None or path.picoseconds < self.plan[1].picoseconds):
            self.plan = (walk, path)

    def beats(self, bound: float) -> bool:
        """Whether nothing with this lower bound can be better. Seconds are whole numbers of picoseconds."""
        best = self.picoseconds
        return best is not None and bound > best - 1


def _search(problem: StepProblem, all_walks: tuple[StepWalk, ...], budget_bytes: int) -> tuple[Choice, float]:
    """The best choice found, and a lower bound in seconds; infinite if it is proven optimal."""
    best = _Best()
    roots = list(_roots(all_walks, budget_bytes, best))
    skips = all_walks[0].host_budget_bytes is not None and sum(map(len, all_walks[0].moves)) > LARGE
    for width in (0, PROOF_WIDTH) if skips else (PROOF_WIDTH,):
        for root in roots if width else ():
            if not best.beats(root.proven):
                root.improve(best, width)
        assert best.plan is not None, "the budget is at least the smallest, so a beam has found a plan"
        walk, path = best.plan
        choice = walk.choice(path.moves)
        bound = min((root.proven for root in roots), default=float("inf"))
        if best.beats(bound):
            return choice, float("inf")
        if _gap(problem, path.picoseconds / PICOSECONDS, bound / PICOSECONDS) <= GAP:
            break
    return choice, bound / PICOSECONDS


@dataclass(kw_only=True)
class _Root:
    """A root option under the budget, with its bounds."""

    budgeted: BudgetedWalk
    bound: Bound
    proven: float  # lower bound in picoseconds on plans with this root

    def improve(self, best: _Best, width: int, *, beam: bool = False) -> None:
        """Search for a better plan than the best, and record the bound that this proves."""
        found = fastest_path(self.budgeted, self.bound, width=width, below=best.picoseconds, beam=beam)
        best.offer(self.budgeted.walk, found.path)
        if best.picoseconds is not None:
            self.proven = max(self.proven, min(best.picoseconds - found.loss, found.dropped))


def _roots(all_walks: tuple[StepWalk, ...], budget_bytes: int, best: _Best) -> Iterator[_Root]:
    """Root options that may hold the best plan, most promising first; plans found on the way go to ``best``."""
    needs = [(least, walk) for walk in all_walks if (least := walk.minimum_budget_bytes) is not None]
    fitting = [(least, BudgetedWalk.of(walk, budget_bytes)) for least, walk in needs if least <= budget_bytes]
    _, roomiest = min(fitting, key=lambda pair: pair[0])
    solved = relaxation(roomiest)  # its multipliers are valid for the other root options, too, though not optimal
    bounded = [(relax(b, solved.multipliers), b) for _, b in fitting]
    for bound, budgeted in sorted(bounded, key=lambda pair: pair[0].picoseconds):
        if best.beats(bound.picoseconds):
            return
        own = solved
        if budgeted is not roomiest:
            own = relaxation(budgeted)
            bound = max(bound, relax(budgeted, own.multipliers), key=lambda b: b.picoseconds)
        if best.beats(bound.picoseconds):
            continue
        root, width = _Root(budgeted=budgeted, bound=bound, proven=bound.picoseconds), BEAM_WIDTH
        if budgeted.walk.host_budget_bytes is not None:
            for path in rounded(budgeted, bound, own.shares):
                best.offer(budgeted.walk, path)
                width = ROUNDED_WIDTH
        if not best.beats(root.proven):
            root.improve(best, width, beam=True)
        yield root


# many budgets ---------------------------------------------------------------------------------------------------------
#
# A budget is refined until a judge (a dry run, a timeline) finds that the answer fits. The solver's bytes and the
# judge's differ. So the solver is asked for a budget corrected by the difference: by a secant if one side is known,
# by bisection if both are.


ATTEMPTS = 8
CLOSE = 500
"""An answer within this share of the budget is good enough."""


@dataclass(frozen=True)
class Offer:
    """A problem that is solved for many budgets, with its walks built once."""

    problem: StepProblem

    @cached_property
    def walks(self) -> tuple[StepWalk, ...]:
        """One for each root option."""
        return walks(self.problem)

    @cached_property
    def least_bytes(self) -> int:
        """The smallest budget that some choice fits; see `least_of`."""
        return least_of(self.walks)

    def choose(self, budget_bytes: int, peak: Peak | None = None) -> Solution:
        return choose(self.problem, budget_bytes, known=self.walks, peak=peak)


class Judged(Protocol):
    """An answer, and the judge's finding."""

    @property
    def needs(self) -> int:
        """The smallest budget in bytes that it fits according to the judge."""

    @property
    def level(self) -> int:
        """Its peak in bytes according to the solver."""

    @property
    def added_seconds(self) -> float:
        """Seconds of recomputation in a step."""


J = TypeVar("J", bound=Judged)


def refine(ask: Callable[[int], J], budget_bytes: int, least_bytes: int, *, known: Sequence[J] = ()) -> list[J]:
    """Return every answer on the way to the fastest that fits; the last need not be the best. Empty if the known
    answers leave nothing to ask.

    Args:
        ask: solves for a budget in the solver's bytes.
        least_bytes: the smallest budget that the solver can solve.
        known: answers for other budgets, which show the difference between judge and solver and restrict the search.
    """
    found: list[J] = []
    low = max([least_bytes, *(one.level for one in known if one.needs <= budget_bytes)])
    high = min((one.level for one in known if one.needs > budget_bytes), default=None)
    nearest = min(known, key=lambda one: abs(one.needs - budget_bytes), default=None)
    asked = max(low, budget_bytes + (nearest.level - nearest.needs if nearest is not None else 0))
    if high is not None and asked >= high:
        if high - low <= max(1, budget_bytes // CLOSE):
            return found
        asked = (low + high) // 2
    for _ in range(ATTEMPTS):
        one = ask(asked)
        found.append(one)
        spare = budget_bytes - one.needs
        if spare >= 0:
            low = max(low, asked)
            target = asked + spare
            if one.added_seconds <= 0.0:
                break
        else:  # it fits, and so does every budget with the same answer, down to its level
            high = min(one.level, asked if high is None else high)
            target = high + spare
        if (target - low if high is None else high - low) <= max(1, budget_bytes // CLOSE):
            break
        asked = target if high is None or low < target < high else (low + high) // 2
    return found


def fastest(found: Iterable[J], budget_bytes: int) -> J | None:
    """The fastest of the answers that fit; None if none does."""
    fitting = (one for one in found if one.needs <= budget_bytes)
    return min(fitting, key=lambda one: one.added_seconds, default=None)
