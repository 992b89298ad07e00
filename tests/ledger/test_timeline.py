"""Bytes through a step of one stage, added up by hand."""

import pytest

from jettison.ledger.occupancies import Occupancy
from jettison.ledger.timeline import Phase, StageLoad, Unit, moments, peak
from jettison.memory.schedule import ScheduledPass, Work
from jettison.predict.peak import stage_peak_bytes
from jettison.spec.precision import Gradients

LAYERS = Unit(
    names=("a", "b"), resident=100, forward_peak=1000, backward_peak=300, adding_peak=350, gradient=10, pending=0
)
HEAD = Unit(names=("head",), resident=7, forward_peak=2, backward_peak=5, adding_peak=6, gradient=3, is_loss=True)


def stage(*chunks: tuple[Unit, ...], states: tuple[Occupancy, ...], gradients: Gradients) -> StageLoad:
    """Fixed: 40; state: 80; the optimizer's own: 9; sent of each micro-batch: 1; the first backward brings 4 of 40."""
    return StageLoad(
        chunks=chunks,
        occupancies=states,
        micro_batches=3,
        fixed=40,
        state=80,
        gradients=gradients,
        optimizer_transient=9,
        sent=1,
        aside=4,
        late=4,
    )


def before(work: Work, chunk: int, forward: tuple[int, ...], learned: tuple[int, ...] = ()) -> Occupancy:
    """Of micro-batch 4."""
    return Occupancy(forward, (0,) * len(forward), ScheduledPass(work, 4, chunk), 0, learned)


FORWARD, BACKWARD = Work.FORWARD, Work.BACKWARD
OF_TWO_CHUNKS = stage(
    (LAYERS,),
    (HEAD,),
    states=(
        before(FORWARD, 1, (3, 0), (0, 0)),
        before(BACKWARD, 1, (3, 1), (0, 0)),
        before(FORWARD, 0, (2, 1), (0, 1)),
        before(BACKWARD, 0, (3, 0), (0, 1)),
        before(BACKWARD, 0, (2, 0), (1, 1)),
    ),
    gradients=Gradients.ONE_BY_ONE,
)


def test_every_moment_of_a_stage_with_two_virtual_stages() -> None:
    """A micro-batch holds 200 of the first chunk and 7 of the second; gradients are 20 and 3, the second's first."""
    expected = [
        (Phase.BEFORE, "", 0, 120),
        (Phase.FORWARD, "a", 0, 120 + 1000),
        (Phase.FORWARD, "b", 0, 120 + 100 + 1000),
        (Phase.LOSS, "head", 0, 122),
        # the second chunk's forward, on top of three of the first and what was sent of them
        (Phase.LOSS, "head", 4, 120 + 600 + 3 + 2),
        # its backward, in which its own gradients appear, and none is there before
        (Phase.BACKWARD, "head", 4, 120 + 607 + 4 + 5),
        # the first chunk's third forward: the second's gradients are there
        (Phase.FORWARD, "a", 4, 120 + 407 + 3 + 3 + 1000),
        (Phase.FORWARD, "b", 4, 120 + 407 + 3 + 3 + 100 + 1000),
        # its first backward: gradients appear as residents go
        (Phase.BACKWARD, "b", 4, 120 + 600 + 3 + 3 + 300),
        (Phase.BACKWARD, "a", 4, 120 + 600 + 3 + 3 + 10 - 100 + 300),
        # a later one finds them there, and adds to them
        (Phase.BACKWARD, "b", 4, 120 + 400 + 2 + 23 + 350),
        (Phase.BACKWARD, "a", 4, 120 + 400 + 2 + 23 - 100 + 350),
        (Phase.OPTIMIZER, "", -1, 120 + 23 + 9),
        (Phase.AFTER, "", -1, 120),
    ]
    found = [(m.phase, m.where, m.micro_batch, m.nbytes) for m in moments(OF_TWO_CHUNKS, first_step=False)]
    assert found == expected
    highest = peak(OF_TWO_CHUNKS)
    assert (highest.phase, highest.where, highest.nbytes) == (Phase.FORWARD, "b", 1633)
    assert stage_peak_bytes(OF_TWO_CHUNKS) == 1633
    assert peak(OF_TWO_CHUNKS, first_step=True).nbytes == 1633 - 80


def test_what_the_first_backward_brings_is_there_behind_it() -> None:
    """In a run's first step, and in each state that has gradients."""
    later, first = (list(moments(OF_TWO_CHUNKS, first_step=word)) for word in (False, True))
    less = [b.nbytes - a.nbytes for a, b in zip(later, first, strict=True)]
    assert less == [-84] * 5 + [-84] + [-80] * 6 + [0, 0]  # where the loss is differentiated it is not there yet


@pytest.mark.parametrize("first_step", [False, True])
def test_gradients_that_are_there_from_the_start_are_in_every_moment(first_step: bool) -> None:
    load = stage((LAYERS, HEAD), states=(before(BACKWARD, 0, (1,)),), gradients=Gradients.UPFRONT)
    there = 40 + (0 if first_step else 80) + 23
    found = list(moments(load, first_step=first_step))
    assert min(m.nbytes for m in found) == there - (4 if first_step else 0)
    alive = there + 207 + 1
    assert [m.nbytes for m in found if m.phase is Phase.BACKWARD] == [alive + 6, alive - 7 + 350, alive - 107 + 350]
    assert found[-2].nbytes == 40 + 80 + 23 + 9  # the optimizer step of the first step makes the state
