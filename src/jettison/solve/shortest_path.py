"""The choice over a step as a shortest path: need of every option, and the exact smallest budget.

NOTE [ The step is a path ]
Fix the root's option. Walk the regions in order; the state before region r is the bytes held by the regions before it,
the prefix P, and the bytes that the region before it has in flight, w (NOTE [ Offloaded bytes in flight ]). An option
(or a segment from r to some stop) adds `resident` to P, and every level of NOTE [ The step's levels ] that it takes
part in is P + w plus a constant of its own. The largest of these constants is its `need`: the option may be taken
exactly if P + w + need <= budget. At the end P + loss need <= budget; tail and optimizer do not depend on P. So a plan
is a path over the positions 0 .. R whose moves have a need, a resident size and a cost, plus a cost of waiting for
copies for each pair of neighbours. w takes few values, one for each size that the options of a region offload: its
*class*. Two things follow:

*The smallest budget is a recursion.* A longer prefix raises every later level equally, so the smallest budget for the
rest of the walk is P + floor_r(w), where floor_R is the loss need and

    floor_r(w) = min over moves m from r of max(w + need_m, resident_m + floor_stop(m)(sent_m))

The whole step needs floor_0(0) (or the tail, or the optimizer, if higher). No solver, no bisection. With a host budget
a floor is a list: the smallest budgets for numbers of host bytes. It is exact unless it is longer than `FLOOR_WORK`
allows; then budgets are rounded up to another one of the list, which is still sufficient.

*Shorter prefix, fewer bytes in flight and fewer seconds dominate*, because all constraints are upper bounds on P + w,
and waiting for a copy grows with it. That makes labels possible (label_setting.py); identical layers add no symmetry,
since permutations of a choice are one label.

Among equally fast plans the one that moves least is preferred: a megabyte moved, or a part of one, costs a picosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import add

from jettison.solve.problem import Choice, RegionOption, RootOption, SegmentOption, StepProblem

PICOSECONDS = 10**12
MOVED_FOR_A_PICOSECOND = 10**6
"""Bytes."""
FLOOR_WORK = 200_000
"""Most entries of floors of all positions together, times moves that lead to them, under a host budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkMove:
    """From one position to a later one under the option ``key``. ``need_bytes`` is on top of the prefix; ``sent_bytes``
    are in flight to the host when it ends, ``copying`` picoseconds one way, and ``host_bytes`` for all micro-batches.
    ``hides``: picoseconds of its backward, with which the prefetch of the move before overlaps.
    """

    key: str
    start: int
    stop: int
    resident_bytes: int
    need_bytes: int
    picoseconds: int
    segment: bool = False
    sent_bytes: int = 0
    copying: int = 0
    host_bytes: int = 0
    hides: int = 0

    def waits(self, copying: int) -> int:
        """Picoseconds that its backward is delayed by copies of ``copying`` picoseconds."""
        return max(0, copying - self.hides)


Floor = tuple[int, int]
"""A budget for the rest of a walk, and the host bytes that it then uses."""


@dataclass(frozen=True, kw_only=True)
class StepWalk:
    """A step under one root option (NOTE [ The step is a path ]). ``moves[r]`` start at r; none dominates another.

    Args:
        sent: by position, possible bytes in flight, ascending, and in ``copying`` their picoseconds.
        floors: by position and class of bytes in flight, the smallest budgets from there on with an empty prefix;
            budgets ascend, host bytes descend.
        host_budget_bytes: None if it does not bind.
        floors_rounded: some floors may be above the smallest.
    """

    root: str
    root_picoseconds: int
    moves: tuple[tuple[WalkMove, ...], ...]
    loss_need_bytes: int
    sent: tuple[tuple[int, ...], ...]
    copying: tuple[tuple[int, ...], ...]
    floors: tuple[tuple[tuple[Floor, ...], ...], ...] = field(repr=False)
    fixed_need_bytes: int  # tail and optimizer
    host_budget_bytes: int | None = None
    floors_rounded: bool = False

    @property
    def minimum_budget_bytes(self) -> int | None:
        """The smallest budget that a choice under this root option fits; None if none fits the host's budget."""
        floors = self.floors[0][0]
        return max(floors[0][0], self.fixed_need_bytes) if floors else None

    @property
    def count(self) -> int:
        return len(self.moves)

    @property
    def offloads(self) -> bool:
        return any(len(sizes) > 1 for sizes in self.sent)

    def arrives(self, m: WalkMove) -> int:
        """Class of the bytes in flight after a move."""
        sizes = self.sent[m.stop]
        return 0 if len(sizes) == 1 else sizes.index(m.sent_bytes)

    def choice(self, path: Iterable[WalkMove]) -> Choice:
        moves = tuple(path)
        return Choice(
            root=self.root,
            regions=tuple(m.key for m in moves for _ in range(m.start, m.stop)),
            segments=tuple((m.start, m.stop) for m in moves if m.segment),
        )


@dataclass(frozen=True, kw_only=True)
class Path:
    """Moves from the first position to the end and what they cost, root included."""

    moves: tuple[WalkMove, ...]
    picoseconds: int

    @classmethod
    def along(cls, walk: StepWalk, moves: tuple[WalkMove, ...]) -> Path:
        waits = sum(after.waits(before.copying) for before, after in pairwise(moves))
        return cls(moves=moves, picoseconds=walk.root_picoseconds + waits + sum(m.picoseconds for m in moves))


def walks(problem: StepProblem) -> tuple[StepWalk, ...]:
    """Return one walk for each root option, in the problem's order."""
    return tuple(_walk(problem, root) for root in problem.root)


def least_of(all_walks: Sequence[StepWalk]) -> int:
    """The smallest budget of several walks. Raise `ValueError` if no choice fits the host's budget."""
    found = [least for walk in all_walks if (least := walk.minimum_budget_bytes) is not None]
    if not found:
        raise ValueError(f"no choice fits a host budget of {all_walks[0].host_budget_bytes} bytes")
    return min(found)


def _walk(problem: StepProblem, root: RootOption) -> StepWalk:
    static = problem.static_bytes
    loss_need = static + root.loss_peak_bytes
    moves = tuple(_undominated(m) for m in _moves(problem, root))
    count = len(moves)
    arriving = [{(0, 0)} if r in (0, count) else set[tuple[int, int]]() for r in range(count + 1)]
    for m in (m for group in moves for m in group):
        arriving[m.stop].add((m.sent_bytes, m.copying))
    sent = tuple(tuple(size for size, _ in sorted(sizes)) for sizes in arriving)
    host = _binding_host(problem)
    gradients = sum(region.gradient_bytes for region in problem.regions)
    most = max(8, FLOOR_WORK // max(1, sum(map(len, moves)))) if host is not None else 1
    floors = _floors(moves, sent, loss_need, host, most)
    return StepWalk(
        root=root.key,
        root_picoseconds=_picoseconds(root.seconds),
        moves=moves,
        loss_need_bytes=loss_need,
        sent=sent,
        copying=tuple(tuple(copying for _, copying in sorted(sizes)) for sizes in arriving),
        floors=floors,
        fixed_need_bytes=static + max(root.tail_peak_bytes + gradients, problem.optimizer_peak_bytes),
        host_budget_bytes=host,
        floors_rounded=host is not None and any(len(each) >= most for group in floors for each in group),
    )


def _binding_host(problem: StepProblem) -> int | None:
    """The host's budget, if offloading everything possible would exceed it."""
    if problem.link is None or problem.link.host_budget_bytes is None:
        return None
    most = sum(max(o.offloaded_bytes for o in region.options) * region.copies for region in problem.regions)
    return problem.link.host_budget_bytes if most > problem.link.host_budget_bytes else None


def _floors(
    moves: Sequence[Sequence[WalkMove]], sent: Sequence[Sequence[int]], loss_need: int, host: int | None, most: int
) -> tuple[tuple[tuple[Floor, ...], ...], ...]:
    """Floors from the end to the start; see NOTE [ The step is a path ]."""
    found: list[tuple[tuple[Floor, ...], ...]] = [()] * len(moves) + [(((loss_need, 0),),)]
    for r in reversed(range(len(moves))):
        after = [
            (m.need_bytes, m.resident_bytes + budget, m.host_bytes + taken)
            for m in moves[r]
            for budget, taken in found[m.stop][sent[m.stop].index(m.sent_bytes)]
            if host is None or m.host_bytes + taken <= host
        ]
        alike = all(sent[r][-1] + need <= rest for need, rest, _ in after)  # then bytes in flight add nothing
        each = [
            _few([(max(size + need, rest), taken) for need, rest, taken in after], host is not None, most)
            for size in (sent[r][:1] if alike else sent[r])
        ]
        found[r] = tuple(each * len(sent[r]) if alike else each)
    return tuple(found)


def _few(floors: list[Floor], by_host: bool, most: int) -> tuple[Floor, ...]:
    """The undominated ones; beyond ``most`` the smallest budget, the fewest host bytes, and some between."""
    if not by_host:
        return ((min(budget for budget, _ in floors), 0),)
    kept: list[Floor] = []
    for budget, taken in sorted(floors):
        if not kept or taken < kept[-1][1]:
            kept.append((budget, taken))
    if len(kept) <= most:
        return tuple(kept)
    return tuple(kept[i * (len(kept) - 1) // (most - 1)] for i in range(most))


def _moves(problem: StepProblem, root: RootOption) -> list[list[WalkMove]]:
    """All moves by start. The needs are the levels less the prefix and the bytes in flight there."""
    static, regions = problem.static_bytes, problem.regions
    later = list(accumulate((region.gradient_bytes for region in reversed(regions)), initial=0))[::-1][1:]
    forward = [static + held for held in root.held_forward_bytes]
    backward = [static + held + gradients for held, gradients in zip(root.held_backward_bytes, later, strict=True)]
    moves = [
        [
            _move(problem, option, r, r + 1, (option.backward_peak_bytes,), forward, backward)
            for option in region.options
        ]
        for r, region in enumerate(regions)
    ]
    for s in problem.segments:
        move = _move(problem, s, s.start, s.stop, s.backward_peak_bytes, forward, backward)
        moves[s.start].append(replace(move, segment=True))
    return moves


def _move(
    problem: StepProblem,
    option: RegionOption | SegmentOption,
    start: int,
    stop: int,
    peaks: Sequence[int],
    forward: Sequence[int],
    backward: Sequence[int],
) -> WalkMove:
    """Args: peaks: of its backwards; forward, backward: by region, bytes in flight during either pass."""
    regions, sent = problem.regions[start:stop], option.offloaded_bytes
    copying, stall = _copies(problem, stop - 1, sent)
    hides = problem.link is not None and problem.link.hides
    return WalkMove(
        key=option.key,
        start=start,
        stop=stop,
        resident_bytes=option.resident_bytes,
        need_bytes=max(
            max(forward[start:stop]) + option.forward_peak_bytes,
            max(map(add, backward[start:stop], peaks)) + option.resident_bytes + sent,
        ),
        picoseconds=_picoseconds(option.seconds) + stall,
        sent_bytes=sent,
        copying=copying,
        host_bytes=sent * regions[-1].copies,
        hides=_picoseconds(sum(region.backward_seconds for region in regions) + option.seconds) if hides else 0,
    )


def _copies(problem: StepProblem, r: int, sent: int) -> tuple[int, int]:
    """Picoseconds of a copy one way after region r, and its cost in forward."""
    link = problem.link
    if not sent or link is None:
        return 0, 0
    stall = _picoseconds(link.stall(sent, problem.regions[r + 1].forward_seconds))
    return _picoseconds(sent / link.bytes_per_second), stall - (-sent // MOVED_FOR_A_PICOSECOND)


def _undominated(moves: list[WalkMove]) -> tuple[WalkMove, ...]:
    """Drop moves that another one with the same end dominates in bytes of every kind, need and seconds. Overlap needs
    no check: it grows with the move's own recomputation, and a waiting copy costs the larger of the two.
    """
    kept: list[WalkMove] = []
    for m in sorted(moves, key=lambda m: (m.stop, m.picoseconds, m.resident_bytes, m.need_bytes, m.sent_bytes)):
        if not any(
            k.stop == m.stop
            and k.resident_bytes <= m.resident_bytes
            and k.need_bytes <= m.need_bytes
            and k.sent_bytes <= m.sent_bytes
            for k in kept
        ):
            kept.append(m)
    return tuple(kept)


def _picoseconds(seconds: float) -> int:
    return round(seconds * PICOSECONDS)
