"""Keeping a narrow buffer between two wide halves lowers what backward holds."""

from __future__ import annotations

from jettison.ledger.program import Buffer, Op, Program, Slot, Source
from jettison.solve import offload_options
from jettison.solve.offload_options import is_lean, lean_points

NARROW, WIDE = 10, 100


def chain(sizes: list[int]) -> Program:
    """An op after each buffer of these bytes makes the next one; all but the last are saved."""
    buffers = tuple(
        Buffer(
            index=i,
            nbytes=n,
            source=Source.OP if i else Source.INPUT,
            producer=i - 1 if i else None,
            keepable=True,
            name="" if i else "0",
        )
        for i, n in enumerate(sizes)
    )
    steps = range(len(sizes) - 1)
    ops = tuple(Op(index=i, name="op", inputs=(i,), outputs=(i + 1,), flops=0, bytes_moved=0) for i in steps)
    slots = tuple(Slot(index=i, buffer=i, shape=(), dtype="") for i in steps)
    return Program(buffers=buffers, ops=ops, slots=slots, outputs=(len(sizes) - 1,))


def two_halves() -> Program:
    """input -> wide -> wide -> middle -> wide -> wide -> out; every wide buffer is saved, as the narrow ones are."""
    return chain([NARROW, WIDE, WIDE, NARROW, WIDE, WIDE, NARROW])


def test_the_middle_is_kept_and_costs_what_it_saves_in_seconds():
    program = two_halves()
    first, *_ = lean_points(program, frozenset({0}), [1.0] * 6)
    assert is_lean(first.key)
    assert first.kept == {0, 3}
    assert first.kept_bytes == 2 * NARROW
    assert first.seconds == 4.0, "the middle is no longer recomputed"


def test_nothing_is_kept_that_does_not_lower_the_peak():
    program = two_halves()
    everything = program.saved_buffers()
    assert lean_points(program, everything, [1.0] * 6) == ()


def test_a_block_of_thousands_of_ops_replays_its_backward_for_some_buffers(monkeypatch):
    """As a loop over the sequence writes it, one op after the other for each token."""
    length, replays = 4000, []
    program = chain([WIDE] * (length + 1))
    monkeypatch.setattr(
        offload_options, "_peak", lambda _, kept, *limit: replays.append(kept) or WIDE * (length - len(kept))
    )
    lean_points(program, frozenset({0}), [1.0] * length)
    assert 200 < len(replays) < 1000


def test_the_replay_of_a_buffer_ends_where_another_one_has_a_lower_peak(monkeypatch):
    """As in a loop over the sequence: most buffers of a chain leave a long half, which nobody walks to its end."""
    length, reached = 200, {}
    program, replay = chain([WIDE] * (length + 1)), offload_options._peak
    peaks = {b: replay(program, frozenset({0, b})) for b in range(1, length)}

    def recorded(program: Program, kept: frozenset[int], *limit: float) -> int:
        return reached.setdefault(max(kept), replay(program, kept, *limit))

    monkeypatch.setattr(offload_options, "_peak", recorded)
    first, *_ = lean_points(program, frozenset({0}), [1.0] * length, most=1)
    assert first.kept == {0, min(peaks, key=peaks.__getitem__)}, "the first of those with the lowest peak"
    assert sum(reached[b] < peak for b, peak in peaks.items()) > 50
    assert all(min(peaks.values()) <= reached[b] <= peak for b, peak in peaks.items())
