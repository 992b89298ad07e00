"""Megatron-LM's BERT and T5, as its functional tests have them: groups bert and t5 of the golden values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jettison.families.config import parse_config
from jettison.spec.model import (
    Activation,
    Arrangement,
    Attention,
    DropoutSites,
    Head,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    NormKind,
)

BERT, T5 = "bert_", "t5_"
PREFIXES = (BERT, T5)
CASED = 28_996
"""Lines of bert-large-cased-vocab.txt."""
EXTRA = 100
"""``--vocab-extra-ids`` of the tests of T5."""
_SITES = DropoutSites(embedding=True, attention=True, residual=True)
_NORM = Norm(kind=NormKind.LAYER, bias=True)


def t5(row: Mapping[str, str], more: Mapping[str, str], name: str) -> ModelSpec:
    """``megatron/core/models/T5/t5_model.py``: two stacks with norms first, learned positions and one table.

    BART's two stacks are what is like it: each layer of the decoder asks the encoder's result.
    """
    hidden, heads, ffn, pad = int(row["hidden"]), int(row["heads"]), int(row["ffn"]), 128 * int(row["tp"])
    like = parse_config(
        {
            "model_type": "bart",
            "d_model": hidden,
            "encoder_layers": int(more["encoder-num-layers"]),
            "decoder_layers": int(more["decoder-num-layers"]),
            "encoder_attention_heads": heads,
            "decoder_attention_heads": heads,
            "encoder_ffn_dim": ffn,
            "decoder_ffn_dim": ffn,
            "vocab_size": -(-(CASED + EXTRA) // pad) * pad,
            "max_position_embeddings": 512,
        },
        name=name,
    )
    mlp = Mlp(ffn=ffn, activation=Activation.GELU_TANH, gated=False, bias=True)
    layers = []
    for layer in like.layers:
        assert isinstance(layer, Layer)
        assert isinstance(layer.attention, Attention)
        joint = replace(layer.attention, fused_qkv=True)
        layers.append(replace(layer, arrangement=Arrangement.PRE, norm=_NORM, attention=joint, mlp=mlp))
    return replace(
        like,
        layers=tuple(layers),
        final_norm=_NORM,
        embedding_norm=None,
        tied_embeddings=True,
        head=Head(bias=True),
        dropout_sites=_SITES,
        dropout=0.1,
    )


def bert(row: Mapping[str, str], name: str) -> ModelSpec:
    """``megatron/core/models/bert/bert_model.py``: norms first, a head with a product and a norm of its own.

    Its pooler and its binary head are left out: a hidden x hidden matrix and two numbers for each sequence on the last
    stage. A norm behind the embedding, which it has not, stands for the head's; the first stage has it, too.
    """
    hidden, heads = int(row["hidden"]), int(row["heads"])
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        out_bias=True,
        fused_qkv=True,
        causal=False,
    )
    mlp = Mlp(ffn=int(row["ffn"]), activation=Activation.GELU_TANH, gated=False, bias=True)
    return ModelSpec(
        name=name,
        family="paper",
        hidden=hidden,
        vocab=int(row["vocab_padded"]),
        layers=(Layer(attention=attention, mlp=mlp, norm=_NORM),) * int(row["layers"]),
        final_norm=_NORM,
        max_positions=int(row["seq"]),
        learned_positions=True,
        token_types=2,
        embedding_norm=_NORM,
        tied_embeddings=True,
        head=Head(bias=True, transform=Activation.GELU, transform_bias=True),
        dropout_sites=_SITES,
        dropout=0.1,
    )
