"""What a sequence is made of where it is not words alone: squares of an image, or what an encoder reads."""

from __future__ import annotations

from dataclasses import dataclass

from jettison.core.errors import UsageError
from jettison.spec.sizes import positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """An image as a sequence: its squares, each a token, and perhaps one more to be classified (arXiv 2010.11929).

    Raises:
        UsageError: a size below one, or patches that are larger than the image.
    """

    height: int
    width: int
    patch: int
    channels: int
    bias: bool = True  # of the product that makes tokens
    class_token: bool = True

    def __post_init__(self) -> None:
        positive("image", height=self.height, width=self.width, patch=self.patch, channels=self.channels)
        if self.patch > min(self.height, self.width):
            raise UsageError(f"a patch of {self.patch} pixels does not fit an image of {self.height} x {self.width}")

    @property
    def count(self) -> int:
        """Of an image; pixels that fill none are not seen."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def tokens(self) -> int:
        """s."""
        return self.count + self.class_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What an encoder reads beside a decoder. Words share the decoder's table.

    Args:
        max_positions: the longest source where there is a table; with ``sound`` every one is that long.
        position_rows: of a learned table; 0: there is none, and positions have no end.
        trained_positions: otherwise they are sines that were written into it.
        sound: rows of a spectrum, which two convolutions make tokens of, the second one for each two frames.
    """

    max_positions: int
    position_rows: int = 0
    trained_positions: bool = True
    sound: int = 0

    def __post_init__(self) -> None:
        positive("encoder", max_positions=self.max_positions)

    def longest(self, seq: int) -> int:
        """What it can read beside a decoder of so many tokens, if they are to be equally long."""
        return self.max_positions if self.sound else min(seq, self.max_positions) if self.position_rows else seq
