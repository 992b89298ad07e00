"""`jettison ledger A --compare B`: the closed form and a trace of the same model have the same saved tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jettison.cli.main import run

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
FLAGS = ("--precision", "fp32", "--kernels", "huggingface")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A configuration, and the document of its trace at s = 32."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("compare")
    config, document = folder / "config.json", folder / "traced.json"
    config.write_text(json.dumps(CONFIG))
    assert run(["ledger", str(config), "--trace", "--seq", "32", "--precision", "fp32", "--out", str(document)]) == 0
    return str(config), str(document)


def test_the_closed_form_is_the_trace(traced: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    config, document = traced
    capsys.readouterr()
    arguments = ["ledger", config, "--seq", "32", *FLAGS, "--compare", document]
    assert run([*arguments, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["compare"]
    assert found == {"with": document, "equal": True, "differences": []}
    assert run(arguments) == 0
    assert "has the same saved tensors in every layer, to the byte" in " ".join(capsys.readouterr().out.split())


def test_another_run_differs_and_exits_4(traced: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    config, document = traced
    arguments = ["ledger", config, "--seq", "48", *FLAGS, "--compare", document]
    capsys.readouterr()
    assert run([*arguments, "--format", "json"]) == 4
    out, err = capsys.readouterr()
    found = json.loads(out)["compare"]
    assert not found["equal"]
    ids = next(d for d in found["differences"] if "token ids" in d["text"])
    assert (ids["layer"], ids["delta_bytes"]) == ("embedding, head and loss", 8 * (32 - 48))
    assert f"{document} differs in {len(found['differences'])} saved tensors" in err
    assert run(arguments) == 4
    assert "and 40 more" in capsys.readouterr().out


def test_what_is_no_ledger_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in (
        (tmp_path / "missing.json", "cannot be read"),
        (tmp_path / "plan.json", "is a plan; read it with: jettison report"),
    ):
        if path.name == "plan.json":
            path.write_text('{"schema": "jettison.plan/1"}')
        assert run(["ledger", "gpt-22b", "--compare", str(path)]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
