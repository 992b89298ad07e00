"""Options of a region with CPU offload: bytes kept on the device, bytes offloaded, seconds of recomputation.

NOTE [ Three actions ]
A region's backward reads kept buffers, on the device or offloaded, and results of recomputed ops. The kept buffers
decide the seconds and the peaks; any part of them that may move can be offloaded. All bytes cost the link the same, so
one part of each size is enough.

*Small programs* (`EXACT_BUFFERS`): every set of kept buffers, with every size of an offloaded part of it, without
dominated ones. No plan over them is missed.

*Large programs*: at a price of a byte on the device and a price of a byte that moves, the kept buffers are a vertex of
the hull of NOTE [ Keep or recompute is a cut ], and all of them move or none does, except for waiting: its cost has
kinks where a copy is as long as the work that hides it. So for each vertex the options are: nothing, everything, and
the largest part below each kink. That misses points inside the hull; a plan's gap refers to the best of the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Final

from jettison.ledger.program import Program
from jettison.solve.frontier import FrontierPoint, pareto_frontier

EXACT_BUFFERS: Final = 10
"""Up to this number of buffers that could be kept, all options of a region are found."""
SUMMED: Final = 14
"""Up to this number of buffers all subset sums are tried; above it the largest that fits is taken first."""
HULL_POINTS: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionPoint:
    """One option of a region: buffers kept on the device, buffers offloaded to CPU; the rest is recomputed.

    Bytes are of one micro-batch; ``seconds`` of recomputation in its backward. ``key`` names it within its program.
    """

    key: str
    kept: frozenset[int]
    offloaded: frozenset[int]
    kept_bytes: int
    offloaded_bytes: int
    seconds: float

    @property
    def stays(self) -> frozenset[int]:
        """Buffers kept, on the device or on the host."""
        return self.kept | self.offloaded


Peaks = Callable[[frozenset[int]], tuple[int, int]]
"""Bytes of the forward's and of the backward's peak when these buffers are kept, as in `RegionOption`."""


def action_points(
    program: Program,
    seconds: Sequence[float],
    *,
    movable: frozenset[int],
    kinks: Iterable[int],
    peaks: Peaks,
    max_points: int = HULL_POINTS,
) -> tuple[ActionPoint, ...]:
    """Undominated options of a region, fewest device bytes first; see NOTE [ Three actions ].

    Args:
        seconds: of each op.
        movable: buffers that may be offloaded.
        kinks: numbers of bytes whose copy is as long as the work that hides it.
        max_points: number of points on the hull of a large program.

    Raises:
        ValueError: a needed buffer can neither be kept nor recomputed.
    """
    candidates = [b.index for b in program.buffers if b.keepable and not b.free]
    small = len(candidates) <= EXACT_BUFFERS
    if small:
        found = list(_every(program, seconds, candidates, movable))
    else:
        targets = sorted(set(kinks))
        hull = pareto_frontier(program, seconds, max_points=max_points)
        found = [p for point in hull for p in _parts(program, point.kept, point.seconds, movable, targets)]
    return undominated(found, peaks)


def kept_points(points: Iterable[FrontierPoint]) -> tuple[ActionPoint, ...]:
    """Points of the frontier as options that offload nothing."""
    return tuple(
        ActionPoint(
            key=p.key, kept=p.kept, offloaded=frozenset(), kept_bytes=p.kept_bytes, offloaded_bytes=0, seconds=p.seconds
        )
        for p in points
    )


def undominated(points: Iterable[ActionPoint], peaks: Peaks) -> tuple[ActionPoint, ...]:
    """Points not dominated in bytes kept, bytes offloaded, seconds and both peaks; fewest bytes first."""
    kept: list[tuple[tuple[float, ...], ActionPoint]] = []
    ranked = []
    for p in points:
        forward, backward = peaks(p.stays)
        total = p.kept_bytes + p.offloaded_bytes
        ranked.append(((p.kept_bytes, p.offloaded_bytes, p.seconds, forward, total + backward), p))
    for costs, p in sorted(ranked, key=lambda pair: (*pair[0], pair[1].key)):
        if not any(all(a <= b for a, b in zip(other, costs, strict=True)) for other, _ in kept):
            kept.append((costs, p))
    return tuple(p for _, p in kept)


def _every(
    program: Program, seconds: Sequence[float], candidates: Sequence[int], movable: frozenset[int]
) -> Iterator[ActionPoint]:
    empty = frozenset(b for b in candidates if not program.buffers[b].nbytes)  # always kept: they cost nothing
    some = [b for b in candidates if b not in empty]
    for chosen in chain.from_iterable(combinations(some, n) for n in range(len(some) + 1)):
        stays = empty.union(chosen)
        try:
            again = program.recompute_set(stays)
        except ValueError:
            continue  # a needed buffer can be neither kept nor recomputed
        spent = sum(seconds[o] for o in again)
        for sent in _by_size(program, [b for b in chosen if b in movable]).values():
            yield _point(program, stays, frozenset(sent), spent)


def _parts(
    program: Program, stays: frozenset[int], spent: float, movable: frozenset[int], targets: Sequence[int]
) -> Iterator[ActionPoint]:
    for sent in parts_to_send(program, stays, movable, targets):
        yield _point(program, stays, sent, spent)


def parts_to_send(
    program: Program, stays: frozenset[int], movable: frozenset[int], targets: Sequence[int]
) -> list[frozenset[int]]:
    """Offloaded parts of the kept buffers: nothing, as much as fits below each target, and all; fewest bytes first."""
    free = [b for b in sorted(stays) if b in movable and not program.buffers[b].free]
    sums = _by_size(program, free) if len(free) <= SUMMED else None
    parts = {frozenset[int](), frozenset(free)}
    for target in targets:
        if sums is None:
            parts.add(_filled(program, free, target))
        else:
            parts.add(frozenset(sums[max(size for size in sums if size <= target)]))
    return sorted(parts, key=lambda part: (program.kept_bytes(part), sorted(part)))


def _by_size(program: Program, buffers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each size that a subset of the buffers has, the first such subset."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for b in buffers:
        for size, part in list(found.items()):
            found.setdefault(size + program.buffers[b].nbytes, (*part, b))
    return found


def _filled(program: Program, buffers: Sequence[int], target: int) -> frozenset[int]:
    """Fill up to the target, largest buffers first."""
    part, left = set(), target
    for b in sorted(buffers, key=lambda b: -program.buffers[b].nbytes):
        if program.buffers[b].nbytes <= left:
            part.add(b)
            left -= program.buffers[b].nbytes
    return frozenset(part)


def _point(program: Program, stays: frozenset[int], sent: frozenset[int], spent: float) -> ActionPoint:
    held, moved = program.kept_bytes(stays - sent), program.kept_bytes(sent)
    key = f"keep-{held}" if not moved else f"keep-{held}-send-{moved}"
    return ActionPoint(
        key=f"{key}-of-{'.'.join(map(str, sorted(stays)))}",
        kept=stays - sent,
        offloaded=sent,
        kept_bytes=held,
        offloaded_bytes=moved,
        seconds=spent,
    )


# Keeping a little more, for a lower peak in backward ------------------------------------------------------------------
#
# The hull of bytes and seconds (frontier.py) counts bytes held between forward and backward. The fewest bytes held are
# not the lowest peak: the first tensor that backward reads is often the last of a long chain, and every tensor
# recomputed on the way to it stays until its own turn. One small buffer kept in the middle (the residual between
# attention and MLP, say) cuts the chain, so that each half is recomputed at its own turn. The replay below finds these
# buffers by walking through backward like the runtime, from sizes alone; measured seconds play no part.


MOST_CUTS = 3  # for each block
LEAST_GAIN = 0.02  # lower peak, as a share, for one more buffer


def lean_points(
    program: Program, kept: frozenset[int], seconds: Sequence[float], *, most: int = MOST_CUTS
) -> tuple[FrontierPoint, ...]:
    """Points that keep ``kept`` and one, two or more buffers in addition, each with a lower peak in backward.

    Args:
        seconds: of each op, for the cost of the points; they play no part in the choice.
        most: number of points. Each one replays backward for each buffer that could be kept.
    """
    found = []
    peak = _peak(program, kept)
    for _ in range(most):
        tried = [(_peak(program, kept | {b}), b) for b in _candidates(program, kept)]
        lowest, cut = min(tried, default=(peak, -1))
        if lowest >= peak * (1 - LEAST_GAIN):
            break
        peak, kept = lowest, kept | {cut}
        again = program.recompute_set(kept)
        nbytes = program.kept_bytes(kept)
        found.append(
            FrontierPoint(
                key=f"lean-{nbytes}", kept=kept, kept_bytes=nbytes, seconds=sum(seconds[i] for i in again), price=0.0
            )
        )
    return tuple(found)


def is_lean(key: str) -> bool:
    """Is the option one of `lean_points`?"""
    return key.startswith("lean-")


def _candidates(program: Program, kept: frozenset[int]) -> list[int]:
    """Recomputed buffers that could be kept."""
    again = program.recompute_set(kept)
    made = {b for i in again for b in program.ops[i].outputs if program.buffers[b].producer == i}
    return sorted(b for b in made if program.buffers[b].keepable and not program.buffers[b].free and b not in kept)


def _peak(program: Program, kept: frozenset[int]) -> int:
    """Most bytes of kept and recomputed buffers at one moment of backward, without gradients."""
    return program.kept_bytes(kept) + _BackwardWalk(program, kept).peak_bytes()


class _BackwardWalk:
    """Replay of a backward like the runtime's: a buffer lives from its computation to its last use."""

    def __init__(self, program: Program, kept: frozenset[int]) -> None:
        self.program = program
        again = program.recompute_set(kept)
        self.makers = {b: i for i in again for b in program.ops[i].outputs if b not in kept}
        self.slots = [slot.buffer for slot in program.slots if slot.buffer in self.makers]
        self.counts = dict.fromkeys(self.makers, 0)
        for b in [*self.slots, *(b for i in again for b in program.ops[i].inputs)]:
            if b in self.counts:
                self.counts[b] += 1
        self.held: set[int] = set()
        self.live_bytes = 0
        self.most_bytes = 0

    def peak_bytes(self) -> int:
        """Peak bytes of recomputed buffers."""
        for b in reversed(self.slots):  # backward reads in the opposite order
            self._make(b)
            self._release(b)
        return self.most_bytes

    def _make(self, wanted: int) -> None:
        """Recompute a buffer and its inputs; without recursion, since chains are long."""
        stack = [wanted]
        while stack:
            b = stack[-1]
            if b in self.held:
                stack.pop()
                continue
            op = self.program.ops[self.makers[b]]
            missing = [n for n in op.inputs if n in self.makers and n not in self.held]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            self._run(op.outputs, op.inputs)

    def _run(self, outputs: Sequence[int], inputs: Sequence[int]) -> None:
        fresh = [b for b in outputs if b in self.makers and b not in self.held]
        self.held.update(fresh)
        self.live_bytes += sum(self.program.buffers[b].nbytes for b in fresh)
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        for b in fresh:
            if self.counts[b] == 0:  # a result without readers
                self._drop(b)
        for b in inputs:
            if b in self.makers:
                self._release(b)

    def _release(self, b: int) -> None:
        self.counts[b] -= 1
        if self.counts[b] <= 0:
            self._drop(b)

    def _drop(self, b: int) -> None:
        if b in self.held:
            self.held.discard(b)
            self.live_bytes -= self.program.buffers[b].nbytes
