"""The weights of a model that was cut and sharded without them: each rank's own, a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem

from jettison.errors import UsageError
from jettison.models.pretrained import SafetensorError
from jettison.parallel.parameters import put_whole
from jettison.progress import Progress
from jettison.train.build_model import Built, Pretrained
from jettison.train.checkpoint_reading import DAMAGE, read_tensors, reason
from jettison.train.engine import Engine, named_parameters
from jettison.train.ranks import World, agreed


def fill(engine: Engine, built: Built, world: World, say: Progress) -> None:
    """Allocate what this rank holds, and draw or read it. Every rank calls it.

    Raises:
        UsageError: files of weights are damaged.
    """
    world.together(lambda: _allocate(engine, world.device))
    if built.pretrained is not None:
        _read(built.pretrained, engine, world, say)
    elif built.weights is not None:
        say("drawing the weights")
        weights = built.weights
        world.together(lambda: weights.fill(dict(named_parameters(engine)), put_whole))


def _allocate(engine: Engine, device: torch.device) -> None:
    with _keeping_parameters():
        for part in engine.parts:
            if any(parameter.is_meta for parameter in part.parameters()):
                part._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def _read(pretrained: Pretrained, engine: Engine, world: World, say: Progress) -> None:
    """Each rank reads its part of each of its tensors; other dtypes are converted."""
    folder, names = pretrained.folder, pretrained.names
    dtypes = {str(folder.tensors[name].dtype).removeprefix("torch.") for name in names.values()}
    say(f"reading the weights of {folder.path}, which are {' and '.join(sorted(dtypes))}")
    held: dict[str, Tensor] = {names[name]: parameter.detach() for name, parameter in named_parameters(engine)}
    for part in engine.parts:
        held |= {names[name]: buffer for name, buffer in part.named_buffers() if name in names}
    try:
        read_tensors(held, folder.tensors, lambda: _Reader(folder.path, folder.files), world, world.host)
    except (*DAMAGE, SafetensorError) as error:
        raise agreed(UsageError(f"model.pretrained: {folder.path} cannot be read: {reason(error)}")) from error


class _Reader(HuggingFaceStorageReader):
    """torch's, for the files that belong to the model; others may lie beside them."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        super().__init__(str(path))
        self.fs = _Listed(files)


class _Listed(FileSystem):
    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        self._files = [str(file) for file in files]

    def ls(self, path: object) -> list[str]:
        """Of the only folder that is looked into."""
        return self._files


@contextmanager
def _keeping_parameters() -> Iterator[None]:
    """Those that move stay the same objects: tied ones tied, and FSDP2 knows them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
