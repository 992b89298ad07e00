"""Layers of a configuration where attention is not all that mixes tokens: which is what, and the sizes of scans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from reprlib import repr as short
from typing import Final

from jettison.errors import NotDescribed
from jettison.spec.config_fields import TRACE, ConfigFields
from jettison.spec.families import ScanKind
from jettison.spec.mixers import GatedDelta, Scan
from jettison.spec.model import Attention, Layer, Mlp, Moe, Norm

_ATTENTION: Final = frozenset({"full_attention", "attention"})
_SCAN: Final = frozenset({"linear_attention", "mamba"})


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
        mixer = attention() if word in _ATTENTION else scan_of(fields)
        kinds[word, spread] = Layer(attention=mixer, mlp=experts() if spread else dense(), norm=norm)
    return tuple(kinds[kind] for kind in order)


def _words(fields: ConfigFields, depth: int) -> list[str]:
    listed = fields.value("layer_types")
    if not isinstance(listed, list | tuple) or len(listed) != depth:
        raise fields.error("layer_types", f"a list of {depth}, one word a layer")
    for word in listed:
        if not isinstance(word, str) or word not in _ATTENTION | _SCAN:
            expected = f"full_attention or linear_attention; for any other, {TRACE}"
            raise NotDescribed(f"{fields.name}: got {short(word)} in layer_types; expected {expected}")
    return list(listed)


def scan_of(fields: ConfigFields) -> Scan:
    """What carries a state along the sequence."""
    match fields.family.scan:
        case ScanKind.DELTA | ScanKind.GROUPED_DELTA:
            return _delta(fields, grouped=fields.family.scan is ScanKind.GROUPED_DELTA)
        case None:
            raise AssertionError("a family without scans")


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
