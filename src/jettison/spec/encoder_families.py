"""Encoders: text that is read both ways, and images; what differs, one entry a ``model_type``; see `more_families`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.biases import Biases
from jettison.spec.families import SIZES, DropoutKeys, Family
from jettison.spec.model import Arrangement, Norm, NormKind, Pooling
from jettison.spec.waves import NO_END

_LAYER_NORM: Final = Norm(kind=NormKind.LAYER, bias=True)
_IMAGES: Final[dict[str, Any]] = {
    "required": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "patches": True,
    "bidirectional": True,
    "gated": False,
    "out_bias": True,
    "mlp_bias": True,
    "head_bias": True,
    "rotary": False,
}
_PIXELS: Final = {"image_size": 224, "patch_size": 16, "num_channels": 3, "tie_word_embeddings": False}

_TWO_STACKS: Final[dict[str, Any]] = {
    "required": (*SIZES, "intermediate_size", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    "source": True,
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rotary": False,
    "refused": ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "add_cross_attention"),
    "dropout": DropoutKeys(embedding="dropout", residual="dropout"),
}
_DECODER_SPELLING: Final = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("decoder_layers",),
    "num_attention_heads": ("decoder_attention_heads",),
    "intermediate_size": ("decoder_ffn_dim",),
    "hidden_act": ("activation_function",),
}

_BART: Final = {
    "hidden_act": "gelu",
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
}

_RELATIVE: Final[dict[str, Any]] = {
    "norm": Norm(kind=NormKind.RMS),
    "required": (*_TWO_STACKS["required"], "head_dim"),
    "spelling": {
        "hidden_size": ("d_model",),
        "num_hidden_layers": ("num_decoder_layers", "num_layers"),
        "num_attention_heads": ("num_heads",),
        "intermediate_size": ("d_ff",),
        "head_dim": ("d_kv",),
        "encoder_layers": ("num_layers",),
        "encoder_attention_heads": ("num_heads",),
        "encoder_ffn_dim": ("d_ff",),
        "max_position_embeddings": ("n_positions",),
    },
    "source": True,
    "gated": False,
    "rotary": False,
    "refused": ("add_cross_attention",),
    "dropout": DropoutKeys(
        embedding="dropout_rate",
        attention="dropout_rate",
        residual="dropout_rate",
        inner="dropout_rate",
        output="dropout_rate",
    ),
}
_T5: Final = {
    "hidden_act": "relu",
    "max_position_embeddings": 512,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": True,
    "scale_decoder_outputs": False,
    "dropout_rate": 0.1,
}

HEARD: Final = ("hubert", "wav2vec2")
"""Those that hear sound as it was recorded."""
_HEARS: Final[dict[str, Any]] = {
    "norm": _LAYER_NORM,
    "required": (*SIZES, "intermediate_size"),
    "defaults": {
        "hidden_act": "gelu",
        "max_position_embeddings": NO_END,
        "conv_dim": (512,) * 7,
        "conv_kernel": (10, 3, 3, 3, 3, 2, 2),
        "conv_stride": (5, 2, 2, 2, 2, 2, 2),
        "conv_bias": False,
        "feat_extract_norm": "group",
        "feat_extract_activation": "gelu",
        "feat_proj_layer_norm": True,
        "num_conv_pos_embeddings": 128,
        "num_conv_pos_embedding_groups": 16,
        "apply_spec_augment": True,
        "mask_time_prob": 0.05,
        "mask_feature_prob": 0.0,
        "ctc_loss_reduction": "sum",
        "ctc_zero_infinity": False,
        "tie_word_embeddings": False,
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "final_dropout"), 0.1),
        "feat_proj_dropout": 0.0,
    },
    "waves": True,
    "bidirectional": True,
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "head_bias": True,
    "rotary": False,
    "refused": ("add_adapter", "adapter_attn_dim", "conv_pos_batch_norm"),
    "dropout": DropoutKeys(
        embedding="hidden_dropout",
        residual="hidden_dropout",
        projected="feat_proj_dropout",
        inner="activation_dropout",
        output="final_dropout",
    ),
}

CLIP_TEXTS: Final = Family(
    norm=_LAYER_NORM,
    defaults={
        "hidden_act": "quick_gelu",
        "max_position_embeddings": 77,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    gated=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    rotary=False,
)
"""The tower of texts beside ``clip_vision_model``: it has no loss of its own, and so no entry."""

ENCODERS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "bart": Family(
            norm=_LAYER_NORM,
            spelling=_DECODER_SPELLING,
            defaults=_BART,
            arrangement=Arrangement.OUTER,
            start_norm=True,
            more_positions=2,
            **_TWO_STACKS,
        ),
        "clip_vision_model": Family(
            norm=_LAYER_NORM,
            defaults={**_PIXELS, "patch_size": 32, "hidden_act": "quick_gelu", "attention_dropout": 0.0},
            patch_bias=False,
            qkv_bias=True,
            start_norm=True,
            pooling=Pooling.PATCHES,
            **_IMAGES,
        ),
        "hubert": Family(**_HEARS),
        "mbart": Family(
            norm=_LAYER_NORM,
            spelling=_DECODER_SPELLING,
            defaults=_BART,
            start_norm=True,
            more_positions=2,
            **_TWO_STACKS,
        ),
        "modernbert": Family(
            norm=Norm(kind=NormKind.LAYER),
            required=(*SIZES, "intermediate_size"),
            spelling={
                "hidden_act": ("hidden_activation",),
                "sliding_window": ("local_attention",),
                "sliding_window_pattern": ("global_attn_every_n_layers",),
            },
            defaults={
                "hidden_act": "gelu",
                "max_position_embeddings": 8192,
                "norm_bias": False,
                "attention_bias": False,
                "mlp_bias": False,
                "decoder_bias": True,
                "classifier_bias": False,
                "classifier_activation": "gelu",
                "layer_types": None,
                "sliding_window": 128,
                "sliding_window_pattern": 3,
                "tie_word_embeddings": True,
                "embedding_dropout": 0.0,
            },
            bidirectional=True,
            fused_qkv=True,
            fused_gate_up=True,
            full_first=True,
            half_window=True,
            start_norm=True,
            plain_first=True,
            masked_language_model=True,
            refused=("attention_dropout", "mlp_dropout", "sparse_prediction"),
            dropout=DropoutKeys(embedding="embedding_dropout", attention=None),
        ),
        "mt5": Family(defaults=_T5, biases=Biases.FIRST, **_RELATIVE),
        "t5": Family(defaults=_T5, biases=Biases.FIRST, **_RELATIVE),
        "umt5": Family(defaults=_T5, biases=Biases.OWN, **_RELATIVE),
        "vit": Family(
            norm=_LAYER_NORM,
            spelling={"attention_bias": ("qkv_bias",)},
            defaults={
                **_PIXELS,
                "hidden_act": "gelu",
                "head_dim": None,
                "attention_bias": True,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            pooling=Pooling.FIRST,
            dropout=DropoutKeys(
                embedding="hidden_dropout_prob",
                attention="attention_probs_dropout_prob",
                residual="hidden_dropout_prob",
            ),
            **_IMAGES,
        ),
        "wav2vec2": Family(**_HEARS),
        "whisper": Family(
            norm=_LAYER_NORM,
            spelling={**_DECODER_SPELLING, "max_position_embeddings": ("max_target_positions",)},
            defaults={
                "hidden_act": "gelu",
                "num_mel_bins": 80,
                "max_source_positions": 1500,
                "max_position_embeddings": 448,
                "tie_word_embeddings": True,
                "scale_embedding": False,
                "dropout": 0.0,
                "attention_dropout": 0.0,
            },
            sound=True,
            key_bias=False,
            **{**_TWO_STACKS, "refused": (*_TWO_STACKS["refused"], "scale_embedding", "apply_spec_augment")},
        ),
    }
)
"""By ``model_type``."""
ENCODER_WRAPPERS: Final[Mapping[str, str]] = MappingProxyType({"clip": "clip_vision_model"})
"""Two encoders beside each other: which one it is that a batch of images with classes runs."""
