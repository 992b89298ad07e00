"""Layers that predict further tokens beside a model's own: what they are made of, and who builds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.kernels import Kernels, Loss
from jettison.spec.model import Arrangement, Attention, Layer, ModelSpec

FURTHER_LEFT_OUT: Final = "further tokens left out"
_WITHOUT_LOGITS: Final = (Loss.FUSED, Loss.CHUNKED, Loss.LISTED)


def with_further(model: ModelSpec, depths: int, kernels: Kernels, *, repeated: bool = False) -> ModelSpec:
    """The same with so many of them, each like the model's last layer (``get_gpt_mtp_block_spec``). Where layers are
    one block alone, each is attention and experts (``mtp_hybrid_override_pattern`` of Nemotron 3: ``*E``), which is
    what a layer of both is.

    Args:
        repeated: one layer's weights serve all depths (``mtp_use_repeated_layer``: in
            megatron/core/transformer/multi_token_prediction.py one layer is built, and called for each).

    Raises:
        UsageError: nobody builds them so.
    """
    if depths < 0:
        raise UsageError(f"got --mtp-num-layers {depths}; expected a whole number of 0 or more")
    if not depths:
        return model
    last = _pattern(model) or model.layers[-1]
    why = ""
    if kernels.name != "megatron":
        why = f"with --kernels {kernels.name}; Megatron-Core alone builds them: give --kernels megatron"
    elif kernels.loss in _WITHOUT_LOGITS:
        why = f"with --loss {kernels.loss}, which Megatron-Core has not; give vocab-parallel, native or te"
    elif not isinstance(last, Layer) or last.arrangement is not Arrangement.PRE or model.final_norm is None:
        why = f"and {model.name}, whose layers do not end in a sum and a norm behind all of them"
    elif last.lone or (last.scan is not None) or (not _pattern(model) and any(map(_mixes, model.described))):
        why = f"and {model.name}, whose layers are not all attention with a feed-forward block"
    elif model.learned_positions:
        why = f"and {model.name}, which has learned positions"
    if why:
        raise UsageError(f"got --mtp-num-layers {depths} {why}")
    assert isinstance(last, Layer)
    further = tuple(replace(last, ahead=ahead, repeats=repeated and ahead > 1) for ahead in range(1, depths + 1))
    stays = tuple(remark for remark in model.left_out if FURTHER_LEFT_OUT not in remark)
    return replace(model, layers=(*model.layers, *further), left_out=stays)


def _mixes(layer: Layer) -> bool:
    return layer.lone or layer.scan is not None


def _pattern(model: ModelSpec) -> Layer | None:
    """Attention and experts of a model whose layers are one of both alone, as one layer; None of any other."""
    if not all(layer.lone for layer in model.described):
        return None
    attention = [layer.attention for layer in model.described if isinstance(layer.attention, Attention)]
    experts = [layer for layer in model.described if layer.experts is not None]
    return replace(experts[-1], attention=attention[-1]) if attention and experts else None
