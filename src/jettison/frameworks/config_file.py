"""Configuration files of training frameworks as values by dotted key: TOML, YAML, JSON, Python, command-line arguments.

No file is executed: assignments and arguments of a shell script are read, and literals of Python. OmegaConf's
references to keys of the same YAML file (``${output_dir}/logs``, ``${model.hidden}``, ``${.sibling}``) are resolved;
environment variables and resolvers (``${oc.env:HOME}``) stay in the text.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.frameworks.python_values import python_values
from jettison.frameworks.shell_script import NOTES, arguments

MOST_BYTES: Final = 1 << 20
MOST_KEYS: Final = 20_000
_REFERENCE: Final = re.compile(r"\$\{(\.*)([\w-]+(?:\.[\w-]+|\[\d+\])*)\}")
_BLOCK: Final = re.compile(r"-{4,} arguments -{4,}(.*?)-{4,} end of arguments -{4,}", re.DOTALL)
_DEEPEST: Final = 32
"""Longest chain of references."""
_SUFFIXES: Final = {"yml": "yaml", "py": "python", "ipynb": "notebook"}
_EXPECTED: Final = (
    "a training framework's file: TOML, YAML, JSON, Python, a notebook, a shell script, or arguments as text"
)


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """Parsed file.

    Args:
        path: as given, such as ``FILE.py:NAME`` for one of several configurations of a Python file or of a script.
        syntax: toml, yaml, json, python, python script, arguments, or printed arguments, of a log.
        values: leaves by dotted key (``training.seq_len``); lists are leaves. Arguments are keyed by name without
            dashes, those without a value are True, those with several a list; a script's variables and the programs
            that it starts are keyed by name with a dollar sign. Of a Python script, arguments of calls are keyed as
            ``SFTConfig().max_length``, calls by name with a dollar sign.
    """

    path: Path
    text: str
    syntax: str
    values: Mapping[str, Any]


def read_config_file(path: Path, text: str | None = None, argument: Path | None = None) -> ConfigFile:
    """Read a framework's file. `UsageError` if there is none, or it is unreadable.

    Args:
        text: replaces its contents.
        argument: file that a Python script parses and that its command line would name.
    """
    file, name = split_name(path)
    try:
        data = file.read_bytes() if text is None else text.encode()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"got --from {path}; expected {_EXPECTED}: {error.strerror or 'it cannot be read'}") from None
    except UnicodeDecodeError:
        raise UsageError(f"got --from {path}, which is not UTF-8 text; expected {_EXPECTED}") from None
    suffix = file.suffix.lower()[1:]
    syntax = (suffix if suffix in _PARSERS else _SUFFIXES.get(suffix)) or ("arguments" if suffix else _like(text))
    printed = _BLOCK.findall(text) if syntax == "arguments" else []
    if len(data) > (most := MOST_BYTES * (16 if syntax == "notebook" or printed else 1)):
        raise UsageError(f"got --from {path} with {len(data):,} bytes; expected {_EXPECTED}, of at most {most:,}")
    try:
        text, syntax = (_cells(text), "python") if syntax == "notebook" else (text, syntax)
        text = _document(text, name) if syntax == "yaml" else text
        if printed:
            parsed: Any = _printed(text, printed)
            syntax = "printed arguments"
        elif syntax == "arguments":
            parsed = arguments(text, file.parent, name)
        elif syntax == "python":
            parsed, script = python_values(
                text, name, NOTES, lambda other: _keys_named(file.parent, other or str(argument or ""))
            )
            syntax = "python script" if script else syntax
        else:
            parsed = _PARSERS[syntax](text)
        values = dict(_flat(parsed))
        if syntax == "yaml" and any("${" in str(value) for value in values.values()):
            values = dict(_flat(_References(parsed).resolved(parsed)))
    except UsageError as error:
        raise UsageError(f"got --from {path}: {error}") from None
    except (ValueError, RecursionError, SyntaxError, MemoryError) as error:
        template = re.search(r"\{\{.+?\}\}", text)
        said = f"it is a template: fill in {template[0]}" if template else " ".join(str(error).split())
        raise UsageError(f"{path} is not {syntax.upper()}: {said or 'it is nested too deeply'}") from None
    return ConfigFile(path=path, text=text, syntax=syntax, values=values)


def found_file(folder: Path, name: Any) -> Path | None:
    """Find a file in the working directory, a folder or one that holds it."""
    with suppress(OSError, ValueError):  # no name of a file
        places = (Path(), folder, *folder.parents) if isinstance(name, str) else ()
        return next((path for one in places if (path := one / name).is_file()), None)
    return None


def _keys_named(folder: Path, name: str) -> Any:
    """Return the keys of a file that a script names; None without such."""
    suffix = Path(name).suffix[1:]
    syntax, path = _SUFFIXES.get(suffix, suffix), found_file(folder, name)
    if syntax in _PARSERS and path is not None and path.stat().st_size <= MOST_BYTES:
        with suppress(UsageError):
            return json.loads(json.dumps(_PARSERS[syntax](read_config_file(path).text), default=str))
    return None


def split_name(path: Path) -> tuple[Path, str | None]:
    """Split ``config.py:pretrain``, ``run.sh:dpo`` or ``runs.yaml:2`` into the file and the name of a configuration."""
    stem, colon, name = path.name.rpartition(":")
    if colon and stem.lower().endswith((".py", ".sh", ".ipynb", ".yaml", ".yml")) and not path.exists():
        return path.with_name(stem), name
    return path, None


def _flat(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield leaves by dotted key. They are counted, since YAML aliases can repeat a tree many times over."""
    if not isinstance(values, Mapping):
        raise ValueError("it is empty" if values is None else f"it has a {type(values).__name__}, not keys with values")
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
    """Count the elements of nested lists and tables, up to ``most`` and one more."""
    count, waiting = 0, [value]
    while waiting and count <= most:
        one = waiting.pop()
        inside = one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        count += len(inside)
        waiting += inside
    return count


def _cells(text: str) -> str:
    """Code of a notebook's cells, as a script; commands of the notebook and of the shell do nothing."""
    try:
        code = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (KeyError, TypeError):
        raise UsageError("it is no notebook; expected JSON with cells") from None
    python = (one for one in code if not re.match(r"\s*%%(?!time|capture)", one))
    return re.sub(r"(?m)^([ \t]*)(?:%+[a-z]|!(?!=)|\?)(?:.*\\\n)*.*", r"\1pass", "\n".join(python))


def _printed(text: str, blocks: Sequence[str]) -> dict[str, Any]:
    """Arguments as a program last prints them into its log, with the vocabulary's size after padding."""
    several = len({*blocks}) > 1
    found: dict[str, Any] = {NOTES: [f"of {len(blocks)} runs in this log the last is read"]} if several else {}
    for name, value in re.findall(r"(?m)(\w+) \.{2,} ?(.*?)\s*$", blocks[-1]):
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = re.sub(r"^[A-Z]\w+\.", "", value)  # a member of an enumeration
    padded = re.findall(r"padded vocab .*\(new size: (\d+)\)", text)
    return found | ({"padded_vocab_size": int(padded[-1])} if padded else {})


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _document(text: str, name: str | None) -> str:
    """Return the text of the YAML document of this number; the whole text if it has one."""
    every = re.split(r"(?m)^---(?:[ \t].*)?$", text)
    parts = [one for one in every if re.search(r"(?m)^\s*[^#%\s]", one)]
    if len(parts) < 2:
        return parts[0] if parts and len(every) > 2 else text
    if name is None or not name.isdecimal() or not 0 < int(name) <= len(parts):
        raise UsageError(f"it has {len(parts)} documents; expected FILE.yaml:NUMBER, such as FILE.yaml:1")
    return parts[int(name) - 1]


def _like(text: str) -> str:
    """Return the syntax of a text without a file's name: that in which it has keys, else arguments."""
    for syntax, parse in _PARSERS.items() if not text.startswith("#!") and len(text) <= MOST_BYTES else ():
        with suppress(ValueError, RecursionError, UsageError):
            if isinstance(parse(text), Mapping):
                return syntax
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        ast.parse(text)
        return "python" if re.search(r"(?m)^(import|from) ", text) else "arguments"
    return "arguments"


@dataclass
class _References:
    """References between keys of one file. Unknown and circular ones stay in the text."""

    tree: Any
    _left: int = MOST_BYTES
    """Characters and keys by which all values together may still grow."""

    def resolved(self, value: Any, path: Sequence[str] = (), depth: int = 0) -> Any:
        """Return a value at a path of keys; a reference to a table stands for each of its keys."""
        if isinstance(value, Mapping):
            self._grow(len(value) * bool(depth))
            return {key: self.resolved(one, (*path, str(key)), depth) for key, one in value.items()}
        if isinstance(value, list):
            self._grow(len(value) * bool(depth))
            return [self.resolved(one, path, depth) for one in value]
        if not isinstance(value, str) or depth > _DEEPEST:
            return value
        if whole := _REFERENCE.fullmatch(value):
            return self._of(whole, path, depth)
        made = _REFERENCE.sub(lambda match: _as_text(self._of(match, path, depth)), value)
        self._grow(max(0, len(made) - len(value)))
        return self.resolved(made, path, depth + 1) if made != value else made

    def _grow(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"its references expand to more than {MOST_BYTES:,} characters and keys")

    def _of(self, match: re.Match[str], path: Sequence[str], depth: int) -> Any:
        """Return the value of a reference: one leading dot is the table that it is in, two the enclosing one."""
        names = re.sub(r"\[(\d+)\]", r".\1", match[2]).split(".")
        target, found = (*(path[: -len(match[1])] if match[1] else ()), *names), self.tree
        for name in target:
            keys = found if isinstance(found, Mapping) else {}
            if isinstance(found, list):
                keys = {str(at): one for at, one in enumerate(found)}
            if name not in keys:
                return match[0]
            found = keys[name]
        return self.resolved(found, target, depth + 1)


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _json(text: str) -> Any:
    """Parse JSON, or a dictionary as Python prints it into a log."""
    try:
        return json.loads(text)
    except ValueError:
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(text.strip())
        raise


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {"json": _json, "toml": tomllib.loads, "yaml": _yaml}
