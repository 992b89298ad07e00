"""CUDA memory snapshots, read and written; torch's own reader is asked about what was written."""

import contextlib
import io
import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.cuda import _memory_viz

from jettison.core.errors import UsageError
from jettison.diagnose import snapshot as reader
from jettison.diagnose.plain_pickle import loads_plain
from jettison.diagnose.snapshot import FREE_BLOCK, PENDING_BLOCK, read_snapshot, snapshot_of
from jettison.memory.timeline import Label, MemoryTimeline, TimelineWriter
from jettison.report.snapshot import compare_timelines
from jettison.report.timeline_files import GRANULARITY_BYTES, snapshot_content, write_snapshot
from support.snapshot_cases import ENGINE, event, random_timeline, small_snapshot


def simple() -> MemoryTimeline:
    writer = TimelineWriter("simple")
    writer.already(1000, Label(module="a", role="parameters"))
    first = writer.allocate(2000, Label(module="a.b", role="linear input", site="forward"), 1000)
    writer.mark("half way")
    writer.allocate(500, Label(module="a", role="gradients"), 2000)
    writer.free(first, 3000)
    return writer.timeline()


def test_a_timeline_by_hand() -> None:
    timeline = simple()
    assert timeline.start_bytes == 1000
    assert timeline.live_bytes.tolist() == [3000, 3500, 1500]
    assert (timeline.peak_event, timeline.peak_bytes, timeline.end_bytes) == (1, 3500, 1500)
    assert list(timeline.shares(1, "role").items()) == [
        (("linear input",), (2000, 1)),
        (("parameters",), (1000, 1)),
        (("gradients",), (500, 1)),
    ]
    assert timeline.shares(2, "role") == {("parameters",): (1000, 1), ("gradients",): (500, 1)}


def test_a_snapshot_of_torchs_structure() -> None:
    device = snapshot_of(small_snapshot(), "small").busiest
    timeline = device.timeline
    assert timeline.start_bytes == 1024 + 500
    assert timeline.live_bytes.tolist() == [3572, 1524, 5620, 4596, 5108]
    assert timeline.peak_bytes == 5620
    assert timeline.time_ns.tolist() == [10_000, 20_000, 30_000, 40_000, 50_000]
    assert not device.complete
    assert device.reserved_bytes == 4096 + 1536 + (1 << 21)
    assert timeline.end_bytes + 12 == sum(segment.allocated_bytes for segment in device.segments)
    assert timeline.shares(0, "module", "role") == {
        ("model/blocks.py:41 forward", "forward"): (2048, 1),
        ("", "unknown"): (1024, 1),
        ("me/train.py:12 <module>", "optimizer"): (500, 1),
    }
    assert timeline.peak_event == 2
    assert timeline.peak_roles == {"backward": 4096, "unknown": 1024, "optimizer": 500}


def test_segments_alone_are_what_is_there() -> None:
    """What older files hold, and snapshots without a recorded history."""
    device = snapshot_of(small_snapshot()["segments"], "old").busiest
    assert device.timeline.peak_bytes == device.timeline.end_bytes == 500 + 512 + 4096
    assert device.timeline.peak_event == -1


def test_blocks_segments_and_stacks_are_read() -> None:
    """A block that is freed and still in use by a stream is neither allocated nor free."""
    content = small_snapshot()
    content["segments"][0]["blocks"][0]["state"] = "active_pending_free"
    device = snapshot_of(content, "small").busiest
    first, second = device.segments
    assert [(b.address, b.nbytes, b.allocation) for b in first.blocks] == [
        (0, 2048, PENDING_BLOCK),
        (2048, 1536, FREE_BLOCK),
        (3584, 512, 1),
        (4096, 512, 4),
        (4608, 1024, FREE_BLOCK),
    ]
    assert (first.allocated_bytes, first.free_pieces_bytes) == (1024, (1536, 1024))
    assert device.addresses.tolist() == [2048, 3584, 4096, 1 << 21, 4096]
    assert [len(device.stacks[n]) for n in device.stack_of] == [0, 2, 5, 1, 2]
    (grown,) = device.reserved_changes
    assert (grown.event, grown.address, grown.nbytes, grown.is_mapped) == (2, 1 << 21, second.total_bytes, False)
    trace = small_snapshot()
    trace["device_traces"][0].append({**event("segment_free", 1 << 22, 512, [], 90), "stream": 7})
    assert snapshot_of(trace, "x").devices[0].reserved_changes[-1].stream == 7


def test_a_frame_without_a_line() -> None:
    """torch writes -1 as an unsigned number of 64 bits."""
    content = small_snapshot()
    content["device_traces"][0][0]["frames"] = [{"name": "run", "filename": "/home/me/loop.py", "line": (1 << 64) - 1}]
    device = snapshot_of(loads_plain(pickle.dumps(content), "small"), "small").busiest
    assert ("run", "/home/me/loop.py", 0) in {frame for stack in device.stacks for frame in stack}


def test_out_of_memory_is_a_mark() -> None:
    content = small_snapshot()
    content["device_traces"][0].append({**event("oom", 0, 1 << 40, ENGINE, 70), "device_free": 5})
    (mark,) = snapshot_of(content, "oom").busiest.timeline.marks
    assert mark.text == "out of memory: 1.00 TiB asked for, 5 B free"


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    timelines = [simple(), random_timeline(2000, most_live=60)]
    write_snapshot(tmp_path / "x.pickle", timelines)
    devices = read_snapshot(tmp_path / "x.pickle").devices
    assert [device.index for device in devices] == [0, 1]
    for written, device in zip(timelines, devices, strict=True):
        found = device.timeline
        assert device.complete
        assert np.array_equal(found.live_bytes, written.live_bytes)
        assert np.array_equal(found.time_ns // 1000, written.time_ns // 1000)
        assert found.start_bytes == written.start_bytes
        shares = found.shares(found.peak_event, "module", "role", "site")
        assert shares == written.shares(written.peak_event, "module", "role", "site")
        assert len(compare_timelines(written, found).changes) == len({(module, role) for module, role, _ in shares})
        assert all(change.verdict == "same" for change in compare_timelines(written, found).changes)
    assert [mark.text for mark in devices[0].timeline.marks] == ["half way"]


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "x.pickle", [simple(), random_timeline(500, most_live=40)])
    content = pickle.loads((tmp_path / "x.pickle").read_bytes())
    summary = _memory_viz.segsum(content)
    assert f"segments: {len(content['segments'])}" in summary
    assert f"total_allocated: {_memory_viz.Bytes(1000 + 500)}" in summary  # the second device ends empty
    text = _memory_viz.trace(content)
    assert "Device 0" in text and "Device 1" in text
    made = sum(e["action"] == "segment_alloc" for trace in content["device_traces"] for e in trace)
    assert text.count(" = cudaMalloc(") == made > 1
    # a line for what a block holds, and one for the gap behind it, which rounding leaves in each of these
    stacks = _memory_viz.memory(content, format_flamegraph=str)
    assert "stream_0;active_allocated;<jettison>:0:;a:0:parameters 1000" in stacks
    assert _memory_viz.segments(content, format_flamegraph=str).count(";seg_") == 2 * len(content["segments"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        _memory_viz.compare(content["segments"][:2], content["segments"], format_flamegraph=str)
    assert "only_before = []" in said.getvalue()
    assert "snapshot.pickle" in _memory_viz.trace_plot(content)
    assert _memory_viz.segment_plot(content)


def test_no_two_allocations_share_an_address() -> None:
    timeline = random_timeline(1500, most_live=80)
    content = snapshot_content([timeline])
    live: dict[int, int] = {}
    for entry in content["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = -(-entry["size"] // GRANULARITY_BYTES) * GRANULARITY_BYTES
            spans = sorted(live.items())
            assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
    assert not live


WRONG: dict[str, Any] = {
    "a number": 7,
    "no segments": {"device_traces": []},
    "segments of text": {"segments": ["x"]},
    "a segment without blocks": {"segments": [{"device": 0, "address": 0, "total_size": 1}]},
    "a trace of numbers": {"segments": [], "device_traces": [[1]]},
    "an event without an address": {"segments": [], "device_traces": [[{"action": "alloc", "size": 1}]]},
    "a negative size": {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]]},
    "a size of text": {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": "1"}]]},
    "frames of numbers": {
        "segments": [],
        "device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "frames": [1]}]],
    },
    "a device of text": {"segments": [{"device": "x", "blocks": []}]},
}


@pytest.mark.parametrize("name", WRONG)
def test_another_structure_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError, match="no CUDA memory snapshot") as caught:
        snapshot_of(WRONG[name], "it")
    assert "\n" not in str(caught.value)


def test_what_is_shared_a_million_times_is_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_EVENTS", 10_000)
    big = {"device": 0, "address": 0, "total_size": 1, "blocks": [{"size": 0}] * 1000}
    with pytest.raises(UsageError, match="10,000"):
        snapshot_of({"segments": [big] * 1_000_000, "device_traces": []}, "it")


def test_bytes_by_chance_never_break_the_reader(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "x.pickle", [random_timeline(30, most_live=9)])
    data, chance = (tmp_path / "x.pickle").read_bytes(), random.Random(1)
    refused = 0
    for _ in range(1500):
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 6)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        (tmp_path / "y.pickle").write_bytes(broken[: chance.choice([len(broken), chance.randrange(len(broken))])])
        try:
            read_snapshot(tmp_path / "y.pickle")
        except UsageError:
            refused += 1
    assert refused > 1000


def test_two_snapshots_by_module_and_role() -> None:
    before, after = simple(), TimelineWriter("after")
    after.already(1000, Label(module="a", role="parameters"))
    after.allocate(750, Label(module="a", role="gradients"), 0)
    after.allocate(64, Label(module="c", role="norm input"), 0)
    found = compare_timelines(before, after.timeline())
    assert [(c.module, c.role, c.change_bytes, c.verdict) for c in found.changes] == [
        ("a.b", "linear input", -2000, "vanished"),
        ("a", "gradients", 250, "grew"),
        ("c", "norm input", 64, "appeared"),
        ("a", "parameters", 0, "same"),
    ]
    assert (found.before_peak_bytes, found.after_peak_bytes) == (3500, 1814)
    assert found.by_role() == {
        "linear input": (2000, 0),
        "gradients": (500, 750),
        "norm input": (0, 64),
        "parameters": (1000, 1000),
    }
