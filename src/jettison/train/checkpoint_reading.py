"""Reading a checkpoint: none of its code is run, every byte is checked, and no tensor is left out.

NOTE [ Nothing is executed ]
torch.distributed.checkpoint describes its tensors in a pickle, and reads values that are not tensors from another. Our
reader takes the description with an unpickler that knows only the classes of such a description, and refuses values
that are not tensors, so that reading a checkpoint from elsewhere runs none of its code. torch reads the tensors
themselves with ``torch.load(weights_only=True)``.

NOTE [ Every byte is checked ]
Each tensor lies in its file as a zip archive, whose CRC-32 torch writes and does not look at when it reads. Each rank
checks those of the tensors that it is about to read. The description has its digest in run.json, and that file one of
itself.
"""

from __future__ import annotations

import io
import operator
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from jettison.errors import UsageError
from jettison.parallel.parameters import put_whole
from jettison.train.checkpoint_state import digest_of
from jettison.train.ranks import World, agreed

_FILE_ERRORS: Final = (OSError, RuntimeError, ValueError, dcp.CheckpointException)
"""What goes wrong with files. CheckpointException is no Exception: it has to be named."""
DAMAGE: Final = (
    *_FILE_ERRORS,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
)
"""What readers make of bytes that are not what was written."""


class _Unpickler(pickle.Unpickler):
    """See NOTE [ Nothing is executed ]."""

    ALLOWED: Final = frozenset(
        {
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "Metadata",
                    "TensorStorageMetadata",
                    "ChunkStorageMetadata",
                    "TensorProperties",
                    "StorageMeta",
                    "MetadataIndex",
                    "BytesStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
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
    )

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) not in self.ALLOWED:
            raise ValueError(f"its description names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """torch's reader, with the notes above.

    Args:
        description: digest of the description.
    """

    def __init__(self, path: Path, description: str) -> None:
        super().__init__(path)
        self._description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description."""
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
        """Tensors, once all of their bytes have been checked."""
        for index in dict.fromkeys(item.storage_index for item in plan.items):
            where = self.storage_data[index]
            with (Path(self.path) / where.relative_path).open("rb") as file:
                part = io.BufferedReader(_Part(file, where.offset, where.length), 1 << 20)
                if zipfile.ZipFile(part).testzip() is not None:
                    raise ValueError(
                        f"the checksum of {index.fqn} in {where.relative_path} does not agree with its bytes; the file "
                        "was changed, or is damaged"
                    )
        return super().read_data(plan, planner)


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        self._at = at + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        found = self._file.readinto(memoryview(buffer)[:wanted])
        self._at += found
        return found


def require_checksums() -> None:
    """Will torch write them?

    Raises:
        UsageError: they have been switched off.
    """
    if not torch.serialization.get_crc32_options():
        raise UsageError(
            "checkpoint: torch.serialization.set_crc32_options(False) was called, so that damage to a checkpoint would "
            "not be noticed; expected True"
        )


def load_tensors(
    tensors: Mapping[str, Tensor], path: Path, description: str, world: World, group: dist.ProcessGroup
) -> None:
    """Read all of a checkpoint's tensors into these. Every rank calls it, with the tensors that it has.

    Args:
        group: of all ranks, on the host; torch says through it who reads what.

    Raises:
        UsageError: some have no place here, or are not there, or are of another shape or dtype.
        one of `DAMAGE`: the files are not what was written.
    """
    metadata = world.together(lambda: Reader(path, description).read_metadata())
    there = dict(metadata.state_dict_metadata)
    _require_all(tensors, there, path, world)
    read_tensors(tensors, there, lambda: Reader(path, description), world, group)


def read_tensors(
    tensors: Mapping[str, Tensor],
    there: Mapping[str, TensorStorageMetadata],
    reader: Callable[[], dcp.StorageReader],
    world: World,
    group: dist.ProcessGroup,
) -> None:
    """Read each rank's part of these, once they are known to fit. Every rank calls it, with the tensors that it has.

    Raises:
        one of `DAMAGE`: the files are not what was written.
    """
    plain = {name: tensor for name, tensor in tensors.items() if tensor.shape == there[name].size}
    _read(plain, reader, group)
    grouped = {name: tensor for name, tensor in tensors.items() if name not in plain}
    if world.most(len(grouped)):
        _read_grouped(grouped, there, reader, group)


def regrouped(one: Sequence[int], other: Sequence[int]) -> bool:
    """Is one the other with its last dim cut in two?"""
    short, long = sorted((tuple(one), tuple(other)), key=len)
    return len(long) == len(short) + 1 and short[:-1] == long[:-2] and short[-1:] == (long[-2] * long[-1],)


def reason(error: BaseException) -> str:
    """One line about the first thing that went wrong, on whichever rank."""
    if isinstance(error, dcp.CheckpointException):
        rank, (inner, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {reason(inner)}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def some(names: Iterable[str]) -> str:
    """The first, and how many more."""
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def shape_text(sizes: Iterable[int]) -> str:
    """For people."""
    return "x".join(map(str, sizes)) or "a number"


def _read(tensors: Mapping[str, Tensor], reader: Callable[[], dcp.StorageReader], group: dist.ProcessGroup) -> None:
    dcp.load(dict(tensors), storage_reader=reader(), process_group=group)


def _read_grouped(
    tensors: Mapping[str, Tensor],
    there: Mapping[str, Any],
    reader: Callable[[], dcp.StorageReader],
    group: dist.ProcessGroup,
) -> None:
    """Those that are cut into groups on one side only: read whole, and each rank's part taken.

    Tensor parallelism gives the projection that is q, k and v in one a dim for the three.
    """
    whole = {name: torch.empty(there[name].size, dtype=tensor.dtype) for name, tensor in tensors.items()}
    _read(whole, reader, group)
    for name, tensor in tensors.items():
        put_whole(tensor, whole[name])


def _require_all(tensors: Mapping[str, Tensor], there: Mapping[str, Any], path: Path, world: World) -> None:
    """Does every tensor have its like on the other side?

    Raises:
        UsageError: no.
    """

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
