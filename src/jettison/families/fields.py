"""The values of a configuration, each read with its type, its spelling and its default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Final

from jettison.core.errors import NotDescribed, UsageError
from jettison.families.family import Family
from jettison.spec.model import Activation

MOST_LAYERS: Final = 100_000  # a slip of the keyboard must not fill the memory with layers
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
"""By the word that a configuration uses."""
_SAID: Final = re.compile(r"\b([a-z]+(?:_[a-z0-9]+)+|expand) (?:-?[\d.]+|None|True|False|'[^']*')")


def unstated(message: str, values: Mapping[str, Any]) -> str:
    """About values in a message that nobody wrote: they are the architecture's defaults. Empty where there are none."""
    clause = message.partition("got ")[2].partition(";")[0]
    said = [key for key in _SAID.findall(clause) if key not in values]
    if not said:
        return ""
    verb = "is the default" if len(said) == 1 else "are defaults"
    return f"The file does not say {', '.join(said)}, which {verb} of its model_type: state what the model has"


@dataclass(frozen=True, kw_only=True)
class ConfigFields:
    """A configuration's values, each read with its type, its spelling and its default."""

    name: str
    family: Family
    values: Mapping[str, Any]

    def check_complete(self) -> None:
        """Are all sizes there, and nothing that a `ModelSpec` cannot say?"""
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
        """Does this architecture read the key?"""
        return key in self.family.defaults or key in self.family.required

    def spelled(self, key: str) -> str:
        """The key as this configuration writes it; as the family does where it is not there."""
        spellings = self.family.spelling.get(key, (key,))
        present = [s for s in spellings if s in self.values]
        return next((s for s in present if self.values[s] is not None), (*present, *spellings)[0])

    def value(self, key: str) -> Any:
        """As it stands in the file, else the default; None where the architecture does not read it."""
        return self.values.get(self.spelled(key), self.family.defaults.get(key)) if self.knows(key) else None

    def error(self, key: str, expected: str) -> UsageError:
        """One line about a key."""
        return UsageError(f"{self.name}: got {self.spelled(key)} {short(self.value(key))}; expected {expected}")

    def size(self, key: str, *, least: int = 1) -> int:
        """A whole number."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"a whole number of {least} or more")
        if value >= 2**63:  # no tensor counts further
            raise self.error(key, "a number below 2^63")
        return value

    def depth(self, key: str) -> int:
        """A number of layers."""
        found = self.size(key)
        if found > MOST_LAYERS:
            raise self.error(key, f"at most {MOST_LAYERS}")
        return found

    def optional_size(self, key: str, *, least: int = 1) -> int | None:
        """A whole number, or None."""
        return None if self.value(key) is None else self.size(key, least=least)

    def step(self, key: str, unread: int, *, least: int = 0) -> int:
        """A whole number, null being the default; ``unread`` where the architecture does not read the key."""
        if not self.knows(key):
            return unread
        return self.family.defaults[key] if self.value(key) is None else self.size(key, least=least)

    def layers(self, key: str) -> Sequence[int] | None:
        """Numbers of layers, or None."""
        found = self.value(key)
        if not found and not isinstance(found, list | tuple):
            return None
        whole = isinstance(found, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in found)
        if not whole:
            raise self.error(key, "a list of layer numbers")
        return found

    def flag(self, key: str) -> bool:
        """True or false; null is the default."""
        value = self.value(key)
        value = bool(self.family.defaults.get(key)) if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def number(self, key: str) -> float:
        """A number; null is 0."""
        value = self.value(key)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        return value

    def activation(self, key: str = "hidden_act") -> Activation:
        """The nonlinearity. Gemma's first files say "gelu" and mean the approximation."""
        if self.family.activation is not None:
            return self.family.activation
        word = self.value(key)
        word = self.family.defaults[key] if word is None else word
        if not isinstance(word, str) or word not in _ACTIVATIONS:
            raise self.error(key, f"one of {', '.join(_ACTIVATIONS)}")
        found = _ACTIVATIONS[word]
        return Activation.GELU_TANH if self.family.embedding_scale and found is Activation.GELU else found
