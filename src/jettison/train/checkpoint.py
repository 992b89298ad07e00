"""Checkpoints on disk: complete or not there, whatever happens while they are written.

    folder/step-00000100/      tensors, as torch.distributed.checkpoint writes them, and run.json
    folder/latest              the name of the newest complete one
    folder/step-00000200.partial/   one being written, or one that a killed run has left; removed at the next start

A checkpoint is renamed into place when every rank has written its part, and `latest` is replaced after that. It holds
tensors only: what else a run needs follows from its recipe and the step (NOTE [ Positions ] in train/order.py).

NOTE [ Nothing is executed ]
torch.distributed.checkpoint describes its tensors in a pickle, and reads values that are not tensors from another. Our
reader takes the description with an unpickler that knows only the classes of such a description, and refuses values
that are not tensors, so that reading a checkpoint from elsewhere runs none of its code. torch reads the tensors
themselves with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from jettison.errors import JettisonError, UsageError
from jettison.train.recipe import CheckpointSection
from jettison.train.world import World, agreed

SCHEMA: Final = "jettison.checkpoint/1"
_RUN: Final = "run.json"
_LATEST: Final = "latest"
_PARTIAL: Final = ".partial"
_ERRORS: Final = (OSError, RuntimeError, ValueError, dcp.CheckpointException)
"""What goes wrong with files. CheckpointException is no Exception: it has to be named."""
_DAMAGE: Final = (*_ERRORS, EOFError, LookupError, AttributeError, TypeError, pickle.UnpicklingError)
"""What a pickle's reader makes of bytes that are none."""


class SaveFailed(JettisonError, RuntimeError):
    """A checkpoint could not be written, and the recipe says that training stops then."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a checkpoint says beside its tensors. ``step`` is the number of steps done, of ``steps`` altogether."""

    step: int
    steps: int
    seed: int
    global_batch: int
    seq: int
    data: str
    world: int
    layout: str

    def require_same_run(self, other: RunState, where: Path) -> None:
        """Would resuming from ``other`` continue with what would have come next?

        Raises:
            UsageError: no.
        """
        for name in ("seed", "global_batch", "seq", "data"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise UsageError(
                    f"checkpoint {where} was made with {name} {theirs}, the recipe has {mine}: its data would not "
                    "continue where it stopped. Use the same, or another checkpoint folder"
                )
        if other.step > self.steps:
            raise UsageError(f"checkpoint {where} is of step {other.step}; the recipe has {self.steps} steps")


@dataclass(kw_only=True)
class _Pending:
    """A save that is being written."""

    step: int
    state: RunState
    future: Future[Any]


class Checkpoints:
    """The checkpoints of one run. Every method is called by all ranks together."""

    def __init__(self, section: CheckpointSection, world: World, warn: Callable[[str], None]) -> None:
        assert section.folder is not None
        self.folder = Path(section.folder)
        self.section = section
        self.world = world
        self.warn = warn
        self.failed = False
        self._tried: int | None = None  # the last step that was loaded or begun to be saved: the same on all ranks
        self._pending: _Pending | None = None
        # threads of async saves talk over a group of their own, or their words would mix with the training's
        self._group = dist.new_group(backend="gloo")

    def find(self) -> Path | None:
        """The newest complete checkpoint. What an interrupted save has left is removed."""
        return self.world.from_leader(self._find)

    def load(self, path: Path, tensors: Mapping[str, Tensor], run: RunState) -> RunState:
        """Read into these tensors, whatever layout they were saved from.

        Raises:
            UsageError: the checkpoint is of another run than this, does not fit, or cannot be read.
        """
        state = self.world.together(lambda: _state_for(run, path))
        try:
            self.world.together(_Reader(path).read_metadata)
            dcp.load(dict(tensors), storage_reader=_Reader(path), process_group=self.world.control)
        except _DAMAGE as error:
            older = [one for one in self._complete() if one < path]
            way = f"; where it is damaged, remove it to go on from {older[-1].name}" if older else ""
            raise agreed(
                UsageError(
                    f"checkpoint {path} does not fit this model and optimizer, or is damaged: {_reason(error)}. "
                    f"Use the recipe that it was made with, or another checkpoint folder{way}"
                )
            ) from error
        self._tried = state.step
        return state

    def save(self, tensors: Mapping[str, Tensor], state: RunState) -> None:
        """Write a checkpoint, or begin to. One that is still being written is waited for."""
        self.wait()
        if self._tried == state.step:
            return
        self._tried = state.step
        target = str(self._partial(state.step))
        try:
            if self.section.asynchronous:
                future = dcp.async_save(dict(tensors), checkpoint_id=target, process_group=self._group)
                self._pending = _Pending(step=state.step, state=state, future=future)
                return
            dcp.save(dict(tensors), checkpoint_id=target, process_group=self._group)
        except _ERRORS as error:
            self._give_up(state.step, error)
        else:
            self._commit(state)

    def poll(self) -> None:
        """Put a save into place that has been written meanwhile."""
        if self._pending is not None and self._pending.future.done():
            self.wait()

    def wait(self) -> None:
        """Until the save under way, if any, is in its place."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.future.result()
        except _ERRORS as error:
            self._give_up(pending.step, error)
        else:
            self._commit(pending.state)

    # rank 0 alone ----------------------------------------------------------------------------------------------------

    def _partial(self, step: int) -> Path:
        return self.folder / f"{_name(step)}{_PARTIAL}"

    def _commit(self, state: RunState) -> None:
        if not self.world.leads:
            return
        try:
            self._put_in_place(state)
        except OSError as error:
            self._give_up(state.step, error)

    def _put_in_place(self, state: RunState) -> None:
        partial, final = self._partial(state.step), self.folder / _name(state.step)
        text = json.dumps({"schema": SCHEMA, **asdict(state), "torch": torch.__version__}, indent=1) + "\n"
        _write_durably(partial / _RUN, text)
        if final.exists():  # an incomplete one, or it would have been resumed from
            shutil.rmtree(final)
        partial.rename(final)
        _sync_folder(self.folder)
        _write_durably(self.folder / f"{_LATEST}{_PARTIAL}", final.name + "\n")
        (self.folder / f"{_LATEST}{_PARTIAL}").replace(self.folder / _LATEST)
        _sync_folder(self.folder)
        for old in self._complete()[: -self.section.keep]:
            (old / _RUN).unlink()  # from here on it is incomplete, should the rest be interrupted
            shutil.rmtree(old)

    def _give_up(self, step: int, error: BaseException) -> None:
        self.failed = True
        if not self.world.leads:
            return
        shutil.rmtree(self._partial(step), ignore_errors=True)
        kept = self._marked()
        last = f"the last good one is {kept}" if kept else "there is none yet"
        self.warn(f"checkpoint of step {step} could not be written to {self.folder}: {_reason(error)}; {last}")

    def _find(self) -> Path | None:
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"checkpoint.folder: {self.folder} is not a folder")
        for left in self.folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return self._marked()

    def _marked(self) -> Path | None:
        """What `latest` names; where that is gone, the newest complete one."""
        complete = self._complete()
        try:
            marked = self.folder / (self.folder / _LATEST).read_text(encoding="utf-8").strip()
        except OSError:
            marked = None
        return marked if marked in complete else (complete[-1] if complete else None)

    def _complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"step-*/{_RUN}") if not path.parent.suffix)


class _Unpickler(pickle.Unpickler):
    """See NOTE [ Nothing is executed ]."""

    ALLOWED: Final = frozenset(
        {
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
                    "MetadataIndex", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
                )
            ),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
            ("pathlib._local", "PosixPath"),
            ("pathlib._local", "WindowsPath"),
        }
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) not in self.ALLOWED:
            raise ValueError(f"its description names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """torch's reader, with NOTE [ Nothing is executed ]."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
            raise ValueError("its description is not one of tensors")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name!r} is not a tensor")
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _read_state(path: Path) -> RunState:
    try:
        values = json.loads((path / _RUN).read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA:
            raise UsageError(f"checkpoint {path} is {values['schema']}; expected {SCHEMA}")
        return RunState(**{name: values[name] for name in RunState.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"checkpoint {path}: {_RUN} cannot be read: {error}") from error


def _state_for(run: RunState, path: Path) -> RunState:
    state = _read_state(path)
    run.require_same_run(state, path)
    return state


def _reason(error: BaseException) -> str:
    """One line about the first thing that went wrong, on whichever rank."""
    if isinstance(error, dcp.CheckpointException):
        rank, (inner, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {_reason(inner)}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
