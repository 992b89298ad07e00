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

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations
from typing import Final

from jettison.ledger.program import Program
from jettison.solve.frontier import FrontierPoint, pareto_frontier

EXACT_BUFFERS: Final = 10
"""Up to this number of buffers that could be kept, all options of a region are found."""
SUMMED: Final = 14
"""Up to this number of buffers all subset sums are tried; above it the largest that fits is taken first."""
HULL_POINTS: Final = 12

Peaks = Callable[[frozenset[int]], tuple[int, int]]
"""Bytes of the forward's and of the backward's peak when these buffers are kept, as in `RegionOption`."""


def action_points(
    program: Program, seconds: Sequence[float], *, movable: frozenset[int], kinks: Iterable[int], peaks: Peaks
) -> tuple[FrontierPoint, ...]:
    """Undominated options of a region, fewest device bytes first; see NOTE [ Three actions ]. Raise `ValueError` if a
    needed buffer can neither be kept nor recomputed.

    Args:
        seconds: of each op.
        movable: buffers that may be offloaded.
        kinks: numbers of bytes whose copy is as long as the work that hides it.
    """
    candidates = [b.index for b in program.buffers if b.keepable and not b.free]
    if len(candidates) <= EXACT_BUFFERS:
        return undominated(_every(program, seconds, candidates, movable), peaks)
    targets = sorted(set(kinks))
    hull = pareto_frontier(program, seconds, max_points=HULL_POINTS)
    parts = ((point, part) for point in hull for part in parts_to_send(program, point.kept, movable, targets))
    return undominated((_point(program, point.kept, part, point.seconds) for point, part in parts), peaks)


def undominated(points: Iterable[FrontierPoint], peaks: Peaks) -> tuple[FrontierPoint, ...]:
    """Points not dominated in bytes kept, bytes offloaded, seconds and both peaks; fewest bytes first."""
    kept: list[tuple[tuple[float, ...], FrontierPoint]] = []
    ranked = []
    for p in points:
        forward, backward = peaks(p.kept)
        total = p.kept_bytes + p.offloaded_bytes
        ranked.append(((p.kept_bytes, p.offloaded_bytes, p.seconds, forward, total + backward), p))
    for costs, p in sorted(ranked, key=lambda pair: (*pair[0], pair[1].key)):
        if not any(all(a <= b for a, b in zip(other, costs, strict=True)) for other, _ in kept):
            kept.append((costs, p))
    return tuple(p for _, p in kept)


def _every(
    program: Program, seconds: Sequence[float], candidates: Sequence[int], movable: frozenset[int]
) -> Iterator[FrontierPoint]:
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


def parts_to_send(
    program: Program, stays: frozenset[int], movable: frozenset[int], targets: Sequence[int]
) -> list[frozenset[int]]:
    """Offloaded parts of the kept buffers: nothing, as much as fits below each target, and all; fewest bytes first."""
    free = [b for b in sorted(stays) if b in movable and not program.buffers[b].free]
    sums = _by_size(program, free) if len(free) <= SUMMED else None
    parts = {frozenset[int](), frozenset(free)}
    for target in targets:
        part = _filled(program, free, target) if sums is None else sums[max(size for size in sums if size <= target)]
        parts.add(frozenset(part))
    return sorted(parts, key=lambda part: (program.kept_bytes(part), sorted(part)))


def _by_size(program: Program, buffers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each size that a subset of the buffers has, the first such subset."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for b in buffers:
        for size, part in list(found.items()):
            found.setdefault(size + program.buffers[b].nbytes, (*part, b))
    return found


def _filled(program: Program, buffers: Sequence[int], target: int) -> frozenset[int]:
    part, left = set(), target
    for b in sorted(buffers, key=lambda b: -program.buffers[b].nbytes):
        if program.buffers[b].nbytes <= left:
            part.add(b)
            left -= program.buffers[b].nbytes
    return frozenset(part)


def _point(program: Program, stays: frozenset[int], sent: frozenset[int], spent: float) -> FrontierPoint:
    held, moved = program.kept_bytes(stays - sent), program.kept_bytes(sent)
    key = f"keep-{held}" if not moved else f"keep-{held}-send-{moved}"
    key = f"{key}-of-{'.'.join(map(str, sorted(stays)))}"
    return FrontierPoint(key=key, kept=stays, kept_bytes=held, seconds=spent, offloaded=sent, offloaded_bytes=moved)


# Keeping a little more, for a lower peak in backward ------------------------------------------------------------------
#
# The hull of bytes and seconds (frontier.py) counts bytes held between forward and backward. The fewest bytes held are
# not the lowest peak: the first tensor that backward reads is often the last of a long chain, and every tensor
# recomputed on the way to it stays until its own turn. One small buffer kept in the middle (the residual between
# attention and MLP, say) cuts the chain, so that each half is recomputed at its own turn. The replay below finds these
# buffers by walking through backward like the runtime, from sizes alone; measured seconds play no part.


MOST_CUTS = 3  # for each block
LEAST_GAIN = 0.02  # lower peak, as a share, for one more buffer
MOST_REPLAYED = 1_000_000  # ops for one more buffer, which takes seconds


def lean_points(
    program: Program, kept: frozenset[int], seconds: Sequence[float], *, most: int = MOST_CUTS, enough_bytes: int = 0
) -> tuple[FrontierPoint, ...]:
    """Points that keep ``kept`` and up to ``most`` buffers in addition, each with a lower peak in backward, down to
    ``enough_bytes``. ``seconds`` play no part in the choice. Each point replays backward for each buffer.
    """
    found: list[FrontierPoint] = []
    peak = _peak(program, kept)
    while len(found) < most and peak > enough_bytes:
        lowest, cut = math.ceil(peak * (1 - LEAST_GAIN)), -1
        for b in _candidates(program, kept):
            if (reached := _peak(program, kept | {b}, lowest)) < lowest:
                lowest, cut = reached, b
        if cut < 0:
            break
        peak, kept = lowest, kept | {cut}
        spent, nbytes = sum(seconds[i] for i in program.recompute_set(kept)), program.kept_bytes(kept)
        found.append(FrontierPoint(key=f"lean-{nbytes}", kept=kept, kept_bytes=nbytes, seconds=spent))
    return tuple(found)


def is_lean(key: str) -> bool:
    return key.startswith("lean-")


def _candidates(program: Program, kept: frozenset[int]) -> list[int]:
    """Recomputed buffers that could be kept; of a block with thousands of ops, every so many."""
    again = program.recompute_set(kept)
    made = {b for i in again for b in program.ops[i].outputs if program.buffers[b].producer == i}
    found = sorted(b for b in made if program.buffers[b].keepable and not program.buffers[b].free and b not in kept)
    return found[:: 1 + len(found) * len(program.ops) // MOST_REPLAYED]


def _peak(program: Program, kept: frozenset[int], limit: float = math.inf) -> int:
    """Most bytes of buffers, each alive until its last use, at a moment of backward; the first that reach ``limit``."""
    ops, again = program.ops, program.recompute_set(kept)
    makers = {b: i for i in again for b in ops[i].outputs if b not in kept}
    slots = [slot.buffer for slot in program.slots if slot.buffer in makers]
    uses = Counter(chain(slots, chain.from_iterable([ops[i].inputs for i in again])))
    held: set[int] = set()
    live_bytes = most_bytes = program.kept_bytes(kept)

    def release(b: int) -> int:
        """Bytes that a use less frees."""
        uses[b] -= 1
        if uses[b] > 0 or b not in held:
            return 0
        held.discard(b)
        return program.buffers[b].nbytes

    for slot in reversed(slots):  # backward reads in the opposite order
        stack = [slot]
        while stack:  # without recursion, since chains are long
            if stack[-1] in held:
                stack.pop()
                continue
            op = ops[makers[stack[-1]]]
            if missing := [b for b in op.inputs if b in makers and b not in held]:
                stack += missing[::-1]
                continue
            stack.pop()
            fresh = [b for b in op.outputs if b in makers and b not in held]
            held.update(fresh)
            live_bytes += sum([program.buffers[b].nbytes for b in fresh])
            if (most_bytes := max(most_bytes, live_bytes)) >= limit:
                return most_bytes
            live_bytes -= sum(map(release, [*(b for b in fresh if not uses[b]), *op.inputs]))
        live_bytes -= release(slot)
    return most_bytes
