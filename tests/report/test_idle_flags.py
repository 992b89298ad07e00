"""Every flag of a run, on runs where it cannot matter: a note or an error, or a reason why it is taken in silence."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.predict.forecast import forecast
from jettison.predict.time import estimate
from jettison.report.ledger import advice
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.spec.hardware import hardware
from jettison.spec.run import Run

VALUES: dict[str, tuple[Any, ...]] = {
    "seq": (1024,),
    "source_seq": (512,),
    "attention": ("eager",),
    "dropout": (0.2,),
    "precision": ("fp32",),
    "fp8_recipe": ("tensorwise", "mxfp8"),
    "fp8_param_gather": (True,),
    "quant_recipe": ("last:1=bf16",),
    "optimizer": ("adam8bit",),
    "kernels": ("huggingface",),
    "loss": ("fused",),
    "capacity_factor": (1.5,),
    "expert_imbalance": (1.5,),
    "dispatcher": ("flex",),
    "sequential_experts": (True,),
    "deterministic": (True,),
    "tp_comm_overlap": (True,),
    "ep_comm_overlap": (True,),
    "cuda_graphs": (True,),
    "stack": ("megatron",),
    "gathered_inputs": (True,),
    "keep_stage_outputs": (True,),
    "gradients": ("upfront", "buckets"),
    "accumulation": ("cast", "fused"),
    "workspaces": ("torch-hopper",),
    "keep_received": (True,),
    "stage_buffers": (True,),
    "reshard_after_forward": ("never",),
    "gradient_sync": ("each", "last"),
    "reduce_dtype": ("fp32", "bf16"),
    "fsdp_wrap_layers_only": (True,),
    "fsdp_one_unit": (True,),
    "fsdp_version": (1, 2),
    "zero_buckets": ("default",),
    "reentrant": (True,),
    "adapter_dtype": ("fp32",),
    "dataloader_attention_mask": (True,),
    "keep_batches": (True,),
    "keep_logits": (True,),
    "ssm_kernels": ("fused",),
    "cp_comm_type": ("a2a",),
    "packed": (512,),
    "pad_to_longest": (True,),
    "lora": ("r=16",),
    "base": ("nf4",),
    "kbit_upcast": ("all",),
    "input_gradients": (True,),
    "reference": ("same",),
    "reward": ("same",),
    "offload_optimizer": ("deepspeed", "torchao"),
    "mtp_num_layers": (1,),
    "mtp_use_repeated_layer": (True,),
    "recompute_modules": ("mlp", "core_attn"),
    "offload_modules": ("core_attn",),
    "micro_batch": (2,),
    "micro_batches": (8,),
    "tp": (2,),
    "sp": (True,),
    "pp": (2,),
    "virtual_stages": (2,),
    "micro_batch_group": (2, 4),
    "wgrad_deferral_limit": (1,),
    "stage_layers": ("first:1",),
    "schedule": ("gpipe", "zero-bubble"),
    "cp": (2,),
    "dp": (2,),
    "ep": (2,),
    "expert_tp": (1,),
    "zero": (1, 2, 3),
    "zero_replicas": (2,),
    "zero_redundancy_optimizer": (True,),
    "recompute": ("full", "selective"),
    "offload": (True,),
    "micro_batches_without_recompute": ("1",),
    "max_position_embeddings": (8192,),
}
UNTRIED = {"model_type", "like", "anchor"}  # other models, presets and files
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "one GPU": ("llama3-8b", {}),
    "DDP": ("llama3-8b", {"dp": 8}),
    "FSDP": ("llama3-8b", {"dp": 8, "zero": 3}),
    "FSDP, accumulating": ("llama3-8b", {"dp": 8, "zero": 3, "micro_batches": 4}),
    "Megatron": ("llama3-8b", {"dp": 2, "tp": 2, "pp": 2, "kernels": "megatron", "zero": 1}),
    "LoRA": ("llama3-8b", {"lora": "r=16"}),
    "QLoRA": ("llama3-8b", {"lora": "r=16", "base": "nf4", "recompute": "full"}),
    "GPT-2": ("gpt2", {}),
    "experts": ("mixtral-8x7b", {"dp": 8, "ep": 8}),
    "full recomputation": ("llama3-8b", {"recompute": "full"}),
}
ON_PURPOSE = {
    "accumulation": "fused kernels add in place where another way allocates; no other tensor may be alive at the peak",
    "adapter_dtype": "fp32 is the dtype of adapters under autocast as well, the default",
    "dropout": "masks take the same bytes at any probability above 0",
    "expert_tp": "1 is --tp here, the default",
    "cuda_graphs": "time only, where kernels are so long that the host is never waited for",
    "input_gradients": "follows --recompute by default",
    "pad_to_longest": "ranges of reserved and device bytes alone",
    "reduce_dtype": "the dtype that gradients have by --precision",
    "sequential_experts": "one expert a rank",
    "stack": "GPUs without measured figures of that software",
}
"""Flags that may change nothing without a note, and why."""
OF_FSDP = ("gradient_sync", "fsdp_version", "reduce_dtype")
"""Flags whose defaults are noted as well where no parameter is sharded."""
H100 = hardware("h100-80gb")


@cache
def outcome(run: Run) -> tuple[object, ...]:
    """Bytes of each moment, saved tensors, and the step's time."""
    found = forecast(run)
    levels = tuple(tuple(moment.nbytes for moment in stage.timeline()) for stage in found.stages)
    return found.peak_bytes, levels, found.ledger().entries, estimate(run, H100).step_seconds


def test_all_flags_are_tried() -> None:
    assert {field.name for field in fields(RunRequest)} == {*VALUES, *UNTRIED}


@pytest.mark.parametrize("name", RUNS)
def test_a_flag_that_changes_nothing_is_noted(name: str) -> None:
    preset, given = RUNS[name]
    model, silent = model_spec(preset), set()
    plain = resolve(model, RunRequest(**given)).run
    for flag, values in VALUES.items():
        for value in values if flag not in given else ():
            try:
                asked = resolve(model, RunRequest(**given, **{flag: value}))
                same = outcome(asked.run) == outcome(plain)
            except UsageError:
                continue
            noted = any(f"--{flag.replace('_', '-')} " in note for note in advice(asked))
            is_default = asked.run == plain and (plain.layout.zero == 3 or flag not in OF_FSDP)
            if same and not is_default and not noted:
                silent.add(flag)
    assert silent <= set(ON_PURPOSE)
