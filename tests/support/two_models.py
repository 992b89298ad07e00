"""Steps on ranks of two models, and of packed documents: what each rank allocates, beside what is forecast."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

from jettison.measure.memory import AllocationCounter
from jettison.measure.tensors import static_tensors
from support.formula_cases import VOCABULARY, FormulaCase, model_of

CASE = FormulaCase(family="llama", attention="sdpa", batch=4, sequence=16)
LENGTH = 8


def log_probabilities(model: nn.Module, batch: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    logits = model(**batch).logits.float()
    return -cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).sum(1)


def preference_step(policy: nn.Module, reference: nn.Module | None, batch: Any, labels: torch.Tensor) -> None:
    """Chosen and rejected in one batch of 2b, the policy's forward first, as TRL has it."""
    own = log_probabilities(policy, batch, labels)
    if reference is not None:
        with torch.no_grad():
            other = log_probabilities(reference, batch, labels)
        own = own - other
    chosen, rejected = own.chunk(2)
    (-logsigmoid(0.1 * (chosen - rejected)).mean()).backward()


def peak_of(two: bool, packed: bool) -> int:
    """Bytes of this rank's second step, with AdamW."""
    policy = model_of(CASE)
    reference = copy.deepcopy(policy).requires_grad_(False) if two else None
    models = [model for model in (policy, reference) if model is not None]
    torch.manual_seed(dist.get_rank())
    ids, labels = (torch.randint(1, VOCABULARY, (CASE.batch, CASE.sequence)) for _ in range(2))
    batch = {"input_ids": ids}
    if packed:
        batch["position_ids"] = torch.arange(LENGTH).repeat(CASE.sequence // LENGTH).expand(ids.shape).contiguous()
    optimizer = torch.optim.AdamW(policy.parameters(), foreach=False)

    def step() -> None:
        preference_step(policy, reference, batch, labels)
        for parameter in policy.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [t for s in optimizer.state.values() for t in s.values()]
    there = [t for model in models for t in static_tensors(model, batch)]
    with AllocationCounter([*there, *state, *batch.values(), labels]) as counter:
        step()
    return counter.peak_bytes


def peaks(_args: Any) -> Any:
    cases = [(two, packed) for two in (False, True) for packed in (False, True)]
    return {" ".join(map(str, case)): peak_of(*case) for case in cases}
