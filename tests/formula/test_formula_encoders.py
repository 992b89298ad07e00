"""Encoders of text and of images: parameters, and saved tensors beside traces of transformers' code."""

from __future__ import annotations

from typing import Any

import pytest

from jettison.errors import UsageError
from jettison.predict.forecast import forecast
from jettison.predict.largest import Edge, fit
from jettison.predict.run_request import RunRequest, run_of
from jettison.spec.encoder_families import ENCODER_WRAPPERS, ENCODERS
from jettison.spec.huggingface_config import parse_config
from support import formula_cases
from support.formula_cases import _PLAIN, _TOKENS, FormulaCase, TinyFamily, counts, differences

_IMAGE = {**_PLAIN, "image_size": 32, "patch_size": 8}
TINY = {
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
OTHER: dict[str, tuple[tuple[str, Any], ...]] = {
    "clip": (("patch_size", 16),),
    "modernbert": (("local_attention", 16), ("norm_bias", True), ("classifier_bias", True), ("attention_bias", True)),
    "vit": (("image_size", (16, 24)), ("qkv_bias", False), ("num_channels", 1)),
}
"""Another shape of each: a window that is shorter than the sequence, an image that is no square."""


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formula_cases, "FAMILIES", {**formula_cases.FAMILIES, **TINY})


def test_every_family_is_tried() -> None:
    assert {ENCODER_WRAPPERS.get(name, name) for name in TINY} == set(ENCODERS)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("other", [False, True])
def test_parameters_are_those_of_transformers(family: str, other: bool) -> None:
    ours, theirs = counts(FormulaCase(family=family, more=OTHER[family] if other else ()))
    assert ours == theirs


@pytest.mark.parametrize("family", TINY)
def test_saved_tensors_are_those_of_transformers(family: str) -> None:
    for batch, more in ((2, ()), (3, OTHER[family])):
        case = FormulaCase(family=family, attention="sdpa", precision="bf16-pure", batch=batch, more=more)
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
    with pytest.raises(UsageError, match="which cuts a sequence; vit-b reads images"):
        run_of(model, RunRequest(cp=197))
    with pytest.raises(UsageError, match="a patch of 16 pixels does not fit an image of 8 x 8"):
        parse_config({**_BASE, "image_size": 8}, name="vit-b")
    with pytest.raises(UsageError, match="got image_size 'big'; expected a number of pixels"):
        parse_config({**_BASE, "image_size": "big"}, name="vit-b")
    with pytest.raises(UsageError, match="got num_labels 0; expected a whole number"):
        parse_config({**_BASE, "num_labels": 0}, name="vit-b")
