"""Values of a configuration, each read with its type, its spelling and its default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any, Final, TypeVar

from jettison.core.errors import NotDescribed, UsageError
from jettison.core.files import read_table
from jettison.families.family import Family
from jettison.spec.model import Activation, Arrangement

_Part = TypeVar("_Part")
MOST_LAYERS: Final = 100_000  # a typo must not fill the memory with layers
TRACE: Final = "trace the model instead: --trace builds it with transformers, or give module:factory"
_NOT_EXPRESSED: Final = ("add_cross_attention", "is_encoder_decoder", "per_layer_config")

_ACTIVATIONS: Final = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_WRITTEN,
    "gelu_fast": Activation.GELU_FAST,
    "quick_gelu": Activation.GELU_QUICK,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}
"""Activations by the value of the configuration."""
_SAID: Final = re.compile(r"\b([a-z]+(?:_[a-z0-9]+)+|expand) (?:-?[\d.]+|None|True|False|'[^']*')")


def unstated(message: str, values: Mapping[str, Any]) -> str:
    """A note that values in a message are the architecture's defaults and not the file's; empty if none is."""
    clause = message.partition("got ")[2].partition(";")[0]
    said = [key for key in _SAID.findall(clause) if key not in values]
    if not said:
        return ""
    verb = "is the default" if len(said) == 1 else "are defaults"
    return f"The file does not say {', '.join(said)}, which {verb} of its model_type: state what the model has"


@dataclass(frozen=True, kw_only=True)
class ConfigFields:
    """Values of a configuration, each read with its type, its spelling and its default."""

    name: str
    family: Family
    values: Mapping[str, Any]

    def check_complete(self) -> None:
        """Check that all sizes are set, and no key that a `ModelSpec` cannot express."""
        missing = [self.spelled(key) for key in self.family.required if self.spelled(key) not in self.values]
        if missing:
            lacking = ", ".join(dict.fromkeys(missing))
            raise UsageError(f"{self.name}: the configuration lacks {lacking}; expected all of them")
        for key in (*(() if self.family.encoder_decoder else _NOT_EXPRESSED), *self.family.refused):
            if self.values.get(key):
                raise NotDescribed(
                    f"{self.name}: got {key} {short(self.values[key])}, which has no closed form; {TRACE}"
                )

    def knows(self, key: str) -> bool:
        """Whether this architecture reads the key."""
        return key in self.family.defaults or key in self.family.required

    def spelled(self, key: str) -> str:
        """The key as spelled in this configuration, or in the family if it is missing."""
        spellings = self.family.spelling.get(key, (key,))
        present = [s for s in spellings if s in self.values]
        return next((s for s in present if self.values[s] is not None), (*present, *spellings)[0])

    def value(self, key: str) -> Any:
        """The value in the file, else the default; None if the architecture does not read the key."""
        return self.values.get(self.spelled(key), self.family.defaults.get(key)) if self.knows(key) else None

    def error(self, key: str, expected: str) -> UsageError:
        """Return an error about a key."""
        return UsageError(f"{self.name}: got {self.spelled(key)} {short(self.value(key))}; expected {expected}")

    def size(self, key: str, *, least: int = 1) -> int:
        """Return a whole number."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"a whole number of {least} or more")
        if value >= 2**63:  # no tensor counts further
            raise self.error(key, "a number below 2^63")
        return value

    def depth(self, key: str) -> int:
        """Return a number of layers."""
        found = self.size(key)
        if found > MOST_LAYERS:
            raise self.error(key, f"at most {MOST_LAYERS}")
        return found

    def optional_size(self, key: str, *, least: int = 1) -> int | None:
        """Return a whole number, or None."""
        return None if self.value(key) is None else self.size(key, least=least)

    def step(self, key: str, unread: int, *, least: int = 0) -> int:
        """Return a whole number, with the default for null; ``unread`` if the architecture does not read the key."""
        if not self.knows(key):
            return unread
        return self.family.defaults[key] if self.value(key) is None else self.size(key, least=least)

    def layers(self, key: str) -> Sequence[int] | None:
        """Return numbers of layers, or None."""
        found = self.value(key)
        if not found and not isinstance(found, list | tuple):
            return None
        whole = isinstance(found, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in found)
        if not whole:
            raise self.error(key, "a list of layer numbers")
        return found

    def flag(self, key: str) -> bool:
        """Return true or false; null is the default."""
        value = self.value(key)
        value = bool(self.family.defaults.get(key)) if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def number(self, key: str) -> float:
        """Return a number; null is 0."""
        value = self.value(key)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        return value

    def activation(self, key: str = "hidden_act") -> Activation:
        """Return the nonlinearity. Gemma's first files say "gelu" and mean the approximation."""
        if self.family.activation is not None:
            return self.family.activation
        word = self.value(key)
        word = self.family.defaults[key] if word is None else word
        if not isinstance(word, str) or word not in _ACTIVATIONS:
            raise self.error(key, f"one of {', '.join(_ACTIVATIONS)}")
        found = _ACTIVATIONS[word]
        return Activation.GELU_TANH if self.family.embedding_scale and found is Activation.GELU else found

    def part(self, kind: type[_Part], **stated: Any) -> _Part:
        """Return a part of the model: fields as stated, others by the keys that ``config_layers.toml`` has for them."""
        types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
        read: Mapping[str, Callable[[str], Any]] = {
            "bool": self.flag,
            "int": self.size,
            "int | None": self.optional_size,
        }
        return kind(**{name: read[types[name]](key) for name, key in _keys()[kind.__name__].items()}, **stated)


@cache
def _keys() -> Mapping[str, Mapping[str, str]]:
    return read_table(Path(__file__).with_name("config_layers.toml"))


# Non-standard configurations: conversion to the usual keys, and fields of a family that they decide -------------------
#
# Most files have sizes under keys that `Family.spelling` finds. A few nest them, or express in one key what others
# express in several; each of those has a function here, named by ``reader`` of its TOML file, that returns the family
# and the values in the usual form.


Read = tuple[Family, Mapping[str, Any]]


def read(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """The family and the values of a configuration under the usual keys; invalid values raise a `UsageError`."""
    for default, cases in ((False, family.when), (True, family.unless)):
        for key, then in cases.items():
            if _flag(values, key, default, name) is not default:
                experts = family.experts and replace(family.experts, **then.get("experts", {}))
                family = replace(family, **{**then, "experts": experts})
    return _READERS[family.reader](family, values, name) if family.reader else (family, values)


def _flag(values: Mapping[str, Any], key: str, default: bool, name: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name}: got {key} {short(value)}; expected true or false")
    return default if value is None else value


def _part(values: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    part = values.get(key) or {}
    if not isinstance(part, Mapping):
        raise UsageError(f"{name}: got {key} {short(part)}; expected an object")
    return part


def _size(values: Mapping[str, Any], key: str, default: int, name: str, *, least: int = 0) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}: got {key} {short(value)}; expected a whole number of {least} or more")
    return value


def _gpt_bigcode(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """One key and value for all heads (multi-query), unless the file sets otherwise."""
    return family, {**values, "num_key_value_heads": 1 if _flag(values, "multi_query", True, name) else None}


def _gpt_neo(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Global and local layers: a list of them, or pairs of a list and how often it repeats."""
    words = {"global": "full_attention", "local": "sliding_attention"}
    layers = values.get("attention_layers")
    if layers is None:
        pairs = values.get("attention_types", [[["global", "local"], 12]])
        try:
            layers = list(chain.from_iterable(list(kinds) * times for kinds, times in pairs))
        except (TypeError, ValueError) as error:
            expected = 'pairs such as [["global", "local"], 12]'
            raise UsageError(f"{name}: got attention_types {short(pairs)}; expected {expected}") from error
    if not isinstance(layers, list | tuple) or any(word not in words for word in layers):
        raise UsageError(f"{name}: got attention_layers {short(layers)}; expected a list of global and local")
    return family, {**values, "layer_types": [words[word] for word in layers]}


def _dbrx(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Attention and experts are nested objects."""
    attention, experts = (_part(values, key, name) for key in ("attn_config", "ffn_config"))
    usual = {"moe_num_experts": 4, "moe_top_k": 1, "ffn_hidden_size": 3584}
    read = {
        "hidden_act": _part(experts, "ffn_act_fn", name).get("name", "silu"),
        "norm_topk_prob": experts.get("moe_normalize_expert_weights", 1.0) is not None,
        "moe_jitter_eps": experts.get("moe_jitter_eps"),
    }
    return family, {**usual, **attention, **experts, **values, **read}


def _falcon(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Three generations: multi-query, grouped-query, and multi-head with ALiBi."""
    groups = _flag(values, "new_decoder_architecture", False, name)
    parallel = _flag(values, "parallel_attn", True, name)
    norms = _size(values, "num_ln_in_parallel_attn", 2 if groups else 1, name, least=1)
    if groups and not parallel:
        raise NotDescribed(f"{name}: got parallel_attn false with new_decoder_architecture, which its code cannot run")
    fused = Arrangement.PARALLEL if groups and norms == 2 else Arrangement.SHARED
    lone = None if not _flag(values, "multi_query", True, name) else 1
    read = {**values, "num_key_value_heads": values.get("num_kv_heads") if groups else lone}
    arrangement = fused if parallel else Arrangement.PRE
    return replace(family, arrangement=arrangement), read


def _hunyuan_v1_moe(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Sizes may be lists, one entry a layer."""
    read = dict(values)
    for key in ("num_experts", "moe_topk"):
        if isinstance(listed := values.get(key), list | tuple):
            if len(set(listed)) != 1:
                raise NotDescribed(f"{name}: got {key} {short(listed)}, which differs by layer and has no closed form")
            read[key] = listed[0]
    return family, read


def _nemotron_h(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """One block a layer: a list of names, or a letter for each of them."""
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    words = values.get("layers_block_type") or values.get("layer_types") or values.get("hybrid_override_pattern")
    if isinstance(words, str):
        if set(words) - set(letters):
            raise UsageError(f"{name}: got hybrid_override_pattern {short(words)}; expected {' '.join(letters)}")
        words = [letters[letter] for letter in words]
    depth = len(words) if isinstance(words, list) else _size(values, "num_hidden_layers", 0, name)
    return family, {**values, "layer_types": words, "num_hidden_layers": depth}


def _mpt(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Attention is a nested object."""
    return family, {**values, **_part(values, "attn_config", name)}


def _t5(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """An activation with or without "gated-" before it; a tied head has a scaled input."""
    word = values.get("feed_forward_proj", family.defaults["feed_forward_proj"])
    parts = word.split("-") if isinstance(word, str) else []
    if not 1 <= len(parts) <= 2 or (len(parts) == 2 and parts[0] != "gated"):
        raise UsageError(f"{name}: got feed_forward_proj {short(word)}; expected an activation, or gated- before it")
    tied = values.get("tie_word_embeddings") is not False
    read = {"hidden_act": "gelu_new" if word == "gated-gelu" else parts[-1], "scale_decoder_outputs": tied}
    return replace(family, gated=len(parts) == 2), {**read, **values}


_READERS: Final[Mapping[str, Callable[[Family, Mapping[str, Any], str], Read]]] = {
    "dbrx": _dbrx,
    "falcon": _falcon,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "mpt": _mpt,
    "nemotron_h": _nemotron_h,
    "t5": _t5,
}
