"""Export of a run's weights as a folder for transformers' `from_pretrained`.

The folder is written next to its place and renamed, so that it is always complete. With torch's writer every rank
writes its shards, and the leading rank consolidates them, one tensor at a time.
"""

from __future__ import annotations

import json
import operator
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from jettison.core.errors import JettisonError, UsageError
from jettison.core.parse_units import parse_bytes
from jettison.core.progress import Progress
from jettison.models.pretrained import INDEX, HubForm, open_weights
from jettison.train.checkpoint import DAMAGE, reason
from jettison.train.engine import Engine, named_parameters
from jettison.train.ranks import World, agreed, waiting_for
from jettison.train.recipe import ExportSection, TrainRecipe
from jettison.train.run_folder import partial_of, put_in_place, write_durably
from jettison.train.setup import Session, prepared

_SCHEMA: Final = "jettison.weights/1"
_PATIENCE_SECONDS: Final = 24 * 3600.0
"""Timeout of the other ranks while one consolidates files."""
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ExportFailed(JettisonError, RuntimeError):
    """Weights could not be written."""


def export(section: ExportSection, form: HubForm, engine: Engine, world: World) -> None:
    """Write the weights. Every rank calls it. Raise `ExportFailed` if it fails; an earlier folder is unchanged."""
    assert section.folder is not None
    folder = Path(section.folder)
    partial = partial_of(folder)
    tensors = _tensors(engine, form, None if section.dtype is None else _DTYPES[section.dtype])
    described = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    whole = world.merged(described, operator.or_)
    try:
        writer = HuggingFaceStorageWriter(
            str(partial),
            fqn_to_index_mapping=_in_files(whole, parse_bytes(section.max_file)),
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(dict(tensors), storage_writer=writer, process_group=world.host)
        world.from_leader(lambda: _complete(partial, folder, form, whole))
    except (*DAMAGE, UsageError) as error:
        if world.leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise agreed(ExportFailed(f"the weights could not be written to {folder}: {reason(error)}")) from error


def _tensors(engine: Engine, form: HubForm, dtype: torch.dtype | None) -> dict[str, Tensor]:
    held: dict[str, Tensor] = dict(named_parameters(engine))
    for part in engine.parts:
        held |= {name: buffer for name, buffer in part.named_buffers() if name in form.sizes}
    out = {}
    for name, tensor in held.items():
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if tensor.shape != form.sizes[name]:  # tensor parallelism added a dim
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            tensor = whole.reshape(form.sizes[name])
        out[form.rename(name)] = tensor
    return out


def _in_files(whole: Mapping[str, tuple[tuple[int, ...], torch.dtype]], most_bytes: int) -> dict[str, int]:
    """Number the files, from 1: as few as possible, in order. A tensor above the limit gets a file of its own."""
    out: dict[str, int] = {}
    number, used = 1, 0
    for name, (size, dtype) in whole.items():
        nbytes = torch.Size(size).numel() * dtype.itemsize
        if used and used + nbytes > most_bytes:
            number, used = number + 1, 0
        out[name] = number
        used += nbytes
    return out


def _complete(partial: Path, folder: Path, form: HubForm, whole: Mapping[str, Any]) -> None:
    """Write configuration and tokenizer, and rename the folder into place. Only the leading rank calls it."""
    shutil.rmtree(partial / "sharded")
    for file in form.other_files():
        shutil.copyfile(file, partial / file.name)
    dtypes = {dtype for _, dtype in whole.values() if dtype.is_floating_point}
    config = {key: value for key, value in form.config.items() if key != "torch_dtype"}
    if len(dtypes) == 1:
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    write_durably(partial / "config.json", json.dumps(config, indent=2) + "\n")
    found = open_weights(partial).tensors
    if {name: (tuple(entry.size), entry.dtype) for name, entry in found.items()} != dict(whole):
        raise UsageError(f"{partial / INDEX} does not name the tensors that were written")
    put_in_place(partial, folder)


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    step: int
    export: str

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.weights/1``."""
        return {"schema": _SCHEMA, **asdict(self), "request": None}

    def lines(self) -> Iterator[str]:
        yield f"the weights of step {self.step}: {self.export}"


def export_run(make: Callable[[], TrainRecipe], *, say: Progress, warn: Progress) -> ExportResult:
    """Read the checkpoint from which a recipe's run would resume, and export its weights; the recipe has an
    ``export.folder``. Raise `UsageError` if there is no checkpoint, or transformers has no such model, `ExportFailed`
    if the weights could not be written.
    """
    with prepared(make, must_resume=True, say=say, warn=warn) as session:
        folder = export_session(session)
        assert folder is not None
        return ExportResult(step=session.step, export=folder)


def export_session(session: Session) -> str | None:
    """Export weights if the recipe names a folder; return it. All ranks call it. Raise `ExportFailed` if unwritten."""
    section = session.recipe.export
    if session.hub is not None:
        session.say(f"writing the weights to {section.folder}")
        with waiting_for(session.world, _PATIENCE_SECONDS):
            export(section, session.hub, session.engine, session.world)
    return section.folder
