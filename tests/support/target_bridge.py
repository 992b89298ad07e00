"""Megatron-Bridge on what was exported: its parser of overrides, on the container that its recipes begin with.

Its packages import bridges to every model, Transformer Engine and loaders of images with them. Here their files are
found without that, and the container of recipes, its models' configurations and what validates both are its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from support.target_process import prepare, stand_in, without_init

prepare("megatron.energon", "PIL")
logging.disable(logging.WARNING)
BRIDGE = "megatron.bridge"
without_init(BRIDGE, *(f"{BRIDGE}.{name}" for name in ("models", "training", "peft", "recipes")))
without_init(*(f"{BRIDGE}.models.{name}" for name in ("conversion", "hf_pretrained", "hybrid", "gpt", "megatron_mimo")))

from megatron.bridge import models  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.models.mla_provider import MLAModelProvider  # noqa: E402
from megatron.bridge.models.t5_provider import T5ModelProvider  # noqa: E402

models.GPTModelProvider, models.T5ModelProvider = GPTModelProvider, T5ModelProvider
for name in (
    f"{BRIDGE}.peft.lora",
    "torch.utils.tensorboard.writer",
):  # they ask for Transformer Engine and TensorBoard
    sys.modules[name] = stand_in(name)

from megatron.bridge.recipes.common import _pretrain_common  # noqa: E402
from megatron.bridge.training.config import runtime_config_update  # noqa: E402
from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides  # noqa: E402


def configured(job: dict[str, Any]) -> dict[str, Any]:
    """What a recipe's configuration says after these overrides, or why they are not taken.

    Args:
        job: ``model``: what the recipe says of its model; ``overrides``: lines; ``world``: ranks.
    """
    os.environ |= {"WORLD_SIZE": str(job["world"]), "RANK": "0", "NVTE_CPU_OFFLOAD_V1": "1"}
    kind = MLAModelProvider if job["model"].get("multi_latent_attention") else GPTModelProvider
    config = _pretrain_common()
    config.model = kind(**job["model"])
    try:
        process_config_with_overrides(config, cli_overrides=job["overrides"])
        runtime_config_update(config)
    except (OverridesError, ValueError, AssertionError, TypeError) as error:
        return {"refused": str(error)}
    return {
        section: {name: value for name, value in vars(getattr(config, section)).items() if _plain(value)}
        for section in ("model", "train", "ddp", "optimizer", "dataset")
    }


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str | type(None)) or (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    )


def main() -> None:
    print(json.dumps([configured(job) for job in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
