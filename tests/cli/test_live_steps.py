"""`plan` and `verify` write a live model's step, allocation by allocation: the same peaks to the byte."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from jettison.cli.main import run
from jettison.diagnose.snapshot import read_snapshot
from jettison.report.snapshot import SnapshotReport

FACTORY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def tower():
    torch.manual_seed(0)
    return Tower(), (torch.randn(256, 32),)
"""


@pytest.fixture
def tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "live_steps_model.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "live_steps_model", raising=False)
    return "live_steps_model:tower"


def phases(trace: dict[str, Any], pid: int) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]


def highest(trace: dict[str, Any], pid: int) -> int:
    counted = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == pid and e["name"] == "allocated"]
    return max(event["args"]["bytes"] for event in counted)


def test_a_planned_step_is_written_as_predicted_and_as_it_was(
    tower: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("plan.json", "plan-trace.json", "plan.pickle", "trace.json", "step.pickle")]
    made, predicted, forecast, trace, snapshot = map(str, files)
    flags = ["--budget", "1000KiB", "--format", "json"]
    assert run(["plan", tower, *flags, "--timeline", predicted, "--snapshot", forecast, "--out", made]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().err
    plan = json.loads(files[0].read_text())
    assert run(["verify", made, "--rounds", "1", "--format", "json", "--timeline", trace, "--snapshot", snapshot]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert any(layer["policy"] != "none" for layer in plan["layers"])

    before, after = (json.loads(Path(name).read_text()) for name in (predicted, trace))
    assert phases(before, 0) == phases(after, 0) == phases(after, 1) == ["forward", "backward", "optimizer"]
    assert before["otherData"]["peak_bytes"] == [plan["predicted"]["peak_bytes"]] == [highest(before, 0)]
    assert after["otherData"]["peak_bytes"] == [proof["measured_peak_bytes"], proof["baseline_peak_bytes"]]
    assert [highest(after, 0), highest(after, 1)] == after["otherData"]["peak_bytes"]

    planned, plain = read_snapshot(files[4]).devices
    assert [planned.timeline.peak_bytes, plain.timeline.peak_bytes] == after["otherData"]["peak_bytes"]
    found = SnapshotReport(snapshot=read_snapshot(files[4])).document()
    assert {"forward", "backward"} & {row["module"] for row in found["devices"][1]["peak"]}
    content = pickle.loads(files[4].read_bytes())
    assert "MemoryViz" in _memory_viz.trace_plot(content) and "MemoryViz" in _memory_viz.segment_plot(content)
    assert "total_allocated" in _memory_viz.segsum(content)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan gpt2 --gpu h100-80gb --timeline t.json", "jettison estimate"),
        ("verify {tower} --given --snapshot s.pickle", "--given"),
    ],
)
def test_what_has_no_such_step_is_refused(
    tower: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words.format(tower=tower).split()) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob("*.pickle"))
