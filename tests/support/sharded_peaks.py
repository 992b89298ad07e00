"""What ranks do for test_sharded_peaks.py: steps of a model that FSDP2 shards, every byte of them counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from jettison.dryrun.counter import AllocationCounter, static_tensors
from support.formula_cases import VOCABULARY, FormulaCase, model_of
from support.pipeline_peaks import loss_of

RANK = 4
PAUSE_SECONDS = 0.003


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to shard and train the model.

    Args:
        adapters: of PEFT, beside frozen weights.
        full: every layer is computed again.
        reshard: always, never, torchtitan (norm and head stay whole until their backward), or over how many ranks.
        mixed: products in bf16, gradients reduced in fp32.
        outer: embedding, norm and head belong to the outermost unit; torchtitan's last layer is whole then, too.
        ffn: width of feed-forward layers; 0: as the model has it.
        segment: so many layers are one checkpoint, of twice as many.
        vocabulary: rows of the embedding and the head; 0: as the model has it.
        tied: the head is the embedding's table.
        replicas: of shards, beside each other: HSDP.
        last: gradients are reduced in the last micro-batch alone, as accelerate's ``no_sync`` has it.
        reduced: dtype in which they are, where products are in bf16.
        flat: FSDP1.
        events: every birth and death of a storage is told.
    """

    adapters: bool = False
    full: bool = False
    micro_batches: int = 1
    reshard: str = "always"
    mixed: bool = False
    outer: bool = False
    batch: int = 2
    sequence: int = 64
    ffn: int = 0
    segment: int = 1
    vocabulary: int = 0
    tied: bool = False
    replicas: int = 1
    last: bool = False
    reduced: str = "float32"
    flat: bool = False
    events: bool = False

    @property
    def formula(self) -> FormulaCase:
        """The model, and its batch."""
        depth = ("num_hidden_layers", 2 * self.segment if self.segment > 1 else 3)
        sizes = {"intermediate_size": self.ffn, "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied}
        return FormulaCase(
            family="llama",
            attention="sdpa",
            batch=self.batch,
            sequence=self.sequence,
            more=(depth, *((name, value) for name, value in sizes.items() if value)),
            precision="fp32",
        )

    def told(self) -> dict[str, Any]:
        """As ranks are given it."""
        return asdict(self)


class _Gathers(DefaultAllGather):
    """gloo's threads hold tensors for a moment longer than an operation takes: they are given it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        work = super().__call__(*args, **options)
        time.sleep(PAUSE_SECONDS)
        return work


class _Reduces(DefaultReduceScatter):
    """The same of gradients."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        work = super().__call__(*args, **options)
        time.sleep(PAUSE_SECONDS)
        return work


def peaks(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case, this rank's bytes between steps and at the highest, without the batch and AdamW's counters."""
    return [_peak(Case(**words)) for words in args["cases"]]


def _peak(case: Case) -> dict[str, Any]:
    model = _sharded(case)
    ids = torch.randint(1, case.vocabulary or VOCABULARY, (case.batch * case.micro_batches, case.sequence))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

    def step() -> None:
        for number, rows in enumerate(ids.split(case.batch), 1):
            with _without_sync(model) if case.last and number < case.micro_batches else nullcontext():
                (loss_of(model(input_ids=rows).logits, rows) / case.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [local(t) for s in optimizer.state.values() for t in s.values()]
    counters = sum(local(s["step"]).nbytes for s in optimizer.state.values())
    there = [*map(local, static_tensors(model, ids)), *state]
    return lowest_of_three(step, there, ids.nbytes + counters, events=case.events)


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    """Leave gradients unsharded: ``Accelerator.no_sync``."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def lowest_of_three(
    step: Callable[[], None],
    there: Sequence[Tensor],
    small: int,
    *,
    events: bool = False,
    passing: Callable[[], Iterable[Tensor]] = tuple,
) -> dict[str, Any]:
    """Bytes between steps and at the highest, less ``small``: what gloo still holds may be in one step, not in all.

    Args:
        passing: what is there between steps and goes within the next: nobody else may hold it.
    """
    lowest = 0
    for _ in range(3):
        with AllocationCounter(chain(there, passing()), record_events=events) as counter:
            before = counter.live_bytes
            step()
        lowest = min(lowest or counter.peak_bytes, counter.peak_bytes)
    found: dict[str, Any] = {"before": before - small, "peak": lowest - small}
    if events:
        found["events"] = [(e.operator, e.storage, e.delta_bytes, e.live_bytes - small) for e in counter.events]
    return found


def _sharded(case: Case) -> Any:
    """Embedding, each layer, and norm with head are groups of their own."""
    model: Any = model_of(case.formula)
    if case.full:
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    inner = model
    if case.adapters:
        import peft

        config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        if case.full:
            model.enable_input_require_grads()
    ranks = distributed.get_world_size()
    shape = (ranks,) if case.replicas == 1 else (case.replicas, ranks // case.replicas)
    names = ("replicas", "shards")[-len(shape) :]
    if case.flat:
        return _flat(case, model).train()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if case.mixed:
        wide = getattr(torch, case.reduced)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=wide)
    layers = list(inner.model.layers)
    if case.segment > 1:
        found = [_Segment(layers[at : at + case.segment]) for at in range(0, len(layers), case.segment)]
        inner.model.layers = nn.ModuleList(found)
    again = int(case.reshard) if case.reshard.isdecimal() else case.reshard != "never"
    at_end = again and case.reshard != "torchtitan"
    ends = [] if case.outer else [inner.model.embed_tokens]
    for group in (*ends, *layers):
        last = case.outer and case.reshard == "torchtitan" and group is layers[-1]
        fully_shard(group, reshard_after_forward=False if last else again, **options)
    if not case.outer:
        fully_shard([inner.model.norm, inner.lm_head], reshard_after_forward=at_end, **options)
    fully_shard(inner, reshard_after_forward=at_end, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Gathers())
            module.set_custom_reduce_scatter(_Reduces())
    return model.train()


def _flat(case: Case, model: Any) -> Any:
    """FSDP1: each layer, and all else, is a flat parameter."""
    wide = getattr(torch, case.reduced)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=wide) if case.mixed else None
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, mixed_precision=mixed, use_orig_params=True, device_id=torch.device("cpu")
    )


class _Segment(nn.Module):
    """Layers that are one checkpoint."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, **options: Any) -> Any:
        return checkpoint(self._run, hidden, options, use_reentrant=False, preserve_rng_state=False)

    def _run(self, hidden: Tensor, options: dict[str, Any]) -> Any:
        for layer in self.layers:
            hidden = layer(hidden, **options)
        return hidden


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
