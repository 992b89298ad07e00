"""Branch and bound over a space of candidates.

NOTE [ The order of a search ]
Candidates are evaluated best bound first, in rounds; the bounds are in NOTE [ Pruning rules ] of `bounds`. Every setup
has a rough bound. Sharp bounds are computed best first, until the best of them is below all remaining rough ones; then
a round begins, with bounds of each plan of its setups. Of each setup that could still matter `none` is evaluated, fits
or not: its seconds bound those of all other plans, which are evaluated if they could still matter.

A candidate matters if it could be among the fastest, one for each setup, or on the Pareto front of step time and
memory, which ends at `REACH` times the fastest step. Both are exact over named plans. A planner's choice takes longer
than all other plans of a setup. So planners run afterwards: best bound first, for setups with a bound below the last
listed candidate, so that listed places are exact with planners' choices, too. A planner's choice for more memory need
not be faster by this estimate, which is finer than the planner's own.

Ties go to the candidate that needs less memory, then to the first in the space, whatever the processes' number.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import count
from typing import Final

from jettison.core.objects import OnDemand
from jettison.core.progress import Progress
from jettison.predict.ranges import fit_budgets, most_bytes
from jettison.search.bounds import SHAVED, layer_modes
from jettison.search.evaluate import Evaluated, Evaluator, Task
from jettison.search.space import SearchCandidate, Setup, Space, setup_run
from jettison.spec.device_allowance import FitBudget, Limit, available_to
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import Mode, Recompute

REACH: Final = 1.5
"""Slowest step on the front over the fastest one."""
ROUND: Final = 64
"""Setups evaluated before bounds are compared once more."""
SHARPENED: Final = 256
PLANNER_BOUNDS: Final = 64
PLANNERS: Final = 2
"""Setups of a round of sharp bounds, of planner bounds and of planner runs: more would run some in vain."""
RUNNERS: Final = 2
"""Fewest exact places: the best, and the runner-up that it is compared with."""

_Asked = tuple[tuple[int, int], Task]
"""Numbers of a setup and of its plan, and the task."""


@dataclass(kw_only=True)
class Hunt:
    """One branch and bound. See NOTE [ The order of a search ].

    Args:
        top: number of exact places.
        reach: of the Pareto front; None: no front.
        known: a candidate that fits.
        least: lower bounds known so far, in seconds and bytes, of each plan of a setup.
    """

    space: Space
    room: MemoryLimit
    evaluator: Evaluator
    say: Progress
    top: int = 1
    reach: float | None = None
    known: Evaluated | None = None
    least: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    front: list[Evaluated] = field(default_factory=list)
    _heap: list[tuple[float, int, Node]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _best: dict[int, Evaluated] = field(default_factory=dict)
    _rough: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, setup and bytes, the least last
    _closest: Evaluated | None = None  # the closest of those that do not fit
    _planners: list[tuple[float, int, bool]] = field(default_factory=list)  # bound, setup, is it `planner_bounds`'?

    @property
    def ranked(self) -> list[Evaluated]:
        """Best candidate of each setup, in order."""
        return sorted(self._best.values(), key=lambda found: found.rank)

    def run(self) -> None:
        """Evaluate every candidate that matters. Raise `UsageError` if the space is empty."""
        self.find_named()
        self.ask_planner()

    def find_named(self) -> None:
        """Evaluate every named plan that matters. Raise `UsageError` if the space is empty."""
        if self.known is not None:
            self._best[self.known.number[0]] = self.known
        rough = enumerate(self.evaluator.rough(self.space.setups))
        self._rough = [(s, number, nbytes) for number, (s, nbytes) in rough if nbytes <= self._limits[number]]
        self._rough.sort(reverse=True)
        while self._heap or self._rough:
            self._round()

    def plain(self, number: int) -> Evaluated:
        """Evaluate a setup without recomputation."""
        candidate = SearchCandidate(setup=self.space.setups[number], recompute=Recompute())
        return self._worked_out([((number, 0), Task(candidate=candidate))])[0]

    def closest(self) -> Evaluated:
        """Return the candidate that lacks least if nothing fits, of the named plans if there are any."""
        self._know_least(range(len(self.space.setups)))
        pairs = sorted(
            (nbytes - self._limits[setup], setup, number)
            for setup, least in self.least.items()
            for number, (_, nbytes) in enumerate(least)
            if number < len(self.space.plans(self.space.setups[setup])) or len(least) == 1
        )
        for at in range(0, len(pairs), PLANNER_BOUNDS):
            most = self._closest.over_bytes if self._closest is not None else float("inf")
            chunk = [pair for pair in pairs[at : at + PLANNER_BOUNDS] if pair[0] < most]
            if not chunk:
                break
            asked = [(setup, number, self._all_plans(setup)[number]) for _, setup, number in chunk]
            for found in self._worked_out(
                [((setup, n), Task(candidate=self._candidate(setup, plan), limit_bytes=0)) for setup, n, plan in asked]
            ):
                self._take(found)
        assert self._closest is not None
        return self._closest

    # rounds -----------------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Evaluate the most promising nodes that still matter."""
        state = self._state()
        self._sharpen(state)
        plain: set[int] = set()
        asked: list[_Asked] = []
        nodes = 0
        while self._heap and nodes < ROUND:
            *_, node = heapq.heappop(self._heap)
            if not state.matters(node.seconds, node.nbytes, ranks=True, named=True):
                continue
            if node.setup not in self.least:
                self._know_least([node.setup, *(near.setup for *_, near in heapq.nsmallest(SHARPENED, self._heap))])
            wanted = self._wanted(node, state)
            nodes += bool(wanted)
            plain |= {node.setup} if node.plain else set()
            asked += wanted
        shown = "" if state.fastest == float("inf") else f", {state.fastest:.3g} s so far"
        self.say(f"{self.space.gpus} GPUs: {self.evaluator.evaluated:,} candidates{shown}")
        for found in self._worked_out(asked):
            if found.number[0] in plain:
                self._after_plain(found)
            else:
                self._take(found)
        self._sweep()

    def _sharpen(self, state: Incumbents) -> None:
        """Compute sharp bounds, best rough bound first, until no rough one is better than all sharp ones."""
        while self._rough and (not self._heap or self._rough[-1][0] <= self._heap[0][0]):
            numbers: list[int] = []
            while self._rough and len(numbers) < SHARPENED:
                seconds, number, nbytes = self._rough.pop()
                if state.matters(seconds, nbytes, ranks=True, named=True):
                    numbers.append(number)
            setups, depth = [self.space.setups[number] for number in numbers], self.space.template.model.depth
            for number, setup, bounds in zip(numbers, setups, self.evaluator.bounds(setups), strict=True):
                ((seconds, nbytes),) = bounds.least(setup, depth, (self.space.planner,))
                if nbytes <= self._limits[number]:
                    self._push(Node(setup=number, plain=True, seconds=seconds, nbytes=nbytes))

    def _know_least(self, numbers: Iterable[int]) -> None:
        """Compute lower bounds of each plan of these setups."""
        missing = [number for number in numbers if number not in self.least]
        setups, depth = [self.space.setups[number] for number in missing], self.space.template.model.depth
        for number, setup, bounds in zip(missing, setups, self.evaluator.bounds(setups, self._modes), strict=True):
            self.least[number] = bounds.least(setup, depth, self._all_plans(number))

    @cached_property
    def _modes(self) -> tuple[Mode, ...]:
        """Policies of layers under the plans of the space."""
        return layer_modes(self.space.every_plan)

    def _all_plans(self, number: int) -> tuple[Recompute, ...]:
        """Plans of a setup, the planner's included; its bound is that of no recomputation and no activations."""
        return self.space.all_plans(self.space.setups[number])

    def _candidate(self, number: int, plan: Recompute) -> SearchCandidate:
        """Make a candidate, with its budgets if the plan depends on them; a planner's with the last alone."""
        budgets = self._budgets[number] if plan.whole else self._budgets[number][-1:] if plan.mode is Mode.AUTO else ()
        return SearchCandidate(setup=self.space.setups[number], recompute=plan, budgets=budgets)

    def _plan(self, numbers: Sequence[int]) -> None:
        """Run planners within the first budget that each fits."""
        for at in range(max(len(self._budgets[number]) for number in numbers)):
            asked = []
            for number in numbers:
                setup, budgets = self.space.setups[number], self._budgets[number][at : at + 1]
                candidate = SearchCandidate(setup=setup, recompute=self.space.planner, budgets=budgets)
                asked.append(((number, len(self.space.plans(setup))), Task(candidate=candidate)))
            found = self._worked_out(asked)
            for one in found:
                self._take(one)
            numbers = [one.number[0] for one in found if not one.fits]
            if not numbers:
                break

    def _push(self, node: Node) -> None:
        heapq.heappush(self._heap, (node.seconds, next(self._numbers), node))

    def _state(self) -> Incumbents:
        exact = self.top if self.reach is None else max(self.top, RUNNERS)
        times = [found.seconds.step for found in self.ranked[:exact]]
        times += [float("inf")] * exact
        return Incumbents(
            fastest=times[0],
            last=times[exact - 1],
            reach=self.reach,
            times=[f.seconds.step for f in self.front],
            peaks=[f.needed_bytes for f in self.front],
        )

    def _wanted(self, node: Node, state: Incumbents) -> list[_Asked]:
        """Return the tasks of a node that still matter."""
        setup = self.space.setups[node.setup]
        limit, found = self._limits[node.setup], list[_Asked]()
        matter = False
        for number, (plan, least) in enumerate(zip(self._all_plans(node.setup), self.least[node.setup], strict=True)):
            seconds, nbytes = least
            if not node.plain:
                seconds, nbytes = max(seconds, node.seconds), max(nbytes, node.nbytes)
            named = plan.mode is not Mode.AUTO
            if nbytes > limit or not state.matters(seconds, nbytes, ranks=node.ranks, named=named):
                continue
            matter = True
            if not node.plain and named and plan != Recompute():
                first = node.ranks and seconds * (1 - SHAVED) <= state.last
                most = limit if first or plan.whole else min(limit, state.below(seconds))
                task = Task(candidate=self._candidate(node.setup, plan), limit_bytes=most)
                found.append(((node.setup, number), task))
        if node.plain and matter:
            plans = self.space.plans(setup)
            number = plans.index(Recompute()) if Recompute() in plans else len(plans)
            return [((node.setup, number), Task(candidate=SearchCandidate(setup=setup, recompute=Recompute())))]
        return found

    def _after_plain(self, plain: Evaluated) -> None:
        """Take a setup without recomputation: a candidate if the space has it, and the bound of all other plans."""
        number = plain.number[0]
        plans = self.space.plans(self.space.setups[number])
        asked = Recompute() in plans
        if asked:
            self._take(plain)
        done = asked and plain.fits
        least, static = plain.seconds.least, plain.figures.static_bytes
        if len(plans) > asked:
            self._push(Node(setup=number, plain=False, seconds=least, nbytes=static, ranks=not done))
        if not done and static <= self._limits[number]:
            self._planners.append((least, number, False))

    def ask_planner(self) -> None:
        """Run planners whose choices could matter, best bound first, each after a bound on its own choice."""
        heap = sorted(self._planners) if self.space.asks_planner else []
        while heap:
            last = self._state().last
            refined, most = heap[0][2], PLANNERS if heap[0][2] else PLANNER_BOUNDS
            numbers: list[int] = []
            while heap and heap[0][2] == refined and len(numbers) < most and heap[0][0] * (1 - SHAVED) <= last:
                numbers.append(heapq.heappop(heap)[1])
            if not numbers:
                break
            self.say(f"{self.space.gpus} GPUs: {self.evaluator.evaluated:,} candidates, the planner's among them")
            setups, limits = [self.space.setups[n] for n in numbers], [self._limits[n] for n in numbers]
            if not refined:
                least = self.evaluator.planner_bounds(setups, limits, self.space.planner)
                for number, seconds in zip(numbers, least, strict=True):
                    if seconds is not None:
                        heapq.heappush(heap, (seconds, number, True))
                continue
            self._plan(numbers)
            self._sweep()

    # what was found ---------------------------------------------------------------------------------------------------

    def _worked_out(self, asked: Sequence[_Asked]) -> list[Evaluated]:
        figures = self.evaluator.figures([task for _, task in asked])
        return [
            Evaluated(
                candidate=task.candidate,
                figures=each,
                number=number,
                limit_bytes=self._limits[number[0]],
                host_limit_bytes=self.room.hardware.host_memory_bytes,
            )
            for (number, task), each in zip(asked, figures, strict=True)
        ]

    def _take(self, found: Evaluated) -> None:
        if not found.fits:
            best = self._closest
            if best is None or (found.over_bytes, found.number) < (best.over_bytes, best.number):
                self._closest = found
            return
        best = self._best.get(found.number[0])
        if best is None or found.rank < best.rank:
            self._best[found.number[0]] = found
        if self.reach is not None:
            self.front.append(found)

    def _sweep(self) -> None:
        """Drop candidates from the front that need no less memory than a faster one."""
        if self.reach is None:
            return
        kept: list[Evaluated] = []
        for found in sorted(self.front, key=lambda found: found.rank):
            if not kept or found.needed_bytes < kept[-1].needed_bytes:
                kept.append(found)
        most = self.reach * kept[0].seconds.step if kept else 0.0
        self.front = [found for found in kept if found.seconds.step <= most]

    @cached_property
    def _limits(self) -> OnDemand[int, int]:
        return OnDemand(lambda number: self.room.limit_bytes(self.space.setups[number], self.space))

    @cached_property
    def _budgets(self) -> OnDemand[int, tuple[FitBudget, ...]]:
        return OnDemand(lambda number: self.room.budgets(self.space.setups[number], self.space))


# limits, nodes and incumbents -----------------------------------------------------------------------------------------


_UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """Usable memory for tensors.

    Args:
        scale: factor of the hardware's memory and of the budget.
        margin: kept free in addition to the expected allowance: `allowance.available_to`.
        may: accept candidates that may fit, at the low end of their range.
    """

    hardware: Hardware
    budget_bytes: int | None = None
    scale: Fraction = Fraction(1)
    margin: float = 0.0
    may: bool = False

    def limit_bytes(self, setup: Setup, space: Space) -> int:
        """Bytes for a setup's tensors, without CUDA context, communicators and margin."""
        budget = None if self.budget_bytes is None else int(self.scale * self.budget_bytes)
        if self.may:
            usable = self._device.usable_bytes
            return most_bytes(space.template, setup.layout, usable_bytes=usable, budget_bytes=budget)
        template = space.template
        left = available_to(self._device, setup.layout, template.kernels.device, self.margin, stack=template.stack)
        return left if budget is None else min(left, budget)

    def budgets(self, setup: Setup, space: Space) -> tuple[FitBudget, ...]:
        """Budgets of a planner for a setup."""
        limit = Limit(
            nbytes=self.limit_bytes(setup, space),
            budget_bytes=self.budget_bytes,
            device_bytes=self._device.usable_bytes,
        )
        return fit_budgets(setup_run(setup, space.template, Recompute(mode=Mode.AUTO)), limit)

    @cached_property
    def _device(self) -> Hardware:
        memory, usable = (int(self.scale * n) for n in (self.hardware.memory_bytes, self.hardware.usable_bytes))
        return replace(self.hardware, memory_bytes=memory, usable_bytes=usable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Plans of one setup, with a lower bound of their seconds and bytes.

    Args:
        setup: its number in the space.
        plain: evaluate `none`, for itself and as a bound of the other plans; otherwise, the others.
        ranks: could it improve on the best of its setup?
    """

    setup: int
    plain: bool
    seconds: float
    nbytes: int
    ranks: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Incumbents:
    """Best candidates so far.

    Args:
        fastest: seconds of the best; infinite until there is one.
        last: seconds of the last exact place.
        reach: of the Pareto front; None: no front.
        times, peaks: seconds and bytes of the front, the fastest first.
    """

    fastest: float
    last: float
    reach: float | None
    times: list[float]
    peaks: list[int]

    def matters(self, seconds: float, nbytes: int, *, ranks: bool, named: bool) -> bool:
        """Whether a candidate with these bounds could be listed, or be on the Pareto front.

        Args:
            ranks: it could be the best of its setup.
            named: it is not a planner's choice; those come later.
        """
        shaved = seconds * (1 - SHAVED)
        if ranks and shaved <= self.last:
            return True
        if self.reach is None or not named or shaved > self.reach * self.fastest:
            return False
        return nbytes <= self.below(seconds)

    def below(self, seconds: float) -> int:
        """Most bytes of a candidate with this step time that is on the front."""
        at = bisect_right(self.times, seconds * (1 - SHAVED))
        return self.peaks[at - 1] - 1 if at else _UNBOUNDED
