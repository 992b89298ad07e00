"""Bytes through a step of one stage, added up by hand."""

import pytest

from jettison.ledger.schedule import Occupancy, ScheduledPass, Work
from jettison.ledger.timeline import Phase, StageLoad, Unit, moments, peak
from jettison.spec.run import Gradients

LAYERS = Unit(
    names=("a", "b"), resident=100, forward_peak=1000, backward_peak=300, adding_peak=350, gradient=10, pending=0
)
HEAD = Unit(names=("head",), resident=7, forward_peak=2, backward_peak=5, adding_peak=6, gradient=3, is_loss=True)


def stage(*chunks: tuple[Unit, ...], forward: tuple[int, ...], gradients: Gradients) -> StageLoad:
    """Before micro-batch 4's backward. Fixed: 40; state: 80; the optimizer's own: 9; sent of each micro-batch: 1."""
    before = Occupancy(forward, (0,) * len(chunks), ScheduledPass(Work.BACKWARD, 4, 0))
    return StageLoad(
        chunks=chunks,
        occupancies=(before,),
        micro_batches=3,
        fixed=40,
        state=80,
        gradients=gradients,
        optimizer_transient=9,
        sent=1,
    )


def test_every_moment_of_a_stage_with_two_virtual_stages() -> None:
    """3 micro-batches of the first chunk (200 each) and none of the second are alive: 600, and 3 that were sent."""
    load = stage((LAYERS,), (HEAD,), forward=(3, 0), gradients=Gradients.ONE_BY_ONE)
    level, gradients = 120 + 600 + 3, 23
    expected = [
        (Phase.BEFORE, "", 0, 120),
        (Phase.FORWARD, "a", 0, 120 + 1000),
        (Phase.FORWARD, "b", 0, 120 + 100 + 1000),
        (Phase.LOSS, "head", 0, 122),
        # the forward that led here, of the chunk that has some: on top of two others
        (Phase.FORWARD, "a", 4, level - 200 + 1000),
        (Phase.FORWARD, "b", 4, level - 100 + 1000),
        # gradients appear as residents go
        (Phase.BACKWARD, "b", 4, level + 300),
        (Phase.BACKWARD, "a", 4, level + 10 - 100 + 300),
        # a later micro-batch finds all gradients there, and adds to them
        (Phase.FORWARD, "a", 4, level + gradients - 200 + 1000),
        (Phase.FORWARD, "b", 4, level + gradients + 900),
        (Phase.BACKWARD, "b", 4, level + gradients + 350),
        (Phase.BACKWARD, "a", 4, level + gradients - 100 + 350),
        (Phase.OPTIMIZER, "", -1, 120 + gradients + 9),
        (Phase.AFTER, "", -1, 120),
    ]
    found = [(m.phase, m.where, m.micro_batch, m.nbytes) for m in moments(load, first_step=False)]
    assert found == expected
    highest = peak(load)
    assert (highest.phase, highest.where, highest.nbytes) == (Phase.FORWARD, "b", 1646)
    assert peak(load, first_step=True).nbytes == 1646 - 80


@pytest.mark.parametrize("first_step", [False, True])
def test_gradients_that_are_there_from_the_start_are_in_every_moment(first_step: bool) -> None:
    load = stage((LAYERS, HEAD), forward=(1,), gradients=Gradients.UPFRONT)
    there = 40 + (0 if first_step else 80) + 23
    found = list(moments(load, first_step=first_step))
    assert min(m.nbytes for m in found) == there
    alive = there + 207 + 1
    assert [m.nbytes for m in found if m.phase is Phase.BACKWARD] == [alive + 6, alive - 7 + 350, alive - 107 + 350]
    assert found[-2].nbytes == 40 + 80 + 23 + 9  # the optimizer step of the first step makes the state
