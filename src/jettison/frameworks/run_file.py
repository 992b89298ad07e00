"""Run configured by a training framework's own file: a request, the keys it came from, and unread keys.

`README.md` of this folder has the sections of ``frameworks/NAME/read.toml``, which maps keys of a framework's files to
fields of a request; ``frameworks/NAME/read.py`` has a function ``read(keys)`` for keys without a table form.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

from jettison.core.documents import part
from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.families.config import parse_config
from jettison.families.presets import PRESETS, cached_config, is_hub_id, preset_named
from jettison.frameworks.config_file import ConfigFile, found_file, read_config_file, split_name
from jettison.frameworks.python_values import GIVEN, UnknownValue
from jettison.frameworks.shell_script import CONFIG, LAUNCHERS, NOTES, OF_LAUNCHERS, SOURCED
from jettison.models.spec_from_name import described_model
from jettison.predict.forecast import forecast
from jettison.request.options import CommonRequest, RunRequest
from jettison.request.resolve import flag_of, resolve
from jettison.spec import frameworks
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

_T = TypeVar("_T", int, float, str, bool)
_OFF: Final = ("", "none", "null", "false", "no", "off", "0", "0.0", "[]", "{}")
_FIELDS: Final = frozenset(f.name for f in fields(RunRequest))
COMPILES: Final = ("ledger", "estimate", "plan", "search")
"""Commands with a flag --compile."""
_SAID_OTHERWISE: Final = re.compile(r"the model is .*|.* \(the command line says another\)").fullmatch
UNKNOWN: Final = "unknown key"
LEFT_OPEN: Final = "the file does not set its value"
NOT_FOUND: Final = "not found in the script's folder"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a file, with its value. ``why``: the flag that it became, or the reason why it was not read."""

    name: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.name} = {_shown(self.value)}"


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """Run read from a framework's file.

    Args:
        framework: the folder under ``frameworks``.
        says: name of such a file in messages.
        model: a preset, a path or a Hub id that the file names; None if it describes its own model, or names none.
        config: the model that the file itself describes, in the form of a ``config.json``.
        request: of the run.
        compile: its layers are compiled.
        gpus: number of devices, if the file or the command line has it.
        global_batch: sequences in a step on all devices, likewise.
        used: keys that were read.
        unread: keys that change memory or time and were not read.
        ignored: names of keys that change neither.
        notes: further messages.
        writes: recomputation settings of such a file for `write_back`; ``written``: the file's name of a key.
        by_hand: settings to change by hand if there are none.
    """

    path: Path
    framework: str
    says: str
    model: str | None
    config: Mapping[str, Any] | None
    request: RunRequest
    compile: bool = False
    gpus: int | None = None
    global_batch: int | None = None
    used: tuple[Key, ...] = ()
    unread: tuple[Key, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    writes: tuple[Mapping[str, Any], ...] = ()
    by_hand: str = ""
    written: Callable[[str], str] = str

    @property
    def model_argument(self) -> str:
        """Model argument of the command line: the file itself if it describes its own model; a `UsageError` without."""
        if self.model is not None:
            return self.model
        if self.config is not None:
            return str(self.path)
        raise UsageError(f"{self.path} names no model; give it before --from: a preset, a config.json or a Hub id")

    def spec(self) -> ModelSpec:
        """Parse the model."""
        if self.model is None and self.config is not None:
            return parse_config(self.config, name=self.path.stem)
        return described_model(self.model_argument, self.request)

    def command(self, verb: str = "ledger", request: Any = None) -> str:
        """Return the equivalent command line; ``request``: the fields that the verb takes."""
        compiled = ["--compile"] if self.compile and verb in COMPILES else []
        said = flags_of(self.request if request is None else request)
        return shlex.join(["jettison", verb, self.model_argument, *said, *compiled])

    def in_keys(self, text: str) -> str:
        """Put the keys that became flags before the flags in a message."""
        for key in self.used:
            flag = next((one for one in key.why.split(", ") if one.startswith("--") and one in text), "")
            text = text.replace(flag, f"{key} ({flag})", 1) if flag and f"({flag})" not in text else text
        return text

    def document(self) -> dict[str, Any]:
        """Return the run as a JSON document."""
        used, unread = (
            [part("SourceKey", key=key.name, value=_shown(key.value), became=key.why) for key in keys]
            for keys in (self.used, self.unread)
        )
        return part("RunSource", self, path=str(self.path), command=self.command(), used=used, unread=unread)


def flags_of(request: CommonRequest) -> Iterator[str]:
    """Yield a request's command-line flags."""
    for name in request.given():
        value = getattr(request, name)
        yield flag_of(name) if value is not False else f"--no-{flag_of(name)[2:]}"
        if not isinstance(value, bool):
            yield str(value)


def _flags(name: str, value: Any) -> str:
    return " ".join(flags_of(RunRequest(**{name: value})))


def replaced(asked: Mapping[str, Any]) -> frozenset[str]:
    """Fields of a file that the command line overrides by related ones: recompute mode and module lists."""
    mode, modules = asked.get("recompute"), asked.get("recompute_modules")
    gone = {"recompute_modules"} if mode not in (None, "selective") and modules is None else set()
    return frozenset(gone | ({"recompute"} if modules is not None and mode is None else set()))


class Keys:
    """Keys of a file while they are read; access marks a key as read.

    Args:
        file: with the keys.
        asked: fields of a request from the command line, which override the file's.
        gpus: number of devices from the command line.
        asked_model: the model from the command line.
        table: the file's table of ``read.toml``.
    """

    def __init__(
        self,
        file: ConfigFile,
        *,
        asked: Mapping[str, Any] | None = None,
        gpus: int | None = None,
        asked_model: str | None = None,
        table: Mapping[str, Any] | None = None,
    ) -> None:
        table = {} if table is None else table
        self.file = file
        self.table = table
        self.asked_model = asked_model
        self.form = str(table.get("name", ""))
        self._written = {name: key for key in file.values if (name := _usual(key, table))}
        self.values = {**table.get("defaults", {}), **{name: file.values[key] for name, key in self._written.items()}}
        for key, words in table.get("values", {}).items():
            self.values |= words.get(str(self.values.get(key)).lower(), {})
        self._assumed = {*self.values} - {*self._written}
        self.asked = dict(asked or {})
        self.gpus = self.gpus_asked = gpus
        self.compile = False
        self.global_batch: int | None = None
        self.sequences_a_row = 1  # of those that are packed without padding
        self.model: str | None = None
        self.config: Mapping[str, Any] | None = None
        self.notes: list[str] = list(file.values.get(NOTES, ()))
        self._fields: dict[str, Any] = {}
        self._became: dict[str, list[str]] = {}
        self._refused: dict[str, str] = {}
        self._tables: list[tuple[str, Mapping[str, Any]]] = []
        self._asked_for: set[str] = set()

    # for readers ------------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether the file has this key, with a value other than null."""
        self._asked_for.add(key)
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key and mark it as read; the default if it is missing or null."""
        if key in self.values:
            self._became.setdefault(key, [])
        self._asked_for.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number; raise a `UsageError` for other values."""
        return self._as(int, key, default, "a whole number")

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a number; raise a `UsageError` for other values."""
        return self._as(float, key, default, "a number")

    def text(self, key: str, default: str = "") -> str:
        """Return a value as text in lower case."""
        self._unset(key)
        return str(self.get(key, default)).strip().lower()

    def listed(self, key: str) -> list[Any]:
        """Return a list, or comma-separated text as one; empty without the key; a `UsageError` for other values."""
        value = self.get(key, [])
        if isinstance(value, str):
            return [part for one in value.strip("[] ").split(",") if (part := one.strip(" \"'"))]
        if not isinstance(value, list):
            raise self.error(f"got {self.written(key)} = {_shown(value)}; expected a list")
        return value

    def on(self, key: str, default: bool = False) -> bool:
        """Whether the option is on. A flag without a value is, and so is ``true`` as text."""
        self._unset(key)
        value = self.get(key, default)
        return value if isinstance(value, bool) else not _off(value)

    def give(self, name: str, value: Any, *keys: str) -> None:
        """Set a field of the request, unless the command line sets it; ``keys``: its sources."""
        if name not in _FIELDS:
            raise AssertionError(f"{name} is no field of a request")
        if value is None:
            return
        self._fields[name] = value
        for key in keys:
            if key in self.values:
                said = _flags(name, value)
                earlier = self._became.setdefault(key, [])
                earlier[:] = [one for one in earlier if not one.startswith(f"{flag_of(name)} ")]
                other = self.asked.get(name) not in (None, value) or name in replaced(self.asked)
                earlier.append(f"{said} (the command line says another)" if other else said)

    def error(self, text: str) -> UsageError:
        """Return an error about the file."""
        return UsageError(f"{self.file.path}: {text}")

    def note(self, text: str) -> None:
        """Add a message, once."""
        if text not in self.notes:
            self.notes.append(text)

    def drop(self, name: str) -> None:
        """Remove a field, and its flag from the keys that it came from."""
        value = self._fields.pop(name, None)
        said = "" if value is None else _flags(name, value)
        for became in self._became.values():
            became[:] = [one for one in became if one != said]

    def said(self, name: str) -> Any:
        """Return the file's value of a field, regardless of the command line; None if it sets none."""
        return self._fields.get(name)

    def field(self, name: str, default: Any = None) -> Any:
        """Return the value of a field: the command line's, else the file's, else the default."""
        found = self.asked.get(name)
        found = self._fields.get(name) if found is None else found
        return default if found is None else found

    def read(self, *keys: str, why: str = "") -> None:
        """Mark keys as read that set no field, such as a model's sizes."""
        for key in keys:
            if key in self.values:
                found = self._became.setdefault(key, [])
                if why:
                    found.append(why)

    def refuse(self, key: str, why: str, *, implied: bool = False) -> None:
        """Refuse a key that changes memory or time and is not read; ``implied``: the file need not have it."""
        self.values |= {} if not implied or key in self.values else {key: True}
        if key in self.values:
            unknown = isinstance(value := self.values[key], UnknownValue)
            self._refused[key] = _open_reference(value) if unknown else why

    def _left_open(self, key: str) -> None:
        """Refuse an unset variable of a script; readers handle "auto" themselves."""
        if self.has(key) and self.values[key] != "auto":
            self.refuse(key, LEFT_OPEN)

    def _unset(self, key: str) -> None:
        """Refuse an unset variable of a script as text; numbers of devices have messages of their own."""
        if (
            str(self.values.get(key)).startswith("$")
            and not key.startswith("$")
            and not re.fullmatch(OF_LAUNCHERS, key)
        ):
            self._left_open(key)

    def take_model(self, sizes: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
        """Set the model by its sizes in the form of a config.json, over the preset ``like``; return all sizes."""
        like = sizes.get("like")
        own = {name: value for name, value in sizes.items() if name != "like"}
        config = {**(PRESETS[like] if like is not None else {}), **own}
        if own:
            self.config = config
        else:
            self.model = like
        self.read(*keys, why="the model" if own else str(like))
        return config

    def matching(self, *globs: str) -> Iterator[str]:
        """Names of keys that match one of these patterns, in the file's order."""
        return iter([key for key in self.values if any(fnmatchcase(key, glob) for glob in globs)])

    def some(self, *globs: str) -> bool:
        """Whether any key matches one of these patterns."""
        return any(self.matching(*globs))

    def under(self, name: str, prefix: str, file: ConfigFile | None = None) -> None:
        """Read keys under a prefix, with those of a further file, by another framework's reader."""
        if file is not None:
            self.values = {**{f"{prefix}{key}": value for key, value in file.values.items()}, **self.values}
        table = next((one for _, one in self._tables if one["framework"] == name), None) or table_of(name)
        first = all(before != prefix for before, _ in self._tables)
        self.by_table(table, prefix)
        if first:
            _reader(name)(self, prefix)

    def named(self, key: str) -> ConfigFile | None:
        """Return the file that this key names, relative to the working directory or this file's folders; or None."""
        found = found_file(self.file.path.parent, self.get(key))
        return None if found is None else read_config_file(found)

    def share(self, *axes: str) -> int:
        """Return the number of devices over the product of these axes; a `UsageError` if they do not divide it."""
        if self.gpus == 0:
            return 1
        sizes = {axis: self.field(axis, 1) for axis in axes}
        for axis, size in sizes.items():
            if size < 1:
                raise self.error(f"got {axis} {size}; expected 1 or more")
        product = prod(sizes.values())
        if (replicas := self.asked.get("dp")) is not None:
            if self.gpus_asked and self.gpus_asked != replicas * product:
                raise UsageError(f"got {self.gpus_asked} GPUs and {replicas * product} ranks of --dp; give one of them")
            self.gpus = replicas * product
        if self.gpus is None:
            such = f"give --gpus, such as --gpus {product * -(-8 // product)}"
            raise UsageError(f"{self.file.path} does not say on how many GPUs it runs; {such}")
        if self.gpus % product:
            said = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
            raise UsageError(f"got {self.gpus} GPUs for {self.file.path}; expected a multiple of {product} ({said})")
        return self.gpus // product

    def repeats(self, key: str, each: int, default: int | None = None) -> int:
        """Return the micro-batches of a step on each data-parallel rank; a `UsageError` if its sequences do not divide.

        Args:
            key: of the sequences of a step on all ranks; without it ``default``. ``each``: those of a micro-batch.
        """
        ranks = self.field("dp", 1)
        self.global_batch = total = self.whole(key) or default or each * ranks
        if each < 1 or total % (each * ranks):
            said = f"{self.written(key)} = {total}, which is no multiple of {each} sequences x {ranks} replicas"
            raise self.error(f"got {said}; give the run's --gpus")
        return total // (each * ranks)

    def shards(self, replicas: str, shards: str, *axes: str) -> tuple[int, int]:
        """Return the number of replicas, and of ranks that share one, by their keys: -1 is as many as there are."""
        copies, each = (self.whole(key, default) or 1 for key, default in ((replicas, 1), (shards, -1)))
        if each == -1:
            over = self.share(*axes)
            if over % copies:
                raise self.error(f"got {self.written(replicas)} = {copies}; expected a divisor of the {over} ranks")
            each = over // copies
        return copies, each

    # tables -----------------------------------------------------------------------------------------------------------

    def by_table(self, table: Mapping[str, Any], prefix: str = "") -> None:
        """Read keys under a prefix by a table of ``read.toml``."""
        self._tables.append((prefix, table))
        typed: Mapping[type, Callable[[str], Any]] = {int: self.whole, float: self.number, bool: self.on}
        for own, name in table.get("keys", {}).items():
            key = f"{prefix}{own}"
            if not self.has(key):
                continue
            if _variable(self.values[key]):
                if name in self.asked:
                    self.read(key, why="the command line says it")
                else:
                    self._left_open(key)
                continue
            value = typed.get(_KINDS[name], self.get)(key)
            value = ",".join(map(str, value)) if isinstance(value, list) else value
            before = self._fields.get(name)
            if before not in (None, value, table.get("usual", {}).get(name)) and name not in self.asked:
                said = f"{self.written(key)} = {_shown(value)} is counted, and another key says {_flags(name, before)}"
                self.note(f"{said}: they contradict")
            self.give(name, value, key)
        for own, words in table.get("words", {}).items():
            if self.has(f"{prefix}{own}"):
                self.word(f"{prefix}{own}", words)
        for name, owns in table.get("first", {}).items():
            if key := next(filter(self.whole, filter(self.has, owns)), ""):
                self.give(name, self.whole(key), key)
        for own, given in table.get("on", {}).items():
            for key in filter(self.on, [*self.matching(f"{prefix}{own}")]):
                self._take(key, given, self.written(key))
        for name, value in table.get("usual", {}).items():
            if self.field(name) is None:
                self.give(name, value)
        self.read(*self.matching(*(f"{prefix}{glob}" for glob in table.get("read", ()))))
        for key in filter(self.on, [*self.matching(*(f"{prefix}{own}" for own in table.get("compiles", ())))]):
            self.compiles(key)
        for key in reversed([key for key in table.get("names", ()) if self.has(key)]):
            value, asked = self.values[key], self.asked_model
            unset = isinstance(value, UnknownValue) or str(value).startswith("$")
            if not unset and not (asked and _open_reference(value)):
                self.model = str(self.get(key)) or None
                self.read(key, why=str(self.model))
            elif asked is not None or not isinstance(value, UnknownValue):
                self.read(key, why="" if asked is None else f"the model is {asked}")

    def compiles(self, *keys: str) -> None:
        """Compile the layers, by these keys."""
        self.compile = True
        self.read(*keys, why="--compile")

    def word(self, key: str, words: Mapping[str, Any]) -> None:
        """Set the fields of a key's value."""
        text, known = self.text(key), {word: said for word, said in words.items() if word != "why"}
        found = known.get(text, next((said for glob, said in known.items() if fnmatchcase(text, glob)), None))
        if found is None:
            found = str(words.get("why", f"expected one of {', '.join(known)}")).replace("{}", text)
        self._take(key, found, f"{self.written(key).lstrip('$ ')} = {text}")

    def _take(self, key: str, given: Mapping[str, Any] | str, said: str) -> None:
        """Set the fields of a key's value, or refuse it for a reason; ``said``: the key, for a note."""
        if isinstance(given, str):
            self.refuse(key, given)
            return
        for name, value in given.items():
            if name == "note":
                self.note(f"{said}: {value}")
            else:
                self.give(name, value, key)

    def left(self) -> tuple[tuple[Key, ...], tuple[str, ...]]:
        """Return unread keys that change memory or time, and the names of those that do not."""
        ignored: list[str] = []
        unread = [Key(name="source", value=name, why=NOT_FOUND) for name in self.file.values.get(SOURCED, ())]
        for key, value in self.values.items():
            why, became = self._refused.get(key), self._became.get(key)
            otherwise = bool(became) and all(map(_SAID_OTHERWISE, became or ()))
            if self.file.syntax in ("yaml", "python script") and (
                why == LEFT_OPEN or (why is None and became is not None and not otherwise)
            ):
                why = _open_reference(value) or why
            if why is None and (key in self._became or key in self._assumed):
                continue
            if isinstance(value, UnknownValue) and all(map(_SAID_OTHERWISE, self._became.get(key) or [""])):
                continue
            if why is None and (key.startswith("$") or _off(value)):
                ignored.append(key)
                continue
            why = why or self._in_tables(key)
            if why == "":
                ignored.append(key)
                continue
            given = re.search(r"\bgive (--[a-z-]+)", why or "")
            if given and any(flag_of(name) == given[1] for name in self.asked):
                self._refused.pop(key, None)
                self.read(key, why="the command line says it")
                continue
            why = why or _open_reference(value) or self._unknown(key)
            unread.append(Key(name=self.written(key).lstrip("$ "), value=value, why=why))
        return tuple(unread), tuple(self.written(name) for name in ignored if not name.startswith("$"))

    def _unknown(self, key: str) -> str:
        from difflib import get_close_matches  # on use: the command line's start stays fast

        known = self._asked_for.union(self.table.get("renames", ()), *(t.get("ignored", ()) for _, t in self._tables))
        close = get_close_matches(re.sub(r"\W", "_", key.lower()), known - {*self.values}, n=1, cutoff=0.8)
        return f"{UNKNOWN}: is it {close[0]}?" if close else UNKNOWN

    def _in_tables(self, key: str) -> str | None:
        """Return why the first table that has a key refuses it, empty if it is ignored; None without such a table."""
        for prefix, table in self._tables:
            own = key[len(prefix) :] if key.startswith(prefix) else None
            for one in (table, *table.get("others", ())) if own is not None else ():
                for glob, why in (*one.get("refused", {}).items(), *((glob, "") for glob in one.get("ignored", ()))):
                    if fnmatchcase(str(own), glob):
                        return str(why)
        return None

    def written(self, key: str) -> str:
        """Return the file's spelling of a key, for a missing one in the style of its other keys."""
        if key in self._written or not self._written:
            return self._written.get(key, key)
        section, _, own = key.rpartition(".")
        items = self._written.items()
        usual, there = next((pair for pair in items if pair[0].rpartition(".")[0] == section), next(iter(items)))
        if section:
            usual, key = usual.rpartition(".")[2], own
        dashed = any("-" in name[len(name) - len(one) :] for one, name in self._written.items())
        prefix = there[: -len(usual)] if there.replace("-", "_").endswith(usual) else ""
        return prefix + (key.replace("_", "-") if dashed and "." not in there else key)

    def used(self) -> tuple[Key, ...]:
        """Keys that were read."""
        return tuple(
            Key(name=self.written(key).lstrip("$ "), value=self.values[key], why=", ".join(dict.fromkeys(became)))
            for key, became in self._became.items()
            if key not in self._refused and key not in self._assumed
        )

    def request(self, like: str | None) -> RunRequest:
        """Make the request: fields of the file, overridden by the command line's."""
        gone = replaced(self.asked)
        own = {name: value for name, value in self._fields.items() if name not in gone}
        return RunRequest(
            **{"like": like, **own, **{name: value for name, value in self.asked.items() if value is not None}}
        )

    def _as(self, kind: type[_T], key: str, default: _T | None, expected: str) -> _T | None:
        value = self.get(key)
        if value is None or _variable(value):
            self._left_open(key)
            return default
        try:
            number = float(value)
            found = kind(number)
            if isinstance(value, bool) or found != number:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise self.error(f"got {self.written(key)} = {_shown(value)}; expected {expected}") from None
        return found


def read_run(
    *paths: Path | str,
    model: str | None = None,
    gpus: int | None = None,
    asked: Mapping[str, Any] | None = None,
    allow_unread: bool = False,
    text: str | None = None,
) -> RunFile:
    """Read a run from a framework's own files. Raise `UsageError` for no such file, an unknown framework, or unread
    keys that change memory or time.

    Args:
        paths: the main file and further ones, such as DeepSpeed's JSON and accelerate's YAML.
        model: model to train, if the files name none or another one.
        gpus: number of devices, if the files have none; 0 to read only the model.
        asked: fields of a `RunRequest` that override the files'.
        allow_unread: continue if keys that change memory or time cannot be read.
        text: replaces the first file's contents.
    """
    main, *further = map(Path, paths)
    files = [read_config_file(main, text, further[0] if len(further) == 1 else None), *map(read_config_file, further)]
    if any(note.startswith(GIVEN) for note in files[0].values.get(NOTES, ())):
        del files[1:]
    script, files[0] = files[0], _started(files[0])
    if script is not files[0] and gpus is None:
        each, nodes = launched(script.values)
        said = str(script.values.get("num_processes"))
        gpus = int(said) if said.isdecimal() else (each or 0) * (1 if nodes == 0 else nodes or 0) or None
    first, *others = sorted(files, key=lambda file: int((_table(file) or {"order": 100}).get("order", 50)))
    table = _table(first)
    if table is None:
        raise UsageError(f"got --from {first.path}, {_why_unknown(first)}")
    name = table["framework"]
    keys = Keys(first, asked=asked, gpus=gpus, asked_model=model, table=table)
    keys.by_table(table)
    if CONFIG in first.values and found_file(first.path.parent, first.values[CONFIG]) is None:
        keys.refuse(CONFIG, "file not found, whose keys count as well: give it as --from, and flags for the script's")
    prefixes = table.get("given_with", {})
    for other in others:
        kind = _table(other) or {"framework": "", "says": "no framework's file"}
        if kind["framework"] not in prefixes:
            raise UsageError(f"got --from {other.path}, {kind['says']}, with {first.path}; give one of them")
        keys.under(kind["framework"], prefixes[kind["framework"]], other)
    _reader(*table.get("reader", name).split(":"))(keys)
    quantized = re.search(r"(?i)\b(awq|gptq|[48]-?bit|int[48]|fp8)\b", str(keys.model)) if model in PRESETS else None
    if quantized and keys.field("base") in (None, "fp32"):
        named = next(filter(keys.has, table.get("names", ())), "names")
        keys.refuse(named, f"weights of a checkpoint in {quantized[0]} are quantized: give its config.json, or --base")
    if keys.field("seq") is None and gpus != 0:
        keys.note("it has no sequence length: give --seq, such as --seq 2048")
    if keys.field("micro_batch") is None and gpus != 0:
        keys.note("it has no micro-batch size, and one sequence is counted: give --micro-batch")
    unread, ignored = keys.left()
    if unread and not allow_unread:
        raise keys.error(f"{_unread_keys(unread)}. Give --allow-unread to continue without")
    writable = script in (first, *others) and first.path.suffix != ".ipynb"
    found = RunFile(
        path=first.path,
        framework=name,
        says=table["says"],
        model=_settled(model or keys.model, keys),
        config=None if model else keys.config,
        request=keys.request(table.get("like")),
        compile=keys.compile,
        gpus=keys.gpus,
        global_batch=keys.global_batch or prod(keys.field(name, 1) for name in ("micro_batch", "micro_batches", "dp")),
        used=keys.used(),
        unread=unread,
        ignored=ignored,
        notes=tuple(keys.notes),
        writes=tuple(table.get("writes", ())) if writable else (),
        by_hand=table.get("by_hand", "") if writable else f"give {first.path} alone as --from, a notebook as a script",
        written=keys.written,
    )
    if found.request.base == "fp32" and "base" not in keys.asked:  # the dtype of a checkpoint that is not quantized
        with suppress(UsageError):
            return replace(found, request=replace(found.request, base=None)) if found.spec().base else found
    return found


def _why_unknown(file: ConfigFile) -> str:
    """Return why no framework reads this file, and what was expected."""
    why = f"which has no key of a known framework; expected {', '.join({table['says']: 0 for table in tables()})}"
    if {"model_type", "architectures"} & {*file.values}:
        why = f"which has a model and no run; expected it as MODEL: jettison ledger {file.path} --seq 4096"
    named = str(file.values.get("config", file.values.get(CONFIG, "$")))
    if file.syntax == "arguments" and "$" not in named and found_file(file.path.parent, named) is None:
        why = f"which names the configuration {named}, a file that is not here; expected --from with that file"
    if alike := next((one for one in tables() if _fits(replace(file, syntax=one["syntaxes"][0]), one)), None):
        expected = ", ".join(alike["syntaxes"])
        why = f"{alike['says']} in {file.syntax}; expected {expected}: write them so, or as flags"
    return why


def _unread_keys(unread: Sequence[Key]) -> str:
    """Say how many keys were not read, and the first eight of them with the reason."""
    listed = "; ".join(f"{key} ({key.why})" for key in unread[:8])
    more = f"; and {len(unread) - 8} more" if len(unread) > 8 else ""
    keys_are = ("key", "is") if len(unread) == 1 else ("keys", "are")
    return f"{len(unread)} {keys_are[0]} that may change memory or time {keys_are[1]} not read: {listed}{more}"


def run_from(
    path: Path | str,
    *others: Path | str,
    model: str | None = None,
    gpus: int | None = None,
    allow_unread: bool = False,
    **flags: Any,
) -> Run:
    """Read the run of a training framework's own file, for `forecast` and `estimate`.

    Layers that the file compiles are compiled, if the formulas cover them.

    Args:
        path: torchtitan's TOML, Megatron-LM's arguments, a Trainer's JSON or YAML, and so on.
        others: further files of the same run, such as DeepSpeed's JSON.
        model: model to train, if the file names none.
        gpus: number of devices, if the file has none.
        allow_unread: continue if keys that change memory or time cannot be read.
        flags: fields of a `RunRequest` that override the file's.

    Raises:
        UsageError: see `read_run`.
    """
    found = read_run(path, *others, model=model, gpus=gpus, asked=flags, allow_unread=allow_unread)
    run = resolve(found.spec(), found.request).run
    if not found.compile:
        return run
    try:
        compiled = replace(run, compiled=True)
        forecast(compiled)
    except UsageError:
        return run
    return compiled


@cache
def tables() -> Sequence[Mapping[str, Any]]:
    """Load the tables of all ``read.toml``, form by form, in the order of matching."""
    found: list[dict[str, Any]] = []
    for framework, table in frameworks.read_tables().items():
        common: dict[str, Any] = {"framework": framework, **table}
        found += [_with(common, form) for form in common.pop("forms", [{}])]
    for table in found:
        for key, words in table.get("words", {}).items():
            if isinstance(other := words.get("like"), str):
                name, _, theirs = other.partition(":")
                known = next(one["words"][theirs] for one in found if one["framework"] == name)
                table["words"][key] = {**known, **{word: said for word, said in words.items() if word != "like"}}
        table["others"] = [one for one in found if one["framework"] in table.get("others", ())]
        unset, lacks = table.get("unset", {}), table.get("lacks", ())
        table["writes"] = [
            {**row, "set": {**{key: unset[key] for key in row.get("remove", ()) if key in unset}, **row["set"]}}
            for row in table.get("writes", ())
            if not {*row["set"]}.intersection(lacks)
        ]
    return sorted(found, key=lambda table: int(table.get("order", 50)))


def table_of(framework: str) -> Mapping[str, Any]:
    """Return a framework's first table."""
    return next(one for one in tables() if one["framework"] == framework)


@cache
def models(framework: str) -> Mapping[str, Mapping[str, Any]]:
    """Load a framework's ``models.toml``: sizes of the models that its files name."""
    return read_table(frameworks.FOLDER / framework / "models.toml")


def launched(values: Mapping[str, Any]) -> Iterator[int | None]:
    """Yield the GPUs of a node and the nodes of a launcher's arguments; 0 if they do not say, None for no number."""
    for names in (LAUNCHERS["each_node"], LAUNCHERS["nodes"]):
        said = next((str(values[key]) for key in names if values.get(key) is not None), "0")
        yield int(said) if said.isdecimal() else None


def _started(script: ConfigFile) -> ConfigFile:
    """Return the framework's file that a script's command starts, with the command's arguments over its keys; without
    such a file the script."""
    folder, values = script.path.parent, script.values
    if script.syntax != "arguments":
        return script
    own = {key: value for key, value in values.items() if not key.startswith("$")}
    companions = {name for table in tables() for name in table.get("given_with", ())}
    names = [values.get(CONFIG), *(own.values() if _table(script) is None else ())]
    for path in filter(None, (found_file(folder, name) for name in names)):
        with suppress(UsageError):
            kind = _table(file := read_config_file(path))
            if kind is not None and kind["framework"] not in companions:
                launchers = re.compile(rf"(?!config.file)(?:{OF_LAUNCHERS})")  # accelerate's is one of the run
                own = {key: one for key, one in own.items() if found_file(folder, one) != path}
                own = {key.replace("-", "_"): one for key, one in own.items() if not launchers.fullmatch(key)}
                said = f"{path}, which the script starts, is read; its arguments count: {', '.join(own) or 'none'}"
                return replace(file, values={**file.values, **own, NOTES: [*values.get(NOTES, ()), said]})
    return script


def _reader(name: str, function: str = "read") -> Callable[..., None]:
    """Return a framework's ``read``; without one, a function that does nothing."""
    if find_spec(f"jettison.frameworks.{name}.read") is None:
        return lambda *_: None
    return getattr(import_module(f"jettison.frameworks.{name}.read"), function)


def _with(common: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the sections for all forms with those of one form."""
    merged = dict(common)
    for key, value in form.items():
        before = merged.get(key)
        if isinstance(before, Mapping):
            merged[key] = {**value, **{one: before[one] for one in before if one not in value}}
        else:
            merged[key] = [*value, *before] if before and key in ("ignored", "read", "prefixes") else value
    return merged


def is_run_file(model: str) -> bool:
    """Whether this is a framework's file and not a model's ``config.json``."""
    if not split_name(Path(model))[0].is_file():
        return False
    file = read_config_file(Path(model))
    return "model_type" not in file.values and _table(file) is not None


def _table(file: ConfigFile) -> Mapping[str, Any] | None:
    return next((table for table in tables() if _fits(file, table)), None)


def _usual(key: str, table: Mapping[str, Any]) -> str:
    """Return our name of a key: without prefix, and renamed; empty for a call that the table does not have."""
    call, inside, argument = key.partition("().")
    if inside:
        prefix = next((found for glob, found in table.get("calls", {}).items() if fnmatchcase(call, glob)), None)
        key = "" if prefix is None else prefix + argument
    key = next((key[len(prefix) :] for prefix in table.get("prefixes", ()) if key.startswith(prefix)), key)
    key = key.replace("-", "_") if table.get("underscores") else key
    return str(table.get("renames", {}).get(key, key))


def _fits(file: ConfigFile, table: Mapping[str, Any]) -> bool:
    def there(glob: str) -> bool:
        return any(fnmatchcase(key, glob) or fnmatchcase(_usual(key, table), glob) for key in file.values)

    return (
        file.syntax in table["syntaxes"]
        and all(map(there, table.get("all", ())))
        and any(map(there, table.get("any", ("*",))))
    )


def _settled(model: str | None, keys: Keys) -> str | None:
    """Resolve a model's name: a folder next to the file, a preset of the same model, or the name itself."""
    if model is None or model in PRESETS:
        return model
    if max(len(part.encode()) for part in model.split("/")) > 255 or "\0" in model:
        raise UsageError(f"{keys.file.path} names the model {_shown(model)}; expected a preset, a path or a Hub id")
    folder = keys.file.path.parent / model
    if Path(model).exists():
        return model
    if str(keys.field("base", "")).startswith("nf4"):  # a checkpoint that is quantized so already
        endings = [one for table in frameworks.read_tables().values() for one in table.get("quantized", {}).items()]
        for ending, note in endings:
            if model.endswith(ending):
                model = model.removesuffix(ending)
                if note:
                    keys.note(note)
    if (folder / "config.json").is_file():
        return str(folder)
    found = preset_named(model)
    if found is None or (is_hub_id(model) and cached_config(model) is not None):
        return model
    keys.note(f"{model} is counted as the preset {found}, which has its sizes; give its config.json for another")
    return found


_BY_NAME: Final = {"int": int, "Tokens": int, "float": float, "bool": bool}
_KINDS: Final = {
    f.name: next((kind for name, kind in _BY_NAME.items() if name in str(f.type)), str) for f in fields(RunRequest)
}


def _off(value: Any) -> bool:
    return value is None or value is False or str(value).strip().lower() in _OFF


def _variable(value: Any) -> bool:
    """Whether the value is an unset shell variable, or "auto", which another program fills in."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, str) and (first.startswith("$") or value == "auto" or isinstance(first, UnknownValue))


def _open_reference(value: Any) -> str:
    """Reason why a value, or a reference in it, is unknown; empty if it is known."""
    if isinstance(value, UnknownValue):
        return f"line {value.line}: its value is not a literal"
    match = re.search(r"\$\{(?:([\w.]+):)?([^{}]*)\}", str(value)) if isinstance(value, str | list) else None
    if match is None:
        return ""
    return f"unknown resolver {match[1]}" if match[1] else f"the file has no key {match[2]}"


def _shown(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
