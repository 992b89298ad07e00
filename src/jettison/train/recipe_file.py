"""From what was typed to a `TrainRecipe`: a TOML file, or ``module:name`` in Python. No torch."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tomllib
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jettison.errors import UsageError
from jettison.train.recipe import TrainRecipe

_EXPECTED = "expected a TOML file, or module:name of a TrainRecipe or of a function that returns one"


def read_recipe(target: str) -> TrainRecipe:
    """A recipe by path or by name.

    Raises:
        UsageError: there is none, or the first wrong key by its section.
    """
    path = Path(target)
    if path.suffix == ".toml" or path.exists():
        return _from_file(path)
    module, colon, name = target.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"got the recipe {target!r}; {_EXPECTED}")
    return _from_python(target, module, name)


def parse_recipe(text: str, *, name: str = "recipe") -> TrainRecipe:
    """A recipe out of TOML text.

    Raises:
        UsageError: as `read_recipe`.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not TOML: {str(error).splitlines()[0]}") from None
    try:
        return _adapter().validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        raise UsageError(f"{name}: {_first(error)}") from None
    except (TypeError, ValueError) as error:  # a date, or a number that JSON has no form for
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name}: expected numbers, texts, flags and lists only: {error}") from None


def _from_file(path: Path) -> TrainRecipe:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"recipe {path} is not UTF-8 text; expected a TOML file") from None
    return parse_recipe(text, name=str(path))


def _from_python(target: str, module: str, name: str) -> TrainRecipe:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"recipe {target!r}: there is no module {error.name!r}; {_EXPECTED}") from error
    finally:
        sys.path.remove(os.getcwd())
    value = getattr(found, name, None)
    value = value() if callable(value) else value
    if not isinstance(value, TrainRecipe):
        raise UsageError(f"recipe {target!r} is a {type(value).__name__}; {_EXPECTED}")
    return value


def _first(error: ValidationError) -> str:
    """One line about the first wrong key."""
    found = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    got = f"got {json.dumps(found['input'])}; "
    match found["type"]:
        case "unexpected_keyword_argument":
            return f"{where} is not a key; {_closest(found['loc'])}"
        case "missing":
            return f"{where} is missing"
        case "value_error":
            return f"{where}{': ' if where else ''}{found['ctx']['error']}"
        case "dataclass_type":
            return f"{where}: {got}expected a section [{where}]"
        case "literal_error":
            return f"{where}: {got}expected {found['ctx']['expected']}"
    return f"{where}: {got}{found['msg'].replace('Input should be', 'expected', 1)}"


def _closest(location: tuple[Any, ...]) -> str:
    section: Any = TrainRecipe
    for part in location[:-1]:
        section = _sections(section)[part]
    keys = [f.name for f in fields(section)]
    close = get_close_matches(str(location[-1]), keys, n=3, cutoff=0.6)
    return f"the closest are {', '.join(close)}" if close else f"expected some of {', '.join(keys)}"


def _sections(section: Any) -> dict[str, Any]:
    from typing import get_args, get_type_hints

    kinds = ((name, kind) for name, hint in get_type_hints(section).items() for kind in (hint, *get_args(hint)))
    return {name: kind for name, kind in kinds if is_dataclass(kind)}


@cache
def _adapter() -> TypeAdapter[TrainRecipe]:
    return TypeAdapter(TrainRecipe)
