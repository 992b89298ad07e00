"""Reader of nanotron's YAML, whose ``model.model_config`` has a model's sizes by Hugging Face's names."""

from __future__ import annotations

import fnmatch
from typing import Final

from jettison.frameworks.run_file import Keys

_CONFIG: Final = "model.model_config."


def read(keys: Keys) -> None:
    """Read the model, the precision, and the defaults of ``ParallelismArgs``."""
    _model(keys)
    tensor, stages = keys.field("tp", 1), keys.field("pp", 1)
    if tensor > 1 and not keys.has("parallelism.tp_mode"):
        keys.give("sp", False)  # ALL_REDUCE
    elif tensor == 1:
        keys.drop("sp")
    if keys.field("sp") and not keys.on("parallelism.tp_recompute_allgather", True):
        keys.give("gathered_inputs", True, "parallelism.tp_recompute_allgather")
    if stages == 1:
        keys.drop("schedule")
    else:
        keys.give("stage_layers", "nanotron")
        if not keys.has("parallelism.pp_engine"):
            keys.give("schedule", "gpipe")  # AllForwardAllBackwardPipelineEngine
    if keys.said("precision") is None:  # ``optim/gradient_accumulator.py``: fp32 weights and gradients are added
        wide = keys.on("optimizer.accumulate_grad_in_fp32")
        came_from = ("model.dtype", "optimizer.accumulate_grad_in_fp32")
        keys.give("precision", "bf16-grad32" if wide else "bf16-pure", *came_from)
        keys.give("gradients", None if wide else "one-by-one", *came_from)
    if keys.text("optimizer.optimizer_factory.name", "adamw") in ("adamw", "adam"):
        fused = keys.on("optimizer.optimizer_factory.torch_adam_is_fused") or keys.on("optimizer.torch_adam_is_fused")
        keys.give("optimizer", "adamw" if fused else "adamw-foreach", "optimizer.optimizer_factory.torch_adam_is_fused")
    need = tensor * stages * keys.field("dp", 1) * keys.field("cp", 1)
    if keys.gpus and keys.gpus != need:
        keys.note(f"got --gpus {keys.gpus}, and its degrees make {need}: give --dp for others")
    keys.gpus = keys.gpus or need


def _model(keys: Keys) -> None:
    """Read the model's sizes; its code is ``models/llama.py``, which is modelled, or ``models/qwen.py``."""
    names = [name for name in keys.matching(f"{_CONFIG}*") if "vision" not in name]
    if keys.asked_model is not None or not keys.has(f"{_CONFIG}hidden_size"):
        keys.read(*names)
        return
    for glob, why in keys.table["refused"].items():
        for name in fnmatch.filter(names, glob):
            if keys.on(name):
                keys.refuse(name, why)
                keys.read(*names)
                return
    sizes = {name: keys.whole(f"{_CONFIG}{name}") for name in keys.table["sizes"]}
    if missing := [name for name in keys.table["sizes"] if name != "num_key_value_heads" and not sizes[name]]:
        raise keys.error(f"{_CONFIG}{missing[0]} is missing; expected a whole number")
    vocabulary, multiple = sizes["vocab_size"], keys.whole("model.make_vocab_size_divisible_by", 1)
    assert vocabulary is not None and multiple is not None
    multiple *= keys.field("tp", 1)
    keys.config = sizes | {
        "model_type": keys.table["model_type"],
        "hidden_act": keys.get(f"{_CONFIG}hidden_act", "silu"),
        "attention_bias": keys.on(f"{_CONFIG}attention_bias"),
        "tie_word_embeddings": keys.on(f"{_CONFIG}tie_word_embeddings"),
        "vocab_size": -(-vocabulary // multiple) * multiple,  # helpers.py, _vocab_size_with_padding
    }
    if every := keys.whole(f"{_CONFIG}no_rope_layer"):
        keys.config |= {"model_type": keys.table["without_rotation"], "no_rope_layer_interval": every}
