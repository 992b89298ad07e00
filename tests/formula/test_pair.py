"""Images held against texts: CLIP as a whole, beside traces of transformers' code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.formula.region import embedding_region, head_region, layer_region, parameter_count
from jettison.ledger.compare import compare
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.model import ModelSpec
from support.formula_cases import FormulaCase, TinyFamily, counts, differences, under_autocast

_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
_BASE: dict[str, Any] = {"model_type": "clip", "architectures": ["CLIPModel"]}
_LARGE: dict[str, Any] = {
    "projection_dim": 768,
    "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
}
_TEXTS = {
    **_LAYERS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_IMAGES = {**_LAYERS, "hidden_size": 64, "intermediate_size": 96, "image_size": 32, "patch_size": 8}
WHOLE = TinyFamily(
    model="CLIPModel",
    config="CLIPConfig",
    settings={"text_config": _TEXTS, "vision_config": _IMAGES, "projection_dim": 40, "architectures": ["CLIPModel"]},
    dropout=(),
)
OTHER = replace(
    WHOLE,
    settings={
        **WHOLE.settings,
        "text_config": {**_TEXTS, "num_hidden_layers": 3, "hidden_act": "gelu", "eos_token_id": 2},
        "vision_config": {**_IMAGES, "image_size": 24, "num_channels": 1},
        "projection_dim": 24,
    },
)
TINY = {"clip whole": WHOLE, "clip other": OTHER}


def _model(**more: Any) -> ModelSpec:
    return parse_config({**_BASE, **more}, name="clip")


@pytest.mark.parametrize(("attention", "precision"), [("sdpa", "bf16-pure"), ("eager", "fp32")])
def test_saved_tensors_are_those_of_transformers(attention: str, precision: str) -> None:
    for batch, family in ((2, "clip whole"), (3, "clip other")):
        case = FormulaCase(family=family, attention=attention, precision=precision, batch=batch)
        assert [str(difference) for difference in differences(case)] == []
        ours, theirs = counts(case)
        assert ours == theirs


def test_casts_are_those_of_autocast() -> None:
    assert compare(*under_autocast(FormulaCase(family="clip whole", attention="sdpa"))) == []


@pytest.mark.parametrize(
    ("more", "count"), [({}, 151_277_313), ({"vision_config": {"patch_size": 16}}, 149_620_737), (_LARGE, 427_616_513)]
)
def test_real_sizes_are_as_published(more: dict[str, Any], count: int) -> None:
    """CLIP ViT-B/32, B/16 and L/14, of which published files leave out what is usual."""
    assert parameter_count(_model(**more)) == count
    assert _model(**more).left_out == ()


def test_a_file_that_says_nothing_is_an_image_classifier() -> None:
    values = {**_BASE, "vision_config": _IMAGES}
    del values["architectures"]
    model = parse_config(values, name="clip")
    assert model.pair is None and "the text tower is left out" in model.left_out[0]


def test_each_tower_is_as_wide_and_as_long_as_it_is() -> None:
    model = _model()
    run = run_of(model, RunRequest(micro_batch=3, precision="bf16-pure"))
    assert (run.seq, run.source_seq) == (77, 50)
    seen, read = (layer_region(run.signature, model.layers[number]).output.shape for number in (0, 12))
    assert (seen, read) == ((3, 50, 768), (3, 77, 512))
    assert model.depth == 24


def test_what_images_become_is_held_for_the_head() -> None:
    """Paid for once; logits are b x b, of a rank's own batch."""
    run = run_of(_model(), RunRequest(micro_batch=7, precision="bf16-pure"))
    before, after = embedding_region(run.signature), head_region(run.signature)
    held = [s.value for step in before.tape.steps for s in step.saved if step.name == "hold"]
    assert [value.shape for value in held] == [(7, 512)]
    assert next(v.shape for step in after.tape.steps for v in step.outputs if step.name == "aten.mm.default") == (
        7,
        512,
    )
    assert [s.value.shape for step in after.tape.steps for s in step.saved if s.role == "logits"] == [(7, 7)]


def test_ranks_share_both_towers() -> None:
    model = _model()
    asked = RunRequest(micro_batch=4, precision="bf16-pure")
    whole, half = (run_of(model, replace(asked, tp=tp)) for tp in (1, 2))
    for number in (0, 12):
        pairs = zip(*(layer_region(r.signature, model.layers[number]).weights for r in (whole, half)), strict=True)
        assert {a.numel // b.numel for a, b in pairs if len(a.shape) == 2} == {2}
    assert (
        forecast(run_of(model, replace(asked, dp=4, zero=3, recompute="full"))).peak_bytes < forecast(whole).peak_bytes
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (RunRequest(pp=2), "got --pp 2; clip is two towers"),
        (RunRequest(cp=7), "got --cp 7; clip is two towers"),
        (RunRequest(tp=2, sp=True), "got --sp; clip is two towers"),
        (RunRequest(lora="r=8"), "got --lora; clip is two towers"),
        (RunRequest(loss="fused"), "got --loss fused; clip has a contrastive loss"),
        (RunRequest(seq=78), "got --seq 78; clip has 77 positions"),
        (RunRequest(source_seq=49), "got --source-seq 49; an image of clip has 50 tokens"),
        (RunRequest(packed=7), "got --packed with clip"),
    ],
)
def test_what_two_towers_do_not_have_is_refused(asked: RunRequest, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_of(_model(), asked)


def test_sizes_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="got projection_dim 0"):
        _model(projection_dim=0)
    with pytest.raises(UsageError, match="for text_config and vision_config; expected two objects"):
        _model(text_config=["clip"])
