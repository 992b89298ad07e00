"""What a checkpoint says beside its tensors, and whether a recipe goes on from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Final

from jettison.errors import UsageError
from jettison.train.recipe import ModelSection, OptimizerSection, TrainRecipe

SCHEMA: Final = "jettison.checkpoint/3"
RUN: Final = "run.json"

_PLAIN: Final = (bool, int, float, str, type(None))
_NOT_COMPARED: Final = frozenset({"config", "pretrained", "attention", "build"})
"""Of [model]: paths, whose contents are compared; which kernels compute the same function; where weights are made."""
_NOT_IN_A_CONFIG: Final = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})


@dataclass(frozen=True, kw_only=True)
class RunState:
    """``step`` is the number of steps done, of ``steps`` altogether.

    Args:
        data: digest of the text.
        model: settings by name: those of the section, and of the configuration of the model that was built.
        optimizer: those that give the saved state its meaning; of another optimizer it would be another thing.
        schedule: those that may change from one part of a run to the next.
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
        """What is the recipe's, and was another in the run that ``other`` is of."""
        return _differences(self.schedule, other.schedule)

    def text(self, **more: str) -> str:
        """As `RUN` has it; the last line is a digest of those before."""
        values = {"schema": SCHEMA, **asdict(self), **more}
        return json.dumps({**values, "digest": _digest(values)}, indent=1) + "\n"


def read_state(path: Path) -> tuple[RunState, dict[str, Any]]:
    """What a checkpoint's `RUN` says, and all that stands there.

    Raises:
        UsageError: it cannot be read, or is not what was written.
    """
    try:
        values = json.loads((path / RUN).read_text(encoding="utf-8"))
        schema = values["schema"]
        if schema == SCHEMA:
            digest = values.pop("digest")
            if _digest(values) != digest:
                raise ValueError("it is not what was written; the file was changed, or is damaged")
            return RunState(**{name: values[name] for name in RunState.__dataclass_fields__}), values
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"checkpoint {path}: {RUN} cannot be read: {error}") from error
    raise UsageError(f"checkpoint {path} is {schema}; expected {SCHEMA}: use the version that it was made with")


def described_model(section: ModelSection, model: Any) -> dict[str, Any]:
    """Settings of a model by name: what the recipe says, and the configuration that the model has, if it has one."""
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
    """See `RunState`."""
    if section.name == "adamw":
        return {"name": section.name, "betas": list(section.betas), "eps": section.eps}
    return {"name": section.name, "momentum": section.momentum}


def schedule(recipe: TrainRecipe) -> dict[str, Any]:
    """See `RunState`."""
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
        names = ["name"]  # what else differs follows from that
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
    """What JSON can hold, by name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in _NOT_IN_A_CONFIG:
                yield from _plain(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        if all(isinstance(inner, _PLAIN) for inner in value):
            yield name, list(value)
    elif isinstance(value, _PLAIN):
        yield name, value


def _digest(values: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(values, sort_keys=True).encode())


def digest_of(data: bytes) -> str:
    """Tells what was written from anything else."""
    digest = new_digest()
    digest.update(data)
    return digest.hexdigest()


def new_digest() -> hashlib.blake2b:
    """An empty digest, for bytes that come in pieces."""
    return hashlib.blake2b(digest_size=16)
