"""Sound as it was recorded, made into a sequence by convolutions (arXiv 2006.11477 §2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.model import Activation

SECOND: Final = 16_000
"""Samples of a second, as these models take it."""
CHARACTERS: Final = 16
"""Labels of a second of speech: its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waves:
    """From samples to tokens, and from tokens to a loss.

    Args:
        channels, kernels, strides: of the convolutions, one after the other.
        group_norm: after the first of them stands a norm of each channel; otherwise after each a LayerNorm.
        masked_time, masked_features: a learned vector is written over some tokens, and zeros over some features.
        mask: that vector is there, used or not.
        position_kernel, position_groups: of the convolution that says where a token is, whose weight is normalised.
        mean_loss: of a sequence's loss by its number of labels; otherwise the sum.
        zero_infinity: losses without end count nothing.

    Raises:
        UsageError: lists of other lengths, or sizes below one.
    """

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    bias: bool
    group_norm: bool
    activation: Activation
    projection_norm: bool = True
    masked_time: bool = False
    masked_features: bool = False
    mask: bool = False
    position_kernel: int = 128
    position_groups: int = 16
    mean_loss: bool = False
    zero_infinity: bool = False

    def lengths(self, samples: int) -> Iterator[int]:
        """After each convolution."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            samples = (samples - kernel) // stride + 1
            yield samples

    def frames(self, samples: int) -> int:
        """s: tokens of so many samples."""
        *_, last = self.lengths(samples)
        return max(0, last)

    def tokens(self, name: str, samples: int) -> int:
        """The same of what is asked for.

        Raises:
            UsageError: they are too few for one.
        """
        if samples < (least := self.samples(1)):
            raise UsageError(f"got --source-seq {samples}; {name} needs {least} samples or more for a token")
        return self.frames(samples)

    def samples(self, frames: int) -> int:
        """The fewest that make so many tokens."""
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames

    def labels(self, samples: int) -> int:
        """Of a sequence; the text of speech."""
        return max(1, samples * CHARACTERS // SECOND)

    def check(self, name: str, *, seq: int, samples: int) -> None:
        """Do samples make so many tokens?

        Raises:
            UsageError: no.
        """
        if samples and self.frames(samples) != seq:
            raise UsageError(
                f"got --source-seq {samples} and --seq {seq}; {name} makes {self.frames(samples)} tokens of so many "
                "samples: leave one of them away"
            )
