"""Steps on ranks of two models, and of packed documents: what each rank allocates, beside what is forecast."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, logsigmoid

from jettison.dryrun.counter import AllocationCounter, static_tensors
from support.formula_cases import VOCABULARY, FormulaCase, model_of
from support.sharded_peaks import local

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


def sharded(model: Any) -> nn.Module:
    """By FSDP2: embedding, each layer, and norm with head are groups of their own."""
    for group in (model.model.embed_tokens, *model.model.layers, [model.model.norm, model.lm_head], model):
        fully_shard(group, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
    return model  # type: ignore[no-any-return]


def peak_of(two: bool, packed: bool, shards: bool) -> int:
    """Bytes of this rank's second step, with AdamW."""
    policy = model_of(CASE)
    reference = copy.deepcopy(policy).requires_grad_(False) if two else None
    models = [model for model in (policy, reference) if model is not None]
    if shards:
        models = list(map(sharded, models))
    torch.manual_seed(dist.get_rank())
    ids, labels = (torch.randint(1, VOCABULARY, (CASE.batch, CASE.sequence)) for _ in range(2))
    batch = {"input_ids": ids}
    if packed:
        batch["position_ids"] = torch.arange(LENGTH).repeat(CASE.sequence // LENGTH).expand(ids.shape).contiguous()
    optimizer = torch.optim.AdamW(policy.parameters(), foreach=False)

    def step() -> None:
        preference_step(policy, reference, batch, labels)
        for parameter in policy.parameters() if not shards else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [local(t) for s in optimizer.state.values() for t in s.values()]
    there = [local(t) for model in models for t in static_tensors(model, batch)]
    with AllocationCounter([*there, *state, *batch.values(), labels]) as counter:
        step()
    return counter.peak_bytes


def peaks(_args: Any) -> Any:
    cases = product((False, True), repeat=3)
    return {" ".join(map(str, case)): peak_of(*case) for case in cases}
