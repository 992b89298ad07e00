"""Tiny models for `jettison train`, as factories, and faults that strike while they run.

JETTISON_FAULT names what happens, to one rank, in its own process:
    kill-step:RANK:STEP     kill -9 in the forward of that step (counted from 1 in this process)
    kill-save:RANK:NUMBER   kill -9 while that save is being written
    term-step:RANK:STEP     SIGTERM in the forward of that step
    slow:RANK:SECONDS       every forward takes this long
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.nn import functional

MICRO_BATCHES = 2  # that a rank has in a step


class Block(nn.Module):
    """A pre-norm block with dropout; attention is a mean over what came before, which is enough to learn from."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mix = nn.Linear(2 * hidden, 4 * hidden)
        self.out = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_bsh: Tensor) -> Tensor:
        y = self.norm(x_bsh)
        counts = torch.arange(1, y.shape[1] + 1, device=y.device, dtype=y.dtype)[:, None]
        before = y.cumsum(1) / counts
        return x_bsh + self.dropout(self.out(functional.gelu(self.mix(torch.cat([y, before], -1)))))


class Tiny(nn.Module):
    """Called with input_ids and labels; returns the loss."""

    def __init__(self, hidden: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList(Block(hidden, dropout) for _ in range(layers))
        self.head = nn.Linear(hidden, 256)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))  # part of the state

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)[:, :-1]
        return functional.cross_entropy(logits.reshape(-1, 256), labels[:, 1:].reshape(-1))


def tiny() -> nn.Module:
    return _faulty(Tiny())


def tiny64() -> nn.Module:
    return _faulty(Tiny().double())


def _faulty(model: Tiny) -> nn.Module:
    kind, _, rest = os.environ.get("JETTISON_FAULT", "").partition(":")
    rank, _, at = rest.partition(":")
    if not kind or rank != os.environ.get("RANK", "0"):
        return model
    if kind == "kill-save":
        _die_while_saving(int(at))
        return model
    calls = 0

    def strike(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if kind == "slow":
            time.sleep(float(at))
        elif calls == (int(at) - 1) * MICRO_BATCHES + 2:  # the second micro-batch: gradients are half there
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill-step" else signal.SIGTERM)

    model.layers[1].register_forward_pre_hook(strike)
    return model


def _die_while_saving(number: int) -> None:
    write, calls = FileSystemWriter.write_data, 0

    def dying(self: Any, plan: Any, planner: Any) -> Any:
        nonlocal calls
        calls += 1
        done = write(self, plan, planner)
        if calls == number:  # files are written, nobody knows of them yet
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    FileSystemWriter.write_data = dying  # type: ignore[method-assign]
