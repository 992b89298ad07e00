"""Programs that write to memory after a block has used it: by the root, by another block, by another call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import BLOCKS, ROWS, WIDTH, Net, block_class, case, program, rows


def under(root: type[Net], run: Callable[..., Any], init: Callable[[Any, int], None] | None = None) -> Program:
    """Blocks of one class under a root of one's own."""
    made = block_class(run, init)
    return Program(model=root([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i),))


def with_state(s: Any, x: Tensor, state: Tensor) -> Tensor:
    return x + s.b(torch.tanh(s.a(x) + state).exp())


class Counting(Net):
    """A tensor of the root's goes to every block, and changes between them. No backward wants it."""

    past_the_counter = False

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        state = torch.zeros(len(x), WIDTH)
        for layer in self.layers:
            x = layer(x, state.data if self.past_the_counter else state)
            state[0, :1].add_(1.0)
        return x.square().mean()


class CountingPast(Counting):
    """The same, and autograd does not count."""

    past_the_counter = True


@case(works=True)
def state_of_the_root_written_between_blocks() -> Program:
    return under(Counting, with_state)


@case(works=True)
def state_of_the_root_written_past_the_counter() -> Program:
    return under(CountingPast, with_state)


@case(works=True)
def state_of_the_root_filled_before_the_blocks() -> Program:
    class Filled(Net):
        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            state = torch.zeros(len(x), WIDTH)
            state[::2].add_(x.detach()[::2])
            for layer in self.layers:
                x = layer(x, state)
            return x.square().mean() + 0 * (state.exp() * x).mean()

    return under(Filled, with_state)


@case(works=True)
def left_aside_and_written_by_the_root() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        s.left = h.detach()
        return x + s.b(h.sin().exp())

    class Halving(Net):
        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                layer.left.data.mul_(0.5)
                layer.left = None
            return x.square().mean()

    def init(s: Any, i: int) -> None:
        s.left = None

    return under(Halving, run, init)


@case(works=True)
def piece_left_aside_and_written_by_the_root() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        u, v = s.a(x).unsafe_chunk(2, -1)
        s.left = v.detach()
        return x + s.b(torch.cat([u.sin() * v.exp(), v.cos()], -1))

    class Halving(Net):
        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                layer.left.data[:, :3].mul_(0.5)
                layer.left = None
            return x.square().mean()

    def init(s: Any, i: int) -> None:
        s.left = None

    return under(Halving, run, init)


@case(works=True)
def second_call_writes_what_the_first_left() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        if s.before is not None:
            s.before.mul_(0.5)
        h = s.a(x)
        s.before = h.data
        return x + s.b(h.sin().exp())

    class Twice(Net):
        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            for layer in self.layers:
                layer.before = None
            return x.square().mean()

    def init(s: Any, i: int) -> None:
        s.before = None

    return under(Twice, run, init)


@case(works=True)
def block_writes_what_the_root_reads_afterwards() -> Program:
    def run(s: Any, x: Tensor, state: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        state.data.add_(h.detach())
        return x + s.b(h.exp())

    class Reading(Net):
        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            state = torch.sin(x.detach())
            y = x * state.cos()
            for layer in self.layers:
                y = layer(y, state)
            return (y * state.exp().tanh()).square().mean()

    return under(Reading, run)


@case(works=True)
def blocks_move_a_number_that_the_root_reads_around_them() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.steps.add_(0.25)
        return x + s.b(torch.tanh(s.a(x)).exp())

    class Scaled(Net):
        def __init__(self, layers: list[nn.Module]) -> None:
            super().__init__(layers)
            self.register_buffer("steps", torch.ones(()))
            for layer in layers:
                layer.register_buffer("steps", self.steps)

        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            x = torch.sin(x * (self.steps + 1)).exp()
            for layer in self.layers:
                x = torch.sin(layer(x) * (self.steps + 1)).exp()
            return torch.tanh(x * (self.steps + 1)).square().mean()

    return under(Scaled, run)


@case(works=True)
def column_written_after_the_next_block_has_read_it() -> Program:
    class Columns(Net):
        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            for first, second in zip(self.layers[:-1], self.layers[1:], strict=True):
                h = first(x)
                x = second(h)
                h.data[:, :1].mul_(0.7)
            return x.square().mean()

    return under(Columns, lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()))


@case(works=True)
def one_op_writes_two_pieces() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            memory = torch.tanh(x @ s.b.weight).repeat(2, 1)
            first = memory.mul(2)
            torch._foreach_mul_([memory[5, :1], memory[ROWS, :1]], 3.0)
            last = memory[ROWS:].mul(2)
        return x + s.b((s.a(x) * last).tanh() * first[:ROWS])

    return program(run)


@case(works=True)
def one_op_writes_a_saved_piece_and_another() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        u, v = s.a(x).unsafe_chunk(2, -1)
        y = u.sin()
        with torch.no_grad():
            torch._foreach_mul_([u.data, v], 0.5)
        return x + s.b(torch.cat([y, v.tanh()], -1))

    return program(run)


@case(works=True)
def written_out_of_the_piece_before() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            memory = torch.zeros(4, ROWS, WIDTH)
            memory[0].copy_(x)
            seen = []
            for t in range(1, 4):
                torch.matmul(memory[t - 1], s.b.weight, out=memory[t])
                seen.append(memory.mean(0))
        return x + s.b(((s.a(x) * seen[2]).tanh() * seen[1]).tanh() * seen[0])

    return program(run)


@case(works=True)
def side_list_as_an_argument() -> Program:
    class Listing(Net):
        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            side: list[Tensor] = []
            for layer in self.layers:
                x = layer(x, side)
            return x.square().mean()

    def run(s: Any, x: Tensor, side: list[Tensor]) -> Tensor:
        h = torch.tanh(s.a(x))
        if side:
            h = h * side[-1].exp()
        side.append(h.sin())
        return x + s.b(h)

    return under(Listing, run)


@case(works=True)
def negated_and_long() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(s.a(x).view(ROWS, WIDTH // 2, 2))
        return x + s.b(torch.cat([z.conj().imag.exp().tanh(), z.conj().imag.sin()], -1))

    return program(run)


@case(works=True)
def cell_of_a_cell() -> Program:
    def init(s: Any, i: int) -> None:
        s.cell, s.other = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.cell(torch.relu(s.a(x)), x)
        return x + s.b(s.other(h, (x, h.tanh()))[1].sin())

    return program(run, init)
