"""What ranks do for test_sharded_peaks.py: steps of a model that FSDP2 shards, every byte of them counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from jettison.measure.memory import AllocationCounter
from jettison.measure.tensors import static_tensors
from support.formula_cases import VOCABULARY, FormulaCase, model_of
from support.pipeline_peaks import loss_of

MODEL = FormulaCase(family="llama", attention="sdpa", batch=2, sequence=64, more=(("num_hidden_layers", 3),))
RANK = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to shard and train the model.

    Args:
        adapters: of PEFT, beside frozen weights.
        full: every layer is computed again.
        reshard: always, never, or but-the-head: norm and head stay whole until their backward.
        mixed: products in bf16, gradients reduced in fp32.
        root: embedding, norm and head belong to the outermost unit.
        events: every birth and death of a storage is told.
    """

    adapters: bool = False
    full: bool = False
    micro_batches: int = 1
    reshard: str = "always"
    mixed: bool = False
    root: bool = False
    batch: int = 2
    sequence: int = 64
    events: bool = False

    @property
    def formula(self) -> FormulaCase:
        """The model, and its batch."""
        return FormulaCase(
            family=MODEL.family,
            attention=MODEL.attention,
            batch=self.batch,
            sequence=self.sequence,
            more=MODEL.more,
            precision="fp32",
        )

    def told(self) -> dict[str, Any]:
        """As ranks are given it."""
        return asdict(self)


def peaks(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case, this rank's bytes between steps and at the highest, without the batch and AdamW's counters."""
    return [_peak(Case(**words)) for words in args["cases"]]


def _peak(case: Case) -> dict[str, Any]:
    model = _sharded(case)
    ids = torch.randint(1, VOCABULARY, (case.batch * case.micro_batches, case.sequence))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

    def step() -> None:
        for rows in ids.split(case.batch):
            (loss_of(model(input_ids=rows).logits, rows) / case.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [local(t) for s in optimizer.state.values() for t in s.values()]
    counters = sum(local(s["step"]).nbytes for s in optimizer.state.values())
    there = [*map(local, static_tensors(model, ids)), *state]
    with AllocationCounter(there, record_events=case.events) as counter:
        before = counter.live_bytes
        step()
    small = ids.nbytes + counters
    found = {"before": before - small, "peak": counter.peak_bytes - small}
    if case.events:
        found["events"] = [(e.operator, e.storage, e.delta_bytes, e.live_bytes - small) for e in counter.events]
    return found


def _sharded(case: Case) -> Any:
    """Embedding, each layer, and norm with head are groups of their own."""
    model: Any = model_of(case.formula)
    if case.full:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    inner = model
    if case.adapters:
        import peft

        config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        if case.full:
            model.enable_input_require_grads()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    again = case.reshard != "never"
    ends = [] if case.root else [inner.model.embed_tokens]
    for group in (*ends, *inner.model.layers):
        fully_shard(group, reshard_after_forward=again, **options)
    if not case.root:
        fully_shard([inner.model.norm, inner.lm_head], reshard_after_forward=case.reshard == "always", **options)
    fully_shard(inner, reshard_after_forward=again, **options)
    return model.train()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
