"""What compiled blocks save waits on the host: as Inductor hands it to autograd, under any order of copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn

import jettison
from jettison.core.errors import UsageError
from jettison.runtime.offload import OffloadEngine
from jettison.solve.checkpoint_policy import Exactly, KeepAll, can_move
from support.compiled_blocks import INPUT_BYTES, QUIET, WIDTH, batch, equal, gradients, model_of
from support.offloading import Shuffled
from support.recorder import Earliest, Latest, Order, recorder_of
from support.toys import Headed
from support.transfers import Direction, transfers_of

pytestmark = [pytest.mark.usefixtures("one_thread"), *QUIET]


class Embedded(nn.Module):
    """A stack whose first block's argument is no leaf, and moves."""

    def __init__(self, stack: Headed) -> None:
        super().__init__()
        self.embed, self.stack = nn.Linear(WIDTH, WIDTH), stack

    def forward(self, x: Tensor) -> Any:
        return self.stack(self.embed(x))


def pair(rate: float) -> tuple[Embedded, Embedded]:
    """A model, and its copy, compiled block by block."""
    stack = model_of(rate=rate)
    model = Embedded(stack)
    plain = copy.deepcopy(model)
    for layer in plain.stack.layers:
        layer.compile(dynamic=False)
    return model, plain


@pytest.mark.parametrize(
    ("word", "rate", "moved"),
    [("offload", 0.0, 9 * INPUT_BYTES), ("offload", 0.2, 10 * INPUT_BYTES), ("full-offload", 0.2, INPUT_BYTES)],
)
def test_all_that_blocks_save_moves_and_comes_back(word: str, rate: float, moved: int) -> None:
    model, plain = pair(rate)
    given = batch()
    expected = gradients(plain, given)
    with jettison.apply(model, word, batch=given, compile="blocks") as handle:
        assert [report.host_bytes for report in handle.report()] == [moved, moved, moved, 0, 0]
        engine = handle.offload
        assert engine is not None
        device = recorder_of(engine)
        orders: list[Order] = [Earliest(), Latest(), Shuffled(1), Shuffled(2)]
        for order in orders:
            device.order = order
            before = len(transfers_of(engine))
            with device.watching():
                assert equal(gradients(model, given), expected)
            copies = transfers_of(engine)[before:]
            for way in (Direction.OUT, Direction.BACK):
                assert sum(c.nbytes for c in copies if c.direction is way) == 3 * moved
        assert not device.races
        assert engine.pool.live_bytes == 0


@contextlib.contextmanager
def breaking(module: nn.Module) -> Iterator[None]:
    """Calls of it fail."""
    hook = module.register_forward_pre_hook(lambda *_: 1 // 0)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def copies_back(module: nn.Module, engine: OffloadEngine) -> Iterator[list[int]]:
    """How many have been queued when the backward of a module is over, in each step."""
    found: list[int] = []

    def over(_gradient: Tensor) -> None:
        found.append(sum(c.direction is Direction.BACK for c in transfers_of(engine)))

    def called(_module: nn.Module, args: Any) -> None:
        transfers_of(engine).clear()
        args[0].register_hook(over)

    hook = module.register_forward_pre_hook(called)
    try:
        yield found
    finally:
        hook.remove()


def test_single_tensors_of_a_compiled_block_move() -> None:
    model, plain = pair(0.2)
    given = batch()
    expected = gradients(plain, given)
    traced = jettison.trace(model, given, compile="blocks")
    compiled = traced.classes[traced.calls[0].class_key].compiled
    assert compiled is not None
    program, kept = compiled.program, compiled.default
    sizes = {b: program.buffers[b].nbytes for b in sorted(kept) if can_move(program, b)}
    for moved in ({max(sizes, key=lambda b: sizes[b])}, {b for b in sizes if sizes[b] == INPUT_BYTES}):
        sent = sum(sizes[b] for b in moved)
        named = Exactly(program.digest(), kept, KeepAll(), offloaded_buffers=frozenset(moved))
        with jettison.apply(model, named, batch=given, compile="blocks") as handle:
            assert [report.host_bytes for report in handle.report()] == [sent, sent, sent, 0, 0]
            engine = handle.offload
            assert engine is not None
            assert engine.pool.real_bytes == 3 * sent
            device = recorder_of(engine)
            orders: list[Order] = [Earliest(), Latest(), Shuffled(1), Shuffled(2)]
            for order in orders:
                device.order = order
                transfers_of(engine).clear()
                with device.watching():
                    assert equal(gradients(model, given), expected)
                for way in (Direction.OUT, Direction.BACK):
                    assert sum(c.nbytes for c in transfers_of(engine) if c.direction is way) == 3 * sent
            assert not device.races
            assert engine.pool.live_bytes == 0 and engine.pool.real_bytes == 3 * sent
            with copies_back(model.stack.layers[3], engine) as back:
                gradients(model, given)
            assert back == [len(moved)]  # those of the block before, while the last one's backward ran
            loss = model(*given)
            assert engine.pool.live_bytes == 3 * sent
            del loss  # a graph that nobody wants
            assert engine.pool.live_bytes == 0
            with pytest.raises(ZeroDivisionError), breaking(model.stack.layers[2]):
                model(*given)
            assert engine.pool.live_bytes == 0
            assert equal(gradients(model, given), expected)


def test_a_compiled_block_packs_nothing() -> None:
    model, _ = pair(0.0)
    with pytest.raises(UsageError, match=r"stack\.layers\.0 runs compiled, and its policy packs what it keeps"):
        jettison.apply(model, "pack", batch=batch(), compile="blocks")
    assert "forward" not in vars(model.stack.layers[0])
