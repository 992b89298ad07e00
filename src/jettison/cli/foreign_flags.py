"""Flags of other tools and their equivalents here, for the message about an unknown flag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # recompute
        "--gradient-checkpointing": "--recompute full",
        "--gradient-checkpoint": "--recompute full",
        "--use-gradient-checkpointing": "--recompute full",
        "--activation-checkpointing": "--recompute full",
        "--activation-checkpoint": "--recompute full",
        "--checkpoint-activations": "--recompute full",
        "--fsdp-activation-checkpointing": "--recompute full",
        "--ac-mode": "--recompute full",
        "--recompute-activations": "--recompute selective",
        "--selective-checkpointing": "--recompute selective",
        "--recompute-granularity": "--recompute full",
        "--recompute-method": "--recompute block:1",
        "--recompute-num-layers": "--recompute block:{1}",
        "--policy": "--recompute {full}",
        "--checkpointing": "--recompute full",
        # precision
        "--bf16": "--precision bf16",
        "--fp16": "--precision fp16-main32",
        "--fp32": "--precision fp32",
        "--mixed-precision": "--precision bf16",
        "--amp": "--precision bf16-autocast",
        "--dtype": "--precision bf16",
        "--torch-dtype": "--precision bf16",
        "--params-dtype": "--precision bf16",
        "--fp8": "--fp8-recipe tensorwise",
        "--fp8-format": "--fp8-recipe tensorwise",
        # the batch
        "--per-device-train-batch-size": "--micro-batch {1}",
        "--train-micro-batch-size-per-gpu": "--micro-batch {1}",
        "--micro-batch-size": "--micro-batch {1}",
        "--local-batch-size": "--micro-batch {1}",
        "--train-batch-size": "--micro-batch {1}",
        "--batch-size": "--micro-batch {1}",
        "--batch": "--micro-batch {1}",
        "--gradient-accumulation-steps": "--micro-batches {1}",
        "--accumulate-grad-batches": "--micro-batches {1}",
        "--global-batch-size": "--global-batch {64}",
        "--seq-length": "--seq {1024}",
        "--seq-len": "--seq {1024}",
        "--sequence-length": "--seq {1024}",
        "--max-seq-length": "--seq {1024}",
        "--max-seq-len": "--seq {1024}",
        "--max-length": "--seq {1024}",
        "--block-size": "--seq {1024}",
        "--context-length": "--seq {1024}",
        "--cutoff-len": "--seq {1024}",
        # layouts
        "--tensor-parallel-size": "--tp {2}",
        "--tensor-parallel-degree": "--tp {2}",
        "--tensor-model-parallel-size": "--tp {2}",
        "--tp-size": "--tp {2}",
        "--pipeline-parallel-size": "--pp {2}",
        "--pipeline-parallel-degree": "--pp {2}",
        "--pipeline-model-parallel-size": "--pp {2}",
        "--pp-size": "--pp {2}",
        "--context-parallel-size": "--cp {2}",
        "--context-parallel-degree": "--cp {2}",
        "--expert-model-parallel-size": "--ep {2}",
        "--expert-parallel-size": "--ep {2}",
        "--expert-tensor-parallel-size": "--expert-tp {1}",
        "--data-parallel-size": "--dp {2}",
        "--data-parallel-shard-degree": "--dp {2}",
        "--num-gpus": "--dp {2}",
        "--world-size": "--dp {2}",
        "--sequence-parallel": "--sp",
        "--zero-stage": "--zero {3}",
        "--deepspeed": "--zero 3",
        "--fsdp": "--zero 3",
        "--fully-shard": "--zero 3",
        "--use-distributed-optimizer": "--zero 1",
        # kernels, optimizers, tuning
        "--use-flash-attn": "--attention flash",
        "--flash-attention": "--attention flash",
        "--flash-attn": "--attention flash",
        "--attn-implementation": "--attention sdpa",
        "--torch-compile": "--compile",
        "--optim": "--optimizer adamw",
        "--use-lora": "--lora r=16",
        "--use-peft": "--lora r=16",
        "--lora-r": "--lora r={16}",
        "--lora-rank": "--lora r={16}",
        "--load-in-4bit": "--base nf4",
        "--load-in-8bit": "--base int8",
        # memory and devices
        "--cpu-offload": "--offload",
        "--offload-activations": "--offload",
        "--activation-offload": "--offload",
        "--cpu-offloading": "--offload",
        "--max-memory": "--budget 20GiB",
        "--memory-budget": "--budget 20GiB",
        "--memory": "--budget 20GiB",
        "--vram": "--budget 20GiB",
        "--hardware": "--gpu h100-80gb",
        "--device-name": "--gpu h100-80gb",
        # this program's own habits
        "--json": "--format json",
        "--csv": "--format csv",
        "--output": "--out {result.json}",
        "--output-file": "--out {result.json}",
        "--overwrite": "--force",
        "--resume-from-checkpoint": "--resume",
    }
)
"""Our flag by that of another tool; braces hold an example, which the user's value replaces."""
_EXAMPLE: Final = re.compile(r"\{(.*?)\}")
_WHOLE: Final = re.compile(r"[1-9]\d{0,6}")


def said_here(flag: str, value: str | None) -> str | None:
    """Return our flag for one of another tool; None where none is known.

    Args:
        value: that the user gave it, if any. A whole number takes the place of the example.
    """
    found = FLAGS.get(flag.lower().replace("_", "-"))
    if found is None:
        return None
    given = value if value is not None and _WHOLE.fullmatch(value) else None
    return _EXAMPLE.sub(lambda match: given if given and _WHOLE.fullmatch(match[1]) else match[1], found)
