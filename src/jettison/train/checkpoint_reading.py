"""Safe reading of checkpoints: no code is executed, every byte is checked, no tensor is skipped.

NOTE [ Nothing is executed ]
torch.distributed.checkpoint stores its metadata in a pickle. Our reader loads it with an unpickler that allows only the
classes of such metadata, and refuses values that are not tensors. torch reads the tensors themselves with
``torch.load(weights_only=True)``.

NOTE [ Every byte is checked ]
`DigestWriter` adds to the metadata a digest of each part, the bytes of one rank's piece of a tensor: a zip archive's
own checksums do not cover its directory. Each rank checks the parts that it is about to read. run.json has the digest
of the metadata, and one of itself.
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

from jettison.core.errors import UsageError
from jettison.parallel.parameters import put_whole
from jettison.train.ranks import World, agreed

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
    """Is one shape the other with its last dim split in two?"""
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
