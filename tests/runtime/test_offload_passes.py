"""Ways through a step that move: graphs dropped, kept, asked twice or in part; exceptions, and passes in between."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from jettison.core.errors import StaleTensor
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.verify.differences import compare_gradients
from support.offloading import ALL, ROWS, TENSOR_BYTES, WIDTH, Line, Pair, Scale, directions, pair, run, scales, seeded
from support.toys import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")


def test_forwards_without_a_backward_hold_nothing() -> None:
    found = pair(*(Mlp(WIDTH, 16) for _ in range(4)))
    pool = found.engine.pool
    with found.recorder.watching():
        for _ in range(3):
            loss = found.model(found.batch)
            assert pool.live_bytes > 0
            del loss
            assert pool.live_bytes == 0
    assert not found.step()
    assert not found.recorder.races


@pytest.mark.filterwarnings("ignore:.*cannot be planned tensor by tensor")
def test_exceptions_leave_nothing_behind() -> None:
    class Stops(Mlp):
        stop = False

        def inner(self, h: Tensor) -> Tensor:
            h = super().inner(h)
            if Stops.stop:
                raise KeyError("stop")
            return h

    found = pair(*(Stops(WIDTH, 16) for _ in range(2)), Mlp(WIDTH, 16))
    assert not found.step()
    counter = AllocationCounter(static_tensors(found.model, found.batch))
    gc.collect()
    before = counter.live_bytes
    for _ in range(3):
        Stops.stop = True
        with pytest.raises(KeyError, match="stop"):
            found.model(found.batch)
        Stops.stop = False
        gc.collect()
        assert found.engine.pool.live_bytes == 0
        assert not found.step()
    found.model.zero_grad()
    gc.collect()
    after = AllocationCounter(static_tensors(found.model, found.batch)).live_bytes
    assert after <= before


def test_eval_passes_in_between_disturb_nothing() -> None:
    found = pair(*(Mlp(WIDTH, 16, rate=0.5) for _ in range(4)))
    for model in (found.model, found.plain):
        torch.manual_seed(3)
        loss = model(found.batch)
        random = torch.get_rng_state()
        model.eval()
        with torch.no_grad():
            model(2 * found.batch)
        model(found.batch).backward()  # with gradients, too
        model.zero_grad(set_to_none=True)
        model.train()
        torch.set_rng_state(random)
        loss.backward()
    assert not found.wrong()


def test_two_micro_batches_in_flight_backward_in_either_order() -> None:
    found = pair(*(Mlp(WIDTH, 16) for _ in range(4)))
    for order in ((0, 1), (1, 0), (0, 1)):
        for model in (found.model, found.plain):
            losses = [model(found.batch), model(found.batch * 3)]
            for n in order:
                losses[n].backward()
        assert not found.wrong()
    assert found.engine.pool.live_bytes == 0


def test_retained_graphs_bring_it_back_again() -> None:
    found = scales(4)
    for model in (found.plain, found.model):
        loss = model(found.batch)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        assert model is found.plain or found.engine.pool.live_bytes == 3 * TENSOR_BYTES
        loss.backward()
    assert not found.wrong()
    assert directions(found) == "ooo" + "bbb" * 3
    assert found.engine.pool.live_bytes == 0


def test_double_backward() -> None:
    found = pair(*(Mlp(WIDTH, 16) for _ in range(3)))
    for model in (found.model, found.plain):
        x = found.batch.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x), x, create_graph=True)
        (first.square().sum() * 100).backward()
    assert not found.wrong()


def test_a_part_of_the_graph() -> None:
    """Gradients of the last block alone; then of all, of the same graph."""
    found = pair(*(Mlp(WIDTH, 16) for _ in range(4)))
    for model in (found.model, found.plain):
        loss = model(found.batch)
        torch.autograd.grad(loss, list(model.layers[-1].parameters()), retain_graph=True)  # type: ignore[union-attr]
        loss.backward()
    assert not found.wrong()


def test_what_is_written_to_after_it_was_saved_stops() -> None:
    """As plain autograd does, whether the copy is on its way or not."""

    class Writes(Line):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for n, layer in enumerate(self.layers):
                saved, x = x, layer(x)
                if n == 1 and writing:
                    saved.detach().mul_(2)
            return x.square().mean()

    writing = False
    torch.manual_seed(0)
    batch, regions = seeded(ROWS, WIDTH), [f"layers.{i}" for i in range(4)]
    found = Pair(Writes([Scale(WIDTH) for _ in range(4)]), batch, ALL, {"regions": regions})
    assert not found.step()
    writing = True
    with pytest.raises(StaleTensor, match=r"on its way to the host .* was modified by an inplace operation"):
        run(found.model, batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(found.plain, batch)


def test_a_tensor_that_is_written_past_the_counters_later_does_not_move() -> None:
    """The recording has seen it: backward wants what is there by then, as plain autograd gives it."""

    class Halves(Line):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for n, layer in enumerate(self.layers):
                saved, x = x, layer(x)
                if n == 1:
                    saved.data.mul_(0.5)
            return x.square().mean()

    torch.manual_seed(0)
    regions = [f"layers.{i}" for i in range(4)]
    found = Pair(Halves([Scale(WIDTH) for _ in range(4)]), seeded(ROWS, WIDTH), ALL, {"regions": regions})
    for _ in range(2):
        for model in (found.model, found.plain):
            model.zero_grad()
            run(model, found.batch)
        assert compare_gradients(found.model, found.plain).identical
    assert found.handle.offload is None  # blocks that run the same ops are one class, and of one it was seen


class Gated(nn.Module):
    """As a recurrent cell: pieces of one tensor, each with versions of its own, are written one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.three, self.after = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        reset, update, new = self.three(x).unsafe_chunk(3, -1)
        mixed: Tensor = self.after(x * reset.sigmoid_() + update.sigmoid_() * new.mul_(2).tanh_())
        return mixed


class Recurrent(nn.Module):
    def __init__(self, width: int, cell: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.cell, self.after = cell(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.after(self.cell(x[None])[0][0])
        return mixed


@pytest.mark.parametrize("block", [Gated, Recurrent])
def test_what_is_saved_piece_by_piece_comes_back_whole(block: Callable[[int], nn.Module]) -> None:
    """A piece is saved before the next is written: what would go then is not what backward wants."""
    torch.manual_seed(0)
    model = Line([block(WIDTH) for _ in range(4)])
    regions = [f"layers.{i}" for i in range(4)]
    found = Pair(model, seeded(ROWS, WIDTH), ALL, {"regions": regions})
    for _ in range(2):
        for each in (found.model, found.plain):
            each.zero_grad()
            run(each, found.batch)
        assert compare_gradients(found.model, found.plain).identical


def test_a_workspace_that_its_backward_writes_to() -> None:
    """oneDNN's LSTM does, past the counters, and reads it again in the next backward of a retained graph."""
    torch.manual_seed(0)
    model = Line([Recurrent(WIDTH, nn.LSTM) for _ in range(4)])
    found = Pair(model, seeded(ROWS, WIDTH), ALL, {"regions": [f"layers.{i}" for i in range(4)]})
    for each in (found.model, found.plain):
        loss = each(found.batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert compare_gradients(found.model, found.plain).identical
