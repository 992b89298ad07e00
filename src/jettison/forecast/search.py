"""The fastest way to train a model on so many devices: layout, batch and recompute plan together, exact in its space.

NOTE [ The order of a search ]
Candidates are worked out best bound first, in rounds; NOTE [ What may be left out ] in `forecast.bounds` has the bounds.
Of each setup that could still matter `none` is worked out, fits or not: its seconds bound those of all other plans,
which are worked out where they could still matter.

What matters: a candidate that could be among the fastest, one for each setup; and one that could be on the front of
time against memory, which reaches to `REACH` times the fastest step. Both are exact over the plans that have a name. A
planner takes longer to ask than all other plans together. So it is asked afterwards: for each setup, best bound first,
whose bound is below the fastest step found, which makes the fastest candidate exact; and for the setups that are listed.
What a planner says for more memory need not be faster by this estimate, which is finer than its own.

Of candidates that take equally long the one that needs less memory counts, then the one that comes first in the space.
Nothing here depends on how many processes work.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from fractions import Fraction
from itertools import count
from typing import Final

from jettison.errors import JettisonError, UsageError
from jettison.forecast.allowance import available_bytes
from jettison.forecast.bounds import SHAVED
from jettison.forecast.evaluate import Bench, Question, Task
from jettison.forecast.figures import Figures, Seconds
from jettison.forecast.journal import Journal
from jettison.forecast.space import Candidate, Setup, Space, setup_run
from jettison.spec.hardware import Hardware
from jettison.spec.run import Mode, Recompute
from jettison.units import format_bytes

REACH: Final = 1.5
"""The front ends at so many times the fastest step."""
ROUND: Final = 256
"""Candidates that are worked out before bounds are compared again."""
PLANNERS: Final = 4
"""The same for a planner's choices."""
MORE_MEMORY: Final = Fraction(11, 10)
MORE_GPUS: Final = (2, 3, 4)
"""Times as many; the first with a candidate that fits."""
Say = Callable[[str], None]


class NothingFits(JettisonError, ValueError):
    """No candidate fits."""

    exit_code = 3

    def __init__(self, closest: Found, *, candidates: int, advice: str) -> None:
        """Say what the closest one lacks."""
        super().__init__(
            f"none of {candidates:,} candidates fits; the closest, {closest.candidate.text}, lacks "
            f"{format_bytes(closest.lacks)} ({closest.lacks}B): it needs {format_bytes(closest.needed_bytes)} of "
            f"{format_bytes(closest.limit_bytes)}. {advice}"
        )
        self.closest = closest


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A candidate that was worked out.

    Args:
        number: of its setup in the space, and of its plan.
        limit_bytes: for its tensors, on a device.
        host_limit_bytes: for what it offloads; None: not stated.
    """

    candidate: Candidate
    figures: Figures
    number: tuple[int, int]
    limit_bytes: int
    host_limit_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """Its peak."""
        return self.figures.peak_bytes

    @property
    def lacks(self) -> int:
        """Bytes, of the device or of the host; 0 or less where it fits."""
        of_host = 0 if self.host_limit_bytes is None else self.figures.host_bytes - self.host_limit_bytes
        return max(self.figures.peak_bytes - self.limit_bytes, of_host)

    @property
    def fits(self) -> bool:
        """Is there room for it, and was it timed?"""
        return self.lacks <= 0 and self.figures.seconds is not None

    @property
    def seconds(self) -> Seconds:
        """Of one that fits."""
        assert self.figures.seconds is not None
        return self.figures.seconds

    @property
    def rank(self) -> tuple[float, int, tuple[int, int]]:
        """The smaller, the better."""
        return self.seconds.step, self.figures.peak_bytes, self.number


@dataclass(frozen=True, kw_only=True, slots=True)
class More:
    """The fastest with more of something."""

    gpus: int
    memory: Fraction
    best: Found


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search found.

    Args:
        ranked: the fastest of each setup, fastest first.
        front: each takes less memory than all faster ones.
        more_gpus: None: no multiple has a candidate that fits.
        evaluated: candidates worked out now; others were bounded, or known.
    """

    space: Space
    ranked: tuple[Found, ...]
    front: tuple[Found, ...]
    more_memory: More
    more_gpus: More | None
    evaluated: int

    @property
    def best(self) -> Found:
        """The fastest."""
        return self.ranked[0]


def search(
    space: Space,
    hardware: Hardware,
    *,
    budget_bytes: int | None = None,
    top: int = 10,
    jobs: int = 1,
    journal: Journal | None = None,
    progress: Say | None = None,
) -> Answer:
    """Find the fastest candidates that fit.

    Args:
        budget_bytes: of tensors on a device, where that is less than what the hardware leaves for them.
        top: setups to list.
        jobs: processes; above 1, call it below ``if __name__ == "__main__"``.
        journal: the state to go on from, and to add to.
        progress: is told how far it is.

    Raises:
        NothingFits: no candidate fits.
        UsageError: the space is empty, or the hardware lacks a figure that an estimate needs.
    """
    if top < 1 or jobs < 1:
        raise UsageError(f"got --top {top} and --jobs {jobs}; expected whole numbers of 1 or more")
    say = progress or (lambda _text: None)
    room = Room(hardware=hardware, budget_bytes=budget_bytes)
    with Bench(Question(template=space.template, hardware=hardware), jobs=jobs, journal=journal) as bench:
        hunt = Hunt(space=space, room=room, bench=bench, top=top, reach=REACH, say=say)
        hunt.run()
        if not hunt.ranked:
            raise NothingFits(hunt.closest(), candidates=space.size, advice=_advice(space))
        ranked, best = tuple(hunt.ranked[:top]), hunt.ranked[0]
        say("with more memory")
        larger = Hunt(space=space, room=replace(room, scale=MORE_MEMORY), bench=bench, say=say, known=best)
        larger.run()
        say("with more GPUs")
        return Answer(
            space=space, ranked=ranked, front=tuple(hunt.front),
            more_memory=More(gpus=space.gpus, memory=MORE_MEMORY, best=larger.ranked[0]),
            more_gpus=_more_gpus(space, room, bench, say), evaluated=bench.evaluated,
        )  # fmt: skip


def _more_gpus(space: Space, room: Room, bench: Bench, say: Say) -> More | None:
    for times in MORE_GPUS:
        hunt = Hunt(space=replace(space, gpus=times * space.gpus), room=room, bench=bench, say=say)
        try:
            hunt.run()
        except UsageError:  # nothing divides
            continue
        if hunt.ranked:
            return More(gpus=hunt.space.gpus, memory=Fraction(1), best=hunt.ranked[0])
    return None


def _advice(space: Space) -> str:
    more = [] if True in space.axes.offload else ["--offload"]
    return f"More GPUs, a smaller --global-batch or --seq{', ' if more else ''}{', '.join(more)} would need less each"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What there is for tensors.

    Args:
        scale: times what the hardware has, and times the budget.
    """

    hardware: Hardware
    budget_bytes: int | None = None
    scale: Fraction = Fraction(1)

    def limit_bytes(self, setup: Setup, space: Space) -> int:
        """For a setup: contexts and communicators come off."""
        memory, usable = (
            int(self.scale * n) for n in (self.hardware.memory_bytes, self.hardware.usable_bytes)
        )  # fmt: skip
        device = replace(self.hardware, memory_bytes=memory, usable_bytes=usable)
        left = available_bytes(device, setup_run(setup, space.template))
        return left if self.budget_bytes is None else min(left, int(self.scale * self.budget_bytes))


class Kind(IntEnum):
    """What a node stands for of its setup."""

    PLAIN = 0  # its plan none
    PLANS = 1  # its other plans


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Candidates that take at least so many seconds and bytes.

    Args:
        setup: its number in the space.
        ranks: could it improve on what is known of its setup?
    """

    kind: Kind
    setup: int
    seconds: float
    nbytes: int
    ranks: bool = True


@dataclass(kw_only=True)
class Hunt:
    """One branch and bound. See NOTE [ The order of a search ].

    Args:
        top: setups whose place is to be known.
        reach: of the front; None: there is no need of one.
        known: a candidate that fits.
    """

    space: Space
    room: Room
    bench: Bench
    say: Say
    top: int = 1
    reach: float | None = None
    known: Found | None = None
    front: list[Found] = field(default_factory=list)
    _heap: list[tuple[float, int, Node]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _best: dict[int, Found] = field(default_factory=dict)
    _limits: dict[int, int] = field(default_factory=dict)
    _too_large: list[Node] = field(default_factory=list)
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
        if self.known is not None:
            self._best[self.known.number[0]] = self.known
        self._open()
        while self._heap:
            self._work(self._next())
        if self.space.asks_planner:
            self._ask_planners()

    def closest(self) -> Found:
        """Where nothing fits: the candidate that lacks least, among plans that have a name if there are any."""
        heap = [(node.nbytes - self._limit(node.setup), i, node) for i, node in enumerate(self._too_large)]
        heapq.heapify(heap)
        while heap and (self._closest is None or heap[0][0] < self._closest.lacks):
            *_, node = heapq.heappop(heap)
            self._work([node])
            while self._heap:
                *_, opened = heapq.heappop(self._heap)
                heapq.heappush(heap, (opened.nbytes - self._limit(opened.setup), -next(self._numbers), opened))
        assert self._closest is not None
        return self._closest

    # rounds -----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        setups, depth = self.space.setups, self.space.template.model.depth
        for number, (setup, bound) in enumerate(zip(setups, self.bench.bounds(setups), strict=True)):
            seconds, nbytes = bound.seconds(setup, depth), bound.nbytes(setup)
            self._push(Node(kind=Kind.PLAIN, setup=number, seconds=seconds, nbytes=nbytes))

    def _push(self, node: Node) -> None:
        heapq.heappush(self._heap, (node.seconds, next(self._numbers), node))

    def _next(self) -> list[Node]:
        """The most promising nodes."""
        ranking = self.ranked
        fastest = ranking[0].seconds.step if ranking else float("inf")
        last = ranking[self.top - 1].seconds.step if len(ranking) >= self.top else float("inf")
        times = [found.seconds.step for found in self.front]
        batch: list[Node] = []
        while self._heap and len(batch) < ROUND:
            *_, node = heapq.heappop(self._heap)
            if node.nbytes > self._limit(node.setup):
                self._too_large.append(node)
            elif self._matters(node, fastest, last, times):
                batch.append(node)
        shown = f", {fastest:.3g} s so far" if ranking else ""
        self.say(f"{self.space.gpus} GPUs: {self.bench.evaluated:,} candidates{shown}")
        return batch

    def _matters(self, node: Node, fastest: float, last: float, times: Sequence[float]) -> bool:
        seconds = node.seconds * (1 - SHAVED)
        if node.ranks and seconds <= last:
            return True
        if self.reach is None or seconds > self.reach * fastest:
            return False
        at = bisect_right(times, seconds)
        return at == 0 or self.front[at - 1].needed_bytes > node.nbytes

    def _work(self, batch: Sequence[Node]) -> None:
        plans = [self._tasks(node) for node in batch]
        found = iter(self.bench.figures([task for tasks in plans for task, _ in tasks]))
        for node, tasks in zip(batch, plans, strict=True):
            setup = node.setup
            made = [
                self._found(task.candidate, next(found), (setup, number)) for task, number in tasks
            ]  # fmt: skip
            if node.kind is Kind.PLAIN:
                self._after_plain(node, made[0])
            else:
                for each in made:
                    self._take(each)
        self._sweep()

    def _tasks(self, node: Node) -> list[tuple[Task, int]]:
        """What to work out, and the number of each plan."""
        number = node.setup
        setup = self.space.setups[number]
        if node.kind is Kind.PLAIN:
            return [(Task(candidate=Candidate(setup=setup, recompute=Recompute())), 0)]
        limit = self._limit(number)
        return [
            (Task(candidate=Candidate(setup=setup, recompute=plan), limit_bytes=limit), i)
            for i, plan in enumerate(self.space.plans(setup))
            if plan != Recompute()
        ]

    def _after_plain(self, node: Node, plain: Found) -> None:
        """Of a setup without recompute: a candidate if it is asked for, and the bound of all others."""
        number = node.setup
        plans = self.space.plans(self.space.setups[number])
        asked = Recompute() in plans
        if asked:
            self._take(plain)
        done = asked and plain.fits
        least, static = plain.seconds.least, plain.figures.static_bytes
        if len(plans) > asked:
            self._push(
                Node(kind=Kind.PLANS, setup=number, seconds=least, nbytes=static, ranks=not done)
            )  # fmt: skip
        if not done:
            self._planners.append((least, static, number))

    def _ask_planners(self) -> None:
        asked = set()
        waiting = sorted(entry for entry in self._planners if entry[1] <= self._limit(entry[2]))
        at = 0
        while at < len(waiting):
            fastest = min((found.seconds.step for found in self._best.values()), default=float("inf"))
            batch = [
                n for least, _, n in waiting[at : at + PLANNERS] if least * (1 - SHAVED) <= fastest
            ]  # fmt: skip
            if not batch:
                break
            self.say(f"{self.space.gpus} GPUs: the planner, {at} of at most {len(waiting)} setups")
            self._plan(batch)
            asked |= set(batch)
            at += PLANNERS
        if self.reach is not None:
            possible = {n for *_, n in waiting} - asked
            self._plan([found.number[0] for found in self.ranked[: self.top] if found.number[0] in possible])

    def _plan(self, numbers: Sequence[int]) -> None:
        tasks = []
        for number in numbers:
            mode = Recompute(mode=Mode.AUTO)
            setup, limit = self.space.setups[number], self._limit(number)
            tasks.append(Task(candidate=Candidate(setup=setup, recompute=mode, budget_bytes=limit)))
        for number, task, figures in zip(numbers, tasks, self.bench.figures(tasks), strict=True):
            after = len(self.space.plans(self.space.setups[number]))
            self._take(self._found(task.candidate, figures, (number, after)))
        self._sweep()

    # what was found ---------------------------------------------------------------------------------------------------

    def _found(self, candidate: Candidate, figures: Figures, number: tuple[int, int]) -> Found:
        return Found(
            candidate=candidate, figures=figures, number=number, limit_bytes=self._limit(number[0]),
            host_limit_bytes=self.room.hardware.host_memory_bytes,
        )  # fmt: skip

    def _take(self, found: Found) -> None:
        if not found.fits:
            if self._closest is None or (found.lacks, found.number) < (self._closest.lacks, self._closest.number):
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
