"""Sound as it was recorded: real sizes, how long it is, what it keeps, and what of it no rank shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.core.errors import NotDescribed, UsageError
from jettison.families.config import parse_config
from jettison.formula.region import embedding_region, head_region, parameter_count
from jettison.predict.forecast import forecast
from jettison.report.ledger import advice
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve, run_of
from jettison.search.largest_fit import fit
from jettison.spec.model import ModelSpec

_BASE = {
    "model_type": "wav2vec2",
    "vocab_size": 32,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "layerdrop": 0.0,
}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}


def _model(**more: Any) -> ModelSpec:
    return parse_config({**_BASE, **more}, name="w2v")


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ({}, 94_396_320),
        (_LARGE, 315_461_792),
        ({**_LARGE, **_STABLE}, 315_471_520),
        ({"model_type": "hubert"}, 94_396_320),
    ],
)
def test_real_sizes_are_those_of_transformers(more: dict[str, Any], count: int) -> None:
    """Of Wav2Vec2ForCTC with 32 letters: base, large, and large as trained on LibriVox; HuBERT base."""
    assert parameter_count(_model(**more)) == count


def test_tokens_follow_from_samples() -> None:
    """A convolution over k samples with a step of t makes (n - k) // t + 1 of n: 49 of a second, as in the paper."""
    model = _model()
    assert run_of(model).seq == 49
    assert (run_of(model).source_seq, run_of(model, RunRequest(seq=749)).source_seq) == (16_000, 0)
    assert run_of(model, RunRequest(source_seq=240_000)).seq == 749
    assert model.audio is not None
    for frames in range(1, 300):
        samples = model.audio.samples(frames)
        assert (model.audio.frames(samples), model.audio.frames(samples - 1)) == (frames, frames - 1)
    sound = next(v for v in embedding_region(run_of(model, RunRequest(seq=749)).signature).tape.values)
    assert sound.shape == (1, 1, model.audio.samples(749))


def test_what_a_text_is_aligned_with() -> None:
    """15 seconds are 240 letters: a row of 481 fp32 numbers for each token and sequence, and no loss in 16 bits."""
    region = head_region(run_of(_model(), RunRequest(source_seq=240_000, micro_batch=3)).signature)
    kept = {s.role: s.value.nbytes for step in region.tape.steps for s in step.saved}
    assert kept["sums over alignments"] == 3 * 749 * 481 * 4
    assert kept["log-softmax output"] == 3 * 749 * 32 * 4
    assert kept["losses"] == 3 * 4


def test_ranks_share_layers_and_not_convolutions() -> None:
    model = _model()
    asked = RunRequest(seq=49, precision="bf16-pure", optimizer="none", dropout=0.0)
    whole, half = (embedding_region(run_of(model, replace(asked, tp=tp)).signature) for tp in (1, 2))
    assert [w.numel for w in whole.weights] == [w.numel for w in half.weights]
    assert whole.saved_bytes == half.saved_bytes
    stages = forecast(run_of(model, replace(asked, tp=2, pp=2, dp=2, zero=1))).stages
    assert len(stages) == 2
    assert run_of(model, replace(asked, tp=2)).layout.sp is False
    assert not any("--sp" in remark for remark in advice(resolve(model, replace(asked, tp=2))))


def test_the_longest_sound_is_found() -> None:
    model = _model(num_hidden_layers=2)
    run = run_of(model, RunRequest(source_seq=16_000))
    answer = fit(run, budget_bytes=2 * forecast(run).peak_bytes)
    assert answer.seq.value is not None
    again = forecast(run_of(model, RunRequest(seq=answer.seq.value))).peak_bytes
    assert again == answer.seq.peak_bytes <= answer.budget_bytes


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (RunRequest(tp=2, sp=True), "got --sp, which shards sequences of text; w2v reads audio"),
        (RunRequest(cp=2), "got --cp 2, which shards sequences of text; w2v reads audio"),
        (RunRequest(loss="fused"), "got --loss fused; w2v has CTC loss"),
        (RunRequest(lora="r=8"), "got --lora; w2v reads audio"),
        (RunRequest(packed=16), "got --packed with w2v"),
        (RunRequest(seq=50, source_seq=16_000), "w2v has 49 tokens for that many samples"),
        (RunRequest(source_seq=399), "got --source-seq 399; w2v needs 400 samples or more"),
    ],
)
def test_what_sound_does_not_have_is_refused(asked: RunRequest, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_of(_model(), asked)


def test_words_of_its_configuration() -> None:
    with pytest.raises(NotDescribed, match="got add_adapter True"):
        _model(add_adapter=True)
    for key, value in (
        ("conv_kernel", [10, 3]),
        ("conv_dim", []),
        ("conv_stride", [5, 2, 2, 2, 2, 2, True]),
        ("feat_extract_norm", "batch"),
        ("ctc_loss_reduction", "none"),
        ("num_conv_pos_embedding_groups", 7),
    ):
        with pytest.raises(UsageError, match=f"got {key} "):
            _model(**{key: value})
    assert "layerdrop 0.1 skips layers" in _model(layerdrop=0.1).left_out[0]
    assert (
        "layerdrop 0.1 skips layers"
        in parse_config({k: v for k, v in _BASE.items() if k != "layerdrop"}, name="w").left_out[0]
    )
