"""Reader of scripts with Unsloth's loaders: what its loaders and its adapters set by default."""

from __future__ import annotations

import re

from jettison.frameworks import trainer_keys as trainer
from jettison.frameworks.run_file import Keys
from jettison.frameworks.transformers.read import others, preference


def read(keys: Keys) -> None:
    """Read the arguments of a model, its adapters and a trainer."""
    if keys.model is not None:  # names of its own copies, whose weights are packed in advance
        keys.model = re.sub(r"(-unsloth)?-bnb-4bit$", "", keys.model)
    if keys.some("$*FastVisionModel*"):
        keys.note("images are not counted")
    if keys.some("$*.get_peft_model"):
        targets = trainer.targets(keys, "peft.target_modules", "all-linear")
        trainer.low_rank(keys, "peft.r", 16, "peft.lora_dropout", 0.0, targets, "peft.target_modules")
        if keys.on("model.load_in_4bit", True):  # ``llama.py``, ``BitsAndBytesConfig``
            keys.give("base", "nf4-double", "model.load_in_4bit")
    else:
        keys.values["get_peft_model"] = True
        keys.refuse("get_peft_model", "only adapters are modelled with its kernels")
    others(keys)
    if keys.some("$DPO[CT]*"):
        preference(keys)
    trainer.full_length(keys, packed=keys.on("packing"))
    trainer.optimizer(keys, "optim", "adamw")
    trainer.replicas(keys)
