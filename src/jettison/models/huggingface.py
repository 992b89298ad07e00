"""A Hugging Face ``config.json`` as a model with random weights, real or fake, and a batch for it."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jettison.capture.fake_copies import fake_copy
from jettison.core.errors import UsageError, install
from jettison.core.files import read_table
from jettison.core.objects import set_to
from jettison.families.config import read_values
from jettison.models.model_types import require_known, treat_as
from jettison.spec.model import CHARACTERS, SECOND

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTIONS = {"eager": "eager", "sdpa": "sdpa", "flash": "sdpa"}  # PyTorch's own fused kernels are what sdpa runs
MAPPINGS: Final[list[str]] = read_table(Path(__file__).with_suffix(".toml"))["trainable"]
"""Tables of trainable classes for a config that names none: the first that knows the config."""


@dataclass(frozen=True, kw_only=True)
class ConfigRequest:
    """Changes of a config, and the batch's size. None: as the config says. Raise `UsageError` for an unknown word."""

    seq: int | None = None
    micro_batch: int | None = None
    precision: str | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        for name, words in (("precision", PRECISIONS), ("attention", ATTENTIONS)):
            value = getattr(self, name)
            if value is not None and value not in words:
                raise UsageError(f"got the {name} {value!r}; expected one of {', '.join(words)}")


def read_config(path: Path) -> Any:
    """The configuration object of a ``config.json``, or of the folder that it lies in. Raise `UsageError` if there is
    no such file, it is not JSON, or transformers does not know its model_type.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path} has no config.json")
    values, _ = read_values(file)
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UsageError(f"{file} is not a Hugging Face config: it has no model_type")
    require_known(values["model_type"], str(file))
    return config_of(values, str(file))


_COUNTS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def config_of(values: Mapping[str, Any], name: str) -> Any:
    """The config object of a decoded ``config.json``. `UsageError`: transformers refuses it, or a size is below 1."""
    transformers = _transformers()
    if values.get("model_type") not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{name}: got the model_type {values.get('model_type')!r}, which neither has a closed form nor is known to "
            f"transformers {transformers.__version__}. {treat_as(values.get('model_type'))}"
        )
    for key in _COUNTS:  # transformers builds a model without layers of -1
        if isinstance(values.get(key), int) and values[key] < 1:
            raise UsageError(f"{name}: got {key} {values[key]}; expected a whole number of 1 or more")
    try:
        return transformers.AutoConfig.for_model(**values)
    except Exception as error:  # transformers validates each config in its own way
        raise UsageError(
            f"transformers cannot read {name}: {_one_line(error)}. {_about_defaults(error, values, transformers)}Check "
            "model_type, or pass a factory: module:function"
        ) from error


def _about_defaults(error: Exception, values: Mapping[str, Any], transformers: Any) -> str:
    """Values named in an error that the user did not set: defaults of the class."""
    kind = transformers.CONFIG_MAPPING[values["model_type"]]
    said = set(re.findall(r"[A-Za-z_]\w+", str(error)))
    defaults = {
        key: value
        for key, value in vars(kind).items()
        if key in said and key not in values and isinstance(value, int | float | str)
    }
    if not defaults:
        return ""
    stated = ", ".join(f"{key} {value!r}" for key, value in defaults.items())
    return f"The file does not say {stated}: that is the default of {kind.__name__}; state it in the file. "


def build(
    config: Any, asked: ConfigRequest, mode: FakeTensorMode | None, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model in training mode, with random weights; under ``mode``, of fake tensors that take no memory. Raise
    `UsageError` if transformers has no trainable class for the config, or cannot make a model of it.
    """
    if dtype is None:
        stated = str(getattr(config, "dtype", None)).removeprefix("torch.")
        own = torch.bfloat16 if stated in ("bfloat16", "float16") else torch.float32
        dtype = PRECISIONS[asked.precision] if asked.precision else own
    config.dtype = dtype
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache for generation would grow from step to step
    if getattr(config, "is_encoder_decoder", False):  # labels are shifted into the decoder's input with both
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id
    if asked.attention:
        config._attn_implementation = ATTENTIONS[asked.attention]
    cls = class_for(config)
    # built on meta and not under the fake mode: constructors may read small tensors that they ask for on the CPU;
    # in the right dtype, as `.to(dtype)` on a fake model would fail
    in_dtype = set_to(dtype, torch.get_default_dtype, torch.set_default_dtype)
    with in_dtype, torch.device("meta") if mode else contextlib.nullcontext():
        try:
            model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
        except Exception as error:  # an activation that there is none of, a missing library, sizes that do not divide
            raise UsageError(
                f"transformers cannot make a {cls.__name__} of this config: {_one_line(error)}. "
                "Mend the config, or use module:factory"
            ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{cls.__name__} made a {type(model).__name__}; expected a torch.nn.Module")
    return (model if mode is None else fake_copy(model, mode, "cpu")).train()


def class_for(config: Any) -> Any:
    """The class of transformers that trains a configuration. Raise `UsageError` if there is none with a loss."""
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if cls is None:
            continue
        compares = "return_loss" in inspect.signature(cls.forward).parameters  # images with texts: a loss of its own
        if compares or "For" in name or name.endswith("LMHeadModel"):
            return cls
    from transformers.models.auto import modeling_auto

    for mapping in _mappings(config):
        known = getattr(modeling_auto, mapping, {})
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise UsageError(
        f"transformers has no class with a loss for model_type {config.model_type!r}; use module:factory and return "
        "(model, batch, loss_fn)"
    )


def _mappings(config: Any) -> tuple[str, ...]:
    first: tuple[str, ...] = ()
    if getattr(config, "is_encoder_decoder", False):
        first = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
    elif hasattr(config, "vision_config"):
        first = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",)
    elif getattr(config, "is_decoder", None) is False:
        first = ("MODEL_FOR_MASKED_LM_MAPPING",)
    return (*first, *MAPPINGS)


def _one_line(error: Exception) -> str:
    """Return an error's message, with its type where the message alone says little: "KeyError: 'nope'"."""
    words = str(error).split()
    kind = [] if len(words) > 3 else [f"{type(error).__name__}:"]
    return textwrap.shorten(" ".join(kind + words), 240, placeholder=" ...").rstrip(".:")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"a config.json needs transformers: {install('hf')}") from error
    transformers.logging.set_verbosity_error()
    return transformers


# batches of random tokens, pixels or sound ----------------------------------------------------------------------------
#
# Always real tensors, since a forward may look at them. What a model takes is read off its class and its configuration.


DEFAULT_SEQUENCE: Final = 2048


def batch_for(model: nn.Module, config: Any, asked: ConfigRequest) -> dict[str, Any]:
    """A random batch with labels. `UsageError` if the model takes other inputs, or has fewer positions."""
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
    """Whether a class of models takes sequences of any length. Others read it off their configuration."""
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
    def __init__(self, model: nn.Module, config: Any, asked: ConfigRequest) -> None:
        self.model, self.config, self.asked = model, config, asked
        self.name = type(model).__name__
        self.rows = asked.micro_batch or 1
        self.generator = torch.Generator().manual_seed(0)
        self.text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.takes = set(inspect.signature(model.forward).parameters)
        self.dtype = next(model.parameters()).dtype

    def tokens(self) -> dict[str, Any] | None:
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
        images = self._images()
        if images is None or "labels" not in self.takes:
            return None
        if self.asked.seq is not None:
            raise UsageError(f"--seq does not apply to {self.name}: its input is an image")
        return {"pixel_values": images, "labels": self._classes()}

    def features(self) -> dict[str, Any] | None:
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
