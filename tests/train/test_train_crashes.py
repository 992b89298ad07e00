"""A run that is ended anywhere loses nothing: at each point of a save where the disk is another one than before, and by
kill -9 at any moment.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_checkpoint import STATE
from test_train_ranks import curve
from test_train_ranks import recipe as tiny
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from jettison.cli.train import train
from jettison.train.checkpoint import Checkpoints
from jettison.train.ranks import World, joined
from jettison.train.recipe import CheckpointSection, TrainRecipe
from support.patience import PATIENCE

Files = dict[str, bytes | None]
"""What is in a folder; None for a folder."""


@dataclass(kw_only=True)
class Disk:
    """Looks at a folder whenever something was done to it.

    Args:
        points: its contents, as they are if the process ends there; and if the machine does, where of what was never
            synced half is lost.
        done: which steps have to be found from there on: how many saves were over.
    """

    folder: Path
    points: list[tuple[int, Files]] = field(default_factory=list)
    done: int = 0
    _synced: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        whole: Files = {}
        torn: Files = {}
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            data = None if path.is_dir() else path.read_bytes()
            whole[name] = torn[name] = data
            if data is not None and self._synced.get(path.stat().st_ino) != len(data):
                torn[name] = data[: len(data) // 2]
        for found in (whole, torn):
            if (self.done, found) not in self.points[-4:]:
                self.points.append((self.done, found))

    def sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._synced[found.st_ino] = found.st_size


class Stream:
    """A file that is looked at after every write."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        written = self._file.write(data)
        self._file.flush()
        self._disk.look()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def watched(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every way in which a save changes a folder."""

    def then_look(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            out = call(*args, **more)
            disk.look()
            return out

        return called

    def fsync(descriptor: int, sync: Any = os.fsync) -> None:
        sync(descriptor)
        disk.sync(descriptor)
        disk.look()

    @contextmanager
    def create_stream(self: FileSystem, path: Any, mode: str, make: Any = FileSystem.create_stream) -> Iterator[Any]:
        with make(self, path, mode) as file:
            yield Stream(file, disk) if "w" in mode else file

    with monkeypatch.context() as patched:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "remove", "open"):
            patched.setattr(os, name, then_look(getattr(os, name)))
        patched.setattr(os, "fsync", fsync)
        patched.setattr(FileSystem, "create_stream", create_stream)
        yield


def tensors(value: int) -> dict[str, Tensor]:
    return {"model.w": torch.full((4, 3), float(value)), "optimizer.w.step": torch.tensor(float(value))}


def put(files: Files, folder: Path) -> None:
    folder.mkdir()
    for name, data in files.items():
        if data is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).write_bytes(data)


def disk_after(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Saves of which one stays."""
    disk = Disk(folder=folder)
    folder.mkdir()
    section = CheckpointSection(folder=str(folder), keep=1, asynchronous=False)
    for step in (1, 2, 3):
        saver = Checkpoints(section, world, lambda _: None)
        with watched(disk, monkeypatch):
            saver.save(tensors(step), replace(STATE, step=step))
            disk.done = step
            saver.proves(step)
        assert not saver.failed
    return disk


def test_a_crash_at_any_point_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with joined() as world:
        disk = disk_after(tmp_path / "ck", world, monkeypatch)
        saver = Checkpoints(CheckpointSection(folder="x"), world, lambda _: None)
        for number, (done, files) in enumerate(disk.points):
            saver.folder = tmp_path / str(number)
            put(files, saver.folder)
            found = saver.find()
            if found is None:
                assert done == 0, f"point {number}: {sorted(files)}"
                continue
            read = tensors(0)
            step = saver.load(found, read, replace(STATE, steps=9)).step
            assert step >= done and all(torch.equal(read[name], value) for name, value in tensors(step).items())
            assert not list(saver.folder.glob("*.partial"))
    assert len(disk.points) > 120, len(disk.points)


# kill -9 --------------------------------------------------------------------------------------------------------------


def killed(made: TrainRecipe, count: int, seconds: float) -> int:
    """Train in processes that are killed at any moment, so many; then in one that may end. How many were in time."""
    draw, hit = random.Random(11), 0
    for number in range(count + 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(made)
                code = 0
            finally:
                os._exit(code)
        if number < count:
            time.sleep(draw.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        hit += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it was neither killed nor did it end in order"
    return hit


def _main(folder: str, count: str) -> None:
    """In a process of its own, which has run nothing yet, so that it can fork."""
    made = tiny(Path(folder) / "cut", steps=16)
    made = replace(made, batch=replace(made.batch, seq=8), checkpoint=replace(made.checkpoint, every=1, keep=2))
    whole = replace(tiny(Path(folder) / "whole", steps=16), batch=made.batch, checkpoint=CheckpointSection())
    start = time.monotonic()
    killed(whole, 0, 0)
    print(killed(made, int(count), 1.5 * (time.monotonic() - start)))


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), pytest.param(45, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment(tmp_path: Path, count: int) -> None:
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(count)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")])},
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= count
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


if __name__ == "__main__":
    _main(*sys.argv[1:])
