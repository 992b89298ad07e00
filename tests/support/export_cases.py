"""Models and plans that are exported, and what a real step of one holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from jettison.capture.model_trace import as_call
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.frameworks.export import Exported
from jettison.frameworks.layer_policies import Decision, LayerPolicy, Subject, checkpointed_on_host
from jettison.frameworks.torch_remat.write import code as torch_remat_code
from jettison.solve.checkpoint_policy import Full

WIDTH, TOKENS, DEPTH = 32, 24, 4


class Block(nn.Module):
    """Attention and a gated feed-forward, with dropout: one of each kind of tensor."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + functional.dropout(self.out(scores @ v), self.rate, self.training)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    """Blocks under ``layers``; the loss is the mean square of what comes out."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(rate) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(rate: float = 0.0) -> tuple[nn.Module, Any]:
    """A factory for `jettison plan`."""
    torch.manual_seed(0)
    return Stack(rate), (torch.randn(4, TOKENS, WIDTH),)


def noisy() -> tuple[nn.Module, Any]:
    """The same with dropout."""
    return stack(0.1)


def applied(found: Exported, model: nn.Module) -> nn.Module:
    """A model after the exported file was used as it says."""
    defined: dict[str, Any] = {"__name__": "exported"}
    exec(compile(next(iter(found.files.values())), "exported.py", "exec"), defined)
    changed: nn.Module = defined["apply"](model)
    return changed


def held_bytes(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor] = lambda output: output
) -> tuple[int, Any]:
    """Alive between a real forward and its backward, and not before; the loss."""
    args, kwargs = as_call(batch)
    with AllocationCounter(static_tensors(model, batch)) as counter:
        before = counter.live_bytes
        output = model(*args, **kwargs)
        loss = loss_fn(output)
        return counter.live_bytes - before, loss


def remat_applied(subject: Subject, policies: Sequence[LayerPolicy], model: nn.Module) -> nn.Module:
    """A model after torch_remat's file for these policies was used."""
    defined: dict[str, Any] = {"__name__": "exported"}
    exec(torch_remat_code(subject, policies), defined)
    changed: nn.Module = defined["apply"](model)
    return changed


def many_rows() -> tuple[nn.Module, Any]:
    """A batch beside which the gradients of parameters are small."""
    torch.manual_seed(0)
    return Stack(0.0), (torch.randn(64, TOKENS, WIDTH),)


# plans that move tensors to the host ----------------------------------------------------------------------------------


def everything(decision: Decision) -> Decision:
    """What autograd saves waits on the host."""
    saved = decision.program.saved_buffers()
    moved = frozenset(b for b in saved if not decision.program.buffers[b].free)
    return replace(decision, kept=saved, offloaded=moved, policy="offload")


def largest(decision: Decision) -> Decision:
    """The three largest do."""
    there = everything(decision)
    order = sorted(there.offloaded, key=lambda b: (-decision.program.buffers[b].nbytes, b))
    return replace(there, offloaded=frozenset(order[:3]), policy="per-tensor")


def given(decision: Decision) -> Decision:
    """A checkpoint whose input does."""
    policy = checkpointed_on_host(decision)
    return replace(decision, kept=policy.kept, offloaded=policy.offloaded, policy="per-tensor")


def unmoved(decision: Decision) -> Decision:
    """The same, and it stays."""
    return replace(given(decision), offloaded=frozenset(), policy="full")


def given_of_selective(decision: Decision) -> Decision:
    """The same, with two more tensors kept here."""
    there = given(decision)
    beside = sorted(decision.program.saved_buffers() - Full().kept(decision.program))[:2]
    return replace(there, kept=there.kept | frozenset(beside))


MOVING = (everything, largest, given, given_of_selective)
"""Of four layers."""


def numpy_host(away: type) -> type:
    """For exported files: what waits on the host is held by NumPy, so that a CPU's own memory is not the device's."""

    class OnHost(away):  # type: ignore[misc,valid-type]
        def send(self, tensor: Tensor) -> None:
            self.there = numpy.array(tensor.detach().numpy())

        def fetch(self, here: Tensor) -> None:
            here.copy_(torch.from_numpy(self.there))

    return OnHost


def many_layers() -> tuple[nn.Module, Any]:
    """Layers whose inputs alone are most of a step that computes everything again."""
    torch.manual_seed(0)
    model = Stack(0.0)
    model.layers = nn.ModuleList(Block(0.0) for _ in range(48))
    return model, (torch.randn(64, TOKENS, WIDTH),)


class Routed(nn.Module):
    """Weights of the two best of four experts, divided in place by their sum, as transformers' Mixtral does it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        best, chosen = self.gate(y).softmax(-1).topk(2, dim=-1)
        best /= best.sum(-1, keepdim=True)
        weights = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, best)
        return x + sum(weights[..., i : i + 1] * expert(y).relu() for i, expert in enumerate(self.experts))


def routed() -> tuple[nn.Module, Any]:
    """Layers of experts."""
    torch.manual_seed(0)
    model = Stack(0.0)
    model.layers = nn.ModuleList(Routed() for _ in range(DEPTH))
    return model, (torch.randn(4, TOKENS, WIDTH),)
