"""Bidirectional encoders: masked language models and classifiers."""

from __future__ import annotations

from typing import Any

import torch

from zoo.decoders import BASE, IDS
from zoo.entry import ROWS, VOCABULARY, Batch, Entry, hugging_face, tokens

DROP = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
BERT: dict[str, Any] = {**BASE, **DROP}
LONG: dict[str, Any] = {**BERT, "max_position_embeddings": 128}


def classes(step: int) -> Batch:
    """Tokens with one class a row."""
    return {"input_ids": torch.randint(3, VOCABULARY, (ROWS, 24)), "labels": torch.randint(2, (ROWS,))}


TABLE: list[Entry] = [
    hugging_face("bert", "BertForMaskedLM", "BertConfig", tokens(24, 16, padded=True), **BERT),
    hugging_face("roberta", "RobertaForMaskedLM", "RobertaConfig", tokens(24, padded=True), **BERT),
    hugging_face(
        "albert", "AlbertForMaskedLM", "AlbertConfig", tokens(24), **{**BERT, "num_hidden_layers": 3}, embedding_size=16
    ),
    hugging_face("electra", "ElectraForMaskedLM", "ElectraConfig", tokens(24), **BERT, embedding_size=16),
    hugging_face(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        tokens(24),
        **BERT,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
    ),
    hugging_face(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        tokens(24),
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=64,
        pad_token_id=0,
    ),
    hugging_face("mpnet", "MPNetForMaskedLM", "MPNetConfig", tokens(24), **BERT),
    hugging_face("roformer", "RoFormerForMaskedLM", "RoFormerConfig", tokens(24), **BERT, embedding_size=32),
    hugging_face(
        "longformer", "LongformerForMaskedLM", "LongformerConfig", tokens(32), **LONG, attention_window=[8, 8]
    ),
    hugging_face(
        "big-bird",
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        tokens(64),
        **LONG,
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=2,
    ),
    hugging_face(
        "nystromformer",
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        tokens(32),
        **LONG,
        segment_means_seq_len=32,
        num_landmarks=8,
        conv_kernel_size=5,
    ),
    hugging_face(
        "fnet",
        "FNetForMaskedLM",
        "FNetConfig",
        tokens(24),
        **IDS,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        max_position_embeddings=64,
    ),
    hugging_face("convbert", "ConvBertForMaskedLM", "ConvBertConfig", tokens(24), **BERT, embedding_size=32),
    hugging_face("squeezebert", "SqueezeBertForMaskedLM", "SqueezeBertConfig", tokens(24), **BERT, embedding_size=32),
    hugging_face(
        "modernbert",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        tokens(24),
        **BASE,
        local_attention=8,
        attention_dropout=0.1,
        mlp_dropout=0.1,
        embedding_dropout=0.1,
        cls_token_id=1,
        sep_token_id=2,
    ),
    hugging_face(
        "canine",
        "CanineForSequenceClassification",
        "CanineConfig",
        classes,
        **{**LONG, "vocab_size": 0},
        local_transformer_stride=8,
        downsampling_rate=4,
        num_hash_buckets=32,
    ),
    hugging_face(
        "funnel",
        "FunnelForMaskedLM",
        "FunnelConfig",
        tokens(24),
        vocab_size=VOCABULARY,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        pad_token_id=0,
    ),
]
