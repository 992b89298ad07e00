"""Models whose structure is another one after planning."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from silent.harness import Program, Step, one_backward
from silent.kit import BLOCKS, WIDTH, Net, block_class, case, rows


def plain_block(s: Any, x: Tensor) -> Tensor:
    """What most of these models are made of."""
    return x + s.b(torch.tanh(s.a(x)).exp())


def other_block(s: Any, x: Tensor) -> Tensor:
    """Another formula of the same shape."""
    return x + s.b(torch.sigmoid(s.a(x)).exp().sin())


def net(run: Callable[..., Any] = plain_block) -> Net:
    made = block_class(run)
    return Net([made(i) for i in range(BLOCKS)])


def changed(change: Callable[[Any, int], None], at: int = 2, **more: Any) -> Program:
    """A model that ``change`` makes another one at the beginning of step ``at``."""
    model = net()
    done = []

    def batch(i: int) -> Any:
        if i == at and not done:
            done.append(True)
            torch.manual_seed(5)
            change(model, i)
            torch.manual_seed(i)
        return (rows(i),)

    return Program(model=model, batch=batch, live=more.pop("live", BLOCKS), **more)


class Lora(nn.Module):
    """A low-rank addition around a projection."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.delta = base, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.delta(x)


class Wrapped(nn.Module):
    """Around a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * 2


@case()
def lora_around_projections() -> Program:
    def change(model: Any, i: int) -> None:
        for layer in model.layers:
            layer.a = Lora(layer.a)

    return changed(change)


@case()
def lora_around_projections_that_are_kept() -> Program:
    """The sum takes the place of the projection's output, which was the cheapest thing to hold."""

    def run(s: Any, x: Tensor) -> Tensor:
        z = s.a(x).double()
        return x + s.b((torch.tanh(z) * torch.sin(z)).float())

    model = net(run)

    def batch(i: int) -> Any:
        if i == 2:
            torch.manual_seed(5)
            for layer in model.layers:
                layer.a = Lora(layer.a)
        return (rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS)


@case()
def one_block_replaced() -> Program:
    return changed(lambda m, i: m.layers.__setitem__(1, block_class(other_block)(1)))


@case()
def all_blocks_replaced() -> Program:
    def change(model: Any, i: int) -> None:
        other = block_class(other_block)
        model.layers = nn.ModuleList(other(k) for k in range(BLOCKS))

    return changed(change)


@case()
def one_block_wrapped() -> Program:
    return changed(lambda m, i: m.layers.__setitem__(1, Wrapped(m.layers[1])))


@case()
def a_block_added() -> Program:
    return changed(lambda m, i: m.layers.append(block_class(plain_block)(3)))


@case()
def a_block_removed() -> Program:
    return changed(lambda m, i: m.layers.__delitem__(0), live=BLOCKS - 1)


@case()
def blocks_in_another_order() -> Program:
    return changed(lambda m, i: setattr(m, "layers", nn.ModuleList(reversed(list(m.layers)))))


@case()
def one_block_used_twice() -> Program:
    return changed(lambda m, i: m.layers.__setitem__(2, m.layers[0]), live=2)


@case()
def hook_that_changes_an_output() -> Program:
    return changed(lambda m, i: m.layers[1].a.register_forward_hook(lambda _m, _a, out: out.sin()))


@case()
def hook_that_adds_a_number_to_an_output() -> Program:
    return changed(lambda m, i: [layer.a.register_forward_hook(lambda _m, _a, out: out + 0.25) for layer in m.layers])


@case()
def hook_that_changes_an_input() -> Program:
    return changed(lambda m, i: m.layers[1].register_forward_pre_hook(lambda _m, a: (a[0] * 0.5,)))


@case()
def hook_around_every_block() -> Program:
    return changed(lambda m, i: [layer.register_forward_hook(lambda _m, _a, out: out.tanh()) for layer in m.layers])


@case()
def backward_hook_on_a_block() -> Program:
    return changed(lambda m, i: m.layers[1].register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 0.5,)))


@case()
def forward_set_on_an_instance() -> Program:
    def change(model: Any, i: int) -> None:
        model.layers[1].forward = types.MethodType(other_block, model.layers[1])

    return changed(change)


@case()
def forward_set_on_the_class() -> Program:
    return changed(lambda m, i: setattr(type(m.layers[0]), "forward", other_block))


@case()
def forward_of_a_part_set() -> Program:
    def change(model: Any, i: int) -> None:
        part = model.layers[1].a
        part.forward = lambda x: torch.sin(nn.functional.linear(x, part.weight, part.bias))

    return changed(change)


@case()
def projections_swapped() -> Program:
    def change(model: Any, i: int) -> None:
        for layer in model.layers:
            layer.a, layer.b = layer.b, layer.a

    return changed(change)


@case()
def parameter_replaced() -> Program:
    def change(model: Any, i: int) -> None:
        for layer in model.layers:
            layer.a.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    return changed(change)


@case()
def weights_tied() -> Program:
    return changed(lambda m, i: setattr(m.layers[0].a, "weight", m.layers[2].b.weight))


@case(works=True)
def weights_frozen_and_thawed() -> Program:
    model = net()

    def batch(i: int) -> Any:
        for layer in model.layers:
            layer.a.weight.requires_grad_(i != 2)
        return (rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS, steps=5)


@case()
def first_blocks_frozen() -> Program:
    return changed(lambda m, i: m.layers[0].requires_grad_(False), live=2)


@case()
def weights_parametrized() -> Program:
    class Skew(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() - w.triu(1).T

    def change(model: Any, i: int) -> None:
        parametrize.register_parametrization(model.layers[1].a, "weight", Skew())

    return changed(change)


@case(works=True)
def weights_cached_for_other_lengths() -> Program:
    """Torch keeps computed weights in a table of its own, which recordings must not leave theirs in."""

    def step(model: Any, batch: Any, i: int) -> list[Tensor]:
        with parametrize.cached():
            return one_backward(model, batch, i)

    model = net()
    parametrize.register_parametrization(model.layers[1].a, "weight", nn.Tanh())
    return Program(model=model, batch=lambda i: (rows(i, 64 - i),), step=step)


@case()
def weights_pruned() -> Program:
    return changed(lambda m, i: prune.l1_unstructured(m.layers[1].a, "weight", amount=0.5))


@case(works=True)
def part_in_eval_mode() -> Program:
    def init(s: Any, i: int) -> None:
        s.drop = nn.Dropout(0.5)

    made = block_class(lambda s, x: x + s.b(s.drop(torch.tanh(s.a(x)))), init)
    model = Net([made(i) for i in range(BLOCKS)])

    def batch(i: int) -> Any:
        model.layers[1].train(i < 2)
        return (rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS)


@case(works=True)
def rate_of_a_dropout_set() -> Program:
    def init(s: Any, i: int) -> None:
        s.drop = nn.Dropout(0.5)

    made = block_class(lambda s, x: x + s.b(s.drop(torch.tanh(s.a(x)))), init)
    model = Net([made(i) for i in range(BLOCKS)])

    def batch(i: int) -> Any:
        for layer in model.layers:
            layer.drop.p = i / 8
        return (rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS)


@case()
def activation_module_swapped() -> Program:
    made = block_class(lambda s, x: x + s.b(s.act(s.a(x))), lambda s, i: setattr(s, "act", nn.Tanh()))
    model = Net([made(i) for i in range(BLOCKS)])

    def batch(i: int) -> Any:
        for layer in model.layers:
            layer.act = nn.Tanh() if i < 2 else nn.Sigmoid()
        return (rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS)


@case(works=True)
def all_in_double() -> Program:
    model = net()

    def batch(i: int) -> Any:
        if i >= 2:
            model.double()
        return (rows(i).double() if i >= 2 else rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS)


def through(twin: Callable[[nn.Module], nn.Module]) -> Step:
    """Train through what ``twin`` makes of the planned model; gradients reach shared parameters."""

    def step(model: nn.Module, given: Any, i: int) -> list[Tensor]:
        other = twin(model)
        loss = other(*given)
        loss.backward()
        return [loss, *(p.grad for p in other.parameters() if p.grad is not None)]

    return step


@case()
def shallow_copy_with_other_blocks() -> Program:
    def twin(model: nn.Module) -> nn.Module:
        other = copy.copy(model)
        other._modules = dict(model._modules)
        torch.manual_seed(9)
        made = block_class(other_block)
        other.layers = nn.ModuleList(made(i) for i in range(BLOCKS))
        return other

    return Program(model=net(), batch=lambda i: (rows(i),), step=through(twin), live=0)


@case()
def shallow_copies_of_blocks() -> Program:
    def twin(model: Any) -> nn.Module:
        other = copy.copy(model)
        other._modules = dict(model._modules)
        other.layers = nn.ModuleList()
        torch.manual_seed(9)
        for layer in model.layers:
            copied = copy.copy(layer)
            copied._modules = dict(layer._modules)
            copied.a = nn.Linear(WIDTH, WIDTH)
            other.layers.append(copied)
        return other

    return Program(model=net(), batch=lambda i: (rows(i),), step=through(twin), live=0)


@case()
def replica_for_data_parallel() -> Program:
    def twin(model: Any) -> nn.Module:
        other = model._replicate_for_data_parallel()
        torch.manual_seed(9)
        made = block_class(other_block)
        other.layers = nn.ModuleList(made(i) for i in range(BLOCKS))
        return other

    return Program(model=net(), batch=lambda i: (rows(i),), step=through(twin), live=0)


@case()
def deep_copy_trained_instead() -> Program:
    return Program(model=net(), batch=lambda i: (rows(i),), step=through(copy.deepcopy), live=0)


@case(slow=True)
def compiled_over_a_plan() -> Program:
    compiled: list[Any] = []

    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        if i == 1:
            compiled.append(torch.compile(model, backend="eager"))
        loss = (compiled[0] if compiled else model)(*given)
        loss.backward()
        return [loss]

    return Program(model=net(), batch=lambda i: (rows(i),), step=step, live=BLOCKS)


@case(slow=True)
def compiled_blocks_over_a_plan() -> Program:
    model = net()

    def batch(i: int) -> Any:
        if i == 1:
            for layer in model.layers:
                layer.compile(backend="eager")
        return (rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS)


@case(slow=True)
def compiled_first() -> Program:
    model = torch.compile(net(), backend="eager")
    return Program(model=model, batch=lambda i: (rows(i),))


@case(slow=True)
def forward_compiled_in_place_first() -> Program:
    model = net()
    for layer in model.layers:
        layer.compile(backend="eager")
    return Program(model=model, batch=lambda i: (rows(i),), live=BLOCKS)


@case(works=True)
def wrapped_in_another_model() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        outer = nn.Sequential(nn.Identity(), model)
        loss = outer(*given)
        loss.backward()
        return [loss]

    return Program(model=net(), batch=lambda i: (rows(i),), step=step, live=BLOCKS)


@case(works=True)
def blocks_called_by_hand() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        x = given[0]
        for layer in (*model.layers, *reversed(model.layers)):
            x = layer(x).tanh()
        loss = x.square().mean()
        loss.backward()
        return [loss]

    return Program(model=net(), batch=lambda i: (rows(i),), step=step, live=BLOCKS)


@case(works=True)
def state_loaded_over_the_parameters() -> Program:
    model = net()
    other = {k: torch.randn_like(v) / 6 for k, v in model.state_dict().items()}

    def batch(i: int) -> Any:
        if i == 2:
            model.load_state_dict(other, assign=True)
        return (rows(i),)

    return Program(model=model, batch=batch, live=BLOCKS)
