"""Model types of transformers and their nearest described type, without importing transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from jettison.core.errors import NotDescribed, UsageError
from jettison.families.config import read_values
from jettison.families.family import FAMILIES, PLAIN
from jettison.families.presets import PRESETS

_TABLES: Final = ("auto_mappings.py", "configuration_auto.py")
"""Files of transformers that list its types as strings."""


@cache
def transformers_types() -> frozenset[str] | None:
    """Read the quoted words of transformers' tables of types as text: imports take seconds. None if not found."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "models" / "auto"
    texts = [(folder / name).read_text(encoding="utf-8") for name in _TABLES if (folder / name).is_file()]
    return frozenset(re.findall(r'"([^"\s]+)"', "\n".join(texts))) or None


def require_known(kind: object, name: str) -> None:
    """Raise `NotDescribed` for a type that transformers does not know, so that no trace could build it."""
    known = transformers_types()
    if known is None or kind in known:
        return
    raise NotDescribed(
        f"{name}: got the model_type {kind!r}, which neither has a closed form nor is known to the transformers that "
        f"is installed. {treat_as(kind)}"
    )


def treat_as(kind: object) -> str:
    """Return the advice for an unknown type: the nearest one with a closed form, as a flag that is accepted."""
    return (
        f"If it is built like a known one, --model-type {nearest(str(kind))} describes it (ledger, plan, estimate and "
        "search take it; docs/architectures.md lists the types). A trace needs the model itself: module:factory"
    )


def require_known_file(model: str) -> None:
    """Raise `NotDescribed` for a config's type that no trace could build, before libraries are loaded for it."""
    path, kind = Path(model), None
    if model in PRESETS or not path.exists():
        return
    with suppress(UsageError):
        values, _ = read_values(path)
        kind = values.get("model_type") if isinstance(values, Mapping) else None
    if isinstance(kind, str):
        require_known(kind, model)


def nearest(kind: str) -> str:
    """Return the described type of the most similar name; the plainest where none is similar."""
    from difflib import get_close_matches  # imported on use, to keep the command line's start fast

    kind = kind.lower().replace("-", "_")
    wholly = [one for one in FAMILIES if kind.startswith(one) or one.startswith(kind)]
    close = wholly or get_close_matches(kind, FAMILIES, n=1, cutoff=0.5)
    return max(close, key=len) if close else PLAIN
