"""Configurations in words of their own, put into the usual ones, and what of a family they decide.

Most files say their sizes in keys that `Family.spelling` finds. A few keep them in parts, or say in one word what
others say in several; each of those has a function here: from its entry and its values to both as all others have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from reprlib import repr as short
from types import MappingProxyType
from typing import Any, Final

from jettison.errors import UsageError
from jettison.spec.families import Family

Read = tuple[Family, Mapping[str, Any]]


def in_usual_words(kind: str, family: Family, values: Mapping[str, Any], *, name: str) -> Read:
    """The entry and the values of a configuration of this kind.

    Raises:
        UsageError: a value that makes no sense, by its key.
    """
    read = _OWN.get(kind)
    return (family, values) if read is None else read(family, values, name)


def _flag(values: Mapping[str, Any], key: str, default: bool, name: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name}: got {key} {short(value)}; expected true or false")
    return default if value is None else value


def _part(values: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """An object within the configuration."""
    part = values.get(key) or {}
    if not isinstance(part, Mapping):
        raise UsageError(f"{name}: got {key} {short(part)}; expected an object")
    return part


def _gpt_bigcode(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """One key and value for all heads, unless it says otherwise."""
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


def _mpt(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Attention has a part of its own."""
    return family, {**values, **_part(values, "attn_config", name)}


_OWN: Final[Mapping[str, Callable[[Family, Mapping[str, Any], str], Read]]] = MappingProxyType(
    {"gpt_bigcode": _gpt_bigcode, "gpt_neo": _gpt_neo, "mpt": _mpt}
)
"""By ``model_type``."""
