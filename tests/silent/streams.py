"""Programs whose blocks draw, and move the streams that they draw from."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import BLOCKS, ROWS, WIDTH, Net, block_class, case, program, rows, stack


@case()
def noise_kept_in_a_buffer() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("noise", torch.zeros(WIDTH))
        s.scale = nn.Parameter(torch.ones(WIDTH))

    def run(s: Any, x: Tensor) -> Tensor:
        s.noise.normal_()
        return x + s.b(F.gelu(F.dropout(s.a(x), 0.3))) + s.scale * s.noise

    return program(run, init)


@case()
def a_fork_of_the_stream_with_a_seed() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(77)
            pattern = torch.rand_like(x)
        return x + s.b(torch.tanh(F.dropout(s.a(x), 0.25) * pattern))

    return program(run)


@case()
def dropout_in_a_fork() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            h = F.dropout(torch.tanh(s.a(x)), 0.5)
        return x + s.b(torch.tanh(h) * torch.rand_like(h))

    return program(run)


@case()
def one_state_used_twice() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = F.dropout(torch.tanh(s.a(x)), 0.5)
        torch.set_rng_state(state)
        return x + s.b(F.dropout(torch.sin(first), 0.5))

    return program(run)


@case()
def seed_from_a_counter() -> Program:
    def init(s: Any, i: int) -> None:
        s.count = 10 * i

    def run(s: Any, x: Tensor) -> Tensor:
        s.count += 1
        torch.manual_seed(s.count)
        return x + s.b(F.gelu(F.dropout(s.a(x), 0.3)))

    return program(run, init)


@case()
def seed_of_each_block() -> Program:
    def init(s: Any, i: int) -> None:
        s.seed = 500 + i

    def run(s: Any, x: Tensor) -> Tensor:
        torch.manual_seed(s.seed)
        return x + s.b(torch.exp(-F.dropout(s.a(x).square(), 0.3)))

    return program(run, init)


@case()
def own_generator() -> Program:
    generators = []

    def init(s: Any, i: int) -> None:
        s.generator = torch.Generator().manual_seed(i)
        generators.append(s.generator)

    def run(s: Any, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=s.generator) < 0.5
        return x + s.b(torch.tanh(s.a(x) * mask).exp())

    return Program(model=stack(run, init), batch=lambda i: (rows(i),), generators=tuple(generators))


@case()
def generator_among_the_arguments() -> Program:
    generator = torch.Generator().manual_seed(3)

    def run(s: Any, x: Tensor, g: torch.Generator) -> Tensor:
        return x + s.b(torch.tanh(s.a(x) + torch.empty_like(x).normal_(generator=g)).exp())

    return program(run, batch=lambda i: (rows(i), generator), generators=(generator,))


@case()
def generator_that_copies_the_default_one() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        g = torch.Generator()
        g.set_state(torch.get_rng_state())
        twin = torch.rand(x.shape, generator=g)
        return x + s.b(torch.tanh(s.a(x) * twin) * torch.rand_like(x))

    return program(run)


@case()
def randomised_leaky_relu() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(F.rrelu(s.a(x), 0.1, 0.6, training=True).tanh())

    return program(run)


@case()
def noise_from_numpy() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.standard_normal(WIDTH).astype(np.float32))
        return x + s.b(torch.tanh(s.a(x) + noise))

    return program(run)


@case()
def numpy_generator_on_the_block() -> Program:
    def init(s: Any, i: int) -> None:
        s.draws = np.random.default_rng(i)

    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(torch.tanh(s.a(x) * float(s.draws.uniform(0.5, 1.5))))

    return program(run, init)


@case()
def factor_from_random() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(torch.tanh(s.a(x) + random.gauss(0.0, 1.0)))

    return program(run)


@case()
def operands_swapped_at_random() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        pair = [torch.tanh(s.a(x)), torch.tanh(s.b(x))]
        random.shuffle(pair)
        return x + pair[0].exp() * torch.cos(pair[0] + 2 * pair[1])

    return program(run)


@case()
def activation_chosen_at_random() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(random.choice([torch.sin, torch.tanh, torch.sigmoid])(s.a(x)))

    return program(run)


@case()
def blocks_skipped_by_random() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x if random.random() < 0.4 else x + s.b(torch.tanh(s.a(x)))

    return program(run, live=0, batch=lambda i: (rows(i, grad=True),))


@case()
def blocks_skipped_by_torch() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.4:
            return x
        return x + s.b(torch.tanh(F.dropout(s.a(x), 0.2)))

    return program(run, live=0, batch=lambda i: (rows(i, grad=True),))


@case()
def blocks_skipped_by_the_model() -> Program:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if random.random() > 0.3:
                    x = layer(x)
            return x.square().mean()

    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(torch.tanh(F.dropout(s.a(x), 0.2)))

    made = block_class(run)
    return Program(model=Dropping([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i, grad=True),), live=0)


@case()
def a_number_read_before_bernoulli() -> Program:
    def run(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.float().mean().item()
        h = F.dropout(s.a(x), 0.4)
        return x + s.b(torch.tanh(h * torch.bernoulli(torch.sigmoid(x.detach())))) / n

    return program(run, batch=lambda i: (rows(i), torch.tensor([3, 4 + i])))


@case()
def filled_in_place() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        u = torch.empty_like(x).uniform_(0.1, 0.9)
        g = torch.empty_like(x).exponential_()
        return x + s.b(torch.tanh(s.a(x) * u) - g.log())

    return program(run)


@case(works=True)
def rows_shuffled() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[0])
        return x + s.b(torch.tanh(s.a(x)[order]))[order.argsort()]

    return program(run)


@case()
def rows_sampled() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        chosen = torch.multinomial(torch.softmax(s.a(x).detach().sum(-1), 0), ROWS, replacement=True)
        return x + s.b(torch.tanh(s.a(x)[chosen]))

    return program(run)


@case(works=True)
def normal_around_the_values() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        return x + s.b(torch.tanh(torch.normal(h.detach(), 0.3) * h))

    return program(run)


@case(works=True)
def every_kind_of_dropout() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = F.alpha_dropout(s.a(x), 0.2, training=True)
        h = F.feature_alpha_dropout(h[None], 0.2, training=True)[0]
        h = F.dropout1d(h.T[None], 0.2, training=True)[0].T
        return x + s.b(torch.tanh(h))

    return program(run)


@case(works=True)
def attention_with_dropout() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        q = s.a(x).view(1, 2, ROWS, WIDTH // 2)
        return x + s.b(F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).reshape(ROWS, WIDTH))

    return program(run)


@case(works=True)
def draws_between_the_blocks() -> Program:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) + 0.1 * torch.randn_like(x)
                torch.manual_seed(int(1e6))
            return x.square().mean()

    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(torch.tanh(F.dropout(s.a(x), 0.2)))

    made = block_class(run)
    return Program(model=Noisy([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i),))


@case()
def number_from_the_seed_in_use() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(torch.tanh(s.a(x) + (torch.initial_seed() % 5)))

    return program(run)


@case()
def python_generator_copied_each_call() -> Program:
    def init(s: Any, i: int) -> None:
        s.draws = random.Random(i)

    def run(s: Any, x: Tensor) -> Tensor:
        ahead = copy.copy(s.draws).random()
        return x + s.b(torch.tanh(s.a(x) * (ahead + s.draws.random())))

    return program(run, init)


@case()
def a_draw_that_is_thrown_away_now_and_then() -> Program:
    program_ = program(
        lambda s, x: (torch.rand(3) if s.waste else 0, x + s.b(F.dropout(torch.tanh(s.a(x)), 0.5)))[1],
        lambda s, i: setattr(s, "waste", False),
    )

    def batch(i: int) -> Any:
        for layer in program_.model.layers:
            layer.waste = i in (2, 3)
        return (rows(i),)

    program_.batch = batch
    return program_


@case()
def stream_put_back_after_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        h = x + s.b(F.dropout(torch.tanh(s.a(x)), 0.5))
        torch.set_rng_state(state)
        return h

    return program(run)


@case()
def stream_saved_at_the_start_of_training() -> Program:
    def init(s: Any, i: int) -> None:
        s.state = torch.get_rng_state()

    def run(s: Any, x: Tensor) -> Tensor:
        torch.set_rng_state(s.state)
        h = x + s.b(F.dropout(torch.tanh(s.a(x)), 0.5))
        s.state = torch.get_rng_state()
        return h

    return program(run, init)
