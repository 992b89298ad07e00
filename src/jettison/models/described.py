"""From a name to a `ModelSpec`: described in closed form where there is one, else recorded by a trace."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from jettison.errors import NotDescribed
from jettison.predict.run_request import RunRequest, model_spec
from jettison.spec.hub import hub_config, is_hub_id
from jettison.spec.huggingface_config import read_values
from jettison.spec.model import ModelSpec


def described_model(model: str, request: RunRequest, *, live: bool = False, trace: bool = False) -> ModelSpec:
    """The model that a preset's name, a config.json, its folder or a Hugging Face id stands for.

    Args:
        request: what will be asked of it: the first trace is taken for that.
        live: whoever asks would also have taken ``module:factory``.
        trace: record it even if it has a closed form.

    Raises:
        UsageError: it is none of them, it cannot be read, or it has no closed form and cannot be recorded.
    """
    if not trace:
        try:
            return model_spec(model, live=live)
        except NotDescribed as error:
            if not can_record():
                raise NotDescribed(
                    f"{str(error).partition('. For any other')[0]}. Any other is recorded where torch and transformers "
                    "are installed: pip install 'jettison[hf]'"
                ) from None
    from jettison.models.recorded import recorded_model

    values, name = read_values(hub_config(model) if is_hub_id(model) else Path(model))
    return recorded_model(values, request, name=model if is_hub_id(model) else name)


def can_record() -> bool:
    """Are the libraries there that a trace needs?"""
    return all(find_spec(library) is not None for library in ("torch", "transformers"))
