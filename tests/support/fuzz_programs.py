"""Writes programs by chance: blocks out of ops, draws, Python state, views, writes, side stores and number reads.

A program is a tuple of statements, which renders to a file that stands on its own: what fails can be pasted and run.
Every value has ``ROWS`` x ``WIDTH`` elements, so that any statement may follow any other.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from silent.harness import Program

# ``{v}`` is a new value, ``{p}`` and ``{q}`` are earlier ones, ``{k}`` is a number from 0 to 3
OPS = (
    "{v} = self.a({p})",
    "{v} = self.b({p})",
    "{v} = self.norm({p})",
    "{v} = F.layer_norm({p}, (WIDTH,))",
    "{v} = torch.tanh({p})",
    "{v} = torch.sigmoid({p}) * {q}",
    "{v} = F.gelu({p})",
    "{v} = F.silu({p}).exp().tanh()",
    "{v} = {p} - 2 * {q}",
    "{v} = {p} * {q}",
    "{v} = {p} / (1 + {q}.square())",
    "{v} = torch.softmax({p} @ {q}.T * 0.1, -1) @ {p}",
    "{v} = F.scaled_dot_product_attention({p}[None], {q}[None], {p}[None])[0]",
    "{v} = F.scaled_dot_product_attention({p}[None], {q}[None], {p}[None], dropout_p=0.2)[0]",
    "{v} = F.conv1d({p}.T[None], self.kernel, padding=1, groups=WIDTH)[0].T",
    "{v} = {p}.cumsum(0) * 0.05",
    "{v} = {p}.logcumsumexp(1)",
    "{v} = {p}.roll({k} + 1, 0)",
    "{v} = {p}[torch.arange(len({p})).flip(0)]",
    "{v} = torch.where({p} > 0, {p}, {q})",
    "{v} = {p}.sort(0).values",
    "{v} = {p}.gather(1, {q}.detach().argsort(1))",
    "{v} = torch.zeros_like({p}).index_add(0, torch.arange(len({p})) % 7, {p})",
    "{v} = torch.zeros_like({p}).scatter_add(1, {q}.detach().argsort(1) // 2, {p})",
    "{v} = torch.fft.irfft(torch.fft.rfft({p}) * torch.fft.rfft({q}).conj(), n=WIDTH)",
    "{v} = torch.view_as_real(torch.view_as_complex({p}.reshape(len({p}), -1, 2)).conj() * 1j).reshape_as({p})",
    "{v} = torch.complex({p}, {q}).conj().imag.exp().tanh()",
    "{v} = self.bn({p})",
    "{v} = {p}.to(torch.bfloat16).sin().float()",
    "{v} = Cube.apply({p})",
    "{v} = {p}.detach() + {q}.tanh()",
)
VIEWS = (
    "{v} = torch.cat({p}.chunk(2, -1)[::-1], -1)",
    "{v} = {p}.T.contiguous().T",
    "{v} = {p}[:1].expand_as({q}) * {q}",
    "{v} = F.pad({p}.unfold(1, 4, 1).prod(-1), (0, 3))",
    "{v} = {p}.reshape(WIDTH, -1).T.reshape_as({p})",
    "{v} = torch.cat([{p}[{k} :], {p}[:{k}]])",
    "{v} = {p}.clone().as_strided((len({p}), WIDTH), (1, len({p})), 0)",
    "{v} = ({p}[:WIDTH] @ {q}[:WIDTH].T).tanh().repeat(len({p}) // WIDTH + 1, 1)[: len({p})]",
)
WRITES = (
    "{v} = {p}.clone().mul_({q}.detach())",
    "{v} = self.a({p}).relu_()",
    "{v} = {p} * 1.0; {v}[:, ::2] += {k}",
    "{v} = {p} + 0.0; {v}[3 : 9 + {k}].mul_(0.5)",
    "{v} = {p}.tanh().masked_fill_({q}.detach() > 0.5, 0.25)",
    "{v} = {p} * 1.0; {v}[{q}.detach() > 1] = 0.5",
    "{v} = {p} * 1.0; {v}.narrow(1, 0, 8).copy_({q}.detach()[:, 8:16])",
    "{v} = {p}.sin(); {v}.data.mul_(0.5)",
    "{v} = {p} * 1.0; {v}.detach().numpy()[:] *= 0.5",
    "{v} = {p}; {p}.add_({k})",
)
DRAWS = (
    "{v} = F.dropout({p}, 0.3)",
    "{v} = {p} * torch.rand_like({p})",
    "{v} = {p} + torch.randn(WIDTH)",
    "{v} = {p} * torch.bernoulli(torch.sigmoid({q}.detach()))",
    "{v} = {p} * torch.empty_like({p}).uniform_(0.5, 1.5)",
    "{v} = F.rrelu({p}, 0.1, 0.6, training=True)",
    "{v} = {p}[torch.randperm(len({p}))]",
    "{v} = torch.normal({p}.detach(), 0.1) * {q}",
    "{v} = F.alpha_dropout({p}, 0.2, training=True)",
    "{v} = {p} * torch.rand({p}.shape, generator=self.generator)",
)
STREAMS = (
    "fork_rng:{v} = {p} * torch.rand_like({p})",
    "fork_rng:{v} = F.dropout({p}, 0.5)",
    "state = torch.get_rng_state(); {v} = F.dropout({p}, 0.5); torch.set_rng_state(state)",
    "torch.manual_seed({k} + self.i); {v} = F.dropout({p}, 0.5)",
    "self.noise.normal_(); {v} = {p} * self.noise",
    "{v} = {p} * float(np.random.rand())",
    "{v} = {p} * random.uniform(0.5, 1.5)",
    "{v}, _ = random.sample([{p}, {q}], 2)",
    "{v} = random.choice([torch.sin, torch.cos])({p})",
    "{v} = {p}.sin() if torch.rand(()) < 0.5 else {p}.cos()",
)
PYTHON = (
    "self.calls += 1; {v} = {p} * (1 + self.calls % 3)",
    "self.calls += 1; {v} = {p} + (0.5 if self.calls > 3 else 0.0)",
    "{v} = {p} + STATE['n']",
    "{v} = {p} * self.table['k'][0]",
    "{v} = {p} + number",
    "{v} = {p} + float(pair[1])",
    "self.seen.append(0); {v} = {p} * (1 + len(self.seen) % 4)",
    "{v} = {p}.sin() if STATE['n'] > 1 else {p}.cos()",
    "{v} = {p}.roll(int(STATE['n'] * 2), 0)",
)
READS = (
    "{v} = {p} * given[0].item()",
    "{v} = {p} + given.tolist()[1]",
    "{v} = {p} * float(given.numpy()[1])",
    "{v} = {p}.sin() if given[0] > 2 else {p}.cos()",
    "{v} = {p}.roll(int(given[1]), 0)",
    "{v} = {p} / (1 + {q}.detach().abs().max().item())",
    "{v} = {p} * len(({q} > 0).nonzero()) / {q}.numel()",
    "{v} = {p}.pow(2 + int(given[0]) % 2)",
    "{v} = {p} + F.one_hot(given).float().shape[1]",
)
STORES = (
    "STORE[self.i] = {p}.detach(); {v} = {p} + STORE.get(self.i - 1, 0)",
    "{v} = 0.5 * {p} + 0.5 * STORE.setdefault('first', {p})",
    "STORE['sum'] = STORE.get('sum', 0) + {p}.detach().mean(); {v} = {p} + STORE['sum']",
    "self.kept['m'] = 0.9 * self.kept.get('m', 0) + {p}.detach().mean(0); {v} = {p} - self.kept['m']",
    "{v} = {p} + self.kept.setdefault(len({p}), torch.linspace(0, 1, WIDTH))",
)
INSTANCE = (
    "{v} = {p}.sin() if self.i % 2 else {p}.cos()",
    "{v} = self.function({p}, {q})",
    "{v} = {p} * self.names[0]",
)
BUFFERS = (
    "self.mean.mul_(0.9).add_({p}.detach().mean(0), alpha=0.1); {v} = {p} - self.mean.clone()",
    "{v} = {p} * self.mean",
    "self.mean = {p}.detach().mean(0); {v} = {p} - self.mean",
    "self.count += 1; {v} = {p} / self.count.clone()",
)
AUTOGRAD = (
    "no_grad:{v} = torch.sigmoid({p} @ self.a.weight)",
    "{v} = checkpoint(lambda y: F.dropout(self.a(y).tanh(), 0.2), {p}, use_reentrant=False)",
    "autocast:{v} = self.a({p}).float()",
)
CONTEXTS = {
    "fork_rng:": "with torch.random.fork_rng(devices=[]):\n            torch.manual_seed({k})",
    "no_grad:": "with torch.no_grad():",
    "autocast:": "with torch.autocast('cpu', torch.bfloat16):",
}
LOOPS = {
    "once": "loss = model(*batch)\n    loss.backward()",
    "kept": "loss = model(*batch)\n    loss.backward(retain_graph=True)\n    loss.backward()",
    "accumulated": "(model(*batch) / 2).backward()\n    loss = model(*batch)\n    loss.backward()",
    "asked": "loss = model(*batch)\n    return [loss, *torch.autograd.grad(loss, batch[0])]",
    "reversed": "first = model(*batch)\n    loss = model(*batch)\n    loss.backward()\n    first.backward()",
}
POLICIES = ("full", "full", "full", "share:40", "share:75", "selective-op", "offload", "full-offload", "share-offload")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One line of a block: a template, and which earlier values it reads."""

    template: str
    p: int
    q: int
    k: int


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A program, and the plan that it gets."""

    statements: tuple[Statement, ...]
    loop: str
    lengths: tuple[int, ...]
    policy: str

    def source(self) -> str:
        """A file that judges itself when it is run with ``tests/`` among its paths."""
        lines = ["v0 = x"]
        for n, s in enumerate(self.statements, 1):
            template, context = s.template, ""
            for mark, text in CONTEXTS.items():
                if template.startswith(mark):
                    template, context = template.removeprefix(mark), text.format(k=s.k)
            line = template.format(v=f"v{n}", p=f"v{s.p % n}", q=f"v{s.q % n}", k=s.k)
            if context:
                lines += [context, *(f"    {part}" for part in line.split("; "))]
            else:
                lines += line.split("; ")
        body = "\n        ".join([*lines, f"return x + self.b(torch.tanh(v{len(self.statements)}))"])
        return FILE.format(body=body, loop=LOOPS[self.loop], lengths=self.lengths, policy=self.policy)

    def build(self) -> Callable[[], Program]:
        """What makes the program. Each call runs the file anew, so that two programs share no globals."""
        text = self.source()
        name = f"<fuzzed {hash(self)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        code = compile(text, name, "exec")

        def make() -> Program:
            scope: dict[str, Any] = {"__name__": "fuzzed"}
            exec(code, scope)
            return scope["make"]()

        return make


def simplest(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """What is left of a failing program when nothing more can be taken away. (Hypothesis would try for minutes.)"""
    shorter = [
        replace(spec, statements=spec.statements[:n] + spec.statements[n + 1 :]) for n in range(len(spec.statements))
    ]
    for less in (*(s for s in shorter if s.statements), replace(spec, loop="once"), replace(spec, lengths=(64,))):
        if less != spec and fails(less):
            return simplest(less, fails)
    return spec


FILE = """import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from silent.harness import Program, judge
from silent.kit import WIDTH, Net, rows

STATE = {{"n": 0.0}}
STORE = {{}}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[1]


class Block(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i, self.calls, self.seen, self.kept, self.table, self.names = i, 0, [], {{}}, {{"k": [1.0]}}, (1.0 + i, "")
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.bn = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.kernel = nn.Parameter(torch.randn(WIDTH, 1, 3) / 2)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("noise", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(i)
        self.function = (lambda u, v: u - 2 * v) if i % 2 else (lambda u, v: v - 2 * u)

    def forward(self, x, given, number, pair):
        {body}


def step(model, batch, i):
    {loop}
    return [loss]


def make():
    model = Net([Block(i) for i in range(3)])
    lengths = {lengths}

    def batch(i):
        STATE["n"] = i / 2
        STORE.clear()
        for layer in model.layers:
            layer.table["k"][0] = 1.0 + i / 4
        return rows(i, lengths[i % len(lengths)], grad=True), torch.tensor([i, 2 * i + 1]), np.float32(i / 2), (0, i)

    return Program(model=model, batch=batch, step=step, steps=3, generators=tuple(l.generator for l in model.layers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(judge(make, "{policy}"))
"""


def statements(length: int) -> st.SearchStrategy[tuple[Statement, ...]]:
    """Up to so many, of all kinds alike: there are many more ops than ways to hide state."""
    groups = (OPS, OPS, VIEWS, WRITES, DRAWS, STREAMS, PYTHON, READS, STORES, INSTANCE, BUFFERS, AUTOGRAD)
    template = st.sampled_from(groups).flatmap(st.sampled_from)
    earlier = st.integers(0, 5)
    one = st.builds(Statement, template=template, p=earlier, q=earlier, k=st.integers(0, 3))
    return st.lists(one, min_size=1, max_size=length).map(tuple)


def specs(length: int = 7, policies: tuple[str, ...] = POLICIES) -> st.SearchStrategy[Spec]:
    """Programs of at most ``length`` statements."""
    return st.builds(
        Spec,
        statements=statements(length),
        loop=st.sampled_from(("once", "once", *LOOPS)),
        lengths=st.sampled_from(((64,), (64,), (64,), (64, 40))),
        policy=st.sampled_from(policies),
    )
