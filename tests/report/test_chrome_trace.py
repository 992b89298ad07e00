"""A described step over time: slices tile it, allocations peak where the ledger says."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from jettison.cli.estimate import EstimateFlags, estimate
from jettison.core.errors import UsageError
from jettison.memory.step import Event, actions
from jettison.predict.forecast import replayed_load
from jettison.predict.stage_units import sent_to_host
from jettison.report.estimate import EstimateReport
from jettison.report.step_slices import SliceKind, host_copies, nanoseconds, step_slices
from jettison.report.timeline_files import (
    ALLOCATED,
    DEVICE,
    FROM_HOST,
    ROLES,
    TO_HOST,
    chrome_events,
    chrome_json,
    stage_memory,
    step_trace,
)
from jettison.request.options import RunRequest

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("gpt-22b", {"tp": 8}),
    "accumulating": ("llama3-8b", {"kernels": "pytorch", "micro_batches": 3}),
    "tied": ("gpt-22b", {"tp": 8, "kernels": "pytorch", "micro_batches": 2}),
    "segments": ("gpt-22b", {"tp": 8, "recompute": "every:5", "micro_batches": 2}),
    "1f1b": ("gpt-175b", {"tp": 8, "pp": 8, "micro_batches": 16, "kernels": "pytorch"}),
    "interleaved": ("gpt-175b", {"tp": 8, "pp": 8, "micro_batches": 16, "virtual_stages": 3, "recompute": "selective"}),
    "zero bubble": ("llama3-8b", {"tp": 2, "pp": 4, "micro_batches": 12, "schedule": "zero-bubble"}),
    "zero bubble of torch": (
        "llama3-8b",
        {"tp": 2, "pp": 4, "micro_batches": 12, "schedule": "zero-bubble", "stage_buffers": True},
    ),
    "its checkpoints": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 8, "schedule": "zero-bubble", "stage_buffers": True, "recompute": "full"},
    ),
    "its segments": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 4, "schedule": "zero-bubble", "stage_buffers": True, "recompute": "every:3"},
    ),
    "in a v": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 9, "schedule": "zero-bubble-v", "virtual_stages": 2, "stage_buffers": True},
    ),
    "interleaved buffers": ("llama3-8b", {"pp": 4, "micro_batches": 8, "virtual_stages": 2, "stage_buffers": True}),
    "gpipe": ("gpt-175b", {"tp": 8, "pp": 8, "micro_batches": 16, "schedule": "gpipe", "kernels": "pytorch"}),
    "as many as stages": ("llama3-8b", {"tp": 2, "pp": 4, "micro_batches": 4, "schedule": "zero-bubble"}),
    "two rounds": ("llama3-8b", {"pp": 4, "micro_batches": 8, "virtual_stages": 2, "keep_stage_outputs": True}),
    "offload": ("llama3-8b", {"pp": 4, "micro_batches": 8, "recompute": "full", "offload": True}),
    "zero 3": ("llama3-8b", {"dp": 8, "zero": 3, "micro_batches": 2, "recompute": "full"}),
    "whole": (
        "gpt-175b",
        {"tp": 8, "pp": 8, "micro_batches": 32, "recompute": "full", "micro_batches_without_recompute": "2"},
    ),
    "added": ("llama-1b-mha", {"like": "nanotron", "seq": 1024, "pp": 2, "micro_batches": 3}),
    "added in halves": ("llama3-8b", {"like": "nanotron", "pp": 2, "micro_batches": 4, "schedule": "zero-bubble"}),
    "copied gradients": ("llama3-8b", {"like": "deepspeed", "dp": 8, "zero": 3, "micro_batches": 2}),
    "tied in fp32": ("gpt2-xl", {"micro_batches": 3, "precision": "fp32"}),
    "gpipe, buffers": ("llama3-8b", {"pp": 4, "micro_batches": 8, "schedule": "gpipe", "gradients": "upfront"}),
    "zero bubble, buffers": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 8, "schedule": "zero-bubble", "gradients": "upfront", "recompute": "full"},
    ),
    "zero bubble of torch, interleaved": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 8, "schedule": "zero-bubble", "virtual_stages": 2, "stage_buffers": True},
    ),
    "received": ("gpt-175b", {"like": "megatron-0.19", "tp": 8, "pp": 8, "micro_batches": 16, "virtual_stages": 3}),
    "reduced by chunk": (
        "llama3-8b",
        {
            "like": "torchtitan",
            "dp": 4,
            "pp": 4,
            "virtual_stages": 2,
            "micro_batches": 8,
            "reshard_after_forward": "always",
        },
    ),
    "auto": ("llama3-8b", {"dp": 8, "zero": 3, "recompute": "auto", "micro_batch": 4, "offload": True}),
}


def made(name: str) -> EstimateReport:
    model, flags = RUNS[name]
    return estimate(model, RunRequest(**flags), EstimateFlags(gpu="h100-80gb"))


@pytest.mark.parametrize("name", RUNS)
def test_slices_tile_the_step(name: str) -> None:
    report = made(name)
    passes = step_slices(report.memory, report.found)
    for own in passes:
        at = 0
        for one in (one for played in own for one in played.slices):
            assert one.begin_ns == at
            assert one.end_ns >= at
            at = one.end_ns
        assert at == nanoseconds(report.found.step_seconds)


@pytest.mark.parametrize("name", RUNS)
def test_slices_add_up_to_the_estimate(name: str) -> None:
    report = made(name)
    found, index = report.found, report.found.busiest
    spent: defaultdict[SliceKind, int] = defaultdict(int)
    count = 0
    for one in (one for played in step_slices(report.memory, found)[index] for one in played.slices):
        spent[one.kind] += one.end_ns - one.begin_ns
        count += 1
    near = {"abs": 2e-9 * count}
    busy = sum(spent[kind] for kind in (SliceKind.FORWARD, SliceKind.RECOMPUTE, SliceKind.BACKWARD, SliceKind.TRANSFER))
    assert busy / 1e9 == pytest.approx(found.replay.busy[index], **near)
    assert spent[SliceKind.RECOMPUTE] / 1e9 == pytest.approx(found.breakdown.recompute, **near)
    assert spent[SliceKind.OPTIMIZER] / 1e9 == pytest.approx(found.stages[index].optimizer, **near)


@pytest.mark.parametrize("name", RUNS)
def test_the_highest_allocation_is_the_ledgers_peak(name: str) -> None:
    report = made(name)
    trace = step_trace(name, report.memory, report.found)
    for stage, timeline in zip(report.memory.stages, trace.memory, strict=True):
        assert timeline.peak_bytes == stage.peak.nbytes
        optimizer = timeline.marks[1]
        assert optimizer.text == "optimizer"
        before = max(timeline.start_bytes, int(timeline.live_bytes[: optimizer.event].max()))
        rows = stage.timeline(first_step=True)
        assert before == max(m.nbytes for m in rows if m.phase not in ("optimizer", "after the step"))


@pytest.mark.parametrize("name", ["offload", "auto"])
def test_copies_move_what_is_sent(name: str) -> None:
    report = made(name)
    memory, passes = report.memory, step_slices(report.memory, report.found)
    for stage in memory.stages:
        sent = [sent_to_host(memory.run, chunk) for chunk in stage.groups]
        moved = list(host_copies(stage, passes[stage.index], sent, report.found.hardware))
        total = memory.run.micro_batches * sum(sum(names.values()) for names in sent)
        gone = {(copy.name, copy.micro_batch): copy.end_ns for copy in moved if copy.to_host}
        for way in (True, False):
            own = [copy for copy in moved if copy.to_host is way]
            assert sum(copy.nbytes for copy in own) == total > 0
            assert all(a.end_ns <= b.begin_ns for a, b in pairwise(own)), "one link, one copy at a time"
        for copy in moved:
            assert copy.to_host or copy.begin_ns >= gone[copy.name, copy.micro_batch], "nothing returns before it left"


@pytest.mark.parametrize("name", RUNS)
def test_a_step_leaves_gradients_alone(name: str) -> None:
    report = made(name)
    for stage in report.memory.stages:
        load = replayed_load(report.memory.run, stage)
        found = actions(load)
        gradients = load.gradient_bytes - found.actions[0].gradients - sum(load.freed)
        stays = load.there(Event.BACKWARD) - load.there(Event.FORWARD) + load.micro_batches * sum(load.transfers)
        first = found.actions[0].level + (load.received if load.receives == 0 else 0)
        assert found.behind == first + gradients + stays


@pytest.mark.parametrize("name", ["1f1b", "offload", "auto"])
def test_tensor_by_tensor_is_the_same_bytes(name: str) -> None:
    report = made(name)
    passes, step_ns = step_slices(report.memory, report.found), nanoseconds(report.found.step_seconds)
    for stage in report.memory.stages[:2]:
        coarse = stage_memory(report.memory, stage.index, passes[stage.index], step_ns=step_ns)
        fine = stage_memory(report.memory, stage.index, passes[stage.index], step_ns=step_ns, by_tensor=True)
        assert fine.peak_bytes == coarse.peak_bytes
        assert fine.end_bytes == coarse.end_bytes
        if name == "1f1b":
            roles = {label.role for label in fine.labels}
            assert {"softmax output", "linear input", "norm statistics"} <= roles
            layers = range(12 * stage.index, 12 * stage.index + 12)
            modules = {label.module for label in fine.labels if label.role == "softmax output"}
            assert modules == {f"layers.{layer}.attention" for layer in layers}


@pytest.mark.parametrize("name", ["1f1b", "offload", "zero bubble"])
def test_a_chrome_trace(name: str) -> None:
    report = made(name)
    trace = step_trace(name, report.memory, report.found)
    document = json.loads(chrome_json(trace))
    events = document["traceEvents"]
    assert document["otherData"]["step_seconds"] == report.found.step_seconds
    for stage in report.memory.stages:
        own = [e for e in events if e["pid"] == stage.index]
        counters = [e for e in own if e["ph"] == "C" and e["name"] == ALLOCATED]
        assert max(e["args"]["bytes"] for e in counters) == stage.peak.nbytes
        roles = [sum(e["args"].values()) for e in own if e["ph"] == "C" and e["name"] == ROLES]
        assert roles == [e["args"]["bytes"] for e in counters]
        assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
        slices = [e for e in own if e["ph"] == "X" and e["tid"] == DEVICE]
        assert sum(e["dur"] for e in slices if e["cat"] == "step") == pytest.approx(2e6 * report.found.step_seconds)
        work = [e for e in slices if e["cat"] not in ("step", "pass")]
        assert sum(e["dur"] for e in work) == pytest.approx(2e6 * report.found.step_seconds)
        copies = [e for e in own if e["ph"] == "X" and e["tid"] in (TO_HOST, FROM_HOST)]
        assert bool(copies) == (name == "offload")
        for way in (TO_HOST, FROM_HOST):  # one copy at a time
            rows = [e for e in copies if e["tid"] == way]
            assert all(b["ts"] >= a["ts"] + a["dur"] - 1e-3 for a, b in pairwise(rows))
        if copies:
            sent = [sum(e["args"]["bytes"] for e in copies if e["tid"] == way) for way in (TO_HOST, FROM_HOST)]
            assert sent[0] == sent[1] > 0


def test_arrows_go_from_each_pass_to_the_one_that_needs_it() -> None:
    report = made("1f1b")
    events = list(chrome_events(step_trace("1f1b", report.memory, report.found)))
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * 2 * 16 * 7  # steps, directions, micro-batches, borders
    assert all(abs(ends[i]["pid"] - begins[i]["pid"]) == 1 for i in begins)
    assert all(ends[i]["ts"] >= begins[i]["ts"] for i in begins)


def test_too_many_micro_batches_are_refused() -> None:
    report = estimate("gpt-175b", RunRequest(tp=8, pp=8, micro_batches=4200), EstimateFlags(gpu="h100-80gb"))
    with pytest.raises(UsageError, match="4200 micro-batches"):
        step_slices(report.memory, report.found)
