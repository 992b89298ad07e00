"""The frontier of a region against enumeration of every set that can be kept."""

import random

import pytest
from hypothesis import given, settings

from jettison.ledger.program import Anchor, Buffer, Op, Program, Slot, Source
from jettison.solve.frontier import NONE_KEY, FrontierPoint, fewest_bytes_point, pareto_frontier, plain_point
from jettison.solve.plan import PolicyName, policy_name
from support.plan_cases import all_kept_sets, programs
from support.work import calls

Pair = tuple[int, int]


def milliseconds(seconds: float) -> int:
    return round(seconds * 1e3)


def brute_pairs(program: Program, seconds: tuple[float, ...]) -> list[Pair]:
    return [
        (program.kept_bytes(kept), milliseconds(sum(seconds[o] for o in again)))
        for kept, again in all_kept_sets(program)
    ]


def lower_hull(pairs: list[Pair]) -> set[Pair]:
    """Vertices of the lower left hull."""
    best: list[Pair] = []
    for x, y in sorted(set(pairs)):
        if best and y >= best[-1][1]:
            continue
        while len(best) > 1 and _turn(best[-2], best[-1], (x, y)) <= 0:
            best.pop()
        best.append((x, y))
    return set(best)


def _turn(a: Pair, b: Pair, c: Pair) -> int:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


@settings(max_examples=300, deadline=None)
@given(programs())
def test_points_are_the_hull_of_all_kept_sets(case: tuple[Program, tuple[float, ...]]) -> None:
    program, seconds = case
    points = pareto_frontier(program, seconds, max_points=1000)
    pairs = brute_pairs(program, seconds)
    found = {(p.kept_bytes, milliseconds(p.seconds)) for p in points if p.key != NONE_KEY}
    assert lower_hull(pairs) <= found | {(points[-1].kept_bytes, 0)}
    for point in points:
        check_point(program, seconds, point, pairs)
    assert points[-1] == plain_point(program)
    assert [p.kept_bytes for p in points] == sorted(p.kept_bytes for p in points)


def check_point(program: Program, seconds: tuple[float, ...], point: FrontierPoint, pairs: list[Pair]) -> None:
    """What a point says of itself is so, and at its price nothing is cheaper."""
    again = program.recompute_set(point.kept)
    assert point.kept_bytes == program.kept_bytes(point.kept)
    assert point.seconds == pytest.approx(sum(seconds[o] for o in again))
    assert point.key == NONE_KEY or all(program.buffers[b].keepable for b in point.kept)
    own = point.seconds + point.price * point.kept_bytes
    assert own <= min(s / 1e3 + point.price * b for b, s in pairs) * (1 + 1e-9) + 1e-9


@settings(max_examples=150, deadline=None)
@given(programs())
def test_fewest_bytes_is_lexicographic(case: tuple[Program, tuple[float, ...]]) -> None:
    program, seconds = case
    point = fewest_bytes_point(program, seconds)
    assert (point.kept_bytes, milliseconds(point.seconds)) == min(brute_pairs(program, seconds))
    assert point.kept_bytes == pareto_frontier(program, seconds, max_points=2)[0].kept_bytes


@settings(max_examples=50, deadline=None)
@given(programs(max_ops=12))
def test_few_points_are_some_of_the_many_and_the_same_again(case: tuple[Program, tuple[float, ...]]) -> None:
    program, seconds = case
    many = pareto_frontier(program, seconds, max_points=1000)
    few = pareto_frontier(program, seconds.__getitem__, max_points=4)
    assert len(few) <= 4
    assert {p.kept_bytes for p in few} <= {p.kept_bytes for p in many}
    assert (few[0].kept, few[-1]) == (many[0].kept, many[-1])
    assert few == pareto_frontier(program, seconds, max_points=4)


def chain_program(length: int, *, keep_every: int = 1) -> Program:
    """input -> op -> op -> ...: every ``keep_every``-th output is saved, 10 bytes each; the input costs 4."""
    buffers = [Buffer(index=0, nbytes=4, source=Source.INPUT, keepable=True)]
    ops = []
    for o in range(length):
        saved = (o + 1) % keep_every == 0
        buffers.append(Buffer(index=o + 1, nbytes=10, source=Source.OP, producer=o, keepable=saved))
        ops.append(Op(index=o, name="op", inputs=(o,), outputs=(o + 1,), flops=3, bytes_moved=1))
    saved_buffers = [b.index for b in buffers[1:] if b.keepable]
    slots = tuple(Slot(index=i, buffer=b, shape=(1,), dtype="float32") for i, b in enumerate(saved_buffers))
    return Program(buffers=tuple(buffers), ops=tuple(ops), slots=slots)


def test_a_chain_keeps_the_dearest_first() -> None:
    points = pareto_frontier(chain_program(4), [1.0, 2.0, 4.0, 8.0])
    assert [(p.kept_bytes, p.seconds) for p in points] == [(4, 15.0), (14, 7.0), (24, 3.0), (34, 1.0), (40, 0.0)]
    assert points[0].kept == frozenset({0})
    assert points[-1].key == NONE_KEY


def test_long_chains_do_not_exhaust_the_stack() -> None:
    program = chain_program(3000, keep_every=3000)
    assert [p.kept_bytes for p in pareto_frontier(program, [1e-6] * 3000)] == [4, 10]


def test_what_can_neither_be_kept_nor_computed_is_named() -> None:
    buffers = (
        Buffer(index=0, nbytes=4, source=Source.OUTER, name="cache"),
        Buffer(index=1, nbytes=4, source=Source.OP, producer=0),
    )
    op = Op(index=0, name="op", inputs=(0,), outputs=(1,), flops=1, bytes_moved=1)
    slot = Slot(index=0, buffer=1, shape=(1,), dtype="float32")
    with pytest.raises(ValueError, match=r"buffer 1 .*neither be kept nor recomputed"):
        pareto_frontier(Program(buffers=buffers, ops=(op,), slots=(slot,)), [1.0])


@pytest.mark.parametrize(("seconds", "points"), [([1.0, float("nan")], 16), ([1.0, -1.0], 16), ([1.0, 1.0], 1)])
def test_arguments_are_checked(seconds: list[float], points: int) -> None:
    with pytest.raises(ValueError):
        pareto_frontier(chain_program(2), seconds, max_points=points)


def test_policy_words() -> None:
    program = chain_program(3)
    words = {kept: policy_name(program, frozenset(kept)) for kept in [(1, 2, 3), (0,), (0, 2), (1,)]}
    assert words == {
        (1, 2, 3): PolicyName.NONE,
        (0,): PolicyName.FULL,
        (0, 2): PolicyName.PER_TENSOR,
        (1,): PolicyName.PER_TENSOR,
    }


def large_program(ops: int, slots: int, seed: int) -> tuple[Program, list[float]]:
    """The size of a transformer block's record, with random dependencies between near ops."""
    rng = random.Random(seed)
    sizes = [1 << 12, 8 << 20, 16 << 20, 24 << 20]
    chosen = set(rng.sample(range(1, ops + 1), slots))
    buffers = [Buffer(index=0, nbytes=8 << 20, source=Source.INPUT, keepable=True)]
    record = []
    for o in range(ops):
        inputs = {rng.randrange(max(0, o - 5), o + 1) for _ in range(rng.choice([1, 1, 2, 3]))}
        anchor = Anchor.OPAQUE if o + 1 in chosen and rng.random() < 0.05 else None
        buffers.append(
            Buffer(index=o + 1, nbytes=rng.choice(sizes), source=Source.OP, producer=o, keepable=o + 1 in chosen)
        )
        record.append(
            Op(index=o, name="op", inputs=tuple(inputs), outputs=(o + 1,), flops=1, bytes_moved=1, anchor=anchor)
        )
    saved = tuple(Slot(index=i, buffer=b, shape=(1,), dtype="bfloat16") for i, b in enumerate(sorted(chosen)))
    program = Program(buffers=tuple(buffers), ops=tuple(record), slots=saved)
    return program, [rng.choice([1e-6, 1e-5, rng.random() * 1e-3]) for _ in range(ops)]


@pytest.mark.parametrize(("ops", "slots", "limit"), [(100, 40, 60_000), (300, 80, 150_000)])
def test_a_frontier_is_quick(ops: int, slots: int, limit: int) -> None:
    """A few hundred calls an op, which take 15 ms."""
    program, seconds = large_program(ops, slots, seed=1)
    assert calls(lambda: pareto_frontier(program, seconds)) < limit
    assert len(pareto_frontier(program, seconds)) > 5
