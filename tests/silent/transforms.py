"""Programs that use the transforms of torch.func, around the model or in its blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from silent.harness import Program
from silent.kit import ROWS, WIDTH, case, program
from silent.passes import calm, stepped


@case()
def called_with_other_parameters() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        swapped = {k: (v * 0.5) for k, v in model.named_parameters()}
        loss = torch.func.functional_call(model, swapped, given)
        loss.backward()
        return [loss]

    return stepped(step)


@case()
def weights_taken_from_a_dict_of_leaves() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        leaves = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
        loss = torch.func.functional_call(model, leaves, given)
        loss.backward()
        return [loss, *(v.grad for v in leaves.values())]

    return stepped(step)


@case()
def gradients_by_func() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        params = {k: v.detach() for k, v in model.named_parameters()}
        grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, given))(params)
        return list(grads.values())

    return stepped(step, calm, live=0)


@case()
def vmap_over_the_model() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        losses = torch.func.vmap(lambda x: model(x))(given[0].view(4, ROWS // 4, WIDTH))
        losses.sum().backward()
        return [losses]

    return stepped(step, calm, live=0)


@case()
def vmap_in_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + torch.func.vmap(lambda row: s.b(torch.tanh(s.a(row)).exp()))(x)

    return program(run)


@case()
def gradient_in_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(s.a(y)).square().sum(), y, create_graph=True)
        return x + s.b(torch.tanh(slope).exp())

    return program(run)


@case()
def energy_gradient_by_func_in_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: torch.tanh(s.a(y)).square().sum())(x)
        return x + s.b(torch.tanh(slope).exp())

    return program(run)


@case()
def forward_mode() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        value, slope = torch.func.jvp(lambda x: model(x), (given[0],), (torch.ones_like(given[0]),))
        return [value, slope]

    return stepped(step, calm, live=0)
