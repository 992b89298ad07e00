"""Reader of NeMo AutoModel's YAML.

Read: 36044ad3 (August 2026). Sizes and lengths: nemo_automodel/recipes/llm/train_ft.py; checkpoints around the parts of
a layer (components/distributed/activation_checkpointing.py) or, in its own models with experts, around the layer
(components/moe/parallelizer.py, apply_ac); FSDP2 in bf16 with fp32 reduction (components/distributed/config.py).
"""

from __future__ import annotations

from math import prod

from jettison.frameworks.run_file import Keys
from jettison.frameworks.trainer_keys import low_rank, reduces_last


def read(keys: Keys) -> None:
    """Read the keys without a table form."""
    if keys.some("model.backend.*"):
        keys.give("kernels", "pytorch")
        keys.notes.append("kernels of AutoModel's own model code, chosen by its backend, are counted as PyTorch's")
    _layout(keys)
    _batch(keys)
    checkpoints = "distributed.activation_checkpointing"
    if keys.text(checkpoints, "false") in ("true", "full"):
        keys.give("recompute", "full" if keys.field("ep", 1) > 1 else "parts", checkpoints)
    if keys.field("loss") == "fused" or keys.field("pp", 1) > 1:
        keys.give("keep_logits", False)
    if keys.on("optimizer.fused") or not keys.on("optimizer.foreach", True):
        keys.give("optimizer", "adamw", "optimizer.fused", "optimizer.foreach")
        if not keys.on("optimizer.fused"):
            keys.notes.append("temporary copies of one parameter in an unfused step are not counted")
    _adapters(keys)
    _products(keys)
    deferred = "distributed.defer_fsdp_grad_sync"
    if keys.field("pp", 1) == 1:  # components/distributed/utils.py, get_sync_ctx
        reduces_last(
            keys, synced=deferred in keys.values and not keys.on(deferred), remedy="defer_fsdp_grad_sync: false"
        )


def _layout(keys: Keys) -> None:
    size = keys.text("distributed.dp_size", "none")
    if keys.gpus is None and size.isdecimal():
        keys.gpus = int(size) * prod(keys.field(axis, 1) for axis in ("tp", "pp", "cp"))
    over = keys.share("tp", "pp", "cp")
    if size not in ("none", "", str(over)) and "dp" not in keys.asked and keys.gpus:
        raise keys.error(f"distributed.dp_size = {size}, and {keys.gpus} GPUs leave {over}; omit --gpus")
    keys.give("dp", over, "distributed.dp_size")
    replicas = keys.text("distributed.dp_replicate_size", "none")
    if replicas.isdecimal() and int(replicas) > 1:
        keys.give("zero_replicas", int(replicas), "distributed.dp_replicate_size")
    if keys.field("zero") is None:
        keys.give("zero", 3)
    if keys.field("zero") == 3 and keys.has("distributed.reshard_after_forward"):
        whole = not keys.on("distributed.reshard_after_forward")
        keys.give("reshard_after_forward", "never" if whole else "always", "distributed.reshard_after_forward")
    experts = keys.text("distributed.ep_size", "1")
    if experts.isdecimal() and int(experts) > 1:
        keys.give("ep", int(experts), "distributed.ep_size")
        if not keys.on("distributed.moe.reshard_after_forward"):
            keys.give("reshard_after_forward", "never", "distributed.moe.reshard_after_forward")
    if keys.field("cp", 1) > 1:
        keys.give("cp_comm_type", "gather")
    if keys.field("tp", 1) > 1 and keys.field("sp") is None:
        keys.give("sp", False)
    if keys.field("tp", 1) == 1:
        keys.drop("sp")


def _batch(keys: Keys) -> None:
    local = max(1, keys.field("micro_batch", 1))
    steps = keys.repeats("step_scheduler.global_batch_size", local)
    if keys.field("pp", 1) > 1:
        steps = _pipeline(keys, local, steps)
    else:
        keys.read(*keys.matching("distributed.pipeline.*"))
    keys.give("micro_batches", steps, "step_scheduler.global_batch_size")


def _pipeline(keys: Keys, local: int, steps: int) -> int:
    """Read the pipeline's schedule, and return micro-batches of a step."""
    size = keys.whole("distributed.pipeline.pp_microbatch_size", 1) or 1
    if local % size:
        raise keys.error(f"a batch of {local} sequences, which pp_microbatch_size = {size} does not divide")
    keys.give("micro_batch", size, "distributed.pipeline.pp_microbatch_size")
    keys.read("distributed.pipeline.layers_per_stage", "distributed.pipeline.round_virtual_stages_to_pp_multiple")
    if keys.text("distributed.pipeline.pp_schedule", "1f1b") == "1f1b":
        keys.give("schedule", "1f1b", "distributed.pipeline.pp_schedule")
    elif "virtual_stages" in keys.asked:
        keys.read(*keys.matching("distributed.pipeline.*"))
    else:
        keys.refuse("distributed.pipeline.pp_schedule", "give --virtual-stages, which follows from the model's layers")
    return steps * (local // size)


def _adapters(keys: Keys) -> None:
    if not keys.some("peft.*"):
        return
    names = [str(name) for name in keys.listed("peft.target_modules")]
    if keys.on("peft.match_all_linear") or names in ([], ["*"], ["*_proj"]):
        targets = ["all-linear"]
    else:
        targets = [name.rpartition(".")[2].removeprefix("*") for name in names]
    came_from = ("peft.target_modules", "peft.match_all_linear")
    low_rank(keys, "peft.dim", 8, "peft.dropout", 0.0, "+".join(targets), *came_from)
    if keys.on("quantization.load_in_4bit"):
        double = "-double" * keys.on("quantization.bnb_4bit_use_double_quant")
        keys.give("base", f"nf4{double}", *keys.matching("quantization.*"))
    elif keys.on("quantization.load_in_8bit"):
        keys.give("base", "int8", *keys.matching("quantization.*"))


def _products(keys: Keys) -> None:
    if keys.on("fp8.enabled"):
        keys.give("fp8_recipe", keys.text("fp8.recipe_name", "tensorwise"), "fp8.enabled", "fp8.recipe_name")
        if keys.on("fp8.enable_fsdp_float8_all_gather"):
            keys.give("fp8_param_gather", True, "fp8.enable_fsdp_float8_all_gather")
        if keys.listed("fp8.filter_fqns") not in ([], ["lm_head"]):
            keys.refuse("fp8.filter_fqns", "expected lm_head: other exceptions from FP8 are not modelled")
    else:
        keys.read(*keys.matching("fp8.*"))
