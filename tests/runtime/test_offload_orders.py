"""Under every legal order of copies the gradients are the same; and none of the engine's waits can be left out.

The scenarios are run on the engine as it is, and on copies of it that lack one wait each: every copy must be caught, by
the vector clocks or by gradients that differ.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from jettison.runtime import offload
from jettison.runtime.offload import Group, HostPool
from support.offloading import ALL, INPUTS, Line, Pair, Scale, Shuffled, all_orders, seeded
from support.recorder import Earliest, Latest, Order, Recorder
from support.toys import Mlp
from support.transfers import transfers_of

pytestmark = pytest.mark.usefixtures("one_thread")
NBYTES = 4096


def line(blocks: int) -> Pair:
    """Blocks of which all but the last move one tensor."""
    torch.manual_seed(0)
    model = Line([Scale() for _ in range(blocks)])
    return Pair(model, seeded(4, 8), ALL, {"regions": [f"layers.{i}" for i in range(blocks)]})


def mlps(policy: Any = ALL, **options: Any) -> Pair:
    """Blocks that move several tensors each."""
    torch.manual_seed(0)
    return Pair(Line([Mlp(8, 16) for _ in range(4)]), seeded(4, 8), policy, **options)


def run_all_orders(tensors: int) -> int:
    pair = line(tensors + 1)
    orders = 0
    for order in all_orders():
        assert not pair.step(order), order
        orders += 1
    assert len(transfers_of(pair.engine)) == 2 * tensors * orders
    return orders


@pytest.mark.parametrize(("tensors", "orders"), [(1, 4), (2, 64)])
def test_all_legal_orders_of_small_plans(tensors: int, orders: int) -> None:
    """Each order is told from the others by a choice that it makes otherwise: none comes twice."""
    assert run_all_orders(tensors) == orders


@pytest.mark.slow
@pytest.mark.parametrize(("tensors", "orders"), [(3, 900), (4, 12544)])
def test_all_legal_orders_of_larger_plans(tensors: int, orders: int) -> None:
    assert run_all_orders(tensors) == orders


@pytest.mark.parametrize("policy", [ALL, INPUTS], ids=["all", "inputs"])
def test_random_interleavings(policy: object) -> None:
    pair = mlps(policy)
    for seed in range(40):
        assert not pair.step(Shuffled(seed)), seed


# ----------------------------------------------------------------------------------------------------------------------
# without one wait


class Bench:
    """An engine alone, and work in streams around it."""

    def __init__(self, order: Order) -> None:
        self.recorder = Recorder(order)
        # looked up when it is made: it may be one without a wait
        self.engine = offload.OffloadEngine(self.recorder, HostPool(self.recorder, left=None), torch.device("cpu"))
        self.watch = self.recorder.watching()
        self.wrong: list[str] = []

    def made(self, value: int) -> Tensor:
        """What a forward computes."""
        with self.watch:
            return torch.full((NBYTES,), value, dtype=torch.uint8)

    def uses(self, tensor: Tensor, value: int) -> None:
        """What a backward does."""
        with self.watch:
            found = tensor.clone()
        if not bool((found == value).all()):
            self.wrong.append(f"{value} came back as {found[0]}")

    def problems(self) -> list[str]:
        """All that went wrong."""
        return [*self.wrong, *map(str, self.recorder.races)]


def a_step(order: Order) -> list[str]:
    """Forward, backward, and once more."""
    pair = mlps()
    return pair.step(order) or pair.step()


def a_dropped_graph(order: Order) -> list[str]:
    """A forward without a backward: what is under way goes at once."""
    pair = mlps()
    pair.recorder.order = order
    with pair.recorder.watching():
        loss = pair.model(pair.batch)
        del loss
    return [str(race) for race in pair.recorder.races] or pair.step()


def a_graph_that_is_dropped_half_way(order: Order) -> list[str]:
    """Its last blocks have asked, and what was brought back ahead for others is not wanted after all."""
    pair = mlps()
    pair.recorder.order = order
    with pair.recorder.watching():
        loss = pair.model(pair.batch)
        torch.autograd.grad(loss, list(pair.model.layers[-1].parameters()))
        del loss
    return [str(race) for race in pair.recorder.races] or pair.step()


def two_streams_that_never_meet(order: Order) -> list[str]:
    """Micro-batches in streams of their own: the second lands where the first lay on the host."""
    bench = Bench(order)
    engine, recorder = bench.engine, bench.recorder
    for value, stream in enumerate((recorder.stream("first"), recorder.stream("second"))):
        with recorder.on(stream):
            group = Group(engine)
            moved = engine.send(bench.made(value), group)
            group.end()
            Group(engine).end()
            bench.uses(moved.open(), value)
            del moved
    return bench.problems()


def a_backward_that_has_seen_less(order: Order) -> list[str]:
    """Backward's stream waited for forward's before that had waited for the copy."""
    bench = Bench(order)
    engine, recorder = bench.engine, bench.recorder
    other, group = recorder.stream("backward"), Group(engine)
    moved = engine.send(bench.made(5), group)
    recorder.wait(other, recorder.record(recorder.current_stream()))
    group.end()
    Group(engine).end()
    with recorder.on(other):
        bench.uses(moved.open(), 5)
    return bench.problems()


def brought_back_for_another_stream(order: Order) -> list[str]:
    """Prefetched in one stream, asked for in another; the buffer belongs to the first."""
    bench = Bench(order)
    engine, recorder = bench.engine, bench.recorder
    group, after = Group(engine), Group(engine)
    moved = engine.send(bench.made(9), group)
    group.end()
    after.end()
    after.asked()
    with recorder.on(recorder.stream("backward")):
        found = moved.open()
        del moved
        bench.uses(found, 9)
        del found
    return bench.problems()


def made_in_another_stream(order: Order) -> list[str]:
    """The memory is of streams that wait neither for the copy nor for what the second pack's stream computes."""
    bench = Bench(order)
    engine, recorder = bench.engine, bench.recorder
    group, maker, second = Group(engine), recorder.stream("maker"), recorder.stream("second")
    with recorder.on(maker):
        made = bench.made(7)
    moved = []
    for stream in (recorder.current_stream(), second):
        recorder.wait(stream, recorder.record(maker))
        with recorder.on(stream):
            bench.uses(made, 7)
            moved.append(engine.send(made, group))
    del made
    group.end()
    Group(engine).end()
    bench.uses(moved[0].open(), 7)
    return bench.problems()


SCENARIOS: list[Callable[[Order], list[str]]] = [
    a_step,
    a_dropped_graph,
    a_graph_that_is_dropped_half_way,
    two_streams_that_never_meet,
    a_backward_that_has_seen_less,
    brought_back_for_another_stream,
    made_in_another_stream,
]
ORDERS: list[Callable[[], Order]] = [Latest, Earliest, lambda: Shuffled(1)]


class Without(ast.NodeTransformer):
    """Leaves out the wait of that number: the engine's own, not the pool's."""

    def __init__(self, number: int) -> None:
        self.number, self.seen, self.left_out = number, count(), ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self.generic_visit(node) if node.name == offload.OffloadEngine.__name__ else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        is_wait = is_call and call.func.attr in ("wait", "record_use")
        if is_wait and next(self.seen) == self.number:
            self.left_out = ast.unparse(node)
            return ast.Pass()
        return node


def waits() -> Iterator[str]:
    """What can be left out, as it is written."""
    source = inspect.getsource(offload)
    for number in count():
        without = Without(number)
        without.visit(ast.parse(source))
        if not without.left_out:
            return
        yield without.left_out


WAITS = list(waits())


def engine_without(number: int) -> type[offload.OffloadEngine]:
    """The engine, less one wait."""
    tree = ast.fix_missing_locations(Without(number).visit(ast.parse(inspect.getsource(offload))))
    room = types.ModuleType("jettison_offload_without_a_wait")
    room.__dict__["__name__"] = offload.__name__
    exec(compile(tree, offload.__file__, "exec"), room.__dict__)
    broken: type[offload.OffloadEngine] = room.OffloadEngine
    return broken


def test_every_edge_is_one_of_these() -> None:
    """Edges 1 to 8 of the engine's note; edge 3 is two lines, of which one lets a source go for edge 8 too."""
    assert len(WAITS) == 9
    source = inspect.getsource(offload)
    assert all(f"# edge {number}" in source for number in range(1, 9))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
def test_scenarios_are_sound(scenario: Callable[[Order], list[str]]) -> None:
    for order in ORDERS:
        assert not scenario(order())


@pytest.mark.parametrize("number", range(len(WAITS)), ids=lambda n: WAITS[n])
def test_no_wait_can_be_left_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "OffloadEngine", engine_without(number))
    caught = [scenario.__name__ for scenario in SCENARIOS if scenario(Latest())]
    assert caught, f"nobody misses {WAITS[number]}"


@pytest.mark.parametrize("check", ["always", "off"])
def test_values_show_what_the_clocks_show(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for what comes back, backward computes with poison when copies run late; a witness stops it."""
    arrived = next(n for n, wait in enumerate(WAITS) if wait == "self.device.wait(stream, moved.arrived)")
    monkeypatch.setattr(offload, "OffloadEngine", engine_without(arrived))
    pair = mlps(options={"check": check})
    found = pair.step(Latest())
    assert found[-1] == ("gradients differ" if check == "off" else "a witness does not agree")
