"""Planted memory faults, each found as what it is; healthy loops, of which nothing is said."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.diagnose.finding import Finding, FindingKind
from jettison.diagnose.log import facts_of_log
from jettison.diagnose.memory_facts import MemoryFacts, StepBytes, StepPhase, grown_bytes
from jettison.diagnose.out_of_memory import diagnose_memory
from jettison.diagnose.snapshot import facts_of_snapshot, snapshot_of
from support.planted_memory import HEAD, KEEPS, MIB, PREFETCH, Tape, message, traceback
from support.snapshot_cases import ENGINE, OPTIMIZER

GIB = 1 << 30
TORCH = "/venv/lib/python3.11/site-packages/torch"
ME = ("/home/me/train.py", 40, "<module>")
FORWARD = (ME, (f"{TORCH}/nn/modules/module.py", 1780, "_call_impl"), ("/home/me/model.py", 12, "forward"))
FULL = {"asked": "2.00", "free": "0.50", "allocated": "77.00", "unused": "0.25", "used": "78.65"}
PIECES = {"asked": "2.00", "free": "1.20", "allocated": "60.00", "unused": "16.50", "used": "77.94"}
EXPANDABLE = "expandable_segments:True"


def in_log(text: str) -> tuple[MemoryFacts, Finding]:
    facts = facts_of_log(text, "run.log")
    return facts, diagnose_memory(facts)


def in_snapshot(content: dict[str, Any]) -> tuple[MemoryFacts, Finding]:
    facts = facts_of_snapshot(snapshot_of(content, "x.pickle"))
    return facts, diagnose_memory(facts)


def lines(finding: Finding) -> str:
    return "\n".join(change.line for change in finding.changes)


# logs -----------------------------------------------------------------------------------------------------------------


def test_fragmentation_in_a_log() -> None:
    facts, found = in_log(traceback(*FORWARD) + message(**PIECES))
    assert found.kind is FindingKind.FRAGMENTATION
    assert (facts.requested_bytes, facts.free_bytes) == (2 * GIB, round(1.2 * GIB))
    assert (facts.phase, facts.site) == (StepPhase.FORWARD, "me/model.py:12 forward")
    assert EXPANDABLE in lines(found)


def test_what_is_set_already_is_not_advised() -> None:
    text = f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}\n" + message(**PIECES)
    facts, found = in_log(text)
    assert found.kind is FindingKind.FRAGMENTATION
    assert facts.expandable
    assert EXPANDABLE not in lines(found)
    assert found.changes


def test_the_hint_of_the_message_is_no_setting() -> None:
    assert not in_log(message(**PIECES))[0].expandable


def test_a_peak_in_a_log_gets_the_budget_that_there_is() -> None:
    facts, found = in_log(traceback(*FORWARD) + message(**FULL))
    assert found.kind is FindingKind.PEAK
    assert facts.short_bytes == round(1.5 * GIB)
    budget = (77 * GIB + GIB // 2) // MIB
    assert f'jettison.auto_checkpoint(model, batch, "{budget}MiB"' in lines(found)
    assert f"jettison plan MODEL --budget {budget}MiB" in lines(found)
    assert EXPANDABLE not in lines(found)


def test_the_older_form_of_the_message() -> None:
    text = (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.26 GiB "
        "already allocated; 3.44 MiB free; 14.28 GiB reserved in total by PyTorch)"
    )
    facts, found = in_log(text)
    assert facts.requested_bytes == 20 * MIB
    assert facts.unused_bytes == round(14.28 * GIB) - round(14.26 * GIB)
    assert found.kind is FindingKind.FRAGMENTATION  # 20.48 MiB lie in pieces
    assert in_log(text.replace("14.28", "14.27"))[1].kind is FindingKind.PEAK


def test_a_limit_of_the_process_is_what_is_free() -> None:
    text = message(**FULL).replace("GiB is free. ", "GiB is free. 77.50 GiB allowed; ").replace("0.50 GiB", "9.00 GiB")
    facts, found = in_log(text)
    assert facts.free_bytes == round(77.5 * GIB) - 77 * GIB - GIB // 4
    assert found.kind is FindingKind.PEAK


def test_the_optimizer_is_told_from_activations() -> None:
    frames = (
        ME,
        (f"{TORCH}/optim/optimizer.py", 500, "wrapper"),
        (f"{TORCH}/optim/adamw.py", 220, "_multi_tensor_adamw"),
    )
    facts, found = in_log(traceback(*frames) + message(**FULL))
    assert (found.kind, facts.phase) == (FindingKind.PEAK, StepPhase.OPTIMIZER)
    assert "foreach=False" in lines(found)
    assert "auto_checkpoint" not in lines(found)


def test_recompute_is_told_from_backward() -> None:
    engine = (ME, (f"{TORCH}/autograd/__init__.py", 353, "backward"))
    again = (
        (f"{TORCH}/utils/checkpoint.py", 1130, "unpack_hook"),
        (f"{TORCH}/utils/checkpoint.py", 1500, "recompute_fn"),
    )
    assert in_log(traceback(*engine) + message(**FULL))[0].phase is StepPhase.BACKWARD
    assert in_log(traceback(*engine, *again, *FORWARD) + message(**FULL))[0].phase is StepPhase.RECOMPUTE


def grows(by: float, *, count: int = 9, word: str = "allocated") -> str:
    return "".join(
        f"step {i} | loss 2.0 | {word}: {70 + by * i:.2f} GiB | max allocated 78.00 GiB\n" for i in range(count)
    )


def test_a_leak_in_a_log() -> None:
    facts, found = in_log(grows(0.75) + message(**FULL))
    assert found.kind is FindingKind.LEAK
    assert grown_bytes(facts) == round(76 * GIB) - round(71.5 * GIB)
    assert ".item()" in lines(found)


def test_highest_levels_and_few_steps_show_no_leak() -> None:
    assert in_log(grows(0.75, word="max allocated") + message(**FULL))[1].kind is FindingKind.PEAK
    assert in_log(grows(0.75, count=6) + message(**FULL))[1].kind is FindingKind.PEAK
    assert in_log(grows(0.0) + message(**FULL))[1].kind is FindingKind.PEAK


def test_growth_that_is_less_than_what_is_missing_is_said_beside_the_peak() -> None:
    found = in_log(grows(0.125) + message(**FULL))[1]  # 0.75 GiB, and 1.5 are missing
    assert found.kind is FindingKind.PEAK
    assert any("behind: less than is missing" in line for line in found.evidence)


def test_memory_of_other_processes() -> None:
    others = "Process 4242 has 30.00 GiB memory in use. "
    found = in_log(message(**(FULL | {"allocated": "47.00", "used": "48.65"}), others=others))[1]
    assert found.kind is FindingKind.OTHERS
    assert "nvidia-smi" in lines(found)
    # pieces would do for this request, and for no step
    full = (
        "Tried to allocate 12.00 MiB (GPU 0; 24.00 GiB total capacity; {} GiB already allocated; 10.00 MiB free; {} GiB"
    )
    kinds = {
        in_log(f"CUDA out of memory. {full.format(*sizes)} reserved in total by PyTorch)")[1].kind: sizes
        for sizes in (("1.10", "1.18"), ("20.10", "20.18"), ("1.10", "4.50"))
    }
    assert kinds == {FindingKind.OTHERS: ("1.10", "1.18"), FindingKind.FRAGMENTATION: ("1.10", "4.50")}


def test_a_message_cut_before_pytorchs_bytes_names_no_other_process() -> None:
    cut = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.47 GiB. GPU 0 has a total capacity of 14.75 GiB of "
    )
    cut += "which 3.78 GiB is free. Process 2116 has 10.95 GiB memory in use. Of th"
    assert in_log(cut)[1].kind is FindingKind.UNKNOWN


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", FindingKind.UNKNOWN),
        ("RuntimeError: cublas runtime error : resource allocation failed at THCGeneral.cpp:250", FindingKind.UNKNOWN),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 4096000000 bytes. Error code 12 (Cannot allocate memory)",
            FindingKind.HOST,
        ),
    ],
)
def test_a_message_without_figures_is_not_made_more_of(text: str, kind: FindingKind) -> None:
    found = in_log(text)[1]
    assert found.kind is kind
    assert "jettison.watch" in lines(found)


# snapshots ------------------------------------------------------------------------------------------------------------


def leaking(steps: int = 10, keep: int = 3 * MIB) -> Tape:
    tape = Tape()
    tape.begin(keep=keep)
    for _ in range(steps):
        tape.step(keep=keep)
    return tape


def test_a_leak_in_a_snapshot_names_the_line_and_the_bytes() -> None:
    tape = leaking()
    tape.alloc(8 * MIB)
    tape.oom(8 * MIB, 2 * MIB)
    facts, found = in_snapshot(tape.content())
    assert found.kind is FindingKind.LEAK
    (one,) = facts.survivors
    assert one.module == "me/metrics.py:77 track"
    assert (one.bytes_per_step, one.steps) == (3 * MIB, 9)  # eleven steps, without the first two
    assert any("me/metrics.py:77" in line for line in found.evidence)


def test_a_leak_that_has_not_filled_the_memory_yet() -> None:
    assert in_snapshot(leaking().content())[1].kind is FindingKind.LEAK


def test_a_leak_that_is_too_small_to_be_the_cause() -> None:
    tape = leaking(keep=MIB // 4)
    tape.oom(100 * MIB, MIB)
    facts, found = in_snapshot(tape.content())
    assert facts.survivors
    assert found.kind is FindingKind.PEAK


def test_fragmentation_in_a_snapshot() -> None:
    tape = Tape()
    tape.begin()
    for _ in range(5):
        tape.step()
    tape.alloc(8 * MIB)
    tape.alloc(8 * MIB)
    tape.oom(12 * MIB, 2 * MIB)
    facts, found = in_snapshot(tape.content(pieces=[7 * MIB, 6 * MIB]))
    assert found.kind is FindingKind.FRAGMENTATION
    assert (facts.unused_bytes, facts.largest_piece_bytes, facts.short_bytes) == (13 * MIB, 7 * MIB, 10 * MIB)
    assert EXPANDABLE in lines(found)
    again = in_snapshot(tape.content(pieces=[7 * MIB, 6 * MIB], settings={"expandable_segments": True}))[1]
    assert again.kind is FindingKind.FRAGMENTATION
    assert EXPANDABLE not in lines(again)
    assert in_snapshot(tape.content(pieces=[5 * MIB, 4 * MIB]))[1].kind is FindingKind.PEAK


def test_a_peak_of_a_longer_batch() -> None:
    tape = Tape()
    tape.begin()
    for _ in range(5):
        tape.step()
    for _ in range(3):
        tape.alloc(24 * MIB)
    tape.oom(24 * MIB, 4 * MIB)
    facts, found = in_snapshot(tape.content())
    assert (found.kind, facts.phase) == (FindingKind.PEAK, StepPhase.FORWARD)
    assert found.claim.endswith("more than each step before")
    assert facts.allocated_bytes == (16 + 32 + 72) * MIB
    assert facts.steps[-1].peak_bytes == (16 + 32 + 96) * MIB
    assert f"micro_batch = {1 - 20 / 96:.2f}" in lines(found)


def test_the_peak_of_the_loss() -> None:
    tape = Tape()
    tape.begin()
    tape.step()
    tape.alloc(8 * MIB)
    tape.alloc(64 * MIB, HEAD)
    tape.oom(64 * MIB, 4 * MIB, HEAD)
    found = in_snapshot(tape.content())[1]
    assert found.kind is FindingKind.PEAK
    assert "hidden.split" in lines(found)


def test_the_first_optimizer_step() -> None:
    tape = Tape()
    tape.alloc(64 * MIB)
    tape.step()
    tape.oom(64 * MIB, MIB, OPTIMIZER)
    facts, found = in_snapshot(tape.content())
    assert (found.kind, facts.phase) == (FindingKind.PEAK, StepPhase.OPTIMIZER)


# healthy --------------------------------------------------------------------------------------------------------------


def alike() -> Tape:
    tape = Tape()
    tape.begin()
    for _ in range(9):
        tape.step()
    return tape


def varied() -> Tape:
    tape = Tape()
    tape.begin()
    for length in (7, 3, 8, 5, 6, 8, 2, 7):
        tape.step(activation=length * MIB)
    return tape


def prefetching() -> Tape:
    tape = Tape()
    waiting = [tape.alloc(MIB, PREFETCH) for _ in range(3)]
    tape.begin()
    for _ in range(9):
        waiting.append(tape.alloc(MIB, PREFETCH))
        tape.free(waiting.pop(0))
        tape.step()
    return tape


def accumulating() -> Tape:
    tape = Tape()
    tape.begin()
    for _ in range(4):
        gradients = [tape.alloc(2 * MIB, ENGINE) for _ in range(4)]
        for _ in range(4):
            tape.step(gradient=512)
        tape.free(*gradients)
    return tape


def scalars() -> Tape:
    return leaking(keep=512)


@pytest.mark.parametrize("made", [alike, varied, prefetching, accumulating, scalars])
def test_a_healthy_loop_has_neither_leak_nor_fragments(made: Any) -> None:
    tape = made()
    facts, found = in_snapshot(tape.content())
    assert found.kind is FindingKind.PEAK
    assert not facts.survivors
    assert grown_bytes(facts) == 0
    assert not found.changes
    assert "nothing in here ran out of memory" in found.claim


def test_steps_are_seen_in_the_bytes() -> None:
    facts = in_snapshot(alike().content())[0]
    assert [step.between_bytes for step in facts.steps] == [16 * MIB, *[48 * MIB] * 9]
    assert {step.peak_bytes for step in facts.steps[1:]} == {(48 + 34) * MIB}


def test_noise_is_no_growth() -> None:
    levels = [100, 100, 103, 101, 104, 102, 103, 104, 103, 105]
    steps = tuple(StepBytes(step=at, between_bytes=level * MIB) for at, level in enumerate(levels))
    facts = MemoryFacts(source="x", failed=False, allocated_bytes=1, steps=steps)
    assert grown_bytes(facts) == 0
    steady = tuple(StepBytes(step=at, between_bytes=(100 + at) * MIB) for at in range(10))
    assert grown_bytes(replace(facts, steps=steady)) == 7 * MIB


# bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "all is well\n", "{}", '{"schema": "jettison.watch/1", "steps": 3}', "\x80\x04broken"]
)
def test_what_is_no_source_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x"
    file.write_bytes(text.encode("latin-1"))
    assert run(["doctor", "--oom", str(file)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert not said.out


def test_flags_that_contradict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--oom", str(tmp_path / "nowhere")]) == 2
    assert run(["doctor", "--oom", "x", "--calibrate"]) == 2
    assert run(["doctor", "--oom", "x", "--quick"]) == 2
    assert run(["doctor", "--oom", "--model", "x"]) == 2
    assert "got --oom without a value" in capsys.readouterr().err
    with pytest.raises(UsageError, match="says nowhere"):
        facts_of_log("fine", "x")


def test_stdin_and_pipes(tmp_path: Path) -> None:
    """A pipe can be read once; its answer is that of the file."""
    (tmp_path / "stdin").write_text(message(**PIECES))

    def said(source: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "jettison", "doctor", "--oom", source, "--format", "json"]
        ran = subprocess.run(command, input=(tmp_path / "stdin").read_bytes(), capture_output=True, check=True)
        document: dict[str, Any] = json.loads(ran.stdout)
        return {key: value for key, value in document.items() if key != "request"}

    of_file = said(str(tmp_path / "stdin"))
    assert of_file["cause"] == "fragmentation"
    assert said("-") == of_file
    assert said("/dev/stdin") == of_file


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.log").write_text(message(**PIECES))
    assert run(["doctor", "--oom", str(tmp_path / "run.log"), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["cause"]) == ("jettison.oom/1", "fragmentation")
    assert document["requested_bytes"] == 2 * GIB
    assert document["findings"][0]["changes"]
    assert KEEPS
