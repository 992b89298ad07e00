"""Which chunks of a stage have been reduced, and whose weights are whole, as an order goes on."""

from __future__ import annotations

import random
from functools import partial
from operator import mul

import pytest

from jettison.memory.schedule import Occupancy, OrderOptions, PipelineShape, ScheduledPass, Weights, Work, device_order
from jettison.spec.layout import Schedule
from support.orders import device, fullest

shape = partial(PipelineShape, Schedule.ONE_F_ONE_B, stages=2)


def test_a_chunk_is_reduced_while_another_works() -> None:
    """Two micro-batches through two chunks: F0 F0 F1 F1 B1 B1, reduce 1, B0 B0, reduce 0."""
    walk = OrderOptions(learning=True, reducing=True)
    order = device_order(shape(micro_batches=2, virtual_stages=2), 0, walk=walk)
    actions = [(str(action.work), action.chunk) for action, _ in order.actions()]
    assert actions[4:] == [("B", 1), ("B", 1), ("REDUCE_GRAD", 1), ("B", 0), ("B", 0), ("REDUCE_GRAD", 0)]
    first = next(state for state in _all(order.steps, walk) if state.step == ScheduledPass(Work.BACKWARD, 0, 0))
    assert (first.forward, first.learned, first.reduced) == ((2, 0), (0, 1), (0, 1))


def test_weights_are_whole_behind_a_backward() -> None:
    """One stage of 1F1B, F B F B: only the second forward finds them."""
    steps = shape(micro_batches=2).order(1)
    found = [(s.step.work, s.whole) for s in _all(steps, OrderOptions(weights=Weights.GATHERED))]
    assert found == [(Work.FORWARD, (0,)), (Work.BACKWARD, (0,)), (Work.FORWARD, (1,)), (Work.BACKWARD, (0,))]


def test_a_schedule_fetches_three_chunks_ahead() -> None:
    steps = shape(micro_batches=2, virtual_stages=4).order(0)
    states = _all(steps, OrderOptions(weights=Weights.FETCHED))
    assert states[0].whole == (1, 1, 1, 0)
    assert states[2].whole == (0, 1, 1, 1)  # its forwards are over, and its turn is far


@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_the_states_that_are_left_have_the_dearest(weights: Weights, micro_batches: int) -> None:
    draw = random.Random(micro_batches)
    steps = shape(micro_batches=micro_batches, virtual_stages=2).order(0)
    walk = OrderOptions(learning=True, reducing=True, weights=weights)
    few, every = fullest(steps, walk), _all(steps, walk)
    for _ in range(50):
        prices = [draw.randrange(9) for _ in range(8)]
        work: dict[object, int] = {}

        def price(state: Occupancy, prices: list[int] = prices, work: dict[object, int] = work) -> int:
            chunk = state.step.chunk
            adds = state.step.work is not Work.FORWARD and state.learned[chunk]
            key = state.step.work, chunk, adds, state.whole[chunk : chunk + 1]
            counts = (*state.forward, *state.learned, *(1 - n for n in state.reduced), *state.whole)
            return sum(map(mul, counts, prices)) + work.setdefault(key, draw.randrange(20))

        assert max(map(price, every)) == max(map(price, few))


def _all(steps: tuple[ScheduledPass, ...], walk: OrderOptions) -> list[Occupancy]:
    return [state for _, state in device(steps, walk).actions() if state is not None]
