"""Where the code of transformers differs from family to family, beyond what a configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from jettison.errors import UsageError
from jettison.spec.kernels import LIGER, NANOTRON, AttentionKernel, Kernels, Scans, kernels
from jettison.spec.mixers import Mamba1
from jettison.spec.model import ModelSpec

_EXPERTS_FIRST: Final = ("attention.", "attention.query_norm.", "attention.key_norm.", "mlp.experts.", "mlp.")
_LATENT: Final = ("attention.", "mlp.experts.", "mlp.")
_SCANNED: Final = ("attention_norm.", "mixer.convolution.")


def _plain_softmax(k: Kernels) -> Kernels:
    """In the dtype of scores, and it stays so."""
    return replace(k, scores_float32=False, uncast_probabilities=True)


def _bert(k: Kernels) -> Kernels:
    """modeling_bert.py, BertSelfOutput.forward, BertOutput.forward: hidden_states, input_tensor."""
    return replace(
        _plain_softmax(k), named_blocks=True, stored_positions=True, shifted_labels=False, loss_float32=False
    )


def _roberta(k: Kernels) -> Kernels:
    return replace(_bert(k), stored_positions=False, batched_positions=True)


def _bart(k: Kernels) -> Kernels:
    return replace(_plain_softmax(k), shifted_labels=False, loss_float32=False)


def _t5(k: Kernels) -> Kernels:
    return replace(_bart(k), unwidened_norm=True, widened_down=True)


def _tower(k: Kernels) -> Kernels:
    return replace(k, shifted_labels=False, loss_float32=False)


def _eager(k: Kernels) -> Kernels:
    """Its code knows no other."""
    return replace(k, attention=AttentionKernel.EAGER)


def _gptj(k: Kernels) -> Kernels:
    return replace(_eager(k), wide_scores=True, spread_rotary=True, rotary_apiece=True)


_CONVENTIONS: Final[Mapping[str, Callable[[Kernels], Kernels]]] = MappingProxyType(
    {
        "qwen3": lambda k: replace(k, inline_norms=True),
        "qwen3_moe": lambda k: replace(k, declared=_EXPERTS_FIRST, inline_norms=True, weights_float32=False),
        "deepseek_v2": lambda k: replace(k, declared=_LATENT, router_float32=True, complex_rotary=True),
        "deepseek_v3": lambda k: replace(k, declared=_LATENT, router_float32=True),
        "gpt_oss": lambda k: replace(_plain_softmax(k), wide_norm=True, paired_rotary=True, weights_float32=False),
        # modeling_gpt2.py, GPT2Block.forward: attn_output; GPT2Model.forward: inputs_embeds, position_embeds
        "gpt2": lambda k: replace(
            k, split_projections=True, scores_float32=False, named_attention=True, named_embeddings=True
        ),
        "gpt_bigcode": lambda k: replace(k, split_projections=True),
        "gpt_neox": lambda k: replace(k, declared=(), split_projections=True, joined_rotary=True),
        "gemma3_text": lambda k: replace(k, rotary_by_window=True, bidirectional_masks=True),
        "phi3": lambda k: replace(k, declared=("attention.out.", *k.declared), joined_rotary=True),
        "olmo2": lambda k: replace(k, inline_norms=True, wide_norm=True, wide_rotary=True),
        "olmo3": lambda k: replace(k, inline_norms=True, wide_norm=True, wide_rotary=True, rotary_by_window=True),
        "olmoe": lambda k: replace(k, inline_norms=True, weights_float32=False),
        "cohere": lambda k: replace(k, written_layer_norm=True, cast_weights=True),
        "cohere2": lambda k: replace(k, written_layer_norm=True, cast_weights=True),
        "ernie4_5": lambda k: replace(k, spread_rotary=True, wide_rotary=True),
        "flex_olmo": lambda k: replace(k, inline_norms=True, wide_norm=True, wide_rotary=True, weights_float32=False),
        "glm": lambda k: replace(k, spread_rotary=True, joined_rotary=True),
        "glm4": lambda k: replace(k, spread_rotary=True, joined_rotary=True),
        "granitemoe": lambda k: replace(k, weights_float32=False, softmax_float32=True),
        "granitemoeshared": lambda k: replace(k, weights_float32=False, softmax_float32=True),
        "helium": lambda k: replace(k, wide_norm=True, cast_weights=True, spread_rotary=True),
        "minimax_m2": lambda k: replace(k, inline_norms=True, joined_rotary=True),
        "modernbert": lambda k: replace(
            k, declared=(), narrow_tables=True, rotary_by_window=True, shifted_labels=False
        ),
        "nemotron": lambda k: replace(k, joined_rotary=True),
        "olmo": lambda k: replace(k, wide_norm=True, wide_rotary=True),
        "opt": lambda k: replace(k, batched_positions=True),
        "phi": lambda k: replace(k, joined_rotary=True),
        "qwen2_vl_text": lambda k: replace(k, batched_rotary=True),
        "qwen2_5_vl_text": lambda k: replace(k, batched_rotary=True),
        "qwen3_vl_text": lambda k: replace(k, inline_norms=True, batched_rotary=True),
        "qwen3_vl_moe_text": lambda k: replace(
            k, declared=_EXPERTS_FIRST, inline_norms=True, batched_rotary=True, weights_float32=False
        ),
        "jamba": lambda k: replace(k, weights_float32=False, softmax_float32=True),
        "mamba": lambda k: replace(k, declared=_SCANNED),
        "mamba2": lambda k: replace(k, declared=_SCANNED),
        "nemotron_h": lambda k: replace(k, declared=_SCANNED, wide_norm=True, cast_weights=True, router_float32=True),
        "qwen3_next": lambda k: replace(k, inline_norms=True, joined_rotary=True, weights_float32=False),
        "qwen3_5_text": lambda k: replace(k, inline_norms=True, joined_rotary=True, batched_rotary=True),
        "qwen3_5_moe_text": lambda k: replace(
            k, inline_norms=True, joined_rotary=True, batched_rotary=True, weights_float32=False
        ),
        "qwen2_moe": lambda k: replace(k, weights_float32=False),
        "stablelm": lambda k: replace(k, joined_rotary=True),
        # modeling_bart.py, BartForConditionalGeneration.forward: final_logits_bias
        "bart": lambda k: replace(_bart(k), biased_logits=True),
        "mbart": lambda k: replace(_bart(k), biased_logits=True),
        "hubert": _plain_softmax,
        "mt5": _t5,
        "t5": _t5,
        "umt5": _t5,
        "wav2vec2": _plain_softmax,
        "whisper": lambda k: replace(_bart(k), batched_positions=True, copied_heads=True),
        "vit": _tower,
        "clip": lambda k: replace(_tower(k), stored_positions=True),
        "clip_vision_model": _tower,
        "biogpt": _plain_softmax,
        "bloom": lambda k: replace(_eager(k), gelu_function=True),
        "codegen": lambda k: replace(_gptj(k), split_projections=True, wide_rotary=True),
        "gpt_neo": lambda k: replace(_eager(k), wide_scores=True),
        "falcon": lambda k: replace(k, scores_float32=False, indexed_kv=True, made_masks=True, biases_apart=True),
        "gptj": _gptj,
        "dbrx": lambda k: replace(k, split_projections=True, looped_experts=True, narrow_routers=True),
        "dots1": lambda k: replace(k, declared=_EXPERTS_FIRST, inline_norms=True, router_float32=True),
        "ernie4_5_moe": lambda k: replace(
            k, spread_rotary=True, wide_rotary=True, wide_routers=True, routers_apart=True, weights_float32=False
        ),
        "glm4_moe": lambda k: replace(k, declared=_EXPERTS_FIRST, router_float32=True, joined_rotary=True),
        "hunyuan_v1_dense": lambda k: replace(k, late_norms=True),
        "hunyuan_v1_moe": lambda k: replace(k, wide_routers=True, late_norms=True),
        "llama4_text": lambda k: replace(
            _plain_softmax(k), declared=_LATENT, complex_rotary=True, wide_positions=True, every_token=True
        ),
        "phimoe": lambda k: replace(k, weights_float32=False),
        "mpt": lambda k: replace(_eager(k), split_projections=True, filled_masks=True),
        "bert": _bert,
        "camembert": _roberta,
        "roberta": _roberta,
        "xlm-roberta": _roberta,
    }
)
"""By ``model_type``; a family that is not here is as `HUGGINGFACE` says."""
_PATCHED: Final = frozenset(("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"))
"""Those of Liger-Kernel's list (``monkey_patch.py``, ``MODEL_TYPE_TO_APPLY_LIGER_FN``) that are tested."""


def kernels_for(model: ModelSpec, name: str) -> Kernels:
    """The named set, as the code of this model's family has it.

    Raises:
        UsageError: no such set, or Liger's or nanotron's for a family that it is not described for.
    """
    chosen = kernels(name)
    if chosen is LIGER and model.family not in _PATCHED:
        raise UsageError(
            f"got --kernels liger for {model.name} ({model.family}); they are described for "
            f"{', '.join(sorted(_PATCHED))}: give --kernels huggingface, or the code that does run, before any --like"
        )
    if chosen is NANOTRON and model.family != "llama":
        raise UsageError(
            f"got --kernels nanotron for {model.name} ({model.family}); its models/llama.py alone is described: give "
            "--kernels pytorch, before any --like"
        )
    adjust = _CONVENTIONS.get(model.family)
    if adjust is None or not chosen.of_transformers:
        return chosen
    return (
        replace(adjust(chosen), joined_rotary=False) if chosen is LIGER else adjust(chosen)
    )  # its kernel joins nothing


def check_scans(model: ModelSpec, kernels: Kernels) -> None:
    """Has the model scans, and are they described so?

    Raises:
        UsageError: no.
    """
    scans = [layer.scan for layer in model.described if layer.scan is not None]
    if not scans:
        raise UsageError(f"got --scans {kernels.scans}; no layer of {model.name} carries a state: leave it away")
    if kernels.scans is Scans.FUSED and any(isinstance(scan, Mamba1) for scan in scans):
        raise UsageError(
            f"got --scans fused; what mamba-ssm keeps of the selective scan of {model.name} is not described: written"
        )
