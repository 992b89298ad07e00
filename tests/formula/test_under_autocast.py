"""Layers under torch.autocast: the closed form has each tensor that a recorded model saves there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jettison.formula.tape import Writer
from jettison.ledger.compare import compare
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.layout import Layout
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run
from support import formula_cases
from support.cuda_lists import cuda_lists
from support.formula_cases import DENSE, FormulaCase, under_autocast, written

QUICK = {("llama", "sdpa"), ("gpt2", "eager"), ("qwen3", "eager"), ("bert", "eager"), ("gemma3_text", "sdpa")}


def asked(case: FormulaCase) -> Run:
    return replace(formula_cases.run_of(case), precision=PRECISIONS["bf16-autocast"])


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(family, attention, marks=() if (family, attention) in QUICK else (pytest.mark.slow,))
        for family in DENSE
        for attention in formula_cases.FAMILIES[family].attentions
    ],
)
def test_every_saved_tensor_is_the_recorded_one(family: str, attention: str) -> None:
    assert compare(*under_autocast(FormulaCase(family=family, attention=attention, precision="fp32"))) == []


@pytest.mark.parametrize("family", ["olmo2", pytest.param("bert", marks=pytest.mark.slow)])
def test_dropout_masks_are_as_wide_as_probabilities(family: str) -> None:
    """OLMo 2 casts them to the dtype that queries had before they were rotated; BERT leaves what a mask makes wide."""
    case = FormulaCase(family=family, attention="eager", dropout=0.1, padding=family == "bert")
    assert compare(*under_autocast(case)) == []


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt_neox", "qwen3", "olmo2"))]
)
def test_what_is_in_fp32_on_cuda_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, softmax and powers, as in GPT-2's GELU: a CPU that is given CUDA's lists."""
    monkeypatch.setattr(Writer, "listed", property(lambda w: w.run.precision.casts is not None))
    case = FormulaCase(family=family, attention="eager", sequence=29)  # no other test has regions of this size
    with cuda_lists():
        assert compare(*under_autocast(case)) == []
    layers = [e for e in written(asked(case)).entries if e.layer == "layers.0" and e.role == "softmax output"]
    assert {e.dtype for e in layers} == {"float32"}


def test_a_product_keeps_copies_of_its_input_and_of_its_weight() -> None:
    """q, k and v each make a copy of one input, as cached_cast caches leaves alone."""
    case = FormulaCase(family="llama ungrouped", attention="sdpa", precision="fp32")
    run = asked(case)
    b, s, h = case.batch, case.sequence, run.model.hidden
    narrow = [e for e in written(run).entries if e.layer == "layers.0" and e.dtype == "bfloat16"]
    inputs = {e.storage for e in narrow if e.storage_bytes == 2 * b * s * h and e.role == "linear input"}
    weights = {e.storage for e in narrow if e.role == "weight in the dtype of GEMMs"}
    assert (len(inputs), len(weights)) == (5, 7)  # of three products each, and of two


def test_whose_casts_they_are(tmp_path: Path) -> None:
    """FSDP casts what modules are given."""
    run = asked(FormulaCase(family="llama", attention="sdpa", precision="fp32"))
    assert run.autocast and run.signature.precision.compute == "float32" and run.signature.precision.casts == "bfloat16"
    assert replace(run, layout=Layout(dp=2, zero=2)).autocast
    assert not replace(run, layout=Layout(dp=2, zero=3)).autocast
    assert not replace(run, precision=PRECISIONS["bf16"]).autocast
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 1, "state_size": 8, "vocab_size": 320}
        ),
        encoding="utf-8",
    )
    assert run_of(str(path), RunRequest(precision="bf16-autocast", seq=16)).autocast
