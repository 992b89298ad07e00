"""A Hugging Face ``config.json`` as a model with random weights, real or fake, and a batch for it."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jettison.capture.fakes import fake_copy
from jettison.core.errors import UsageError, install
from jettison.models.model_types import require_known, treat_as

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTIONS = {"eager": "eager", "sdpa": "sdpa", "flash": "sdpa"}  # PyTorch's own fused kernels are what sdpa runs
DEFAULT_SEQUENCE = 2048
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
)
"""Tables of trainable classes for a config that names none: the first that knows the config."""


@dataclass(frozen=True, kw_only=True)
class ConfigRequest:
    """Changes of a config, and the batch's size. None means: as the config says.

    Raises:
        UsageError: an unknown word.
    """

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
    """The configuration object of a ``config.json``, or of the folder that it lies in.

    Raises:
        UsageError: there is no such file, it is not JSON, or transformers does not know its model_type.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path} has no config.json")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read as JSON: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UsageError(f"{file} is not a Hugging Face config: it has no model_type")
    require_known(values["model_type"], str(file))
    return config_of(values, str(file))


_COUNTS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def config_of(values: Mapping[str, Any], name: str) -> Any:
    """The configuration object of a decoded ``config.json``.

    Raises:
        UsageError: transformers does not know its model_type, or not its values, or a size is below 1.
    """
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
    """Which of the values that an error names nobody wrote: they are the class's."""
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
    """The model in training mode, with random weights; under ``mode``, of fake tensors that take no memory.

    Raises:
        UsageError: transformers has no trainable class for the config, or cannot make a model of it.
    """
    if dtype is None:
        dtype = PRECISIONS[asked.precision] if asked.precision else _own_dtype(config)
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
    # built on meta and not under the fake mode: constructors may read small tensors that they ask for on the CPU
    with _default_dtype(dtype), torch.device("meta") if mode else contextlib.nullcontext():
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


def _own_dtype(config: Any) -> torch.dtype:
    stated = getattr(config, "dtype", None)
    name = str(stated).removeprefix("torch.")
    return {"bfloat16": torch.bfloat16, "float16": torch.bfloat16}.get(name, torch.float32)


def class_for(config: Any) -> Any:
    """The class of transformers that trains a configuration.

    Raises:
        UsageError: there is none with a loss.
    """
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if cls is not None and ("For" in name or name.endswith("LMHeadModel") or _compares(cls)):
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


def _compares(cls: Any) -> bool:
    """Does a class of no task have a loss all the same: does it hold images against texts?"""
    return "return_loss" in inspect.signature(cls.forward).parameters


def _mappings(config: Any) -> tuple[str, ...]:
    """Return the tables to search: encoder-decoders and text-image models have their own, encoders the masked ones."""
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


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # `.to(dtype)` on a fake model would fail; modules that are made in the right dtype need no cast
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
