"""What one region can trade where saved tensors may also go to the host: bytes held, bytes sent, seconds of recompute.

NOTE [ Three actions ]
A region's backward gets what it needs from buffers that stay, on the device or on the host, and from ops that run
again. What stays decides the seconds and the peaks; of what stays, any part that may move can be on the host. Bytes are
alike on the link, so of the parts of one size one stands for all.

*Small programs* (`EXACT_BUFFERS`): every set that may stay, with every size that can be sent of it, less what another
one beats or equals in all respects. No plan over them is missed.

*Large programs*: at a price of a byte of the device and one of a byte that moves, what stays is a vertex of the hull of
NOTE [ Keep or recompute is a cut ], and of it all moves or nothing does, but for what copies wait: that grows in kinks,
where a copy is as long as what it hides behind. So of each vertex the largest part below each kink is offered, beside
all and nothing. That leaves out points inside the hull, and a plan's gap is to the best one of what is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Final

from jettison.ledger.program import Program
from jettison.solve.frontier import FrontierPoint, pareto_frontier

EXACT_BUFFERS: Final = 10
"""Up to so many buffers that could stay, all points of a region are found."""
SUMMED: Final = 14
"""Up to so many buffers, their sums are tried; of more the largest that fits is taken first."""
HULL_POINTS: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionPoint:
    """One way to treat a region: buffers that stay on the device, buffers on the host, and the rest computed again.

    Bytes are of one micro-batch; ``seconds`` of recompute in its backward. ``key`` names it within its program.
    """

    key: str
    kept: frozenset[int]
    offloaded: frozenset[int]
    kept_bytes: int
    offloaded_bytes: int
    seconds: float

    @property
    def stays(self) -> frozenset[int]:
        """On the device or on the host."""
        return self.kept | self.offloaded


Peaks = Callable[[frozenset[int]], tuple[int, int]]
"""Bytes of the forward's and of the backward's peak with these buffers staying, as `RegionOption` has them."""


def action_points(
    program: Program,
    seconds: Sequence[float],
    *,
    movable: frozenset[int],
    kinks: Iterable[int],
    peaks: Peaks,
    max_points: int = HULL_POINTS,
) -> tuple[ActionPoint, ...]:
    """The undominated ways to treat a region, from the fewest bytes of the device on; see NOTE [ Three actions ].

    Args:
        seconds: by op.
        movable: buffers that may go to the host.
        kinks: bytes whose copy is as long as what it hides behind.
        max_points: of the hull of a large program.

    Raises:
        ValueError: a needed buffer can neither be kept nor computed again.
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
    """The same without a link: nothing moves."""
    return tuple(
        ActionPoint(
            key=p.key, kept=p.kept, offloaded=frozenset(), kept_bytes=p.kept_bytes, offloaded_bytes=0, seconds=p.seconds
        )
        for p in points
    )


def undominated(points: Iterable[ActionPoint], peaks: Peaks) -> tuple[ActionPoint, ...]:
    """Those that no other beats or equals in bytes held, bytes sent, seconds and both peaks; fewest bytes first."""
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
    empty = frozenset(b for b in candidates if not program.buffers[b].nbytes)  # they stay whatever else does
    some = [b for b in candidates if b not in empty]
    for chosen in chain.from_iterable(combinations(some, n) for n in range(len(some) + 1)):
        stays = empty.union(chosen)
        try:
            again = program.recompute_set(stays)
        except ValueError:
            continue  # something needed can neither be had nor computed
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
    """Of what stays: nothing, as much as there is below each target, and all; fewest bytes first."""
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
    """Of every size that some of them have together, the first that have it."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for b in buffers:
        for size, part in list(found.items()):
            found.setdefault(size + program.buffers[b].nbytes, (*part, b))
    return found


def _filled(program: Program, buffers: Sequence[int], target: int) -> frozenset[int]:
    """The largest first, as long as they fit."""
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
