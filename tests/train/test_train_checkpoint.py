"""Checkpoints: complete or not there, read without running anything, the same tensors on any layout."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from jettison.core.errors import UsageError
from jettison.train.checkpoint import Checkpoints, RunState, digest_of
from jettison.train.ranks import World, joined
from jettison.train.recipe import CheckpointSection

STATE = RunState(
    step=1,
    steps=99,
    seed=0,
    global_batch=8,
    seq=16,
    data="abc",
    world=1,
    layout="dp 1",
    model={"layers": 2},
    optimizer={"name": "adamw"},
    schedule={"lr": 0.1},
)


@pytest.fixture
def world() -> Iterator[World]:
    with joined() as found:
        yield found


def at(step: int) -> RunState:
    return RunState(**{**vars_of(STATE), "step": step})


def vars_of(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in RunState.__dataclass_fields__}


def tensors(value: float) -> dict[str, Tensor]:
    return {"model.w": torch.full((4, 3), value), "optimizer.w.step": torch.tensor(value, dtype=torch.float32)}


def checkpoints(folder: Path, world: World, warned: list[str] | None = None, **more: Any) -> Checkpoints:
    said = [] if warned is None else warned
    return Checkpoints(CheckpointSection(folder=str(folder), **more), world, said.append)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_read(tmp_path: Path, world: World, asynchronous: bool) -> None:
    saver = checkpoints(tmp_path / "ck", world, asynchronous=asynchronous)
    assert saver.find() is None
    values = tensors(3.0)
    saver.save(values, at(5))
    for value in values.values():
        value.zero_()  # the next step changes weights while the old ones are being written
    saver.wait()
    found = checkpoints(tmp_path / "ck", world).find()
    assert found == tmp_path / "ck" / "step-00000005"
    read = tensors(0.0)
    assert checkpoints(tmp_path / "ck", world).load(found, read, STATE) == at(5)
    assert all(torch.equal(read[name], value) for name, value in tensors(3.0).items())


def test_the_last_ones_stay(tmp_path: Path, world: World) -> None:
    saver = checkpoints(tmp_path, world, keep=2)
    for step in (2, 4, 6, 8):
        saver.save(tensors(step), at(step))
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def test_what_an_interrupted_save_left_is_not_taken_for_a_checkpoint(tmp_path: Path, world: World) -> None:
    saver = checkpoints(tmp_path, world)
    for step in (2, 4):
        saver.save(tensors(step), at(step))
    saver.wait()
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000006.partial")  # all but renamed
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000009")
    (tmp_path / "step-00000009" / "run.json").unlink()  # no save leaves that
    with pytest.raises(UsageError, match=r"step-00000009 is damaged: it has no run.json; .*go on from step-00000004$"):
        checkpoints(tmp_path, world).find()
    shutil.rmtree(tmp_path / "step-00000009")
    assert checkpoints(tmp_path, world).find() == tmp_path / "step-00000004"
    assert not list(tmp_path.glob("*.partial"))
    shutil.rmtree(tmp_path / "step-00000004")  # to go back
    assert checkpoints(tmp_path, world).find() == tmp_path / "step-00000002"


def test_a_save_that_fails_leaves_the_last_good_one(tmp_path: Path, world: World) -> None:
    warned: list[str] = []
    saver = checkpoints(tmp_path, world, warned)
    saver.save(tensors(2.0), at(2))
    saver.wait()
    (tmp_path / "step-00000004.partial").write_text("a file where a folder should be")
    saver.save(tensors(4.0), at(4))
    saver.wait()
    assert saver.failed and len(warned) == 1
    assert "checkpoint of step 4 could not be written" in warned[0] and "step-00000002" in warned[0]
    assert "\n" not in warned[0]
    assert saver.find() == tmp_path / "step-00000002"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("global_batch", 4),
        ("seq", 8),
        ("data", "other"),
        ("world", 2),
        ("layout", "dp 2"),
        ("model", {"layers": 3}),
        ("optimizer", {"name": "sgd"}),
    ],
)
def test_only_the_same_data_can_be_continued(name: str, value: object) -> None:
    other = RunState(**{**vars_of(STATE), name: value})
    if name in ("world", "layout"):
        STATE.require_same_run(other, Path("x"))
        return
    says = f"{name}.{' '.join(map(str, *value.items()))}, the" if isinstance(value, dict) else f"{name} {value}"
    with pytest.raises(UsageError, match=f"was made with {says}"):
        STATE.require_same_run(other, Path("x"))


def saved(folder: Path, world: World) -> Path:
    saver = checkpoints(folder, world, asynchronous=False)
    saver.save(tensors(1.0), at(1))
    found = saver.find()
    assert found is not None
    return found


def sign(found: Path) -> None:
    """As whoever hands on a checkpoint can."""
    (found / "run.json").write_text(STATE.text(description=digest_of((found / ".metadata").read_bytes())))


class Evil:
    """Pickles as a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_reading_a_checkpoint_runs_none_of_its_code(tmp_path: Path, world: World) -> None:
    found, proof = saved(tmp_path / "ck", world), tmp_path / "proof"
    good = (found / ".metadata").read_bytes()
    with pytest.raises(UsageError, match=r".metadata is not what was written"):
        (found / ".metadata").write_bytes(good[:-1])
        checkpoints(tmp_path / "ck", world).load(found, tensors(0.0), STATE)
    (found / ".metadata").write_bytes(pickle.dumps(Evil(proof)))
    sign(found)
    with pytest.raises(UsageError, match=r"which no checkpoint needs"):
        checkpoints(tmp_path / "ck", world).load(found, tensors(0.0), STATE)
    assert not proof.exists()
    pickle.loads((found / ".metadata").read_bytes())
    assert proof.exists(), "the description would have run code"
    proof.unlink()

    # values that are not tensors are pickles as well
    shutil.rmtree(found)
    dcp.save({"model.w": Evil(proof), "optimizer.w.step": torch.tensor(1.0)}, checkpoint_id=str(found))
    sign(found)
    with pytest.raises(UsageError, match=r"'model.w' is not a tensor"):
        checkpoints(tmp_path / "ck", world).load(found, tensors(0.0), STATE)
    assert not proof.exists() and good


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, world: World) -> None:
    found = saved(tmp_path, world)
    good = tensors(0.0)
    step = {"optimizer.w.step": good["optimizer.w.step"]}
    for other, says in (
        ({"model.w": torch.zeros(5, 3), **step}, "model.w is 4x3 there and 5x3 here"),
        ({"model.w": torch.zeros(4, 3).double(), **step}, "model.w is torch.float32 there and torch.float64 here"),
        ({"model.v": torch.zeros(4, 3), **good}, "it lacks model.v"),
        (step, "it also has model.w"),
        ({"model.w": good["model.w"]}, "it also has optimizer.w.step"),
    ):
        with pytest.raises(UsageError, match=rf"does not fit this model and optimizer: {says}"):
            checkpoints(tmp_path, world).load(found, other, STATE)
        assert not any(value.any() for value in other.values()), "nothing was read"
    (found / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"run.json cannot be read"):
        checkpoints(tmp_path, world).load(found, tensors(0.0), STATE)


@pytest.mark.parametrize("damage", [b"garbage", b"", None])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_damaged_one_is_one_line_that_names_the_one_before(
    tmp_path: Path, world: World, name: str, damage: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = checkpoints(tmp_path, world, asynchronous=False)
    for step in (1, 2):
        saver.save(tensors(1.0), at(step))
    found = saver.find()
    assert found is not None
    if damage is None:
        (found / name).unlink()
    else:
        (found / name).write_bytes(damage)
    with pytest.raises(UsageError, match=r"step-00000002 is damaged: .*go on from step-00000001$") as error:
        checkpoints(tmp_path, world).load(found, tensors(0.0), STATE)
    assert "\n" not in str(error.value) and capsys.readouterr().err == ""


def test_a_folder_that_is_a_file_is_refused_at_the_start(tmp_path: Path, world: World) -> None:
    (tmp_path / "ck").write_text("")
    with pytest.raises(UsageError, match=r"checkpoint.folder: .* is not a folder"):
        checkpoints(tmp_path / "ck", world).find()
