"""Reader of accelerate's configuration: number of GPUs, mixed precision, FSDP or DeepSpeed."""

from __future__ import annotations

from jettison.frameworks.run_file import Keys
from jettison.frameworks.trainer_keys import follow, fsdp, half, offloads, precision, replicas


def read(keys: Keys, prefix: str = "") -> None:
    """Read the file alone, or under a prefix with a Trainer's file."""
    kind, own = keys.text(f"{prefix}distributed_type"), f"{prefix}deepspeed_config."
    if kind not in ("deepspeed", ""):  # ``commands/launch.py``: the other launchers do not pass it on
        keys.read(*keys.matching(f"{own}*"), why="nothing without DeepSpeed")
    elif keys.some(f"{own}*"):
        follow(keys, f"{own}deepspeed_config_file", "deepspeed", "deepspeed.")
        keys.give("like", "deepspeed")
        for key, field in (("zero_stage", "zero"), ("gradient_accumulation_steps", "micro_batches")):
            keys.give(field, keys.whole(f"{own}{key}"), f"{own}{key}")
        offloads(keys, f"{own}offload_optimizer_device", f"{own}offload_param_device")
    if kind == "fsdp":
        fsdp(keys, f"{prefix}fsdp_config.", version=1)  # ``utils/dataclasses.py``, ``fsdp_version``
    if keys.text(f"{prefix}dynamo_config.dynamo_backend", "no") not in ("no", "eager"):
        keys.compiles(f"{prefix}dynamo_config.dynamo_backend")
    for name, field in (("tp", "tp"), ("cp", "cp"), ("dp_replicate", "zero_replicas"), ("dp_shard", "zero")):
        key = f"{prefix}parallelism_config.parallelism_config_{name}_size"
        if (size := keys.whole(key, 1) or 1) > 1:
            keys.give(field, 3 if field == "zero" else size, key)
    if not prefix:
        precision(keys, weights="fp32", mixed=half(keys) or keys.text("mixed_precision", "no") != "no")
        if not keys.has("mixed_precision"):
            keys.note("it leaves mixed_precision to the script, and fp32 is counted: give --precision")
        replicas(keys)
