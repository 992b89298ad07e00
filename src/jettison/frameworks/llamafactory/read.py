"""Reader of LLaMA-Factory's YAML: a Trainer's arguments, with its own adapters, precision and checkpoints."""

from __future__ import annotations

from jettison.frameworks import trainer_keys as trainer
from jettison.frameworks.run_file import Keys
from jettison.frameworks.transformers.read import adapters


def read(keys: Keys) -> None:
    """Read the file, with defaults of ``hparams`` and of ``hparams/parser.py``."""
    if keys.form == "v1":
        _of_v1(keys)
        return
    trainer.follow(keys, "config_file", "accelerate", "accelerate.")
    stage = keys.text("stage", "sft")
    trainer.full_length(keys, packed=keys.on("packing", stage == "pt") or keys.on("neat_packing"))
    if not keys.on("create_new_adapter"):  # ``model/adapter.py``, ``_setup_lora_tuning``
        trainer.resumed(keys, "adapter_name_or_path")
    adapters(keys, trl=False)
    if stage == "dpo":  # ``train/trainer_utils.py``, ``create_ref_model``; ``get_batch_logps``, of whole logits
        keys.give("dropout", 0.0)
        frozen = None if keys.text("pref_loss") in ("orpo", "simpo") else "same,dtype=bf16"  # as the checkpoint is
        batch = "per_device_train_batch_size"
        trainer.preference(keys, batch, trainer.MICRO_BATCH, "stage", loss="upcast", reference=frozen)
    # ``model/model_utils/checkpointing.py``, ``prepare_model_for_training``
    on = not keys.on("disable_gradient_checkpointing")
    keys.give("recompute", "full" if on else "none", "disable_gradient_checkpointing")
    keys.read("gradient_checkpointing", "gradient_checkpointing_kwargs", why="disable_gradient_checkpointing counts")
    if keys.on("use_unsloth"):
        if keys.field("lora") is None:
            keys.refuse("use_unsloth", "it is modelled only with adapters")
        keys.give("like", "unsloth", "use_unsloth")
    if keys.on("use_unsloth_gc") and on:  # ``UnslothGradientCheckpointing``: a layer's input is offloaded to CPU
        keys.give("offload", True, "use_unsloth_gc")
    trainer.sharding(keys)
    # ``model/model_utils/checkpointing.py``, ``_get_gradient_checkpointing_kwargs``
    trainer.reentrant(keys, default=keys.on("use_reentrant_gc", True))
    trainer.optimizer(keys, "optim", "adamw")
    mixed = trainer.half(keys)
    # ``model/adapter.py``, ``init_adapter``: trained parameters are cast to fp32, unless pure_bf16; others have the
    # checkpoint's 16 bits, with or without autocast (``model/loader.py``, ``load_model``)
    pure = keys.on("pure_bf16")
    if pure and keys.field("lora"):
        keys.give("precision", "bf16-pure", "pure_bf16")
    else:
        trainer.precision(keys, weights="bf16" if pure or keys.field("lora") else "fp32", mixed=mixed)
    if not pure and keys.said("like") != "deepspeed" and keys.field("zero") != 3:
        why = "it casts them to fp32, and with the embedding all hidden states, which is not modelled: give pure_bf16"
        keys.refuse("lora_modules_to_save", why)
    trainer.replicas(keys)


def _of_v1(keys: Keys) -> None:
    """Read ``v1/config``: weights in the checkpoint's dtype, torch's AdamW, its own FSDP2."""
    on = keys.on("enable_activation_checkpointing", True)
    keys.give("recompute", "full" if on else "none", "enable_activation_checkpointing")
    adapters(keys, trl=False)
    way = keys.text("dist_config.name", "none")
    if way == "fsdp2":
        trainer.fsdp(keys, "dist_config.")
        keys.read("dist_config.name", why="FSDP2")
    elif way == "deepspeed" and (file := keys.named("dist_config.config_file")) is not None:
        keys.under("deepspeed", "deepspeed.", file)
        keys.read("dist_config.name", "dist_config.config_file", why="that file")
    if keys.field("optimizer") == "muon":
        keys.read(*keys.matching("optim_config.*"))
    trainer.optimizer(keys, "optim_config.name", "adamw-foreach")
    if keys.said("like") != "deepspeed" and keys.on("bf16", True):
        keys.give("precision", "bf16-autocast" if keys.field("lora") else "bf16-pure", "bf16")
    elif keys.said("like") != "deepspeed":
        keys.refuse("bf16", "matmuls in fp32 with 16-bit weights of a checkpoint are not modelled")
    keys.note("the file does not name the task, which is counted as sft, with every sequence at its maximum length")
    trainer.replicas(keys)
