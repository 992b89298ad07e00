"""Configuration files of training frameworks as values by dotted key: TOML, YAML, JSON, Python, command-line arguments.

Nothing in a file is run: of a shell script assignments and arguments are read, of Python literals.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.frameworks.python_values import python_values

MOST_BYTES: Final = 1 << 20
MOST_KEYS: Final = 20_000
_SUFFIXES: Final = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".py": "python"}
_ASSIGNMENT: Final = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\((?:[^()]|\n)*\)|.*)$", re.MULTILINE)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_ENDS: Final = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "2>&1"})
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
        text = data.decode("utf-8")
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
            left -= 1
            if left < 0:
                raise ValueError(f"more than {MOST_KEYS:,} keys")
            name = f"{prefix}{key}" if key else prefix[:-1]
            if isinstance(value, Mapping) and value:
                waiting.append((f"{name}.", value))
            else:
                left -= _elements(value, left)
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


def _arguments(text: str) -> Mapping[str, Any]:
    """Arguments of a shell script or of a text that has nothing else: ``--tp-size 8``, ``--bf16``, ``--a=b``."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(^|\s)#.*$", r"\1", text, flags=re.MULTILINE)
    variables: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(text):
        inner = value.strip()
        variables[name] = _expanded(inner.strip("()") if inner.startswith("(") else inner, variables).strip("\"'")
    plain = _expanded(_ASSIGNMENT.sub(" ", text), variables)
    lines = plain if "--" in plain else " ".join(variables.values())
    found: dict[str, Any] = {}
    for line in lines.splitlines():
        name, program = "", True
        for word in _words(line):
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word[2:].partition("=")
                found[name] = value if equals else True
                program = False
            elif word.endswith(".py") or word in _ENDS or program:
                found[f"${Path(word).name}"] = True
                name, program = "", program or word in _ENDS
            elif name:
                before = found[name]
                found[name] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return found | {f"${name}": value for name, value in variables.items()}


def _words(line: str) -> Iterator[str]:
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation that goes on in a next line
        words = line.split()
    for word in words:
        yield from word.split() if " --" in word else (word,)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    for _ in range(4):
        text, before = _VARIABLE.sub(value, text), text
        if text == before:
            break
    return text


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "toml": tomllib.loads,
    "yaml": _yaml,
    "json": json.loads,
    "arguments": _arguments,
}
