"""An image held against a text (arXiv 2103.00020 §2.3): two towers, and one width in which both are compared."""

from __future__ import annotations

from dataclasses import dataclass

from jettison.spec.model import ModelSpec


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
