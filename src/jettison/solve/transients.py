"""Keeping a little more so that backward holds less.

The hull of bytes and seconds (frontier.py) knows what a region holds between forward and backward. The fewest bytes
held are not the lowest peak: the first tensor that backward asks for is often the last of a long chain, and everything
that is computed on the way to it stays until its own turn comes. One narrow buffer kept in the middle (the residual
between attention and MLP, say) cuts the chain, so that each half is computed when it is its turn. Which buffers these
are is found by walking through backward as the runtime does, on sizes alone; it hangs on no measured seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from jettison.ledger.program import Program
from jettison.solve.frontier import FrontierPoint

MOST_CUTS = 3  # of a block
LEAST_GAIN = 0.02  # of the peak, for one more buffer


def lean_points(
    program: Program, kept: frozenset[int], seconds: Sequence[float], *, most: int = MOST_CUTS
) -> tuple[FrontierPoint, ...]:
    """Points that hold ``kept`` and one, two or more buffers with them, each with a lower peak in backward.

    Args:
        seconds: by op, for what the points cost; it has no part in choosing them.
        most: points. Each takes a walk through backward for each buffer that could be kept.
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
    """Whether an option is one of these."""
    return key.startswith("lean-")


def _candidates(program: Program, kept: frozenset[int]) -> list[int]:
    """Buffers that are computed again and could be kept."""
    again = program.recompute_set(kept)
    made = {b for i in again for b in program.ops[i].outputs if program.buffers[b].producer == i}
    return sorted(b for b in made if program.buffers[b].keepable and not program.buffers[b].free and b not in kept)


def _peak(program: Program, kept: frozenset[int]) -> int:
    """Bytes that are held and computed again at the worst moment of backward, gradients aside."""
    return program.kept_bytes(kept) + _Walk(program, kept).peak_bytes()


class _Walk:
    """Backward as the runtime walks it: a buffer lives from when it is computed to its last use."""

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
        """Of what is computed again."""
        for b in reversed(self.slots):  # backward asks in the opposite order
            self._make(b)
            self._release(b)
        return self.most_bytes

    def _make(self, wanted: int) -> None:
        """An op runs as soon as its inputs are there, without recursion: chains are long."""
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
            if self.counts[b] == 0:  # a result that nobody asked for
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
