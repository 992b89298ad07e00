"""Checkpoints on disk, written atomically and read safely: no code is executed, every byte is checked.

    folder/step-00000100/      tensors in torch.distributed.checkpoint's format, and run.json
    folder/*.partial           being written or removed, or left by a killed run; removed at the next start

A checkpoint is renamed into place when every rank has written its part. It holds tensors only: the rest of a run's
state follows from its recipe and the step (NOTE [ Positions ] in train/data.py).

NOTE [ Nothing is executed ]
torch.distributed.checkpoint stores its metadata in a pickle. Our reader loads it with an unpickler that allows only the
classes of such metadata, and refuses values that are not tensors. torch reads the tensors themselves with
``torch.load(weights_only=True)``.

NOTE [ Every byte is checked ]
`DigestWriter` adds to the metadata a digest of each part, the bytes of one rank's piece of a tensor: a zip archive's
own checksums do not cover its directory. Each rank checks the parts that it is about to read. run.json has the digest
of the metadata, and one of itself.

NOTE [ The last finite one ]
Weights with an infinity or a NaN are not written. Finite weights may still be bad, which the next step shows: a step
with finite loss and gradient *proves* the weights that it began with. The newest proven checkpoint is never removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import operator
import pickle
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

from jettison.core.errors import JettisonError, UsageError
from jettison.core.progress import Progress
from jettison.families.config import NOT_OF_THE_MODEL
from jettison.parallel.parameters import put_whole
from jettison.train.optim import local_of
from jettison.train.ranks import World, agreed, sockets_when_used
from jettison.train.recipe import CheckpointSection, ModelSection, OptimizerSection, TrainRecipe
from jettison.train.run_folder import PARTIAL, put_in_place, remove, write_durably

FILE_ERRORS: Final = (OSError, RuntimeError, ValueError, dcp.CheckpointException)
"""Errors of files. CheckpointException does not derive from Exception, so it is listed."""
DAMAGE: Final = (*FILE_ERRORS, EOFError, LookupError, AttributeError, TypeError, pickle.UnpicklingError, struct.error)
"""Errors that readers raise for damaged files."""


class _Unpickler(pickle.Unpickler):
    ALLOWED: Final = {
        "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata ChunkStorageMetadata TensorProperties "
        "StorageMeta MetadataIndex BytesStorageMetadata _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.serialization": "_get_layout",
        "torch": "Size",
        "collections": "OrderedDict",
        "pathlib": "PosixPath WindowsPath",
        "pathlib._local": "PosixPath WindowsPath",
    }

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype):
            return found
        if name not in self.ALLOWED.get(module, "").split():
            raise ValueError(f"its description names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class CheckedReader(dcp.FileSystemReader):
    """torch's reader with the checks of the notes above; ``description``: digest of the metadata."""

    def __init__(self, path: Path, description: str) -> None:
        super().__init__(path)
        self._description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = (Path(self.path) / ".metadata").read_bytes()
        if digest_of(data) != self._description:
            raise ValueError(".metadata is not what was written; the file was changed, or is damaged")
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
            raise ValueError("its description is not one of tensors")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name!r} is not a tensor")
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for index in dict.fromkeys(item.storage_index for item in plan.items):
            require_intact(Path(self.path), index, self.storage_data[index])
        return super().read_data(plan, planner)


class DigestWriter(dcp.FileSystemWriter):
    """torch's writer; its metadata also has a digest of each part, which torch's own reader ignores."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's parts, and read them back for their digests."""
        written = super().write_data(plan, planner)
        for result in written.wait():
            result.storage_data.digest = _part_digest(Path(self.path), result.storage_data)
        return written


def require_intact(folder: Path, index: MetadataIndex, where: Any) -> None:
    """Raise `ValueError` if the digest of a part does not match, or `OSError` if the file cannot be read."""
    if _part_digest(folder, where) != where.digest:
        raise ValueError(
            f"the checksum of {index.fqn} in {where.relative_path} does not agree with its bytes; the file was "
            "changed, or is damaged"
        )


def _part_digest(folder: Path, where: Any) -> str:
    digest, left = new_digest(), where.length
    with (folder / where.relative_path).open("rb") as file:
        file.seek(where.offset)
        while left and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def check_parts(path: Path, description: str, world: World) -> None:
    """Raise one of `DAMAGE` if the digest of a part does not match. Every rank calls it, and checks its share."""
    metadata = CheckedReader(path, description).read_metadata()
    parts = sorted(metadata.storage_data.items(), key=lambda part: (part[1].relative_path, part[1].offset))
    for index, where in parts[world.rank :: world.size]:
        require_intact(path, index, where)


def load_tensors(
    tensors: Mapping[str, Tensor], path: Path, description: str, world: World, group: dist.ProcessGroup
) -> None:
    """Read all of a checkpoint's tensors into these. Every rank calls it, with the tensors that it has; torch
    distributes the reads in a CPU ``group``. Raise `UsageError` if tensors are missing, unexpected, or of another shape
    or dtype, one of `DAMAGE` if the files are damaged.
    """
    metadata = world.together(lambda: CheckedReader(path, description).read_metadata())
    there = dict(metadata.state_dict_metadata)
    _require_all(tensors, there, path, world)
    read_tensors(tensors, there, lambda: CheckedReader(path, description), world, group)


def read_tensors(
    tensors: Mapping[str, Tensor],
    there: Mapping[str, TensorStorageMetadata],
    reader: Callable[[], dcp.StorageReader],
    world: World,
    group: dist.ProcessGroup,
) -> None:
    """Read each rank's part of tensors that fit. All ranks call it with theirs. Raise one of `DAMAGE` if damaged."""
    plain = {name: tensor for name, tensor in tensors.items() if tensor.shape == there[name].size}
    dcp.load(plain, storage_reader=reader(), process_group=group)
    grouped = {name: tensor for name, tensor in tensors.items() if name not in plain}
    if world.most(len(grouped)):  # those that one side splits into groups: all of each, of which a rank takes its part
        whole = {name: torch.empty(there[name].size, dtype=tensor.dtype) for name, tensor in grouped.items()}
        dcp.load(whole, storage_reader=reader(), process_group=group)
        for name, tensor in grouped.items():
            put_whole(tensor, whole[name])


def regrouped(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether one shape is the other with its last dim split in two."""
    short, long = sorted((tuple(one), tuple(other)), key=len)
    return len(long) == len(short) + 1 and short[:-1] == long[:-2] and short[-1:] == (long[-2] * long[-1],)


def reason(error: BaseException) -> str:
    """Describe the first error, on any rank, in one line."""
    if isinstance(error, dcp.CheckpointException):
        rank, (inner, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {reason(inner)}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def some(names: Iterable[str]) -> str:
    """Name the first, and the number of others."""
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def shape_text(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes)) or "a number"


def _require_all(tensors: Mapping[str, Tensor], there: Mapping[str, Any], path: Path, world: World) -> None:
    """Raise `UsageError` unless the checkpoint has the same tensors as the model and optimizer."""

    def compare() -> None:
        missing = sorted(tensors.keys() - there.keys())
        if missing:
            raise _unlike(path, f"it lacks {some(missing)}")
        for name, tensor in tensors.items():
            saved = there[name]
            if tensor.shape != saved.size and not regrouped(tensor.shape, saved.size):
                shapes = f"{shape_text(saved.size)} there and {shape_text(tensor.shape)} here"
                raise _unlike(path, f"{name} is {shapes}")
            if tensor.dtype != saved.properties.dtype:
                raise _unlike(path, f"{name} is {saved.properties.dtype} there and {tensor.dtype} here")

    world.together(compare)
    names = sorted(there)
    own = sum(1 << number for number, name in enumerate(names) if name in tensors)  # a bit for each: ranks are many
    known = world.merged(own, operator.or_)
    surplus = [name for number, name in enumerate(names) if not known >> number & 1]
    if surplus:
        raise agreed(_unlike(path, f"it also has {some(surplus)}"))


def _unlike(path: Path, how: str) -> UsageError:
    return UsageError(
        f"checkpoint {path} does not fit this model and optimizer: {how}. "
        "Use the recipe that it was made with, or another checkpoint folder"
    )


def digest_of(data: bytes) -> str:
    digest = new_digest()
    digest.update(data)
    return digest.hexdigest()


def new_digest() -> hashlib.blake2b:
    """Empty digest, to be updated piece by piece."""
    return hashlib.blake2b(digest_size=16)


SCHEMA: Final = "jettison.checkpoint/3"
RUN: Final = "run.json"

_PLAIN: Final = (bool, int, float, str, type(None))
_NOT_COMPARED: Final = frozenset({"config", "pretrained", "attention", "build"})
"""Keys of [model] that are not compared: paths (their contents are), equivalent kernels, place of initialization."""


class SaveFailed(JettisonError, RuntimeError):
    """A checkpoint could not be written: the last one, or any if the recipe stops then."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run: ``step`` of ``steps`` are done. ``data``: digest of the text. ``model``: settings by name, from
    the section and from the built model's configuration. ``optimizer``: settings that its saved state depends on.
    ``schedule``: settings that may change when a run is resumed.
    """

    step: int
    steps: int
    seed: int
    global_batch: int
    seq: int
    data: str
    world: int
    layout: str
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any]

    def require_same_run(self, other: RunState, where: Path) -> None:
        """Raise `UsageError` unless resuming from ``other`` continues the same run."""
        for name in ("seed", "global_batch", "seq", "data"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise UsageError(
                    f"checkpoint {where} was made with {name} {theirs}, the recipe has {mine}: its data would not "
                    "continue where it stopped. Use the same, or another checkpoint folder"
                )
        for name in ("model", "optimizer"):
            changed = [f"{name}.{text}" for text in _differences(getattr(self, name), getattr(other, name))]
            if changed:
                more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
                raise UsageError(
                    f"checkpoint {where} was made with {'; '.join(changed[:3])}{more}: it is of another {name}. "
                    "Use the recipe that it was made with, or another checkpoint folder"
                )
        if other.step > self.steps:
            raise UsageError(f"checkpoint {where} is of step {other.step}; the recipe has {self.steps} steps")

    def changes(self, other: RunState) -> list[str]:
        """List the recipe's schedule settings that differ in the run of ``other``."""
        return _differences(self.schedule, other.schedule)

    def text(self, **more: str) -> str:
        """Text of `RUN`; the last line is a digest of the lines before."""
        values = {"schema": SCHEMA, **asdict(self), **more}
        return json.dumps({**values, "digest": _digest(values)}, indent=1) + "\n"


def read_state(path: Path) -> tuple[RunState, dict[str, Any]]:
    """Read a checkpoint's `RUN`: the state, and all values. Raise `UsageError` if it cannot be read, or was changed."""
    try:
        values = json.loads((path / RUN).read_text(encoding="utf-8"))
        schema = values["schema"]
        if schema == SCHEMA:
            digest = values.pop("digest")
            if _digest(values) != digest:
                raise ValueError("its digest does not match; the file was changed, or is damaged")
            return RunState(**{name: values[name] for name in RunState.__dataclass_fields__}), values
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"checkpoint {path}: {RUN} cannot be read: {error}") from error
    raise UsageError(f"checkpoint {path} is {schema}; expected {SCHEMA}: use the version that it was made with")


def described_model(section: ModelSection, model: Any) -> dict[str, Any]:
    """Settings of a model by name: the recipe's, and those of the model's configuration, if it has one."""
    out = {name: value for name, value in asdict(section).items() if name not in _NOT_COMPARED}
    config: Any = getattr(model, "config", None)
    if is_dataclass(config) and not isinstance(config, type):
        values = asdict(config)
    elif callable(getattr(config, "to_dict", None)):
        values = config.to_dict()
    else:
        values = {}
    return out | dict(_plain(values, "config"))


def optimizer_state(section: OptimizerSection) -> dict[str, Any]:
    if section.name == "adamw":
        return {"name": section.name, "betas": list(section.betas), "eps": section.eps}
    return {"name": section.name, "momentum": section.momentum}


def schedule(recipe: TrainRecipe) -> dict[str, Any]:
    names = ("lr", "min_lr", "weight_decay", "warmup_steps", "clip")
    out: dict[str, Any] = {f"optimizer.{name}": getattr(recipe.optimizer, name) for name in names}
    end = recipe.optimizer.decay_steps or recipe.steps
    return out | {
        "optimizer.decay_steps": end,
        "precision": recipe.precision,
        "model.attention": recipe.model.attention,
        "data.document_end": recipe.data.document_end,
    }


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted(mine.keys() | theirs.keys())
    if mine.get("name") != theirs.get("name"):
        names = ["name"]  # other differences follow from it
    return [
        f"{name} {_word(theirs, name)}, the recipe has {_word(mine, name)}"
        for name in names
        if (name in mine) != (name in theirs) or mine.get(name) != theirs.get(name)
    ]


def _word(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not there"
    return "as it comes" if values[name] is None else str(values[name])


def _plain(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in NOT_OF_THE_MODEL:
                yield from _plain(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        if all(isinstance(inner, _PLAIN) for inner in value):
            yield name, list(value)
    elif isinstance(value, _PLAIN):
        yield name, value


def _digest(values: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(values, sort_keys=True).encode())


class Checkpoints:
    """Checkpoints of one run. All ranks call every method together, in a claimed folder."""

    def __init__(self, section: CheckpointSection, world: World, warn: Progress) -> None:
        assert section.folder is not None
        self.folder = Path(section.folder)
        self.section = section
        self.world = world
        self.warn = warn
        self.failed = False
        self.unsaved: str | None = None
        """Reason why the last save failed, as far as this rank knows."""
        self._tried: int | None = None  # the last step that was loaded or whose save began: the same on all ranks
        self._proven: int | None = None
        self._pending: tuple[RunState, Future[Any]] | None = None  # being written
        # torch's checkpoints need a CPU group, and threads of async saves one that the training does not use
        with sockets_when_used():
            self._group = dist.new_group(backend="gloo")

    def find(self) -> Path | None:
        """Find the newest complete checkpoint, remove partial ones. `UsageError` if damaged, missing or unreadable."""
        return self.world.from_leader(self._find)

    def check(self, path: Path) -> None:
        """Raise `UsageError` if any byte of a checkpoint is damaged, before any long work."""

        def compare() -> None:
            _, values = read_state(path)
            try:
                check_parts(path, str(values.get("description")), self.world)
            except DAMAGE as error:
                raise self._damaged(path, error) from error

        self.world.together(compare)

    def require_same_run(self, path: Path, run: RunState) -> None:
        """Raise `UsageError` if a checkpoint is of another run."""
        self.world.together(lambda: _state_for(run, path))

    def load(self, path: Path, tensors: Mapping[str, Tensor], run: RunState) -> RunState:
        """Read into these tensors, from any layout. `UsageError` if damaged, of another run, or of other sizes."""
        state, values = self.world.together(lambda: _state_for(run, path))
        try:
            load_tensors(tensors, path, str(values.get("description")), self.world, self._group)
        except DAMAGE as error:
            if isinstance(error, UsageError):
                raise
            raise agreed(self._damaged(path, error)) from error
        for text in run.changes(state):
            self.warn(f"checkpoint {path} was made with {text}")
        self._tried = self._proven = state.step
        return state

    def save(self, tensors: Mapping[str, Tensor], state: RunState) -> None:
        """Write a checkpoint, or begin to; first waits for one that is still being written."""
        self.wait()
        if self._tried == state.step:
            return
        self._tried = state.step
        spoilt = self.world.first(next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None))
        if spoilt is not None:
            self._refuse(state.step, spoilt)
            return
        target = str(self._partial(state.step))
        try:
            if self.section.asynchronous:
                future = dcp.async_save(dict(tensors), storage_writer=DigestWriter(target), process_group=self._group)
                self._pending = state, future
                return
            dcp.save(dict(tensors), storage_writer=DigestWriter(target), process_group=self._group)
        except FILE_ERRORS as error:
            self._give_up(state.step, error)
        else:
            self._commit(state)

    def proves(self, step: int) -> None:
        """Record that a step from these weights was finite: NOTE [ The last finite one ]."""
        if step == self._tried and step != self._proven and self.unsaved is None:
            self._proven = step
            if self._pending is None:
                self._thin_out()

    def poll(self) -> None:
        """Rename a finished asynchronous save into place."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        state, future = pending
        try:
            future.result()
        except FILE_ERRORS as error:
            self._give_up(state.step, error)
        else:
            self._commit(state)

    def newest(self) -> str:
        """Describe the newest complete checkpoint in a message."""
        complete = self._complete()
        return f"the last good checkpoint is {complete[-1]}" if complete else "no checkpoint has been written yet"

    def _damaged(self, path: Path, error: BaseException) -> UsageError:
        older = [one for one in self._complete() if one < path]
        way = f"; remove it to go on from {older[-1].name}" if older else ""
        return UsageError(f"checkpoint {path} is damaged: {reason(error)}{way}")

    # rank 0 alone ----------------------------------------------------------------------------------------------------

    def _partial(self, step: int) -> Path:
        return self.folder / f"{_name(step)}{PARTIAL}"

    def _commit(self, state: RunState) -> None:
        self.unsaved = None
        if not self.world.leads:
            return
        partial = self._partial(state.step)
        try:
            description = digest_of((partial / ".metadata").read_bytes())
            write_durably(partial / RUN, state.text(torch=torch.__version__, description=description))
            put_in_place(partial, self.folder / _name(state.step))
        except OSError as error:
            self._give_up(state.step, error)
        else:
            self._thin_out()

    def _thin_out(self) -> None:
        if not self.world.leads:
            return
        complete = self._complete()
        stay = {*complete[-self.section.keep :], self.folder / _name(self._proven or 0)}
        for old in complete:
            if old not in stay:
                try:
                    remove(old)
                except OSError as error:
                    self.warn(f"checkpoint {old} could not be removed: {reason(error)}")

    def _give_up(self, step: int, error: BaseException) -> None:
        self.failed = True
        self.unsaved = reason(error)
        if self.world.leads:
            shutil.rmtree(self._partial(step), ignore_errors=True)
            text = f"checkpoint of step {step} could not be written to {self.folder}: {self.unsaved}"
            self.warn(f"{text}; {self.newest()}")

    def _refuse(self, step: int, name: str) -> None:
        """Skip a save on all ranks; the disk did not fail, so `on_error` does not apply."""
        self.unsaved = f"{name} is not finite"
        self.warn(f"checkpoint of step {step} is not written: {self.unsaved}; {self.newest()}")

    def _find(self) -> Path | None:
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"checkpoint.folder: {self.folder} is not a folder")
        for left in self.folder.glob(f"*{PARTIAL}"):
            try:
                remove(left)
            except OSError as error:
                raise UsageError(
                    f"checkpoint.folder: {left}, left by a run that was interrupted, cannot be removed: "
                    f"{error.strerror or error}; make the folder writable, or name another"
                ) from error
        found = next(reversed(self._complete()), None)
        for path in self.folder.glob("step-*"):
            if not (path / RUN).exists() and (found is None or path > found):
                way = f" to go on from {found.name}" if found else " to begin again"
                raise UsageError(f"checkpoint {path} is damaged: it has no {RUN}; remove it{way}")
        return found

    def _complete(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step-*/{RUN}") if not path.parent.suffix)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _state_for(run: RunState, path: Path) -> tuple[RunState, dict[str, Any]]:
    state, values = read_state(path)
    run.require_same_run(state, path)
    return state, values


def _is_finite(tensor: Tensor) -> bool:
    """Test without a copy: the largest absolute value is NaN if any value is."""
    local = local_of(tensor)
    if not (local.is_floating_point() or local.is_complex()) or not local.numel():
        return True
    return bool(torch.linalg.vector_norm(local.detach(), float("inf")).isfinite())
