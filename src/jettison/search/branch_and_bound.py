"""Branch and bound over a space of candidates.

NOTE [ The order of a search ]
Candidates are worked out best bound first, in rounds; the bounds are in NOTE [ What may be left out ] of `bounds`.
Every setup has a rough one. Sharp ones come best first, until the best of these is below all rough ones that are left;
then a round begins, with what each plan of its setups takes at least. Of each setup that could still matter `none` is
worked out, fits or not: its seconds bound those of all other plans, which are worked out where they could still matter.

What matters: a candidate that could be among the fastest, one for each setup; and one that could be on the front of
time against memory, which reaches to `REACH` times the fastest step. Both are exact over the plans that have a name. A
planner takes longer to ask than all other plans together. So it is asked afterwards: for each setup, best bound first,
whose bound is below the last of those that are listed, which makes their places exact with its choices, too.
What a planner says for more memory need not be faster by this estimate, which is finer than its own.

Of candidates that take equally long the one that needs less memory counts, then the one that comes first in the space.
Nothing here depends on how many processes work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Final

from jettison.core.progress import Progress
from jettison.search.bounds import SHAVED, treatments
from jettison.search.evaluate import Bench, Task
from jettison.search.figures import Figures, Found
from jettison.search.space import Candidate, Space
from jettison.search.state import Node, Room, State
from jettison.spec.recompute import Mode, Recompute

REACH: Final = 1.5
"""The front ends at so many times the fastest step."""
ROUND: Final = 64
"""Setups that are worked out before bounds are compared again."""
SHARPENED: Final = 256
PLANNER_BOUNDS: Final = 64
PLANNERS: Final = 2
"""The same for sharp bounds, for bounds of a planner's choices, and for these: of more at once some would be asked in
vain, which takes longer than waiting for each other."""
RUNNERS: Final = 2
"""Places that are exact at least: the best, and what it is compared with."""


@dataclass(kw_only=True)
class Hunt:
    """One branch and bound. See NOTE [ The order of a search ].

    Args:
        top: setups whose place is to be known.
        reach: of the front; None: there is no need of one.
        known: a candidate that fits.
        least: by setup, seconds and bytes that each of its plans takes at least: as far as it is known, of the space.
    """

    space: Space
    room: Room
    bench: Bench
    say: Progress
    top: int = 1
    reach: float | None = None
    known: Found | None = None
    least: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    front: list[Found] = field(default_factory=list)
    _heap: list[tuple[float, int, Node]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _best: dict[int, Found] = field(default_factory=dict)
    _rough: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, setup and bytes, the least last
    _limits: dict[int, int] = field(default_factory=dict)
    _closest: Found | None = None
    _planners: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def ranked(self) -> list[Found]:
        """The best of each setup."""
        return sorted(self._best.values(), key=lambda found: found.rank)

    def run(self) -> None:
        """Work out all that matters.

        Raises:
            UsageError: the space is empty.
        """
        self.find_named()
        self.ask_planner()

    def find_named(self) -> None:
        """Work out all that matters of the plans that have a name.

        Raises:
            UsageError: the space is empty.
        """
        if self.known is not None:
            self._best[self.known.number[0]] = self.known
        self._open()
        while self._heap or self._rough:
            self._work()

    def ask_planner(self) -> None:
        """After that, the planner, where its choice is asked for and could matter."""
        if self.space.asks_planner:
            self._ask_planners()

    def plain(self, number: int) -> Found:
        """A setup without recompute."""
        candidate = Candidate(setup=self.space.setups[number], recompute=Recompute())
        return self._found(candidate, self.bench.figures([Task(candidate=candidate)])[0], (number, 0))

    def closest(self) -> Found:
        """Where nothing fits: the candidate that lacks least, among plans that have a name if there are any."""
        self._know_least(range(len(self.space.setups)))
        pairs = sorted(
            (nbytes - self._limit(setup), setup, number)
            for setup, least in self.least.items()
            for number, (_, nbytes) in enumerate(least)
            if number < len(self.space.plans(self.space.setups[setup])) or len(least) == 1
        )
        found = self._closest
        for at in range(0, len(pairs), PLANNER_BOUNDS):
            chunk = [pair for pair in pairs[at : at + PLANNER_BOUNDS] if found is None or pair[0] < found.lacks]
            if not chunk:
                break
            self._measure([(setup, number) for _, setup, number in chunk])
            found = self._closest
        assert found is not None
        return found

    def _measure(self, numbers: Sequence[tuple[int, int]]) -> None:
        """Bytes of candidates that do not fit."""
        tasks = []
        for setup, number in numbers:
            candidate = self._candidate(setup, self._all_plans(setup)[number])
            tasks.append(Task(candidate=candidate, limit_bytes=0))
        for which, task, figures in zip(numbers, tasks, self.bench.figures(tasks), strict=True):
            self._take(self._found(task.candidate, figures, which))

    # rounds -----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        rough = enumerate(self.bench.rough(self.space.setups))
        self._rough = [(s, number, nbytes) for number, (s, nbytes) in rough if nbytes <= self._limit(number)]
        self._rough.sort(reverse=True)

    def _sharpen(self, state: State) -> None:
        """Of setups with the best rough bounds, sharp ones, until no rough one is better than all of these."""
        while self._rough and (not self._heap or self._rough[-1][0] <= self._heap[0][0]):
            numbers: list[int] = []
            while self._rough and len(numbers) < SHARPENED:
                seconds, number, nbytes = self._rough.pop()
                if state.matters(seconds, nbytes, ranks=True, named=True):
                    numbers.append(number)
            setups, depth = [self.space.setups[number] for number in numbers], self.space.template.model.depth
            for number, setup, bounds in zip(numbers, setups, self.bench.bounds(setups), strict=True):
                seconds, nbytes = bounds.of_any(setup, depth)
                if nbytes <= self._limit(number):
                    self._push(Node(setup=number, plain=True, seconds=seconds, nbytes=nbytes))

    @cached_property
    def _modes(self) -> tuple[Mode, ...]:
        """What happens to layers under the plans of the space."""
        return treatments(self.space.every_plan)

    def _know_least(self, numbers: Iterable[int]) -> None:
        """Work out what each plan of these setups takes at least."""
        missing = [number for number in numbers if number not in self.least]
        setups, depth = [self.space.setups[number] for number in missing], self.space.template.model.depth
        for number, setup, bounds in zip(missing, setups, self.bench.bounds(setups, self._modes), strict=True):
            self.least[number] = bounds.least(setup, depth, self._all_plans(number))

    def _all_plans(self, number: int) -> tuple[Recompute, ...]:
        """The planner's among them: as a bound, one that computes nothing again and holds nothing."""
        return self.space.all_plans(self.space.setups[number])

    def _candidate(self, number: int, plan: Recompute) -> Candidate:
        """With what it is to fit, where that decides about it."""
        budget = self._limit(number) if plan.mode is Mode.AUTO or plan.whole else None
        return Candidate(setup=self.space.setups[number], recompute=plan, budget_bytes=budget)

    def _push(self, node: Node) -> None:
        heapq.heappush(self._heap, (node.seconds, next(self._numbers), node))

    def _work(self) -> None:
        """A round: the most promising nodes that still matter."""
        state = self._state()
        self._sharpen(state)
        batch: list[Node] = []
        tasks: list[list[tuple[int, Task]]] = []
        while self._heap and len(batch) < ROUND:
            *_, node = heapq.heappop(self._heap)
            if not state.matters(node.seconds, node.nbytes, ranks=True, named=True):
                continue
            if node.setup not in self.least:
                self._know_least([node.setup, *(near.setup for *_, near in heapq.nsmallest(SHARPENED, self._heap))])
            wanted = self._wanted(node, state)
            if wanted:
                batch.append(node)
                tasks.append(wanted)
        shown = "" if state.fastest == float("inf") else f", {state.fastest:.3g} s so far"
        self.say(f"{self.space.gpus} GPUs: {self.bench.evaluated:,} candidates{shown}")
        self._evaluate(batch, tasks)

    def _state(self) -> State:
        exact = self.top if self.reach is None else max(self.top, RUNNERS)
        times = [found.seconds.step for found in self.ranked[:exact]]
        times += [float("inf")] * exact
        return State(
            fastest=times[0],
            last=times[exact - 1],
            reach=self.reach,
            times=[f.seconds.step for f in self.front],
            peaks=[f.needed_bytes for f in self.front],
        )

    def _wanted(self, node: Node, state: State) -> list[tuple[int, Task]]:
        """What of a node is to be worked out: the number of each plan, and its task."""
        setup = self.space.setups[node.setup]
        limit, found = self._limit(node.setup), []
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
                found.append((number, Task(candidate=self._candidate(node.setup, plan), limit_bytes=most)))
        if node.plain and matter:
            plans = self.space.plans(setup)
            number = plans.index(Recompute()) if Recompute() in plans else len(plans)
            return [(number, Task(candidate=Candidate(setup=setup, recompute=Recompute())))]
        return found

    def _evaluate(self, batch: Sequence[Node], tasks: Sequence[Sequence[tuple[int, Task]]]) -> None:
        figures = iter(self.bench.figures([task for each in tasks for _, task in each]))
        for node, each in zip(batch, tasks, strict=True):
            made = [self._found(task.candidate, next(figures), (node.setup, number)) for number, task in each]
            if node.plain:
                self._after_plain(node.setup, made[0])
            else:
                for found in made:
                    self._take(found)
        self._sweep()

    def _after_plain(self, number: int, plain: Found) -> None:
        """Of a setup without recompute: a candidate if it is asked for, and the bound of all others."""
        plans = self.space.plans(self.space.setups[number])
        asked = Recompute() in plans
        if asked:
            self._take(plain)
        done = asked and plain.fits
        least, static = plain.seconds.least, plain.figures.static_bytes
        if len(plans) > asked:
            self._push(Node(setup=number, plain=False, seconds=least, nbytes=static, ranks=not done))
        if not done:
            self._planners.append((least, static, number))

    def _ask_planners(self) -> None:
        """Best bound first; a bound of their own is worked out before they are asked."""
        rough = [(least, number, False) for least, static, number in self._planners if static <= self._limit(number)]
        heap = sorted(rough)
        while heap:
            last = self._state().last
            refined, most = heap[0][2], PLANNERS if heap[0][2] else PLANNER_BOUNDS
            numbers: list[int] = []
            while heap and heap[0][2] == refined and len(numbers) < most and heap[0][0] * (1 - SHAVED) <= last:
                numbers.append(heapq.heappop(heap)[1])
            if not numbers:
                break
            self.say(f"{self.space.gpus} GPUs: {self.bench.evaluated:,} candidates, the planner's among them")
            if refined:
                self._plan(numbers)
                continue
            for number, seconds in zip(numbers, self._planner_bounds(numbers), strict=True):
                if seconds is not None:
                    heapq.heappush(heap, (seconds, number, True))

    def _planner_bounds(self, numbers: Sequence[int]) -> list[float | None]:
        setups = [self.space.setups[number] for number in numbers]
        return self.bench.planner_bounds(setups, [self._limit(number) for number in numbers], self.space.planner)

    def _plan(self, numbers: Sequence[int]) -> None:
        tasks = []
        for number in numbers:
            tasks.append(Task(candidate=self._candidate(number, self.space.planner)))
        for number, task, figures in zip(numbers, tasks, self.bench.figures(tasks), strict=True):
            after = len(self.space.plans(self.space.setups[number]))
            self._take(self._found(task.candidate, figures, (number, after)))
        self._sweep()

    # what was found ---------------------------------------------------------------------------------------------------

    def _found(self, candidate: Candidate, figures: Figures, number: tuple[int, int]) -> Found:
        return Found(
            candidate=candidate,
            figures=figures,
            number=number,
            limit_bytes=self._limit(number[0]),
            host_limit_bytes=self.room.hardware.host_memory_bytes,
        )

    def _take(self, found: Found) -> None:
        if not found.fits:
            closest = self._closest
            if closest is None or (found.lacks, found.number) < (closest.lacks, closest.number):
                self._closest = found
            return
        best = self._best.get(found.number[0])
        if best is None or found.rank < best.rank:
            self._best[found.number[0]] = found
        if self.reach is not None:
            self.front.append(found)

    def _sweep(self) -> None:
        """Leave on the front what takes less memory than all that is faster."""
        if self.reach is None:
            return
        kept: list[Found] = []
        for found in sorted(self.front, key=lambda found: found.rank):
            if not kept or found.needed_bytes < kept[-1].needed_bytes:
                kept.append(found)
        most = self.reach * kept[0].seconds.step if kept else 0.0
        self.front = [found for found in kept if found.seconds.step <= most]

    def _limit(self, number: int) -> int:
        if number not in self._limits:
            self._limits[number] = self.room.limit_bytes(self.space.setups[number], self.space)
        return self._limits[number]
