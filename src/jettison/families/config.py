"""From a Hugging Face ``config.json`` to a `ModelSpec`: the text model alone, without torch or transformers.

Fixed values of the architecture come from `families`, the rest from the file. Sizes must be in the file; other keys
fall back on the architecture's defaults. Vision towers, multi-token prediction (MTP) layers and quantised weights are
left out, and listed in `ModelSpec.left_out`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Final

from jettison.core.dtypes import DTYPE_BYTES
from jettison.core.errors import NotDescribed, UsageError
from jettison.families.config_layers import layers_of, source, stacks
from jettison.families.config_values import TRACE, ConfigFields, read, unstated
from jettison.families.family import FAMILIES, PAIRS, WRAPPERS, Family
from jettison.spec.fine_tuning import FP8_BLOCK, GPTQ_GROUP, Base
from jettison.spec.model import Arrangement, Audio, DropoutSites, Head, Layer, ModelSpec, Pair, Patches
from jettison.spec.model_variants import MTP_LEFT_OUT

_TRACE_IT: Final = TRACE[0].upper() + TRACE[1:]
_IN_LAYERS: Final = re.compile(r"^(?!.*(?:vision|visual|audio)).*(?:\.\d+|_proj|mlp|attn|attention|fc\d)$")
"""Names of layers' quantizable modules; heads, norms and routers keep 16 bits anyway, towers are left out."""
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
_FLOATS: Final = tuple(name for name in DTYPE_BYTES if "float" in name)


def read_config(path: Path | str) -> ModelSpec:
    """Read a ``config.json``, as a file or its folder, after which the model is named. Raise `UsageError` if there is
    none, it is no JSON object, or `parse_config` refuses it.
    """
    values, name = read_values(Path(path))
    return parse_config(values, name=name)


def read_values(path: Path) -> tuple[Any, str]:
    """Return a ``config.json``'s values, as a file or its folder, and the model's name. `UsageError` if none."""
    file = path / "config.json" if path.is_dir() else path
    name = file.absolute().parent.name if file.name == "config.json" else file.stem
    try:
        return json.loads(file.read_text(encoding="utf-8")), name or "model"
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise UsageError(f"got {str(file)!r}; expected a config.json or its folder: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {' '.join(str(error).split())}") from error


def parse_config(values: Mapping[str, Any], *, name: str) -> ModelSpec:
    """Make a model from a decoded ``config.json``, or its ``text_config``. Raise `UsageError` for an unknown
    architecture, missing sizes, or an invalid value, named by its key.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{name}: got {short(values)}; expected an object with a model_type, as config.json has")
    pair, named = PAIRS.get(str(values.get("model_type"))), values.get("architectures")
    if pair is not None and isinstance(named, list | tuple) and pair.pair["named"] in named:
        return _pair(values, pair, name)
    outer = values
    kind, values = _language_model(values, name)
    stated = values
    try:
        family, values = read(FAMILIES[kind], values, name)
        fields = ConfigFields(name=name, family=family, values=values)
        fields.check_complete()
        model = _model(fields, kind)
    except UsageError as error:
        note = unstated(str(error), stated)
        if not note:
            raise
        raise type(error)(f"{error}. {note}") from error
    base, _ = _quantization(outer, values)
    return replace(model, base=base, left_out=tuple(left_out_of(outer, values, fields.family)))


def _pair(values: Mapping[str, Any], family: Family, name: str) -> ModelSpec:
    """Both towers of a configuration, the image tower first, like an encoder."""
    parts = [values.get(key) or {} for key in ("text_config", "vision_config")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise UsageError(f"{name}: got {short(parts)} for text_config and vision_config; expected two objects")
    tower = family.pair["images"]
    texts = ConfigFields(name=name, family=family, values=_inherit(parts[0], values))
    sizes = {**family.pair["sizes"], **parts[1]}
    images = ConfigFields(name=name, family=FAMILIES[tower], values=_inherit(sizes, values))
    for fields in (texts, images):
        fields.check_complete()
    text, image, width = _model(texts, values["model_type"]), _model(images, tower), values.get("projection_dim", 512)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise UsageError(f"{name}: got projection_dim {width!r}; expected a whole number of 1 or more")
    first = tuple(replace(layer, source=True) for layer in image.layers if isinstance(layer, Layer))
    return replace(text, layers=(*first, *text.layers), pair=Pair(images=image, width=width))


def _language_model(values: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any]]:
    """The model_type and the values of the language model, which may be nested in ``text_config``."""
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind, values
    default = WRAPPERS.get(kind) if isinstance(kind, str) else None
    part = "text_config" if default is None or not FAMILIES[default].images else "vision_config"
    inner = values.get(part)
    if isinstance(inner, Mapping):
        kind = inner.get("model_type") or default or kind
        if isinstance(kind, str) and kind in FAMILIES:
            return kind, _inherit(inner, values)
    elif default is not None and inner is None and "vision_config" in values and "hidden_size" in values:
        return default, values  # as in early files of Qwen2-VL
    elif default is not None:
        raise UsageError(f"{name}: got {part} {short(inner)}; expected the object that {kind} keeps it in")
    got, refused = ("no model_type", UsageError) if kind is None else (f"the model_type {short(kind)}", NotDescribed)
    raise refused(
        f"{name}: got {got}, which has no closed form; --model-type takes a similar one that has "
        f"(docs/architectures.md). {_TRACE_IT}"
    )


def _inherit(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inner configuration with keys of the outer one that apply: the wrapper owns the head and ties embeddings."""
    merged = dict(inner)
    for key in ("tie_word_embeddings", "num_labels", "id2label"):
        if outer.get(key) is not None:
            merged[key] = outer[key]
    if all(inner.get(key) is None for key in _DTYPE_KEYS):
        merged.update({key: outer[key] for key in _DTYPE_KEYS if key in outer})
    return merged


def _model(fields: ConfigFields, kind: str) -> ModelSpec:
    family = fields.family
    norm = replace(family.norm, bias=fields.flag("norm_bias")) if fields.knows("norm_bias") else family.norm
    layers = layers_of(fields, norm)
    if family.encoder_decoder:
        layers = stacks(fields, layers)
    sites, dropout = _dropout(fields)
    masked = family.masked_language_model
    transform = "classifier_activation" if fields.knows("classifier_activation") else "hidden_act"
    patches = _patches(fields) if family.images else None
    positions = fields.size("max_position_embeddings") if patches is None else patches.tokens
    others = family.rotary or family.alibi or family.waveform or family.scan or family.position_biases.made
    return ModelSpec(
        name=fields.name,
        family=kind,
        hidden=fields.size("hidden_size"),
        vocab=fields.size("vocab_size") if patches is None else _classes(fields),
        patches=patches,
        source=source(fields) if family.encoder_decoder else None,
        audio=_audio(fields) if family.waveform else None,
        layers=layers,
        final_norm=None if family.arrangement is Arrangement.OUTER else norm,
        max_positions=positions,
        learned_positions=not others if family.learned_positions is None else family.learned_positions,
        position_rows=positions + family.position_offset if family.position_offset else 0,
        token_types=fields.size("type_vocab_size") if fields.knows("type_vocab_size") else 0,
        embedding_norm=norm if family.embedding_norm else None,
        embedding_scale=family.embedding_scale or (family.encoder_decoder and fields.flag("scale_embedding")),
        fp32_residual=fields.flag("residual_in_fp32"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        head=Head(
            bias=family.head_bias or fields.flag("decoder_bias") or fields.flag("lm_head_bias"),
            transform=fields.activation(transform) if masked else None,
            transform_bias=not fields.knows("classifier_bias") or fields.flag("classifier_bias"),
            pooling=family.pooling,
            scaled=family.scaled_head or fields.flag("scale_decoder_outputs"),
            softcap=bool(fields.number("final_logit_softcapping")),
        ),
        dropout_sites=sites,
        dropout=dropout,
        dtype=_dtype(fields),
    )


def _patches(fields: ConfigFields) -> Patches:
    image = fields.value("image_size")
    sides = image if isinstance(image, list | tuple) else (image, image)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise fields.error("image_size", "a number of pixels, or two: height and width")
    return fields.part(Patches, height=sides[0], width=sides[1], bias=fields.family.patch_bias)


def _classes(fields: ConfigFields) -> int:
    """Number of classes of an image classifier: the named ones, or 2, the default of transformers."""
    names = fields.values.get("id2label")
    count = fields.values.get("num_labels", len(names) if isinstance(names, Mapping) and names else 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"{fields.name}: got num_labels {short(count)}; expected a whole number of 1 or more")
    return count


def _audio(fields: ConfigFields) -> Audio:
    channels = _convolved(fields, "conv_dim", None)
    kernels, strides = (_convolved(fields, key, len(channels)) for key in ("conv_kernel", "conv_stride"))
    norm, reduction = fields.value("feat_extract_norm"), fields.value("ctc_loss_reduction")
    if norm not in ("group", "layer"):
        raise fields.error("feat_extract_norm", "group or layer")
    if reduction not in ("sum", "mean"):
        raise fields.error("ctc_loss_reduction", "sum or mean")
    groups, hidden = fields.size("num_conv_pos_embedding_groups"), fields.size("hidden_size")
    if hidden % groups:
        raise fields.error("num_conv_pos_embedding_groups", f"a divisor of the hidden size {hidden}")
    augmented = fields.flag("apply_spec_augment")
    chances = [fields.number(key) > 0 for key in ("mask_time_prob", "mask_feature_prob")]
    return fields.part(
        Audio,
        channels=channels,
        kernels=kernels,
        strides=strides,
        group_norm=norm == "group",
        activation=fields.activation("feat_extract_activation"),
        masked_time=augmented and chances[0],
        masked_features=augmented and chances[1],
        mask=any(chances),
        mean_loss=reduction == "mean",
    )


def _convolved(fields: ConfigFields, key: str, count: int | None) -> tuple[int, ...]:
    found: Sequence[Any] = fields.value(key)
    whole = isinstance(found, list | tuple) and found and all(type(one) is int and one > 0 for one in found)
    if not whole or (count is not None and len(found) != count):
        raise fields.error(key, "a list of sizes, one for each convolution")
    return tuple(found)


def _dtype(fields: ConfigFields) -> str:
    for key in _DTYPE_KEYS:
        if (value := fields.values.get(key)) is not None:
            name = str(value).removeprefix("torch.")
            if name not in _FLOATS:
                raise UsageError(f"{fields.name}: got {key} {short(value)}; expected one of {', '.join(_FLOATS)}")
            return name
    return "bfloat16"


def _dropout(fields: ConfigFields) -> tuple[DropoutSites, float]:
    """Dropout sites and their probability (the largest, if they differ). A site of probability 0 is off, unless all
    are: then the sites are those of the code, for a probability given elsewhere.
    """
    keys = fields.family.dropout
    chances = {}
    for site in (field.name for field in dataclass_fields(DropoutSites)):
        if key := keys.get(site):
            chances[site] = fields.number(key)
            if not 0 <= chances[site] < 1:
                raise fields.error(key, "a probability of at least 0 and below 1")
    most = max(chances.values(), default=0.0)
    return DropoutSites(**{site: chance > 0 or not most for site, chance in chances.items()}), most


# Parts of a configuration that the closed form leaves out, as remarks -------------------------------------------------


NOT_OF_THE_MODEL: Final = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
"""Keys that say where a configuration is from."""
TOWERS: Final = ("vision", "audio")
"""Keys of towers next to a text model."""
_OTHER_HEADS: Final = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    *("ForNextSentencePrediction", "ForAudioClassification", "ForRewardModel", "ForProcessRewardModel"),
    *("ForEmbedding", "ForTextEncoding", "EncoderModel"),
)
"""Suffixes of class names whose head differs from the one described."""
_HEAD_APART: Final = (
    "published weights with tie_word_embeddings false have a head of their own, which a closed form counts and a trace "
    "does not: transformers builds none from the configuration alone"
)

OTHER_HEAD: Final = "architectures says "
LEFT_OUT_TOWER: Final = " is left out: "


def of_another_model(remark: str) -> bool:
    """Whether the remark is about a head or a tower that the built class has and the described model lacks."""
    return remark.startswith((OTHER_HEAD, "the ")) and (OTHER_HEAD in remark or LEFT_OUT_TOWER in remark)


def left_out_of(outer: Mapping[str, Any], inner: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Parts of a configuration that the text model lacks, one remark each."""
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
        yield f"{remark}; --mtp-num-layers counts them" if MTP_LEFT_OUT in remark else remark


def not_built(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> Iterator[str]:
    """Parts of a configuration that transformers' code does not build, one remark each."""
    extra = inner.get("num_nextn_predict_layers") or inner.get("mtp_num_hidden_layers") or inner.get("mtp_num_layers")
    if isinstance(extra, int) and extra > 0:
        count = "a layer" if extra == 1 else f"{extra} layers"
        yield f"{count} {MTP_LEFT_OUT}, as in the code of transformers"
    family = FAMILIES.get(str(inner.get("model_type")))
    if family and family.waveform and (chance := inner.get("layerdrop", family.defaults["layerdrop"])):
        yield (f"layerdrop {short(chance)} skips layers of a step at random; figures are of one that runs all of them")
    if family and family.tied_where_built and inner.get("tie_word_embeddings") is False:
        yield _HEAD_APART
    base, remark = _quantization(outer, inner)
    if remark:
        over = f"says --base {base} for adapters (--lora). Without them it " if base else ""
        yield f"quantization_config ({remark}) {over}is left out: weights are those of --precision"


def _quantization(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[str, str]:
    """``--base`` of quantized weights, empty if it is not modelled, and the method; both empty without one.

    transformers 5.23, ``quantizers/auto.py``, ``AutoQuantizationConfig.from_dict``. Tables of FP4 and NF4 differ in
    their values alone. ``Mxfp4HfQuantizer`` does not train; ``Mxfp4Config(dequantize=True)`` makes 16-bit weights.
    """
    found = outer.get("quantization_config") or inner.get("quantization_config")
    if not found:
        return "", ""
    if not isinstance(found, Mapping):
        expected = 'a mapping, such as {"quant_method": "bitsandbytes", "load_in_4bit": true}'
        raise UsageError(f"got quantization_config {found!r}; expected {expected}, or none")
    method = str(found.get("quant_method", "a method that it does not name"))
    experts = any(inner.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    double = "-double" if found.get("bnb_4bit_use_double_quant") else ""
    blocks = found.get("weight_block_size", [FP8_BLOCK] * 2) == [FP8_BLOCK] * 2 and not found.get("dequantize")
    groups = (found.get("bits"), found.get("group_size", GPTQ_GROUP)) == (Base.GPTQ.bits, GPTQ_GROUP)
    stored = {
        f"nf4{double}": found.get("load_in_4bit"),
        "int8": found.get("load_in_8bit"),
        "gptq": method == "gptq" and groups,
        "fp8": method == "fp8" and blocks and not experts,
    }
    base = next((base for base, says in stored.items() if says), "")
    skipped = found.get("llm_int8_skip_modules" if base in (f"nf4{double}", "int8") else "modules_to_not_convert") or ()
    whole = [name for name in skipped if isinstance(name, str) and _IN_LAYERS.search(name)] if base else []
    kept = f", but for {', '.join(whole[:2])}{', ...' if whole[2:] else ''}, which count as quantized" if whole else ""
    return base, f"{method}{kept}{', which is trained dequantized' if method == 'mxfp4' else ''}"


def _other_head(outer: Mapping[str, Any], family: Family) -> str:
    """The class that the file names, if it has another head or none, or is one of two stacks; else empty."""
    names = outer.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names and isinstance(names[0], str) else ""
    bare = name.endswith("Model") and not name.endswith(("HeadModel", "HeadsModel"))
    alone = family.encoder_decoder and name.endswith("ForCausalLM")
    return name if bare or alone or name.endswith(_OTHER_HEADS) else ""


def _tower_parameters(tower: Mapping[str, Any]) -> int:
    """Parameters of an encoder's layers: four attention projections, two of the feed-forward block (three if gated)."""
    sizes = [tower.get(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers")]
    sizes[0] = sizes[0] or tower.get("embed_dim") or tower.get("width") or tower.get("d_model")
    sizes[2] = sizes[2] or tower.get("depth") or tower.get("encoder_layers")
    width, ffn, depth = (size if isinstance(size, int) and not isinstance(size, bool) else 0 for size in sizes)
    if not width or not depth:
        return 0
    ffn = ffn or 4 * width
    projections = 3 if tower.get("hidden_act") in ("silu", "swish") else 2
    return depth * (4 * width * width + projections * width * ffn)
