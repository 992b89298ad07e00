"""Where the code of transformers differs from family to family, beyond what a configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from jettison.spec.kernels import HUGGINGFACE, Kernels, kernels
from jettison.spec.model import ModelSpec

_CONVENTIONS: Final[Mapping[str, Callable[[Kernels], Kernels]]] = MappingProxyType(
    {
        "qwen3_moe": lambda k: replace(k, weights_float32=False),
        "deepseek_v2": lambda k: replace(k, router_float32=True, complex_rotary=True),
        "deepseek_v3": lambda k: replace(k, router_float32=True),
        "gpt_oss": lambda k: replace(
            k, scores_float32=False, wide_norm=True, paired_rotary=True, weights_float32=False
        ),
        "gpt2": lambda k: replace(k, scores_float32=False),
        "gpt_neox": lambda k: replace(k, joined_rotary=True),
        "gemma3_text": lambda k: replace(k, rotary_by_window=True, bidirectional_masks=True),
        "phi3": lambda k: replace(k, joined_rotary=True),
        "olmo2": lambda k: replace(k, wide_norm=True, wide_rotary=True),
        "olmo3": lambda k: replace(k, wide_norm=True, wide_rotary=True, rotary_by_window=True),
        "olmoe": lambda k: replace(k, weights_float32=False),
        "stablelm": lambda k: replace(k, joined_rotary=True),
        "bert": lambda k: replace(
            k, scores_float32=False, stored_positions=True, shifted_labels=False, loss_float32=False
        ),
    }
)
"""By ``model_type``; a family that is not here is as `HUGGINGFACE` says."""


def kernels_for(model: ModelSpec, name: str) -> Kernels:
    """The named set, as the code of this model's family has it.

    Raises:
        UsageError: no such set.
    """
    chosen = kernels(name)
    adjust = _CONVENTIONS.get(model.family)
    return adjust(chosen) if adjust is not None and name == HUGGINGFACE.name else chosen
