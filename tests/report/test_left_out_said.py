"""What a configuration has beside the text model, and no figure counts: said by exports, by reports and on pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jettison
from jettison.cli.main import run
from jettison.families.config import left_out_of
from jettison.families.family import FAMILIES
from jettison.report.explorer import explorer_page
from jettison.report.report_subject import read_subject
from jettison.spec.frameworks import named

INNER = {
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
OUTER = {"model_type": "internvl", "text_config": INNER, "quantization_config": {"quant_method": "awq"}}
SAID = "quantization_config (awq) is left out: weights are those of --precision"
DESCRIBED = [target for target in named("targets") if target not in ("torch_remat", "accelerate", "lightning")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("left-out") / "config.json"
    path.write_text(json.dumps(OUTER), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(config: Path) -> Path:
    out = config.parent / "plan.json"
    asked = ["--tp", "1", "--budget", "200MiB", "--kernels", "megatron"]
    assert run(["plan", str(config), *asked, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("target", DESCRIBED)
def test_an_export_says_it(target: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = jettison.export_plan(made, to=target)
    assert found.document()["warnings"] == [SAID]
    for name, text in found.files.items():
        if name.endswith((".py", ".md")):
            assert SAID in text
    assert run(["export", str(made), "--to", target]) == 0
    assert SAID in " ".join(capsys.readouterr().err.split())
    assert run(["export", str(made), "--to", target, "--out", str(tmp_path / "out")]) == 0
    assert "quantization_config (awq)" in capsys.readouterr().out


def test_a_report_and_the_explorer_say_it(config: Path, made: Path) -> None:
    assert ("left out", SAID) in read_subject(made).facts
    assert f"{config.parent.name}: {SAID}." in explorer_page([str(config)], panels=())
    assert "left out" not in explorer_page([], panels=()).partition("<main>")[0].partition("<header>")[2]


def test_an_estimates_document_says_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", str(config), "--gpu", "h100-80gb", "--format", "json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert SAID in document["warnings"]


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("qwen2", "Qwen2ForSequenceClassification", True),
        ("qwen2", "Qwen2Model", True),
        ("qwen2", "Qwen2ForCausalLM", False),
        ("gpt2", "GPT2LMHeadModel", False),
        ("bert", "BertForPreTraining", False),
        ("bert", "BertForTokenClassification", True),
        ("bart", "BartForCausalLM", True),
        ("bart", "BartForConditionalGeneration", False),
    ],
)
def test_another_head_than_the_one_described_is_said(kind: str, name: str, said: bool) -> None:
    family = FAMILIES[kind]
    found = [remark for remark in left_out_of({"architectures": [name]}, {}, family) if name in remark]
    assert len(found) == said
