"""Recipes broken on purpose: whatever backward is then given, it is not what forward saved, and the step must stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.runtime import witness
from jettison.runtime.recipe import Recipe, RecipeStep, compile_recipe
from jettison.verify.differences import compare_gradients, independent_copy

ROWS = WIDTH = 64
Mutation = Callable[[Recipe], None]
MUTATIONS: dict[str, Mutation] = {}


class Block(nn.Module):
    """Two dropouts, a norm, a square of scores, constants, views, a write in place, two buffers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.a(self.norm(x))) * 1.5, 0.2)
        h = (h - y * 0.5).exp() * self.scale + self.shift
        h = h.mul(0.5).add_(y).sin()
        scores = torch.softmax(h @ self.b(y).T * 0.1, -1)
        left, right = (scores @ h).chunk(2, -1)
        return x + nn.functional.dropout(torch.cat([right.cos() * left, left.sigmoid()], -1), 0.3) * h


class Model(nn.Module):
    """Three blocks with two arguments; the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, y)
        return x.square().mean()


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    """Sums over threads are not in a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def steps(recipe: Recipe, name: str) -> list[RecipeStep]:
    """The recipe's steps that run an op whose name has ``name`` in it. A mutation that finds none tests nothing."""
    found = [step for step in recipe.steps.values() if name in str(step.func)]
    assert found, f"no {name} among {sorted({str(s.func) for s in recipe.steps.values()})}"
    return found


def result(step: RecipeStep, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a step returns."""
    func = step.func

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        return change(out) if isinstance(out, Tensor) else (change(out[0]), *out[1:])

    step.func = changed


# the mutations --------------------------------------------------------------------------------------------------------


@mutation
def another_op(recipe: Recipe) -> None:
    steps(recipe, "aten.tanh")[0].func = lambda t, **_: t.sin()


@mutation
def an_op_left_out(recipe: Recipe) -> None:
    steps(recipe, "aten.exp")[0].func = lambda t, **_: t.clone()


@mutation
def another_constant(recipe: Recipe) -> None:
    step = next(s for s in steps(recipe, "aten.mul") if any(isinstance(v, float) for v in s.leaves))
    step.leaves = [v + 0.25 if isinstance(v, float) else v for v in step.leaves]


@mutation
def another_dim(recipe: Recipe) -> None:
    step = steps(recipe, "softmax")[0]
    step.leaves = [0 if v == -1 and not isinstance(v, bool) else v for v in step.leaves]


@mutation
def another_epsilon(recipe: Recipe) -> None:
    step = steps(recipe, "native_layer_norm")[0]
    step.leaves = [v * 100 if isinstance(v, float) else v for v in step.leaves]


@mutation
def operands_swapped(recipe: Recipe) -> None:
    step = steps(recipe, "aten.sub")[0]
    (p, b, v), (q, c, w) = step.tensors[:2]
    step.tensors = [(p, c, w), (q, b, v)]


@mutation
def product_transposed(recipe: Recipe) -> None:
    """The left operand of a square product, and the right one."""
    step = next(s for s in steps(recipe, "aten.mm") if len(s.tensors) == 2)
    (p, b, v), (q, c, w) = step.tensors
    step.tensors = [(p, c, w), (q, b, v)]


@mutation
def outputs_swapped(recipe: Recipe) -> None:
    """A norm's mean for its deviation."""
    step = next(s for s in steps(recipe, "native_layer_norm") if len(s.outputs) >= 2)
    (p, b), (q, c) = step.outputs[-2:]
    step.outputs = [*step.outputs[:-2], (p, c), (q, b)]


@mutation
def another_mask(recipe: Recipe) -> None:
    """The generator has moved on by one number."""
    for step in drawing(recipe):
        func = step.func
        step.func = lambda *a, _f=func, **k: (torch.rand(1), _f(*a, **k))[1]


@mutation
def masks_of_each_other(recipe: Recipe) -> None:
    """Each of two draws starts where the other did."""
    first, second = drawing(recipe)[:2]
    assert first.state_in is not None
    func = second.func

    def reseeded(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(1)
        return func(*args, **kwargs)

    second.func = reseeded


@mutation
def another_probability(recipe: Recipe) -> None:
    for step in drawing(recipe):
        step.leaves = [0.5 if isinstance(v, float) and 0 < v < 1 else v for v in step.leaves]


@mutation
def stale_offset(recipe: Recipe) -> None:
    """A view begins elsewhere in its storage."""
    viewed(recipe, lambda ref: replace(ref, offset=0 if ref.offset else WIDTH // 2), size=(ROWS, WIDTH // 2))


@mutation
def stale_stride(recipe: Recipe) -> None:
    """A square that is transposed, or no longer is."""
    for step in steps(recipe, "aten.mm"):
        for n, (position, buffer, ref) in enumerate(step.tensors):
            if ref is not None and ref.size == (ROWS, WIDTH):
                step.tensors[n] = (position, buffer, replace(ref, stride=ref.stride[::-1]))
                return
    raise AssertionError("no square view")


@mutation
def slot_seen_otherwise(recipe: Recipe) -> None:
    """What is computed is right; the saved tensor is another part of it."""
    for slot in recipe.slots:
        if slot.kind == "drop" and slot.view is not None and slot.view.size[-1] == WIDTH // 2:
            slot.view = replace(slot.view, offset=0 if slot.view.offset else WIDTH // 2)
            return
    raise AssertionError("no dropped slot is a view")


@mutation
def slots_swapped(recipe: Recipe) -> None:
    dropped = [n for n, slot in enumerate(recipe.slots) if slot.kind == "drop" and slot.view is None]
    for i in dropped:
        for j in dropped:
            a, b = recipe.slots[i], recipe.slots[j]
            same = (a.ref.size, a.ref.stride, a.ref.dtype) == (b.ref.size, b.ref.stride, b.ref.dtype)
            if a.ref.buffer != b.ref.buffer and same:
                recipe.slots[i], recipe.slots[j] = b, a
                return
    raise AssertionError("no two dropped slots of one shape")


@mutation
def inputs_in_each_others_boxes(recipe: Recipe) -> None:
    (box, position), (other_box, other_position) = recipe.from_inputs[:2]
    recipe.from_inputs[:2] = [(box, other_position), (other_box, position)]


@mutation
def another_parameter(recipe: Recipe) -> None:
    exchanged(recipe, "a.weight", "b.weight")


@mutation
def another_buffer_of_the_module(recipe: Recipe) -> None:
    exchanged(recipe, "scale", "shift")


@mutation
def write_left_out(recipe: Recipe) -> None:
    steps(recipe, "aten.add_")[0].func = lambda t, *_a, **_k: t


@mutation
def write_done_twice(recipe: Recipe) -> None:
    """A wrong version: the buffer as a later write leaves it."""
    step = steps(recipe, "aten.add_")[0]
    func = step.func
    step.func = lambda t, *a, **k: func(func(t, *a, **k), *a, **k)


@mutation
def value_of_the_step_before(recipe: Recipe) -> None:
    step = steps(recipe, "aten.tanh")[0]
    stale = torch.rand(ROWS, WIDTH)
    result(step, lambda t: stale)


@mutation
def lower_precision(recipe: Recipe) -> None:
    result(steps(recipe, "aten.tanh")[0], lambda t: t.bfloat16().float())


@mutation
def one_bit_everywhere(recipe: Recipe) -> None:
    result(steps(recipe, "aten.exp")[0], lambda t: t.nextafter(torch.full_like(t, math.inf)))


@mutation
def sign_flipped(recipe: Recipe) -> None:
    result(steps(recipe, "aten.sin")[0], torch.neg)


def drawing(recipe: Recipe) -> list[RecipeStep]:
    found = [s for s in recipe.steps.values() if s.state_in is not None]
    assert found, "nothing draws"
    return found


def viewed(recipe: Recipe, change: Callable[[Any], Any], size: tuple[int, ...]) -> None:
    """Change the first view of this size that a step reads."""
    for step in recipe.steps.values():
        for n, (position, buffer, ref) in enumerate(step.tensors):
            if ref is not None and ref.size == size:
                step.tensors[n] = (position, buffer, change(ref))
                return
    raise AssertionError(f"no step reads a view of {size}")


def exchanged(recipe: Recipe, one: str, other: str) -> None:
    assert {one, other} <= set(recipe.parameters.values()), sorted(recipe.parameters.values())
    swap = {one: other, other: one}
    for buffer, name in recipe.parameters.items():
        recipe.parameters[buffer] = swap.get(name, name)


# the tests ------------------------------------------------------------------------------------------------------------


def planned(check: str) -> tuple[Model, nn.Module, tuple[Tensor, Tensor], Any]:
    torch.manual_seed(0)
    model = Model()
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    twin = independent_copy(model)
    handle = jettison.apply(model, "full", batch=batch, check=check)
    stepped(model, batch)
    return model, twin, batch, handle


def stepped(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(*batch).backward()


def recipe_of(handle: Any, name: str) -> Recipe:
    """The recipe that the next call of a block will use."""
    (region,) = [region for region in handle.regions if region.name == name]
    (prepared,) = region.recordings.prepared.values()
    assert prepared.recipe is not None and prepared.recipe.steps
    prepared.recipe = compile_recipe(prepared.recipe.trace, prepared.recipe.kept)  # of its own: blocks share one
    return prepared.recipe


def test_the_model_is_right_before_it_is_broken() -> None:
    model, twin, batch, handle = planned("always")
    with handle:
        stepped(model, batch)
        stepped(twin, batch)
        assert compare_gradients(model, twin).identical


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_recipe_stops_the_step(name: str) -> None:
    model, _, batch, handle = planned("always")
    with handle:
        MUTATIONS[name](recipe_of(handle, "layers.1"))
        with pytest.raises(RuntimeError, match=r"layers\.1"):
            stepped(model, batch)


@pytest.mark.parametrize("name", ["another_op", "another_mask", "slots_swapped"])
def test_after_the_error_training_goes_on_rightly(name: str) -> None:
    """The region falls back to what is right, and says so."""
    model, twin, batch, handle = planned("always")
    with handle:
        MUTATIONS[name](recipe_of(handle, "layers.1"))
        with pytest.raises(RuntimeError):
            stepped(model, batch)
        with pytest.warns(UserWarning, match=r"layers\.1 cannot be planned"):
            stepped(model, batch)
        stepped(twin, batch)
        assert compare_gradients(model, twin).identical


def test_without_the_witness_most_of_these_pass_in_silence() -> None:
    """What the witness is for."""
    silent = []
    for name, mutate in MUTATIONS.items():
        model, twin, batch, handle = planned("off")
        with handle:
            mutate(recipe_of(handle, "layers.1"))
            try:
                stepped(model, batch)
            except Exception:
                continue
            stepped(twin, batch)
            if not compare_gradients(model, twin).identical:
                silent.append(name)
    assert len(silent) >= 15, silent


class Large(nn.Module):
    """A million elements that are saved and can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("at", [123_457, 999_999])
def test_one_element_of_a_million_is_seen_in_full(at: int) -> None:
    torch.manual_seed(0)
    model, batch = Large(), (torch.randn(250_000, 4),)
    with jettison.apply(model, "full", batch=batch, check="full") as handle:
        stepped(model, batch)

        def change(t: Tensor) -> Tensor:
            t.view(-1)[at] += 1e-3
            return t

        recipe = recipe_of(handle, "layers.1")
        result(
            steps(recipe, "tanh" if any("tanh" in str(s.func) for s in recipe.steps.values()) else "addmm")[0], change
        )
        with pytest.raises(RuntimeError, match=r"layers\.1"):
            stepped(model, batch)


@pytest.mark.parametrize("full", [False, True])
def test_witnesses_are_the_same_without_numpy(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch comes without it. Dense, strided, empty and small tensors."""
    x = torch.randn(3, 40, 50)
    tensors = [x, x.transpose(0, 2), x[:, ::2, 1:], x[:0], x[0, 0, :5], x.bfloat16(), x.long(), x.to(torch.complex64)]

    def seen(t: Tensor) -> Any:
        found = witness.Witness(t, witness.spots_of(tuple(t.shape), t.stride()), salt=3, full=full)
        assert found.agrees(t)
        return found.seen

    expected = [seen(t) for t in tensors]
    monkeypatch.setattr(witness, "numpy", None)
    assert [seen(t) for t in tensors] == expected
