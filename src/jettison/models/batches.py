"""Batches of random tokens, pixels or sound for a model of transformers, with labels where its loss wants them.

Always real tensors, since a forward may look at them. What a model takes is read off its class and its configuration.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.core.errors import UsageError
from jettison.models.huggingface import ConfigRequest
from jettison.spec.waves import CHARACTERS, SECOND

DEFAULT_SEQUENCE: Final = 2048


def batch_for(model: nn.Module, config: Any, asked: ConfigRequest) -> dict[str, Any]:
    """A batch of random tokens, pixels or sound with labels.

    Raises:
        UsageError: the model takes something else, or the sequence is longer than its positions.
    """
    maker = _Batch(model, config, asked)
    wanted = getattr(model, "main_input_name", "input_ids")
    makers = {
        "input_ids": maker.tokens,
        "pixel_values": maker.pixels,
        "input_features": maker.features,
        "input_values": maker.sound,
    }
    made = makers[wanted]() if wanted in makers else None
    if made is not None:
        return made
    raise UsageError(
        f"no batch is known for {type(model).__name__}, which takes {wanted!r}; use module:factory and return "
        "(model, batch)"
    )


def takes_tokens(cls: Any) -> bool:
    """Does a class of models take sequences of any length? Others read it off their configuration."""
    name = getattr(cls, "main_input_name", "input_ids")
    return name == "input_ids" or (name == "input_features" and "ConditionalGeneration" in cls.__name__)


def longest_of(config: Any) -> int | None:
    """Tokens that a configuration has positions for."""
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


class _Batch:
    """Makes the parts of a batch."""

    def __init__(self, model: nn.Module, config: Any, asked: ConfigRequest) -> None:
        self.model, self.config, self.asked = model, config, asked
        self.name = type(model).__name__
        self.rows = asked.micro_batch or 1
        self.generator = torch.Generator().manual_seed(0)
        self.text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.takes = set(inspect.signature(model.forward).parameters)
        self.dtype = next(model.parameters()).dtype

    def tokens(self) -> dict[str, Any] | None:
        """Return the batch of a language model, or of one that matches text with images."""
        vocabulary = getattr(self.text, "vocab_size", None)
        if not vocabulary:
            return None
        ids = self._ids(vocabulary, self._sequence())
        if "return_loss" in self.takes and (pixels := self._images()) is not None:
            return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
        if self.name.endswith("ForSequenceClassification"):
            return {"input_ids": ids, "labels": self._classes()}
        return {"input_ids": ids, "labels": ids.clone()} if "labels" in self.takes else None

    def pixels(self) -> dict[str, Any] | None:
        """Return the batch of an image classifier."""
        images = self._images()
        if images is None or "labels" not in self.takes:
            return None
        if self.asked.seq is not None:
            raise UsageError(f"--seq does not apply to {self.name}: its input is an image")
        return {"pixel_values": images, "labels": self._classes()}

    def features(self) -> dict[str, Any] | None:
        """Return the batch of a speech model over spectrograms, as long as its encoder reads."""
        bins, frames = getattr(self.config, "num_mel_bins", None), getattr(self.config, "max_source_positions", None)
        if not bins or not frames:
            return None
        shape = (self.rows, bins, 2 * frames) if hasattr(self.config, "encoder_layers") else (self.rows, frames, bins)
        ids = self._ids(self.text.vocab_size, self._sequence())
        return {"input_features": self._noise(shape), "labels": ids}

    def sound(self) -> dict[str, Any] | None:
        """Return the batch of a CTC model, of a second of sound; no label is the blank."""
        vocabulary = getattr(self.config, "vocab_size", None)
        if "labels" not in self.takes or not vocabulary:
            return None
        ids = self._ids(max(1, vocabulary - 1), CHARACTERS)
        ids += ids >= (getattr(self.config, "pad_token_id", 0) or 0)
        return {"input_values": self._noise((self.rows, SECOND)), "labels": ids}

    # parts ------------------------------------------------------------------------------------------------------------

    def _ids(self, vocabulary: int, length: int) -> Tensor:
        return torch.randint(0, vocabulary, (self.rows, length), generator=self.generator)

    def _noise(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _classes(self) -> Tensor:
        return torch.randint(0, max(1, getattr(self.config, "num_labels", 2)), (self.rows,), generator=self.generator)

    def _images(self) -> Tensor | None:
        """As large as the configuration says, of the model itself or of what it sees with."""
        seen = self.config if getattr(self.config, "image_size", None) else getattr(self.config, "vision_config", None)
        size = getattr(seen, "image_size", None)
        if not size:
            return None
        height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
        return self._noise((self.rows, getattr(seen, "num_channels", 3), height, width))

    def _sequence(self) -> int:
        longest = longest_of(self.text)
        if self.asked.seq is not None and longest is not None and self.asked.seq > longest:
            raise UsageError(f"got --seq {self.asked.seq}; the model has {longest} positions")
        return self.asked.seq or min(DEFAULT_SEQUENCE, longest or DEFAULT_SEQUENCE)
