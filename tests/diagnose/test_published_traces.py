"""Traces that others recorded on GPUs, and what was read wrongly in them at first."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from jettison.diagnose.finding import FindingKind
from jettison.diagnose.profile_file import profile_of, read_profile
from jettison.diagnose.slow_steps import slow_findings
from jettison.diagnose.step_profile import profile_steps

FOLDER = Path(__file__).parent / "published"
FILES = sorted(FOLDER.glob("*.json.gz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_a_published_trace_is_read(path: Path) -> None:
    """In each the device waits for the host, as it does in so small programs; nothing else is said of a training."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    lengths = [event["dur"] for event in events if event.get("cat") in ("kernel", "Kernel")]
    found = profile_steps(read_profile(path))
    assert found.kernels == len(lengths) > 0
    assert found.median_kernel_ns == pytest.approx(1000 * median(lengths), abs=1)
    assert found.ns >= 1000 * sum(lengths)
    kinds = [finding.kind for finding in slow_findings(found)]
    assert kinds[-1] is FindingKind.GAPS and set(kinds) <= {FindingKind.GAPS, FindingKind.BLOCKING_COPIES}


def test_there_are_published_traces() -> None:
    assert len(FILES) == 4


def traced(*calls: tuple[str, int, int], marked: bool = True) -> Any:
    """Two kernels of 100 µs with 10 ms between them, and these calls of the runtime: name, begin, length in µs."""
    events: list[dict[str, Any]] = []

    def add(cat: str, name: str, start: int, length: int) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "pid": 1, "tid": 1, "args": {}})

    for start in (0, 10_100):
        add("kernel", "gemm", start, 100)
    for name, start, length in calls:
        add("cuda_runtime", name, start, length)
    if marked:
        add("user_annotation", "ProfilerStep#3", 0, 10_200)
    return profile_steps(profile_of({"traceEvents": events}, "trace.json"))


def test_a_wait_explains_as_much_of_a_gap_as_it_took() -> None:
    """Without it the host would have been so far ahead, and no farther."""
    short = traced(("cudaDeviceSynchronize", 80, 21)).waiting
    assert (short.sync_ns, short.host_ns) == (21_000, 10_000_000 - 21_000)
    none = traced().waiting
    assert (none.sync_ns, none.host_ns) == (0, 10_000_000)


def test_a_copy_that_blocks_the_host_is_no_launch() -> None:
    """Of pageable memory ``cudaMemcpyAsync`` is as long as the copy, and the device has nothing to do meanwhile."""
    found = traced(("cudaMemcpyAsync", 1_100, 8_000)).waiting
    assert (found.sync_ns, found.host_ns) == (8_000_000, 2_000_000)


def test_memory_from_the_driver_is_a_first_steps_own() -> None:
    """Where nothing marks steps, the trace may begin with the first."""
    calls = ("cudaMalloc", 200, 9_000)
    assert traced(calls).waiting.allocator_ns == 10_000_000
    unmarked = traced(calls, marked=False).waiting
    assert (unmarked.allocator_ns, unmarked.host_ns) == (0, 10_000_000)
