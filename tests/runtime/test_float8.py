"""Delayed scaling: what is computed again sees the forward's factors, and counts nothing a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import jettison
from jettison.core.units import Bytes
from support.float8 import E4M3, ContextLinear, Float8Linear, factor, narrowed

H, ROWS = 32, 64
POLICIES = ["none", "full", "selective-op", "every:2"]


class Block(nn.Module):
    def __init__(self, linear: Callable[[int, int], nn.Module] = Float8Linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), linear(H, 4 * H), linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks of their own weights and histories, or one three times."""

    def __init__(self, *, shared: bool = False, run: Any = None, linear: Any = Float8Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        only = Block(linear)
        self.layers = nn.ModuleList(only if shared else Block(linear) for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.run is None else self.run(layer, x)
        return x.square().mean()


def batch() -> tuple[Tensor]:
    return (torch.randn(8, ROWS, H),)


def micro_batches() -> list[Tensor]:
    """Each with another largest magnitude, so that factors move all the time."""
    torch.manual_seed(1)
    return [(1 + number) * torch.randn(8, ROWS, H) for number in range(6)]


def train(model: nn.Module) -> list[list[Tensor]]:
    """Three steps of two micro-batches; after each micro-batch all gradients and histories."""
    narrow = [module for module in model.modules() if isinstance(module, ContextLinear)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for number, x in enumerate(micro_batches()):
        loss = model(x)
        for module in narrow:
            module.forward_ends()
        loss.backward()
        for module in narrow:
            module.backward_ends()
        seen.append([t.detach().clone() for t in (*(p.grad for p in model.parameters()), *model.buffers())])
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return seen


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def test_the_reference_is_what_it_says() -> None:
    layer, x = Float8Linear(H, H), 3 * torch.randn(4, H)
    first = layer(x)
    assert layer.input_history[0] == x.abs().max() and not layer.input_history[1:].any()
    assert torch.equal(first, x.to(E4M3).float() @ layer.weight.to(E4M3).float().t() + layer.bias), "no factor is known"
    by, weight_by = 448 / x.abs().max(), 448 / layer.weight.abs().max()
    expected = (narrowed(x, by, E4M3).float() / by) @ (narrowed(layer.weight, weight_by, E4M3).float() / weight_by).t()
    assert torch.equal(layer(x), expected + layer.bias)
    assert factor(layer.input_history, E4M3) == by


def test_the_two_references_have_the_same_factors() -> None:
    """One call a context: factors of the last four magnitudes. Zeros move nothing where they are moved from outside."""
    torch.manual_seed(0)
    alone, moved_on = Float8Linear(H, H), ContextLinear(H, H)
    moved_on.load_state_dict(alone.state_dict(), strict=False)
    for number in (3, 9, 2, 1, 1, 1, 1, 2):
        x = number * torch.randn(4, H)
        found = [layer(x) for layer in (alone, moved_on)]
        moved_on.forward_ends()
        for y in found:
            (number * y).sum().backward()
        moved_on.backward_ends()
        assert torch.equal(*found)
        assert all(torch.equal(*pair) for pair in zip(*(_gradients_of(m) for m in (alone, moved_on)), strict=True))
    before = moved_on.input_by.clone(), moved_on.input_history.clone()
    moved_on(torch.zeros(4, H))
    moved_on.forward_ends()
    assert torch.equal(moved_on.input_by, before[0]) and torch.equal(moved_on.input_history, before[1])


def _gradients_of(layer: nn.Module) -> list[Tensor]:
    return [p.grad for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", ["full", "selective-op"])
def test_factors_that_move_before_backward_begins_are_the_forwards(policy: str) -> None:
    model = Net(linear=ContextLinear)
    with jettison.apply(model, policy, batch=batch()) as handle:
        found = train(model)
        assert all(report.slots_dropped for report in handle.report() if report.name)
    assert same(found, train(Net(linear=ContextLinear)))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_factors_are_the_forwards_and_histories_grow_once(policy: str, shared: bool) -> None:
    model = Net(shared=shared)
    with jettison.apply(model, policy, batch=batch()):
        found = train(model)
    assert same(found, train(Net(shared=shared)))


def test_a_budget_holds_and_narrow_copies_go() -> None:
    model = Net()
    proof = None
    with jettison.apply(model, "full", batch=batch()) as handle:
        proof = jettison.verify(model, batch(), handle=handle, rounds=1)
    assert proof.passed and proof.saved_bytes_agree, proof.failures()
    plain, kept = (sum(getattr(e, name) for e in proof.layers[1:]) for name in ("baseline_bytes", "observed_bytes"))
    # the input of a block; four factors of each of two layers
    assert kept == 3 * (8 * ROWS * H * 4 + 4 * 4)
    assert plain == 3 * (8 * ROWS * (4 * H + 8 + H + 16 * H + 4 * H) + 8 * H * H + 16)
    plan = jettison.plan(jettison.trace(Net(), batch()), Bytes(proof.measured_peak_bytes))
    planned = jettison.verify(Net(), batch(), plan=plan, rounds=1)
    assert planned.passed and planned.measured_peak_bytes <= proof.measured_peak_bytes


def test_a_backward_in_two_parts() -> None:
    """Gradients of inputs first, of weights later, from one graph, as in zero-bubble pipelines: other micro-batches'
    forwards come in between.
    """

    def halves(model: nn.Module) -> list[Tensor]:
        weights, found, waiting = list(model.parameters()), [], []
        for x in micro_batches()[:3]:
            given = x.clone().requires_grad_()
            loss = model(given)
            found += torch.autograd.grad(loss, given, retain_graph=True)
            waiting.append(loss)
        for loss in waiting:
            found += torch.autograd.grad(loss, weights)
        return [*found, *model.buffers()]

    model = Net()
    with jettison.apply(model, "full", batch=batch()):
        found = halves(model)
    assert all(map(torch.equal, found, halves(Net())))


def test_a_forward_that_runs_again_is_seen() -> None:
    """What a checkpoint does that calls the module once more: other factors, and histories that are counted twice."""
    proof = jettison.verify_given(Net(run=partial(checkpoint, use_reentrant=False)), batch(), rounds=1)
    assert not proof.gradients_identical and not proof.buffers_identical
    assert proof.departures[0].startswith(
        "a tensor saved in layers.0.up for _ProductBackward: float8_e4m3fn[8, 64, 32]"
    )
