"""What a configuration has that its closed form does not, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any, Final

from jettison.families.family import FAMILIES, Family
from jettison.spec.further import FURTHER_LEFT_OUT

TOWERS: Final = ("vision", "audio")
"""What may stand beside a text model."""
_OTHER_HEADS: Final = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForAudioClassification",
    "ForRewardModel",
    "ForProcessRewardModel",
    "ForEmbedding",
    "ForTextEncoding",
    "EncoderModel",
)
"""How names of classes end whose head is not the one that is described."""
_HEAD_APART: Final = (
    "published weights with tie_word_embeddings false have a head of their own, which a closed form counts and a trace "
    "does not: transformers builds none from the configuration alone"
)


OTHER_HEAD: Final = "architectures says "
LEFT_OUT_TOWER: Final = " is left out: "


def of_another_model(remark: str) -> bool:
    """Is it about a head or a tower, which the class that is built has and the described model has not?"""
    return remark.startswith((OTHER_HEAD, "the ")) and (OTHER_HEAD in remark or LEFT_OUT_TOWER in remark)


def left_out_of(outer: Mapping[str, Any], inner: Mapping[str, Any], family: Family) -> Iterator[str]:
    """What a configuration has that the text model does not, one remark each."""
    if family.images:
        if "vision_config" in outer:
            yield (
                f"the text tower{LEFT_OUT_TOWER}an image is classified, and no text is held against it; where "
                'architectures says "CLIPModel", both towers are counted'
            )
        return
    for key in (f"{tower}_config" for tower in TOWERS):
        tower = outer.get(key)
        if isinstance(tower, Mapping) and tower:
            about = _tower_parameters(tower)
            size = f"about {about / 1e6:.0f} million parameters" if about else "a size that it does not state"
            yield f"the {key.partition('_')[0]} tower ({size}){LEFT_OUT_TOWER}bytes and seconds are the text model's"
    if other := _other_head(outer, family):
        named = ". --trace builds the class that is named" if "For" in other else ""
        yield f"{OTHER_HEAD}{other}; what is described is the model with the head of its pre-training{named}"
    for remark in not_built(outer, inner):
        yield f"{remark}; --mtp-num-layers counts them" if FURTHER_LEFT_OUT in remark else remark


def not_built(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> Iterator[str]:
    """What a configuration has that the code of transformers does not build, one remark each."""
    further = inner.get("num_nextn_predict_layers") or inner.get("mtp_num_hidden_layers") or inner.get("mtp_num_layers")
    if isinstance(further, int) and further > 0:
        count = "a layer that predicts" if further == 1 else f"{further} layers that predict"
        yield f"{count} {FURTHER_LEFT_OUT}, as in the code of transformers"
    family = FAMILIES.get(str(inner.get("model_type")))
    if family and family.waveform and (chance := inner.get("layerdrop", family.defaults["layerdrop"])):
        yield (f"layerdrop {short(chance)} skips layers of a step at random; figures are of one that runs all of them")
    if family and family.tied_where_built and inner.get("tie_word_embeddings") is False:
        yield _HEAD_APART
    quantised = outer.get("quantization_config") or inner.get("quantization_config")
    if isinstance(quantised, Mapping) and quantised:
        method = quantised.get("quant_method", "a method that it does not name")
        yield f"quantization_config ({method}) is left out: weights are those of --precision"


def _other_head(outer: Mapping[str, Any], family: Family) -> str:
    """The class that the file names, where it ends in another head or in none, or is one stack of two; else empty."""
    names = outer.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names and isinstance(names[0], str) else ""
    bare = name.endswith("Model") and not name.endswith(("HeadModel", "HeadsModel"))
    alone = family.encoder_decoder and name.endswith("ForCausalLM")
    return name if bare or alone or name.endswith(_OTHER_HEADS) else ""


def _tower_parameters(tower: Mapping[str, Any]) -> int:
    """Of an encoder's layers: four projections of attention, and two of the feed-forward block or three where gated."""
    sizes = [tower.get(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers")]
    sizes[0] = sizes[0] or tower.get("embed_dim") or tower.get("width") or tower.get("d_model")
    sizes[2] = sizes[2] or tower.get("depth") or tower.get("encoder_layers")
    width, ffn, depth = (size if isinstance(size, int) and not isinstance(size, bool) else 0 for size in sizes)
    if not width or not depth:
        return 0
    ffn = ffn or 4 * width
    products = 3 if tower.get("hidden_act") in ("silu", "swish") else 2
    return depth * (4 * width * width + products * width * ffn)
