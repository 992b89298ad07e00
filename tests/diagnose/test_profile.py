"""Planted faults of steps, each found as what it is; healthy steps, of which nothing is said; figures by arithmetic."""

import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from jettison.cli.main import run
from jettison.cli.profile import profile_files
from jettison.diagnose.finding import Finding, FindingKind
from jettison.diagnose.memory_facts import MemoryFacts
from jettison.diagnose.profile_file import profile_of, read_profile
from jettison.diagnose.slow_steps import slow_findings, snapshot_findings
from jettison.diagnose.snapshot import facts_of_snapshot, snapshot_of
from jettison.diagnose.step_profile import StepProfile, joined, op_flops, overlap, profile_steps, total, without
from jettison.diagnose.trace_modules import BEFORE, TracePlace, profile_modules
from jettison.spec.hardware import hardware
from support.planted_memory import MIB, Tape
from support.planted_traces import ACTIVATION, PARAMETERS, STATE, planted


def found(content: dict[str, Any]) -> tuple[StepProfile, tuple[Finding, ...]]:
    steps = profile_steps(profile_of(content, "trace.json"))
    return steps, slow_findings(steps)


PLANTED: dict[str, tuple[dict[str, Any], FindingKind, str]] = {
    "gradients reduced after backward": (
        {"reduces": True, "exposed": True}, FindingKind.EXPOSED_COMMUNICATION, "DistributedDataParallel",
    ),
    "gathers that nothing hides": ({"gathers": True}, FindingKind.EXPOSED_COMMUNICATION, "fully_shard"),
    "a slow data loader": ({"loader_us": 3000}, FindingKind.DATA_WAIT, "num_workers"),
    "pageable copies": ({"pageable_us": 1500}, FindingKind.BLOCKING_COPIES, "pin_memory=True"),
    "numbers read in forward": ({"reads": 10, "python_us": 60}, FindingKind.BLOCKING_COPIES, "loss.item()"),
    "many small kernels": (
        {"kernel_us": 4, "kernels_a_layer": 20, "python_us": 9}, FindingKind.SMALL_KERNELS, "fused=True",
    ),
    "a slow host between large kernels": ({"kernel_us": 100, "python_us": 150}, FindingKind.GAPS, "with_stack"),
    "memory from the driver in each step": ({"mallocs_us": 300}, FindingKind.GAPS, "expandable_segments:True"),
    "a slow first step": ({"first_us": 90_000}, FindingKind.FIRST_STEP, "schedule"),
    "the optimizer's state": ({"state_appears": True}, FindingKind.OPTIMIZER_STATE, "optimizer=optimizer"),
    "memory that is held and not used": ({"reserved": 1.6}, FindingKind.FRAGMENTATION, "expandable_segments:True"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(name: str) -> None:
    plan, kind, line = PLANTED[name]
    _, findings = found(planted(**plan))
    assert [finding.kind for finding in findings] == [kind], [finding.claim for finding in findings]
    assert any(line in change.line for change in findings[0].changes)
    assert findings[0].evidence


HEALTHY: dict[str, dict[str, Any]] = {
    "computing all the time": {},
    "reductions behind backward": {"reduces": True},
    "checkpointing every layer": {"recompute": True},
    "one number read in a step": {"reads": 1, "kernel_us": 2000},
    "a loader that is ready": {"loader_us": 200},
    "small kernels that keep up": {"kernel_us": 9, "kernels_a_layer": 40, "python_us": 1},
    "much reserved, less than a fifth unused": {"reserved": 1.2},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_are_left_alone(name: str) -> None:
    _, findings = found(planted(**HEALTHY[name]))
    assert not findings, [finding.claim for finding in findings]


# figures --------------------------------------------------------------------------------------------------------------


def test_figures_of_a_described_trace() -> None:
    steps, _ = found(planted(recompute=True))
    product = 2 * 4096**3
    assert steps.flops == 4 * 12 * 4 * product
    assert steps.again_flops == 4 * 12 * product
    assert steps.recompute_ns == 4 * 12 * 400_000  # of the device: the host is faster
    assert steps.kernels == 4 * (12 * 4 + 1)
    assert steps.median_kernel_ns == 400_000
    assert steps.peak_bytes["forward"] == PARAMETERS + 12 * ACTIVATION
    assert steps.step_ns.keys() == {0, 1, 2, 3}


def test_communication_is_what_is_beside_no_computation() -> None:
    steps, _ = found(planted(reduces=True, exposed=True))
    assert steps.exposed_ns == steps.communication_ns == 4 * 12 * 280_000
    assert steps.exposed_after_backward_ns == steps.exposed_ns
    assert list(steps.collectives) == ["AllReduce"]
    behind, _ = found(planted(reduces=True))
    assert behind.communication_ns == 4 * 12 * 280_000
    assert behind.exposed_ns < 0.05 * behind.ns


def test_the_state_is_counted_to_the_byte() -> None:
    assert found(planted(state_appears=True))[0].state_bytes == STATE


def test_utilization(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(planted(recompute=True)))
    a100 = hardware("a100-80gb")
    said = profile_files([tmp_path / "t.json"], a100).document()["trace"]
    peak = a100.flops_per_second.bf16
    assert peak is not None
    assert said["hfu"] == pytest.approx(12 * 4 * 2 * 4096**3 / said["step_seconds"] / peak)
    assert said["mfu"] == pytest.approx(0.75 * said["hfu"])


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 60),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 420),
        ("aten::mm", [[2, 3], [4, 5]], 0),
        ("aten::mm", "x", 0),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[1, 2, 8, 4], [1, 2, 8, 4], [1, 2, 8, 4]],
            2 * 2 * 2 * 8 * 8 * 4,
        ),
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            [[1, 2, 8, 4], [1, 2, 8, 4], [1, 2, 8, 4], [1, 2, 8, 4]],
            5 * 2 * 2 * 8 * 8 * 4,
        ),
        ("aten::add", [[2, 3], [2, 3]], 0),
    ],
)
def test_flops_of_an_operator(name: str, dims: Any, flops: int) -> None:
    assert op_flops(name, {"Input Dims": dims}) == flops


def test_spans() -> None:
    assert joined([(5, 7), (0, 2), (1, 3)]) == [(0, 3), (5, 7)]
    assert [*without([(0, 10)], [(2, 3), (5, 12)])] == [(0, 2), (3, 5)]
    assert [*without([(0, 2), (4, 6)], [(1, 5)])] == [(0, 1), (5, 6)]
    assert overlap([(0, 10)], [(2, 3), (5, 12)]) == 6
    assert total([(0, 3), (5, 7)]) == 5


# snapshots ------------------------------------------------------------------------------------------------------------


def in_snapshot(tape: Tape, pieces: list[int]) -> tuple[MemoryFacts, list[FindingKind]]:
    snapshot = snapshot_of(tape.content(pieces=pieces), "x")
    facts = facts_of_snapshot(snapshot)
    return facts, [finding.kind for finding in snapshot_findings(facts, snapshot.busiest)]


def test_a_snapshot_of_a_run_that_goes_on() -> None:
    tape = Tape()
    tape.alloc(256 * MIB)
    for _ in range(8):
        tape.step()
    assert in_snapshot(tape, [])[1] == []
    assert in_snapshot(tape, [128 * MIB])[1] == [FindingKind.FRAGMENTATION]
    assert in_snapshot(tape, [48 * MIB])[1] == []
    tape = Tape()
    tape.begin(state=32 * MIB)
    for _ in range(8):
        tape.step()
    assert in_snapshot(tape, [])[1] == [FindingKind.OPTIMIZER_STATE]
    tape = Tape()
    tape.alloc(16 * MIB)
    for _ in range(8):
        tape.step(keep=MIB)
    assert in_snapshot(tape, [])[1] == [FindingKind.LEAK]


# real traces ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of torch's profiler on this machine: four blocks, plain, checkpointed in both ways."""
    folder = tmp_path_factory.mktemp("traces")
    made = {}
    for name in ("plain", "checkpoint", "reentrant"):
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))
        optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1, momentum=0.9)
        made[name] = folder / f"{name}.json"

        def write(profiler: Any, path: Path = made[name]) -> None:
            profiler.export_chrome_trace(str(path))

        turns = schedule(wait=0, warmup=1, active=3, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=turns, on_trace_ready=write, record_shapes=True) as p:
            for _ in range(4):
                x = torch.ones(8, 16, requires_grad=True)
                for block in blocks:
                    y = block(x) if name == "plain" else checkpoint(block, x, use_reentrant=name == "reentrant")
                    x = y
                x.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                p.step()
    return made


@pytest.mark.parametrize(("name", "runs"), [("plain", 3), ("checkpoint", 4), ("reentrant", 4)])
def test_recompute_is_found_in_real_traces(name: str, runs: int, real: dict[str, Path]) -> None:
    steps = profile_steps(read_profile(real[name]))
    forward = 4 * 2 * (2 * 8 * 16 * 32)
    assert (steps.steps * forward * runs, steps.steps * forward * (runs - 3)) == (steps.flops, steps.again_flops)
    assert (steps.recompute_ns > 0) == (runs == 4)
    assert all(steps.phase_ns[phase] > 0 for phase in ("forward", "backward", "optimizer"))
    assert not [finding for finding in slow_findings(steps) if finding.kind is not FindingKind.FIRST_STEP]


class Block(nn.Module):
    """A residual block, checkpointed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.mlp(self.norm(x))
        return found


@pytest.mark.parametrize("recomputed", [None, False, True])
@pytest.mark.parametrize("stack", [True, False])
def test_time_and_bytes_by_module(recomputed: bool | None, stack: bool, tmp_path: Path) -> None:
    """With stacks by module, without by operator; backward and recomputation go to the forward's."""
    blocks = nn.ModuleList(Block() for _ in range(3))
    optimizer = torch.optim.AdamW(blocks.parameters())
    with profile(
        activities=[ProfilerActivity.CPU], with_stack=stack, profile_memory=True, record_shapes=True
    ) as recorder:
        for _ in range(2):
            x = torch.ones(8, 16, requires_grad=True)
            for block in blocks:
                x = block(x) if recomputed is None else checkpoint(block, x, use_reentrant=recomputed)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    recorder.export_chrome_trace(str(tmp_path / "t.json"))
    trace = read_profile(tmp_path / "t.json")
    steps = profile_steps(trace)
    where = profile_modules(trace, steps.window)
    linear, norm = ("Block/Linear", "Block/LayerNorm") if stack else ("linear 16×16", "layer_norm")
    roles = {"forward", "backward"} | ({"recompute"} if recomputed is not None else set())
    assert where.named == stack
    assert set(where.modules[linear]) == set(where.modules[norm]) == roles
    assert set(where.modules["AdamW.step"]) == {"optimizer"}
    assert sum(where.ns.values()) <= steps.ns
    assert sum(where.peak.values()) == max(steps.peak_bytes.values())


def test_roles_of_bytes_at_the_peak() -> None:
    """By who allocated, and by what is freed before the optimizer steps."""
    events: list[dict[str, Any]] = []

    def ran(name: str, cat: str, start: int, length: int, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": args}
        )

    def memory(at: int, address: int, delta: int, total: int) -> None:
        args = {"Addr": address, "Bytes": delta, "Total Allocated": total, "Total Reserved": 0, "Device Type": 0}
        events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "args": args})

    ran("nn.Module: layers.3.up (Linear)", "user_annotation", 10, 20)
    ran("aten::linear", "cpu_op", 12, 10, **{"Sequence number": 7})
    node = {"Sequence number": 7, "Fwd thread id": 1}
    ran("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 40, 20, **node)
    ran("Optimizer.step#SGD.step", "user_annotation", 70, 20)
    memory(15, 1, 100, 1100)
    for at, address, delta, left in ((45, 2, 30, 1130), (46, 3, 5, 1135), (50, 3, -5, 1130), (55, 1, -100, 1030)):
        memory(at, address, delta, left)
    memory(75, 4, 8, 1038)
    memory(80, 2, -30, 1008)
    trace = profile_of({"traceEvents": events}, "t.json")
    where = profile_modules(trace, (0, 100_000))
    roles = {"activations": 100, "gradients": 30, "transients of backward": 5}
    named = {TracePlace("layers.*.up (Linear)", role): nbytes for role, nbytes in roles.items()}
    assert where.peak == {TracePlace("", BEFORE): 1000} | named
    assert where.ns == {
        TracePlace("layers.*.up (Linear)", role): ns for role, ns in (("forward", 10_000), ("backward", 20_000))
    }


def test_little_memory_is_worth_no_advice() -> None:
    steps, _ = found(planted(state_appears=True))
    small = replace(steps, state_bytes=8 * MIB, peak_bytes={"forward": 40 * MIB})
    assert not slow_findings(small)
    (advised,) = slow_findings(steps)[0].changes
    assert f'"{max(steps.peak_bytes.values()) // MIB}MiB"' in advised.line


def test_a_script_is_run_until_enough_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import time, torch\n"
        "import jettison\n"
        "from torch import nn\n"
        "model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])\n"
        "x = torch.ones(4, 8)\n"
        "jettison.apply(model, 'full', batch=x, loss_fn=torch.sum, regions=list('0123'))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 100\n"
        "    def __getitem__(self, n): time.sleep(0.05); return x[0]\n"
        "for batch in torch.utils.data.DataLoader(Slow(), batch_size=4):\n"
        "    model(batch).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "raise SystemExit('never')\n"
    )
    kept = tmp_path / "trace.json"
    assert run(["profile", str(script), "--steps", "2", "--trace", str(kept), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["trace"]["steps"]) == ("jettison.profile/1", 2)
    assert document["trace"]["recompute_seconds"] > 0  # a plan's: its operators have no number
    assert len(document["step_seconds"]) == 4
    assert document["trace"]["names_modules"]
    assert "*.* (Linear)" in {entry["module"] for entry in document["trace"]["modules"]}
    assert FindingKind.DATA_WAIT in [finding["kind"] for finding in document["findings"]]
    assert profile_steps(read_profile(kept)).steps == 2
    script.write_text("import torch\n")
    assert run(["profile", str(script)]) == 2
    assert "ended after 0 optimizer steps; more than 2 are needed" in capsys.readouterr().err


# bad input ------------------------------------------------------------------------------------------------------------

BAD: dict[str, bytes] = {
    "empty": b"{}",
    "no events": b'{"traceEvents": 3}',
    "events of numbers": b'{"traceEvents": [1]}',
    "nothing that ran": b'{"traceEvents": []}',
    "no time": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x", "ts": "soon"}]}',
    "cut off": b'{"traceEvents": [',
    "deep": b'{"a":' + b"[" * 100_000,
    "cut off, zipped": gzip.compress(b"{}" * 100)[:20],
    "a pickle of something else": pickle.dumps({"a": 1}, protocol=4),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(BAD[name])
    assert run(["profile", str(file)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert not said.out


def test_what_is_neither_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "nowhere.py"]) == 2
    for name in ("nowhere.py", "nowhere.json", "nowhere.toml"):
        capsys.readouterr()
        assert run(["profile", name]) == 2
        assert capsys.readouterr().err.startswith(f"jettison: there is no file {name}; give a trace")
    (tmp_path / "empty.toml").touch()
    assert run(["profile", str(tmp_path / "empty.toml")]) == 2
    assert "empty.toml is empty; give a trace" in capsys.readouterr().err
    (tmp_path / "run.log").write_text("step 1 loss 2.0")
    assert run(["profile", str(tmp_path / "run.log")]) == 2
    assert "run.log is none of these; give a trace" in capsys.readouterr().err
    assert run(["profile", "nowhere.json", "x"]) == 2
    assert run(["profile", "nowhere.py", "--steps", "0"]) == 2
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(planted()).encode()))
    assert run(["profile", str(tmp_path / "t.json.gz"), "--gpu", "nothing"]) == 2
    assert run(["profile", str(tmp_path / "t.json.gz")]) == 0
    assert "nothing to mend" in capsys.readouterr().out


@pytest.mark.slow
def test_a_recipe_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        "steps = 50\n"
        '[model]\narchitecture = "gpt"\nlayers = 2\nhidden = 64\nheads = 2\n'
        '[data]\nkind = "stdlib"\n[batch]\nglobal_batch = 2\nmicro_batch = 2\nseq = 64\n[plan]\npolicy = "full"\n'
        '[checkpoint]\nfolder = "kept"\nevery = 1\n'
    )
    assert run(["profile", str(recipe), "--out", "p.json", "--format", "json"]) == 0
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["trace"]["steps"] == 3
    assert document["trace"]["recompute_flops"] > 0
    assert {file.name for file in tmp_path.iterdir()} == {"r.toml", "p.json"}


@pytest.mark.parametrize(
    "profiler", ["torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2))",
                 "torch.profiler.profile()", "torch.autograd.profiler.profile()"],
)  # fmt: skip
def test_a_script_that_profiles_itself_is_told_so(
    profiler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch 2.13 ends the process otherwise."""
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"with {profiler} as found:\n    for _ in range(8):\n        model(torch.randn(2, 8)).sum().backward()\n"
        "        optimizer.step()\n        getattr(found, 'step', int)()\n",
        encoding="utf-8",
    )
    assert run(["profile", str(script)]) == 2
    assert "one profiler at a time" in " ".join(capsys.readouterr().err.split())
