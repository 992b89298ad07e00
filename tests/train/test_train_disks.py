"""What a run keeps on disks: saves that fail, folders with another run, texts that change, tokens nobody knows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.train.build_model import Built, shifted_within, vocabulary
from jettison.train.checkpoint import SaveFailed
from jettison.train.data import Corpus
from jettison.train.recipe import BatchSection, CheckpointSection, DataSection, LogSection, ModelSection, TrainRecipe
from jettison.train.run_folder import LOCK, claimed
from support.patience import PATIENCE

GPT = ModelSection(architecture="gpt", layers=2, hidden=32, heads=4)


def recipe(folder: Path, **more: Any) -> TrainRecipe:
    values: dict[str, Any] = {
        "model": GPT,
        "batch": BatchSection(global_batch=2, micro_batch=2, seq=16),
        "steps": 4,
        "checkpoint": CheckpointSection(folder=str(folder / "ck"), every=1, keep=2, asynchronous=False),
        "log": LogSection(folder=str(folder / "log"), memory_steps=0),
    }
    return TrainRecipe(**values | more)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ck").iterdir())


# saves that are lost --------------------------------------------------------------------------------------------------


def test_folders_are_tried_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root no permission is in the way: the disk has to refuse by itself."""
    said: list[str] = []
    monkeypatch.setattr("jettison.train.run_folder.os.fsync", full)
    with pytest.raises(UsageError, match=r"^log.folder: cannot write to .*: No space left on device; make"):
        train(recipe(tmp_path), progress=said.append)
    assert said == [] and not (tmp_path / "ck").exists() and not (tmp_path / "log").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    for where in ("/proc/jettison", str(tmp_path / "file")):
        made = recipe(tmp_path)
        with pytest.raises(UsageError, match=rf"^checkpoint.folder: cannot write to {where}: "):
            train(replace(made, checkpoint=replace(made.checkpoint, folder=where)))


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_last_save_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, every: int
) -> None:
    """Also where the last step was to be saved anyway, and that failed."""
    from torch.distributed.checkpoint import FileSystemWriter

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    made = recipe(tmp_path, steps=2)
    section = replace(made.checkpoint, every=every, asynchronous=asynchronous)
    with pytest.raises(
        SaveFailed,
        match=r"the last weights, of step 2, are not saved: .*No space left.*no checkpoint has been written yet",
    ):
        train(replace(made, checkpoint=section))


def test_what_cannot_be_cleared_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ck" / "step-00000002.partial").mkdir(parents=True)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jettison.train.run_folder.shutil.rmtree", denied)
    with pytest.raises(
        UsageError, match=r"^checkpoint.folder: .*step-00000002.partial, left by a run .*cannot be removed"
    ):
        train(recipe(tmp_path))


def test_a_checkpoint_without_its_description_is_not_passed_over(tmp_path: Path) -> None:
    train(recipe(tmp_path))
    assert saved(tmp_path) == ["run.lock", "step-00000003", "step-00000004"]
    (tmp_path / "ck" / "step-00000004" / "run.json").unlink()
    with pytest.raises(
        UsageError, match=r"step-00000004 is damaged: it has no run.json; remove it to go on from step-00000003"
    ):
        train(recipe(tmp_path, steps=6))
    shutil.rmtree(tmp_path / "ck" / "step-00000004")
    assert train(recipe(tmp_path, steps=6)).resumed_step == 3


# data -----------------------------------------------------------------------------------------------------------------


def test_a_text_that_was_changed_in_the_middle(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    numbers = np.random.default_rng(0).integers(0, 256, 9_000_000).astype("<u2")
    numbers.tofile(file)
    made = recipe(tmp_path, steps=1, data=DataSection(kind="tokens", files=(str(file),)))
    train(made)
    numbers[4_321_098] ^= 1
    numbers.tofile(file)
    with pytest.raises(UsageError, match=r"was made with data [0-9a-f]+, the recipe has [0-9a-f]+: its data would not"):
        train(replace(made, steps=2))


def test_a_token_in_the_middle_that_the_model_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    numbers = np.zeros(5_000_000, dtype="<u2")
    numbers[2_500_000] = 256
    numbers.tofile(file)
    data = DataSection(kind="tokens", files=(str(file),))
    for model in (GPT, ModelSection(factory="support.train_models:tiny")):
        with pytest.raises(UsageError, match=r"data: got the token 256; the model has a vocabulary of 256"):
            train(recipe(tmp_path, model=model, data=data))


def test_a_model_that_does_not_say_how_many_words_it_has(tmp_path: Path) -> None:
    """Two embeddings: which is it? The first step says."""
    file = tmp_path / "tokens.bin"
    np.full(1000, 300, dtype="<u2").tofile(file)
    data = DataSection(kind="tokens", files=(str(file),))
    model = ModelSection(factory="test_train_disks:Two")
    with pytest.raises(UsageError, match=r"^model: it cannot look up .* in step 1: .* the text has tokens up to 300"):
        train(recipe(tmp_path, model=model, data=data))
    assert vocabulary(Built(model=Two(), call=shifted_within)) is None
    assert vocabulary(Built(model=nn.Embedding(256, 8), call=shifted_within)) == 256


class Two(nn.Module):
    """Looks its input up in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.others = nn.Embedding(256, 8), nn.Embedding(512, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.words(input_ids) + self.others(labels)).sum()


def test_one_token_makes_another_text_wherever_it_stands() -> None:
    tokens = np.zeros(9_000_000, dtype=np.uint8)
    corpus = Corpus(tokens, 16)
    before = [corpus.block(number) for number in range(corpus.blocks)]
    for place in (0, 4_194_304, 6_000_000, 8_999_999):
        tokens[place] = 1
        after = [corpus.block(number) for number in range(corpus.blocks)]
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
        tokens[place] = 0


# two runs -------------------------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    warned: list[str] = []
    with claimed({"checkpoint.folder": tmp_path / "ck"}, leads=True, rank=0, warn=warned.append):
        with pytest.raises(UsageError, match=rf"^checkpoint.folder: another run is in .*ck \(process {os.getpid()} on"):
            train(recipe(tmp_path))
        assert (tmp_path / "ck" / LOCK).exists()
    assert not (tmp_path / "ck").exists() and warned == []
    train(recipe(tmp_path))
    other = replace(recipe(tmp_path), checkpoint=CheckpointSection())
    with (
        claimed({"log.folder": tmp_path / "log"}, leads=True, rank=0, warn=warned.append),
        pytest.raises(UsageError, match=r"^log.folder: another run is in .*log"),
    ):
        train(other)
    assert train(recipe(tmp_path, steps=6)).resumed_step == 4, "a lock that is left blocks nobody"


def test_the_lock_of_a_process_that_died_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from jettison.train.run_folder import claimed\n"
        "with claimed({'x': Path(sys.argv[1])}, leads=True, rank=0, warn=print):\n"
        "    print(os.getpid(), flush=True); os._exit(9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ck")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")},
    )
    assert done.returncode == 9, done.stderr
    lock = tmp_path / "ck" / LOCK
    assert lock.read_text().startswith(f"process {done.stdout.strip()} on ")
    train(recipe(tmp_path, steps=1))
    assert lock.read_text().startswith(f"process {os.getpid()} on ")
