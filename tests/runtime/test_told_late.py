"""Differences that are told when backward is over, as on an accelerator; here the CPU is made to do so."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import jettison
from jettison.core.errors import TraceError, WrongValue
from jettison.runtime import saved_tensor_hooks, witness
from jettison.runtime.witness import Rounded, Witness, compare, spots_of
from silent.kit import rows, stack

Change = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "is_told_at_once", lambda tensor: False)


def saved_as(change: Change, rounded: Rounded | None) -> Any:
    """Hooks that give back another tensor than the one that was saved."""

    def pack(tensor: Tensor) -> tuple[Tensor, Witness]:
        seen = Witness(tensor, spots_of(tuple(tensor.shape), tuple(tensor.stride())), 0, full=False)
        return tensor.detach(), seen

    def unpack(packed: tuple[Tensor, Witness]) -> Tensor:
        tensor = change(packed[0])
        compare(packed[1], tensor, rounded, lambda: WrongValue("it is not what forward had"))
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def loss_of(x: Tensor, change: Change, rounded: Rounded | None) -> Tensor:
    with saved_as(change, rounded):
        return x.sin().exp().square().sum()


def waiting() -> int:
    gc.collect()
    return len(witness._pending.waiting)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(300, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_a_wrong_value_stops_backward_before_it_returns(x: Tensor) -> None:
    reached = []
    loss = loss_of(x, lambda t: t + 1, Rounded())
    with pytest.raises(WrongValue, match="not what forward had"):
        reached.append(loss.backward())
    assert not reached and waiting() == 0


def test_what_agrees_passes_again_and_again(x: Tensor) -> None:
    rounded = Rounded()
    loss = loss_of(x, torch.clone, rounded)
    for _ in range(3):
        x.grad = None
        loss.backward(retain_graph=True)
    expected = x.grad
    x.grad = None
    x.sin().exp().square().sum().backward()
    assert expected is not None and torch.equal(expected, x.grad) and rounded.tensors == 0 and waiting() == 0


def test_one_wrong_backward_of_several_is_the_one_that_stops(x: Tensor) -> None:
    right, wrong = loss_of(x, torch.clone, None), loss_of(x, lambda t: -t, None)
    right.backward(retain_graph=True)
    with pytest.raises(WrongValue):
        wrong.backward()
    right.backward()


def test_a_backward_inside_a_backward_is_told_on_its_own(x: Tensor) -> None:
    inner = loss_of(x, lambda t: t * 2, None)
    outer = loss_of(x, torch.clone, None)
    outer.grad_fn.register_prehook(lambda grads: torch.autograd.grad(inner, x) and None)
    with pytest.raises(WrongValue):
        outer.backward()
    assert waiting() == 0


def next_bits(tensor: Tensor) -> Tensor:
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf))


def test_rounding_is_counted_and_exact_stops(x: Tensor) -> None:
    rounded = Rounded()
    loss_of(x, next_bits, rounded).backward()
    assert rounded.tensors == 3
    with pytest.raises(WrongValue):
        loss_of(x, next_bits, None).backward()


def test_an_exception_in_the_middle_leaves_nothing_behind(x: Tensor) -> None:
    looks: list[Any] = []

    def fail(_grad: Tensor) -> None:
        looks.extend(weakref.ref(found) for waits in witness._pending.waiting.values() for _, found, _, _ in waits)
        raise KeyError("a hook of the user's")

    with saved_as(lambda t: t + 1, None):
        h = x.sin()
        h.register_hook(fail)
        loss = h.exp().square().sum()
    with pytest.raises(KeyError, match="a hook of the user's"):
        loss.backward()
    assert looks, "nothing was waiting"
    del loss, h
    assert waiting() == 0 and all(look() is None for look in looks)
    loss_of(x, torch.clone, None).backward()


def test_backward_from_another_thread(x: Tensor) -> None:
    right, wrong = loss_of(x, torch.clone, None), loss_of(x, lambda t: t + 1, None)
    told: list[str] = []

    def run(loss: Tensor) -> None:
        try:
            loss.backward()
            told.append("right")
        except WrongValue:
            told.append("wrong")

    for loss in (right, wrong):
        thread = threading.Thread(target=run, args=(loss,))
        thread.start()
        thread.join()
    assert told == ["right", "wrong"]


def test_looks_of_several_threads_meet_at_the_end() -> None:
    """The engine's threads each have their own docket, and any of them may end the backward."""
    seen = torch.arange(100.0)
    waits = witness.PendingSamples()
    left = Witness(seen, spots_of((100,), (1,)), 0, full=False)
    waits.append((left, left.look(seen + 1), None, lambda: WrongValue("late")))
    raised = []

    def settle() -> None:
        try:
            witness.settle(waits)
        except WrongValue as error:
            raised.append(str(error))

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join()
    assert raised == ["late"] and not waits


# in a model -----------------------------------------------------------------------------------------------------------


def test_a_planned_model_stops_at_the_end_of_backward_and_counts_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(lambda s, v: v + s.b(torch.tanh(s.a(v)).exp()))
    with jettison.apply(model, "full", batch=(rows(0),)) as handle:
        model(rows(0)).backward()
        assert [report.rounded for report in handle.report()] == [0, 0, 0, 0]
        assert {report.check for report in handle.report()} == {"always"}
        monkeypatch.setattr(saved_tensor_hooks, "compare", lambda left, t, *more: compare(left, next_bits(t), *more))
        model(rows(1)).backward()
        assert sum(report.rounded for report in handle.report()) > 0
        monkeypatch.setattr(saved_tensor_hooks, "compare", lambda left, t, *more: compare(left, t + 1, *more))
        with pytest.raises(WrongValue, match="was recomputed for backward"):
            model(rows(2)).backward()
    monkeypatch.setattr(saved_tensor_hooks, "compare", lambda left, t, *more: compare(left, next_bits(t), *more))
    with jettison.apply(model, "full", batch=(rows(0),), check="exact"), pytest.raises(WrongValue):
        model(rows(0)).backward()


@pytest.mark.parametrize("how", ["returns", "saves"])
def test_a_fake_tensor_does_not_leave_a_planned_region(how: str) -> None:
    left: list[Tensor] = []

    def run(s: Any, v: Tensor) -> Tensor:
        if left and how == "saves":
            left[0].sin()
        return left[0] if left and how == "returns" else v + s.b(torch.tanh(s.a(v)).exp())

    model = stack(run)
    with jettison.apply(model, "full", batch=(rows(0),)):
        model(rows(0)).backward()
        with FakeTensorMode(allow_non_fake_inputs=True):
            left.append(torch.empty(64, 32, requires_grad=True))
        with pytest.raises(TraceError, match=f"{how} a fake tensor"):
            model(rows(0))


def test_nothing_is_told_in_a_dry_run() -> None:
    """What forward had was fake; what comes back is a real tensor that fake values were written into."""
    seen, other = torch.zeros(8), torch.ones(8)
    left = Witness(seen, spots_of((8,), (1,)), 0, full=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        without_values = Witness(torch.empty(8), spots_of((8,), (1,)), 0, full=False)
        for witness_left in (left, without_values):
            compare(witness_left, seen + 1, None, lambda: WrongValue("told"))
            compare(witness_left, other, None, lambda: WrongValue("told"))
    with pytest.raises(WrongValue):
        compare(left, other, None, lambda: WrongValue("told"))
