"""Generated code: what it says, what it leaves at hand, and what an error in the middle of it leaves behind."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import jettison
from jettison.capture.recorder import TensorRef
from jettison.core.errors import StaleTensor, UsageError, WrongValue
from jettison.runtime.recipe import Recipe, SlotAction, expected_of
from jettison.runtime.recompute_code import RecomputeCode, code_of
from jettison.runtime.saved_tensor_hooks import Frame
from jettison.verify.differences import compare_gradients, independent_copy, same_bits
from support.toys import Headed

N, ROWS = 8, 4


class Block(nn.Module):
    """A norm, two matmuls, a mask, a chain of elementwise ops, two outputs of one op, a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(N), nn.Linear(N, 2 * N), nn.Linear(2 * N, N)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(self.norm(x)).tanh().split(N, -1)
        hidden = torch.cat([first.exp(), second.sigmoid()], -1)
        return x + self.dropout(self.down(hidden.sin()))


def model_and_copy(layers: int = 2) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Headed((Block() for _ in range(layers)), N, N)
    return model, independent_copy(model), torch.randn(ROWS, N)


def stepped(model: nn.Module, x: Tensor) -> None:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(x).backward()


def recipe_of(region: Any) -> Recipe:
    recipe: Recipe | None = region.recordings.most_used().recipe
    assert recipe is not None
    return recipe


def code_in(handle: Any, name: str) -> RecomputeCode:
    (region,) = [region for region in handle.regions if region.name == name]
    return code_of(recipe_of(region))


# what it says ---------------------------------------------------------------------------------------------------------


def test_the_source_is_that_of_the_functions_that_ran() -> None:
    model, _, x = model_and_copy()
    with jettison.apply(model, "full", batch=(x,)) as handle:
        name = handle.regions[0].name
        before = handle.source(name)
        stepped(model, x)
        after = handle.source(name)
        assert before.split("\n\n")[0] == after.split("\n\n")[0], "a plain backward asks for the last one first"
        assert before.count("def ") == after.count("def ") > 1
        assert [line for line in after.splitlines() if line.startswith("def ")] == [
            f"def recompute_{n}(frame, handle):" for n in range(len(code_in(handle, name).sources))
        ]
        for word in ("aten_native_layer_norm(", "aten_addmm(", "with drawing('cpu', ", "aten_cat([", "after aten.sin"):
            assert word in after, word
        assert compile(after, "source", "exec")


def test_where_nothing_is_recomputed_there_is_no_source() -> None:
    model, _, x = model_and_copy()
    with jettison.apply(model, "none", batch=(x,)) as handle:
        stepped(model, x)
        assert {handle.source(region.name) for region in handle.regions} == {""}
        with pytest.raises(UsageError, match=r"got region 'layers\.7'; expected one of '"):
            handle.source("layers.7")


def test_equal_blocks_share_a_recipe_and_its_code() -> None:
    model, plain, x = model_and_copy(layers=3)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        stepped(model, x)
        assert len({id(recipe_of(region)) for region in handle.regions[:-1]}) == 1
        (recipe,) = {id(recipe_of(region)): recipe_of(region) for region in handle.regions[:-1]}.values()
        assert handle.source(handle.regions[2].name) == code_of(recipe).text()
        stepped(plain, x)
        assert compare_gradients(model, plain).identical


def test_a_second_step_writes_no_code() -> None:
    model, _, x = model_and_copy()
    with jettison.apply(model, "selective-op", batch=(x,)) as handle:
        stepped(model, x)
        written = [list(code_in(handle, region.name).sources) for region in handle.regions[:-1]]
        stepped(model, x)
        assert [code_in(handle, region.name).sources for region in handle.regions[:-1]] == written


def test_ops_after_the_block_before_has_recomputed_run_below_autograd() -> None:
    model, _, x = model_and_copy(layers=4)
    with jettison.apply(model, "every:2", batch=(x,)) as handle:
        stepped(model, x)
        (found,) = [one for one in handle.source("layers.1").split("\n\n") if "frame.opened(" in one]
        lines = found.splitlines()
        below = lines[lines.index("    with below_autograd():") :]
        assert not any("frame.opened(" in line for line in below), "it compares, which is not an op of the model"
        ops = [line for line in lines if " = _aten_" in line]
        assert ops and all(line.startswith(" " * 8) and line in below for line in ops)


# what forward does --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "selective-op", "every:2"])
def test_saved_tensors_like_those_of_the_last_step_are_packed_by_one_comparison(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, x = model_and_copy()
    with jettison.apply(model, policy, batch=(x,)) as handle:
        for _ in range(2):
            stepped(model, x)
        slow: list[Tensor] = []
        packed = Frame._packed
        monkeypatch.setattr(Frame, "_packed", lambda self, tensor: (slow.append(tensor), packed(self, tensor))[1])
        stepped(model, x)
        assert not slow
        expected = recipe_of(handle.regions[0]).expected
        assert expected and None not in expected


def test_another_tensor_is_not_like_the_one_before() -> None:
    slot, tensor = SlotAction("drop", TensorRef(0, (2, 2), (2, 1), 0, torch.float32)), torch.rand(2, 2)
    found = expected_of(slot, tensor)
    assert found is not None
    like, cut, *_ = found
    assert like(torch.rand(2, 2)) and cut is not None
    others = (tensor.t(), tensor[:1], tensor.double(), tensor.to("meta"), nn.Parameter(tensor), torch._neg_view(tensor))
    assert not any(map(like, others))
    negative = expected_of(slot, torch._neg_view(tensor))
    assert negative is not None and negative[1] is None, "its memory holds other bits than it has"


# in any order ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_gradients_asked_for_in_any_order_and_more_than_once(data: st.DataObject) -> None:
    model, plain, x = model_and_copy()
    names = [name for name, _ in model.named_parameters()]
    asked = data.draw(st.lists(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True), max_size=5))
    with jettison.apply(model, "full", batch=(x,)):
        results = []
        for each in (model, plain):
            torch.manual_seed(2)
            loss, parameters = each(x), dict(each.named_parameters())
            found = [torch.autograd.grad(loss, [parameters[n] for n in some], retain_graph=True) for some in asked]
            loss.backward()
            results.append(list(itertools.chain(*found)))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert compare_gradients(model, plain).identical


def test_after_a_backward_nothing_is_at_hand() -> None:
    model, _, x = model_and_copy()
    with jettison.apply(model, "full", batch=(x,)) as handle:
        model(x)
        torch.manual_seed(1)
        loss = model(x)
        frames = [frame for region in handle.regions for frame in region.frames]
        loss.backward(retain_graph=True)
        assert frames
        for frame in frames:
            assert not frame.state.at_hand and frame.state is frame.code.start
            assert not any(value is not None for value in frame.values)


def test_threads_that_write_and_run_the_same_code_do_not_meet() -> None:
    """Each thread asks for other gradients first, over graphs of its own; the code is shared, and not written yet."""
    model, plain, x = model_and_copy(layers=3)
    model.eval(), plain.eval()  # no random stream, which threads share
    names = [name for name, _ in model.named_parameters()]
    found: dict[tuple[str, int], list[Tensor]] = {}

    def gradients(of: str, each: nn.Module, turn: int) -> None:
        asked = [dict(each.named_parameters())[name] for name in names[turn::4] + names[:turn]]
        found[of, turn] = list(torch.autograd.grad(each(x), asked))

    before = sys.getswitchinterval()
    with jettison.apply(model, "full", batch=(x,)):
        model(x).sum().backward()  # what is recorded is compared in its first run
        for region in model.modules():
            if (recordings := getattr(vars(region).get("forward"), "recordings", None)) is not None:
                vars(recordings.most_used().recipe).pop("code", None)
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=gradients, args=("planned", model, turn)) for turn in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
    for turn in range(4):
        gradients("plain", plain, turn)
        assert all(same_bits(a, b) for a, b in zip(found["planned", turn], found["plain", turn], strict=True))


# an error in the middle -----------------------------------------------------------------------------------------------


class Failing:
    """An op that fails once, and then does what it should."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.failed = func, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("no memory, once")
        return self.func(*args, **kwargs)


@contextmanager
def failing_once(handle: Any, name: str) -> Iterator[list[Failing]]:
    """The op of that name fails in the next recomputation of each region."""
    found: list[Failing] = []
    recipes = {id(recipe): recipe for recipe in map(recipe_of, handle.regions[:-1])}
    for recipe in recipes.values():
        vars(recipe).pop("code", None)
        for step in recipe.steps.values():
            if name in str(step.func):
                found.append(Failing(step.func))
                step.func = found[-1]
    assert found
    yield found


@pytest.mark.parametrize("name", ["aten.exp", "aten.sigmoid", "aten.cat", "aten.native_layer_norm", "aten.bernoulli"])
def test_an_op_that_ran_out_of_memory_leaves_nothing_half_written(name: str) -> None:
    """A second backward over the same graph is right, and frees what it recomputed."""
    model, plain, x = model_and_copy()
    with jettison.apply(model, "full", batch=(x,)) as handle:
        stepped(model, x)
        with failing_once(handle, name) as ops:
            torch.manual_seed(1)
            model.zero_grad(set_to_none=True)
            loss = model(x)
            tries = 0
            while tries <= len(ops):
                tries += 1
                model.zero_grad(set_to_none=True)
                try:
                    loss.backward(retain_graph=True)
                    break
                except torch.OutOfMemoryError:
                    continue
            assert all(op.failed for op in ops)
        stepped(plain, x)
        assert compare_gradients(model, plain).identical


# modes of the user ----------------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    """Names of functions that are called while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_a_function_mode_around_backward_sees_no_recomputed_op() -> None:
    model, plain, x = model_and_copy()
    seen = []
    with jettison.apply(model, "full", batch=(x,)):
        for each in (model, plain):
            torch.manual_seed(1)
            loss = each(x)
            with Functions() as mode:
                loss.backward()
            seen.append(mode.names)
    assert seen[0] == seen[1]
    assert compare_gradients(model, plain).identical


# witnesses ------------------------------------------------------------------------------------------------------------


@jettison.checkpointable
class Shared(nn.Module):
    """A projection that three nodes save, one of them by a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x.sin()
        return y.exp() * y + (y.view(-1, 2) ** 2).view_as(y)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(N))


def test_a_recomputed_buffer_leaves_one_witness_however_many_nodes_save_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Headed((Shared(),), N, N)
    x = torch.randn(ROWS, N)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        recipe = recipe_of(handle.regions[0])
        dropped = [slot for slot in recipe.slots if slot.kind == "drop"]
        buffers = {slot.ref.buffer for slot in dropped}
        assert len(dropped) > len(buffers) > 1
        frames: list[Any] = []
        compared: list[int] = []
        compare = Frame.compare
        monkeypatch.setattr(Frame, "compare", lambda self, cell, t: (compared.append(cell), compare(self, cell, t)))
        loss = model(x)
        frames.extend(handle.regions[0].frames)
        assert [sum(seen is not None for seen in frame.seen) for frame in frames] == [len(buffers)]
        assert len(recipe.witnessed) == len(buffers)
        loss.backward()
        assert not compared, "all of them are read where they lie"


@pytest.mark.parametrize("slot", range(6))
def test_a_value_that_comes_back_wrong_is_told_whichever_node_asks_first(slot: int) -> None:
    model = Headed((Shared(),), N, N)
    x = torch.randn(ROWS, N)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        recipe = recipe_of(handle.regions[0])
        dropped = [one for one in recipe.slots if one.kind == "drop"]
        asked = dropped[slot % len(dropped)]
        loss = model(x)
        (frame,) = handle.regions[0].frames
        cell = recipe.cells[asked.ref.buffer]
        seen = frame.seen[cell]
        assert isinstance(seen, bytes)
        frame.seen[cell] = bytes([seen[0] ^ 1]) + seen[1:]
        with pytest.raises(WrongValue, match="is not what forward had"):
            loss.backward()


class Doubles(torch.autograd.Function):
    """Its backward writes to what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return grad * 2


@jettison.checkpointable
class WritesInBackward(nn.Module):
    def __init__(self, *views: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        first, second = (view(y) for view in self.views)
        return (first**2).view_as(x) + Doubles.apply(second).view_as(x)


@pytest.mark.parametrize("first", [Tensor.view_as, Tensor.flatten], ids=["whole", "flat"])
@pytest.mark.parametrize("second", [Tensor.view_as, Tensor.flatten], ids=["whole", "flat"])
def test_a_node_that_writes_to_what_another_one_has_saved_is_refused_as_without_a_plan(first: Any, second: Any) -> None:
    views = [(lambda y, one=one: one(y, y) if one is Tensor.view_as else one(y)) for one in (first, second)]
    model, x = Headed((WritesInBackward(*views),), N, N), torch.randn(ROWS, N)
    plain = independent_copy(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(x).backward()
    with jettison.apply(model, "full", batch=(x,)), pytest.raises(StaleTensor, match="a recomputed tensor"):
        model(x).backward()


@jettison.checkpointable
class ReadsWhatIsStored(nn.Module):
    """Its first node in backward unpacks a flat view of a product that an op of a later recomputation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        later = (y + 1).exp()
        return x + later + (y.flatten() ** 2).view_as(x)


@pytest.mark.parametrize("retain", [False, True])
def test_a_value_that_is_stored_as_a_view_is_read_whole(retain: bool) -> None:
    torch.manual_seed(0)
    model, x = Headed((ReadsWhatIsStored(), ReadsWhatIsStored()), N, N), torch.randn(ROWS, N)
    plain = independent_copy(model)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        for one in (model, plain):
            loss = one(x)
            for _ in range(1 + retain):
                loss.backward(retain_graph=retain)
        code = code_of(recipe_of(handle.regions[0]))
    assert code.stored
    assert f"].as_strided({(ROWS, N)}" in code.text()
    assert compare_gradients(plain, model).identical
