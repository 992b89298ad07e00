"""What ranks do for test_sharded_peaks.py: steps of a model that FSDP2 shards, every byte of them counted."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from jettison.measure.memory import AllocationCounter
from jettison.measure.tensors import static_tensors
from support.formula_cases import VOCABULARY, FormulaCase, model_of
from support.pipeline_peaks import loss_of

CASE = FormulaCase(family="llama", attention="sdpa", batch=2, sequence=64, more=(("num_hidden_layers", 3),))
RANK = 4


def peaks(args: dict[str, Any]) -> list[dict[str, int]]:
    """Of each case, this rank's bytes between steps and at the highest, without the batch and AdamW's counters."""
    return [_peak(**case) for case in args["cases"]]


def _peak(*, adapters: bool, full: bool, micro_batches: int) -> dict[str, int]:
    model = _sharded(adapters, full)
    ids = torch.randint(1, VOCABULARY, (CASE.batch * micro_batches, CASE.sequence))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

    def step() -> None:
        for rows in ids.split(CASE.batch):
            (loss_of(model(input_ids=rows).logits, rows) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [_local(t) for s in optimizer.state.values() for t in s.values()]
    counters = sum(_local(s["step"]).nbytes for s in optimizer.state.values())
    with AllocationCounter([*map(_local, static_tensors(model, ids)), *state]) as counter:
        before = counter.live_bytes
        step()
    small = ids.nbytes + counters
    return {"before": before - small, "peak": counter.peak_bytes - small}


def _sharded(adapters: bool, full: bool) -> Any:
    """Embedding, each layer, and norm with head are groups of their own."""
    model: Any = model_of(CASE)
    if full:
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    inner = model
    if adapters:
        config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        if full:
            model.enable_input_require_grads()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for group in (inner.model.embed_tokens, *inner.model.layers, [inner.model.norm, inner.lm_head], inner):
        fully_shard(group, mesh=mesh, reshard_after_forward=True)
    return model.train()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
