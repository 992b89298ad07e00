"""A counter's events as a timeline: the same bytes at every moment."""

from pathlib import Path

import torch
from torch import nn

from jettison.diagnose.snapshot import read_snapshot
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.report.timeline_files import write_snapshot
from jettison.verify.side_by_side import allocation_timeline


def test_a_real_step_as_a_timeline_and_as_a_snapshot(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(8, 16)
    with AllocationCounter(static_tensors(model, x), record_events=True) as counter:
        model(x).sum().backward()
    timeline = allocation_timeline("a step", counter.events)
    assert timeline.start_bytes == 4 * (16 * 64 + 64 + 64 * 4 + 4 + 8 * 16)
    later = [event.live_bytes for event in counter.events if event.operator != "static"]
    assert timeline.live_bytes.tolist() == later
    assert timeline.end_bytes == counter.live_bytes
    roles = {label.role for label in timeline.labels}
    assert {"static", "aten.addmm.default", "aten.gelu.default"} <= roles
    write_snapshot(tmp_path / "step.pickle", [timeline])
    assert read_snapshot(tmp_path / "step.pickle").busiest.timeline.live_bytes.tolist() == later


def test_a_storage_that_is_resized_is_another_one() -> None:
    with AllocationCounter(record_events=True) as counter:
        x = torch.empty(100)
        x.untyped_storage().resize_(1000)
        del x
    timeline = allocation_timeline("resized", counter.events)
    assert timeline.nbytes.tolist() == [400, 1000]
    assert timeline.live_bytes.tolist() == [400, 0, 1000, 0]
