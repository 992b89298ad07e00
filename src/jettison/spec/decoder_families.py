"""Decoders whose blocks differ in more than a choice: what differs, one entry a ``model_type``; see `more_families`.

Some write their configuration in words of their own; `own_words` puts those into the usual ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.families import SIZES, DropoutKeys, Family
from jettison.spec.model import Activation, Arrangement, Norm, NormKind

_LAYER_NORM: Final = Norm(kind=NormKind.LAYER, bias=True)
_GPT2_SPELLING: Final = {
    "hidden_size": ("n_embd", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
    "intermediate_size": ("n_inner",),
    "hidden_act": ("activation_function",),
}
_GPT2: Final[dict[str, Any]] = {
    "intermediate_size": None,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_GPT2_DROPOUT: Final = DropoutKeys(embedding="embd_pdrop", attention="attn_pdrop", residual="resid_pdrop")
_ALL_BIASED: Final[dict[str, Any]] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}

DECODERS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "bloom": Family(
            norm=_LAYER_NORM,
            required=SIZES,
            spelling={
                "hidden_size": ("hidden_size", "n_embed"),
                "num_hidden_layers": ("n_layer", "num_hidden_layers"),
                "num_attention_heads": ("n_head", "num_attention_heads"),
                "max_position_embeddings": ("seq_length",),
            },
            defaults={
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            refused=("apply_residual_connection_post_layernorm", "slow_but_exact"),
            activation=Activation.GELU_TANH,  # one function of its own, which keeps its input
            gated=False,
            fused_qkv=True,
            alibi=True,
            start_norm=True,
            dropout=DropoutKeys(residual="hidden_dropout"),
            **_ALL_BIASED,
        ),
        "codegen": Family(
            norm=_LAYER_NORM,
            required=SIZES,
            spelling=_GPT2_SPELLING,
            defaults={**_GPT2, "rotary_dim": 64},
            arrangement=Arrangement.SHARED,
            gated=False,
            mlp_bias=True,
            fused_qkv=True,
            head_bias=True,
            rotary_key="rotary_dim",
            dropout=_GPT2_DROPOUT,
        ),
        "gpt_bigcode": Family(
            norm=_LAYER_NORM,
            required=SIZES,
            spelling=_GPT2_SPELLING,
            defaults={
                **_GPT2,
                "hidden_act": "gelu_pytorch_tanh",
                "max_position_embeddings": 1024,
                "tie_word_embeddings": True,
                "num_key_value_heads": None,
                "resid_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "attn_pdrop": 0.1,
            },
            gated=False,
            fused_qkv=True,
            rotary=False,
            dropout=_GPT2_DROPOUT,
            **_ALL_BIASED,
        ),
        "gpt_neo": Family(
            norm=_LAYER_NORM,
            required=SIZES,
            spelling={
                "num_hidden_layers": ("num_layers", "num_hidden_layers"),
                "num_attention_heads": ("num_heads", "num_attention_heads"),
                "hidden_act": ("activation_function",),
                "sliding_window": ("window_size",),
            },
            defaults={
                "intermediate_size": None,
                "hidden_act": "gelu_new",
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
                "layer_types": None,
                "sliding_window": 256,
                "resid_dropout": 0.0,
                "embed_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            gated=False,
            out_bias=True,
            mlp_bias=True,
            rotary=False,
            dropout=DropoutKeys(embedding="embed_dropout", residual="resid_dropout"),
        ),
        "gptj": Family(
            norm=_LAYER_NORM,
            required=SIZES,
            spelling=_GPT2_SPELLING,
            defaults={**_GPT2, "rotary_dim": 64},
            arrangement=Arrangement.SHARED,
            gated=False,
            mlp_bias=True,
            head_bias=True,
            rotary_key="rotary_dim",
            dropout=_GPT2_DROPOUT,
        ),
        "mpt": Family(
            norm=Norm(kind=NormKind.LAYER),
            required=SIZES,
            spelling={
                "hidden_size": ("d_model", "hidden_size"),
                "num_hidden_layers": ("n_layers", "num_hidden_layers"),
                "num_attention_heads": ("n_heads", "num_attention_heads"),
                "max_position_embeddings": ("max_seq_len",),
            },
            defaults={
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
                "attn_pdrop": 0.0,
                "clip_qkv": None,
            },
            activation=Activation.GELU,
            gated=False,
            fused_qkv=True,
            alibi=True,
            dropout=DropoutKeys(attention="attn_pdrop", residual="attn_pdrop"),
        ),
    }
)
"""By ``model_type``."""
