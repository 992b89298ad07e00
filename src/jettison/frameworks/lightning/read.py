"""Reader of a LightningCLI's YAML: the Trainer, its strategy and usual arguments of modules.

Read: Lightning 7f0c3436 (July 2026): src/lightning/pytorch/strategies/fsdp.py (FSDP1), ddp.py and deepspeed.py,
trainer/connectors/accelerator_connector.py (auto is one device, or ddp).
"""

from __future__ import annotations

import re
from typing import Final

from jettison.frameworks.run_file import Keys
from jettison.frameworks.trainer_keys import devices, reduces_last, zero_buckets

_STRATEGY: Final = "trainer.strategy"
_ARGUMENTS: Final = f"{_STRATEGY}.init_args"


def read(keys: Keys) -> None:
    """Read the keys without a table form."""
    count = devices(keys, "trainer.devices", "trainer.num_nodes")
    _strategy(keys, count)
    if keys.field("optimizer") is None:
        fused = keys.on("optimizer.init_args.fused")
        keys.give("optimizer", "adamw" if fused else "adamw-foreach", "optimizer.class_path")
    keys.notes.append("the module's own step is counted as that of transformers' code and Trainer")


def _strategy(keys: Keys, count: int) -> None:
    key = f"{_STRATEGY}.class_path" if keys.has(f"{_STRATEGY}.class_path") else _STRATEGY
    name = keys.text(key, "auto").rpartition(".")[2].replace("strategy", "")
    if name == "auto":
        name = "ddp" if count > 1 else "single"
    if name.startswith("deepspeed"):
        _deepspeed(keys, key, name)
    elif name.startswith("fsdp"):
        _fsdp(keys, key)
    elif name.startswith(("ddp", "single")):
        keys.give("zero", 0, key)
    else:
        keys.refuse(key, "expected auto, ddp, fsdp or deepspeed_stage_1 to 3")


def _fsdp(keys: Keys, key: str) -> None:
    keys.give("zero", 3, key)
    sharding = keys.text(f"{_ARGUMENTS}.sharding_strategy", "full_shard")
    if sharding == "shard_grad_op":
        keys.note("units that stay unsharded after a forward are counted as FSDP2's")
    else:
        keys.give("fsdp_version", 1)
    if sharding in ("full_shard", "hybrid_shard", "shard_grad_op"):
        whole = "never" if sharding == "shard_grad_op" else "always"
        keys.give("reshard_after_forward", whole, f"{_ARGUMENTS}.sharding_strategy")
        nodes = keys.whole("trainer.num_nodes", 1) or 1
        if sharding == "hybrid_shard" and nodes > 1:
            keys.give("zero_replicas", nodes, f"{_ARGUMENTS}.sharding_strategy")
    else:
        keys.refuse(f"{_ARGUMENTS}.sharding_strategy", "expected FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD")
    # strategies/parallel.py, ``block_backward_sync``: FSDP1 satisfies its protocol of DistributedDataParallel
    reduces_last(keys, remedy="a strategy whose block_backward_sync does nothing")
    wrapped = f"{_ARGUMENTS}.auto_wrap_policy"
    if not keys.has(wrapped) and sharding != "shard_grad_op":
        keys.give("fsdp_one_unit", True)
        keys.notes.append(
            "the file has no auto_wrap_policy; one FSDP unit is counted, as if no configure_model had any"
        )
    keys.read(wrapped, why="a unit per layer")
    for key in (f"{_ARGUMENTS}.activation_checkpointing_policy", f"{_ARGUMENTS}.activation_checkpointing"):
        if keys.has(key):
            keys.give("recompute", "full", key)


def _deepspeed(keys: Keys, key: str, name: str) -> None:
    said = re.search(r"stage_([123])", name)
    stage = int(said[1]) if said else keys.whole(f"{_ARGUMENTS}.stage", 2)
    keys.give("zero", stage, key, f"{_ARGUMENTS}.stage")
    keys.give("like", "deepspeed")
    if keys.field("precision") in ("bf16-autocast", "bf16-pure"):  # ``_format_precision_config``: the engine's bf16
        keys.give("precision", "bf16", "trainer.precision")
    if keys.field("optimizer") is None:
        keys.give("optimizer", "adamw-deepspeed")
    optimizer, parameters = f"{_ARGUMENTS}.offload_optimizer", f"{_ARGUMENTS}.offload_parameters"
    if keys.on(parameters) or (stage == 3 and name.endswith("offload")):
        keys.give("offload_optimizer", "deepspeed-parameters", key, parameters)
    elif keys.on(optimizer) or name.endswith("offload"):
        keys.give("offload_optimizer", "deepspeed", key, optimizer)
    sizes = {"reduce_bucket_size": 2 * 10**8, "sub_group_size": 10**12, "overlap_comm": 1}  # the strategy's own
    zero_buckets(keys, f"{_ARGUMENTS}.", **sizes)
