"""The rival harness: every eager rival trains to the same bits with fewer bytes, and can be undone."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.verify.differences import compare_gradients

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return SimpleNamespace(models=import_module("benchmarks.models"), rivals=import_module("benchmarks.rivals"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_rivals_save_bytes_and_keep_the_gradients(benchmarks, name):
    size = benchmarks.models.Size(layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocabulary=64, sequence=128)
    plain, batch = benchmarks.models.build(name, size)
    peaks = []
    for rival in benchmarks.rivals.EAGER:
        model, _ = benchmarks.models.build(name, size)
        handle = rival.apply(model, batch)

        def step(model=model):
            torch.manual_seed(3)
            benchmarks.models.loss_of(model, batch).backward()

        report = measured_peak(step, static_tensors=static_tensors(model, batch))
        peaks.append(report.peak_bytes)
        plain.zero_grad()
        step(plain)
        assert compare_gradients(plain, model).identical, rival.name
        handle.remove()
        assert not any("forward" in vars(module) for module in model.modules())
    assert max(peaks[1:]) < peaks[0]
    assert peaks[1] < peaks[2], "checkpointing every layer saves more than every second"
