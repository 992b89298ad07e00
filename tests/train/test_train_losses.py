"""A run under a budget computes its losses over chunks of rows: the same losses, and torch's own function after it."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
from torch.nn import functional

from jettison.cli.train import train
from jettison.runtime import chunked_loss
from jettison.solve.plan import Plan
from jettison.train.recipe import BatchSection, LogSection, ModelSection, PlanSection, TrainRecipe


def test_a_run_under_a_budget_has_the_losses_of_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(chunked_loss, "CPU_CHUNK_BYTES", 0)
    recipe = TrainRecipe(
        model=ModelSection(architecture="gpt", layers=2, hidden=32, heads=2),
        steps=2,
        batch=BatchSection(global_batch=4, micro_batch=2, seq=64),
        log=LogSection(folder=str(tmp_path / "plain")),
    )
    plain = train(recipe)
    assert plain.second_step_peaks is not None
    budget = int(0.8 * plain.second_step_peaks.peak_bytes)
    log = LogSection(folder=str(tmp_path / "planned"))
    planned = train(replace(recipe, log=log, plan=PlanSection(budget=f"{budget}B")))
    (written,) = (tmp_path / "planned").rglob("plan*.json")
    assert Plan.from_json(written.read_text()).chunked_loss
    again = train(replace(recipe, log=LogSection(folder=str(tmp_path / "again")), plan=PlanSection(file=str(written))))
    for run in (planned, again):
        assert (run.first_loss, run.last_loss) == (plain.first_loss, plain.last_loss)
        assert run.second_step_peaks is not None and run.second_step_peaks.peak_bytes <= budget
    assert planned.predicted_peak_bytes is not None and planned.predicted_peak_bytes <= budget
    gc.collect()
    assert functional.cross_entropy.__code__ is chunked_loss._torchs.__code__
