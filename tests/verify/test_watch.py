"""A loop that is watched: what it writes when bytes grow or run out, and that it says nothing otherwise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jettison
from jettison.cli.main import run
from jettison.diagnose.finding import FindingKind
from jettison.diagnose.log import read_watch_record
from jettison.diagnose.out_of_memory import diagnose_memory
from support.planted_memory import message

KEPT: list[Any] = []


def loop(out: Path, *, steps: int = 10, after: Callable[[int, torch.Tensor], None] = lambda *_: None) -> Any:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    with jettison.watch(model, out=out) as watch:
        for step in range(steps):
            loss = model(torch.ones(8 + step % 3, 32)).square().mean()
            loss.backward()
            after(step, loss)
            optimizer.step()
            optimizer.zero_grad()
    return watch


def test_a_model_on_another_gpu_is_watched_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, second = nn.Linear(2, 2), torch.device("cuda", 1)
    monkeypatch.setattr("jettison.runtime.offload.place_of", {model: second}.get)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: {second: 512}[device])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: {second: 1024}[device])
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", lambda _: None, raising=False)
    with jettison.watch(model, out=tmp_path / "watch.json") as watch:
        watch.step()
    assert [step.between_bytes for step in watch.steps] == [512]


def test_a_healthy_loop_writes_nothing(tmp_path: Path) -> None:
    watch = loop(tmp_path / "watch.json")
    assert not list(tmp_path.iterdir())
    assert [step.batch for step in watch.steps[:3]] == ["[8, 32]", "[9, 32]", "[10, 32]"]
    assert [step.batch_elements for step in watch.steps[:3]] == [256, 288, 320]
    assert all(step.peak_bytes > step.between_bytes for step in watch.steps)


def test_a_leak_names_the_line_that_makes_what_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "watch.json"
    KEPT.clear()
    with pytest.warns(RuntimeWarning, match="more are allocated than after the first two"):
        loop(out, after=lambda _, loss: KEPT.append(torch.zeros(500) + loss.detach()))
    facts = read_watch_record(out)
    assert facts is not None
    found = diagnose_memory(facts)
    assert found.kind is FindingKind.LEAK
    (one,) = facts.survivors
    assert one.bytes_per_step == 2000
    assert "test_watch.py" in one.module
    assert "<lambda>" in one.module
    assert run(["doctor", "--oom", str(out)]) == 0


@pytest.mark.parametrize("folder", ["jettison/train", "torch/optim", "my-site-packages-copy", "models/torch/nn/mine"])
def test_a_program_may_lie_in_a_folder_that_is_called_like_a_library(tmp_path: Path, folder: str) -> None:
    """Its lines are told from PyTorch's and Jettison's by where those are installed, not by words in a path."""
    KEPT.clear()
    out, file = tmp_path / "watch.json", tmp_path / folder / "loop.py"
    found: dict[str, Any] = {"KEPT": KEPT, "torch": torch}
    exec(compile("def keep(step, loss):\n    KEPT.append(torch.zeros(500) + loss.detach())", file, "exec"), found)
    with pytest.warns(RuntimeWarning, match="more are allocated than after the first two"):
        loop(out, after=found["keep"])
    facts = read_watch_record(out)
    assert facts is not None
    assert [(one.module, one.bytes_per_step) for one in facts.survivors] == [
        (f"{file.parent.name}/loop.py:2 keep", 2000)
    ]


def test_an_error_is_written_down_with_its_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no device here: the message is PyTorch's, and the loop raises it."""
    out = tmp_path / "watch.json"

    def fail(step: int, _: torch.Tensor) -> None:
        if step == 2:
            text = message(asked="2.00", free="0.50", allocated="77.00", unused="0.25", used="78.65")
            raise torch.OutOfMemoryError(text.partition(": ")[2])

    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop(out, after=fail)
    assert "jettison doctor --oom" in caught.value.__notes__[0]
    assert run(["doctor", "--oom", str(out), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cause"], document["requested_bytes"]) == ("peak", 2 << 30)
    (finding,) = document["findings"]
    assert "this batch is [10, 32]; the largest that went through is [9, 32]" in finding["evidence"]
    assert "batches of at most [9, 32]" in [change["line"] for change in finding["changes"]]


def test_a_record_that_cannot_be_written_ends_no_loop(tmp_path: Path) -> None:
    """The loop leaks, and then runs out of memory: the error is that one."""
    (tmp_path / "in the way").write_text("")
    out = tmp_path / "in the way" / "watch.json"
    KEPT.clear()

    def leak_and_fail(step: int, loss: torch.Tensor) -> None:
        KEPT.append(torch.zeros(500) + loss.detach())
        if step == 9:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with (
        pytest.warns(RuntimeWarning, match=r"more are allocated .*watch.json cannot be written: "),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        loop(out, after=leak_and_fail)
    assert "cannot be written" in caught.value.__notes__[0]


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        loop(tmp_path / "watch.json", after=lambda *_: torch.ones(2) @ torch.ones(3))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
