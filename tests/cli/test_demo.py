"""The demo, on a smaller model and for fewer steps."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from jettison.cli.demo_run import DemoSize, batches_of, run_demo
from jettison.core.errors import UsageError
from jettison.report.proof import Proof
from jettison.solve.plan import Plan
from jettison.train.data import standard_library_text

SMALL = DemoSize(layers=3, hidden=64, heads=4, kv_heads=2, ffn=192, sequence=64, micro_batch=2)


def test_the_whole_story(tmp_path):
    said = []
    result = run_demo(tmp_path / "demo", steps=3, size=SMALL, rounds=1, progress=said.append)
    result.require()
    assert result.losses_identical
    assert result.losses_plain == result.losses_planned
    assert len(result.losses_plain) == 3
    assert result.proof.measured_peak_bytes <= result.plan.budget_bytes < result.proof.baseline_peak_bytes
    assert result.plan.minimum_budget_bytes < result.plan.budget_bytes
    assert Plan.from_json((tmp_path / "demo" / "plan.json").read_text()) == result.plan
    assert Proof.from_json((tmp_path / "demo" / "proof.json").read_text()) == result.proof
    assert result.report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert any("step 3 of 3" in text for text in said)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(result.table())
    for text in ("budget", "predicted peak", "measured peak", "step time", "model.layers.", "proven"):
        assert text in captured.get()


def test_the_text_is_real_and_the_batches_are_the_same_every_time():
    text = standard_library_text()
    assert b"\nimport " in text
    first, again = next(batches_of(text, SMALL)), next(batches_of(text, SMALL))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert first["input_ids"].shape == (2, 64)


def test_no_steps_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="got 0 steps"):
        run_demo(tmp_path, steps=0)
