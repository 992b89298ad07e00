"""Blocks with transforms of `torch.func`, with complex numbers, with hooks switched off: planned, or kept."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

import jettison
from jettison.core.errors import Infeasible, TraceError
from jettison.dryrun.counter import measured_peak, static_tensors

WIDTH, ROWS = 64, 16


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Gradient(Pair):
    """A gradient by each row, inside of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(func.vmap(func.grad(lambda row: self.up(row).tanh().sum()))(x))


class Jacobian(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(func.vmap(func.jacrev(lambda row: self.up(row)[:4].tanh()))(x).sum(1))


class Tangent(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(func.jvp(lambda rows: torch.tanh(self.up(rows)), (x,), (torch.ones_like(x),))[1])


class WithoutHooks(Pair):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("none in here"):
            return x + self.down(torch.tanh(self.up(x)))


class Complex(Pair):
    """A complex weight between two views of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH // 2, WIDTH // 2, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.turn(torch.view_as_complex(x.view(-1, WIDTH // 2, 2)))
        return x + self.down(torch.tanh(self.up(torch.view_as_real(turned).flatten(1))))


@torch.compile(fullgraph=True, backend="aot_eager")
def compiled_branch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(nn.functional.linear(x, weight, bias))


class Compiled(Pair):
    """Calls a function that `torch.compile` has made, which fails where anything watches its ops."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(compiled_branch(x, self.up.weight, self.up.bias))


class Versioned(Pair):
    """Reads a count that only a run on copies shows: how often a buffer was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", copy.deepcopy(torch.zeros(2)))  # a copied model has copies

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        chosen = x[:, 0].nonzero().flatten()
        return x + self.down(torch.tanh(self.up(x[chosen]))) * (1 + 0.01 * self.seen._version * x.sigmoid())


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


COMPILED: list[int] = []


def counted(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend that tells what it compiles."""
    COMPILED.append(len(graph.graph.nodes))
    return graph.forward


@torch.compile(backend=counted)
def compiled_without_fullgraph(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(nn.functional.linear(x, weight, bias))


class CompiledInPart(Pair):
    """The same, where torch says nothing when it does not compile."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(compiled_without_fullgraph(x, self.up.weight, self.up.bias))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_in_a_block_runs_compiled() -> None:
    torch._dynamo.reset()
    model, x = Stack(CompiledInPart), torch.randn(ROWS, WIDTH)
    with jettison.auto_checkpoint(model, (x,), "1GiB"):
        assert COMPILED == []
        model(x).backward()
    assert COMPILED


def same_gradients(plain: nn.Module, model: nn.Module) -> None:
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(torch.view_as_real(expected.grad.cfloat()), torch.view_as_real(found.grad.cfloat())), name


@pytest.mark.parametrize(
    "block", [Gradient, Jacobian, Tangent, WithoutHooks, Complex, Compiled, CompiledInPart, Versioned]
)
@pytest.mark.filterwarnings("ignore")
def test_a_block_trains_under_its_smallest_budget(block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Stack(block), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), jettison.Bytes(1))
    budget = refused.value.minimum_budget_bytes
    with jettison.auto_checkpoint(model, (x,), budget):
        for _ in range(3):
            for one in (plain, model):
                one.zero_grad()
            plain(x).backward()
            peak = measured_peak(lambda: model(x).backward(), static_tensors=static_tensors(model, (x,))).peak_bytes
            same_gradients(plain, model)
            assert peak <= budget


@pytest.mark.parametrize("see", [lambda x: x.view(-1, WIDTH // 2, 2), lambda x: x.unflatten(-1, (WIDTH // 2, 2))])
def test_a_batch_that_is_seen_as_complex_numbers(see: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH // 2, WIDTH // 2, dtype=torch.complex64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(see(x))
            for block in self.blocks:
                z = block(z)
            return z.abs().square().mean()

    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    plain(x).backward()
    with jettison.auto_checkpoint(model, (x,), "1GiB") as handle:
        peak = measured_peak(lambda: model(x).backward(), static_tensors=static_tensors(model, (x,))).peak_bytes
        same_gradients(plain, model)
        assert abs(peak - handle.plan.predicted.peak_bytes) <= 64


def _some_blocks_without_hooks(net: WeightReadPeaks, x: Tensor) -> Tensor:
    x = net.blocks[0](x)
    with torch.autograd.graph.disable_saved_tensors_hooks("none in here"):
        for block in net.blocks[1:]:
            x = block(x).sin()
    return net.head(net.blocks[0](x))


def _the_head_without_hooks(net: WeightReadPeaks, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    with torch.autograd.graph.disable_saved_tensors_hooks("none in here"):
        return net.head(x).sin().exp()


def _a_gradient_around_blocks(net: WeightReadPeaks, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x + func.vmap(func.grad(lambda row: net.head(row).tanh().sum()))(x)


def _a_tangent_around_blocks(net: WeightReadPeaks, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x + func.jvp(lambda rows: net.head(rows).tanh(), (x,), (torch.ones_like(x),))[1]


class WeightReadPeaks(nn.Module):
    """Switches hooks off itself, or by a transform, around its blocks."""

    def __init__(self, run: Callable[[WeightReadPeaks, Tensor], Tensor]) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))  # noqa: E731
        self.blocks, self.head = nn.ModuleList(block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()


@pytest.mark.parametrize(
    "run", [_some_blocks_without_hooks, _the_head_without_hooks, _a_gradient_around_blocks, _a_tangent_around_blocks]
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_may_switch_hooks_off_around_its_blocks(run: Callable[[WeightReadPeaks, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = WeightReadPeaks(run), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    plain(x).backward()
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), jettison.Bytes(1))
    with jettison.auto_checkpoint(model, (x,), refused.value.minimum_budget_bytes) as handle:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            peak = measured_peak(lambda: model(x).backward(), static_tensors=static_tensors(model, (x,))).peak_bytes
            same_gradients(plain, model)
        assert abs(peak - handle.plan.predicted.peak_bytes) <= 64


class Later(Pair):
    """Switches hooks off from its third call on, where it is ``last``."""

    calls, last = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        off = self.last and self.calls > 2
        with torch.autograd.graph.disable_saved_tensors_hooks("none") if off else contextlib.nullcontext():
            return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("where", ["blocks.1", "head"])
@pytest.mark.filterwarnings("ignore")
def test_hooks_that_are_switched_off_later_stop_one_step_by_name(where: str) -> None:
    """In a block, which has hooks; around the blocks, where everything stays, there are none."""
    torch.manual_seed(0)
    model, x = WeightReadPeaks(lambda net, x: net.head(net.blocks[1](net.blocks[0](x)))), torch.randn(ROWS, WIDTH)
    model.blocks, model.head = nn.ModuleList(Later() for _ in range(2)), Later()  # type: ignore[assignment]
    model.get_submodule(where).last = True  # type: ignore[assignment]
    plain = copy.deepcopy(model)
    plain(x).backward()
    with jettison.apply(model, "full", batch=(x,)):
        for _ in range(2):
            model(x).backward()
        if where == "blocks.1":
            with pytest.raises(TraceError, match="switches saved-tensor hooks off"):
                model(x)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(x).backward()
            same_gradients(plain, model)


def test_a_step_where_hooks_are_off_runs_without_the_plan_and_says_so() -> None:
    torch.manual_seed(0)
    model, x = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    plain(x).backward()
    with jettison.auto_checkpoint(model, (x,), "1GiB"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autograd.graph.disable_saved_tensors_hooks("none in here"):
            model(x).backward()
    same_gradients(plain, model)
    assert any("disable_saved_tensors_hooks" in str(one.message) for one in said)


@pytest.mark.parametrize("value_read", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_gradients_in_batches_over_dropout(value_read: bool) -> None:
    """`is_grads_batched` runs a backward in which no random op may run; the plan computes one again."""

    class Dropping(Pair):
        def forward(self, x: Tensor) -> Tensor:
            if value_read and float(x.detach().sum()) == 0.5:  # no recording: its Python runs again
                x = -x
            return x + self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Dropping() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    plain, rows = copy.deepcopy(model), torch.eye(4)
    jettison.apply(model, "full", batch=(x,), loss_fn=lambda y: y.sum())
    for _ in range(2):
        found = []
        for one in (plain, model):
            torch.manual_seed(1)
            outputs = one(x).mean(0)[:4]
            found.append(torch.autograd.grad(outputs, one.blocks[0].up.weight, rows, is_grads_batched=True)[0])
        assert torch.equal(*found)


class Forces(nn.Module):
    """Asks for the gradient of its energy with respect to the positions that it is given, inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, positions: Tensor) -> Tensor:
        positions = x = positions.requires_grad_(True)
        for block in self.blocks:
            x = x + block(x)
        energy = self.head(x).sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy.square() + forces.square().mean()


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_inside_of_the_models_forward_is_planned() -> None:
    torch.manual_seed(0)
    model, x = Forces(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), jettison.Bytes(1))
    assert not x.requires_grad  # as it was before planning
    budget = refused.value.minimum_budget_bytes
    with jettison.auto_checkpoint(model, (x,), budget):
        for _ in range(3):
            for one in (plain, model):
                one.zero_grad()
            plain(x.clone()).backward()
            given = x.clone()
            peak = measured_peak(
                lambda given=given: model(given).backward(), static_tensors=static_tensors(model, (given,))
            ).peak_bytes
            del given
            same_gradients(plain, model)
            assert peak <= budget
