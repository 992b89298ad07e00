"""Configuration files of training frameworks as values by dotted key: TOML, YAML, JSON, Python, command-line arguments.

Nothing in a file is run: of a shell script assignments and arguments are read, of Python literals.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.frameworks.python_values import python_values
from jettison.frameworks.shell_script import arguments

MOST_BYTES: Final = 1 << 20
MOST_KEYS: Final = 20_000
_SUFFIXES: Final = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".py": "python"}
_EXPECTED: Final = "a training framework's file: TOML, YAML, JSON, Python, a shell script, or arguments as text"


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A file as it was read.

    Args:
        path: as it was given, with a configuration's name behind a colon where a Python file has several.
        syntax: toml, yaml, json, python or arguments.
        values: leaves by dotted key (``training.seq_len``); lists are leaves. Arguments are by name without dashes,
            those without a value are True, those with several a list; a script's variables, and the programs that it
            starts, are there by name with a dollar sign.
    """

    path: Path
    text: str
    syntax: str
    values: Mapping[str, Any]


def read_config_file(path: Path) -> ConfigFile:
    """Read a file of a framework.

    Raises:
        UsageError: no such file, too large, or not in the syntax that its name says.
    """
    file, name = split_name(path)
    try:
        data = file.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"got --from {path}; expected {_EXPECTED}: {error.strerror or 'it cannot be read'}") from None
    except UnicodeDecodeError:
        raise UsageError(f"got --from {path}, which is no text; expected {_EXPECTED}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"got --from {path} with {len(data):,} bytes; expected {_EXPECTED}, of at most {MOST_BYTES:,}")
    syntax = _SUFFIXES.get(file.suffix.lower(), "arguments")
    try:
        values = dict(_flat(python_values(text, name) if syntax == "python" else _PARSERS[syntax](text)))
    except UsageError as error:
        raise UsageError(f"got --from {path}: {error}") from None
    except (ValueError, RecursionError, SyntaxError) as error:
        raise UsageError(f"{path} is not {syntax.upper()}: {' '.join(str(error).split())}") from None
    return ConfigFile(path=path, text=text, syntax=syntax, values=values)


def split_name(path: Path) -> tuple[Path, str | None]:
    """A file, and which of a Python file's configurations is meant: ``config.py:pretrain``."""
    stem, colon, name = path.name.rpartition(":")
    if colon and stem.lower().endswith(".py") and not path.exists():
        return path.with_name(stem), name
    return path, None


def _flat(values: Any) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key. An alias of YAML may stand for a tree many times over, so leaves are counted."""
    if not isinstance(values, Mapping):
        raise ValueError(f"it holds {type(values).__name__}, not keys with values")
    left, waiting = MOST_KEYS, [("", values)]
    while waiting:
        prefix, table = waiting.pop()
        for key, value in table.items():
            inside = isinstance(value, Mapping) and bool(value)
            left -= 1 if inside else 1 + _elements(value, left)
            if left < 0:
                raise ValueError(f"more than {MOST_KEYS:,} keys")
            name = f"{prefix}{key}" if key else prefix[:-1]
            if inside:
                waiting.append((f"{name}.", value))
            else:
                yield name, value


def _elements(value: Any, most: int) -> int:
    """Elements of a list and of what is in it, as far as ``most`` and one more."""
    count, waiting = 0, [value]
    while waiting and count <= most:
        one = waiting.pop()
        inside = one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        count += len(inside)
        waiting += inside
    return count


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "toml": tomllib.loads,
    "yaml": _yaml,
    "json": json.loads,
    "arguments": arguments,
}
