"""Random states in a recipe: an op that is computed again leaves the state after it, and spares whoever moves it."""

from __future__ import annotations

from jettison.capture.randomness import ADVANCE
from jettison.capture.recording import RegionTrace


def without_idle_moves(
    trace: RegionTrace, again: tuple[int, ...], kept: frozenset[int]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Ops to run again, less those that move a random state to where another of them leaves it in time.

    In time: whoever reads that state has a tensor among its arguments that needs the op which draws. Arguments are
    fetched before the state, so that op has run by then, whatever the order in which backward asks.

    Args:
        again: `Program.recompute_set`, in order.
        kept: buffers that end a search for what an argument needs.

    Returns:
        What is left of ``again``, and for each state that it does not make the op that leaves it.
    """
    program = trace.program
    moves = [i for i in again if program.ops[i].name == ADVANCE]
    draws = {trace.calls[i].state_out: i for i in again if i not in moves and trace.calls[i].state_in is not None}
    left = set(again)
    givers: dict[int, int] = {}
    for move in reversed(moves):
        state = program.ops[move].outputs[0]
        draw = draws.get(state)
        if draw is None:
            continue
        readers = [i for i in left if state in program.ops[i].inputs]
        if all(draw in _before(trace, reader, left, kept) for reader in readers):
            left.discard(move)
            givers[state] = draw
    return tuple(i for i in again if i in left), givers


def _before(trace: RegionTrace, op: int, again: set[int], kept: frozenset[int]) -> set[int]:
    """Ops that run again for the arguments of one, random states aside."""
    program = trace.program
    found: set[int] = set()
    stack = [op]
    while stack:
        i = stack.pop()
        for b in program.ops[i].inputs:
            producer = program.buffers[b].producer
            if b in kept or b == trace.calls[i].state_in or producer not in again or producer in found:
                continue
            found.add(producer)
            stack.append(producer)
    return found
