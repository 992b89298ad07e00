"""Programs in which tensors share memory, are written in place, or are written behind autograd's back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import BLOCKS, ROWS, WIDTH, Net, block_class, case, program, rows, stack


@case(works=True)
def gru_cell() -> Program:
    def init(s: Any, i: int) -> None:
        s.cell = nn.GRUCell(WIDTH, WIDTH)

    return program(lambda s, x: s.cell(torch.relu(s.a(x)), x), init)


@case(works=True)
def lstm_cell() -> Program:
    def init(s: Any, i: int) -> None:
        s.cell = nn.LSTMCell(WIDTH, WIDTH)

    return program(lambda s, x: s.cell(torch.relu(s.a(x)), (x, s.b(x)))[0], init)


@case()
def chunk_kept_and_written() -> Program:
    # torch refuses to write to what chunk() returns
    def narrowed(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x)).clone()
        u, v = h.narrow(1, 0, WIDTH // 2), h.narrow(1, WIDTH // 2, WIDTH // 2)
        v.mul_(2.0)
        return x + s.b(torch.cat([u.exp() * v, v.sin()], -1))

    return program(narrowed)


@case()
def chunks_without_gradients_written() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale, shift = torch.sigmoid(x @ s.b.weight).chunk(2, -1)
            kept = scale.clone()
            scale.add_(shift)
        h = s.a(x)
        return x + s.b(torch.cat([h[:, : WIDTH // 2] * scale, h[:, WIDTH // 2 :] * shift * kept], -1).tanh())

    return program(run)


@case(works=True)
def conjugate() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        q, k = torch.fft.rfft(s.a(x)), torch.fft.rfft(s.b(x))
        return x + torch.tanh(torch.fft.irfft(k * q.conj(), n=WIDTH))

    return program(run)


@case()
def negated_imaginary_part() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(s.a(x).view(ROWS, WIDTH // 2, 2))
        return x + s.b(torch.cat([z.conj().imag.exp().tanh(), z.real.sin() * z.conj().imag], -1))

    return program(run)


@case()
def conjugate_of_a_transposed_square() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        z = torch.complex(s.a(x), s.b(x))
        square = z.mH @ z
        return x + torch.tanh((x.to(torch.cfloat) @ square.mH @ square.conj()).abs() * 1e-3)

    return program(run)


@case(works=True)
def rotary_by_complex_numbers() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("turn", torch.polar(torch.ones(ROWS, 16), torch.rand(ROWS, 16)), persistent=False)

    def run(s: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(s.a(x).view(ROWS, 16, 2)) * s.turn
        return x + s.b(torch.view_as_real(z).flatten(1).tanh())

    return program(run, init)


@case(works=True)
def expanded_row() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        row = torch.tanh(s.a(x)[:1]).expand(ROWS, WIDTH)
        return x + s.b(row * torch.exp(-row * row) + x)

    return program(run)


@case(works=True)
def overlapping_windows() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        windows = h.unfold(1, 4, 1)
        return x + s.b(F.pad((windows * windows.flip(-1)).sum(-1), (0, 3)).exp().tanh())

    return program(run)


@case()
def strided_by_hand() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x)).contiguous()
        diagonal = h.as_strided((ROWS // 2, WIDTH), (WIDTH + 1, 1), 3)
        return x + s.b(torch.cat([diagonal.exp(), h[: ROWS // 2]]))

    return program(run)


@case(works=True)
def transposed_square() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        square = torch.tanh(h.T @ h * 0.05)
        return x + s.b(h @ (square @ square.T) + h @ square.T.contiguous())

    return program(run)


@case()
def diagonal_written() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        square = torch.tanh(s.a(x[:WIDTH]))
        square = square.clone()
        square.diagonal().fill_(0.5)
        return x + s.b(x @ square.exp())

    return program(run)


@case(works=True)
def written_in_place_after_an_activation() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x).relu_()
        h = h.mul(2).masked_fill_(x > 1, 0.3).add_(x)
        h[:, ::2] += 1
        h[3:9].mul_(0.5)
        return x + s.b(torch.tanh(h).exp())

    return program(run)


@case(works=True)
def indices_put() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x).clone()
        h[torch.arange(0, ROWS, 3)] = torch.tanh(h[torch.arange(1, ROWS, 3)[: len(range(0, ROWS, 3))]].mean(0))
        return x + s.b(h.index_add(0, torch.arange(4) % 3, x[:4]).tanh())

    return program(run)


@case()
def data_written_after_it_was_saved() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        y = h.sin()
        h.data.mul_(0.5)
        return x + s.b(y.exp())

    return program(run)


@case()
def data_written_before_it_is_saved() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        h.data.clamp_(-0.5, 0.5)
        return x + s.b(h.sin().exp())

    return program(run)


def _saved_output(s: Any, x: Tensor) -> Tensor:
    return torch.tanh(x + s.b(torch.tanh(s.a(x)).exp()))  # whoever returns a tanh has saved it


class WritingNet(Net):
    """Writes into what its blocks return, where no version counter sees it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.data.mul_(0.5)
        return x.square().mean()


@case(works=True)
def data_of_an_output_written_by_the_model() -> Program:
    return Program(model=WritingNet(list(stack(_saved_output).layers)), batch=lambda i: (rows(i, ROWS - 8 * (i % 2)),))


@case(works=True)
def data_of_an_argument_written_by_the_next_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        x.data.mul_(0.5)
        return _saved_output(s, x)

    return Program(model=stack(run), batch=lambda i: (rows(i),))


@case()
def data_replaced() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        h.data = torch.tanh(h.data)
        return x + s.b(h.sin().exp())

    return program(run)


@case()
def weights_clipped_in_forward() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.a.weight.data.clamp_(-0.05, 0.05)
        return x + s.b(torch.tanh(s.a(x)).exp())

    return program(run)


@case()
def weights_normalised_in_forward() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            s.a.weight.div_(s.a.weight.norm(dim=1, keepdim=True))
        return x + s.b(torch.tanh(s.a(x)).exp())

    return program(run)


@case()
def weights_replaced_between_steps() -> Program:
    made = program(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()))

    def batch(i: int) -> Any:
        for layer in made.model.layers:
            layer.a.weight.data = layer.a.weight.data.clone() * 0.9
        return (rows(i),)

    made.batch = batch
    return made


@case()
def weights_written_between_forward_and_backward() -> Program:
    made = program(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()))

    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        loss = model(*given)
        model.layers[1].a.bias.data.add_(1.0)
        loss.backward()
        return [loss]

    made.step = step
    return made


@case()
def memory_shared_with_numpy() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        h.detach().numpy()[:] *= 0.5
        return x + s.b(torch.tanh(h).exp())

    return program(run)


@case()
def batch_written_between_forward_and_backward() -> Program:
    made = program(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()))

    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        embedded = given[0] * 1.0
        loss = model(embedded + 0.0)
        embedded.zero_()
        loss.backward()
        return [loss]

    made.step = step
    return made


@case(works=True)
def batch_from_one_pinned_place() -> Program:
    place = torch.zeros(ROWS, WIDTH)

    def batch(i: int) -> Any:
        place.copy_(rows(i))
        return (place,)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()), batch=batch)


@case()
def two_arguments_in_one_memory() -> Program:
    def batch(i: int) -> Any:
        x = rows(i, 2 * ROWS)
        return (x[:ROWS], x[i : ROWS + i])

    return program(lambda s, x, y: x + s.b(torch.tanh(s.a(x) * y).exp()), batch=batch)


@case(works=True)
def output_that_is_a_view_of_the_input() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        return (x + s.b(h.exp())).view(2, -1).view_as(x).T.T

    return program(run)


@case()
def output_written_in_place_by_the_model() -> Program:
    class Writing(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x.mul_(0.5).add_(1.0)
            return x.square().mean()

    made = block_class(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()))
    return Program(model=Writing([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i),))


@case()
def input_written_in_place_by_the_block() -> Program:
    class Copying(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            return super().forward(x)

    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.b(torch.tanh(s.a(x * 1.0))))
        x.add_(h)
        return x * h.exp()

    made = block_class(run)
    return Program(model=Copying([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i),))


@case()
def buffer_written_after_it_was_read() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("scale", torch.ones(WIDTH))

    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x) * s.scale.clone())
        s.scale.mul_(0.9).add_(h.detach().std(0), alpha=0.1)
        return x + s.b(h.exp())

    return program(run, init)


@case()
def column_that_a_global_moves() -> Program:
    shift = [0.0]

    def batch(i: int) -> Any:
        shift[0] = float(i)
        return (rows(i),)

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x).clone()
        h[:, 5] += shift[0]
        return x + s.b(torch.tanh(h).exp())

    return program(run, batch=batch)


@case()
def row_that_a_global_moves() -> Program:
    shift = [0.0]

    def batch(i: int) -> Any:
        shift[0] = float(i)
        return (rows(i),)

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x).clone()
        h[37] += shift[0]
        return x + s.b(torch.tanh(h).exp())

    return program(run, batch=batch)


@case()
def last_bits_that_a_global_moves() -> Program:
    shift = [1.0]

    def batch(i: int) -> Any:
        shift[0] = 1.0 + i * 2.0**-22
        return (rows(i),)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x) * shift[0]).exp()), batch=batch)
