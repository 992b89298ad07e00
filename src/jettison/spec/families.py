"""What each published architecture fixes in its code, and what its configuration may leave out.

One entry a ``model_type`` of Hugging Face's ``config.json``. ``defaults`` are those of the configuration classes of
transformers 5 (``models/*/configuration_*.py``): where a file says nothing, that is what the model gets. A key that
is neither required nor among the defaults is not read by the architecture, and so not by us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from jettison.spec.biases import Biases
from jettison.spec.model import Activation, Arrangement, Norm, NormKind, Pooling, QkNorm, Router

SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class ScanKind(StrEnum):
    """What carries a state along the sequence in layers without attention."""

    DELTA = "gated delta rule"  # Qwen3.5
    GROUPED_DELTA = "gated delta rule, projections by groups of heads"  # Qwen3-Next
    MAMBA2 = "state space duality"
    MAMBA1 = "selective state space"
    NORMED_MAMBA1 = "selective state space, what it selects by normalised"  # Jamba


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutKeys:
    """Which key holds the probability of each site; None: the code has no dropout there."""

    embedding: str | None = None
    attention: str | None = "attention_dropout"
    residual: str | None = None
    projected: str | None = None
    inner: str | None = None
    output: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """What the code of a mixture of experts fixes. ``width`` is the key of one expert's feed-forward width."""

    router: Router
    width: str = "moe_intermediate_size"
    normalised: bool = False  # weights of the chosen experts always sum to 1
    bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    correction_frozen: bool = False
    clamped_sum: bool = False
    weighted_inputs: bool = False
    shared_width: str | None = None  # the key of the shared experts' width, where it is none of one expert's
    shared_gate: bool = False
    shared_fused: bool = False  # their gate and up are one weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture.

    Args:
        required: keys without which a configuration says too little.
        defaults: keys that may be left out, and what they are then.
        spelling: how this family writes a key, where it does not write it as most do; the first is preferred.
        qkv_bias: fixed in code, as are the other choices here; where the configuration decides, ``attention_bias``
            or ``mlp_bias`` is among the defaults.
        refused: keys that may not be set: what the code does then is not described.
        patches: it reads images; ``pooling`` is what of them it classifies.
        rotary_keys: top-level keys that say which share of a head is rotated.
        scan: what layers have that are not of attention; ``layer_types`` says which. ``lone``: a layer is one block.
    """

    norm: Norm
    defaults: Mapping[str, Any]
    required: tuple[str, ...] = (*SIZES, "intermediate_size")
    refused: tuple[str, ...] = ()
    spelling: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arrangement: Arrangement = Arrangement.PRE
    activation: Activation | None = None
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    scaled_queries: bool = False
    scaled_where_plain: bool = False  # in layers without rotary positions alone
    rotary: bool = True
    rotary_key: str | None = None
    latent: bool = False
    sinks: bool = False
    alibi: bool = False
    gated_attention: bool = False  # what it returns is weighted by a part of the queries' product
    scan: ScanKind | None = None
    lone: bool = False
    floored_heads: bool = False  # where heads do not divide the hidden size, they are as wide as it has room for
    start_norm: bool = False  # the embedding ends with a norm
    plain_where_full: bool = False  # layers without a window have no rotary positions, where some have one: EXAONE 4
    experts: Experts | None = None
    embedding_scale: bool = False
    masked_language_model: bool = False
    head_bias: bool = False
    source: bool = False  # an encoder beside a decoder, whose sizes have names of their own
    sound: bool = False  # which reads a spectrum
    key_bias: bool = True
    waves: bool = False  # it hears sound as it was recorded
    patches: bool = False
    patch_bias: bool = True
    bidirectional: bool = False
    full_first: bool = False  # of a period of layers the first sees all, and not the last
    half_window: bool = False  # the configuration says how wide it is, both ways together
    pooling: Pooling = Pooling.NONE
    plain_first: bool = False  # and the first layer's attention therefore has none
    biases: Biases = Biases.NONE  # of scores, by distance
    more_positions: int = 0  # rows of learned positions beyond the longest sequence
    dropout: DropoutKeys = field(default_factory=DropoutKeys)


_LAYER_NORM: Final = Norm(kind=NormKind.LAYER, bias=True)
_RMS: Final = Norm(kind=NormKind.RMS)
_RMS_OFFSET: Final = Norm(kind=NormKind.RMS, offset=True)

_DECODER: Final[dict[str, Any]] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_LLAMA: Final = {**_DECODER, "max_position_embeddings": 2048, "attention_bias": False}
_MISTRAL: Final = {**_DECODER, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_WINDOWED_TAIL: Final = {  # layers from max_window_layers on see a window, once use_sliding_window is set
    "layer_types": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN: Final = {**_DECODER, "max_position_embeddings": 32768, "num_key_value_heads": 32}
_GEMMA: Final = {
    **_DECODER,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "max_position_embeddings": 8192,
}
_GEMMA_WINDOWED: Final = {**_GEMMA, "num_key_value_heads": 4, "layer_types": None, "sliding_window": 4096}
_GEMMA_SPELLING: Final = {"hidden_act": ("hidden_activation", "hidden_act")}
_LATENT_SIZES: Final = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERT_SIZES: Final = ("num_experts", "num_experts_per_tok")
_DEEPSEEK_REQUIRED: Final = (
    *SIZES,
    "intermediate_size",
    *_LATENT_SIZES,
    *_EXPERT_SIZES,
    "moe_intermediate_size",
    "n_shared_experts",
)
_DEEPSEEK_SPELLING: Final = {"num_experts": ("n_routed_experts", "num_experts", "num_local_experts")}
_DEEPSEEK: Final = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "moe_layer_freq": 1,
}

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "gpt2": Family(
            norm=_LAYER_NORM,
            required=SIZES,
            refused=("num_key_value_heads",),  # transformers' GPT-2 has no use for it
            spelling={
                "hidden_size": ("n_embd", "hidden_size"),
                "num_hidden_layers": ("n_layer", "num_hidden_layers"),
                "num_attention_heads": ("n_head", "num_attention_heads"),
                "max_position_embeddings": ("n_positions", "max_position_embeddings"),
                "intermediate_size": ("n_inner",),
                "hidden_act": ("activation_function",),
            },
            defaults={
                "intermediate_size": None,
                "hidden_act": "gelu_new",
                "max_position_embeddings": 1024,
                "tie_word_embeddings": True,
                "resid_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "attn_pdrop": 0.1,
            },
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            fused_qkv=True,
            rotary=False,
            dropout=DropoutKeys(embedding="embd_pdrop", attention="attn_pdrop", residual="resid_pdrop"),
        ),
        "gpt_neox": Family(
            norm=_LAYER_NORM,
            defaults={
                "hidden_act": "gelu",
                "max_position_embeddings": 2048,
                "tie_word_embeddings": False,
                "attention_bias": True,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "use_parallel_residual": True,
                "rotary_pct": 0.25,
            },
            gated=False,
            mlp_bias=True,
            fused_qkv=True,
            rotary_key="rotary_pct",
            dropout=DropoutKeys(embedding="hidden_dropout", residual="hidden_dropout"),
        ),
        "llama": Family(norm=_RMS, defaults={**_LLAMA, "mlp_bias": False}),
        "mistral": Family(norm=_RMS, defaults={**_MISTRAL, "sliding_window": 4096}),
        "mixtral": Family(
            norm=_RMS,
            required=(*SIZES, "intermediate_size", *_EXPERT_SIZES),
            spelling={"num_experts": ("num_local_experts", "num_experts")},
            defaults={**_MISTRAL, "sliding_window": None},
            experts=Experts(router=Router.SOFTMAX_TOPK, width="intermediate_size", normalised=True),
        ),
        "qwen2": Family(norm=_RMS, defaults={**_QWEN, **_WINDOWED_TAIL}, qkv_bias=True),
        "qwen3": Family(
            norm=_RMS,
            defaults={**_QWEN, **_WINDOWED_TAIL, "head_dim": 128, "attention_bias": False},
            qk_norm=QkNorm.HEAD,
        ),
        "qwen3_moe": Family(
            norm=_RMS,
            required=(*SIZES, "intermediate_size", *_EXPERT_SIZES, "moe_intermediate_size"),
            spelling={"num_experts": ("num_experts", "num_local_experts")},
            defaults={
                **_QWEN,
                "num_key_value_heads": 4,
                "attention_bias": False,
                "use_sliding_window": False,
                "sliding_window": 4096,
                "mlp_only_layers": None,
                "decoder_sparse_step": 1,
                "norm_topk_prob": False,
            },
            qk_norm=QkNorm.HEAD,
            experts=Experts(router=Router.SOFTMAX_TOPK),
        ),
        "deepseek_v2": Family(
            norm=_RMS,
            required=_DEEPSEEK_REQUIRED,
            spelling=_DEEPSEEK_SPELLING,
            defaults={
                **_DEEPSEEK,
                "max_position_embeddings": 2048,
                "mlp_bias": False,
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
                "topk_method": "greedy",
                "n_group": None,
                "topk_group": None,
            },
            latent=True,
            experts=Experts(router=Router.SOFTMAX_TOPK),
        ),
        "deepseek_v3": Family(
            norm=_RMS,
            required=_DEEPSEEK_REQUIRED,
            spelling=_DEEPSEEK_SPELLING,
            defaults={
                **_DEEPSEEK,
                "max_position_embeddings": 4096,
                "first_k_dense_replace": 3,
                "norm_topk_prob": True,
                "n_group": 8,
                "topk_group": 4,
            },
            latent=True,
            experts=Experts(router=Router.SIGMOID_GROUPS, correction_bias=True),
        ),
        "gemma": Family(norm=_RMS_OFFSET, defaults={**_GEMMA, "num_key_value_heads": 16}, embedding_scale=True),
        "gemma2": Family(
            norm=_RMS_OFFSET,
            spelling=_GEMMA_SPELLING,
            defaults={
                **_GEMMA_WINDOWED,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            arrangement=Arrangement.SANDWICH,
            embedding_scale=True,
        ),
        "gemma3_text": Family(
            norm=_RMS_OFFSET,
            # the published text_config of Gemma 3 4B leaves out both heads and vocabulary
            required=("hidden_size", "num_hidden_layers", "intermediate_size"),
            spelling=_GEMMA_SPELLING,
            defaults={
                **_GEMMA_WINDOWED,
                "num_attention_heads": 8,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
                "sliding_window_pattern": 6,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
            },
            arrangement=Arrangement.SANDWICH,
            qk_norm=QkNorm.HEAD,
            embedding_scale=True,
        ),
        "phi3": Family(
            norm=_RMS,
            defaults={
                **_DECODER,
                "max_position_embeddings": 4096,
                "sliding_window": None,
                "resid_pdrop": 0.0,
                "partial_rotary_factor": 1.0,
            },
            fused_qkv=True,
            fused_gate_up=True,
            rotary_key="partial_rotary_factor",
            dropout=DropoutKeys(residual="resid_pdrop"),
        ),
        "olmo2": Family(norm=_RMS, defaults=_LLAMA, arrangement=Arrangement.POST, qk_norm=QkNorm.WIDTH),
        "gpt_oss": Family(
            norm=_RMS,
            required=(*SIZES, "intermediate_size", *_EXPERT_SIZES),
            spelling={"num_experts": ("num_local_experts", "num_experts")},
            defaults={
                **_DECODER,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "max_position_embeddings": 131072,
                "attention_bias": True,
                "layer_types": None,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
            },
            activation=Activation.CLAMPED_SWIGLU,
            sinks=True,
            experts=Experts(
                router=Router.TOPK_SOFTMAX, width="intermediate_size", normalised=True, bias=True, router_bias=True
            ),
        ),
        "bert": Family(
            norm=_LAYER_NORM,
            defaults={
                "hidden_act": "gelu",
                "max_position_embeddings": 512,
                "type_vocab_size": 2,
                "tie_word_embeddings": True,
                "is_decoder": False,
                "hidden_dropout_prob": 0.1,
                "attention_probs_dropout_prob": 0.1,
            },
            arrangement=Arrangement.OUTER,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            rotary=False,
            masked_language_model=True,
            start_norm=True,
            head_bias=True,
            dropout=DropoutKeys(
                embedding="hidden_dropout_prob",
                attention="attention_probs_dropout_prob",
                residual="hidden_dropout_prob",
            ),
        ),
    }
)
"""By ``model_type``."""

WRAPPERS: Final[Mapping[str, str]] = MappingProxyType({"gemma3": "gemma3_text", "llava": "llama"})
"""Models around a language model: which one it is where their ``text_config`` does not say."""

ACTIVATIONS: Final[Mapping[str, Activation]] = MappingProxyType(
    {
        "gelu": Activation.GELU,
        "gelu_new": Activation.GELU_WRITTEN,
        "gelu_fast": Activation.GELU_FAST,
        "quick_gelu": Activation.GELU_QUICK,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "silu": Activation.SILU,
        "swish": Activation.SILU,
        "relu": Activation.RELU,
        "relu2": Activation.RELU_SQUARED,
    }
)
"""By the word that a configuration uses."""
