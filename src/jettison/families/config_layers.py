"""The layers of a Hugging Face ``config.json`` in order: which have a window, rotary positions, experts, an SSM scan,
and the sizes of their blocks. Sizes must be in the file; the rest falls back on the family's defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any, Final

from jettison.core.errors import NotDescribed, UsageError
from jettison.families.config_values import TRACE, ConfigFields
from jettison.families.family import Family, ScanKind
from jettison.spec import model

_SLIDING: Final = {"sliding_attention": True, "full_attention": False, "attention": False}


def layers_of(fields: ConfigFields, norm: model.Norm) -> tuple[model.Layer, ...]:
    """Return all layers; equal layers share one object."""
    family = fields.family
    depth = fields.depth("num_hidden_layers")
    if family.scan is not None:
        return _mixed(fields, norm, depth)
    attention = fields.part(model.LatentAttention) if family.latent else attention_of(fields)
    kinds: dict[tuple[int | None, bool, bool], model.Layer] = {}
    windows = list(_windows(fields, depth))
    order = list(zip(windows, _sparse(fields, depth), _rotates(fields, windows), strict=True))
    for window, sparse, rotates in dict.fromkeys(order):
        kinds[window, sparse, rotates] = model.Layer(
            attention=_placed(attention, family, window, rotates)
            if isinstance(attention, model.Attention)
            else attention,
            mlp=experts_of(fields) if sparse else mlp_of(fields),
            norm=norm,
            arrangement=family.arrangement,
        )
    layers = [kinds[kind] for kind in order]
    return (replace(layers[0], plain_start=True), *layers[1:]) if family.first_unnormed else tuple(layers)


def _placed(attention: model.Attention, family: Family, window: int | None, rotates: bool) -> model.Attention:
    scaled = family.scaled_queries or (family.scaled_where_nope and not rotates)
    attention = replace(attention, window=window, scaled_queries=scaled)
    if rotates:
        return attention
    kind = model.QkNorm.NONE if attention.qk_norm is model.QkNorm.LENGTH else attention.qk_norm
    return replace(attention, rotary_dim=0, qk_norm=kind)


def _rotates(fields: ConfigFields, windows: Sequence[int | None]) -> Iterator[bool]:
    """Yield whether each layer has rotary positions."""
    if fields.family.nope_where_full and any(window is not None for window in windows):
        yield from (window is not None for window in windows)
        return
    if not fields.knows("no_rope_layers"):
        yield from (True for _ in windows)
        return
    listed = fields.value("no_rope_layers")
    if listed is None or (not listed and fields.family.full_where_nope):
        period = fields.size("no_rope_layer_interval")
        yield from ((index + 1) % period > 0 for index in range(len(windows)))
        return
    if not isinstance(listed, list | tuple) or len(listed) != len(windows) or any(one not in (0, 1) for one in listed):
        raise fields.error("no_rope_layers", f"a list of {len(windows)}, 1 for a layer that rotates and 0 for others")
    yield from (bool(one) for one in listed)


def _windows(fields: ConfigFields, depth: int) -> Iterator[int | None]:
    """Yield each layer's attention window; None: full attention."""
    off = fields.knows("use_sliding_window") and not fields.flag("use_sliding_window")
    window = None if off else fields.optional_size("sliding_window")
    if window is not None and fields.family.half_window:
        window = max(1, window // 2)
    if window is not None and fields.flag("use_bidirectional_attention"):
        window = 2 * (window // 2) + 1  # half of it on either side, and the token itself
    for sliding in _slides(fields, depth):
        yield window if sliding else None


def _slides(fields: ConfigFields, depth: int) -> list[bool]:
    """Whether each layer has the window: from ``layer_types``, else by the family's rule."""
    types = fields.value("layer_types")
    if types is not None:
        if not isinstance(types, list | tuple) or len(types) != depth:
            raise fields.error("layer_types", f"a list of {depth}, one word a layer")
        own = fields.family.layer_words
        types = [own.get(word, word) if isinstance(word, str) else word for word in types]
        strange = [word for word in types if not isinstance(word, str) or word not in _SLIDING]
        if strange:
            expected = f"sliding_attention or full_attention; for any other, {TRACE}"
            raise NotDescribed(f"{fields.name}: got {short(strange[0])} in layer_types; expected {expected}")
        return [_SLIDING[word] for word in types]
    if fields.family.full_where_nope:
        return list(_rotates(fields, [None] * depth))
    if fields.knows("max_window_layers"):
        first = fields.size("max_window_layers", least=0)
        return [index >= first for index in range(depth)]
    if fields.knows("sliding_window_pattern"):
        period = fields.size("sliding_window_pattern")
        shift = 0 if fields.family.full_first else 1
        return [(index + shift) % period > 0 for index in range(depth)]
    return [True] * depth


def _sparse(fields: ConfigFields, depth: int) -> list[bool]:
    """Whether each layer is a mixture of experts: the listed ones, else every n-th of a range."""
    style = fields.family.experts
    if style is None or (style.one_is_dense and fields.size("num_experts") == 1):
        return [False] * depth
    if (listed := fields.layers("moe_layers")) is not None:
        return [index in listed for index in range(depth)]
    first = max(fields.optional_size("first_k_dense_replace", least=0) or 0, fields.step("moe_layer_start_index", 0))
    last = fields.step("moe_layer_end_index", -1, least=-1)
    period = fields.size("moe_layer_freq") if fields.knows("moe_layer_freq") else 1
    step = fields.size("decoder_sparse_step") if fields.knows("decoder_sparse_step") else 1
    step *= fields.step("moe_layer_interval", 1, least=1)
    each, offset = fields.step("expert_layer_period", 1, least=1), fields.step("expert_layer_offset", 0)
    dense = fields.layers("mlp_only_layers") or ()
    return [
        index >= first
        and (last < 0 or index <= last)
        and index % period == 0
        and (index + 1) % step == 0
        and index % each == offset
        and index not in dense
        for index in range(depth)
    ]


_ATTENTION: Final = "full_attention"
_SCAN: Final = "linear_attention"
_OLD_WORDS: Final = {"attention": _ATTENTION, "mamba": _SCAN}
_ALONE: Final = ("mlp", "moe")
"""Values of layer_types for a feed-forward block alone."""


def _mixed(fields: ConfigFields, norm: model.Norm, depth: int) -> tuple[model.Layer, ...]:
    """All layers of a model whose token mixers are not only attention; equal layers share one object."""
    single, key = fields.family.single_block, fields.family.scan_activation
    if key and (word := fields.values.get(key, "silu")) not in ("silu", "swish"):
        knows = "of which the closed form of a scan knows silu alone"
        raise NotDescribed(f"{fields.name}: got {key} {short(word)}, {knows}")
    kinds: dict[tuple[str, bool], model.Layer] = {}
    order = list(zip(_words(fields, depth), _sparse(fields, depth), strict=True))
    for word, sparse in dict.fromkeys(order):
        mixer = attention_of(fields) if word == _ATTENTION else scan_of(fields) if word == _SCAN else None
        spread = word == "moe" if single else sparse
        block = (experts_of(fields) if spread else mlp_of(fields)) if word in _ALONE or not single else None
        kinds[word, sparse] = model.Layer(attention=mixer, mlp=block, norm=norm)
    return tuple(kinds[kind] for kind in order)


def _words(fields: ConfigFields, depth: int) -> list[str]:
    """The kind of each layer: from the file's list, or attention in every n-th layer, or scans throughout."""
    listed = fields.value("layer_types")
    if listed is None and fields.knows("full_attention_interval"):
        period = fields.step("full_attention_interval", 1, least=1)
        return [_SCAN if (index + 1) % period else _ATTENTION for index in range(depth)]
    if not fields.knows("layer_types"):
        # unless the family reads these keys, no layer has attention
        period, offset = fields.step("attn_layer_period", depth + 1, least=1), fields.step("attn_layer_offset", depth)
        return [_ATTENTION if index % period == offset else _SCAN for index in range(depth)]
    if not isinstance(listed, list | tuple) or len(listed) != depth:
        raise fields.error("layer_types", f"a list of {depth}, one word a layer")
    words = [_OLD_WORDS.get(word, word) if isinstance(word, str) else word for word in listed]
    known = (_ATTENTION, _SCAN, *_ALONE) if fields.family.single_block else (_ATTENTION, _SCAN)
    for word in words:
        if word not in known:
            expected = f"{', '.join(known[:-1])} or {known[-1]}; for any other, {TRACE}"
            raise NotDescribed(f"{fields.name}: got {short(word)} in layer_types; expected {expected}")
    return words


def scan_of(fields: ConfigFields) -> model.Scan:
    """The state-space or linear-attention block."""
    match fields.family.scan:
        case ScanKind.DELTA | ScanKind.GROUPED_DELTA:
            return _delta(fields, grouped=fields.family.scan is ScanKind.GROUPED_DELTA)
        case ScanKind.MAMBA2:
            return _mamba2(fields)
        case kind:
            return _mamba1(fields, normed=kind is ScanKind.NORMED_MAMBA1)


def _mamba1(fields: ConfigFields, *, normed: bool) -> model.SelectiveScan:
    rank = fields.value("mamba_dt_rank")
    hidden = fields.size("hidden_size")
    inner = fields.optional_size("mamba_inner") or fields.size("mamba_expand") * hidden
    rank = -(-hidden // 16) if rank == "auto" else fields.size("mamba_dt_rank")
    return fields.part(model.SelectiveScan, inner=inner, rank=rank, normed=normed)


def _mamba2(fields: ConfigFields) -> model.StateSpaceDual:
    heads, groups = fields.size("mamba_num_heads"), fields.size("n_groups")
    if fields.knows("expand"):
        keys = ("hidden_size", "expand", "mamba_num_heads", "mamba_head_dim")
        hidden, expand, _, width = sizes = [fields.step(key, 0, least=1) for key in keys]
        if expand * hidden != heads * width:
            got = ", ".join(f"{fields.spelled(key)} {size}" for key, size in zip(keys, sizes, strict=True))
            raise UsageError(f"{fields.name}: got {got}; expected expand x hidden_size = num_heads x head_dim")
    if heads % groups:
        raise fields.error("mamba_num_heads", f"a multiple of the {groups} groups")
    return fields.part(model.StateSpaceDual)


def _delta(fields: ConfigFields, *, grouped: bool) -> model.GatedDelta:
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if values % keys:
        raise fields.error("linear_num_value_heads", f"a multiple of the {keys} key heads")
    return fields.part(model.GatedDelta, grouped=grouped)


_OF_FAMILY: Final = ("key_bias", "fused_qkv", "qk_norm", "sinks", "alibi")
_OF_STYLE: Final = (
    *("router", "bias", "router_bias", "correction_frozen", "clamped_sum", "weighted_inputs"),
    *("shared_gate", "shared_fused"),
)
"""Fixed choices of a family's code, by the names of fields of `Attention` and `Moe`."""
_OUT_BIAS: Final = "attention_out_bias"
_ROTARY_DIM: Final = "rotary_dim"


def attention_of(fields: ConfigFields) -> model.Attention:
    family = fields.family
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    head_dim = fields.optional_size("head_dim")
    if head_dim is None and hidden % heads and not (family.floored_heads and heads <= hidden):
        expected = f"a divisor of the hidden size {hidden}" + (", or a head_dim" if fields.knows("head_dim") else "")
        raise fields.error("num_attention_heads", expected)
    head_dim = hidden // heads if head_dim is None else head_dim
    return model.Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=family.qkv_bias or fields.flag("attention_bias"),
        out_bias=family.out_bias or fields.flag(_OUT_BIAS if fields.knows(_OUT_BIAS) else "attention_bias"),
        rotary_dim=_rotated(fields, head_dim) if family.rotary and not family.alibi else 0,
        softcap=bool(fields.number("attn_logit_softcapping")),
        **{name: getattr(family, name) for name in _OF_FAMILY},
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


def _rotated(fields: ConfigFields, head_dim: int) -> int:
    """Number of rotated dims of a head: two for each frequency; an odd share is rounded up. ``rope_parameters`` of
    transformers 5 has priority; older files may give the share in a key of their own.
    """
    key = fields.family.rotary_key
    if not key:
        return head_dim
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
    dim = int(head_dim * share)
    return dim + dim % 2 if dim < head_dim else dim


def mlp_of(fields: ConfigFields) -> model.Mlp:
    family = fields.family
    ffn = fields.optional_size("intermediate_size")
    if ffn is None:
        if "intermediate_size" in family.required or family.defaults.get("intermediate_size") is not None:
            raise fields.error("intermediate_size", "a whole number of 1 or more")
        ffn = 4 * fields.size("hidden_size")  # GPT-2's rule
    return model.Mlp(
        ffn=ffn,
        activation=fields.activation(),
        gated=family.gated,
        bias=family.mlp_bias or fields.flag("mlp_bias"),
        fused_gate_up=family.fused_gate_up,
    )


def experts_of(fields: ConfigFields) -> model.Moe:
    style = fields.family.experts
    assert style is not None, "a sparse layer of a family without experts"
    if fields.flag("mlp_bias") and not style.bias:
        raise fields.error("mlp_bias", f"false where there are experts: only shared ones would have it; or {TRACE}")
    if style.only_top_k and (chosen := fields.value("num_experts_per_tok")) != style.only_top_k:
        key, only = fields.spelled("num_experts_per_tok"), style.only_top_k
        raise NotDescribed(f"{fields.name}: got {key} {short(chosen)}, of which its code knows {only} alone")
    experts, ffn = fields.size("num_experts"), fields.size(style.width)
    top_k = fields.size("num_experts_per_tok")
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"at most the {experts} experts")
    may_lack_shared = style.shared_fused or fields.family.defaults.get(style.shared_width) == 0  # Granite's, Megatron's
    return model.Moe(
        experts=experts,
        top_k=top_k,
        ffn=ffn,
        activation=fields.activation(),
        gated=fields.family.gated,
        normalise_top_k=style.normalised or fields.flag("norm_topk_prob"),
        shared_ffn=fields.size(style.shared_width, least=0 if may_lack_shared else 1)
        if style.shared_width
        else ffn * (fields.optional_size("n_shared_experts", least=0) or 0),
        jitters=style.jitters if fields.values.get(style.jitter_key) else 0,
        **{name: getattr(style, name) for name in _OF_STYLE},
        groups=_groups(fields, experts),
        latent=fields.optional_size("moe_latent_size") or 0,
    )


def _groups(fields: ConfigFields, experts: int) -> int:
    """Number of groups of experts."""
    if fields.knows("topk_method"):
        method = fields.value("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.error("topk_method", "greedy or group_limited_greedy")
        if method == "greedy":
            return 1
    groups = fields.optional_size("n_group") or 1
    if experts % groups:
        raise fields.error("n_group", f"a divisor of the {experts} experts")
    if (fields.optional_size("topk_group") or groups) > groups:
        raise fields.error("topk_group", f"at most the {groups} groups")
    return groups


def stacks(fields: ConfigFields, decoder: tuple[model.Layer, ...]) -> tuple[model.Layer, ...]:
    """The encoder's layers, which are bidirectional, then the decoder's, with cross-attention to the encoder output."""
    first = decoder[0]
    assert isinstance(first.attention, model.Attention) and isinstance(first.mlp, model.Mlp)
    heads = fields.size("encoder_attention_heads")
    hidden = fields.size("hidden_size")
    width = fields.optional_size("head_dim") if fields.knows("head_dim") else None
    if width is None and hidden % heads:
        raise fields.error("encoder_attention_heads", f"a divisor of the hidden size {hidden}")
    width = hidden // heads if width is None else width
    both_ways = replace(first.attention, heads=heads, kv_heads=heads, head_dim=width, causal=False)
    encoder = replace(
        first, attention=both_ways, mlp=replace(first.mlp, ffn=fields.size("encoder_ffn_dim")), source=True
    )
    asking = replace(first, cross=replace(first.attention, causal=False, buckets=0))
    return (*_handed_on(encoder, fields.depth("encoder_layers")), *_handed_on(asking, len(decoder)))


def _handed_on(layer: model.Layer, depth: int) -> tuple[model.Layer, ...]:
    """So many equal layers, the first of which makes the position biases of all."""
    assert isinstance(layer.attention, model.Attention)
    if layer.attention.biases is not model.Biases.FIRST:
        return (layer,) * depth
    cross = layer.cross and replace(layer.cross, biases=model.Biases.GIVEN)
    given = replace(layer, attention=replace(layer.attention, biases=model.Biases.GIVEN), cross=cross)
    return layer, *(given,) * (depth - 1)


def source(fields: ConfigFields) -> model.EncoderInput:
    """The encoder's input."""
    key = "max_source_positions" if fields.knows("max_source_positions") else "max_position_embeddings"
    longest, family = fields.size(key), fields.family
    return model.EncoderInput(
        max_positions=longest,
        position_rows=0 if family.position_biases is not model.Biases.NONE else longest + family.position_offset,
        trained_positions=not family.spectrogram,
        sound=fields.size("num_mel_bins") if family.spectrogram else 0,
    )


def biases(fields: ConfigFields) -> dict[str, Any]:
    """Position biases of a decoder's attention."""
    kind = fields.family.position_biases
    return (
        {} if kind is model.Biases.NONE else {"biases": kind, "buckets": fields.size("relative_attention_num_buckets")}
    )
