"""From a name to a `ModelSpec`: described in closed form where there is one, else recorded by a trace."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jettison.core.errors import NotDescribed, UsageError, install
from jettison.families.config import TOWERS, parse_config, read_values
from jettison.families.family import FAMILIES
from jettison.families.presets import PRESETS, hub_config, is_hub_id
from jettison.models.model_types import nearest, require_known
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec
from jettison.spec.model import ModelSpec


def described_model(model: str, request: RunRequest, *, live: bool = False, trace: bool = False) -> ModelSpec:
    """The model that a preset's name, a config.json, its folder or a Hugging Face id stands for. ``request``: what will
    be asked of it: the first trace is taken for that. ``live``: the caller also takes ``module:factory``.
    ``trace``: record it even if it has a closed form. Raise `UsageError` if it is none of them, cannot be read, or has
    no closed form and cannot be recorded.
    """
    if request.model_type is not None:
        if trace:
            raise UsageError(f"got --trace with --model-type {request.model_type}, which describes a model; drop one")
        return _as_family(model, request.model_type)
    if not trace:
        try:
            found = model_spec(model, live=live)
        except NotDescribed as error:
            if not can_record():
                why = str(error).partition(". Trace the model")[0]
                if not _forbidden:
                    why += f". Any other is recorded where torch and transformers are installed: {install('hf')}"
                raise NotDescribed(why) from None
        else:
            if model in PRESETS or not found.left_out or found.patches is not None or not can_record():
                return found
            values, name = _values(model)
            if not any(values.get(f"{tower}_config") for tower in TOWERS):
                return found
            from jettison.models.recorded_models import with_towers

            if (whole := with_towers(found, values)) is not None:
                return whole
    values, name = _values(model)
    require_known(values.get("model_type"), name)
    from jettison.models.recorded_models import recorded_model

    return recorded_model(values, request, name=name)


def _as_family(model: str, family: str) -> ModelSpec:
    """A configuration as if its type were another."""
    if model in PRESETS:
        raise UsageError(f"got --model-type {family} for the preset {model}, whose architecture is known; drop it")
    if family not in FAMILIES:
        raise UsageError(
            f"got --model-type {family}; expected a model_type that has a closed form, such as {nearest(family)}; "
            "docs/architectures.md lists them"
        )
    values, name = _values(model)
    if not isinstance(values, Mapping):
        return parse_config(values, name=name)
    return parse_config({**values, "model_type": family}, name=name)


def _values(model: str) -> tuple[Mapping[str, Any], str]:
    if is_hub_id(model):
        return read_values(hub_config(model))[0], model
    return read_values(Path(model))


_forbidden = False


def never_record() -> None:
    """From now on this process builds no model of what it is asked about: configurations come from strangers."""
    global _forbidden
    _forbidden = True


def can_record() -> bool:
    """Whether the libraries that a trace needs are installed, and may be used."""
    return not _forbidden and all(find_spec(library) is not None for library in ("torch", "transformers"))
