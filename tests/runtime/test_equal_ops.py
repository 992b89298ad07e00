"""Ops that run again in another way: a softmax without rows of nothing, and results in the place of what they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.runtime.recipe import _writes_to, safe_softmax
from jettison.verify.differences import independent_copy, same_bits

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BLOCKS = [f"layers.{i}" for i in range(3)]
INF, NAN = float("inf"), float("nan")


# a softmax --------------------------------------------------------------------------------------------------------


def scores_with(rows: Callable[[Tensor], None], dtype: torch.dtype) -> Tensor:
    scores = torch.randn(2, 3, 33, 65, generator=torch.Generator().manual_seed(3))
    rows(scores)
    return scores.to(dtype)


def ordinary(scores: Tensor) -> None:
    scores.tril_()


def first_column_masked(scores: Tensor) -> None:
    scores[..., 0] = -INF


def some_rows_masked(scores: Tensor) -> None:
    scores[0, :, 4:9] = -INF
    scores[1, 2, 0] = -INF


def some_values_not_numbers(scores: Tensor) -> None:
    scores[0, 1, 5, 7] = NAN
    scores[0, 1, 6, 0] = NAN
    scores[0, 2, 5] = -INF
    scores[0, 2, 5, 9] = NAN


def infinite(scores: Tensor) -> None:
    scores[1, 1, 3, 8] = INF
    scores[1, 1, 4] = -INF
    scores[1, 1, 4, 0] = INF


def all_masked(scores: Tensor) -> None:
    scores.fill_(-INF)


KINDS = (ordinary, first_column_masked, some_rows_masked, some_values_not_numbers, infinite, all_masked)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", KINDS)
def test_a_softmax_without_looking_has_the_same_bits(rows: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    scores = scores_with(rows, dtype)
    for dim in (-1, 3, 1, 0):
        before = scores.clone()
        assert same_bits(safe_softmax(scores, dim), aten._safe_softmax.default(scores, dim))
        assert same_bits(scores, before)


def test_a_softmax_of_nothing() -> None:
    for shape in ((0, 4), (4, 0)):
        assert same_bits(safe_softmax(torch.ones(shape), -1), aten._safe_softmax.default(torch.ones(shape), -1))


class Attention(nn.Module):
    """By products, as `scaled_dot_product_attention` with dropout is on a CPU; a block of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1)
        return x + out.transpose(1, 2).flatten(2)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(32) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().mean()


@pytest.mark.parametrize("is_padded", [False, True])
def test_attention_by_products_with_rows_of_nothing(is_padded: bool) -> None:
    """Padding on the left leaves rows without a key, which softmax makes NaN and `_safe_softmax` zeros."""
    torch.manual_seed(0)
    model, x = Attentive(), torch.randn(2, 16, 32)
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()
    if is_padded:
        mask[1, :, :, :5] = False
    twin = independent_copy(model)
    with jettison.apply(model, "full", regions=BLOCKS, batch=(x, mask)) as handle:
        assert any("safe_softmax" in str(f) for f in functions(handle))
        assert_same(model, twin, (x, mask))


# in its place -----------------------------------------------------------------------------------------------------


def overloads() -> Iterator[Any]:
    """Every elementwise op with a kernel on the CPU that takes its result's memory, of tensors alone."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            func = getattr(packet, overload)
            if _writes_to(func, "cpu") is not None:
                yield func


def arguments_for(func: Any, dtype: torch.dtype) -> list[Any] | None:
    """Tensors of different numbers, infinities and NaN among them; None for what takes other things as well."""
    generator = torch.Generator().manual_seed(5)
    given: list[Any] = []
    for argument in func._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and kind != "Tensor"):
            continue
        if kind == "Tensor":
            numbers = torch.randn(3, 257, generator=generator) * 2
            numbers[0, :4] = torch.tensor([INF, -INF, NAN, -0.0])
            is_condition = func is aten.where.self and not given
            given.append(numbers > 0 if is_condition else numbers.to(dtype))
        elif kind in ("number", "Scalar", "float", "int"):
            given.append(2)
        else:
            return None
    return given


def with_result(func: Any, dtype: torch.dtype) -> tuple[list[Any], Tensor] | None:
    """Arguments and what the op makes of them; None where it does not take numbers of this kind."""
    given = arguments_for(func, dtype)
    try:
        return None if given is None else (given, func(*given))
    except (RuntimeError, NotImplementedError, TypeError):
        return None


OVERLOADS = list(overloads())


def test_there_are_many_of_them() -> None:
    names = {str(func) for func in OVERLOADS}
    assert len(names) > 60
    assert {"aten.add.Tensor", "aten.mul.Tensor", "aten.tanh.default", "aten.pow.Tensor_Scalar"} <= names
    # these have no kernel that writes where it is told: torch copies
    assert not names & {"aten.add.Scalar", "aten.masked_fill.Scalar", "aten.relu.default"}
    tried = [func for func in OVERLOADS if (found := with_result(func, torch.float32)) and found[1].is_floating_point()]
    assert len(tried) > 100  # and are compared below


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("func", OVERLOADS, ids=str)
def test_the_result_in_the_place_of_an_argument_has_the_same_bits(func: Any, dtype: torch.dtype) -> None:
    found_apart = with_result(func, dtype)
    if found_apart is None:
        return
    given, expected = found_apart
    for position, argument in enumerate(given):
        if isinstance(argument, Tensor) and argument.dtype is expected.dtype:
            own = [a.clone() if isinstance(a, Tensor) else a for a in given]
            writes_to = _writes_to(func, "cpu")
            assert writes_to is not None
            found = writes_to(*own, out=own[position])
            assert found.data_ptr() == own[position].data_ptr()
            assert same_bits(found, expected)


class Chain(nn.Module):
    """Elementwise ops in a row, of which only the ends are saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        inner = 0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))  # GELU as GPT-2 has it
        return x + 0.5 * h * (1.0 + torch.tanh(inner))


class Symmetric(nn.Module):
    """Of what is read last, another view is read by the same op."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(x * 0.1) * 2.0
        return (h + h.T).sin()


class Kept(nn.Module):
    """An op of somebody else's, which gives what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.ops.jettison_tests.table(x.detach()) * 2.0).sin() * x


LIBRARY = torch.library.Library("jettison_tests", "DEF")
LIBRARY.define("table(Tensor x) -> Tensor")
TABLES: dict[tuple[int, ...], Tensor] = {}


def table(x: Tensor) -> Tensor:
    return TABLES.setdefault(tuple(x.shape), torch.full_like(x, 0.25))


LIBRARY.impl("table", table, "CPU")
LIBRARY.impl("table", lambda x: torch.empty_like(x), "Meta")


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


WIDTH = 64


@pytest.mark.parametrize("block", [lambda: Chain(WIDTH), Symmetric, Kept], ids=["chain", "symmetric", "kept"])
def test_the_same_gradients(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    TABLES.clear()
    model, x = Stack(block), torch.randn(WIDTH, WIDTH, requires_grad=True)
    twin = independent_copy(model)
    with jettison.apply(model, "full", regions=BLOCKS, batch=(x,)):
        assert_same(model, twin, (x,))
    assert all((t == 0.25).all() for t in TABLES.values())


def test_a_chain_takes_the_memory_of_what_it_has_read() -> None:
    """Four of the seven ops between the product and what backward asks for write over what they read."""
    torch.manual_seed(0)
    model, x = Stack(lambda: Chain(WIDTH)), torch.randn(512, WIDTH)
    with jettison.apply(model, "full", regions=BLOCKS, batch=(x,)) as handle:
        names = [str(f) for f in functions(handle)]
    assert [names.count(n) for n in ("aten.mul.out", "aten.add.out", "aten.tanh.out")] == [6, 3, 3]
    assert names.count("aten.pow.Tensor_Scalar") == 3  # reads the product, which is saved


def test_backward_twice_and_after_an_op_that_failed() -> None:
    """What was written over is computed again, also where an exception came in between."""
    torch.manual_seed(0)
    model, x = Stack(lambda: Chain(WIDTH)), torch.randn(16, WIDTH)
    twin = independent_copy(model)
    with jettison.apply(model, "full", regions=BLOCKS, batch=(x,)) as handle:
        expected = torch.autograd.grad(twin(x), list(twin.parameters()))
        loss = model(x)
        step = next(s for s in steps(handle) if s.into is not None)
        func, calls = step.func, []

        def fails_once(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            out = func(*args, **kwargs)
            if len(calls) == 1:
                raise MemoryError("made up")
            return out

        step.func = fails_once
        with pytest.raises(MemoryError):
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for _ in range(2):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        assert len(calls) > 2


def test_the_dry_run_knows() -> None:
    """What it predicts for the smallest budget is what a step takes, with results in the place of what was read."""
    torch.manual_seed(0)
    model, x = Stack(lambda: Chain(WIDTH)), torch.randn(2048, WIDTH)
    with pytest.raises(jettison.Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), "1kB", regions=BLOCKS)
    budget = jettison.Bytes(refused.value.minimum_budget_bytes)
    with jettison.auto_checkpoint(model, (x,), budget, regions=BLOCKS) as handle:
        assert any(s.into is not None for s in steps(handle))
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            counter = AllocationCounter(static_tensors(model, (x,)))
            with counter:
                model(x).backward()
        assert counter.peak_bytes == handle.plan.predicted.peak_bytes <= budget


def steps(handle: Any) -> list[Any]:
    recipes = [p.recipe for r in handle.regions for p in r.recordings.prepared.values() if p.recipe is not None]
    return [step for recipe in recipes for step in recipe.steps.values()]


def functions(handle: Any) -> list[Any]:
    return [step.func for step in steps(handle)]


def assert_same(model: nn.Module, twin: nn.Module, batch: tuple[Tensor, ...]) -> None:
    for seed in range(3):
        found = []
        for each in (model, twin):
            torch.manual_seed(seed)
            each.zero_grad(set_to_none=True)
            given = tuple(a.detach().requires_grad_(a.requires_grad) for a in batch)
            loss = each(*given)
            loss.backward()
            grads = [p.grad for p in each.parameters()] + [a.grad for a in given if a.requires_grad]
            found.append([loss.detach(), *grads])
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
