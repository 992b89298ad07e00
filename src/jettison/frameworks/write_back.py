"""A framework's own file with the settings of recomputation that a plan comes nearest to, all else as it was.

``[[writes]]`` of ``frameworks/NAME/read.toml`` are the settings that a file can say: fields of a request
(``recompute``, ``offload``, ``recompute_modules``, ``offload_modules``), ``set``, keys of the file with their values,
and ``remove``, keys that must not be there (in Python: None). A row counts where the file has all keys of ``if`` and
none of ``unless``. ``{k}`` in a text stands for each number of layers from 2 on; ``"{k:d}"`` is that number itself,
``"{=key}"`` the file's value of another key. A table without such rows says in ``by_hand`` what to set instead. Of
the settings that fit the fastest is written; of those within one per cent of it the file's own, else the one that
leaves most memory. The text is changed at these keys alone, and then read again: it must say what was chosen.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import DoesNotFit, UsageError
from jettison.core.units import format_bytes, format_seconds
from jettison.frameworks.config_file import ConfigFile, read_config_file, split_name
from jettison.frameworks.python_values import configurations
from jettison.frameworks.run_file import RunFile, flags_of, read_run
from jettison.frameworks.shell_script import OF_LAUNCHERS
from jettison.predict.allowance import Limit
from jettison.predict.auto_recompute import AutoForecast
from jettison.predict.forecast import forecast
from jettison.predict.ranges import FitVerdict, figures
from jettison.predict.run_fields import DECIDED, RunRequest
from jettison.predict.run_request import resolve
from jettison.predict.time import estimate
from jettison.spec.anchor import RunAnchor
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

ALIKE: Final = 0.01
"""Share of a step's time within which settings count as equally fast."""


@dataclass(frozen=True, kw_only=True)
class WrittenBack:
    """A file's new text.

    Args:
        words: the settings, as a command line of ours has them.
        changed: the file's keys with their new values; None: the key is gone.
        peak_bytes, step_seconds: of the run so written.
        plan_peak_bytes, plan_step_seconds: of the plan.
        tried: how many settings the file could say.
        verdict: whether the run so written fits what was planned for.
    """

    text: str
    words: str
    changed: Mapping[str, Any]
    peak_bytes: int
    step_seconds: float
    plan_peak_bytes: int
    plan_step_seconds: float
    tried: int
    verdict: FitVerdict

    def lines(self) -> Iterator[str]:
        """Report the keys that were written and what that loses against the plan."""
        said = ", ".join(f"{key} = {'(removed)' if value is None else value}" for key, value in self.changed.items())
        yield f"{said or 'nothing had to change'}: {self.words}, the fastest that fits of {self.tried} settings"
        lost = max(0.0, self.step_seconds - self.plan_step_seconds)
        peaks = f"peak {format_bytes(self.peak_bytes)}, in the plan {format_bytes(self.plan_peak_bytes)}"
        yield f"lost beside the plan: {format_seconds(lost)} a step ({lost / self.plan_step_seconds:.1%}); {peaks}"
        if self.verdict is not FitVerdict.FITS:
            yield f"note: whether the run so written fits is {self.verdict}; a smaller --budget is surer"


def write_back(
    found: RunFile, choice: AutoForecast, *, limit: Limit | None = None, beside: tuple[Path, ...] = ()
) -> WrittenBack:
    """The file's text under the fastest settings of recomputation that it can say and that fit the plan's budget.

    Args:
        found: the file, as it was read.
        choice: the plan.
        limit: what it was made for.
        beside: other files of the run.

    Raises:
        UsageError: the framework's file has no such settings, or the text cannot be changed at these keys.
        DoesNotFit: none of them fits the budget.
    """
    file = read_config_file(found.path)
    values = {key: file.values[said] for key in _keys_of(found.writes) if (said := found.written(key)) in file.values}
    rows = [row for row in found.writes if _counts(row, values)]
    if not rows:
        other = found.by_hand or "jettison export may"
        raise UsageError(f"{found.says} has no settings of recomputation that can be written back; {other}")
    spec = found.spec()
    base = replace(found.request, **dict.fromkeys(DECIDED))
    rows = [{**row, "set": {key: _copied(value, values) for key, value in row["set"].items()}} for row in rows]
    tried = list(_tried(rows, spec, base, choice.forecast.run.anchor, compiled=found.compile))
    if not tried:
        raise UsageError(f"none of the settings that {found.says} has can be described for {spec.name}")
    peaks = [forecast(run).peak_bytes for run, *_ in tried]
    bounds = (choice.budget_bytes, choice.budget_bytes if limit is None else limit.nbytes)
    fits = ([one for one, peak in zip(tried, peaks, strict=True) if peak <= bound] for bound in bounds)
    fitting = next(filter(None, fits), [])
    if not fitting:
        raise DoesNotFit(
            peak_bytes=min(peaks),
            limit_bytes=bounds[-1],
            limit_name="the plan's budget",
            advice=f"the least of the {len(tried)} settings that {found.says} has; jettison export has other ways",
        )
    seconds = [estimate(run, choice.hardware).step_seconds for run, *_ in fitting]
    changes = [_changes(found, file, keys) if _unlike(found.request, own) else {} for _, own, keys in fitting]
    alike = [at for at, took in enumerate(seconds) if took <= (1 + ALIKE) * min(seconds)]
    sends = [bool(request.offload) for _, request, _ in fitting]
    best = min(alike, key=lambda at: (bool(changes[at]), sends[at], forecast(fitting[at][0]).peak_bytes))
    run, request, _ = fitting[best]
    peak = forecast(run).peak_bytes
    changed = changes[best]
    text = edited(file, changed)
    _check(text, found, request, beside, changed)
    return WrittenBack(
        text=text,
        words=_words(request),
        changed=changed,
        peak_bytes=peak,
        step_seconds=seconds[best],
        plan_peak_bytes=choice.forecast.peak_bytes,
        plan_step_seconds=choice.step_seconds,
        tried=len(tried),
        verdict=figures(run, peak, hardware=choice.hardware.name).verdict(
            usable_bytes=None if limit is None else limit.device_bytes,
            budget_bytes=None if limit is None else limit.budget_bytes,
        ),
    )


def _changes(found: RunFile, file: ConfigFile, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of settings that the file does not have so, by the names that it has for them."""
    named = {found.written(key): value for key, value in keys.items()}
    return {key: value for key, value in named.items() if not _same(file, key, value)}


def _keys_of(rows: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Keys that rows ask for."""
    return frozenset(key for row in rows for section in ("if", "unless") for key in row.get(section, ()))


def _counts(row: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(key in values for key in row.get("if", ())) and not any(key in values for key in row.get("unless", ()))


def _copied(value: Any, values: Mapping[str, Any]) -> Any:
    """A value, or that of the key that it names."""
    return values[value[2:-1]] if isinstance(value, str) and value.startswith("{=") else value


def _same(file: ConfigFile, key: str, value: Any) -> bool:
    """Does the file say this already?"""
    if file.syntax != "python":
        return bool(file.values.get(key) == value)
    said = str(file.values.get(key))
    return key in file.values and (file.values[key] == value or str(value).endswith(f".{said}()"))


def _tried(
    rows: Sequence[Mapping[str, Any]], spec: ModelSpec, base: RunRequest, anchor: RunAnchor | None, *, compiled: bool
) -> Iterator[tuple[Run, RunRequest, Mapping[str, Any]]]:
    """Settings that can be described, with the file's keys; the plan's device is as its anchor has it already."""
    for row in rows:
        numbers = range(2, spec.depth + 1) if "{k" in json.dumps(row) else (0,)
        for k in numbers:
            fields = {name: _filled(value, k) for name, value in row.items() if name in DECIDED}
            keys = {key: _filled(value, k) for key, value in row["set"].items()} | dict.fromkeys(row.get("remove", ()))
            request = replace(base, **fields)
            try:
                run = resolve(spec, request).run
                run = replace(run, compiled=compiled or run.compiled, anchor=anchor)
                forecast(run)
            except UsageError:
                continue
            yield run, request, keys


def _filled(value: Any, k: int) -> Any:
    if value == "{k:d}":
        return k
    return value.replace("{k}", str(k)) if isinstance(value, str) else value


def _words(request: RunRequest) -> str:
    return " ".join(flags_of(RunRequest(**{name: getattr(request, name) for name in DECIDED}))) or "--recompute none"


def _check(
    text: str, found: RunFile, request: RunRequest, beside: tuple[Path, ...], changed: Mapping[str, Any]
) -> None:
    """Read the new text again: it must say what was chosen, and all else as before.

    Raises:
        UsageError: it does not.
    """
    if other := _other_key(found.path, text, changed):
        raise UsageError(f"{found.path} would say something else of {other}: change it by hand")
    again = read_run(
        found.path,
        *beside,
        model=found.model_argument,
        gpus=found.gpus,
        allow_unread=True,
        asked=_undecided(request),
        text=text,
    )
    if other := _unlike(again.request, request):
        said, wanted = getattr(again.request, other), getattr(request, other)
        raise UsageError(f"{found.path} would say {other} = {said}, not {wanted}: change it by hand")


def _unlike(one: RunRequest, other: RunRequest) -> str:
    """The first setting of recomputation that two requests have otherwise."""
    pairs = {name: (getattr(one, name) or "none", getattr(other, name) or "none") for name in DECIDED}
    return next((name for name, (mine, theirs) in pairs.items() if mine != theirs), "")


def _other_key(path: Path, text: str, changed: Mapping[str, Any]) -> str:
    """The first key that is not the same in a file as it was and under a new text, of those that were not to change.

    Raises:
        UsageError: it cannot be read any more.
    """

    def others(file: ConfigFile) -> dict[str, Any]:
        return {
            key: value
            for key, value in file.values.items()
            if not key.startswith("$")  # a script's variables have its arguments
            and not any(f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.") for one in changed)
        }

    was = others(read_config_file(path))
    try:
        now = others(read_config_file(path, text))
    except UsageError:
        return ", ".join(changed)
    return next((key for key in {**was, **now} if key not in was or key not in now or was[key] != now[key]), "")


def _undecided(request: RunRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.given() if name not in DECIDED}


# changing a text in place ---------------------------------------------------------------------------------------------


def edited(file: ConfigFile, changes: Mapping[str, Any]) -> str:
    """A file's text with other values of some keys, comments and order kept; None takes a key out.

    Raises:
        UsageError: the syntax, or the way in which a key is written, is none that can be changed in place.
    """
    text = file.text
    for key, value in changes.items():
        if file.syntax == "python":
            text = _python(text, key, value, split_name(file.path)[1])
        else:
            text = _EDITORS[file.syntax](text, key, value)
    return text


def _cannot(key: str) -> UsageError:
    return UsageError(f"the key {key} is written in a way that cannot be changed in place; change it by hand")


def _line_end(text: str) -> str:
    """Windows' where the text has it."""
    return "\r\n" if "\r\n" in text else "\n"


def _toml(text: str, key: str, value: Any) -> str:
    """Edit plain ``key = value`` lines under ``[section]`` headers."""
    section, _, name = key.rpartition(".")
    lines = text.splitlines(keepends=True)
    heads = [at for at, line in enumerate(lines) if re.match(r"\s*\[", line)]
    first = next((at for at in heads if re.match(rf"\s*\[\s*{re.escape(section)}\s*\]", lines[at])), None)
    if section and first is None:
        if value is None:
            return text
        lines = [text.rstrip(), "", f"[{section}]", f"{name} = {_literal(value)}", ""]
        return _line_end(text).join(lines)
    begin = 0 if first is None else first + 1
    end = next((at for at in heads if at >= begin), len(lines))
    for at in range(begin, end):
        match = re.match(rf"(\s*{re.escape(name)}\s*=\s*)(.*?)(\s*(?:#.*)?)(\r?\n?)$", lines[at])
        if match:
            try:
                tomllib.loads(f"x = {match[2]}")
            except tomllib.TOMLDecodeError:
                raise _cannot(key) from None
            lines[at] = "" if value is None else f"{match[1]}{_literal(value)}{match[3]}{match[4]}"
            return "".join(lines)
    if value is not None:
        lines.insert(begin, f"{name} = {_literal(value)}{_line_end(text)}")
    return "".join(lines)


def _yaml(text: str, key: str, value: Any, *, of_json: bool = False) -> str:
    """Edit at the position that the parser knows of each value; JSON is YAML with commas."""
    import yaml  # type: ignore[import-untyped]

    spaced = text.replace("\t", " ") if of_json else text  # a tab is space to JSON, and none to YAML
    node, *parts = yaml.compose(spaced, Loader=yaml.SafeLoader), *key.split(".")
    depth = 0
    while depth < len(parts):
        if not isinstance(node, yaml.MappingNode):
            raise _cannot(key)
        for name, child in node.value:
            # a key may itself have dots
            rest = ".".join(parts[depth:])
            if name.value == rest or name.value == parts[depth]:
                depth = len(parts) if name.value == rest else depth + 1
                owner, entry, node = node, name, child
                break
        else:
            return text if value is None else _added(text, node, parts[depth:], value, of_json=of_json)
    behind = re.match(r"\s*:\s*(\*[^\s,\]}]+)", text[entry.end_mark.index :])
    if behind or re.match(r"\s*:\s*&", text[entry.end_mark.index :]):  # an alias, or an anchor that others may name
        if value is None or behind is None:
            raise _cannot(key)
        begin, end = (entry.end_mark.index + at for at in behind.span(1))
        return text[:begin] + json.dumps(value) + text[end:]
    if value is None:
        return _removed(text, owner, entry, node)
    begin, end = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.MappingNode):
        raise _cannot(key)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:  # on lines of its own
        last = node.value[-1]
        if not isinstance(last, yaml.ScalarNode):
            raise _cannot(key)
        return f"{text[: entry.end_mark.index]}: {json.dumps(value)}{text[last.end_mark.index :]}"
    return text[:begin] + json.dumps(value) + text[end:]


def _added(text: str, node: Any, names: list[str], value: Any, *, of_json: bool) -> str:
    for name in reversed(names[1:]):
        value = {name: value}
    if node.flow_style or of_json:
        at = node.start_mark.index + 1
        indent = re.match(r"\s*", text[at:])
        space = indent[0] if indent else ""
        comma = "," if node.value else ""
        return f"{text[:at]}{space}{json.dumps(names[0])}: {json.dumps(value)}{comma}{text[at:]}"
    first = node.value[0][0].start_mark
    indent_text = " " * first.column
    at = first.index - first.column
    return f"{text[:at]}{indent_text}{names[0]}: {json.dumps(value)}{_line_end(text)}{text[at:]}"


def _removed(text: str, owner: Any, entry: Any, node: Any) -> str:
    begin, end = entry.start_mark.index, node.end_mark.index
    if owner.flow_style:
        after = re.match(r"\s*,", text[end:])
        if after:
            return text[:begin] + text[end + after.end() :].lstrip()
        return re.sub(r",\s*$", "", text[:begin]) + text[end:]
    begin -= entry.start_mark.column
    line_end = text.find("\n", end if text[end - 1 : end] != "\n" else end - 1)
    return text[:begin] + ("" if line_end < 0 else text[line_end + 1 :])


def _json(text: str, key: str, value: Any) -> str:
    return _yaml(text, key, value, of_json=True)


def _python(text: str, key: str, value: Any, name: str | None) -> str:
    """Edit an argument of the call that a configuration returns, or an assignment to an attribute of it.

    A value such as ``package.module.Name.Config()`` is such a call of a name that the file imports.
    """
    tree = ast.parse(text)
    name = name or (configurations(text) or [""])[0]
    body = next((node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), [])
    path = key.split(".")
    source, imported = _source(value)
    assigned = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).partition(".")[2] == key
    ]
    calls = [
        node.value for node in body if isinstance(node, ast.Return | ast.Assign) and isinstance(node.value, ast.Call)
    ]
    given = [place for call in calls if (place := _argument(call, path)) is not None]
    last = body[-1] if body else None
    if assigned or given:
        text = _replaced(text, (assigned or given)[-1], source)
    elif isinstance(last, ast.Return) and isinstance(last.value, ast.Name):
        line = f"{' ' * last.col_offset}{last.value.id}.{key} = {source}\n"
        text = "".join([*(lines := text.splitlines(keepends=True))[: last.lineno - 1], line, *lines[last.lineno - 1 :]])
    elif isinstance(last, ast.Return) and isinstance(last.value, ast.Call) and len(path) == 1 and last.value.keywords:
        first = last.value.keywords[0]
        space = "\n" + " " * first.col_offset if first.lineno > last.lineno else " "
        text = _replaced(text, first, f"{key}={source},{space}{ast.get_source_segment(text, first)}")
    else:
        raise _cannot(key)
    return _with_import(text, *imported) if imported else text


def _source(value: Any) -> tuple[str, tuple[str, str] | None]:
    """A value as Python has it, and what has to be imported for it: a module and a name."""
    match = re.fullmatch(r"([a-z_0-9.]+)\.(([A-Z]\w*)[\w.]*\(\))", value) if isinstance(value, str) else None
    return (match[2], (match[1], match[3])) if match else (repr(value), None)


def _argument(call: ast.Call, path: Sequence[str]) -> ast.expr | None:
    """The value of an argument of a call, or of a call that is one."""
    value: ast.expr = call
    for part in path:
        found = (
            next((one.value for one in value.keywords if one.arg == part), None)
            if isinstance(value, ast.Call)
            else None
        )
        if found is None:
            return None
        value = found
    return value


def _replaced(text: str, node: ast.expr | ast.keyword, source: str) -> str:
    """The text with another source of a node, whose columns are counted in bytes."""
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    data = text.encode()
    return (data[:begin] + source.encode() + data[end:]).decode()


def _with_import(text: str, module: str, name: str) -> str:
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    if any(alias.name == name for node in imports for alias in node.names):
        return text
    same = next((node for node in imports if isinstance(node, ast.ImportFrom) and node.module == module), None)
    lines = text.splitlines(keepends=True)
    if same is None:
        at = max((node.end_lineno or 0 for node in imports), default=0)
        return "".join([*lines[:at], f"from {module} import {name}\n", *lines[at:]])
    first = same.names[0]
    line = lines[first.lineno - 1].encode()
    lines[first.lineno - 1] = (line[: first.col_offset] + f"{name}, ".encode() + line[first.col_offset :]).decode()
    return "".join(lines)


def _arguments(text: str, key: str, value: Any) -> str:
    """Edit a flag of a script in place, or add it before the program's first argument."""
    words = [str(one) for one in value] if isinstance(value, list) else [] if value is True else [str(value)]
    said = "" if value is None or value is False else " ".join([f"--{key}", *words])
    pattern = (
        rf"(?<![\w-])--{re.escape(key)}(?![\w-])(?:[ \t]*=[ \t]*\S+|(?:[ \t]+(?!-{{1,2}}[A-Za-z]|#)[^\s\\)\"']+)*)"
    )
    code = re.sub(r"(?<!\S)#.*", lambda comment: "#" * len(comment[0]), text)
    if match := re.search(pattern, code):
        return f"{text[: match.start()]}{said}{text[match.end() :]}"
    if not said:
        return text
    place = re.search(rf"(?<![\w-])--(?!(?:{OF_LAUNCHERS})\b)[A-Za-z]", code)
    if place is None:
        raise _cannot(key)
    return f"{text[: place.start()]}{said} {text[place.start() :]}"


def _literal(value: Any) -> str:
    """A value in TOML, which writes texts, numbers and lists of them as JSON does."""
    return json.dumps(value)


_EDITORS: Final = {"toml": _toml, "yaml": _yaml, "json": _json, "arguments": _arguments}
