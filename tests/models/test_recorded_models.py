"""Models that nobody described: their blocks from a trace, in the record that described ones fill."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.model_types import (
    CLOSED,
    GROUPED,
    ONE_CHUNK,
    PAGE,
    ROWS,
    ROWS_FILE,
    SEQUENCE,
    TOWER,
    TRIED,
    UNEXPLAINED,
    tiny_config,
    tried,
)

from jettison.capture.fake_copies import fake_mode
from jettison.cli.estimate import EstimateFlags, estimate
from jettison.cli.ledger import ledger
from jettison.cli.plan import PlanFlags, plan
from jettison.core.errors import NotDescribed, UsageError
from jettison.families.config import parse_config
from jettison.families.family import FAMILIES, PAIRS
from jettison.formula.region import parameter_count
from jettison.models import spec_from_name
from jettison.models.huggingface import ConfigRequest, build, config_of
from jettison.models.recorded_models import recorded_model
from jettison.models.spec_from_name import described_model
from jettison.predict.forecast import Forecast, forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.largest_fit import fit
from jettison.spec.model import ModelSpec

REQUEST = RunRequest(seq=SEQUENCE, micro_batch=ROWS, precision="bf16-pure")


def _recorded(kind: str, request: RunRequest = REQUEST) -> ModelSpec:
    return recorded_model(tiny_config(kind), request, name=kind)


def _run(model: ModelSpec, **more: Any) -> Forecast:
    return forecast(resolve(model, replace(REQUEST, **more)).run)


def _file(folder: Path, kind: str) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(tiny_config(kind)), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("kind", ["bitnet", "bigbird_pegasus", "deit"])
def test_parameters_and_saved_bytes_are_the_traces(kind: str) -> None:
    found = tried(kind)
    assert found.way == "trace"
    assert found.exact, (found.parameters, found.saved)
    assert found.row in _rows()


@pytest.mark.parametrize(
    "kind", ["qwen2_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"))]
)
def test_text_among_images_has_its_tables_for_each_sequence(kind: str) -> None:
    found = tried(kind)
    assert (found.way, found.exact) == (TOWER, True)


def test_first_files_of_a_wrapper_hold_its_text_themselves() -> None:
    values = tiny_config("qwen2_vl")
    text = {**values.pop("text_config"), **values, "model_type": "qwen2_vl"}
    assert parse_config(text, name="tiny").hidden == parse_config(tiny_config("qwen2_vl"), name="tiny").hidden == 64


def test_the_page_has_every_type_once() -> None:
    """Those with an entry of a table in closed form, others by trace or refused; all that are answered are equal."""
    text, rows = PAGE.read_text(encoding="utf-8"), _rows()
    ways = {row["model_type"]: row["by"] for row in rows}
    assert len(rows) == len(ways) and ways.keys() == set(TRIED)
    assert all(text.count(f"`{kind}`") == 1 for kind in TRIED)
    assert {kind for kind, way in ways.items() if way == CLOSED} == set(TRIED) & (set(FAMILIES) | set(PAIRS))
    assert set(ways.values()) == {CLOSED, TOWER, "trace", "refused"}
    unequal = {row["model_type"] for row in rows if row["saved_bytes"] != row["trace_saved_bytes"]}
    assert unequal == {*GROUPED, *ONE_CHUNK, *UNEXPLAINED}


def _rows() -> list[dict[str, str]]:
    return list(csv.DictReader(ROWS_FILE.read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("recompute", ["none", "full", "selective-op"])
def test_a_recorded_model_is_its_closed_form(recompute: str) -> None:
    """Of a family that has one: what a rank has on each stage, and the peak of a step, to the byte."""
    asked = replace(REQUEST, recompute=recompute, dp=2, zero=2, pp=2, micro_batches=3)
    described = resolve(
        parse_config(tiny_config("gpt_neox"), name="gpt_neox"), replace(asked, kernels="huggingface", dropout=0.0)
    ).run
    theirs = forecast(replace(described, kernels=described.kernels.on_cpu()))
    ours = forecast(resolve(_recorded("gpt_neox"), asked).run)
    assert parameter_count(ours.run.model) == parameter_count(described.model)
    for mine, other in zip(ours.stages, theirs.stages, strict=True):
        assert mine.static == replace(other.static, largest=mine.static.largest)
        assert mine.peak.nbytes == other.peak.nbytes


def test_zero_shares_what_is_whole_in_a_block() -> None:
    """Every weight of bloom divides by 4: with ZeRO 3 a rank has a quarter of each, in two bytes."""
    found = _run(_recorded("bloom"), dp=4, zero=3)
    assert found.stages[0].static.parameters * 4 == 2 * parameter_count(found.run.model)


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        ("bloom", {"tp": 2}, "got --tp 2, which shards blocks; the blocks of the architecture bloom are recorded"),
        ("bloom", {"cp": 2}, "got --cp 2, which shards blocks"),
        ("bloom", {"dropout": 0.1}, "--dropout does not apply to bloom"),
        ("bloom", {"precision": "fp8"}, "got --precision fp8; .* recorded in 16 or 32 bits"),
        ("t5", {"pp": 2}, "a block of t5 reads more than the previous block's output"),
    ],
)
def test_what_a_recording_cannot_answer_is_refused(kind: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _run(_recorded(kind), **asked)


def test_what_fits_ends_where_nothing_longer_can_be_recorded() -> None:
    run = _run(_recorded("bitnet")).run
    assert run.model.max_positions == 2 * SEQUENCE
    assert fit(run, budget_bytes=1 << 20, peak=lambda one: one.seq * one.micro_batch).seq.value is None


def test_an_image_has_the_length_of_its_configuration() -> None:
    with pytest.raises(UsageError, match="--seq does not apply to vit"):
        _recorded("vit")


def test_the_commands_take_it(tmp_path: Path) -> None:
    model = _file(tmp_path, "bitnet")
    asked = replace(REQUEST, dp=2, zero=1)
    report = ledger(model, asked)
    assert report.parameters == parameter_count(_recorded("bitnet"))
    assert "recorded by a trace" in report.warnings[0]
    assert estimate(model, asked, EstimateFlags(gpu="a100-80gb")).found.step_seconds > 0
    peak = report.stages[0].peak_bytes
    planned = plan(model, asked, PlanFlags(budget=f"{peak * 9 // 10}B"))
    assert planned.choice.forecast.peak_bytes <= peak * 9 // 10


def test_without_the_libraries_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_from_name, "can_record", lambda: False)
    with pytest.raises(NotDescribed, match=r"Any other is recorded where torch and transformers are installed"):
        described_model(_file(tmp_path, "bitnet"), REQUEST)


@pytest.mark.parametrize("kind", ["llava"])
def test_a_tower_is_counted_to_the_parameter(kind: str, tmp_path: Path) -> None:
    """Beside a closed form: every weight that transformers builds, and words for what no text runs."""
    found = described_model(_file(tmp_path, kind), REQUEST)
    values = tiny_config(kind)
    built = build(config_of(values, kind), ConfigRequest(), fake_mode(allow_non_fake_inputs=True))
    assert parameter_count(found) == sum(p.numel() for p in built.parameters())
    tower = parameter_count(found) - parameter_count(parse_config(values, name=kind))
    assert f"({tower:,} parameters) are counted with the embedding" in found.left_out[0]
    text, whole = (_run(model) for model in (parse_config(values, name=kind), found))
    assert whole.stages[0].static.parameters - text.stages[0].static.parameters == 2 * tower
