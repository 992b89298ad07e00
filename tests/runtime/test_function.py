"""The function wrapper and the class decorator, over the same mechanism as plans."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import JettisonError, UsageError, WrongValue
from jettison.dryrun.counter import AllocationCounter
from jettison.runtime.checkpoint_function import regions_of
from jettison.verify.differences import compare_gradients, independent_copy, rng_digest, same_bits

N, ROWS = 8, 16
POLICIES = ("none", "selective-op", "full")


class Mlp(nn.Module):
    """Two linear layers and a dropout; ``run`` says how its inner function is called."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(N, 4 * N), nn.Linear(4 * N, N), nn.Dropout(rate)

    def inner(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(self.up(x).sigmoid().sin())) * scale
        return y if shift is None else y * shift

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


Call = Callable[[Mlp, Tensor], Tensor]


def check(call: Call, plain_call: Call | None = None, steps: int = 3) -> Mlp:
    """Train through ``call`` beside an independent copy that does the same without Jettison. Returns the former."""
    torch.manual_seed(0)
    model = Mlp()
    plain = independent_copy(model)
    for n in range(steps):
        x = torch.randn(ROWS, N)
        results = []
        for m, how in ((model, call), (plain, plain_call or Mlp.inner)):
            m.zero_grad(set_to_none=True)
            torch.manual_seed(n)
            given = x.clone().requires_grad_()
            loss = how(m, given).square().sum()
            loss.backward()
            results.append((loss.detach(), given.grad, rng_digest()))
        (loss, grad, state), (plain_loss, plain_grad, plain_state) = results
        assert grad is not None and plain_grad is not None
        assert same_bits(loss, plain_loss) and same_bits(grad, plain_grad) and state == plain_state
        report = compare_gradients(model, plain)
        assert report.identical, report.differences
    return model


def regions(model: nn.Module) -> list[Any]:
    return [region.planned for region in regions_of(model).values()]


def recorded_once(model: nn.Module, policy: str = "full") -> None:
    """One recording; none where everything is kept."""
    (region,) = regions(model)
    assert region.recordings.count == (policy != "none")
    assert region.report().calls == 3 and not region.report().fallback


# ways to name a function ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_module(policy: str) -> None:
    model = check(lambda m, x: jettison.checkpoint(m, x, policy=policy))
    recorded_once(model, policy)
    assert (regions(model)[0].report().slots_dropped > 0) == (policy != "none")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_bound_method_with_keywords(policy: str) -> None:
    shift = torch.randn(N)

    def plain(m: Mlp, x: Tensor) -> Tensor:
        return m.inner(x, 2.0, shift=shift)

    recorded_once(check(lambda m, x: jettison.checkpoint(m.inner, x, 2.0, policy=policy, shift=shift), plain), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lambda_made_anew_at_each_call(policy: str) -> None:
    recorded_once(check(lambda m, x: jettison.checkpoint(lambda y: m.inner(y), x, policy=policy)), policy)


def test_a_partial() -> None:
    def plain(m: Mlp, x: Tensor) -> Tensor:
        return m.inner(x, 3.0)

    recorded_once(check(lambda m, x: jettison.checkpoint(functools.partial(m.inner, scale=3.0), x), plain))


def test_a_closure_over_a_tensor_that_is_no_parameter() -> None:
    """A tensor that no name leads to is kept, and is each call's own."""
    made: list[Tensor] = []

    def scaled(m: Mlp, x: Tensor) -> Callable[[Tensor], Tensor]:
        table = x.detach().cos()
        made.append(table)
        return lambda y: (m.inner(y) * table).sin()

    model = check(lambda m, x: jettison.checkpoint(scaled(m, x), x), lambda m, x: scaled(m, x)(x))
    recorded_once(model)
    assert not same_bits(made[0], made[2])


def test_a_closure_over_a_tensor_that_wants_gradients() -> None:
    torch.manual_seed(0)
    outer = [torch.randn(N, requires_grad=True) for _ in range(2)]
    outer[1].data.copy_(outer[0].data)
    x = torch.randn(ROWS, N)
    for _ in range(2):
        jettison.checkpoint(lambda y: (y * outer[0]).sin() * outer[0].exp(), x).sum().backward()
        ((x * outer[1]).sin() * outer[1].exp()).sum().backward()
    assert outer[0].grad is not None and outer[1].grad is not None
    assert same_bits(outer[0].grad, outer[1].grad)


def test_a_closure_over_numbers_that_change() -> None:
    """The same code with another number in its closure is another function."""
    scales = iter((2.0, 3.0, 2.0) * 2)
    order: list[float] = []

    def planned(m: Mlp, x: Tensor) -> Tensor:
        scale = next(scales)
        order.append(scale)
        return jettison.checkpoint(lambda y: (m.inner(y) * scale).sin(), x)

    check(planned, lambda m, x: (m.inner(x) * order[-1]).sin())


def test_parameters_in_a_closure_are_read_again_and_not_kept() -> None:
    torch.manual_seed(0)
    weight, twin = nn.Parameter(torch.randn(N, N)), nn.Parameter(torch.empty(N, N))
    twin.data.copy_(weight.data)
    x = torch.randn(ROWS, N)

    def function(y: Tensor) -> Tensor:
        return (y @ weight).sin() @ weight

    for step in range(3):
        jettison.checkpoint(function, x).sum().backward()
        ((x @ twin).sin() @ twin).sum().backward()
        assert weight.grad is not None and twin.grad is not None and same_bits(weight.grad, twin.grad), step
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
            twin.sub_(0.1 * twin.grad)
    (region,) = [r.planned for r in regions_of(weight).values()]
    assert region.recordings.count == 1 and region.report().slots_dropped >= 2


class Numbers:
    """An iterator of one's own: its state is in its attributes."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n


def _count_in_a_cell() -> tuple[Callable[[], None], Callable[[], float]]:
    n = 0

    def tick() -> None:
        nonlocal n
        n += 1

    return tick, lambda: n


def _count_in_a_list() -> tuple[Callable[[], None], Callable[[], float]]:
    seen: list[int] = []
    return lambda: seen.append(1), lambda: len(seen)


def _count_in_an_array() -> tuple[Callable[[], None], Callable[[], float]]:
    number = np.zeros(())

    def tick() -> None:
        number[...] += 1

    return tick, lambda: float(number)


def _count_in_an_iterator() -> tuple[Callable[[], None], Callable[[], float]]:
    numbers = Numbers()
    return lambda: next(numbers) and None, lambda: numbers.n


@pytest.mark.filterwarnings("ignore:a checkpointed function cannot be planned:UserWarning")
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not-recorded"])
@pytest.mark.parametrize("made", [_count_in_a_cell, _count_in_a_list, _count_in_an_array, _count_in_an_iterator])
def test_what_a_closure_counts_counts_calls(made: Callable[[], Any], recorded: bool) -> None:
    """Once a call: not while it is recorded, tried or run again."""
    torch.manual_seed(0)
    model, (tick, value) = Mlp(0.0), made()
    plain = independent_copy(model)
    for step in range(3):
        x = torch.randn(ROWS, N)

        def run(m: Mlp, y: Tensor) -> Tensor:
            tick()
            if not recorded:
                y = y[y[:, 0].abs().argsort().tolist()]  # values that Python sees: no recording
            return m.inner(y).sin()

        for m in (model, plain):
            m.zero_grad(set_to_none=True)
        try:
            jettison.checkpoint(lambda y: run(model, y), x).sum().backward()
        except JettisonError:
            return  # in words, before an optimizer could step
        assert value() == step + 1
        before = value()
        plain.inner(x if recorded else x[x[:, 0].abs().argsort()]).sin().sum().backward()
        assert value() == before
        assert compare_gradients(model, plain).identical


@pytest.mark.filterwarnings("ignore:a checkpointed function:UserWarning")
def test_an_iterator_that_moves_in_a_function_moves_once_a_call() -> None:
    """A recording computes with the number of its own call: the next one stops its backward, and ends the recording."""
    numbers, x = itertools.count(1), torch.randn(3, requires_grad=True)
    for number, stops in ((1, False), (2, True), (3, False), (4, False)):
        out = jettison.checkpoint(lambda y: (y * next(numbers)).sin(), x)
        expected = (x * number).sin()
        assert same_bits(out, expected)
        with pytest.raises(WrongValue, match="Python state") if stops else contextlib.nullcontext():
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert same_bits(gradient, torch.autograd.grad(expected.sum(), x)[0])
    assert next(numbers) == 5


def test_other_arguments_are_recorded_once_each() -> None:
    torch.manual_seed(0)
    model = Mlp()
    plain = independent_copy(model)
    for rows in (4, 6, 4, 6):
        x = torch.randn(rows, N)
        for m, run in ((model, lambda y: jettison.checkpoint(model, y)), (plain, plain)):
            m.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            run(x).sum().backward()
        assert compare_gradients(model, plain).identical
    (region,) = regions(model)
    assert region.recordings.count == 2


def test_one_function_inside_another_is_the_outer_ones() -> None:
    def nested(m: Mlp, x: Tensor) -> Tensor:
        return jettison.checkpoint(lambda y: jettison.checkpoint(m.inner, y).sin() * 2.0, x)

    model = check(nested, lambda m, x: m.inner(x).sin() * 2.0)
    recorded_once(model)


def test_without_gradients_nothing_is_recorded() -> None:
    model, x = Mlp(0.0), torch.randn(ROWS, N)
    with torch.no_grad():
        assert same_bits(jettison.checkpoint(model, x), model(x))
    assert regions(model) == []


def test_an_unknown_policy_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown policy 'some'; expected one of none, full"):
        jettison.checkpoint(torch.sin, torch.randn(3), policy="some")


def test_a_policy_does_what_it_says() -> None:
    kept, model, x = {}, Mlp(), torch.randn(ROWS, N, requires_grad=True)
    for policy in POLICIES:
        jettison.checkpoint(model, x, policy=policy, check="off").sum().backward()
        with AllocationCounter([*model.parameters(), x]) as counter:
            before = counter.live_bytes
            out = jettison.checkpoint(model, x, policy=policy, check="off")
            number = 8  # a factor, in its node; the counter is not told that the node goes without having run
            kept[policy] = counter.live_bytes - before - out.nbytes - number
            del out
            assert counter.live_bytes == before + number
    state, wide, narrow = torch.get_rng_state().nbytes, 4 * ROWS * 4 * N, 4 * ROWS * N
    assert kept["none"] == wide + wide + narrow, "results of sigmoid and sin, and the mask"
    assert kept["selective-op"] == wide + state and kept["full"] == state, "dropout is drawn again"


# what is left behind --------------------------------------------------------------------------------------------------


def closure_over(model: Mlp) -> Any:
    return lambda y: model.inner(y)


@pytest.mark.parametrize("how", ["module", "method", "lambda"])
def test_a_module_that_goes_takes_its_regions_along(how: str) -> None:
    model, x = Mlp(), torch.randn(ROWS, N)
    function: Any = {"module": model, "method": model.inner, "lambda": closure_over(model)}[how]
    for _ in range(2):
        jettison.checkpoint(function, x).sum().backward()
    assert regions(model)
    gone = [weakref.ref(model), weakref.ref(model.up.weight), weakref.ref(regions(model)[0])]
    del model, function
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_activations_of_a_call_go_with_its_graph() -> None:
    model = Mlp()
    x = torch.randn(ROWS, N)
    jettison.checkpoint(model, x).sum().backward()
    gc.disable()
    try:
        loss = jettison.checkpoint(lambda y: model.inner(y).sin(), x).sum()
        y = torch.randn(ROWS, N)
        gone = weakref.ref(y.untyped_storage())
        loss = jettison.checkpoint(lambda z: model.inner(z).sin(), y).sum()
        del y
        assert gone() is not None, "backward needs it"
        loss.backward()
        assert gone() is None
    finally:
        gc.enable()


def test_functions_without_modules_are_not_recorded_again_and_again() -> None:
    x = torch.randn(ROWS, N, requires_grad=True)
    before = len(regions_of(None))
    for _ in range(20):
        jettison.checkpoint(lambda y: y.sin().exp(), x).sum().backward()
    assert len(regions_of(None)) == before + 1
    (*_, region) = regions_of(None).values()
    assert region.planned.recordings.count == 1


# the decorator --------------------------------------------------------------------------------------------------------


def test_a_marked_class_is_planned_by_name_and_runs_plainly_without_a_plan() -> None:
    @jettison.checkpointable
    class Marked(Mlp):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = Marked(), nn.Sequential(Marked(), nn.ReLU()), nn.Linear(N, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(x))).square().sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(ROWS, N)
    plain = independent_copy(model)
    assert isinstance(Marked(), Mlp) and Marked.__name__ == "Marked" and "forward" not in vars(model.first)
    with jettison.apply(model, {"first": "full", "second.0": "selective-op"}, batch=(x,)) as handle:
        for m in (model, plain):
            torch.manual_seed(1)
            m(x).backward()
        words = {report.name: report.word for report in handle.report()}
        assert words == {"first": "full", "second.0": "selective-op", "": "none"}
        assert all(report.slots_dropped > 0 for report in handle.report()[:-1])
    assert compare_gradients(model, plain).identical


@pytest.mark.parametrize("what", ["power", "steps"])
def test_a_configuration_that_a_closure_reads_tells_calls_apart_and_a_count_of_steps_does_not(what: str) -> None:
    torch.manual_seed(0)
    model = Mlp()
    plain = independent_copy(model)
    held = types.SimpleNamespace(power=1.0, steps=0)
    x = torch.randn(4, N)
    for step in range(40):
        setattr(held, what, 1.0 + step % 2 if what == "power" else step)
        for m, run in ((model, jettison.checkpoint), (plain, lambda f, *args: f(*args))):
            m.zero_grad(set_to_none=True)
            torch.manual_seed(step)
            run(lambda y, m=m: (m(y) * held.power).sin(), x).sum().backward()
        assert compare_gradients(model, plain).identical
    assert len(regions(model)) == (2 if what == "power" else 17)
