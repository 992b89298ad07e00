"""Layers of a configuration where attention is not all that mixes tokens: which is what, and the sizes of scans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from reprlib import repr as short
from typing import Final

from jettison.errors import NotDescribed
from jettison.spec.config_fields import TRACE, ConfigFields
from jettison.spec.families import ScanKind
from jettison.spec.mixers import GatedDelta, Mamba1, Mamba2, Scan
from jettison.spec.model import Attention, Layer, Mlp, Moe, Norm

_ATTENTION: Final = frozenset({"full_attention", "attention"})
_SCAN: Final = frozenset({"linear_attention", "mamba"})
_FEED: Final = frozenset({"mlp", "moe"})
"""Words of a layer that is a feed-forward block alone."""


def mixed_layers(
    fields: ConfigFields,
    norm: Norm,
    *,
    depth: int,
    attention: Callable[[], Attention],
    dense: Callable[[], Mlp],
    experts: Callable[[], Moe],
    sparse: Iterable[bool],
) -> tuple[Layer, ...]:
    """All layers, one object a kind. Blocks are made where some layer has them.

    Raises:
        UsageError: ``layer_types`` is not a word for each layer.
        NotDescribed: a word that has no closed form.
    """
    words = _words(fields, depth)
    kinds: dict[tuple[str, bool], Layer] = {}
    order = list(zip(words, sparse, strict=True))
    for word, spread in dict.fromkeys(order):
        mixer = attention() if word in _ATTENTION else scan_of(fields) if word in _SCAN else None
        feeds = word in _FEED or not fields.family.lone
        spread_out = word == "moe" if fields.family.lone else spread
        block = (experts() if spread_out else dense()) if feeds else None
        kinds[word, spread] = Layer(attention=mixer, mlp=block, norm=norm)
    return tuple(kinds[kind] for kind in order)


def _words(fields: ConfigFields, depth: int) -> list[str]:
    listed = fields.value("layer_types")
    if not isinstance(listed, list | tuple) or len(listed) != depth:
        raise fields.error("layer_types", f"a list of {depth}, one word a layer")
    for word in listed:
        if not isinstance(word, str) or word not in _ATTENTION | _SCAN | (_FEED if fields.family.lone else set()):
            expected = f"{_expected(fields)}; for any other, {TRACE}"
            raise NotDescribed(f"{fields.name}: got {short(word)} in layer_types; expected {expected}")
    return list(listed)


def _expected(fields: ConfigFields) -> str:
    alone = "full_attention, linear_attention, mlp or moe"
    return alone if fields.family.lone else "full_attention or linear_attention"


def scan_of(fields: ConfigFields) -> Scan:
    """What carries a state along the sequence."""
    match fields.family.scan:
        case ScanKind.DELTA | ScanKind.GROUPED_DELTA:
            return _delta(fields, grouped=fields.family.scan is ScanKind.GROUPED_DELTA)
        case ScanKind.MAMBA2:
            return _mamba2(fields)
        case ScanKind.MAMBA1 | ScanKind.NORMED_MAMBA1:
            return _mamba1(fields, normed=fields.family.scan is ScanKind.NORMED_MAMBA1)
        case None:
            raise AssertionError("a family without scans")


def _mamba1(fields: ConfigFields, *, normed: bool) -> Mamba1:
    rank = fields.value("mamba_dt_rank")
    hidden = fields.size("hidden_size")
    return Mamba1(
        inner=fields.optional_size("mamba_inner") or fields.size("mamba_expand") * hidden,
        state=fields.size("mamba_d_state"),
        rank=-(-hidden // 16) if rank == "auto" else fields.size("mamba_dt_rank"),
        taps=fields.size("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias"),
        convolution_bias=fields.flag("mamba_conv_bias"),
        normed=normed,
    )


def _mamba2(fields: ConfigFields) -> Mamba2:
    heads, groups = fields.size("mamba_num_heads"), fields.size("n_groups")
    if heads % groups:
        raise fields.error("mamba_num_heads", f"a multiple of the {groups} groups")
    return Mamba2(
        heads=heads,
        head_dim=fields.size("mamba_head_dim"),
        state=fields.size("ssm_state_size"),
        groups=groups,
        taps=fields.size("conv_kernel"),
        chunk=fields.size("chunk_size"),
        bias=fields.flag("use_bias"),
        convolution_bias=fields.flag("use_conv_bias"),
    )


def _delta(fields: ConfigFields, *, grouped: bool) -> GatedDelta:
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if values % keys:
        raise fields.error("linear_num_value_heads", f"a multiple of the {keys} key heads")
    return GatedDelta(
        key_heads=keys,
        value_heads=values,
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        taps=fields.size("linear_conv_kernel_dim"),
        grouped=grouped,
    )
