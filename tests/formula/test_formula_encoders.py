"""Encoders of text and of images: parameters, and saved tensors beside traces of transformers' code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.formula.region import layer_region, parameter_count
from jettison.ledger.compare import compare
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.search.largest_fit import Edge, fit
from support.formula_cases import _PLAIN, _TOKENS, FormulaCase, TinyFamily, counts, differences, under_autocast

_IMAGE = {**_PLAIN, "image_size": 32, "patch_size": 8}
_STACKS = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    **_TOKENS,
    "decoder_start_token_id": 0,
}
_WORDS = {**_STACKS, "max_position_embeddings": 64}
_DROPPED = ("dropout", "attention_dropout")
_RELATIVE = {
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    **_TOKENS,
    "decoder_start_token_id": 0,
}
_SOUND = {
    **_PLAIN,
    "conv_dim": (16, 24, 40),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_length": 2,
    **_TOKENS,
}
_HEARD = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
_RELATIVELY = ("dropout_rate",)
SLOW = ("mbart", "mt5")
"""Code of which another family's is a copy."""
TINY = {
    "mt5": TinyFamily(model="MT5ForConditionalGeneration", config="MT5Config", settings=_RELATIVE, dropout=_RELATIVELY),
    "t5": TinyFamily(model="T5ForConditionalGeneration", config="T5Config", settings=_RELATIVE, dropout=_RELATIVELY),
    "umt5": TinyFamily(
        model="UMT5ForConditionalGeneration", config="UMT5Config", settings=_RELATIVE, dropout=_RELATIVELY
    ),
    "hubert": TinyFamily(model="HubertForCTC", config="HubertConfig", settings=_SOUND, dropout=_HEARD),
    "wav2vec2": TinyFamily(model="Wav2Vec2ForCTC", config="Wav2Vec2Config", settings=_SOUND, dropout=_HEARD),
    "bart": TinyFamily(model="BartForConditionalGeneration", config="BartConfig", settings=_WORDS, dropout=_DROPPED),
    "mbart": TinyFamily(model="MBartForConditionalGeneration", config="MBartConfig", settings=_WORDS, dropout=_DROPPED),
    "whisper": TinyFamily(
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        settings={**_STACKS, "num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 64},
        dropout=_DROPPED,
    ),
    "clip": TinyFamily(model="CLIPForImageClassification", config="CLIPConfig", settings=_IMAGE, part="vision_config"),
    "modernbert": TinyFamily(
        model="ModernBertForMaskedLM",
        config="ModernBertConfig",
        settings={**_PLAIN, **_TOKENS, "cls_token_id": 0, "sep_token_id": 0, "num_hidden_layers": 4},
        dropout=("embedding_dropout",),
    ),
    "vit": TinyFamily(
        model="ViTForImageClassification",
        config="ViTConfig",
        settings=_IMAGE,
        dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}
_UNEVEN = (("encoder_layers", 3), ("encoder_ffn_dim", 80), ("decoder_attention_heads", 2))
_STABLE = (("feat_extract_norm", "layer"), ("do_stable_layer_norm", True), ("conv_bias", True))
_DEEPER = (("num_layers", 3), ("num_decoder_layers", 2), ("relative_attention_num_buckets", 6))
OTHER: dict[str, tuple[tuple[str, Any], ...]] = {
    "hubert": (*_STABLE, ("feat_proj_layer_norm", False), ("apply_spec_augment", False), ("ctc_zero_infinity", True)),
    "wav2vec2": (*_STABLE, ("mask_feature_prob", 0.1), ("ctc_loss_reduction", "mean"), ("num_conv_pos_embeddings", 7)),
    "mt5": (*_DEEPER, ("feed_forward_proj", "relu")),
    "t5": (*_DEEPER, ("feed_forward_proj", "gated-gelu"), ("tie_word_embeddings", False)),
    "umt5": (("num_heads", 2), ("num_decoder_layers", 3)),
    "bart": (*_UNEVEN, ("scale_embedding", True)),
    "mbart": (*_UNEVEN, ("activation_function", "relu")),
    "whisper": (*_UNEVEN, ("max_source_positions", 40)),
    "clip": (("patch_size", 16),),
    "modernbert": (("local_attention", 16), ("norm_bias", True), ("classifier_bias", True), ("attention_bias", True)),
    "vit": (("image_size", (16, 24)), ("qkv_bias", False), ("num_channels", 1)),
}
"""Another shape of each: a window that is shorter than the sequence, an image that is no square."""


_SOURCES = {id(_WORDS): 20, id(_RELATIVE): 20, id(_SOUND): 777}
"""Another length of what an encoder reads, or more samples than its tokens need."""


NORMED = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""A weight that is worked out from two parameters is no leaf, and torch asks for its gradient when it makes a fake."""


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("other", [False, True])
def test_parameters_are_those_of_transformers(family: str, other: bool) -> None:
    ours, theirs = counts(FormulaCase(family=family, more=OTHER[family] if other else ()))
    assert ours == theirs


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=pytest.mark.slow) if n in ("mbart", "mt5") else n for n in TINY]
)
def test_saved_tensors_are_those_of_transformers(family: str) -> None:
    for batch, more in ((2, ()), (3, OTHER[family])):
        source = _SOURCES.get(id(TINY[family].settings), 0) if more else 0
        case = FormulaCase(
            family=family, attention="sdpa", precision="bf16-pure", batch=batch, source=source, more=more
        )
        assert [str(difference) for difference in differences(case)] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_saved_tensors_with_dropout_are_those_of_transformers(family: str) -> None:
    case = FormulaCase(family=family, attention="eager", precision="fp32", dropout=0.1)
    assert [str(difference) for difference in differences(case)] == []


_BASE = {
    "model_type": "vit",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}


def test_an_image_says_how_long_it_is() -> None:
    """ViT-B/16 (arXiv 2010.11929, table 1): 14 x 14 patches and one token more; 86 million parameters."""
    model = parse_config({**_BASE, "num_labels": 1000}, name="vit-b")
    assert run_of(model).seq == 197 == run_of(model, RunRequest(tp=2)).seq
    assert fit(run_of(model), budget_bytes=2**40).seq == Edge(value=197, peak_bytes=forecast(run_of(model)).peak_bytes)
    with pytest.raises(UsageError, match="got --seq 512; an image of vit-b has 197 tokens"):
        run_of(model, RunRequest(seq=512))
    with pytest.raises(UsageError, match="got --loss chunked; vit-b has one prediction a sequence"):
        run_of(model, RunRequest(loss="chunked"))
    with pytest.raises(UsageError, match="which shards sequences of text; vit-b reads images"):
        run_of(model, RunRequest(cp=197))
    with pytest.raises(UsageError, match="a patch of 16 pixels does not fit an image of 8 x 8"):
        parse_config({**_BASE, "image_size": 8}, name="vit-b")
    with pytest.raises(UsageError, match="got image_size 'big'; expected a number of pixels"):
        parse_config({**_BASE, "image_size": "big"}, name="vit-b")
    with pytest.raises(UsageError, match="got num_labels 0; expected a whole number"):
        parse_config({**_BASE, "num_labels": 0}, name="vit-b")


_SPEECH = {
    "model_type": "whisper",
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "vocab_size": 51865,
}


def test_two_stacks_have_two_lengths() -> None:
    """Whisper tiny: 37,760,640 parameters with the encoder's sines, as transformers counts its published weights."""
    model = parse_config(_SPEECH, name="whisper-tiny")
    assert parameter_count(model) == 37_760_640
    run = run_of(model)
    assert (run.seq, run.source_seq) == (448, 1500)
    assert run_of(model, RunRequest(tp=2, zero=3, dp=2)).layout.sp is False
    words = parse_config({**_SPEECH, "model_type": "bart"}, name="small-bart")
    assert run_of(words).source_seq == run_of(words).seq == 1024
    assert run_of(words, RunRequest(seq=128, source_seq=512)).source_seq == 512
    for asked, said in (
        (RunRequest(source_seq=3000), "got --source-seq 3000; whisper-tiny reads audio of 1500 tokens"),
        (RunRequest(pp=2), "got --pp 2; whisper-tiny is an encoder with a decoder"),
        (RunRequest(packed=64), "got --packed with whisper-tiny, which is not a text-only decoder"),
        (RunRequest(reference="same"), "got a frozen model with whisper-tiny"),
        (RunRequest(lora="r=8"), "got --lora; whisper-tiny reads audio"),
    ):
        with pytest.raises(UsageError, match=said):
            run_of(model, asked)
    with pytest.raises(UsageError, match="got --source-seq 8; vit-b is not an encoder-decoder"):
        run_of(parse_config(_BASE, name="vit-b"), RunRequest(source_seq=8))


def test_ranks_share_both_stacks() -> None:
    """Of each layer's weights all but norms and biases of outputs are cut in two; so are heads of what it keeps."""
    model = parse_config({**_SPEECH, "model_type": "bart", "vocab_size": 128}, name="small-bart")
    asked = RunRequest(seq=64, source_seq=96, precision="bf16-pure", optimizer="none")
    whole = run_of(model, asked)
    half = run_of(model, replace(asked, tp=2))
    for layer in (model.layers[0], model.layers[-1]):
        one, two = (layer_region(run.signature, layer) for run in (whole, half))
        shared = [(a, b) for a, b in zip(one.weights, two.weights, strict=True) if a.numel != b.numel]
        assert all(a.numel == 2 * b.numel for a, b in shared)
        names = {a.name for a, b in zip(one.weights, two.weights, strict=True) if a.numel == b.numel}
        assert names == {w.name for w in one.weights if "norm" in w.name or w.name.endswith(("out.bias", "down.bias"))}


@NORMED
@pytest.mark.parametrize(
    "family", [n if n in ("t5", "vit", "wav2vec2") else pytest.param(n, marks=pytest.mark.slow) for n in TINY]
)
def test_casts_are_those_of_autocast(family: str) -> None:
    """Convolutions are products and keep a copy of their weight; after those of sound the stream is in 16 bits."""
    assert compare(*under_autocast(FormulaCase(family=family))) == []


@NORMED
@pytest.mark.parametrize(
    "family", [n if n in ("t5", "bart", "hubert") else pytest.param(n, marks=pytest.mark.slow) for n in TINY]
)
def test_casts_with_dropout(family: str) -> None:
    """A softmax of scores to which biases or a mask in fp32 were added is in fp32, and so is its mask. HuBERT with its
    norm at the end, which leaves the stream in 16 bits.
    """
    more = OTHER[family] if family in ("hubert", "wav2vec2") else ()
    case = FormulaCase(family=family, attention="eager", dropout=0.1, more=more)
    assert compare(*under_autocast(case)) == []


@NORMED
@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_casts_of_another_shape(family: str, attention: str) -> None:
    source = _SOURCES.get(id(TINY[family].settings), 0)
    case = FormulaCase(family=family, attention=attention, source=source, more=OTHER[family])
    assert compare(*under_autocast(case)) == []
