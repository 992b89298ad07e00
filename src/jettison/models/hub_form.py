"""How a model is written for `from_pretrained`: names of tensors there, its config.json, and files that go with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from jettison.core.errors import UsageError
from jettison.models.llama_names import hub_name, hub_values
from jettison.models.reference import Llama

BESIDE: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template*",
    "generation_config.json",
)
"""Files of a pretrained model's folder that go with its weights: the tokenizer's, and how text is generated."""


@dataclass(frozen=True, kw_only=True)
class HubForm:
    """A model's Hub format, read before the model is sharded.

    Args:
        rename: what files call a tensor of the model.
        sizes: of every tensor of its state, by its name in the model; of names of one parameter, all.
        config: what config.json says, but for the dtype.
        source: the folder that the model came from, whose `BESIDE` are copied.
    """

    rename: Callable[[str], str]
    sizes: Mapping[str, torch.Size]
    config: Mapping[str, Any]
    source: Path | None

    def files_beside(self) -> list[Path]:
        """Those to copy."""
        if self.source is None:
            return []
        found = {file for pattern in BESIDE for file in self.source.glob(pattern) if file.is_file()}
        return sorted(found)


def hub_form(model: nn.Module, *, described: Path | None, source: Path | None, positions: int) -> HubForm:
    """Read the Hub format of a model that was just built.

    Args:
        described: the config.json that it was built from, or its folder.
        source: see `HubForm`.
        positions: the longest sequence, of a model that has no limit.

    Raises:
        UsageError: transformers has no such model.
    """
    rename: Callable[[str], str] = str
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if isinstance(model, Llama):
        config, rename = hub_values(model.config, positions=positions), hub_name
    elif type(model).__module__.startswith("transformers."):
        own: Any = model.config
        config = json.loads(own.to_json_string()) | {"architectures": [type(model).__name__]}
        config.pop("use_cache", None)  # switched off for training
    else:
        raise UsageError(
            f"export: transformers has no model like {type(model).__name__}; expected one of transformers', or the "
            'reference Llama. A GPT has to have code = "huggingface"'
        )
    if described is not None:
        file = described / "config.json" if described.is_dir() else described
        config = json.loads(file.read_text(encoding="utf-8"))
        config.setdefault("architectures", [type(model).__name__ if rename is str else "LlamaForCausalLM"])
    return HubForm(rename=rename, sizes=sizes, config=config, source=source)
