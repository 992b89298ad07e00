"""`jettison estimate`: its document, its tables, its refusals, and how soon it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.cost.flops import Counting
from jettison.families.presets import preset
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.hardware import hardware
from support.patience import PATIENCE

PAPER = ("gpt-175b", "--gpu", "a100-80gb", "--tp", "8", "--pp", "8", "--virtual-stages", "3", "--micro-batches", "64")


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["estimate", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_document_is_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *PAPER, "--recompute", "selective")
    request = RunRequest(tp=8, pp=8, virtual_stages=3, micro_batches=64, recompute="selective")
    expected = estimate(resolve(preset("gpt-175b"), request).run, hardware("a100-80gb"))
    assert found["schema"] == "jettison.estimate/1"
    assert found["step_seconds"] == expected.step_seconds
    assert found["tokens_per_second_per_gpu"] == pytest.approx(64 * 2048 / expected.step_seconds / 64)
    assert (found["mfu"], found["hfu"]) == (expected.mfu, expected.hfu)
    assert found["mfu_by"] == {str(counting): expected.mfu_by(counting) for counting in Counting}
    parts = found["breakdown"]
    assert set(parts) == {f"{name}_seconds" for name in ("compute", "communication", "bubble", "recompute", "other")}
    assert sum(parts.values()) == pytest.approx(found["step_seconds"])
    assert [stage["stage"] for stage in found["stages"]] == list(range(8))
    assert found["busiest_stage"] == 7 and found["fits"] is True and found["gpus"] == 64


def test_the_peak_is_the_ledgers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("llama3-8b", "--gpu", "h100-80gb", "--dp", "8", "--zero", "3", "--seq", "4096")
    peak = document(capsys, *flags)["peak_bytes"]
    assert run(["ledger", *flags, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == peak


def test_explaining_adds_the_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *PAPER, "--recompute", "selective", "--explain")
    options = {option["recompute"]: option for option in found["options"]}
    assert set(options) == {"none", "selective", "selective-op", "full", "none + offload"}
    assert options["none"]["fits"] is False and options["selective"]["current"] is True
    assert options["none"]["rule"] is None and options["full"]["rule"] == "surely"
    assert options["full"]["step_seconds"] > options["selective"]["step_seconds"] > options["none"]["step_seconds"]
    assert [link["bytes_per_second"] for link in found["links"]] == sorted(
        link["bytes_per_second"] for link in found["links"]
    )
    assert found["trades"][0]["nbytes"] == max(trade["nbytes"] for trade in found["trades"])
    assert found["offload"]["hidden"] is False
    assert sum(kind["seconds"] for kind in found["kinds"]) == pytest.approx(
        found["breakdown"]["compute_seconds"], rel=0.05
    )


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", *PAPER, "--recompute", "selective", "--explain"]) == 0
    out = capsys.readouterr().out
    for words in (
        "gpt-175b on 64 x a100-80gb",
        "Where the time of stage 7 goes",
        "Recompute settings",
        "1 to 6",
        "break-even",
        "PCIe 4.0 x16 and faster",
        "selective (as it is)",
    ):
        assert words in out


def test_compiled_code_is_quicker(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("llama3-8b", "--gpu", "h100-80gb", "--kernels", "huggingface")
    eager, compiled = document(capsys, *flags), document(capsys, *flags, "--compile")
    assert compiled["step_seconds"] < eager["step_seconds"]
    assert (eager["fusion"], compiled["fusion"]) == ("none", "compiled")


@pytest.mark.parametrize("recompute", ["none", "selective-op", "full"])
def test_a_compiled_runs_memory_is_the_ledgers(capsys: pytest.CaptureFixture[str], recompute: str) -> None:
    flags = ("--compile", "--kernels", "huggingface", "--recompute", recompute)
    said = document(capsys, "llama3-8b", "--gpu", "h100-80gb", *flags)
    assert run(["ledger", "llama3-8b", *flags, "--format", "json"]) == 0
    assert said["peak_bytes"] == json.loads(capsys.readouterr().out)["peak_bytes"]
    eager = document(capsys, "llama3-8b", "--gpu", "h100-80gb", *flags[1:])
    assert (said["peak_bytes"] < eager["peak_bytes"]) is (recompute != "full")


def test_memory_of_no_compiled_form_is_said_to_be_eager(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("mixtral-8x7b", "--gpu", "h100-80gb")
    eager, compiled = document(capsys, *flags), document(capsys, *flags, "--compile")
    assert compiled["peak_bytes"] == eager["peak_bytes"]
    assert any("not compiled: got --compile and mixtral-8x7b" in warning for warning in compiled["warnings"])


@pytest.mark.parametrize("scans", ["eager", "fused"])
def test_scans_that_nobody_timed_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, scans: str) -> None:
    sizes = {
        "hidden_size": 512,
        "num_heads": 16,
        "head_dim": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba2", **sizes}))
    said = document(capsys, str(config), "--gpu", "h100-80gb", "--seq", "256", "--ssm-kernels", scans)
    assert any("without fused kernels" in warning for warning in said["warnings"]) is (scans == "eager")


def test_a_planner_may_decide(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("llama2-7b", "--gpu", "a100-80gb", "--dp", "8", "--zero", "1", "--micro-batch", "4")
    auto, none, full = (document(capsys, *flags, "--recompute", word) for word in ("auto", "none", "full"))
    assert not none["fits"] and auto["fits"]
    assert none["step_seconds"] < auto["step_seconds"] < full["step_seconds"]


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "llama3-70b", "--gpu", "h100-80gb", "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert "this run does not fit h100-80gb" in captured.err
    assert json.loads(captured.out)["fits"] is False


def test_guesses_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "gpt2", "--gpu", "t4-16gb"]) == 0
    assert "is estimated, not measured" in capsys.readouterr().err
    assert run(["estimate", "gpt2", "--gpu", "a100-80gb"]) == 0
    assert "estimated" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("llama3-8b",), "--gpu"),
        (("llama3-9b", "--gpu", "h100-80gb"), "llama3-8b"),
        (("llama3-8b", "--gpu", "h1000"), "the closest are h100-64gb, h100-80gb"),
        (("json:loads", "--gpu", "h100-80gb"), "an estimate is of a preset or of a config.json"),
        (("llama3-8b", "--gpu", "h100-80gb", "--tp", "3"), "--tp 3"),
        (("llama3-8b", "--gpu", "h100-80gb", "--recompute", "auto", "--explain"), "give another than auto"),
        (("llama3-8b", "--gpu", "rtx4090-24gb", "--dp", "16"), "does not state its network"),
    ],
)
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert run(["estimate", *arguments]) == UsageError.exit_code
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_time_has_a_range_and_tokens_have_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's runs are all of their kind; 64 x 2048 tokens a step, so that 131,072,000 are a thousand steps."""
    found = document(capsys, *PAPER, "--recompute", "full", "--tokens", "131072e3", "--price-per-gpu-hour", "2")
    sure, training, step = found["sureness"], found["training"], found["step_seconds"]
    assert (sure["kind"], sure["own_class"]) == ("megatron, dense, a100-80gb", True)
    assert found["figures"]["step_seconds"]["expected"] == step * sure["expected"]
    assert found["step_range_seconds"] == [step * sure["low"], step * sure["high"]]
    assert training["steps"] == 1000
    assert training["price"] == pytest.approx(2 * 64 * 1000 * step * sure["expected"] / 3600)
    assert training["days_range"] == [pytest.approx(1000 * end / 86400) for end in found["step_range_seconds"]]


def test_a_stack_that_a_file_does_not_know_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", *PAPER, "--stack", "nemo"]) == 0
    assert "a100-80gb has no figures of the stack nemo: its file's own are taken" in capsys.readouterr().err


def test_nothing_waited_for_is_not_less_than_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "gpt-22b", "--gpu", "h100-80gb")["breakdown"]["communication_seconds"] == 0.0


def test_a_hardware_file_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('memory = "80GiB"\n[teraflops]\nbf16 = 100\n[gigabytes_per_second]\nmemory = 1000\n')
    assert document(capsys, "gpt2", "--gpu", str(file))["gpu"] == "mine"
    file.write_text('memory = "80GiB"\n[teraflops]\nbf16 = 100\n')
    assert run(["estimate", "gpt2", "--gpu", str(file)]) == UsageError.exit_code
    assert "does not state its memory bandwidth" in capsys.readouterr().err


COUNTED = """
import sys

calls = 0


def count(_frame, event, _argument):
    global calls
    calls += event == "call"


sys.setprofile(count)
from jettison.cli.main import run
from jettison.core.errors import UsageError

code = run(sys.argv[1:])
sys.setprofile(None)
packages = {name.partition(".")[0] for name in sys.modules} - {*sys.stdlib_module_names, "__main__"}
print(calls, *sorted(packages), file=sys.stderr)
sys.exit(code)
"""
LIGHT = {"attr", "attrs", "cyclopts", "jettison", "rich", "typing_extensions"}


def test_it_is_light_and_quick(tmp_path: Path) -> None:
    """From a cold start it calls 460,000 Python functions, whatever the machine: a third of a second on a usual one.
    Neither torch, numpy nor pydantic is imported.
    """
    command = [sys.executable, "-S", "-c", COUNTED, "estimate", *PAPER, "--recompute", "selective", "--explain"]
    # without site: what an environment imports at each start (coverage, editable installs) is no work of ours
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=environment, check=True
    )
    calls, *packages = done.stderr.splitlines()[-1].split()
    assert set(packages) <= LIGHT
    assert int(calls) < 800_000
