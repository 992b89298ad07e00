"""`jettison train` as a command: it stops in order, survives disks, and says in a line what is wrong."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.train import train
from jettison.core.documents import check
from jettison.core.errors import Infeasible, UsageError
from jettison.core.parse_units import parse_bytes
from jettison.train.ranks import RankLost
from jettison.train.recipe import CheckpointSection, ModelSection, OptimizerSection
from jettison.train.run_folder import RunLog, TrainResult
from support.patience import PATIENCE
from support.train_runs import command, curve, environment, lines, tensors_of, tiny

# signals and disks ----------------------------------------------------------------------------------------------------


def test_a_signal_stops_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(tmp_path / "whole"))
    monkeypatch.setenv("JETTISON_FAULT", "term-step:0:3")
    before = signal.getsignal(signal.SIGTERM)
    result = train(tiny(tmp_path / "cut", checkpoint=CheckpointSection(folder=str(tmp_path / "cut" / "ck"))))
    assert (result.steps, result.stopped) == (3, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.delenv("JETTISON_FAULT")
    assert train(tiny(tmp_path / "cut")).resumed_step == 3
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("seconds", "code"), [pytest.param(0.2, 0, marks=pytest.mark.slow), (PATIENCE, -signal.SIGINT)]
)
def test_signals_to_the_command(tmp_path: Path, seconds: float, code: int) -> None:
    """The first one ends it in order and with exit code 0, a later one at once."""
    process = subprocess.Popen(
        command(tiny(tmp_path, steps=10_000), tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path, JETTISON_FAULT=f"slow:0:{seconds}"),
    )
    try:
        enough = 3 if code == 0 else 1  # two steps, or none
        wait_for(lambda: lines_written(tmp_path) >= enough)
        process.send_signal(signal.SIGTERM)
        if code:
            while process.poll() is None:
                time.sleep(2.5)  # what follows in less than two seconds is the same request
                process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code, err
    if code == 0:
        assert out.startswith("stopped by SIGTERM after ")
        assert "the same command resumes from there" in out
        assert [*(tmp_path / "ck").glob("step-*/run.json")]


def lines_written(folder: Path) -> int:
    file = folder / "log" / "log.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(condition: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("asynchronous", "on_error"),
    [pytest.param(True, "continue", marks=pytest.mark.slow), pytest.param(False, "stop", marks=pytest.mark.slow)],
)
def test_a_full_disk(tmp_path: Path, asynchronous: bool, on_error: str) -> None:
    """Files may grow to 100 kB, which the log stays below and a checkpoint does not."""
    section = CheckpointSection(folder=str(tmp_path / "ck"), every=2, asynchronous=asynchronous)
    train(tiny(tmp_path, steps=4, checkpoint=section))
    good = sorted(p.name for p in (tmp_path / "ck").iterdir())
    contents = tensors_of(tmp_path / "ck" / "step-00000004")
    recipe = tiny(tmp_path, checkpoint=replace(section, on_error=on_error))
    done = subprocess.run(
        command(recipe, tmp_path),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert "warning: checkpoint of step 6 could not be written" in done.stderr
    assert "File too large" in done.stderr and "step-00000004" in done.stderr
    (tmp_path / "ck" / "whole.pt").unlink()
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == good
    assert tensors_of(tmp_path / "ck" / "step-00000004") == contents
    if on_error == "stop":
        assert done.returncode == 1 and "stopping: a checkpoint could not be written" in done.stderr
    else:
        assert done.returncode == 1, "the last weights are not there"
        assert "the last weights, of step 8, are not saved: " in done.stderr
        assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 9))


# the command ----------------------------------------------------------------------------------------------------------


def test_the_command_and_its_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jettison.cli.main import run

    file = tmp_path / "r.toml"
    file.write_text(
        f'steps = 2\n[model]\narchitecture = "gpt"\nhidden = 32\nlayers = 2\ncode = "huggingface"\n'
        f'[batch]\nglobal_batch = 2\nmicro_batch = 2\nseq = 16\n[log]\nfolder = "{tmp_path / "log"}"\n'
    )
    monkeypatch.delenv("RANK", raising=False)
    assert run(["train", str(file)]) == 0
    text = capsys.readouterr()
    assert text.out.startswith("done: 2 steps\nloss from ") and "MFU and HFU n/a" not in text.err
    assert "peak of the second step: " in text.out and text.err == ""
    assert run(["train", str(file), "--format", "json", "--steps", "1", "--budget", "1GiB"]) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed)
    assert (check(printed), document["steps"], document["budget"]) == ("jettison.run/1", 1, "1GiB")
    assert document["request"] == {"recipe": str(file), "steps": 1, "budget": "1GiB"}
    assert set(document["first_step_peak_bytes"]) == {"forward", "backward", "optimizer"}
    assert run(["train", str(file), "--budget", "10kB"]) == 3
    assert "the smallest feasible budget is" in capsys.readouterr().err
    for wrong in (
        ["nothing.toml"],
        [str(file), "--budget", "10"],
        [str(file), "--resume"],
        [str(file), "--steps", "0"],
        [str(file), "--budget", "1GiB", "--recompute", "full"],
        [str(file), "--gpu", "abacus"],
    ):
        assert run(["train", *wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_model_that_cannot_be_trained_so(tmp_path: Path) -> None:
    module = tmp_path / "odd_models.py"
    module.write_text(
        "from torch import nn\nclass Pair(nn.Linear):\n  def forward(self, input_ids, labels):\n"
        "    return super().forward(input_ids.float())\ndef pair(): return Pair(32, 3)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(UsageError, match="model: called with input_ids and labels, it gave no scalar loss"):
            train(tiny(tmp_path, model=ModelSection(factory="odd_models:pair"), checkpoint=CheckpointSection()))
    finally:
        sys.path.remove(str(tmp_path))


def test_tensorboard_is_said_to_be_missing_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    warned: list[str] = []
    RunLog(tmp_path, tensorboard=True, resumed_step=0, warn=warned.append).close()
    assert len(warned) == 1 and "tensorboard is not installed" in warned[0]


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(UsageError, match=r"log.folder: cannot write to"):
        train(tiny(tmp_path))


def test_a_loss_that_is_no_number_is_said(tmp_path: Path) -> None:
    warned: list[str] = []
    wild = OptimizerSection(lr=1e30, clip=0.0)
    made = tiny(tmp_path, steps=4, optimizer=wild, checkpoint=CheckpointSection(), on_nan="continue")
    train(made, warn=warned.append)
    assert any("the loss is nan" in text or "the loss is inf" in text for text in warned)
    assert lines(tmp_path)[-1]["loss"] is None  # JSON has no NaN


def test_errors_have_their_exit_codes() -> None:
    assert (RankLost.exit_code, UsageError.exit_code, Infeasible.exit_code) == (1, 2, 3)
    assert parse_bytes("2GiB") == 2**31 and TrainResult.__dataclass_params__.frozen  # type: ignore[attr-defined]
