"""More planted faults and healthy runs, of kinds that were missed or made up when somebody else planted them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jettison.diagnose.finding import Finding, FindingKind
from jettison.diagnose.log import facts_of_log
from jettison.diagnose.memory_facts import MemoryFacts, StepPhase, never_falls
from jettison.diagnose.out_of_memory import diagnose_memory
from jettison.diagnose.profile_file import profile_of
from jettison.diagnose.slow_steps import slow_findings
from jettison.diagnose.snapshot import facts_of_snapshot, snapshot_of
from jettison.diagnose.step_profile import profile_steps
from support.planted_memory import KEEPS, MIB, Tape, message, traceback
from support.planted_traces import COMPUTE, Plan, Trace

GIB = 1 << 30
TORCH = "/venv/lib/python3.11/site-packages/torch"
ME = ("/home/me/train.py", 40, "<module>")
CALL = (f"{TORCH}/nn/modules/module.py", 1780, "_call_impl")
FULL = message(asked="2.00", free="0.50", allocated="77.00", unused="0.25", used="78.65")
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.00 GiB, other allocations: 512.00 MiB, max allowed: "
    "20.00 GiB). Tried to allocate 4.00 GiB on private pool."
)


def in_log(text: str) -> tuple[MemoryFacts, Finding]:
    facts = facts_of_log(text, "run.log")
    return facts, diagnose_memory(facts)


def lines(found: Finding) -> str:
    return "\n".join(change.line for change in found.changes)


# logs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["[rank3]: ", "[default0]:", "2026-11-20 10:00:01,123 ERROR trainer: ", "\t"])
def test_what_stands_before_a_line_hides_no_phase(before: str) -> None:
    text = traceback(ME, CALL, ("/home/me/model.py", 12, "forward")) + FULL
    facts, _ = in_log("".join(f"{before}{line}\n" for line in text.splitlines()))
    assert (facts.phase, facts.site) == (StepPhase.FORWARD, "me/model.py:12 forward")


@pytest.mark.parametrize(
    "frames",
    [
        ((f"{TORCH}/serialization.py", 1500, "load"), (f"{TORCH}/_utils.py", 100, "_cuda")),
        ((f"{TORCH}/nn/modules/module.py", 1300, "to"), (f"{TORCH}/nn/modules/module.py", 900, "_apply")),
    ],
)
def test_before_the_first_step_no_plan_of_activations_is_advised(frames: Any) -> None:
    facts, found = in_log(traceback(ME, *frames) + FULL)
    assert (found.kind, facts.phase) == (FindingKind.PEAK, StepPhase.PARAMETERS)
    assert "auto_checkpoint" not in lines(found) and "fully_shard" in lines(found)


def test_memory_of_the_process_that_is_not_pytorchs() -> None:
    _, found = in_log(message(asked="2.00", free="0.10", allocated="50.00", unused="0.20", used="79.00"))
    assert (found.kind, "28.8 GiB" in found.claim) == (FindingKind.OUTSIDE, True)
    assert in_log(FULL)[1].kind is FindingKind.PEAK  # 1.4 GiB are a context's


def test_a_mac() -> None:
    facts, found = in_log(MPS)
    assert found.kind is FindingKind.PEAK
    assert (facts.requested_bytes, facts.free_bytes, facts.short_bytes) == (4 * GIB, 5 * GIB // 2, 3 * GIB // 2)


LEAKS = {
    "steps that begin anew": "".join(
        f"epoch {epoch} step {step} allocated: {60 + (6 * epoch + step) * 0.5:.2f} GiB\n"
        for epoch in range(4)
        for step in range(6)
    ),
    "units in names": "".join(
        f"{{'loss': 2.0, 'step': {step}, 'memory/allocated (GiB)': {70 + 0.5 * step}}}\n" for step in range(12)
    ),
    "every third step": "".join(f"step {step} allocated: {70 + step // 3} GiB\n" for step in range(14)),
}
STEADY = {
    "what a collector takes back": "".join(f"step {step} allocated: {70 + step % 5} GiB\n" for step in range(20)),
    "epochs of other sizes": "".join(
        f"epoch {epoch} step {step} allocated: {70 + 2 * epoch} GiB\n" for epoch in range(2) for step in range(10)
    ),
    "growth that ends": "".join(f"step {step} allocated: {70 + min(step, 8)} GiB\n" for step in range(20)),
    "the most that is reserved": "".join(
        f"step: {step}  loss: 8.2  memory: {60 + step}.00GiB(59.6%)  tps: 4,121\n" for step in range(12)
    ),
    "ranks that take turns": "".join(
        f"[rank{rank}] step {step - rank} allocated: {70 + rank} GiB\n" for step in range(1, 12) for rank in (1, 0)
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_leaks_however_they_are_printed(name: str) -> None:
    assert in_log(LEAKS[name] + FULL)[1].kind is FindingKind.LEAK


@pytest.mark.parametrize("name", STEADY)
def test_what_is_no_leak(name: str) -> None:
    assert in_log(STEADY[name] + FULL)[1].kind is FindingKind.PEAK


# snapshots ------------------------------------------------------------------------------------------------------------


def evaluating() -> Tape:
    """Every third step keeps something."""
    tape = Tape()
    tape.begin()
    for step in range(15):
        tape.step(keep=0 if step % 3 else 6 * MIB)
    return tape


def concatenating() -> Tape:
    """One buffer, made anew in each step, larger by 2 MiB."""
    tape = Tape()
    tape.begin()
    old = tape.alloc(MIB, KEEPS)
    for step in range(12):
        tape.step()
        new = tape.alloc((step + 2) * 2 * MIB, KEEPS)
        tape.free(old)
        old = new
    return tape


def keeping(which: Callable[[int], bool], last: int = 99) -> Tape:
    """3 MiB of some of 14 steps, of which the last few are held at a time."""
    tape, held = Tape(), []
    tape.begin()
    for step in range(14):
        tape.step()
        if which(step):
            held.append(tape.alloc(3 * MIB, KEEPS))
        if len(held) > last:
            tape.free(held.pop(0))
    return tape


@pytest.mark.parametrize("made", [evaluating, concatenating])
def test_leaks_that_are_not_in_every_step_are_named(made: Callable[[], Tape]) -> None:
    facts = facts_of_snapshot(snapshot_of(made().content(), "x.pickle"))
    assert diagnose_memory(facts).kind is FindingKind.LEAK
    assert [one.module for one in facts.survivors] == ["me/metrics.py:77 track"]


@pytest.mark.parametrize(
    "tape",
    [keeping(lambda step: True, last=8), keeping(lambda step: step < 5), keeping(lambda step: step == 7)],
    ids=["the last eight", "a cache that fills", "a copy made once"],
)
def test_what_stops_growing_is_no_leak(tape: Tape) -> None:
    facts = facts_of_snapshot(snapshot_of(tape.content(), "x.pickle"))
    assert diagnose_memory(facts).kind is FindingKind.PEAK and not facts.survivors


def test_each_third_adds_its_part() -> None:
    assert never_falls([0, 0, 1, 1, 2, 2, 3]) and never_falls([5, 6, 7, 8])
    assert not never_falls([0, 1, 2, 3, 3, 3, 3]) and not never_falls([0, 1, 0, 2, 3, 4, 5])
    assert not never_falls([4, 4, 4, 4])


# traces ---------------------------------------------------------------------------------------------------------------


def findings(step: Callable[[Trace, int], None], steps: int = 5) -> tuple[Finding, ...]:
    made = Trace(plan=Plan())
    for number in range(steps):
        step(made, number)
    content = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100"}], "traceEvents": made.events}
    return slow_findings(profile_steps(profile_of(content, "trace.json")))


def pauses(trace: Trace, number: int) -> None:
    """60 ms of the host, in step 2 alone, once the device has done all."""
    if number == 3:
        trace.host = max(trace.host, *trace.free.values()) + 60_000
    trace.step(number)


def reads_back(trace: Trace, number: int) -> None:
    """Results go to pageable memory."""
    trace.step(number)
    trace.launch("Memcpy DtoH (Device -> Pageable)", 4000, cat="gpu_memcpy")
    trace.waits()


def gives_back(trace: Trace, number: int) -> None:
    """Memory, to the driver, after each step."""
    trace.step(number)
    trace.waits()
    for _ in range(6):
        trace.runtime("cudaFree", 900)


def replays(trace: Trace, number: int) -> None:
    """A graph of many small kernels: one launch."""
    begin = trace.host
    trace.runtime("cudaGraphLaunch", 20)
    start = max(trace.host, trace.free[COMPUTE])
    for _ in range(800):
        trace.span("k", "kernel", start, 4, stream=COMPUTE, correlation=trace.correlation, device=0)
        start += 5
    trace.free[COMPUTE] = start
    trace.span(f"ProfilerStep#{number}", "user_annotation", begin, trace.host - begin + 1)
    trace.host += 1


def offloads(trace: Trace, number: int) -> None:
    """Copies to pinned memory, on a stream of their own."""
    trace.free.setdefault(30, 0.0)
    for _ in range(12):
        trace.launch("Memcpy DtoH (Device -> Pinned)", 300, stream=30, cat="gpu_memcpy")
    trace.step(number)


def test_one_long_pause_is_said_to_be_one() -> None:
    (found,) = findings(pauses)
    assert found.kind is FindingKind.GAPS and "gc.freeze()" in lines(found)
    assert any("60.0 ms of it are one pause" in line for line in found.evidence)


def test_copies_from_the_device_are_not_mended_in_the_loader() -> None:
    (found,) = findings(reads_back)
    assert found.kind is FindingKind.BLOCKING_COPIES
    assert "DataLoader" not in lines(found) and "pin_memory=True" in lines(found)


def test_memory_that_is_given_back_in_each_step() -> None:
    found = next(one for one in findings(gives_back) if one.kind is FindingKind.GAPS)
    assert "empty_cache" in lines(found)


@pytest.mark.parametrize("step", [replays, offloads])
def test_more_healthy_steps(step: Callable[[Trace, int], None]) -> None:
    assert not findings(step)


def small(*settings: str) -> Callable[[Trace, int], None]:
    """Thousands of small kernels, by a program in which some of what would help is switched on."""

    def step(trace: Trace, number: int) -> None:
        begin = trace.host
        for _ in range(1500):
            trace.host += 9
            trace.launch("triton_poi_fused_add_0" if "compile" in settings else "elementwise", 3)
        trace.span("Optimizer.step#AdamW.step", "user_annotation", trace.host - 25, 20)
        if "fused" in settings:
            trace.span("aten::_fused_adamw_", "cpu_op", trace.host - 20, 10)
        trace.span(f"ProfilerStep#{number}", "user_annotation", begin, trace.host - begin)
        trace.host += 1

    return step


@pytest.mark.parametrize(
    ("settings", "advised"),
    [((), ["compile()", "fused=True"]), (("compile",), ["fused=True"]), (("compile", "fused"), ["reduce-overhead"])],
)
def test_nothing_is_advised_that_is_switched_on(settings: tuple[str, ...], advised: list[str]) -> None:
    (found,) = findings(small(*settings))
    assert found.kind is FindingKind.SMALL_KERNELS
    assert [word in change.line for word, change in zip(advised, found.changes, strict=True)] == [True] * len(advised)


def test_advice_names_the_optimizer_and_sees_compiled_code() -> None:
    def step(trace: Trace, number: int) -> None:
        small()(trace, number)
        trace.span("CompiledFunction", "cpu_op", trace.host - 30, 1)
        for event in trace.events:
            event["name"] = event["name"].replace("AdamW", "SGD")

    (found,) = findings(step)
    assert [change.line for change in found.changes] == ["torch.optim.SGD(model.parameters(), fused=True)"]


@pytest.mark.parametrize(
    ("name", "word"), [("_MultiProcessing", "twice the num_workers"), ("_SingleProcess", "num_workers=4")]
)
def test_who_has_workers_is_told_of_more(name: str, word: str) -> None:
    made = Trace(plan=Plan(loader_us=3000))
    for number in range(4):
        made.step(number)
    for event in made.events:
        event["name"] = event["name"].replace("_MultiProcessing", name)
    (found,) = slow_findings(profile_steps(profile_of({"traceEvents": made.events}, "trace.json")))
    assert found.kind is FindingKind.DATA_WAIT and word in lines(found)
