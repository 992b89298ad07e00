"""The layers of a Hugging Face ``config.json`` in their order: which have a window, rotary positions, experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from reprlib import repr as short
from typing import Final

from jettison.errors import NotDescribed
from jettison.spec.config_blocks import attention_of, experts_of, latent_attention_of, mlp_of
from jettison.spec.config_fields import TRACE, ConfigFields
from jettison.spec.families import Family
from jettison.spec.mixed_layers import mixed_layers
from jettison.spec.model import Arrangement, Attention, Layer, Norm, QkNorm

_SLIDING: Final = {"sliding_attention": True, "full_attention": False, "attention": False}


def layers_of(fields: ConfigFields, norm: Norm) -> tuple[Layer, ...]:
    """All layers, one object a kind."""
    family = fields.family
    depth = fields.depth("num_hidden_layers")
    if family.scan is not None:
        return mixed_layers(
            fields,
            norm,
            depth=depth,
            attention=partial(attention_of, fields),
            dense=partial(mlp_of, fields),
            experts=partial(experts_of, fields),
            sparse=_sparse(fields, depth),
        )
    attention = latent_attention_of(fields) if family.latent else attention_of(fields)
    arrangement = Arrangement.PARALLEL if fields.flag("use_parallel_residual") else family.arrangement
    kinds: dict[tuple[int | None, bool, bool], Layer] = {}
    windows = list(_windows(fields, depth))
    order = list(zip(windows, _sparse(fields, depth), _rotates(fields, windows), strict=True))
    for window, sparse, rotates in dict.fromkeys(order):
        kinds[window, sparse, rotates] = Layer(
            attention=_placed(attention, family, window, rotates) if isinstance(attention, Attention) else attention,
            mlp=experts_of(fields) if sparse else mlp_of(fields),
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
