"""Runs that went wrong without a word: other models, numbers that are none, damaged checkpoints."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_checkpoint import STATE
from torch import nn

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.train.checkpoint import Checkpoints, SaveFailed
from jettison.train.loop import NotFinite
from jettison.train.ranks import joined
from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    TrainRecipe,
)

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
    return sorted(path.name for path in (folder / "ck").iterdir() if path.name != "run.lock")


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    entries = map(json.loads, (folder / "log" / "log.jsonl").read_text("utf-8").splitlines())
    return [entry for entry in entries if entry["event"] == event]


# another model, another optimizer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": replace(GPT, layers=1)}, "model.config.layers 2, the recipe has 1"),
        ({"model": replace(GPT, heads=2)}, "model.config.heads 4, the recipe has 2"),
        ({"model": replace(GPT, dropout=0.1)}, "model.config.dropout 0.0, the recipe has 0.1"),
        ({"optimizer": OptimizerSection(name="sgd")}, "optimizer.name adamw, the recipe has sgd"),
        ({"optimizer": OptimizerSection(eps=1e-6)}, "optimizer.eps 1e-08, the recipe has 1e-06"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    train(recipe(tmp_path, steps=2))
    before = saved(tmp_path)
    with pytest.raises(UsageError, match=rf"checkpoint .*step-00000002 was made with .*{says}.*Use the recipe"):
        train(recipe(tmp_path, **change))
    assert saved(tmp_path) == before


def test_what_a_configuration_says_is_compared_and_not_where_it_lies(tmp_path: Path) -> None:
    values = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 16}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    made = recipe(tmp_path, steps=1, model=ModelSection(config=str(file)))
    train(made)
    moved = file.rename(tmp_path / "moved.json")
    assert train(replace(made, steps=2, model=ModelSection(config=str(moved)))).resumed_step == 1
    moved.write_text(json.dumps(values | {"n_head": 2}))  # tensors are the same by name and shape
    with pytest.raises(UsageError, match=r"model.config.n_head 4, the recipe has 2"):
        train(replace(made, steps=3, model=ModelSection(config=str(moved))))


def test_what_may_change_is_said(tmp_path: Path) -> None:
    train(recipe(tmp_path, steps=2))
    warned: list[str] = []
    train(recipe(tmp_path, optimizer=OptimizerSection(lr=1e-4, decay_steps=2)), warn=warned.append)
    assert len(warned) == 1 and warned[0].endswith("was made with optimizer.lr 0.0003, the recipe has 0.0001")


# numbers that are none ------------------------------------------------------------------------------------------------


class Spoilt(nn.Module):
    """Gives a loss, and gradients, that are NaN in its n-th call of this process."""

    calls = 0
    bad: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        logits = self.head(self.words(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 256), labels[:, 1:].reshape(-1))
        return loss * float("nan") if type(self).calls in self.bad else loss


def spoilt(monkeypatch: pytest.MonkeyPatch, *bad: int) -> ModelSection:
    monkeypatch.setattr(Spoilt, "calls", 0)
    monkeypatch.setattr(Spoilt, "bad", frozenset(bad))
    return ModelSection(factory="test_train_silence:Spoilt")


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = folder / "whole.pt"
    dcp_to_torch_save(folder / "ck" / f"step-{step:08d}", file)
    found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return found


def test_a_run_gone_to_nan_stops_before_its_weights_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path, steps=9, model=spoilt(monkeypatch, *range(4, 99)))
    with pytest.raises(
        NotFinite, match=r"^step 4: the loss is nan on rank 0.*last good checkpoint is .*step-00000003\."
    ) as error:
        train(made)
    assert error.value.exit_code == 1 and "\n" not in str(error.value)
    assert saved(tmp_path) == ["step-00000002", "step-00000003"]
    assert all(value.isfinite().all() for value in tensors_of(tmp_path, 3).values())


def test_a_step_that_is_skipped_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    made = recipe(tmp_path, model=spoilt(monkeypatch, 3), on_nan="skip")
    keep = replace(made.checkpoint, keep=9)
    result = train(replace(made, checkpoint=keep), warn=warned.append)
    assert (result.steps, result.skipped_steps) == (4, 1) and "1 of them skipped" in "\n".join(result.lines())
    assert [text.endswith("; skipped") for text in warned] == [True]
    assert [entry["step"] for entry in events(tmp_path, "skip")] == [3]
    second, third, last = (tensors_of(tmp_path, step) for step in (2, 3, 4))
    assert all(torch.equal(second[name], value) for name, value in third.items())
    assert any(not torch.equal(third[name], value) for name, value in last.items())


def test_skipping_for_ever_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path, steps=50, model=spoilt(monkeypatch, *range(3, 99)), on_nan="skip")
    with pytest.raises(NotFinite, match=r"^step 13: .* after 10 skipped steps in a row"):
        train(made)
    assert "step-00000001" in saved(tmp_path), "the last whose next step was finite"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_whoever_goes_on_keeps_the_last_finite_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    made = recipe(tmp_path, steps=8, model=spoilt(monkeypatch, 4), on_nan="continue")
    warned: list[str] = []
    section = replace(made.checkpoint, asynchronous=asynchronous)
    with pytest.raises(SaveFailed, match=r"last weights, of step 8, are not saved: .* is not finite.*step-00000003"):
        train(replace(made, checkpoint=section), warn=warned.append)
    assert saved(tmp_path) == ["step-00000002", "step-00000003"]
    assert any("checkpoint of step 4 is not written" in text for text in warned)
    assert all(value.isfinite().all() for value in tensors_of(tmp_path, 3).values())


def test_weights_that_are_finite_and_spoilt_push_no_good_ones_out(tmp_path: Path) -> None:
    """Each is finite; the step that follows says that they are of no use."""
    wild = OptimizerSection(name="sgd", lr=1e30, clip=0.0)
    train(recipe(tmp_path, steps=1))
    shutil.rmtree(tmp_path / "ck")
    made = recipe(tmp_path, steps=9, optimizer=wild)
    with pytest.raises(NotFinite):
        train(replace(made, checkpoint=replace(made.checkpoint, keep=1)))
    kept = saved(tmp_path)
    assert len(kept) <= 2 and all(v.isfinite().all() for v in tensors_of(tmp_path, int(kept[0][5:])).values())


def test_with_one_kept_the_one_before_stays_until_the_next_step(tmp_path: Path) -> None:
    with joined() as world:
        section = CheckpointSection(folder=str(tmp_path), keep=1, asynchronous=False)
        saver = Checkpoints(section, world, lambda _: None)
        state = {step: replace(STATE, step=step) for step in (1, 2, 3)}
        for step in (1, 2, 3):
            saver.save({"w": torch.ones(3)}, state[step])
            there = sorted(path.name for path in tmp_path.glob("step-*"))
            if step == 1:
                saver.proves(1)
                assert there == ["step-00000001"]
            elif step == 2:
                assert there == ["step-00000001", "step-00000002"]
            else:
                assert there == ["step-00000001", "step-00000003"], "the second gave no finite loss"
        saver.proves(3)
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003"]


# damage ---------------------------------------------------------------------------------------------------------------


def attempt(folder: Path, saver: Checkpoints) -> dict[str, torch.Tensor] | None:
    """What a checkpoint reads as; None: it is refused in one line."""
    read = {
        "model.w": torch.zeros(40, 30),
        "model.v": torch.zeros(7, dtype=torch.float64),
        "optimizer.s": torch.tensor(0),
    }
    try:
        saver.load(folder / "step-00000001", read, STATE)
    except UsageError as error:
        assert "step-00000001" in str(error) and "\n" not in str(error), str(error)
        return None
    return read


@pytest.fixture
def good(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    values = {"model.w": torch.randn(40, 30), "model.v": torch.randn(7).double(), "optimizer.s": torch.tensor(5)}
    with joined() as world:
        saver = Checkpoints(CheckpointSection(folder=str(tmp_path), asynchronous=False), world, lambda _: None)
        saver.save(values, STATE)
    return tmp_path, values


def flipped_bit(whole: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]


def another_byte(whole: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(whole))
    return whole[:place] + bytes([(whole[place] + draw.randrange(1, 256)) % 256]) + whole[place + 1 :]


def cut_short(whole: bytes, draw: random.Random) -> bytes:
    return whole[: draw.randrange(len(whole))]


DAMAGED = {"__0_0.distcp": 300, ".metadata": 100, "run.json": 100}
"""Cases of damage by file."""


@pytest.mark.parametrize("damage", [flipped_bit, another_byte, cut_short])
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_found_or_changes_nothing(
    good: tuple[Path, dict[str, torch.Tensor]], name: str, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    folder, values = good
    file = folder / "step-00000001" / name
    whole = file.read_bytes()
    draw, refused = random.Random(7), 0
    count = DAMAGED[name] // 3
    with joined() as world:
        saver = Checkpoints(CheckpointSection(folder=str(folder)), world, lambda _: None)
        for _ in range(count):
            file.write_bytes(damage(whole, draw))
            found = attempt(folder, saver)
            refused += found is None
            assert found is None or all(torch.equal(found[key], value) for key, value in values.items()), name
    assert refused > 0.9 * count


def parts_of(file: Path) -> Iterator[tuple[int, int]]:
    """Where the zip archives begin and end that lie in a file, one after the other."""
    whole, begin = file.read_bytes(), 0
    while (end := whole.find(b"PK\x05\x06", begin)) >= 0:
        yield begin, end + 22
        begin = end + 22


def test_a_bit_of_a_part_s_directory_is_found(good: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """An archive's own checksums agree where its directory says that values lie elsewhere."""
    folder, _ = good
    file = folder / "step-00000001" / "__0_0.distcp"
    whole = file.read_bytes()
    with joined() as world:
        saver = Checkpoints(CheckpointSection(folder=str(folder)), world, lambda _: None)
        for begin, end in parts_of(file):
            for place in range(begin + whole[begin:end].index(b"PK\x01\x02"), end, 7):
                file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
                with pytest.raises(UsageError, match="step-00000001 is damaged: the checksum of"):
                    saver.check(folder / "step-00000001")
                assert attempt(folder, saver) is None, place


def test_damage_is_said_before_anything_is_built(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    train(asked)
    file = tmp_path / "ck" / saved(tmp_path)[-1] / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    said: list[str] = []
    with pytest.raises(UsageError, match="is damaged: the checksum of"):
        train(asked, progress=said.append)
    assert [line.partition(" ")[0] for line in said] == ["checking"]


def test_a_zeroed_block_is_found(good: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = good
    file = folder / "step-00000001" / "__0_0.distcp"
    whole = bytearray(file.read_bytes())
    whole[2048 : 2048 + 512] = bytes(512)
    file.write_bytes(whole)
    with joined() as world, pytest.raises(UsageError, match=r"is damaged: .*the checksum of model\.w in __0_0\.distcp"):
        saver = Checkpoints(CheckpointSection(folder=str(folder)), world, lambda _: None)
        read = {"model.w": torch.zeros(40, 30), "model.v": torch.zeros(7).double(), "optimizer.s": torch.tensor(0)}
        saver.load(folder / "step-00000001", read, STATE)
