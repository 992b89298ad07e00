"""An image held against a text (arXiv 2103.00020 §2.3): two towers, and one width in which both are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from jettison.errors import UsageError
from jettison.spec.model import Layer, ModelSpec

CLASS: Final = "CLIPModel"
"""Whose configuration is that of both towers; the same file is an image classifier's where it says so, or nothing."""
TEXT_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
IMAGE_SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
"""Sizes that published files leave out (transformers' ``models/clip/configuration_clip.py``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """What stands beside the tower of texts. Its layers come first in the model, as an encoder's do.

    ``width``: of what both become.
    """

    images: ModelSpec
    width: int

    @property
    def tokens(self) -> int:
        """Of an image."""
        assert self.images.patches is not None, "a tower of images without images"
        return self.images.patches.tokens


def is_pair(values: Mapping[str, Any]) -> bool:
    """Is a configuration that of both towers?"""
    named = values.get("architectures")
    return values.get("model_type") == "clip" and isinstance(named, list | tuple) and CLASS in named


def paired(texts: ModelSpec, images: ModelSpec, width: Any) -> ModelSpec:
    """Both as one model.

    Raises:
        UsageError: a width that is no size.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise UsageError(f"{texts.name}: got projection_dim {width!r}; expected a whole number of 1 or more")
    first = tuple(replace(layer, source=True) for layer in images.layers if isinstance(layer, Layer))
    return replace(texts, family="clip", layers=(*first, *texts.layers), pair=Pair(images=images, width=width))
