"""The choice over a step as a path: what every option needs, and the smallest budget, exactly.

NOTE [ The step is a path ]
Fix the root's option. Walk the regions in order; the state before region r is what the regions before it hold, the
prefix P. An option (or a segment from r to some stop) adds `resident` to P, and every level of
NOTE [ The step's levels ] that it takes part in is P plus a constant of its own. The largest of these constants is its
`need`: the option may be taken exactly when P + need <= budget. At the end P + loss need <= budget; tail and optimizer
do not depend on P. So a plan is a path over the positions 0 .. R whose moves have a need, a resident size and a cost.
Two things follow:

*The smallest budget is a recursion.* A longer prefix raises every later level alike, so the smallest budget for the
rest of the walk is P + floor_r, where floor_R is the loss need and

    floor_r = min over moves m from r of max(need_m, resident_m + floor_stop(m))

The whole step needs floor_0 (or the tail, or the optimizer, where those are higher). No solver, no bisection.

*Shorter prefix and fewer seconds dominate*, because all constraints are upper bounds on P. That makes labels possible
(labels.py), for which identical layers are no symmetry to break: permutations of a choice are one label.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from jettison.solve.levels import Choice
from jettison.solve.problem import RootOption, StepProblem

PICOSECONDS = 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """From one position to a later one under the option ``key``. ``need_bytes`` is on top of the prefix held."""

    key: str
    start: int
    stop: int
    resident_bytes: int
    need_bytes: int
    picoseconds: int
    segment: bool = False


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A step under one root option (NOTE [ The step is a path ]). ``moves[r]`` start at r; none dominates another."""

    root: str
    root_picoseconds: int
    moves: tuple[tuple[Move, ...], ...]
    loss_need_bytes: int
    floors: tuple[int, ...]  # smallest budget from each position on, when nothing is held before it
    fixed_need_bytes: int  # tail and optimizer

    @property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget that a choice under this root option fits."""
        return max(self.floors[0], self.fixed_need_bytes)

    @property
    def count(self) -> int:
        """Regions."""
        return len(self.moves)

    def choice(self, path: Iterable[Move]) -> Choice:
        """The choice that a path from position 0 to the end stands for."""
        moves = tuple(path)
        return Choice(
            root=self.root,
            regions=tuple(m.key for m in moves for _ in range(m.start, m.stop)),
            segments=tuple((m.start, m.stop) for m in moves if m.segment),
        )


def walks(problem: StepProblem) -> tuple[Walk, ...]:
    """One walk a root option, in the problem's order."""
    return tuple(_walk(problem, root) for root in problem.root)


def minimum_budget(problem: StepProblem) -> int:
    """Smallest budget in bytes that some choice fits, exactly. `choose` at this budget is the fastest that does."""
    return min(walk.minimum_budget_bytes for walk in walks(problem))


def _walk(problem: StepProblem, root: RootOption) -> Walk:
    static = problem.static_bytes
    loss_need = static + root.loss_peak_bytes
    moves = tuple(_undominated(m) for m in _moves(problem, root))
    floors = [loss_need] * (len(moves) + 1)
    for r in reversed(range(len(moves))):
        floors[r] = min(max(m.need_bytes, m.resident_bytes + floors[m.stop]) for m in moves[r])
    gradients = sum(region.gradient_bytes for region in problem.regions)
    return Walk(
        root=root.key,
        root_picoseconds=_picoseconds(root.seconds),
        moves=moves,
        loss_need_bytes=loss_need,
        floors=tuple(floors),
        fixed_need_bytes=static + max(root.tail_peak_bytes + gradients, problem.optimizer_peak_bytes),
    )


def _moves(problem: StepProblem, root: RootOption) -> list[list[Move]]:
    """All moves by start. The needs are the levels less the prefix."""
    static, regions = problem.static_bytes, problem.regions
    later = list(accumulate((region.gradient_bytes for region in reversed(regions)), initial=0))[::-1][1:]
    forward = [static + held for held in root.held_forward_bytes]
    backward = [static + held + gradients for held, gradients in zip(root.held_backward_bytes, later, strict=True)]
    moves: list[list[Move]] = [
        [
            Move(
                key=option.key,
                start=r,
                stop=r + 1,
                resident_bytes=option.resident_bytes,
                need_bytes=max(
                    forward[r] + option.forward_peak_bytes,
                    backward[r] + option.resident_bytes + option.backward_peak_bytes,
                ),
                picoseconds=_picoseconds(option.seconds),
            )
            for option in region.options
        ]
        for r, region in enumerate(regions)
    ]
    for segment in problem.segments:
        inside = range(segment.start, segment.stop)
        moves[segment.start].append(
            Move(
                key=segment.key,
                start=segment.start,
                stop=segment.stop,
                resident_bytes=segment.resident_bytes,
                need_bytes=max(
                    max(forward[r] + segment.forward_peak_bytes for r in inside),
                    max(
                        backward[r] + segment.resident_bytes + peak
                        for r, peak in zip(inside, segment.backward_peak_bytes, strict=True)
                    ),
                ),
                picoseconds=_picoseconds(segment.seconds),
                segment=True,
            )
        )
    return moves


def _undominated(moves: list[Move]) -> tuple[Move, ...]:
    """Without those that another one with the same end beats or equals in bytes, need and seconds."""
    kept: list[Move] = []
    for m in sorted(moves, key=lambda m: (m.stop, m.picoseconds, m.resident_bytes, m.need_bytes)):
        if not any(
            k.stop == m.stop and k.resident_bytes <= m.resident_bytes and k.need_bytes <= m.need_bytes for k in kept
        ):
            kept.append(m)
    return tuple(kept)


def _picoseconds(seconds: float) -> int:
    return round(seconds * PICOSECONDS)
