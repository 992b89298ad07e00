"""Programs whose blocks leave things behind: what a recording leaves there would be fake, doubled or missing."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import ROWS, WIDTH, Net, block_class, case, program, rows

STORE: dict[Any, Any] = {}
LOSSES: list[Tensor] = []


def lengths(*sizes: int) -> Any:
    """Batches of other lengths."""
    return lambda i: (rows(i, sizes[i % len(sizes)]),)


@case()
def values_of_the_first_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        v = s.b(x)
        v = 0.4 * v + 0.6 * STORE.setdefault("v", v)
        return x + torch.tanh(s.a(v)).exp() * v

    def batch(i: int) -> Any:
        STORE.clear()
        return (rows(i, grad=True),)

    return program(run, batch=batch)


@case()
def mean_made_on_the_first_call() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        mean = h.detach().mean(0)
        mean = s.state["mean"] = mean if "mean" not in s.state else 0.8 * s.state["mean"] + 0.2 * mean
        return x + s.b(torch.tanh(h - mean))

    return program(run, lambda s, i: setattr(s, "state", {}))


@case()
def table_in_an_lru_cache() -> Program:
    @functools.lru_cache
    def table(n: int) -> Tensor:
        made = torch.empty(n, 1)
        made[:, 0] = torch.linspace(0, 1, n)
        return made

    return program(
        lambda s, x: x + s.b(torch.tanh(s.a(x) * table(len(x)))),
        batch=lengths(ROWS, ROWS // 2),
        also=lambda: [table(ROWS), table(ROWS // 2), table.cache_info().misses],
    )


@case(works=True)
def mask_cached_by_length() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        n = len(x)
        if n not in s.masks:
            s.masks[n] = torch.ones(n, n).tril().log()
        q = s.a(x)
        return x + s.b(torch.softmax(q @ q.T + s.masks[n], -1) @ q)

    return program(run, lambda s, i: setattr(s, "masks", {}), lengths(ROWS, 48, 16))


@case()
def angles_grow_with_the_longest() -> Program:
    def init(s: Any, i: int) -> None:
        s.angles = torch.zeros(0, 1)

    def run(s: Any, x: Tensor) -> Tensor:
        if len(s.angles) < len(x):
            s.angles = torch.arange(len(x))[:, None] / 7
        return x + s.b(torch.tanh(s.a(x) * s.angles[: len(x)].cos()))

    return program(run, init, lengths(32, 64, 16, 96))


class Context:
    """What a forward hands down to its blocks."""

    def __init__(self) -> None:
        self.aux: list[Tensor] = []
        self.keys: dict[int, Tensor] = {}
        self.depth = 0


class Handing(Net):
    """Gives every block the same fresh object, and adds up what they leave in it."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, given = self.first(x), Context()
        for layer in self.layers:
            x = layer(x, given)
        return x.square().mean() + (sum(given.aux) if given.aux else 0.0)


@case()
def auxiliary_losses_in_an_object() -> Program:
    def run(s: Any, x: Tensor, c: Context) -> Tensor:
        h = torch.tanh(s.a(x))
        c.aux.append(h.square().mean())
        return x + s.b(h.exp())

    made = block_class(run)
    return Program(model=Handing([made(i) for i in range(3)]), batch=lengths(64, 48))


@case()
def depth_counted_in_an_object() -> Program:
    def run(s: Any, x: Tensor, c: Context) -> Tensor:
        c.depth += 1
        return x + s.b(torch.tanh(s.a(x) / c.depth).exp())

    made = block_class(run)
    return Program(model=Handing([made(i) for i in range(3)]), batch=lengths(64, 48))


@case()
def keys_shared_between_blocks() -> Program:
    def run(s: Any, x: Tensor, c: Context) -> Tensor:
        k = c.keys.setdefault(0, s.b(x)) if s.i < 2 else c.keys[0]
        return x + torch.softmax(s.a(x) @ k.T, -1) @ k

    made = block_class(run, lambda s, i: setattr(s, "i", i))
    return Program(model=Handing([made(i) for i in range(3)]), batch=lengths(64, 48))


@case()
def cache_that_grows_by_concatenation() -> Program:
    def run(s: Any, x: Tensor, c: Context) -> Tensor:
        h = s.a(x)
        c.keys[s.i] = torch.cat([c.keys[s.i], h]) if s.i in c.keys else h
        k = c.keys[s.i]
        return x + s.b(torch.softmax(h @ k.T, -1) @ k)

    made = block_class(run, lambda s, i: setattr(s, "i", i))
    return Program(model=Handing([made(i) for i in range(3)]), batch=lengths(64, 48, 64, 32))


@case()
def auxiliary_losses_in_a_global() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        LOSSES.append(h.abs().mean())
        return x + s.b(h.exp())

    def batch(i: int) -> Any:
        LOSSES.clear()
        return (rows(i),)

    def step(model: nn.Module, given: Any, i: int) -> list[Tensor]:
        loss = model(*given)
        loss = loss + torch.stack(LOSSES).sum()
        loss.backward()
        return [loss, *LOSSES]

    return program(run, batch=batch, step=step)


@case()
def auxiliary_loss_on_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        s.kept["aux"] = h.square().mean()
        return x + s.b(h.exp())

    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        loss = model(*given) + sum(layer.kept["aux"] for layer in model.layers)
        loss.backward()
        return [loss]

    return program(run, lambda s, i: setattr(s, "kept", {}), step=step)


@case()
def activations_kept_for_the_log() -> Program:
    world = types.SimpleNamespace(log=[])

    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        world.log.append(h.detach().mean())
        return x + s.b(h.exp())

    return program(run, world=world)


@case()
def numbers_kept_for_the_log() -> Program:
    world = types.SimpleNamespace(log=[])

    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        world.log.append(h.detach().mean().item())
        return x + s.b(h.exp())

    return program(run, world=world)


@case()
def memory_of_the_last_step() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.cat([s.memory, s.a(x)]) if s.memory is not None else s.a(x)
        s.memory = h[-ROWS:].detach()
        return x + s.b(torch.softmax(x @ h.T, -1) @ h)

    return program(run, lambda s, i: setattr(s, "memory", None))


@case()
def memory_in_a_buffer() -> Program:
    def init(s: Any, i: int) -> None:
        s.register_buffer("memory", torch.zeros(ROWS, WIDTH))

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x) + s.memory
        s.memory = torch.tanh(h).detach()
        return x + s.b(torch.tanh(h).exp())

    return program(run, init)


@case(works=True)
def counts_in_a_buffer() -> Program:
    def init(s: Any, i: int) -> None:
        s.code = nn.Parameter(torch.randn(8, WIDTH))
        s.register_buffer("ema", torch.zeros(8))

    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        nearest = torch.cdist(h, s.code).argmin(-1)
        q = s.code[nearest]
        s.ema.mul_(0.9).add_(F.one_hot(nearest, 8).float().sum(0), alpha=0.1)
        return x + s.b(torch.tanh(h + (q - h).detach() + 0.1 * q))

    return program(run, init)


@case(works=True)
def batch_norm() -> Program:
    def init(s: Any, i: int) -> None:
        s.norm = nn.BatchNorm1d(WIDTH)

    return program(lambda s, x: x + s.b(torch.tanh(s.norm(s.a(x)))), init)


@case(works=True)
def batch_norm_of_a_transposed_input() -> Program:
    def init(s: Any, i: int) -> None:
        s.norm = nn.BatchNorm1d(WIDTH)

    def run(s: Any, x: Tensor) -> Tensor:
        return s.norm((x + s.b(torch.tanh(s.a(x)))).transpose(1, 2)).transpose(1, 2)

    return program(run, init, lambda i: (rows(i).view(8, 8, WIDTH),))


@case()
def batch_norm_where_shapes_depend_on_values() -> Program:
    def init(s: Any, i: int) -> None:
        s.norm = nn.BatchNorm1d(WIDTH)

    return program(lambda s, x: x + s.b(s.norm(s.a(x))) * (len((x > 0).nonzero()) / ROWS), init)


@case()
def list_where_shapes_depend_on_values() -> Program:
    world = types.SimpleNamespace(log=[])

    def run(s: Any, x: Tensor) -> Tensor:
        picked = x[x.sum(-1) > 0]
        world.log.append(len(picked))
        return x + s.b(torch.tanh(s.a(x))) * s.a(picked).mean()

    return program(run, world=world)


@case()
def buffer_registered_by_the_first_call() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        if not hasattr(s, "late"):
            s.register_buffer("late", torch.linspace(0, 1, WIDTH))
        return x + s.b(torch.tanh(s.a(x) * s.late))

    return program(run)


@case()
def lazy_linear() -> Program:
    def init(s: Any, i: int) -> None:
        s.c = nn.LazyLinear(WIDTH)

    return program(lambda s, x: x + s.b(torch.tanh(s.c(s.a(x)))), init)


@case(works=True)
def spectral_norm() -> Program:
    def init(s: Any, i: int) -> None:
        s.a = nn.utils.parametrizations.spectral_norm(s.a)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()), init)


@case(works=True)
def weight_norm() -> Program:
    def init(s: Any, i: int) -> None:
        s.a = nn.utils.parametrizations.weight_norm(s.a)

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()), init)


@case()
def activations_seen_by_a_hook() -> Program:
    world = types.SimpleNamespace(seen=[])

    def init(s: Any, i: int) -> None:
        s.a.register_forward_hook(lambda _m, _a, out: world.seen.append(out.detach().abs().max()))

    return program(lambda s, x: x + s.b(torch.tanh(s.a(x)).exp()), init, world=world)


@case()
def gradients_seen_by_a_hook_of_the_forward() -> Program:
    world = types.SimpleNamespace(seen=[])

    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        h.register_hook(lambda g: world.seen.append(g.abs().sum()))
        return x + s.b(h.exp())

    return program(run, world=world)


@case()
def length_of_a_side_list() -> Program:
    world = types.SimpleNamespace(seen=[])

    def run(s: Any, x: Tensor) -> Tensor:
        world.seen.append(0)
        return x + s.b(torch.tanh(s.a(x) * (1 + len(world.seen) % 5)))

    return program(run, world=world)


@case()
def dictionary_of_all_inputs_by_id() -> Program:
    world = types.SimpleNamespace(n={})

    def run(s: Any, x: Tensor) -> Tensor:
        world.n[s.i] = world.n.get(s.i, 0) + 1
        return x + s.b(torch.tanh(s.a(x)) * world.n[s.i])

    return program(run, lambda s, i: setattr(s, "i", i), world=world)


@case(slow=True)
def llama_with_its_cache() -> Program:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )

    def batch(i: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 61, (2, (16, 12, 16, 9, 14)[i]), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}

    return Program(model=transformers.LlamaForCausalLM(config), batch=batch)


@case(alone=True)
def lstm() -> Program:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)[0]
            return x.square().mean()

    return Program(model=Recurrent(), batch=lambda i: (rows(i).view(4, 16, WIDTH),))


@case(alone=True)
def gru_of_two_layers() -> Program:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, 2, dropout=0.2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)[0]
            return x.square().mean()

    return Program(model=Recurrent(), batch=lambda i: (rows(i).view(16, 4, WIDTH),))
