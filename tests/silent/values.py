"""Programs that read numbers out of tensors: they become constants of a recording unless somebody sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from silent.harness import Program
from silent.kit import ROWS, WIDTH, case, program, rows


def reads(number: Any) -> Program:
    """A block that adds what ``number`` makes of the integer tensor of this step."""

    def run(s: Any, x: Tensor, n: Tensor) -> Tensor:
        return x + s.b(torch.tanh(s.a(x) + number(n)))

    return program(run, batch=lambda i: (rows(i), torch.tensor([i + 1, 2 * i, 3])))


@case()
def item() -> Program:
    return reads(lambda n: n[0].item())


@case()
def tolist() -> Program:
    return reads(lambda n: n.tolist()[1])


@case()
def numpy_of_the_batch() -> Program:
    return reads(lambda n: n.numpy()[0])


@case()
def numpy_as_array() -> Program:
    return reads(lambda n: float(np.asarray(n).sum()))


@case()
def through_dlpack() -> Program:
    return reads(lambda n: float(np.from_dlpack(n)[1]))


@case()
def python_int() -> Program:
    return reads(lambda n: int(n[0]) + float(n[1]))


@case()
def as_text() -> Program:
    return reads(lambda n: len(repr(n)) + int(f"{n[1]}"))


@case()
def from_the_storage() -> Program:
    return reads(lambda n: n.untyped_storage()[8])


@case()
def iterated() -> Program:
    return reads(lambda n: sum(float(v) * k for k, v in enumerate(n)))


@case()
def largest_of_two() -> Program:
    return reads(lambda n: max(n[0], n[1], key=lambda v: float(v % 3)))


@case()
def made_a_tensor_again() -> Program:
    return reads(lambda n: torch.tensor(n.tolist(), dtype=torch.float32).sum())


@case()
def compared_whole() -> Program:
    return reads(lambda n: 0.5 if torch.equal(n, torch.tensor([2, 2, 3])) else -0.5)


@case()
def compared_nearly() -> Program:
    return reads(lambda n: 1.0 if torch.allclose(n.float().mean(), torch.tensor(7 / 3), atol=1) else 2.0)


@case()
def found_in_a_list() -> Program:
    return reads(lambda n: [2, 3, 5].index(int(n[0])) if int(n[0]) in (2, 3, 5) else 9.0)


@case()
def key_of_a_dict() -> Program:
    return reads(lambda n: {1: 0.1, 2: 0.7}.get(n[0].item(), -0.3))


@case()
def branch_on_the_batch() -> Program:
    def run(s: Any, x: Tensor, mask: Tensor) -> Tensor:
        row = s.table[0] if mask.all() else s.table[1]
        return x + s.b(F.gelu(s.a(x) + row))

    def init(s: Any, i: int) -> None:
        s.register_buffer("table", torch.randn(2, WIDTH))

    return program(run, init, lambda i: (rows(i), torch.tensor([True, i % 2 == 0])))


@case()
def branch_that_changes_the_graph() -> Program:
    def run(s: Any, x: Tensor, mask: Tensor) -> Tensor:
        h = s.a(x)
        return x + s.b(torch.tanh(h).exp() if mask.any() else torch.sigmoid(h).exp())

    return program(run, batch=lambda i: (rows(i), torch.tensor([i % 2 == 1])))


@case()
def offset_into_a_table() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("table", torch.randn(3 * ROWS, WIDTH))

    def run(s: Any, x: Tensor, start: Tensor) -> Tensor:
        first = int(start)
        return x + s.b(torch.tanh(s.a(x) * s.table[first : first + len(x)]))

    return program(run, init, lambda i: (rows(i), torch.tensor(11 * i)))


@case()
def tensor_as_an_index_of_python() -> Program:
    def run(s: Any, x: Tensor, start: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        return x + s.b(torch.cat([h[start:], h[:start]]).exp())

    return program(run, batch=lambda i: (rows(i), torch.tensor(i)))


@case()
def one_hot_of_unknown_size() -> Program:
    def run(s: Any, x: Tensor, labels: Tensor) -> Tensor:
        hot = F.one_hot(labels).float()
        return x + s.b(torch.tanh(s.a(x) * hot.sum(-1, keepdim=True) * hot.shape[1]))

    return program(run, batch=lambda i: (rows(i), torch.arange(ROWS) % (3 + i)))


@case()
def loop_of_as_many_rounds() -> Program:
    def run(s: Any, x: Tensor, n: Tensor) -> Tensor:
        h = x
        for _ in range(int(n)):
            h = torch.tanh(s.a(h))
        return x + s.b(h.exp())

    return program(run, batch=lambda i: (rows(i), torch.tensor(1 + i % 3)))


@case()
def power_from_the_batch() -> Program:
    def run(s: Any, x: Tensor, n: Tensor) -> Tensor:
        return x + s.b(torch.sigmoid(s.a(x)).pow(n.item()))

    return program(run, batch=lambda i: (rows(i), torch.tensor(2.0 + i)))


@case()
def number_of_nonzeros() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return x + s.b(torch.tanh(s.a(x))) * (len((x > 0).nonzero()) / x.numel())

    return program(run)


@case()
def rows_taken_by_a_mask() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        out = torch.zeros_like(x)
        out[chosen] = torch.tanh(s.a(x[chosen]))
        return x + s.b(out.exp())

    return program(run)


@case()
def scale_of_a_quantizer() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        scale = h.detach().abs().max().item() / 127
        return x + s.b(torch.tanh(torch.fake_quantize_per_tensor_affine(h, scale, 0, -128, 127)))

    return program(run)


@case()
def threshold_from_the_values() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        return x + s.b(torch.where(h > float(h.detach().median()), h, 0.1 * h).exp().tanh())

    return program(run)


@case()
def clamp_from_the_batch() -> Program:
    def run(s: Any, x: Tensor, n: Tensor) -> Tensor:
        return x + s.b(s.a(x).clamp(max=n[0].item() / 10).exp())

    return program(run, batch=lambda i: (rows(i), torch.tensor([i])))


@case()
def argmax_as_a_choice_of_module() -> Program:
    def run(s: Any, x: Tensor, logits: Tensor) -> Tensor:
        first, second = (s.a, s.b) if logits.argmax() == 0 else (s.b, s.a)
        return x + second(torch.tanh(first(x)).exp())

    return program(run, batch=lambda i: (rows(i), torch.tensor([1.0, float(i)])))


@case()
def lengths_as_a_list_for_split() -> Program:
    def run(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.tanh(s.a(x)).split(lengths.tolist())
        return x + s.b(torch.cat([p * (k + 1) for k, p in enumerate(parts)]).exp())

    return program(run, batch=lambda i: (rows(i), torch.tensor([20 + i, ROWS - 20 - i])))


@case()
def number_of_an_integer_of_the_model() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def run(s: Any, x: Tensor) -> Tensor:
        s.seen += 1
        return x + s.b(torch.tanh(s.a(x) * (1.0 + s.seen.item())))

    return program(run, init)


@case()
def debiased_by_a_counter() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("seen", torch.zeros(()))
        s.register_buffer("mean", torch.zeros(WIDTH))

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        s.seen.add_(1)
        s.mean.lerp_(h.detach().mean(0), 0.1)
        return x + s.b(torch.tanh(h - s.mean / (1 - 0.9 ** float(s.seen))))

    return program(run, init)


@case()
def padded_to_the_longest() -> Program:
    def run(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        h = torch.tanh(s.a(x[: lengths.max()]))
        return x + s.b(F.pad(h, (0, 0, 0, len(x) - len(h)))).exp()

    return program(run, batch=lambda i: (rows(i), torch.tensor([5, 30 + i])))
