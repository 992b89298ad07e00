"""Programs that change what a tensor is beside its values, or change values past the dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import ROWS, WIDTH, case, program, rows
from silent.outside import core, smooth, through, under


def ending(read: Callable[[Any], Any], run: Callable[..., Any], init: Any = None, **more: Any) -> Program:
    """Blocks whose root multiplies the loss by one and what ``read`` finds at the end of a forward."""
    return under(lambda net, x, *args: through(net, x, *args) * (1 + read(net)), run, init, **more)


def stepped(run: Callable[..., Any], init: Callable[[Any, int], None]) -> Program:
    """Blocks that do something else from the third step on: a trial in the first did not see it."""
    return program(run, init, lambda i: (rows(i), torch.tensor(float(i))))


# assigned -------------------------------------------------------------------------------------------------------------


@case(works=True)
def teacher_by_assigned_data() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        for mine, shadow in zip(s.a.parameters(), s.shadow.parameters(), strict=True):
            shadow.data = shadow.data * 0.9 + mine.data * 0.1
        return core(s, x) + s.shadow(x).detach()

    def init(s: Any, i: int) -> None:
        s.shadow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    return program(run, init)


@case(works=True)
def vector_to_parameters() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        vector = nn.utils.parameters_to_vector(s.c.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, s.c.parameters())
        return core(s, x) + s.c(x)

    def init(s: Any, i: int) -> None:
        s.c = nn.Linear(WIDTH, WIDTH)

    return program(run, init)


@case(works=True)
def assigned_data_of_a_closure() -> Program:
    count = torch.zeros(())

    def run(s: Any, x: Tensor) -> Tensor:
        count.data = count.data + 1
        return smooth(s, x)

    return ending(lambda net: count, run)


# past the version counter, late ---------------------------------------------------------------------------------------


@case()
def late_write_past_the_counter() -> Program:
    def run(s: Any, x: Tensor, step: Tensor) -> Tensor:
        y = core(s, x)
        if step.item() > 1:
            s.seen.data.mul_(0.9).add_(y.detach().mean())
        return y

    return stepped(run, lambda s, i: s.register_buffer("seen", torch.zeros(())))


@case()
def late_statistics() -> Program:
    def run(s: Any, x: Tensor, step: Tensor) -> Tensor:
        return F.batch_norm(core(s, x), s.mean, s.var, training=step.item() > 1)

    def init(s: Any, i: int) -> None:
        s.register_buffer("mean", torch.zeros(WIDTH))
        s.register_buffer("var", torch.ones(WIDTH))

    return stepped(run, init)


@case()
def late_write_to_a_parameter() -> Program:
    def run(s: Any, x: Tensor, step: Tensor) -> Tensor:
        y = core(s, x)
        if step.item() > 1:
            s.c.data.add_(y.detach().mean())
        return y + s.c * 0

    return stepped(run, lambda s, i: setattr(s, "c", nn.Parameter(torch.zeros(()))))


@case(works=True)
def batch_norm_without_a_recording() -> Program:
    return program(lambda s, x: s.norm(core(s, x)), lambda s, i: setattr(s, "norm", nn.BatchNorm1d(WIDTH)))


# attributes -----------------------------------------------------------------------------------------------------------


@case(works=True)
def flag_on_a_parameter() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        if not getattr(s.gain, "initialised", False):
            with torch.no_grad():
                s.gain.copy_(1 / (x.std(0) + 1e-3))
            s.gain.initialised = True
        return core(s, x * s.gain)

    return program(run, lambda s, i: setattr(s, "gain", nn.Parameter(torch.ones(WIDTH))))


@case(works=True)
def count_on_a_parameter() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.a.weight.calls = getattr(s.a.weight, "calls", 0) + 1
        return core(s, x) / s.a.weight.calls

    return program(run)


@case(works=True)
def list_on_a_parameter() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.a.weight.log.append(1)
        return smooth(s, x)

    return ending(
        lambda net: sum(len(layer.a.weight.log) for layer in net.layers),
        run,
        lambda s, i: setattr(s.a.weight, "log", []),
    )


# shapes ---------------------------------------------------------------------------------------------------------------


@case()
def transposed_in_place() -> Program:
    held = torch.randn(WIDTH, WIDTH)

    def run(s: Any, x: Tensor) -> Tensor:
        held.t_()
        return smooth(s, x) + x.detach() @ held

    return program(run, removable=False)


@case()
def grown_in_place() -> Program:
    held = torch.zeros(1)

    def run(s: Any, x: Tensor) -> Tensor:
        size = held.numel()
        held.resize_(size + 1)
        held[size] = 1.0
        return smooth(s, x)

    return ending(lambda net: held.sum(), run)


@case()
def set_to_another() -> Program:
    held = torch.zeros(WIDTH)

    def run(s: Any, x: Tensor) -> Tensor:
        held.set_(held + 1)
        return smooth(s, x)

    return ending(lambda net: held.mean(), run)


@case()
def unsqueezed_in_place() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.seen.unsqueeze_(0)
        return core(s, x)

    return ending(
        lambda net: sum(layer.seen.dim() for layer in net.layers), run, lambda s, i: setattr(s, "seen", torch.zeros(1))
    )


@case()
def swapped() -> Program:
    a, b = torch.ones(WIDTH), torch.zeros(WIDTH)

    def run(s: Any, x: Tensor) -> Tensor:
        torch.utils.swap_tensors(a, b)
        return core(s, x)

    return ending(lambda net: a.mean(), run)


# gradients ------------------------------------------------------------------------------------------------------------


@case()
def gradient_halved_by_the_forward() -> Program:
    held = torch.zeros(WIDTH, requires_grad=True)
    held.grad = torch.ones(WIDTH)

    def run(s: Any, x: Tensor) -> Tensor:
        assert held.grad is not None
        held.grad = held.grad * 0.5
        return smooth(s, x)

    return ending(lambda net: 0 if held.grad is None else held.grad.sum(), run)


@case()
def gradient_begun_by_the_forward() -> Program:
    held = torch.zeros(WIDTH, requires_grad=True)

    def run(s: Any, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        held.grad = mean if held.grad is None else held.grad + mean
        return smooth(s, x)

    return ending(lambda net: 0 if held.grad is None else held.grad.sum(), run)


@case(works=True)
def frozen_in_the_sixth_call() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.calls += 1
        if s.calls >= 6:
            s.a.weight.requires_grad_(False)
        return core(s, x)

    return program(run, lambda s, i: setattr(s, "calls", 0), steps=8)


# past the dispatcher --------------------------------------------------------------------------------------------------


def counted_by_numpy(block: Callable[[Any, Tensor], Tensor]) -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.seen.numpy()[...] += 1
        return block(s, x)

    return ending(
        lambda net: sum(layer.seen for layer in net.layers),
        run,
        lambda s, i: s.register_buffer("seen", torch.zeros(())),
    )


@case()
def numpys_view_of_a_buffer() -> Program:
    return counted_by_numpy(smooth)


@case()
def numpys_view_without_a_recording() -> Program:
    return counted_by_numpy(core)


# kinds of tensors -----------------------------------------------------------------------------------------------------


@case()
def sparse_argument() -> Program:
    neighbours = torch.eye(ROWS).to_sparse()

    def run(s: Any, x: Tensor, given: Tensor) -> Tensor:
        return x + torch.sparse.mm(given, s.b(torch.tanh(s.a(x))))

    return under(lambda net, x: through(net, x, neighbours), run)


@case(works=True)
def sparse_attribute() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + torch.sparse.mm(s.neighbours, s.b(torch.tanh(s.a(x))))

    return program(run, lambda s, i: setattr(s, "neighbours", torch.eye(ROWS).to_sparse()))


@case(works=True)
def sparse_of_a_closure() -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are in beta
        neighbours = torch.eye(ROWS).to_sparse_csr()
    return program(lambda s, x: x + neighbours @ s.b(torch.tanh(s.a(x))))


def inferred(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


@case(works=True)
def inference_tensor_argument() -> Program:
    return program(lambda s, x, shift: smooth(s, x + shift), batch=lambda i: (rows(i), inferred(rows(i + 5))))


@case(works=True)
def inference_tensor_without_a_recording() -> Program:
    return program(lambda s, x, shift: core(s, x + shift), batch=lambda i: (rows(i), inferred(rows(i + 5))))


@case(works=True)
def inference_buffer() -> Program:
    return program(
        lambda s, x: x + s.b(torch.tanh(s.a(x) + s.shift).exp()),
        lambda s, i: s.register_buffer("shift", inferred(torch.ones(WIDTH))),
    )


@case(works=True)
def inference_buffer_without_a_recording() -> Program:
    return program(
        lambda s, x: core(s, x) + s.shift, lambda s, i: s.register_buffer("shift", inferred(torch.ones(WIDTH)))
    )
