"""One shape a schema: what commands print is held to it, unknown keys included; the published JSON Schemas are it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from jettison.cli.main import run
from jettison.core.documents import check, document, json_schema, keys_of, schema_names

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "schemas"
LIVE = """
import torch
from torch import nn

def trio():
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*blocks), (torch.randn(16, 32),), lambda out: out.square().mean()
"""
SEARCH = ["search", "gpt2", "--gpus", "2", "--gpu", "a100-80gb", "--global-batch", "2", "--seq", "128", "--cp", "1"]
SEARCH += ["--jobs", "1", "--recompute", "none,full", "--top", "2"]
DESCRIBED = [
    (["ledger", "gpt2"], 0, "ledger"),
    (["ledger", "gpt2", "--no-entries", "--pp", "4"], 0, "ledger"),
    (["ledger", "gpt2", "--gpu", "t4", "--fit", "--explain", "--seq", "128"], 0, "ledger"),
    (["ledger", "gpt2", "--budget", "1MiB"], 3, "ledger"),
    (["ledger", "gpt2", "--budget", "4GiB", "--recompute", "auto", "--offload"], 0, "ledger"),
    (["plan", "gpt2", "--gpu", "t4", "--micro-batch", "16", "--what-if"], 0, "plan"),
    (["plan", "gpt2", "--budget", "1MiB", "--dp", "2"], 3, "plan"),
    (["estimate", "gpt2", "--gpu", "a100-80gb", "--pp", "2"], 0, "estimate"),
    (["estimate", "gpt2", "--gpu", "a100-80gb", "--explain"], 0, "estimate"),
    (SEARCH, 0, "search"),
    ([*SEARCH, "--budget", "200MiB"], 3, "search"),
    (["list"], 0, "list"),
    (["list", "policies"], 0, "list"),
    (["doctor"], 0, "doctor"),
    (["ledger", "gpt-3"], 2, "error"),
    (["ledger", "gpt2", "--budget", "1MiB", "--recompute", "auto"], 3, "error"),
    (["estimate", "gpt2"], 2, "error"),
]


def printed(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 0) -> dict[str, Any]:
    assert run([*arguments, "--format", "json"]) == code
    out = capsys.readouterr().out
    name = check(out)
    found: dict[str, Any] = json.loads(out)
    assert tuple(found) == keys_of(name), "keys in the order of the schema, all of them"
    return found


@pytest.mark.parametrize(("arguments", "code", "schema"), DESCRIBED, ids=[" ".join(a[0][:4]) for a in DESCRIBED])
def test_documents_of_described_runs(
    arguments: list[str], code: int, schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, arguments, code)
    assert found["schema"] == f"jettison.{schema}/1"
    assert found["request"] is not None, "what was asked is in the document"
    if schema in ("plan", "search", "estimate"):
        assert found["request"]["model"] == "gpt2"
    if "--no-entries" in arguments:
        assert found["entries"] is None
    elif schema == "ledger":
        assert len(found["entries"]) > 100


def test_documents_of_live_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "live_models.py").write_text(LIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "live_models", raising=False)
    model = "live_models:trio"
    assert printed(capsys, ["ledger", model])["request"]["model"] == model
    assert printed(capsys, ["plan", model, "--budget", "1kB"], 3)["feasible"] is False
    made = printed(capsys, ["plan", model, "--budget", "250kB", "--out", "plan.json", "--snapshot", "step.pickle"])
    assert made["made_from"] == "trace" and json.loads(Path("plan.json").read_text()) == made
    proof = printed(capsys, ["verify", "plan.json", "--rounds", "1", "--out", "proof.json"])
    assert proof["request"]["target"] == "plan.json" and proof["passed"]
    printed(capsys, ["verify", model, "--budget", "1kB"], 3)
    exported = printed(capsys, ["export", "plan.json", "--to", "torch"])
    assert exported["request"] == {"plan": "plan.json", "to": "torch"}
    assert len(printed(capsys, ["report", "plan.json", "plan.json"])["subjects"]) == 2
    printed(capsys, ["report", "proof.json", "--force"])
    printed(capsys, ["report", "step.pickle", "--force"])
    printed(capsys, ["report", "step.pickle", "step.pickle", "--force"])
    printed(capsys, ["doctor", "--oom", "step.pickle"])
    printed(capsys, ["doctor", "--model", model])
    printed(capsys, ["profile", "step.pickle"])


def test_what_a_handle_and_a_run_say() -> None:
    import torch
    from torch import nn

    import jettison
    from jettison.train.export_weights import ExportResult
    from jettison.train.run_folder import TrainResult

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))
    batch = (torch.randn(4, 8),)
    with jettison.apply(model, "full", batch=batch, loss_fn=lambda out: out.sum()) as handle:
        model(*batch).sum().backward()
        assert check(json.dumps(handle.report().document())) == "jettison.applied/1"
    unknown = ("stopped", "first_loss", "last_loss", "step_seconds", "tokens_per_second", "mfu", "hfu", "budget")
    unknown += ("first_step_peaks", "second_step_peaks", "later_peaks", "predicted_peak_bytes", "checkpoint")
    result = TrainResult(steps=2, resumed_step=0, log="out", **dict.fromkeys(unknown))  # type: ignore[arg-type]
    assert check(json.dumps(result.document())) == "jettison.run/1"
    assert check(json.dumps(ExportResult(step=1, export="weights").document())) == "jettison.weights/1"


def test_a_schema_is_strict_about_keys_and_types() -> None:
    good = {"schema": "jettison.error/1", "error": "UsageError", "message": "no", "exit_code": 2, "details": {}}
    good["request"] = {"arguments": []}
    assert check(json.dumps(good)) == "jettison.error/1"
    for wrong in ({"more": 1}, {"exit_code": "2"}, {"request": None}):
        with pytest.raises(ValidationError):
            check(json.dumps(good | wrong))
    with pytest.raises(ValidationError):
        check(json.dumps({key: value for key, value in good.items() if key != "message"}))
    assert list(document("jettison.error/1", message="no")) == list(good)


def test_a_renamed_key_stands_beside_its_former_name_which_is_deprecated(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, ["estimate", "gpt2", "--gpu", "a100-80gb"])
    properties = json_schema("jettison.estimate/1")["properties"]
    former = {"prediction_error": "sureness", "micro_batches_without_recompute": "whole_micro_batches"}
    for key, old in former.items():
        assert found[key] == found[old]
        assert properties[old]["deprecated"] and "deprecated" not in properties[key]
    assert document("jettison.search/1", pareto_front=[])["front"] == []


@pytest.mark.parametrize("name", schema_names())
def test_published_schemas_are_what_is_generated(name: str) -> None:
    """`python -m jettison.core.documents docs/schemas` writes them; within a version keys are only added."""
    path = PUBLISHED / f"{name.replace('/', '-')}.json"
    assert json.loads(path.read_text(encoding="utf-8")) == json_schema(name)
    assert json_schema(name)["description"] and json_schema(name)["properties"]["schema"]["const"] == name


def test_nothing_else_is_published() -> None:
    assert {path.name for path in PUBLISHED.glob("*.json")} == {
        f"{name.replace('/', '-')}.json" for name in schema_names()
    }
