"""Towers beside a text model in closed form: their weights, as transformers builds them.

A tower sees images or sound, and a batch of text alone does not run it. Its weights are there all the same, with
gradients and optimizer state where they train: that is counted, exactly; what it would save and compute is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from jettison.capture.fakes import fake_mode
from jettison.families.left_out import TOWERS
from jettison.formula.parameters import parameter_count
from jettison.models.huggingface import ConfigRequest, build, config_of
from jettison.spec.model import ModelSpec


def with_towers(model: ModelSpec, values: Mapping[str, Any]) -> ModelSpec | None:
    """The same model with the weights of its towers; None where what is beside the text cannot be told from it.

    Args:
        values: its decoded ``config.json``.

    Raises:
        UsageError: transformers cannot make the model.
    """
    whole = build(config_of(values, model.name), ConfigRequest(), fake_mode(allow_non_fake_inputs=True))
    text = {id(p) for part in _text_of(whole) for p in part.parameters()}
    beside = tuple((name, tuple(p.shape)) for name, p in whole.named_parameters() if id(p) not in text)
    count = sum(p.numel() for p in whole.parameters() if id(p) not in text)
    if not beside or parameter_count(model) + count != sum(p.numel() for p in whole.parameters()):
        return None
    parts = sorted({name.rsplit(".", name.count(".") - 1)[0] if name.count(".") > 1 else name for name, _ in beside})
    said = (
        f"{_listed(parts)} ({count:,} parameters) are counted with the embedding: weights, gradients and optimizer "
        "state. A batch of text does not run them: what they save and compute for images or sound is not in the figures"
    )
    left = tuple(words for words in model.left_out if not any(f"the {tower} tower" in words for tower in TOWERS))
    return replace(model, beside=beside, left_out=(said, *left))


def _text_of(whole: nn.Module) -> list[nn.Module]:
    """The language model, its embedding and its head."""
    found = []
    for name in ("get_decoder", "get_input_embeddings", "get_output_embeddings"):
        part = getattr(whole, name, lambda: None)()
        if isinstance(part, nn.Module) and part is not whole:
            found.append(part)
    return found


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
