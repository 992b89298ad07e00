"""An encoder beside a decoder, out of a configuration: the layers of both, and what the encoder reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jettison.spec.biases import Biases
from jettison.spec.config_fields import ConfigFields
from jettison.spec.inputs import Source
from jettison.spec.model import Attention, Layer, Mlp

TIED_WHERE_BUILT: Final = ("mt5", "t5", "umt5")
"""transformers ties their head, whatever the configuration says, unless it loads weights that have one."""
HEAD_APART: Final = (
    "published weights with tie_word_embeddings false have a head of their own, which a closed form counts and a trace "
    "does not: transformers builds none from the configuration alone"
)


def stacks(fields: ConfigFields, decoder: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The encoder's layers, which read both ways, and after them the decoder's, which ask what came out of it."""
    first = decoder[0]
    assert isinstance(first.attention, Attention) and isinstance(first.mlp, Mlp)
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


def _handed_on(layer: Layer, depth: int) -> tuple[Layer, ...]:
    """So many of these, of which the first makes the biases of all."""
    assert isinstance(layer.attention, Attention)
    if layer.attention.biases is not Biases.FIRST:
        return (layer,) * depth
    cross = layer.cross and replace(layer.cross, biases=Biases.GIVEN)
    given = replace(layer, attention=replace(layer.attention, biases=Biases.GIVEN), cross=cross)
    return layer, *(given,) * (depth - 1)


def source(fields: ConfigFields) -> Source:
    """What the encoder reads."""
    key = "max_source_positions" if fields.knows("max_source_positions") else "max_position_embeddings"
    longest, family = fields.size(key), fields.family
    return Source(
        max_positions=longest,
        position_rows=0 if family.biases is not Biases.NONE else longest + family.more_positions,
        trained_positions=not family.sound,
        sound=fields.size("num_mel_bins") if family.sound else 0,
    )


def biases(fields: ConfigFields) -> dict[str, Any]:
    """Of a decoder's attention."""
    kind = fields.family.biases
    return {} if kind is Biases.NONE else {"biases": kind, "buckets": fields.size("relative_attention_num_buckets")}
