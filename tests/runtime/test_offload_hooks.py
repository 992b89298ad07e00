"""Blocks without a recording: what they save moves as it comes by, whatever it is wrapped in."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

import jettison
from jettison.core.errors import StaleTensor
from jettison.runtime.checkpoint_fallback import OffloadHooks
from jettison.runtime.device import OnHost
from jettison.runtime.offload import Group, HostPool, OffloadEngine
from jettison.solve.checkpoint_policy import KeepAll, Offload
from jettison.verify.differences import compare_gradients
from support.offloading import ALL, INPUTS, Line, Pair, Scale, Shuffled, line_of, run, seeded
from support.recorder import Earliest, Latest, Order, Recorder
from support.transfers import Direction, transfers_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*cannot be (planned|recorded)"),
]
ROWS, WIDTH = 8, 8


class Pairs(Tensor):
    """A wrapper around two tensors, whose value is their sum."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Pairs:
        return Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], "context"

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Pairs:
        assert context == "context"
        return cls(inner["a"], inner["b"])

    def __repr__(self) -> str:  # type: ignore[override]
        return "Pairs"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs, cls(args[0].a.detach(), args[0].b.detach()))
        whole = tree_map(lambda x: x.a + x.b if isinstance(x, Pairs) else x, (args, kwargs))
        return func(*whole[0], **whole[1])


class Wraps(torch.autograd.Function):
    """Saves a wrapper."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(Pairs(x / 4, x - x / 4))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (pairs,) = ctx.saved_tensors
        assert isinstance(pairs, Pairs)
        return grads[0] * (pairs.a + pairs.b).cos()


class Depends(Scale):
    """Its shapes depend on values: it has no recording. Saves storages twice, transposed, and in part."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x * self.scale)
        chosen = h[h[:, 0] > -2]
        return (h.t() @ h).sin().sum() * h + chosen[1:].square().sum() * chosen


class Wrapped(Scale):
    """The same, through a wrapper."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > -1e9]
        return Wraps.apply(chosen * self.scale)


class Twice(Line):
    """Its first block runs twice; the first result is dropped, in a cycle that only the garbage collector frees."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        dropped = self.layers[0](h)
        dropped.itself = dropped
        del dropped
        for layer in self.layers:
            h = layer(h)
        return h.square().mean()


ORDERS: list[Order] = [Latest(), Earliest(), Shuffled(1), Shuffled(2)]


def test_bytes_that_are_offloaded_again_while_the_collector_frees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their range in pinned memory must not be given to the next tensor."""
    regions = [f"layers.{i}" for i in range(4)]
    torch.manual_seed(0)
    found = Pair(Twice([Depends(WIDTH) for _ in regions], WIDTH), seeded(ROWS, WIDTH), ALL, {"regions": regions})
    known = OffloadEngine._known

    def collected(engine: OffloadEngine, source: Tensor) -> Any:
        gc.collect()
        return known(engine, source)

    monkeypatch.setattr(OffloadEngine, "_known", collected)
    gc.disable()
    try:
        assert not found.step()
    finally:
        gc.enable()
    assert found.engine.pool.live_bytes == 0
    assert not found.engine._moving


@pytest.mark.parametrize("block", [Depends, Wrapped])
@pytest.mark.parametrize("policy", [ALL, INPUTS], ids=["all", "inputs"])
def test_blocks_without_a_recording(block: type[Scale], policy: Any) -> None:
    regions = [f"layers.{i}" for i in range(4)]
    found = Pair(line_of(block, 4, WIDTH), seeded(ROWS, WIDTH), policy, {"regions": regions})
    assert all(r.fallback for r in found.handle.report() if r.name)
    moves = policy is ALL  # the others are checkpointed whole
    for order in ORDERS:
        if moves:
            assert not found.step(order)
        else:
            for model in (found.model, found.plain):
                model.zero_grad()
                run(model, found.batch)
            assert compare_gradients(found.model, found.plain).identical
    if moves:
        out = [t for t in transfers_of(found.engine) if t.direction is Direction.OUT]
        assert len(out) >= 3 * len(ORDERS)
        assert found.engine.pool.live_bytes == 0


def hooks(lives: list[Tensor], recorder: Recorder | OnHost) -> tuple[OffloadEngine, OffloadHooks]:
    engine = OffloadEngine(recorder, HostPool(recorder, left=None), torch.device("cpu"))
    return engine, OffloadHooks(lives, Group(engine), 1)


def test_parameters_and_what_is_small_or_sparse_stay_and_aliases_go_once() -> None:
    weight = nn.Parameter(torch.randn(ROWS, WIDTH))
    engine, found = hooks([weight], Recorder())
    x = torch.randn(ROWS, WIDTH)
    wide = torch.randn(ROWS, 3 * WIDTH)
    tensors = [weight, weight[1:], x, x.t(), x, torch.eye(3).to_sparse(), wide[:, WIDTH:], torch.randn(4).conj(), x[:0]]
    values = [t.detach().clone() for t in tensors]
    packed = [found.pack(t) for t in tensors]
    assert found.group is not None
    found.close()
    found.group.end()
    Group(engine).end()
    sizes = [t.nbytes for t in transfers_of(engine)]
    assert sizes == [x.nbytes, wide.nbytes - WIDTH * 4, 4 * 4]
    for _ in range(2):  # a retained graph asks twice
        for each, value, tensor in zip(packed, values, tensors, strict=True):
            back = found.unpack(each)
            assert back.layout == tensor.layout and back.shape == value.shape
            if back.layout is torch.strided:
                assert back.stride() == tensor.stride()
                assert torch.equal(back, value)
    assert [t.direction for t in transfers_of(engine)].count(Direction.BACK) == 2 * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64])
def test_types_come_back_as_they_went(dtype: torch.dtype) -> None:
    engine, found = hooks([], Recorder())
    tensor = torch.randn(ROWS, WIDTH).to(dtype)
    flipped = tensor.conj() if dtype.is_complex else tensor.t()
    packed = [found.pack(tensor), found.pack(flipped), found.pack(tensor.imag if dtype.is_complex else tensor[2:])]
    found.close()
    assert found.group is not None
    found.group.end()
    Group(engine).end()
    back = [found.unpack(each) for each in packed]
    wanted = [tensor, flipped, tensor.imag if dtype.is_complex else tensor[2:]]
    for one, other in zip(back, wanted, strict=True):
        assert one.dtype == other.dtype and one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()
        assert one.float().equal(other.float()) if not dtype.is_complex else one.equal(other)


def test_a_write_is_noticed() -> None:
    _engine, found = hooks([], Recorder())
    tensor = torch.randn(ROWS, WIDTH)
    packed = found.pack(tensor)
    found.close()
    tensor.mul_(2)
    with pytest.raises(StaleTensor, match="modified by an inplace operation"):
        found.unpack(packed)


@pytest.fixture
def nothing_but_nan() -> Iterator[None]:
    """Memory that nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def slopes(x: Tensor) -> Tensor:
    """An op that draws its slopes into an argument, which autograd saves before."""
    torch.manual_seed(0)
    return torch.nn.functional.rrelu(x, 0.1, 0.6, training=True).square()


@pytest.mark.usefixtures("nothing_but_nan")
def test_what_is_saved_before_it_is_written_goes_when_it_was() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (plain,) = torch.autograd.grad(slopes(x).sum(), x)
    engine, found = hooks([x], OnHost(torch.device("cpu")))
    with torch.autograd.graph.saved_tensors_hooks(found.pack, found.unpack):
        y = slopes(x).sum()
    found.close()
    assert found.group is not None
    found.group.end()
    Group(engine).end()
    (moved,) = torch.autograd.grad(y, x)
    assert torch.equal(moved, plain)


@pytest.mark.usefixtures("nothing_but_nan")
@pytest.mark.parametrize("policy", [Offload(keeps=KeepAll(), smallest_bytes=1), "full", "selective-op"], ids=str)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_block_that_draws_slopes(policy: Any, recorded: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if not recorded:
                random.random()
            return self.linear(torch.tanh(torch.nn.functional.rrelu(x, 0.1, 0.6, training=True))) + x

    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block(), Block())
    x, plain = torch.randn(ROWS, WIDTH), copy.deepcopy(model)
    torch.manual_seed(2)
    plain(x).square().sum().backward()
    with jettison.apply(model, policy, batch=(x,), regions=["0", "1", "2"], loss_fn=lambda out: out.square().sum()):
        torch.manual_seed(2)
        model(x).square().sum().backward()
    assert compare_gradients(model, plain).identical


def test_a_write_before_it_goes_is_told() -> None:
    """As autograd tells it: nothing of the call came between the save and the write."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    _, found = hooks([x], Recorder())
    with torch.autograd.graph.saved_tensors_hooks(found.pack, found.unpack):
        y = (x + 0).exp()
        loss = y.sum()
        y.detach().add_(1)
    found.close()
    with pytest.raises(StaleTensor, match="is at version 1; expected version 0"):
        loss.backward()
