"""Train an entry with and without a plan and hold the two against each other.

The plain model and the planned one are built from the same seed and share nothing. After each of three AdamW steps the
loss, every gradient, every parameter and buffer, and torch's, Python's and numpy's random streams must have the same
bits; the peak of each step, from the allocator's own events, must stay within the budget. Planning itself must leave
the model and the streams as it found them.
"""

from __future__ import annotations

import gc
import os
import random
import traceback
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import jettison
from jettison.capture.model_trace import call_model, loss_of
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import have_workspaces, measured_peak, static_tensors
from jettison.verify.differences import same_bits
from support.our_warnings import is_ours
from zoo.entry import Batch, Entry

STEPS = 3
SEED = 7
ENGINE_BYTES = 256  # Python numbers that autograd's engine wraps: live for an op, in plain steps as well
BLOCKS_BYTES = 8192  # on CUDA: sixteen of the allocator's smallest blocks, of some tens of MB


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step left behind."""

    loss: Tensor
    state: dict[str, Tensor]  # gradients, parameters and buffers, by name
    streams: dict[str, Any]
    peak_bytes: int


@dataclass(kw_only=True)
class Outcome:
    """What was found about one entry. ``problems`` is empty where everything holds."""

    name: str
    plain_peak_bytes: int = 0
    minimum_budget_bytes: int = 0
    fallbacks: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def seed(number: int) -> None:
    """All three streams."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def streams() -> dict[str, Any]:
    """Where the streams stand."""
    kind, keys, *rest = numpy.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "CUDA": [state.numpy().tobytes() for state in devices],
        "random": random.getstate(),
        "numpy": (kind, keys.tobytes(), *rest),  # type: ignore[union-attr]
    }


def built(entry: Entry, device: str) -> tuple[nn.Module, list[Batch]]:
    """Its model in training mode and a batch for every step: the same bits at every call."""
    seed(0)
    model = entry.model().train()
    batches = [entry.batch(step) for step in range(STEPS)]
    if device == "cpu":
        return model, batches
    return model.to(device), tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batches)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of its gradients, parameters and buffers, by what they are."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {f"gradient of {n}": p.grad for n, p in parameters.items() if p.grad is not None}
    found |= {f"parameter {n}": p for n, p in parameters.items()}
    found |= {f"buffer {n}": b for n, b in model.named_buffers(remove_duplicate=False)}
    return {name: t.detach().to("cpu", copy=True) for name, t in found.items()}  # the device's memory is measured


def train(entry: Entry, model: nn.Module, batches: list[Batch], optimizer: torch.optim.Optimizer) -> list[Step]:
    """Three steps from a fixed seed. The output lives through backward, as in most loops."""
    seed(SEED)
    done: list[Step] = []
    losses: list[Tensor] = []

    def step(batch: Batch) -> None:
        output = call_model(model, batch)
        loss = loss_of(output, entry.loss_fn)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        static = static_tensors(model, batch, optimizer)
        peak = measured_peak(partial(step, batch), static_tensors=static)
        loss = losses.pop().to("cpu", copy=True)
        done.append(Step(loss=loss, state=state_of(model), streams=streams(), peak_bytes=peak.peak_bytes))
    return done


def differences(got: list[Step], expected: list[Step]) -> list[str]:
    """What is not the same to the bit, in the first step that has anything."""
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if type(a.loss) is not type(b.loss):
            return [f"step {number}: the loss is a {type(a.loss).__name__}"]
        found = [] if same_bits(a.loss, b.loss) else [f"loss {a.loss.item()!r}, expected {b.loss.item()!r}"]
        found += [f"the stream of {name} stands elsewhere" for name in b.streams if a.streams[name] != b.streams[name]]
        found += state_differences(a.state, b.state)
        if found:
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            return [f"step {number}: {'; '.join(found[:4])}{more}"]
    return []


def state_differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ, or that only one of the two has."""
    missing = [f"only one side has the {name}" for name in sorted(a.keys() ^ b.keys())]
    return missing + [f"another {name}" for name in a if name in b and not same_bits(a[name], b[name])]


def prove(entry: Entry, device: str = "cpu") -> Outcome:
    """The whole claim for one family, at its smallest budget and half way to the plain step's peak.

    Raises:
        ValueError: plain PyTorch does not train this family, or not twice the same way.
    """
    outcome = Outcome(name=entry.name)
    plain, outcome.plain_peak_bytes = _plain(entry, device)
    _smallest(entry, device, outcome)
    if outcome.minimum_budget_bytes:
        _planned(entry, device, "smallest", outcome.minimum_budget_bytes, plain, outcome)
        middle = (outcome.minimum_budget_bytes + outcome.plain_peak_bytes) // 2
        _planned(entry, device, "middle", max(middle, outcome.minimum_budget_bytes), plain, outcome)
        saves = outcome.minimum_budget_bytes < outcome.plain_peak_bytes - ENGINE_BYTES
        if saves and not outcome.problems and not outcome.fallbacks and not outcome.dropped["smallest"]:
            outcome.problems.append("nothing was dropped at the smallest budget, so nothing was tested")
    return outcome


def _plain(entry: Entry, device: str) -> tuple[list[Step], int]:
    """Three plain steps, twice: what cannot be repeated cannot be compared either. And the highest peak: also of the
    first batch, which is planned for, once the optimizer has its state.
    """
    runs, peaks = [], []
    have_workspaces(torch.device(device))  # once there, they stay
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            model, batches = built(entry, device)
            optimizer = adamw(model)
            runs.append(train(entry, model, batches, optimizer))
            peaks += [step.peak_bytes for step in (*runs[-1], *train(entry, model, batches[:1], optimizer))]
    first = runs[0]
    unequal = differences(runs[1], first)
    if unequal:
        raise ValueError(f"{entry.name} trains in another way each time without any plan: {unequal[0]}")
    if not all(step.loss.isfinite() for step in first):
        raise ValueError(f"{entry.name} has losses that are not finite: {[step.loss.item() for step in first]}")
    if not any(name.startswith("gradient") for name in first[0].state):
        raise ValueError(f"{entry.name} has no gradients")
    return first, max(peaks)


def _smallest(entry: Entry, device: str, outcome: Outcome) -> None:
    """Ask for one byte; the refusal names the smallest budget."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batches = built(entry, device)
        try:
            jettison.auto_checkpoint(model, batches[0], Bytes(1), optimizer=adamw(model), loss_fn=entry.loss_fn)
        except Infeasible as refused:
            outcome.minimum_budget_bytes = refused.minimum_budget_bytes
            unseen = (ENGINE_BYTES if device == "cpu" else BLOCKS_BYTES) + entry.watched_bytes
            over = refused.minimum_budget_bytes - unseen - outcome.plain_peak_bytes
            if over > 0 and not (entry.values_decide or entry.by_chance):
                outcome.problems.append(f"the smallest budget is {over} bytes above what a plain step takes")
        except Exception as error:
            outcome.problems.append(f"asking for one byte: {_said(error)}")
        else:
            outcome.problems.append("a budget of one byte was accepted")


def _planned(entry: Entry, device: str, word: str, budget_bytes: int, plain: list[Step], outcome: Outcome) -> None:
    """Plan, train, compare."""
    model, batches = built(entry, device)
    optimizer = adamw(model)
    before = state_of(model), streams()
    doing = "planning for"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            handle = jettison.auto_checkpoint(
                model, batches[0], Bytes(budget_bytes), optimizer=optimizer, loss_fn=entry.loss_fn
            )
            touched = state_differences(state_of(model), before[0])
            touched += [f"the stream of {n}" for n, at in streams().items() if before[1][n] != at]
            if touched:
                outcome.problems.append(f"planning for the {word} budget changed: {'; '.join(touched[:3])}")
            del before
            doing = "training at"
            done = train(entry, model, batches, optimizer)
        except Exception as error:
            outcome.problems.append(f"{doing} the {word} budget: {_said(error)}")
            return
    texts = [str(w.message).splitlines()[0] for w in said if is_ours(w)]
    outcome.said += texts
    reports = handle.report()
    outcome.fallbacks += [f"{word}, {r.name or 'root'}: {r.fallback}" for r in reports if r.fallback]
    outcome.dropped[word] = sum(r.slots_dropped for r in reports)
    outcome.problems += [f"{word} budget, {text}" for text in differences(done, plain)]
    admitted = entry.values_decide and any("budget" in text for text in texts)
    for number, step in enumerate(done):
        if step.peak_bytes > budget_bytes and not (admitted and number > 0):
            over = step.peak_bytes - budget_bytes
            outcome.problems.append(f"{word} budget, step {number}: {over} bytes over {budget_bytes}")
    handle.remove()
    gc.collect()


def _said(error: Exception) -> str:
    if os.environ.get("ZOO_TRACEBACKS"):
        traceback.print_exception(error)
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else ''}"
