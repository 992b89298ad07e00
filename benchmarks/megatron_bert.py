"""Megatron-LM's BERT, as its functional tests have it: `tests/facts/megatron_golden_more.csv`, group bert."""

from __future__ import annotations

from collections.abc import Mapping

from jettison.spec.model import Activation, Attention, DropoutSites, Head, Layer, Mlp, ModelSpec, Norm, NormKind

PREFIX = "bert_"


def bert(row: Mapping[str, str], name: str) -> ModelSpec:
    """``megatron/core/models/bert/bert_model.py``: norms first, a head with a product and a norm of its own.

    Its pooler and its binary head are left out: a hidden x hidden matrix and two numbers for each sequence on the last
    stage. A norm behind the embedding, which it has not, stands for the head's; the first stage has it, too.
    """
    hidden, heads = int(row["hidden"]), int(row["heads"])
    norm = Norm(kind=NormKind.LAYER, bias=True)
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
        layers=(Layer(attention=attention, mlp=mlp, norm=norm),) * int(row["layers"]),
        final_norm=norm,
        max_positions=int(row["seq"]),
        learned_positions=True,
        token_types=2,
        embedding_norm=norm,
        tied_embeddings=True,
        head=Head(bias=True, transform=Activation.GELU, transform_bias=True),
        dropout_sites=DropoutSites(embedding=True, attention=True, residual=True),
        dropout=0.1,
    )
