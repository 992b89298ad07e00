"""DeepSpeed: its configuration, with one switch for all layers in ``activation_checkpointing``."""

from __future__ import annotations

import json

from jettison.frameworks.export import TargetOutput, strategy_notes
from jettison.frameworks.layer_policies import LayerAction
from jettison.frameworks.nearest_policy import Nearest
from jettison.frameworks.torch.write import one_switch


def write(nearest: Nearest) -> TargetOutput:
    """Write the configuration."""
    subject = nearest.subject
    policies, cost = one_switch(nearest, states=True).with_host(Nearest.all_or_none)
    found: dict[str, object] = {}
    tp = 1
    if subject.described is not None:
        run = subject.described.forecast.run
        tp = run.layout.tp
        found |= {
            "train_micro_batch_size_per_gpu": run.micro_batch,
            "gradient_accumulation_steps": run.micro_batches,
            "zero_optimization": {"stage": run.layout.zero},
        }
        if run.precision.compute == "bfloat16":
            found["bf16"] = {"enabled": True}
    else:
        found["train_micro_batch_size_per_gpu"] = subject.asked.get("micro_batch", 1)
    lost: tuple[str, ...] = ()
    if policies[0].action is LayerAction.CHECKPOINT:
        found["activation_checkpointing"] = {
            "partition_activations": tp > 1,
            "number_checkpoints": len(policies),
            "contiguous_memory_optimization": False,
            "cpu_checkpointing": any(policy.offloaded for policy in policies),
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
        lost = (
            "the section takes effect only if the model's own code calls deepspeed.checkpointing.checkpoint for each "
            "layer; the file cannot choose layers (with transformers: activation_checkpointing=True in "
            "TrainingArguments)",
        )
    files = {"deepspeed.json": json.dumps(found, indent=2) + "\n"}
    return TargetOutput(files=files, policies=policies, cost=cost, lost=lost, notes=strategy_notes(subject, policies))
