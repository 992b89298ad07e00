"""Bytes through a step of one stage, added up by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.memory.schedule import OrderOptions, PipelineShape, device_order
from jettison.memory.span import Phase, Span, levels, peaks
from jettison.memory.stage_unit import Unit
from jettison.memory.step import Event, Lifetime, StageLoad, moments, peak, peak_bytes
from jettison.spec.layout import Schedule
from jettison.spec.precision import Gradients

LAYERS = Unit(
    names=("a", "b"), resident=100, forward_peak=1000, backward_peak=300, adding_peak=350, gradient=10, pending=0
)
HEAD = Unit(names=("head",), resident=7, forward_peak=2, backward_peak=5, adding_peak=6, gradient=3, is_loss=True)
SPANS = st.lists(st.builds(Span, st.integers(-50, 50), st.integers(0, 90)), min_size=1, max_size=8)


@given(SPANS, SPANS, SPANS, st.integers(1, 5))
def test_spans_compose_in_any_grouping(first: list[Span], then: list[Span], last: list[Span], count: int) -> None:
    """A product is where its pieces are, one by one; so many of a piece are a product of equals."""

    def product(spans: list[Span]) -> Span:
        found = spans[0]
        for each in spans[1:]:
            found += each
        return found

    whole = product([*first, *then, *last])
    assert whole == product(first) + (product(then) + product(last)) == (product(first) + product(then)) + product(last)
    assert product([*first] * count) == product(first).times(count)
    every = [*first, *then, *last]
    assert max(peaks(every, range(len(every)), 7)) == 7 + whole.peak
    assert list(levels(every, range(len(every)), 7))[-1] == 7 + whole.net


def test_the_first_of_equals_has_the_label() -> None:
    spans = [Span(0, 5, "a"), Span(1, 5, "b"), Span(0, 5, "c"), Span(0, 5, "d")]  # type: ignore[arg-type]
    assert (spans[0] + spans[1]).where == "a"
    assert ((spans[0] + spans[1]) + (spans[2] + spans[3])).where == "c"


@pytest.mark.parametrize(
    ("begin", "end", "there"),
    [
        (Event.FORWARD, Event.OPTIMIZER, [False, True, True, False]),
        (Event.OPTIMIZER, Event.STEP, [False, False, False, True]),
        (Event.OPTIMIZER, Event.FORWARD, [True, False, False, True]),
    ],
)
def test_a_lifetime_may_end_in_the_next_step(begin: Event, end: Event, there: list[bool]) -> None:
    assert [Lifetime("buffer", 1, begin, end).covers(event) for event in Event] == there


def stage(
    *chunks: tuple[Unit, ...], stages: int, micro_batches: int, gradients: Gradients, lives: tuple[Lifetime, ...] = ()
) -> StageLoad:
    """Fixed: 40; state: 80; the optimizer's own: 9; sent of each micro-batch: 1; the first backward brings 4 of 40."""
    return StageLoad(
        chunks=chunks,
        order=device_order(
            PipelineShape(Schedule.ONE_F_ONE_B, stages=stages, micro_batches=micro_batches, virtual_stages=len(chunks)),
            0,
            walk=OrderOptions(learning=gradients is not Gradients.UPFRONT),
        ),
        micro_batches=micro_batches,
        fixed=40,
        state=80,
        gradients=gradients,
        optimizer_transient=9,
        sent=1,
        aside=4,
        late=4,
        lifetimes=lives,
    )


OF_TWO_CHUNKS = stage((LAYERS,), (HEAD,), stages=2, micro_batches=4, gradients=Gradients.ONE_BY_ONE)
"""F0 F0 F1 F1, then F0 B1, F0 B1, F1 B0, F1 B0, and B1 B1 B0 B0."""


def test_every_moment_of_a_stage_with_two_virtual_stages() -> None:
    """A micro-batch holds 200 of the first chunk and 7 of the second; gradients are 20 and 3, the second's first."""
    expected = [
        (Phase.BEFORE, "", 0, 120),
        (Phase.FORWARD, "a", 0, 120 + 1000),
        (Phase.FORWARD, "b", 0, 120 + 100 + 1000),
        (Phase.LOSS, "head", 0, 122),
        # the first chunk's third forward, on top of two of each and what was sent of them
        (Phase.FORWARD, "a", 2, 120 + 414 + 4 + 1000),
        (Phase.FORWARD, "b", 2, 120 + 414 + 4 + 100 + 1000),
        # the second's backward, in which its own gradients appear, and none is there before
        (Phase.BACKWARD, "head", 0, 120 + 614 + 5 + 5),
        # the fourth forward: the second's gradients are there
        (Phase.FORWARD, "a", 3, 120 + 607 + 4 + 3 + 1000),
        (Phase.FORWARD, "b", 3, 120 + 607 + 4 + 3 + 100 + 1000),
        (Phase.BACKWARD, "head", 1, 120 + 807 + 5 + 3 + 6),
        (Phase.LOSS, "head", 2, 120 + 800 + 4 + 3 + 2),
        # the first chunk's first backward: gradients appear as residents go
        (Phase.BACKWARD, "b", 0, 120 + 807 + 5 + 3 + 300),
        (Phase.BACKWARD, "a", 0, 120 + 807 + 5 + 3 + 10 - 100 + 300),
        (Phase.LOSS, "head", 3, 120 + 607 + 4 + 23 + 2),
        # a later one finds them there, and adds to them
        (Phase.BACKWARD, "b", 1, 120 + 614 + 5 + 23 + 350),
        (Phase.BACKWARD, "a", 1, 120 + 614 + 5 + 23 - 100 + 350),
        (Phase.BACKWARD, "head", 2, 120 + 414 + 4 + 23 + 6),
        (Phase.OPTIMIZER, "", -1, 120 + 23 + 9),
        (Phase.AFTER, "", -1, 120),
    ]
    found = [(m.phase, m.where, m.micro_batch, m.nbytes) for m in moments(OF_TWO_CHUNKS)]
    assert found == expected
    highest = peak(OF_TWO_CHUNKS)
    assert (highest.phase, highest.where, highest.nbytes) == (Phase.FORWARD, "b", 1834)
    assert peak_bytes(OF_TWO_CHUNKS) == 1834
    assert peak(OF_TWO_CHUNKS, first_step=True).nbytes == peak_bytes(OF_TWO_CHUNKS, first_step=True) == 1834 - 80


def test_what_the_first_backward_brings_is_there_behind_it() -> None:
    """In a run's first step, and in each state that has gradients."""
    later, first = (list(moments(OF_TWO_CHUNKS, first_step=word)) for word in (False, True))
    less = [b.nbytes - a.nbytes for a, b in zip(later, first, strict=True)]
    assert less == [-84] * 6 + [-84] + [-80] * 10 + [0, 0]  # where the loss is differentiated it is not there yet


def test_a_buffer_is_in_the_moments_between_its_events() -> None:
    lives = (Lifetime("mask", 1000, Event.FORWARD, Event.OPTIMIZER), Lifetime("kept", 50, Event.OPTIMIZER, Event.STEP))
    more = stage((LAYERS, HEAD), stages=1, micro_batches=2, gradients=Gradients.ONE_BY_ONE, lives=lives)
    plain = stage((LAYERS, HEAD), stages=1, micro_batches=2, gradients=Gradients.ONE_BY_ONE)
    added = [b.nbytes - a.nbytes for a, b in zip(moments(plain), moments(more), strict=True)]
    assert added == [0] * 4 + [1000] * (len(added) - 6) + [50, 50]  # the first micro-batch is shown without


@pytest.mark.parametrize("first_step", [False, True])
def test_gradients_that_are_there_from_the_start_are_in_every_moment(first_step: bool) -> None:
    load = stage((LAYERS, HEAD), stages=1, micro_batches=3, gradients=Gradients.UPFRONT)
    there = 40 + (0 if first_step else 80) + 23
    found = list(moments(load, first_step=first_step))
    assert min(m.nbytes for m in found) == there - (4 if first_step else 0)
    alive = there + 207 + 1
    assert [m.nbytes for m in found if m.phase is Phase.BACKWARD] == [alive + 6, alive - 7 + 350, alive - 107 + 350]
    assert found[-2].nbytes == 40 + 80 + 23 + 9  # the optimizer step of the first step makes the state
