"""Train a model for a few steps and write down everything that a plan must not change; compare two such records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.model_trace import call_model, loss_of
from jettison.dryrun.counter import PeakReport, measured_peak, static_tensors
from jettison.verify.differences import buffer_digest, compare_gradients, parameter_digest, rng_digest, same_bits

SEED = 7
Context = Callable[[], contextlib.AbstractContextManager[Any]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(kw_only=True)
class Trained:
    """A finished run: what it computed, what it left behind, and the peak of its last step."""

    model: nn.Module
    losses: list[Tensor]
    random_states: str
    buffers: str
    parameters: str
    peak: PeakReport | None


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A fresh AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, so that it has state."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def train(
    model: nn.Module,
    batches: list[Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
    context: Context = contextlib.nullcontext,
    generators: Mapping[str, torch.Generator] | None = None,
    measure: bool = False,
) -> Trained:
    """One step a batch from a fixed seed; ``measure`` takes the last one's peak. The output lives through backward."""
    losses: list[Tensor] = []

    def step(batch: Any) -> None:
        with context():
            output = call_model(model, batch)
            loss = loss_of(output, loss_fn)
        loss.backward()
        losses.append(loss.detach())
        del loss
        if optimizer is not None:
            optimizer.step()

    peak = None
    torch.manual_seed(SEED)
    for n, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        if measure and n == len(batches) - 1:
            peak = measured_peak(lambda: step(batches[-1]), static_tensors=static_tensors(model, batch, optimizer))
        else:
            step(batch)
    return Trained(
        model=model,
        losses=losses,
        random_states=rng_digest(generators),
        buffers=buffer_digest(model),
        parameters=parameter_digest(model),
        peak=peak,
    )


def assert_same(got: Trained, plain: Trained) -> None:
    """Bitwise: losses, every gradient by name, parameters and buffers after the last step, random streams."""
    for step, (a, b) in enumerate(zip(got.losses, plain.losses, strict=True)):
        assert b.isfinite(), f"loss of step {step} is {b.item()}: such a run compares nothing"
        assert same_bits(a, b), f"loss of step {step}: {a.item()!r}, expected {b.item()!r}"
    report = compare_gradients(got.model, plain.model)
    assert report.identical, report.differences[:3]
    assert got.random_states == plain.random_states, "the random streams stand elsewhere"
    assert got.buffers == plain.buffers, "registered buffers differ"
    assert got.parameters == plain.parameters, "parameters differ after the last step"
