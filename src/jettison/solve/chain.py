"""The fastest way through a step under a budget in absolute bytes, with a certificate.

What is minimised is what recompute and waiting for copies add to a step, in seconds; what is bounded is every level of
NOTE [ The step's levels ], and the host's bytes. For each root option: the duals of a linear relaxation (HiGHS) give a
bound from every position on (bound.py), a beam of labels gives a good plan, and labels thinned with a known loss
(label_setting.py) prove it, mostly with nothing thinned at all. Where the host's budget matters, good plans are found
around the relaxation's vertex first (rounding.py), and labels go on among the moves that a better one may take
(fixing.py); where there are none, with plans that pay for the host's bytes. Root options whose bound is
no better than the best plan are left out. Every answer is replayed by `evaluate` before it is returned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from jettison.core.errors import Infeasible
from jettison.solve.bound import Bound, BudgetedWalk, Multipliers, relax, relaxation
from jettison.solve.exchange import exchanged
from jettison.solve.fixing import Fixing
from jettison.solve.label_setting import Path, fastest_path
from jettison.solve.levels import Choice, Levels, evaluate
from jettison.solve.moves import PICOSECONDS, Move, Walk, free_of_host, least_of, walks
from jettison.solve.problem import StepProblem
from jettison.solve.rounding import rounded

if TYPE_CHECKING:
    from jettison.solve.bound import Floats


DEFAULT_GAP = 0.005
BEAM_WIDTH = 128
NARROW_WIDTH = 64  # behind plans from a rounded relaxation
PROOF_WIDTHS = (2_048, 16_384)  # labels a position; the second is tried where the first leaves too wide a gap
LARGE = 1_000  # moves; more of them under a host budget are only searched further where the gap is too wide


class Status(StrEnum):
    """How a choice was come by."""

    NOTHING_TO_DO = "nothing to do"  # the fastest options all fit together
    OPTIMAL = "optimal"  # proven, to the picosecond that seconds are counted in
    WITHIN_GAP = "within gap"
    GAP_OPEN = "gap open"  # fits, but the gap asked for was not reached with the widest labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What is proven about a choice.

    ``gap`` is the share of a step's time that a better choice could still save: (objective - lower bound) / (plain step
    + objective), with a plain step of 0 seconds where it is not known.
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


def choose(
    problem: StepProblem, budget_bytes: int, *, gap: float = DEFAULT_GAP, known: tuple[Walk, ...] | None = None
) -> Solution:
    """The choice that adds the fewest seconds with every level at or below ``budget_bytes``.

    Equal seconds: where the fastest options all fit, the first listed of each region; else the fewest resident bytes.

    Args:
        known: `walks(problem)`, where a problem is asked about again and again.

    Raises:
        Infeasible: no choice fits; the error carries the smallest budget that one does.
        ValueError: the host's budget fits no choice, whatever the device's is.
    """
    begin = time.perf_counter()
    all_walks = walks(problem) if known is None else known
    minimum = least_of(all_walks)
    if minimum > budget_bytes:
        raise Infeasible(minimum_budget_bytes=minimum, budget_bytes=budget_bytes)
    unhindered = _fastest_options(problem)
    if unhindered is not None and _fits(problem, evaluate(problem, unhindered), budget_bytes):
        choice, bound, status = unhindered, float("inf"), Status.NOTHING_TO_DO
    else:
        choice, bound, status = _search(problem, all_walks, budget_bytes, gap)
    levels = evaluate(problem, choice)
    assert _fits(problem, levels, budget_bytes), (
        f"the replay peaks at {levels.peak_bytes}, the budget is {budget_bytes}"
    )
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


def _fits(problem: StepProblem, levels: Levels, budget_bytes: int) -> bool:
    limit = problem.link.host_budget_bytes if problem.link is not None else None
    return levels.peak_bytes <= budget_bytes and (limit is None or levels.host_bytes <= limit)


def _gap(problem: StepProblem, objective: float, bound: float) -> float:
    step = problem.plain_seconds + objective
    return max(0.0, objective - bound) / step if step > 0 else 0.0


def _fastest_options(problem: StepProblem) -> Choice | None:
    """The fastest option everywhere, or None where a segment is faster than its regions' fastest options.

    Of equally fast ones that which moves least: what fits without it is not moved.
    """
    fastest = [min(region.options, key=lambda o: (o.seconds, o.offloaded_bytes)) for region in problem.regions]
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
    fixing: Fixing | None = None  # under a host budget

    @property
    def walk(self) -> Walk:
        return self.budgeted.walk


@dataclass(kw_only=True)
class _Best:
    """The best plan so far and the walk it is on; of equally fast ones the first found."""

    plan: tuple[Walk, Path] | None = None

    @property
    def picoseconds(self) -> int | None:
        return None if self.plan is None else self.plan[1].picoseconds

    def offer(self, walk: Walk, path: Path | None) -> None:
        if path is not None and (self.plan is None or path.picoseconds < self.plan[1].picoseconds):
            self.plan = (walk, path)

    def beats(self, bound: float) -> bool:
        """Whether nothing with this lower bound can be better; seconds are whole numbers of picoseconds."""
        best = self.picoseconds
        return best is not None and bound > best - 1


def _search(
    problem: StepProblem, all_walks: tuple[Walk, ...], budget_bytes: int, gap: float
) -> tuple[Choice, float, Status]:
    """The best choice found, a lower bound in seconds (infinite where it is proven to be the best) and the status."""
    best = _Best()
    candidates = list(_candidates(all_walks, budget_bytes, best))
    limited = any(walk.host_budget_bytes is not None for walk in all_walks)
    skips = limited and sum(map(len, all_walks[0].moves)) > LARGE
    for width in (0, *PROOF_WIDTHS) if skips else PROOF_WIDTHS:
        for candidate in candidates if width else ():
            if not best.beats(candidate.proven):
                _prove(candidate, best, width)
        assert best.plan is not None, "no budget below the smallest comes here, so a beam has found a plan"
        walk, path = best.plan
        choice = walk.choice(path.moves)
        bound = min((c.proven for c in candidates), default=float("inf"))
        if best.beats(bound):
            return choice, float("inf"), Status.OPTIMAL
        if _gap(problem, path.picoseconds / PICOSECONDS, bound / PICOSECONDS) <= gap:
            return choice, bound / PICOSECONDS, Status.WITHIN_GAP
    return choice, bound / PICOSECONDS, Status.GAP_OPEN


def _candidates(all_walks: tuple[Walk, ...], budget_bytes: int, best: _Best) -> Iterator[_Candidate]:
    """Root options that may hold the best plan, most promising first; what is found of each is offered to ``best``."""
    needs = [(least, walk) for walk in all_walks if (least := walk.minimum_budget_bytes) is not None]
    fitting = [(least, BudgetedWalk.of(walk, budget_bytes)) for least, walk in needs if least <= budget_bytes]
    _, roomiest = min(fitting, key=lambda pair: pair[0])
    solved = relaxation(roomiest)  # its multipliers are valid for the other root options, too, if not the best for them
    bounded = [(relax(b, solved.multipliers), b) for _, b in fitting]
    for bound, budgeted in sorted(bounded, key=lambda pair: pair[0].picoseconds):
        if best.beats(bound.picoseconds):
            return
        own = solved
        if budgeted is not roomiest:
            own = relaxation(budgeted)
            bound = max(bound, relax(budgeted, own.multipliers), key=lambda b: b.picoseconds)
        if not best.beats(bound.picoseconds):
            fixing = Fixing.of(budgeted, bound) if budgeted.walk.host_budget_bytes is not None else None
            candidate = _Candidate(budgeted=budgeted, bound=bound, proven=bound.picoseconds, fixing=fixing)
            if fixing is None or not _rounded(candidate, fixing, own.shares, best):
                _first_plans(candidate, best)
            yield candidate


def _first_plans(candidate: _Candidate, best: _Best) -> None:
    """Offer what labels find, and plans that pay for the host's bytes."""
    found = fastest_path(candidate.budgeted, candidate.bound, width=BEAM_WIDTH, beam=True)
    best.offer(candidate.walk, found.path)
    for path in paying_for_host(candidate.budgeted, candidate.bound):
        best.offer(candidate.walk, path)
        best.offer(candidate.walk, _exchanged(candidate.budgeted, path))
        if best.beats(candidate.proven):
            break
    reached = found.dropped if found.path is None else min(found.dropped, found.path.picoseconds)
    candidate.proven = max(candidate.proven, reached)


def _rounded(candidate: _Candidate, fixing: Fixing, shares: Sequence[float] | Floats, best: _Best) -> bool:
    """Offer plans around the relaxation's vertex, and what labels find that is better; False where there are none."""
    found = False
    for path in rounded(fixing, candidate.bound, shares):
        best.offer(candidate.walk, path)
        found = True
    if found and not best.beats(candidate.proven):
        _prove(candidate, best, NARROW_WIDTH, beam=True)
    return found


def _exchanged(budgeted: BudgetedWalk, path: Path) -> Path:
    """A path made better, with its seconds."""
    return Path.along(budgeted.walk, exchanged(budgeted, path.moves))


def _prove(candidate: _Candidate, best: _Best, width: int, *, beam: bool = False) -> None:
    """Search the candidate for something better than the best plan, and note what that proves."""
    below = best.picoseconds
    budgeted = candidate.budgeted if candidate.fixing is None else candidate.fixing.below(below)
    found = fastest_path(budgeted, candidate.bound, width=width, below=below, beam=beam)
    best.offer(candidate.walk, found.path)
    if found.path is not None and candidate.fixing is not None:
        best.offer(candidate.walk, _exchanged(budgeted, found.path))
    if best.picoseconds is not None:
        candidate.proven = max(candidate.proven, min(best.picoseconds - found.loss, found.dropped))


# Plans under a host budget, found by paying for its bytes -------------------------------------------------------------
#
# With a price for each byte that goes to the host its budget is no row any more, and the labels are those of a problem
# without one (NOTE [ Labels and what thinning costs ]). The price is halved between plans that take too much and plans
# that do not; every plan on the way that stays within the budget is a candidate. Layers that are alike would all change
# their ways at the same price: each pays a little more than the one before, so that they do one by one. Nothing is
# proven here: that is the bound's part, and that of labels that count the host's bytes.


ROUNDS = 12
WIDTH = 256
SPREAD = 0.02
"""By so much of itself the price rises from the first region to the last."""


def paying_for_host(budgeted: BudgetedWalk, bound: Bound) -> Iterator[Path]:
    """Paths within both budgets, as their price leads to them; none where the host's budget does not matter."""
    walk = budgeted.walk
    limit = walk.host_budget_bytes
    if limit is None:
        return
    dearest = sum(max((m.picoseconds + m.copying for m in moves), default=0) for moves in budgeted.moves)
    low, high = 0.0, None
    price = bound.host_price or dearest / max(1, limit)
    for _ in range(ROUNDS):
        path = _cheapest(budgeted, bound, price)
        if path is None:
            return
        if sum(m.host_bytes for m in path.moves) <= limit:
            yield path
            high = price
        else:
            low = price
        price = 2 * price if high is None else (low + high) / 2


def _cheapest(budgeted: BudgetedWalk, bound: Bound, price: float) -> Path | None:
    """With its seconds as they are, without the price."""
    walk = budgeted.walk

    def charge(m: Move) -> int:
        return round(price * (1 + SPREAD * m.start / walk.count) * m.host_bytes)

    charged = tuple(tuple(replace(m, picoseconds=m.picoseconds + charge(m)) for m in moves) for moves in walk.moves)
    free = BudgetedWalk.of(free_of_host(walk, charged), budgeted.budget_bytes)
    paid = relax(free, Multipliers(device=bound.multipliers.device))
    path = fastest_path(free, paid, width=WIDTH, beam=True).path
    if path is None:
        return None
    taken = sum(charge(m) for m in path.moves)
    return Path(moves=path.moves, picoseconds=path.picoseconds - taken)
