"""Snapshots as tables, JSON and a page; the page in a real browser."""

import json
import zlib
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jettison.cli.main import run
from jettison.diagnose.snapshot import read_snapshot, snapshot_of
from jettison.report.snapshot import SnapshotReport, packed_timeline, snapshot_table, timelines_page
from jettison.report.timeline_files import write_snapshot
from support.browser import Open, axe_violations, no_sideways_scroll
from support.snapshot_cases import FORWARD, fragmented_snapshot, random_timeline, small_snapshot


def test_a_packed_timeline_holds_all_of_it() -> None:
    timeline = random_timeline(400, most_live=50)
    packed = packed_timeline(timeline)
    order, time = packed["order"], packed["time"]
    following = packed["before"]
    for event, back in enumerate(order):
        assert (back == 0) == timeline.is_birth[event]
        assert timeline.allocation[event] == (following if back == 0 else following - back)
        following += back == 0
    assert (packed["start_ns"] + np.cumsum(time) == timeline.time_ns).all()
    assert packed["nbytes"] == timeline.nbytes.tolist()
    assert [packed["labels"][n][1] for n in packed["label_of"]] == [timeline.labels[n].role for n in timeline.label_of]
    assert len(zlib.compress(json.dumps(packed).encode())) < 8 * len(order)


def text_of(report: Any) -> str:
    console = Console(width=140, file=StringIO())
    console.print(report)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_tables_and_documents() -> None:
    small = snapshot_of(small_snapshot(), "small")
    text = text_of(snapshot_table(small))
    assert "5.49 KiB (5620B)" in text
    assert "oldest events are missing" in text
    document = SnapshotReport(snapshot=small).document()
    assert document["schema"] == "jettison.snapshot/1"
    assert document["devices"][0]["peak_bytes"] == 5620
    assert sum(row["bytes"] for row in document["devices"][0]["peak"]) == 5620
    other = snapshot_of(small_snapshot()["segments"], "later")
    both = SnapshotReport(snapshot=small, other=other)
    assert sum(c["after_bytes"] - c["before_bytes"] for c in both.document()["changes"]) == 5108 - 5620
    assert "vanished" in text_of(both.table())
    json.dumps(both.document(), allow_nan=False)


def test_estimate_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, snapshot = tmp_path / "t.json", tmp_path / "s.pickle"
    request = ["estimate", "gpt-22b", "--gpu", "a100-80gb", "--tp", "8", "--pp", "2", "--micro-batches", "4"]
    assert run([*request, "--timeline", str(trace), "--snapshot", str(snapshot), "--format", "json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert "ui.perfetto.dev" in said.err
    assert json.loads(trace.read_text())["otherData"]["step_seconds"] == document["step_seconds"]
    devices = read_snapshot(snapshot).devices
    assert len(devices) == 2
    assert max(device.timeline.peak_bytes for device in devices) == document["peak_bytes"]
    assert run([*request, "--timeline", str(trace)]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.browser
def test_the_page_in_a_browser(tmp_path: Path, open_page: Open) -> None:
    timeline = random_timeline(6000, most_live=300)
    path = tmp_path / "page.html"
    path.write_text(timelines_page("by chance", [packed_timeline(timeline) | {"name": "first"}]), encoding="utf-8")
    opened = open_page(path)
    page = opened.page
    assert page.evaluate("document.querySelector('canvas.main').dataset.draws") != "0"
    peak = page.locator(".timeline summary").inner_text()
    assert f"({timeline.peak_bytes}B)" in peak
    found = page.evaluate(
        """() => {
          const data = J.timeline.read(J.data("timelines")[0]), groups = data.grouped(([, role]) => role, 99);
          const out = new Float64Array(groups.count), checks = [];
          for (let e = -1; e < data.events; e += 97) checks.push([e, data.after(e), d3.sum(groups.levels(e, out))]);
          const ranges = [[0, data.events], [3, 70], [64, 128], [63, 4097], [5000, 5001], [1, 12000]];
          return [checks, ranges.map(([a, b]) => [a, b, data.total[data.most(a, b)], data.total[data.least(a, b)]]),
            [...data.total].length, data.rows(data.peak_event).length];
        }"""
    )
    checks, ranges, events, rows = found
    assert events == len(timeline.live_bytes) == 12_000
    for event, after, summed in checks:
        assert after == summed == (timeline.start_bytes if event < 0 else timeline.live_bytes[event])
    for a, b, most, least in ranges:
        assert (most, least) == (timeline.live_bytes[a:b].max(), timeline.live_bytes[a:b].min())
    assert rows == len(timeline.shares(timeline.peak_event, "module", "role"))
    canvas = page.locator("canvas.main")
    canvas.focus()
    for key in ("p", "+", "ArrowRight", ".", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert "from event" in page.locator(".read").inner_text()
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.6)
    assert "role" in page.locator(".read").inner_text()
    assert not axe_violations(opened)
    assert no_sideways_scroll(opened, 390)


@pytest.mark.browser
def test_segments_and_stacks_in_a_browser(tmp_path: Path, open_page: Open) -> None:
    """Segments at every event are those that the allocator had, and an allocation shows its whole stack."""
    content, states = fragmented_snapshot()
    device = snapshot_of(content, "fragmented").busiest
    path = tmp_path / "page.html"
    path.write_text(SnapshotReport(snapshot=snapshot_of(content, "fragmented")).html(), encoding="utf-8")
    opened = open_page(path)
    page = opened.page
    found = page.evaluate(
        """() => {
          const data = J.timeline.read(J.data("timelines")[0]), memory = J.timeline.memory(data);
          return Array.from({ length: data.events }, (_, e) => {
            const segments = memory.segmentsAt(e), sums = memory.summary(segments);
            const blocks = (s) => s.blocks.map((b) => [b.at, b.size, b.number < 0 ? -1 : data.nbytes[b.number]]);
            return [segments.map(blocks), memory.reserved(e), sums.largest, sums.unusable, sums.allocated];
          });
        }"""
    )
    assert len(found) == len(states) == len(device.timeline.live_bytes)
    for state, live, (segments, reserved, largest, unusable, allocated) in zip(
        states, device.timeline.live_bytes, found, strict=True
    ):
        assert [[tuple(one) for one in own] for own in segments] == state
        pieces = [size for own in state for _, size, requested in own if requested < 0]
        assert reserved == sum(size for own in state for _, size, _ in own)
        assert (largest, unusable) == (max(pieces, default=0), sum(n for n in pieces if n < max(pieces)))
        assert allocated == live
    page.locator("canvas.main").focus()
    for key in ("ArrowUp", "Enter"):
        page.keyboard.press(key)
    chosen = page.locator(".allocation")
    assert "addresses" in chosen.inner_text() and page.evaluate("document.activeElement.className") == "allocation"
    page.locator(".map canvas[tabindex]").focus()
    for key in ("ArrowDown", "Home", "ArrowRight", "End"):
        page.keyboard.press(key)
    assert "in a segment of" in page.locator(".map .read").inner_text()
    forward = next(n for n, frames in enumerate(device.stacks) if len(frames) == len(FORWARD))
    number = int(np.nonzero((device.stack_of == forward) & (device.timeline.died >= len(states)))[0][0])
    segment, at = next(
        (s, n)
        for s, one in enumerate(sorted(device.segments, key=lambda s: (-s.total_bytes, s.address)))
        for n, block in enumerate(one.blocks)
        if block.allocation == number
    )
    page.get_by_role("button", name="Go to the end").click()
    page.locator(".map canvas[tabindex]").focus()
    for key in (*["ArrowDown"] * (segment + 1), *["ArrowRight"] * at, "Enter"):
        page.keyboard.press(key)
    assert f"({device.timeline.nbytes[number]}B)" in chosen.inner_text()
    assert chosen.locator("li").count() == len(FORWARD) - 1
    page.get_by_label("C++ frames").check()
    assert chosen.locator("li").count() == len(FORWARD)
    assert not axe_violations(opened)
    assert no_sideways_scroll(opened, 390)


@pytest.mark.browser
def test_many_events_pan_smoothly(tmp_path: Path, open_page: Open) -> None:
    """How smoothly a million do is for the benchmark; here, that a drawing's work does not grow with the events."""
    path = tmp_path / "page.html"
    path.write_text(
        timelines_page("many", [packed_timeline(random_timeline(60_000, most_live=900)) | {"name": "many"}]),
        encoding="utf-8",
    )
    opened = open_page(path, width=1440)
    spent = opened.page.evaluate(
        """async () => {
          const canvas = document.querySelector("canvas.main"), times = [];
          for (let i = 0; i < 30; i += 1) {
            canvas.dispatchEvent(new KeyboardEvent("keydown", { key: i % 2 ? "ArrowLeft" : "+" }));
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            times.push(Number(canvas.dataset.ms));
          }
          return Math.min(...times);
        }"""
    )
    assert spent < 50


@pytest.mark.browser
def test_two_snapshots_on_a_page(tmp_path: Path, open_page: Open) -> None:
    path = tmp_path / "page.html"
    small = snapshot_of(small_snapshot(), "<b>small</b>")
    later = snapshot_of(small_snapshot()["segments"], "later")
    path.write_text(SnapshotReport(snapshot=small, other=later).html(), encoding="utf-8")
    opened = open_page(path)
    assert opened.page.locator("#difference").count() == 1
    assert opened.page.locator("canvas.main").count() == 2
    roles = opened.page.locator(".timeline:not(.map) .legend").first.locator("li").all_inner_texts()
    assert any(role.startswith("before the recording") and "1.00 KiB" in role for role in roles)
    assert "<b>small</b>" in opened.page.locator("h1").inner_text()
    assert not axe_violations(opened)


def test_report_reads_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, page = tmp_path / "one.pickle", tmp_path / "two.pickle", tmp_path / "page.html"
    write_snapshot(one, [random_timeline(50, most_live=9)])
    write_snapshot(two, [random_timeline(60, seed=1, most_live=9)])
    assert run(["report", str(one), str(two), "--out", str(page), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    before, after = document["devices"][0]["peak_bytes"], document["other"]["devices"][0]["peak_bytes"]
    assert sum(c["after_bytes"] - c["before_bytes"] for c in document["changes"]) == after - before
    assert "Content-Security-Policy" in page.read_text(encoding="utf-8")
    assert run(["report", str(one), "--out", str(page), "--force"]) == 0
    assert "At the peak, by role" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"\x80\x04cos\nsystem\n.", b"\x80\x04}.", b"\x80\x04]"])
def test_report_refuses_other_pickles_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    assert run(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_report_refuses_a_snapshot_beside_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_snapshot(tmp_path / "one.pickle", [random_timeline(5)])
    (tmp_path / "plan.json").write_text("{}")
    files = [str(tmp_path / name) for name in ("one.pickle", "plan.json")]
    assert run(["report", *files, "--out", str(tmp_path / "page.html")]) == 2
    assert "two of a kind" in capsys.readouterr().err
