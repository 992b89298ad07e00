"""T5 and those like it: real sizes, biases that the first layer of a stack makes, and what of them ranks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.formula.region import layer_region, parameter_count
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.solve.checkpoint_policy import policy_named
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

_T5 = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_kv": 64,
    "n_positions": 512,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 32,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "t5-small": ({"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}, 60_506_624),
    "t5-base": ({"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}, 222_903_552),
    "t5-large": ({"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}, 737_668_096),
    "t5-3b": ({"d_model": 1024, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "d_kv": 128}, 2_851_598_336),
    "t5-11b": ({"d_model": 1024, "d_ff": 65536, "num_layers": 24, "num_heads": 128, "d_kv": 128}, 11_307_321_344),
    "flan-t5-base": ({"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, **_GATED}, 247_577_856),
    "mt5-small": (
        {
            "model_type": "mt5",
            "d_model": 512,
            "d_ff": 1024,
            "num_layers": 8,
            "num_heads": 6,
            "vocab_size": 250112,
            **_GATED,
        },
        300_176_768,
    ),
}


def _real(name: str, **more: Any) -> ModelSpec:
    return parse_config({**_T5, **REAL[name][0], **more}, name=name)


@pytest.mark.parametrize("name", REAL)
def test_real_sizes_are_as_published(name: str) -> None:
    """Counted of the published weights; those whose head is not tied say so."""
    model = _real(name)
    assert parameter_count(model) == REAL[name][1]
    assert bool(model.left_out) is ("tie_word_embeddings" in REAL[name][0])


def _kept(run: Run, number: int, policy: str) -> int:
    program = layer_region(run.signature, run.model.layers[number]).program
    return program.kept_bytes(policy_named(policy).kept(program))


def test_the_first_layer_of_a_stack_pays_for_what_all_read() -> None:
    """Biases stay for whoever has to add them again: a s^2 of 16 bits; and as many zeros, where an encoder is asked."""
    model = _real("t5-11b")
    run = run_of(model, RunRequest(seq=256, source_seq=384, kernels="huggingface", dropout=0.0))
    sent, given = _kept(run, 0, "full"), _kept(run, 1, "full")
    assert given == 384 * 1024 * 2
    assert sent - given == 128 * 384 * 384 * 2
    assert _kept(run, 24, "full") - _kept(run, 25, "full") == 128 * 256 * (256 + 384) * 2
    # without recompute nothing keeps what an eager sum has read, but for the bucket of each distance
    eager = replace(run, kernels=run.kernels.with_attention("eager"))
    assert _kept(eager, 0, "none") - _kept(eager, 1, "none") == 384 * 384 * 8
    every = run_of(parse_config({**_T5, **REAL["t5-11b"][0], "model_type": "umt5"}, name="umt5"), RunRequest(seq=256))
    assert _kept(every, 0, "full") == _kept(every, 1, "full") == 256 * 1024 * 2


def test_ranks_share_biases_by_their_heads() -> None:
    model = _real("t5-small")
    asked = RunRequest(seq=64, source_seq=96, kernels="huggingface", dropout=0.0)
    one, two = (run_of(model, replace(asked, tp=tp)) for tp in (1, 2))
    assert _kept(one, 0, "full") - _kept(one, 1, "full") == 8 * 96 * 96 * 2
    assert _kept(two, 0, "full") - _kept(two, 1, "full") == 4 * 96 * 96 * 2
    tables = [
        next(w.numel for w in layer_region(run.signature, model.layers[0]).weights if "biases" in w.name)
        for run in (one, two)
    ]
    assert tables == [32 * 8, 32 * 4]
    sharded = run_of(model, replace(asked, dp=4, zero=3, tp=2, recompute="full"))
    assert forecast(sharded).peak_bytes < forecast(one).peak_bytes


def test_positions_have_no_end_and_stages_are_refused() -> None:
    model = _real("t5-small")
    run = run_of(model, RunRequest(seq=1024))
    assert (run.seq, run.source_seq) == (1024, 1024)
    assert run_of(model, RunRequest(seq=32, source_seq=4096)).source_seq == 4096
    for asked, said in (
        (RunRequest(pp=2), "got --pp 2; t5-small is an encoder with a decoder"),
        (RunRequest(cp=2), "got --cp 2; t5-small is an encoder with a decoder"),
        (RunRequest(tp=16), "--tp 16 does not divide the 8 attention heads"),
        (RunRequest(source_seq=-1), "got --source-seq -1; t5-small reads 1 or more tokens"),
    ):
        with pytest.raises(UsageError, match=said):
            run_of(model, asked)


def test_words_of_a_feed_forward_block() -> None:
    with pytest.raises(UsageError, match="got feed_forward_proj 'gated-silu-fast'; expected an activation"):
        _real("t5-small", feed_forward_proj="gated-silu-fast")
    with pytest.raises(UsageError, match="lacks d_kv"):
        parse_config({key: value for key, value in {**_T5, **REAL["t5-small"][0]}.items() if key != "d_kv"}, name="t5")
