"""The `Llama` of record as transformers has it: names of tensors, and configurations, in both directions."""

from __future__ import annotations

import re
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.models.reference import LlamaConfig

_PARTS: Final = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_ENDS: Final = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_FIXED: Final[dict[str, Any]] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
"""Settings of the reference code, by transformers' names."""


def hub_name(name: str) -> str:
    """Return transformers' name of a tensor of `Llama`."""
    module, _, leaf = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if layer is None:
        return f"{_ENDS[module]}.{leaf}"
    return f"model.layers.{layer[1]}.{_PARTS[layer[2]]}.{leaf}"


def reference_config(hub: Any) -> LlamaConfig:
    """Sizes out of a configuration of transformers.

    Raises:
        UsageError: it describes what the code of record does not do.
    """
    rope = dict(getattr(hub, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", 10000.0)
    values = {name: getattr(hub, name, None) for name in _FIXED} | {"rope_type": rope.pop("rope_type", "default")}
    wrong = [
        f"{name} {values[name]}, not {expected}"
        for name, expected in (_FIXED | {"rope_type": "default"}).items()
        if values[name] != expected
    ]
    if wrong:
        raise UsageError(
            f'model.code: the reference Llama cannot be this model: it has {"; ".join(wrong)}; set code = "huggingface"'
        )
    return LlamaConfig(
        layers=hub.num_hidden_layers,
        hidden=hub.hidden_size,
        heads=hub.num_attention_heads,
        kv_heads=hub.num_key_value_heads,
        head_dim=hub.head_dim,
        ffn=hub.intermediate_size,
        vocab=hub.vocab_size,
        rope_base=theta,
    )


def hub_values(config: LlamaConfig, *, positions: int) -> dict[str, Any]:
    """Return the values of its config.json."""
    return {
        **_FIXED,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "bos_token_id": None,
        "eos_token_id": None,
    }
