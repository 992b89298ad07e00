"""Published models by name, as the configurations that their publishers give; a `ModelSpec` is made when asked for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.spec.model import ModelSpec

_FILE: Final = Path(__file__).with_name("presets.toml")


class _Presets(Mapping[str, Mapping[str, Any]]):
    """Configurations by name."""

    @cached_property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """All of them, as the file has them."""
        return tomllib.loads(_FILE.read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        own = dict(self.tables[name])
        like, null = own.pop("like", None), own.pop("null", ())
        own.pop("family", None)
        return {**(self[like] if like else {}), **own, **dict.fromkeys(null)}

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __contains__(self, name: object) -> bool:
        return name in self.tables


_PRESETS: Final = _Presets()
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = _PRESETS
"""Configurations by name, in the form of a ``config.json``: transformers' own classes take them too."""


def unknown_preset(name: str, others: str) -> UsageError:
    """What to say to a name that is none. ``others``: what else will do, where a sentence begins."""
    from difflib import get_close_matches  # only where it is needed: every start of the command line counts

    close = get_close_matches(name.lower(), PRESETS, n=4, cutoff=0.5)
    hint = f"the closest are {', '.join(close)}" if close else f"expected one of {', '.join(PRESETS)}"
    return UsageError(f"got the model {name!r}; {hint}. {others} will do as well")


@cache
def preset(name: str) -> ModelSpec:
    """A published model by name.

    Raises:
        UsageError: no such name; the message has those that are close.
    """
    if name not in PRESETS:
        raise unknown_preset(name, "A config.json or its folder")
    model = parse_config(PRESETS[name], name=name)
    return replace(model, family=_PRESETS.tables[name].get("family", model.family))
