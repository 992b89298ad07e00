"""A model with named sizes, from which the walk derives formulas: NOTE [ A formula is what the walk did ].

b s h a k d f V t cp ep as in docs/symbols.md; the rest is below. Sizes that are 0 or None are choices (no rotary
positions, no shared expert) and keep their value, as do all strings and flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from jettison.formula.sums import SizeGuards
from jettison.spec.layout import Layout
from jettison.spec.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe
from jettison.spec.run import RegionSignature

NAMES: Final[Mapping[type, Mapping[str, str]]] = MappingProxyType(
    {
        Attention: {"heads": "a", "kv_heads": "k", "head_dim": "d", "rotary_dim": "r", "window": "w"},
        LatentAttention: {
            "heads": "a",
            "query_rank": "rq",
            "kv_rank": "rkv",
            "nope_dim": "dn",
            "rope_dim": "r",
            "value_dim": "dv",
        },
        Mlp: {"ffn": "f"},
        Moe: {"ffn": "f", "experts": "e", "top_k": "c", "shared_ffn": "g"},
    }
)
"""Sizes of a layer: r rotated part of a head · w window · c experts of a token · g width of the shared experts."""
MODEL_NAMES: Final = MappingProxyType({"hidden": "h", "vocab": "V", "max_positions": "P", "position_rows": "rows"})


def has_names(layer: Layer) -> bool:
    """Whether each of the layer's sizes has a symbol."""
    return layer.cross is None and type(layer.attention) in NAMES and type(layer.mlp) in NAMES


def layer_sizes(layer: Layer) -> dict[str, int]:
    """Values of a layer's named sizes."""
    return {
        name: getattr(part, field)
        for part in (layer.attention, layer.mlp)
        for field, name in NAMES[type(part)].items()
        if getattr(part, field)
    }


def structure(model: ModelSpec, layer: Layer) -> str:
    """Key that is equal for layers that differ only in sizes; includes the model's dropout sites."""
    plain = replace(layer, attention=_numbered(layer.attention), mlp=_numbered(layer.mlp))
    return json.dumps([asdict(plain), asdict(model.dropout_sites)], sort_keys=True)


def resized(model: ModelSpec, layer: Layer, sizes: Mapping[str, int]) -> tuple[ModelSpec, Layer]:
    """Return a model of this one layer with other sizes."""

    def at(part: Any) -> Any:
        return replace(part, **{f: sizes[name] for f, name in NAMES[type(part)].items() if name in sizes})

    changed = replace(layer, attention=at(layer.attention), mlp=at(layer.mlp))
    around = {f: sizes[name] for f, name in MODEL_NAMES.items() if name in sizes}
    return replace(model, layers=(changed,), **around), changed  # type: ignore[arg-type]


class Choices(NamedTuple):
    """Choices in a layer's formulas that are not sizes; ``parallel``: several tensor-parallel ranks, or one."""

    kernels: str
    attention: str
    precision: str
    dropout: bool
    parallel: bool
    sp: bool = False
    gathered_inputs: bool = False

    @property
    def key(self) -> str:
        """Text key, as documents have it."""
        layout = ("sp-gathered" if self.gathered_inputs else "sp" if self.sp else "tp") if self.parallel else "one"
        drop = "dropout" if self.dropout else "plain"
        return " ".join((self.kernels, self.attention, self.precision, drop, layout))


def traced_signature(signature: RegionSignature, layer: Layer, book: SizeGuards) -> tuple[RegionSignature, Layer]:
    """Return the region signature and layer with traced sizes. Neither may be used as a cache key."""
    layout, model = signature.layout, signature.model
    named_layer = replace(layer, attention=_named(layer.attention, book), mlp=_named(layer.mlp, book))
    sizes = {f: book.size(name, getattr(model, f)) for f, name in MODEL_NAMES.items() if getattr(model, f)}
    named_model = replace(model, layers=(named_layer,), **sizes)  # type: ignore[arg-type]
    ranks = {
        name: book.size({"tp": "t"}.get(name, name), getattr(layout, name))
        for name in ("tp", "cp", "ep")
        if getattr(layout, name) > 1
    }
    named_layout = Layout(
        tp=ranks.get("tp", 1),
        sp=layout.sp,
        cp=ranks.get("cp", 1),
        ep=ranks.get("ep", 1),
        dp=ranks.get("ep", 1),
        gathered_inputs=layout.gathered_inputs,
    )
    traced = replace(
        signature,
        model=named_model,
        layout=named_layout,
        seq=book.size("s", signature.seq),
        micro_batch=book.size("b", signature.micro_batch),
    )
    return traced, named_layer


def _named(part: Any, book: SizeGuards) -> Any:
    """An attention or feed-forward block with traced sizes."""
    sizes = {field: getattr(part, field) for field in NAMES[type(part)]}
    return replace(part, **{f: book.size(NAMES[type(part)][f], n) for f, n in sizes.items() if n})


def _numbered(part: Any) -> Any:
    """A block whose named sizes are all 1, or None."""
    return replace(part, **{field: 1 for field in NAMES[type(part)] if getattr(part, field)})
