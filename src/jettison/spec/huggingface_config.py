"""From a Hugging Face ``config.json`` to a `ModelSpec`: the text model alone, without torch or transformers.

What `families` fixes for the architecture and what the file says are put together here. Sizes have to be in the file;
the rest falls back on the architecture's defaults. Vision towers, modules that predict further tokens and quantised
weights are left out, and said to be: `ModelSpec.left_out`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, Final

from jettison.dtypes import DTYPE_BYTES
from jettison.errors import NotDescribed, UsageError
from jettison.spec.config_fields import TRACE, ConfigFields
from jettison.spec.encoder_families import CLIP_TEXTS
from jettison.spec.families import Family
from jettison.spec.inputs import Patches
from jettison.spec.left_out import left_out_of
from jettison.spec.mixed_layers import mixed_layers
from jettison.spec.model import (
    Arrangement,
    Attention,
    DropoutSites,
    Head,
    LatentAttention,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    Norm,
    QkNorm,
)
from jettison.spec.more_families import EVERY_FAMILY, EVERY_WRAPPER
from jettison.spec.own_words import in_usual_words
from jettison.spec.pair import IMAGE_SIZES, TEXT_SIZES, is_pair, paired
from jettison.spec.two_stacks import biases, source, stacks
from jettison.spec.waves import waves_of

_TRACE_IT: Final = TRACE[0].upper() + TRACE[1:]
_OUT_BIAS: Final = "attention_out_bias"
_ROTARY_DIM: Final = "rotary_dim"
_SLIDING: Final = {"sliding_attention": True, "full_attention": False, "attention": False}
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
_FLOATS: Final = tuple(name for name in DTYPE_BYTES if "float" in name)


def read_config(path: Path) -> ModelSpec:
    """Read a ``config.json``, or the one in this folder. The model is named after the folder, or after another file.

    Raises:
        UsageError: no such file, not JSON, not an object, or `parse_config` refuses it.
    """
    values, name = read_values(path)
    return parse_config(values, name=name)


def read_values(path: Path) -> tuple[Any, str]:
    """What a ``config.json`` says, or the one in this folder, and what the model is called.

    Raises:
        UsageError: no such file, or not JSON.
    """
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
    """Make a model out of a decoded ``config.json``. ``text_config`` is used where it holds the language model.

    Raises:
        UsageError: an architecture that is not known, missing sizes, or a value that makes no sense, by its key.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{name}: got {short(values)}; expected an object with a model_type, as config.json has")
    if is_pair(values):
        return _pair(values, name)
    outer = values
    kind, values = _language_model(values, name)
    family, values = in_usual_words(kind, EVERY_FAMILY[kind], values, name=name)
    fields = ConfigFields(name=name, family=family, values=values)
    fields.check_complete()
    return replace(_model(fields, kind), left_out=tuple(left_out_of(outer, values, fields.family)))


def _pair(values: Mapping[str, Any], name: str) -> ModelSpec:
    """Both towers of a configuration, each with the sizes that its part leaves out."""
    parts = [values.get(key) or {} for key in ("text_config", "vision_config")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise UsageError(f"{name}: got {short(parts)} for text_config and vision_config; expected two objects")
    texts, images = (
        ConfigFields(name=name, family=family, values=_inherit({**sizes, **part}, values))
        for family, sizes, part in zip(
            (CLIP_TEXTS, EVERY_FAMILY["clip_vision_model"]), (TEXT_SIZES, IMAGE_SIZES), parts, strict=True
        )
    )
    for fields in (texts, images):
        fields.check_complete()
    return paired(_model(texts, "clip"), _model(images, "clip_vision_model"), values.get("projection_dim", 512))


def _language_model(values: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any]]:
    """The model_type and the values of the language model, which may stand inside ``text_config``."""
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in EVERY_FAMILY:
        return kind, values
    default = EVERY_WRAPPER.get(kind) if isinstance(kind, str) else None
    part = "text_config" if default is None or not EVERY_FAMILY[default].patches else "vision_config"
    inner = values.get(part)
    if isinstance(inner, Mapping):
        kind = inner.get("model_type") or default or kind
        if isinstance(kind, str) and kind in EVERY_FAMILY:
            return kind, _inherit(inner, values)
    elif default is not None and inner is None and "vision_config" in values and "hidden_size" in values:
        return default, values  # as first files of Qwen2-VL have it
    elif default is not None:
        raise UsageError(f"{name}: got {part} {short(inner)}; expected the object that {kind} keeps it in")
    got = "no model_type" if kind is None else f"the model_type {short(kind)}"
    refused = UsageError if kind is None else NotDescribed
    raise refused(
        f"{name}: got {got}, which has no closed form; docs/architectures.md lists those that do. {_TRACE_IT}"
    )


def _inherit(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inner configuration with what counts from around it: the wrapper owns the head, so it ties the embeddings."""
    merged = dict(inner)
    for key in ("tie_word_embeddings", "num_labels", "id2label"):
        if outer.get(key) is not None:
            merged[key] = outer[key]
    if all(inner.get(key) is None for key in _DTYPE_KEYS):
        merged.update({key: outer[key] for key in _DTYPE_KEYS if key in outer})
    return merged


def _model(fields: ConfigFields, kind: str) -> ModelSpec:
    family = fields.family
    norm = _norm(fields)
    layers = _layers(fields, norm)
    if family.source:
        layers = stacks(fields, layers)
    sites, dropout = _dropout(fields)
    masked = family.masked_language_model
    transform = "classifier_activation" if fields.knows("classifier_activation") else "hidden_act"
    patches = _patches(fields) if family.patches else None
    positions = fields.size("max_position_embeddings") if patches is None else patches.tokens
    return ModelSpec(
        name=fields.name,
        family=kind,
        hidden=fields.size("hidden_size"),
        vocab=fields.size("vocab_size") if patches is None else _classes(fields),
        patches=patches,
        source=source(fields) if family.source else None,
        waves=waves_of(fields) if family.waves else None,
        layers=layers,
        final_norm=None if family.arrangement is Arrangement.OUTER else norm,
        max_positions=positions,
        learned_positions=not (family.rotary or family.alibi or family.waves or family.scan or family.biases.made),
        position_rows=positions + family.more_positions if family.more_positions else 0,
        token_types=fields.size("type_vocab_size") if fields.knows("type_vocab_size") else 0,
        embedding_norm=norm if family.start_norm else None,
        embedding_scale=family.embedding_scale or (family.source and fields.flag("scale_embedding")),
        wide_stream=fields.flag("residual_in_fp32"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        head=Head(
            bias=family.head_bias or fields.flag("decoder_bias") or fields.flag("lm_head_bias"),
            transform=fields.activation(transform) if masked else None,
            transform_bias=not fields.knows("classifier_bias") or fields.flag("classifier_bias"),
            pooling=family.pooling,
            scaled=fields.flag("scale_decoder_outputs"),
            softcap=bool(fields.number("final_logit_softcapping")),
        ),
        dropout_sites=sites,
        dropout=dropout,
        dtype=_dtype(fields),
    )


def _norm(fields: ConfigFields) -> Norm:
    norm = fields.family.norm
    return replace(norm, bias=fields.flag("norm_bias")) if fields.knows("norm_bias") else norm


def _patches(fields: ConfigFields) -> Patches:
    image = fields.value("image_size")
    sides = image if isinstance(image, list | tuple) else (image, image)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise fields.error("image_size", "a number of pixels, or two: height and width")
    return Patches(
        height=sides[0],
        width=sides[1],
        patch=fields.size("patch_size"),
        channels=fields.size("num_channels"),
        bias=fields.family.patch_bias,
    )


def _classes(fields: ConfigFields) -> int:
    """What an image may show: as many as are named, or two, as transformers has it."""
    names = fields.values.get("id2label")
    count = fields.values.get("num_labels", len(names) if isinstance(names, Mapping) and names else 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"{fields.name}: got num_labels {short(count)}; expected a whole number of 1 or more")
    return count


def _dtype(fields: ConfigFields) -> str:
    for key in _DTYPE_KEYS:
        if (value := fields.values.get(key)) is not None:
            name = str(value).removeprefix("torch.")
            if name not in _FLOATS:
                raise UsageError(f"{fields.name}: got {key} {short(value)}; expected one of {', '.join(_FLOATS)}")
            return name
    return "bfloat16"


def _dropout(fields: ConfigFields) -> tuple[DropoutSites, float]:
    """Where the model drops out and with which probability (the largest, where they differ). A site whose probability
    is 0 is switched off, unless all are: then the sites are those of the code, for a probability given elsewhere.
    """
    keys = fields.family.dropout
    chances = {}
    for site in (field.name for field in dataclass_fields(DropoutSites)):
        if (key := getattr(keys, site)) is not None:
            chances[site] = fields.number(key)
            if not 0 <= chances[site] < 1:
                raise fields.error(key, "a probability of at least 0 and below 1")
    most = max(chances.values(), default=0.0)
    return DropoutSites(**{site: chance > 0 or not most for site, chance in chances.items()}), most


def _layers(fields: ConfigFields, norm: Norm) -> tuple[Layer, ...]:
    """All layers, one object a kind."""
    family = fields.family
    depth = fields.depth("num_hidden_layers")
    if family.scan is not None:
        return mixed_layers(
            fields,
            norm,
            depth=depth,
            attention=partial(_attention, fields),
            dense=partial(_mlp, fields),
            experts=partial(_experts, fields),
            sparse=_sparse(fields, depth),
        )
    attention = _latent_attention(fields) if family.latent else _attention(fields)
    arrangement = Arrangement.PARALLEL if fields.flag("use_parallel_residual") else family.arrangement
    kinds: dict[tuple[int | None, bool, bool], Layer] = {}
    windows = list(_windows(fields, depth))
    order = list(zip(windows, _sparse(fields, depth), _rotates(fields, windows), strict=True))
    for window, sparse, rotates in dict.fromkeys(order):
        kinds[window, sparse, rotates] = Layer(
            attention=_placed(attention, family, window, rotates) if isinstance(attention, Attention) else attention,
            mlp=_experts(fields) if sparse else _mlp(fields),
            norm=norm,
            arrangement=arrangement,
        )
    layers = [kinds[kind] for kind in order]
    return (replace(layers[0], plain_start=True), *layers[1:]) if family.plain_first else tuple(layers)


def _placed(attention: Attention, family: Family, window: int | None, rotates: bool) -> Attention:
    """The attention of one layer."""
    scaled = family.scaled_queries or (family.scaled_where_plain and not rotates)
    attention = replace(attention, window=window, scaled_queries=scaled)
    if rotates:
        return attention
    kind = QkNorm.NONE if attention.qk_norm is QkNorm.LENGTH else attention.qk_norm
    return replace(attention, rotary_dim=0, qk_norm=kind)


def _rotates(fields: ConfigFields, windows: Sequence[int | None]) -> Iterator[bool]:
    """Which layers have rotary positions."""
    if fields.family.plain_where_full and any(window is not None for window in windows):
        yield from (window is not None for window in windows)
        return
    if not fields.knows("no_rope_layers"):
        yield from (True for _ in windows)
        return
    listed = fields.value("no_rope_layers")
    if listed is None:
        period = fields.size("no_rope_layer_interval")
        yield from ((index + 1) % period > 0 for index in range(len(windows)))
        return
    if not isinstance(listed, list | tuple) or len(listed) != len(windows) or any(one not in (0, 1) for one in listed):
        raise fields.error("no_rope_layers", f"a list of {len(windows)}, 1 for a layer that rotates and 0 for others")
    yield from (bool(one) for one in listed)


def _attention(fields: ConfigFields) -> Attention:
    family = fields.family
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    head_dim = fields.optional_size("head_dim")
    if head_dim is None and hidden % heads:
        expected = f"a divisor of the hidden size {hidden}" + (", or a head_dim" if fields.knows("head_dim") else "")
        raise fields.error("num_attention_heads", expected)
    head_dim = hidden // heads if head_dim is None else head_dim
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=family.qkv_bias or fields.flag("attention_bias"),
        key_bias=family.key_bias,
        out_bias=family.out_bias or fields.flag(_OUT_BIAS if fields.knows(_OUT_BIAS) else "attention_bias"),
        fused_qkv=family.fused_qkv,
        qk_norm=family.qk_norm,
        rotary_dim=int(head_dim * _rotated_share(fields, head_dim)) if family.rotary and not family.alibi else 0,
        softcap=bool(fields.number("attn_logit_softcapping")),
        sinks=family.sinks,
        alibi=family.alibi,
        clipped=bool(fields.number("clip_qkv")),
        gated=family.gated_attention,
        causal=_causal(fields),
        **biases(fields),
    )


def _causal(fields: ConfigFields) -> bool:
    if fields.family.bidirectional:
        return False
    if fields.knows("is_decoder"):
        return fields.flag("is_decoder")
    return not fields.flag("use_bidirectional_attention")


def _rotated_share(fields: ConfigFields, head_dim: int) -> float:
    """Share of a head that is rotated. transformers 5 writes it into ``rope_parameters``, and that counts first; older
    files may say how much of a head it is.
    """
    key = fields.family.rotary_key
    if key is None:
        return 1.0
    share: Any = fields.number(key)
    if key == _ROTARY_DIM:
        share = share / head_dim if share else 1.0
    for nest in ("rope_parameters", "rope_scaling"):
        nested = fields.values.get(nest)
        if isinstance(nested, Mapping) and nested.get("partial_rotary_factor") is not None:
            key, share = f"{nest}.partial_rotary_factor", nested["partial_rotary_factor"]
            break
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise UsageError(f"{fields.name}: got {key} {short(share)}; expected a share above 0 and at most 1")
    return share


def _latent_attention(fields: ConfigFields) -> LatentAttention:
    return LatentAttention(
        heads=fields.size("num_attention_heads"),
        query_rank=fields.optional_size("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        bias=fields.flag("attention_bias"),
    )


def _mlp(fields: ConfigFields) -> Mlp:
    family = fields.family
    ffn = fields.optional_size("intermediate_size")
    if ffn is None:
        if "intermediate_size" in family.required:
            raise fields.error("intermediate_size", "a whole number of 1 or more")
        ffn = 4 * fields.size("hidden_size")  # GPT-2's rule
    return Mlp(
        ffn=ffn,
        activation=fields.activation(),
        gated=family.gated,
        bias=family.mlp_bias or fields.flag("mlp_bias"),
        fused_gate_up=family.fused_gate_up,
    )


def _experts(fields: ConfigFields) -> Moe:
    style = fields.family.experts
    assert style is not None, "a sparse layer of a family without experts"
    if fields.flag("mlp_bias"):
        raise fields.error("mlp_bias", f"false where there are experts: only shared ones would have it; or {TRACE}")
    experts, ffn = fields.size("num_experts"), fields.size(style.width)
    top_k = fields.size("num_experts_per_tok")
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"at most the {experts} experts")
    groups, top_groups = _groups(fields, experts)
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=ffn,
        activation=fields.activation(),
        router=style.router,
        gated=fields.family.gated,
        bias=style.bias,
        router_bias=style.router_bias,
        correction_bias=style.correction_bias,
        normalise_top_k=style.normalised or fields.flag("norm_topk_prob"),
        shared_ffn=ffn * (fields.optional_size("n_shared_experts", least=0) or 0)
        if style.shared_width is None
        else fields.size(style.shared_width),
        correction_frozen=style.correction_frozen,
        clamped_sum=style.clamped_sum,
        weighted_inputs=style.weighted_inputs,
        jitters=fields.size("jitters", least=0) if fields.knows("jitters") else 0,
        shared_gate=style.shared_gate,
        shared_fused=style.shared_fused,
        groups=groups,
        top_groups=top_groups,
    )


def _groups(fields: ConfigFields, experts: int) -> tuple[int, int]:
    """Into how many groups the experts are sorted, and how many of them a token may reach."""
    if fields.knows("topk_method"):
        method = fields.value("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.error("topk_method", "greedy or group_limited_greedy")
        if method == "greedy":
            return 1, 1
    groups = fields.optional_size("n_group") or 1
    top_groups = fields.optional_size("topk_group") or groups
    if experts % groups:
        raise fields.error("n_group", f"a divisor of the {experts} experts")
    if top_groups > groups:
        raise fields.error("topk_group", f"at most the {groups} groups")
    return groups, top_groups


def _windows(fields: ConfigFields, depth: int) -> Iterator[int | None]:
    """How far each layer looks back; None: to the beginning."""
    off = fields.knows("use_sliding_window") and not fields.flag("use_sliding_window")
    window = None if off else fields.optional_size("sliding_window")
    if window is not None and fields.family.half_window:
        window = max(1, window // 2)
    if window is not None and fields.flag("use_bidirectional_attention"):
        window = 2 * (window // 2) + 1  # half of it on either side, and the token itself
    for sliding in _slides(fields, depth):
        yield window if sliding else None


def _slides(fields: ConfigFields, depth: int) -> list[bool]:
    """Which layers have the window: those that ``layer_types`` says, else those of the family's rule."""
    types = fields.value("layer_types")
    if types is not None:
        if not isinstance(types, list | tuple) or len(types) != depth:
            raise fields.error("layer_types", f"a list of {depth}, one word a layer")
        strange = [word for word in types if not isinstance(word, str) or word not in _SLIDING]
        if strange:
            expected = f"sliding_attention or full_attention; for any other, {TRACE}"
            raise NotDescribed(f"{fields.name}: got {short(strange[0])} in layer_types; expected {expected}")
        return [_SLIDING[word] for word in types]
    if fields.knows("max_window_layers"):
        first = fields.size("max_window_layers", least=0)
        return [index >= first for index in range(depth)]
    if fields.knows("sliding_window_pattern"):
        period = fields.size("sliding_window_pattern")
        shift = 0 if fields.family.full_first else 1
        return [(index + shift) % period > 0 for index in range(depth)]
    return [True] * depth


def _sparse(fields: ConfigFields, depth: int) -> Iterator[bool]:
    """Which layers are mixtures of experts."""
    first = fields.optional_size("first_k_dense_replace", least=0) or 0
    period = fields.size("moe_layer_freq") if fields.knows("moe_layer_freq") else 1
    step = fields.size("decoder_sparse_step") if fields.knows("decoder_sparse_step") else 1
    dense = fields.value("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise fields.error("mlp_only_layers", "a list of layer numbers")
    for index in range(depth):
        spread = index >= first and index % period == 0 and (index + 1) % step == 0
        yield fields.family.experts is not None and spread and index not in dense
