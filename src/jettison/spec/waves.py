"""Sound as it was recorded, made into a sequence by convolutions (arXiv 2006.11477 §2), and what is said about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Final

from jettison.errors import UsageError
from jettison.spec.config_fields import ConfigFields
from jettison.spec.model import Activation

SECOND: Final = 16_000
"""Samples of a second, as these models take it."""
CHARACTERS: Final = 16
"""Labels of a second of speech: its text."""
LAYERDROP: Final = 0.1
"""How many layers training skips, unless a configuration says otherwise."""
NO_END: Final = 2**31 - 1
"""Positions that a convolution makes."""


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


def waves_of(fields: ConfigFields) -> Waves:
    """What a configuration says of them.

    Raises:
        UsageError: a value that makes no sense, by its key.
    """
    channels = _sizes(fields, "conv_dim", None)
    kernels, strides = (_sizes(fields, key, len(channels)) for key in ("conv_kernel", "conv_stride"))
    norm, reduction = fields.value("feat_extract_norm"), fields.value("ctc_loss_reduction")
    if norm not in ("group", "layer"):
        raise fields.error("feat_extract_norm", "group or layer")
    if reduction not in ("sum", "mean"):
        raise fields.error("ctc_loss_reduction", "sum or mean")
    groups, hidden = fields.size("num_conv_pos_embedding_groups"), fields.size("hidden_size")
    if hidden % groups:
        raise fields.error("num_conv_pos_embedding_groups", f"a divisor of the hidden size {hidden}")
    augmented = fields.flag("apply_spec_augment")
    chances = [fields.number(key) > 0 for key in ("mask_time_prob", "mask_feature_prob")]
    return Waves(
        channels=channels,
        kernels=kernels,
        strides=strides,
        bias=fields.flag("conv_bias"),
        group_norm=norm == "group",
        activation=fields.activation("feat_extract_activation"),
        projection_norm=fields.flag("feat_proj_layer_norm"),
        masked_time=augmented and chances[0],
        masked_features=augmented and chances[1],
        mask=any(chances),
        position_kernel=fields.size("num_conv_pos_embeddings"),
        position_groups=groups,
        mean_loss=reduction == "mean",
        zero_infinity=fields.flag("ctc_zero_infinity"),
    )


def _sizes(fields: ConfigFields, key: str, count: int | None) -> tuple[int, ...]:
    found: Sequence[Any] = fields.value(key)
    whole = isinstance(found, list | tuple) and found and all(type(one) is int and one > 0 for one in found)
    if not whole or (count is not None and len(found) != count):
        raise fields.error(key, "a list of sizes, one for each convolution")
    return tuple(found)


def skipped(chance: Any) -> str:
    """A remark about layers that training leaves out at random."""
    return f"layerdrop {short(chance)} skips layers of a step at random; figures are of one that runs all of them"
