"""Programs as people write them, which found what nobody had thought of."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from silent.harness import Program
from silent.kit import ROWS, WIDTH, block_class, case, program, rows
from silent.outside import smooth, through, under
from support.toys import Net


@case(works=True)
def norm_over_channels() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        normal = s.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + s.b(F.gelu(s.a(normal)))

    return program(
        run, lambda s, i: setattr(s, "norm", nn.BatchNorm1d(WIDTH)), lambda i: (rows(i, 4 * 6).reshape(4, 6, WIDTH),)
    )


@case(works=True)
def activation_in_place_of_a_view() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + F.relu(s.b(torch.tanh(s.a(x))), inplace=True)

    return program(run, batch=lambda i: (rows(i, 4 * 6).reshape(4, 6, WIDTH),))


@case()
def generator_in_the_batch() -> Program:
    generator = torch.Generator().manual_seed(3)

    def run(s: Any, x: Tensor, given: torch.Generator) -> Tensor:
        return smooth(s, x) * torch.bernoulli(torch.full_like(x, 0.8), generator=given)

    return program(run, batch=lambda i: (rows(i), generator), generators=(generator,))


@case(works=True)
def skipped_by_pythons_chance() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x if random.random() < 0.3 else smooth(s, x)

    made = block_class(run)
    return Program(model=Net([made(i) for i in range(6)]), batch=lambda i: (rows(i, grad=True),), live=0)


@case(works=True)
def norms_of_gradients_logged() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: s.log.append(gradient.norm().item()))
        return x + s.b(torch.tanh(h))

    return program(run, lambda s, i: setattr(s, "log", []))


@case(works=True)
def random_state_saved_and_put_back() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        dropped = F.dropout(s.a(x), 0.2)
        torch.set_rng_state(state)
        return x + s.b(torch.tanh(dropped)) + F.dropout(x, 0.2)

    return program(run)


@case(works=True)
def tangents() -> Program:
    def step(model: nn.Module, batch: Any, i: int) -> list[Tensor]:
        with forward_ad.dual_level():
            loss = model(forward_ad.make_dual(batch[0], torch.ones_like(batch[0])))
            primal, tangent = forward_ad.unpack_dual(loss)
            total = primal + tangent.square()  # type: ignore[union-attr]
            total.backward()
        return [total.detach()]

    def run(s: Any, x: Tensor) -> Tensor:
        return smooth(s, F.layer_norm(x, (WIDTH,)))

    return program(run, step=step, live=0)


class Encoder(nn.Module):
    """torch's own, which takes another way where nobody wants gradients and there are no hooks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, self.mask).square().mean()  # type: ignore[no-any-return]


@case(works=True)
def taught_by_itself() -> Program:
    def step(model: nn.Module, batch: Any, i: int) -> list[Tensor]:
        model.eval()
        with torch.no_grad():
            target = model(*batch)
        model.train()
        loss = (model(*batch) - 0.5 * target).abs()
        loss.backward()
        return [target, loss]

    return Program(model=Encoder(), batch=lambda i: (rows(i, 4 * 6).reshape(4, 6, WIDTH),), step=step)


@case(works=True)
def sparse_buffer() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + torch.sparse.mm(s.neighbours, s.b(torch.tanh(s.a(x))))

    def init(s: Any, i: int) -> None:
        s.register_buffer("neighbours", torch.eye(ROWS).to_sparse())

    return under(through, run, init)
