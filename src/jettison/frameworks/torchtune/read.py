"""Reader of YAML of torchtune's recipes.

Read: torchtune bd2a0fc7 (April 2026): recipes/full_finetune_distributed.py and lora_finetune_*.py (_setup_model),
torchtune/training/_distributed.py (shard_model: parameters outside of layers are the root's, and stay unsharded),
torchtune/training/quantization.py (convert_to_float8_training), torchtune/modules/peft/lora.py.
"""

from __future__ import annotations

from jettison.frameworks.run_file import Keys, models
from jettison.frameworks.trainer_keys import layer_checkpoints, low_rank


def read(keys: Keys) -> None:
    """Read the keys without a table form."""
    builder = _model(keys)
    _layout(keys)
    _sequence(keys)
    if keys.on("enable_activation_checkpointing"):
        keys.give("recompute", "full", "enable_activation_checkpointing")
    else:
        layer_checkpoints(keys, "ac_mode", "ac_option", "none")
    _adapters(keys, builder)
    _loss(keys)
    if "optimizer" not in keys.asked and keys.field("optimizer") is None:
        alone = keys.on("optimizer_in_bwd") or keys.field("offload_optimizer") is not None
        alone = alone or not keys.on("optimizer.foreach", True)
        if alone and not keys.on("optimizer.fused"):
            keys.notes.append("temporary copies of one parameter in an unfused step are not counted")
        fused = alone or keys.on("optimizer.fused")
        keys.give("optimizer", "adamw" if fused else "adamw-foreach", "optimizer.fused", "optimizer.foreach")
    if keys.on("enable_fp8_training"):
        recipe = keys.get("fp8_recipe_name")
        keys.give("fp8_recipe", str(recipe or "tensorwise"), "fp8_recipe_name", "enable_fp8_training")
        if recipe is None:
            keys.give("fp8_param_gather", True)
    if keys.get("compile", False) is True or keys.on("compile.model"):
        keys.compiles("compile")


def _model(keys: Keys) -> str:
    """Find the model, and return its builder's name."""
    key = "model._component_"
    builder = str(keys.get(key, "")).rpartition(".")[2]
    plain = builder.removeprefix("q").removeprefix("lora_") if "lora_" in builder else builder
    table = models("torchtune")
    known = (sizes for name, sizes in table["models"].items() if plain in (name, f"{name}_base", f"{name}_instruct"))
    sizes = next(known, None)
    given = {ours: keys.get(key) for key, ours in keys.table["sizes"].items() if keys.has(key)}
    if sizes is None and "hidden_size" in given:
        sizes = table["builders"].get(plain)
    if sizes is not None:
        width = given.get("hidden_size")
        if isinstance(width, int) and "intermediate_size" not in {**sizes, **given}:  # ``scale_hidden_dim_for_mlp``
            given["intermediate_size"] = -(-4 * (2 * width // 3) // 256) * 256
        keys.take_model({**sizes, **given}, key)
    else:
        keys.notes.append(f"the sizes of torchtune's {builder or 'model'} are unknown; give the model by name")
    return builder


def _layout(keys: Keys) -> None:
    if keys.gpus is None and "single_device" in keys.file.path.stem:
        keys.gpus = 1
    if keys.field("cp", 1) > 1 and keys.field("cp_comm_type") is None:
        keys.give("cp_comm_type", "gather")
    replicas, shards = keys.shards("data_parallel_replicate_dim", "data_parallel_shard_dim", "tp", "cp")
    keys.give("dp", replicas * shards, "data_parallel_shard_dim", "data_parallel_replicate_dim")
    if keys.gpus is None:
        keys.gpus = replicas * shards * keys.field("tp", 1) * keys.field("cp", 1)
    if keys.field("dp", 1) * keys.field("cp", 1) > 1:
        keys.give("zero", 3)
        reshard = keys.on("fsdp_reshard_after_forward", True)
        keys.give("reshard_after_forward", "always" if reshard else "never", "fsdp_reshard_after_forward")
        wrapped = "memory_efficient_fsdp_wrap"  # of v0.2 (July 2024) and before, with FSDP1
        if keys.has(wrapped) and not keys.has("custom_sharded_layers"):
            keys.give("fsdp_version", 1, wrapped)
            if keys.on(wrapped):
                keys.notes.append("embedding and head are FSDP units of their own, but counted in the root's unit")
            if keys.on("fsdp_cpu_offload"):
                keys.refuse("fsdp_cpu_offload", "CPU offload of parameters with FSDP1 is not modelled")
        elif not set(map(str, keys.listed("custom_sharded_layers"))) >= {"tok_embeddings", "output"}:
            keys.give("fsdp_wrap_layers_only", True, "custom_sharded_layers")
        if replicas > 1:
            keys.give("zero_replicas", replicas, "data_parallel_replicate_dim")
        for key in filter(keys.on, ("fsdp_cpu_offload", "fsdp.cpu_offload")):
            keys.give("offload_optimizer", "fsdp2", key)


def _sequence(keys: Keys) -> None:
    longest = next(filter(keys.has, keys.table["first"]["seq"]), None)
    if longest is not None and not keys.on("dataset.packed"):
        keys.note(f"batches are padded to their longest sequence, at most {longest}: give --seq for shorter ones")


def _adapters(keys: Keys, builder: str) -> None:
    modules = [str(name).replace("output_proj", "o_proj") for name in keys.listed("model.lora_attn_modules")]
    mlp = keys.on("model.apply_lora_to_mlp")
    if not builder.removeprefix("q").startswith("lora_"):
        return
    targets = "+".join([*modules, *("gate_proj", "down_proj", "up_proj")[: 3 * mlp]])
    came_from = ("model.lora_attn_modules", "model.apply_lora_to_mlp")
    low_rank(keys, "model.lora_rank", 8, "model.lora_dropout", 0.0, targets, *came_from)
    if builder.startswith("qlora_") or keys.on("model.quantize_base"):
        keys.give("base", "nf4-double", "model._component_", "model.quantize_base")  # torchao's NF4Tensor


def _loss(keys: Keys) -> None:
    """Read the loss. A chunked one keeps fp32 log-probabilities, or if compiled the logits of all chunks."""
    key = "loss._component_"
    chunked = keys.text(key).endswith(("cewithchunkedoutputloss", "linearcrossentropyloss"))
    compiled = keys.on("compile") or keys.on("compile.loss")
    keys.give("loss", "chunked-output" if chunked and compiled else "upcast", key)
    if chunked and not compiled:
        keys.note("logits are cast to fp32 in chunks, but counted as cast at once: an upper bound of the head's peak")
