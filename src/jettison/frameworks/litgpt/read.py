"""Reader of litgpt's YAML for pretraining, full fine-tuning or LoRA, distinguished by their keys.

Read: litgpt 26857050 (June 2026). litgpt/pretrain.py: compiled, FSDP1 (HYBRID_SHARD), fused AdamW, no checkpointing;
litgpt/finetune/full.py: FSDP1 with a checkpoint per block; litgpt/finetune/lora.py: the same with FSDP2
(parallelize_fn), and the head in chunks whose 16-bit logits are all kept; litgpt/utils.py: chunked_cross_entropy,
instantiate_*_optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jettison.frameworks.run_file import Keys, models
from jettison.frameworks.trainer_keys import devices, low_rank, reduces_last


def read(keys: Keys) -> None:
    """Read the keys without a table form."""
    tuned, adapted = keys.has("checkpoint_dir"), keys.has("lora_r")
    config = _model(keys)
    count = devices(keys, "devices", "num_nodes", "1" if tuned else "auto")
    _batch(keys, count, tuned=tuned, config=config)
    if keys.field("precision") is None:
        keys.give("precision", "bf16-autocast")  # get_default_supported_precision
        keys.notes.append("the file has no precision: bf16-mixed is counted, the default on a GPU with bf16")
    keys.give("loss", "upcast" if keys.field("precision") == "bf16-autocast" else "chunked-output")
    if keys.field("optimizer") is None:
        packed = keys.field("base") is not None
        keys.give("optimizer", "adamw" if packed or not tuned else "adamw-foreach", "optimizer", "optimizer.class_path")
        if packed:
            keys.give("offload_optimizer", "bitsandbytes", "quantize")  # instantiate_bnb_optimizer: paged
    if adapted:
        _adapters(keys)
    else:
        keys.drop("base")
        keys.refuse("quantize", "full fine-tuning quantizes nothing")
    if tuned:
        keys.give("recompute", "full" if count > 1 else "none")
    else:
        keys.compile = True
    if count > 1:
        keys.give("zero", 3)
        keys.give("reshard_after_forward", "always")
        if adapted:
            keys.give("fsdp_wrap_layers_only", True)
            if keys.on("quantize"):
                keys.refuse("quantize", "litgpt rejects it on several GPUs")
        else:
            keys.give("fsdp_version", 1)
        nodes = keys.whole("num_nodes", 1) or 1
        if not tuned and nodes > 1:
            keys.give("zero_replicas", nodes, "num_nodes")
        if not adapted:  # fabric/plugins/precision/fsdp.py, ``mixed_precision_config``
            keys.give("reduce_dtype", "compute")
        # finetune/full.py and pretrain.py, ``fabric.no_backward_sync``
        reduces_last(keys, remedy="a loop without no_backward_sync", preset=False)


def _model(keys: Keys) -> Mapping[str, Any]:
    """Find the model, and return its sizes; empty if a file or a Hub id has them."""
    if keys.some("model_config.*"):
        keys.read("model_name")
        return _described(keys)
    key = "checkpoint_dir" if keys.has("checkpoint_dir") else "model_name"
    name = str(keys.get(key, "")).rstrip("/")
    sizes = models("litgpt")["models"].get(name.rpartition("/")[2].lower())
    if sizes is not None and not (keys.file.path.parent / name).is_dir():
        return keys.take_model(sizes, key)
    if name:
        keys.model = name.removeprefix("checkpoints/")
        keys.read(key, why=keys.model)
    return {}


def _described(keys: Keys) -> Mapping[str, Any]:
    """Read a `litgpt.Config` in the file, with Llama's blocks; its defaults (``litgpt/config.py``) are not Llama's."""
    prefix = "model_config."
    given = tuple(keys.matching(f"{prefix}*"))
    found = {name: keys.text(f"{prefix}{name}", usual) for name, (usual, _) in keys.table["blocks"].items()}
    unlike = [name for name, (_, wanted) in keys.table["blocks"].items() if found[name] != wanted]
    if unlike:
        shown = next((key for key in given if key.removeprefix(prefix) in unlike), given[0])
        blocks = ", ".join(f"{name} {found[name]}" for name in unlike)
        keys.refuse(shown, f"only Llama's blocks are read, and these have {blocks}; give the model's config.json")
    sizes = {ours: keys.whole(key, keys.table["usual_sizes"].get(ours)) for key, ours in keys.table["sizes"].items()}
    vocabulary = keys.whole("model_config.vocab_size", 50254) or 1
    multiple = keys.whole("model_config.padding_multiple", 512) or 1
    padded = keys.whole("model_config.padded_vocab_size") or -(-vocabulary // multiple) * multiple
    keys.read(*given)
    stated = {name: size for name, size in sizes.items() if size is not None}
    return keys.take_model(
        {"like": "llama2-7b", "num_key_value_heads": sizes["num_attention_heads"], **stated, "vocab_size": padded}
    )


def _batch(keys: Keys, count: int, *, tuned: bool, config: Mapping[str, Any]) -> None:
    micro = keys.whole("train.micro_batch_size", 1 if tuned else 4) or 1
    keys.give("micro_batch", micro, "train.micro_batch_size")
    micro = keys.field("micro_batch", micro)
    total = keys.whole("train.global_batch_size", 16 if tuned else 512) or 1
    steps = total // count // micro
    if not steps:
        expected = f"at least {micro} sequences for each of {count} devices"
        raise keys.error(f"got train.global_batch_size = {total}; expected {expected}")
    keys.give("micro_batches", steps, "train.global_batch_size")
    longest = config.get("max_position_embeddings")
    if tuned:
        keys.notes.append(
            "batches are padded to their longest sequence, at most train.max_seq_length: give --seq for shorter ones"
        )
    elif keys.field("seq") is None and longest is not None:
        keys.give("seq", longest)


def _adapters(keys: Keys) -> None:
    chosen = [module for end, (module, default) in keys.table["adapted"].items() if keys.on(f"lora_{end}", default)]
    came_from = (f"lora_{end}" for end in keys.table["adapted"])
    low_rank(keys, "lora_r", 8, "lora_dropout", 0.05, "+".join(chosen), *came_from)
