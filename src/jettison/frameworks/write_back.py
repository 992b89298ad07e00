"""Write the recomputation settings nearest to a plan into a framework's own file, and leave the rest unchanged.

The fastest settings that fit are written; among those within 1 % of it the file's own, else those that offload nothing,
else those with most free memory. Only these keys change; the text is then read back and must give the chosen settings.
`README.md` of this folder says how ``[[writes]]`` of ``read.toml`` describes them.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import DoesNotFit, UsageError
from jettison.core.units import format_bytes, format_seconds
from jettison.frameworks.config_file import ConfigFile, read_config_file, split_name
from jettison.frameworks.python_values import call_line, configurations
from jettison.frameworks.run_file import RunFile, flags_of, read_run
from jettison.frameworks.shell_script import OF_LAUNCHERS
from jettison.predict.forecast import forecast
from jettison.predict.ranges import figures
from jettison.predict.time import estimate
from jettison.request.options import DECIDED, RunRequest
from jettison.request.resolve import resolve
from jettison.search.auto_recompute import AutoForecast
from jettison.spec.anchor import RunAnchor
from jettison.spec.device_allowance import FitVerdict, Limit
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

ALIKE: Final = 0.01
"""Share of a step's time within which settings count as equally fast."""


@dataclass(frozen=True, kw_only=True)
class UpdatedFile:
    """New text of a file.

    Args:
        words: the settings as command-line flags.
        changed: the file's keys with their new values; None: removed.
        peak_bytes, step_seconds: of the written run.
        plan_peak_bytes, plan_step_seconds: of the plan.
        tried: number of settings that the file can express.
        verdict: does the written run fit the plan's limit?
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
        """Report the written keys, and their loss against the plan."""
        said = ", ".join(f"{key} = {'(removed)' if value is None else value}" for key, value in self.changed.items())
        yield f"{said or 'nothing had to change'}: {self.words}, the fastest that fits of {self.tried} settings"
        lost = max(0.0, self.step_seconds - self.plan_step_seconds)
        peaks = f"peak {format_bytes(self.peak_bytes)}, in the plan {format_bytes(self.plan_peak_bytes)}"
        yield f"lost against the plan: {format_seconds(lost)} a step ({lost / self.plan_step_seconds:.1%}); {peaks}"
        if self.verdict is not FitVerdict.FITS:
            yield f"note: whether the written run fits is {self.verdict}; a smaller --budget is safer"


def write_back(
    found: RunFile, choice: AutoForecast, *, limit: Limit | None = None, others: tuple[Path, ...] = ()
) -> UpdatedFile:
    """Write the fastest recomputation settings that the file can express and that fit the plan's budget.

    Args:
        found: the run read from the file.
        choice: the plan.
        limit: of the plan.
        others: further files of the run.

    Raises:
        UsageError: such files have no recomputation settings, or these keys cannot be changed in place.
        DoesNotFit: none of the settings fits the budget.
    """
    file = read_config_file(found.path)
    asked = {key for row in found.writes for section in ("if", "unless") for key in row.get(section, ())}
    values = {key: file.values[said] for key in asked if (said := found.written(key)) in file.values}
    there = values.keys()
    rows = [row for row in found.writes if there >= {*row.get("if", ())} and there.isdisjoint(row.get("unless", ()))]
    if not rows:
        other = found.by_hand or "jettison export may"
        raise UsageError(f"{found.says} has no recomputation settings that can be written back; {other}")
    spec = found.spec()
    base = replace(found.request, **dict.fromkeys(DECIDED))
    rows = [{**row, "set": {key: _copied(value, values) for key, value in row["set"].items()}} for row in rows]
    tried = list(_tried(rows, spec, base, choice.forecast.run.anchor, compiled=found.compile))
    if not tried:
        raise UsageError(f"none of the settings of {found.says} can be modelled for {spec.name}")
    bounds = (choice.budget_bytes, choice.budget_bytes if limit is None else limit.nbytes)
    fits = ([one for one in tried if one.peak_bytes <= bound] for bound in bounds)
    fitting = next(filter(None, fits), [])
    if not fitting:
        raise DoesNotFit(
            peak_bytes=min(one.peak_bytes for one in tried),
            limit_bytes=bounds[-1],
            limit_name="the plan's budget",
            advice=f"the least of the {len(tried)} settings of {found.says}; jettison export has other targets",
        )
    timed = [(estimate(one.run, choice.hardware).step_seconds, one) for one in fitting]
    fastest = min(took for took, _ in timed)
    alike = [
        (_changes(found, file, one.keys) if _unlike(found.request, one.request) else {}, took, one)
        for took, one in timed
        if took <= (1 + ALIKE) * fastest
    ]
    changed, took, best = min(alike, key=lambda row: (bool(row[0]), row[2].run.recompute.to_host, row[2].peak_bytes))
    text = edited(file, changed)
    _check(text, found, best.request, others, changed)
    decided = {name: getattr(best.request, name) for name in DECIDED}
    return UpdatedFile(
        text=text,
        words=" ".join(flags_of(RunRequest(**decided))) or "--recompute none",
        changed=changed,
        peak_bytes=best.peak_bytes,
        step_seconds=took,
        plan_peak_bytes=choice.forecast.peak_bytes,
        plan_step_seconds=choice.step_seconds,
        tried=len(tried),
        verdict=figures(best.run, best.peak_bytes, hardware=choice.hardware.name).verdict(
            usable_bytes=None if limit is None else limit.device_bytes,
            budget_bytes=None if limit is None else limit.budget_bytes,
        ),
    )


def _copied(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value, or for ``{=key}`` that of the key."""
    return values[value[2:-1]] if isinstance(value, str) and value.startswith("{=") else value


def _changes(found: RunFile, file: ConfigFile, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys, by the file's names, whose values differ from the file's."""

    def same(key: str, value: Any) -> bool:
        if file.syntax != "python":
            return bool(file.values.get(key) == value)
        said = file.values.get(key)
        return key in file.values and (said == value or str(value).endswith(f".{said}()"))

    named = {found.written(key): value for key, value in keys.items()}
    return {key: value for key, value in named.items() if not same(key, value)}


@dataclass(frozen=True, kw_only=True)
class _Tried:
    run: Run
    request: RunRequest
    keys: Mapping[str, Any]
    peak_bytes: int


def _tried(
    rows: Sequence[Mapping[str, Any]], spec: ModelSpec, base: RunRequest, anchor: RunAnchor | None, *, compiled: bool
) -> Iterator[_Tried]:
    """Yield settings that can be modelled, with the file's keys. The plan's hardware includes its anchor already."""
    for row in rows:
        numbers = range(2, spec.depth + 1) if "{k" in json.dumps(row) else (0,)
        for k in numbers:
            fields = {name: _filled(value, k) for name, value in row.items() if name in DECIDED}
            keys = dict.fromkeys(row.get("remove", ())) | {key: _filled(value, k) for key, value in row["set"].items()}
            request = replace(base, **fields)
            try:
                run = resolve(spec, request).run
                run = replace(run, compiled=compiled or run.compiled, anchor=anchor)
                yield _Tried(run=run, request=request, keys=keys, peak_bytes=forecast(run).peak_bytes)
            except UsageError:
                continue


def _filled(value: Any, k: int) -> Any:
    if value == "{k:d}":
        return k
    return value.replace("{k}", str(k)) if isinstance(value, str) else value


def _check(
    text: str, found: RunFile, request: RunRequest, others: tuple[Path, ...], changed: Mapping[str, Any]
) -> None:
    """Read the new text back; a `UsageError` unless it gives the chosen settings, and all other keys as before."""
    if other := _other_key(found.path, text, changed):
        raise UsageError(f"{found.path} would also change {other}: change it by hand")
    again = read_run(
        found.path,
        *others,
        model=found.model_argument,
        gpus=found.gpus,
        allow_unread=True,
        asked={name: getattr(request, name) for name in request.given() if name not in DECIDED},
        text=text,
    )
    if other := _unlike(again.request, request):
        said, wanted = getattr(again.request, other), getattr(request, other)
        raise UsageError(f"{found.path} would give {other} = {said}, not {wanted}: change it by hand")


def _unlike(one: RunRequest, other: RunRequest) -> str:
    """Return the first recomputation setting in which two requests differ."""
    pairs = {name: (getattr(one, name) or "none", getattr(other, name) or "none") for name in DECIDED}
    return next((name for name, (mine, theirs) in pairs.items() if mine != theirs), "")


def _other_key(path: Path, text: str, changed: Mapping[str, Any]) -> str:
    """Return the first key, other than those in ``changed``, that differs between a file and its new text.

    All of ``changed`` if the new text cannot be read.
    """

    def kept(file: ConfigFile) -> dict[str, Any]:
        return {
            key: value
            for key, value in file.values.items()
            if not key.startswith("$")  # a script's variables have its arguments
            and not any(f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.") for one in changed)
        }

    was = kept(read_config_file(path))
    try:
        now = kept(read_config_file(path, text))
    except UsageError:
        return ", ".join(changed)
    return next((key for key in {**was, **now} if key not in was or key not in now or was[key] != now[key]), "")


# edits in place -------------------------------------------------------------------------------------------------------


def edited(file: ConfigFile, changes: Mapping[str, Any]) -> str:
    """Change keys in a file's text, comments and order kept; None: remove. `UsageError` for a place unknown."""
    text, name = file.text, split_name(file.path)[1]
    for key, value in changes.items():
        python = file.syntax.startswith("python")
        text = _python(text, key, value, name) if python else _EDITORS[file.syntax](text, key, value)
    return text


def _cannot(key: str) -> UsageError:
    return UsageError(f"the key {key} is written in a way that cannot be changed in place; change it by hand")


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _toml(text: str, key: str, value: Any) -> str:
    """Edit plain ``key = value`` lines under ``[section]`` headers; texts, numbers and lists are written as in JSON."""
    section, _, name = key.rpartition(".")
    lines = text.splitlines(keepends=True)
    heads = [at for at, line in enumerate(lines) if re.match(r"\s*\[", line)]
    first = next((at for at in heads if re.match(rf"\s*\[\s*{re.escape(section)}\s*\]", lines[at])), None)
    if section and first is None:
        if value is None:
            return text
        lines = [text.rstrip(), "", f"[{section}]", f"{name} = {json.dumps(value)}", ""]
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
            lines[at] = "" if value is None else f"{match[1]}{json.dumps(value)}{match[3]}{match[4]}"
            return "".join(lines)
    if value is not None:
        lines.insert(begin, f"{name} = {json.dumps(value)}{_line_end(text)}")
    return "".join(lines)


def _yaml(text: str, key: str, value: Any, *, of_json: bool = False) -> str:
    """Edit at the parser's position of a value; JSON is YAML with commas."""
    import yaml  # type: ignore[import-untyped]

    spaced = text.replace("\t", " ") if of_json else text  # JSON allows tabs, YAML does not
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
    if behind or re.match(r"\s*:\s*&", text[entry.end_mark.index :]):  # an alias, or an anchor with possible aliases
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


def _python(text: str, key: str, value: Any, name: str | None) -> str:
    """Edit an argument of the call that a configuration returns, or an assignment to an attribute of it.

    A value such as ``package.module.Name.Config()`` becomes a call of ``Name``, which is imported.
    """
    tree = ast.parse(text)
    call, inside, argument = key.partition("().")
    if inside:
        return _script(text, tree, call, call_line(text, name, call), argument, value)
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
        text = _inserted(text, last.value, f"{key}={source}")
    else:
        raise _cannot(key)
    return _with_import(text, *imported) if imported else text


def _script(text: str, tree: ast.Module, name: str, line: int, argument: str, value: Any) -> str:
    """Edit an argument of a script's call; what is to be removed is off."""
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and one.lineno == line and one.keywords]
    calls.sort(key=lambda one: not ast.unparse(one.func).endswith(name))  # several may be on the line
    if not calls:
        raise _cannot(argument)
    given = {one.arg: one.value for one in calls[0].keywords}
    if argument in given:
        return _replaced(text, given[argument], repr(value or False))
    return text if value is None else _inserted(text, calls[0], f"{argument}={value!r}")


def _inserted(text: str, call: ast.Call, source: str) -> str:
    """Add an argument before the first one with a name, on a line of its own if that has one."""
    first = call.keywords[0]
    space = "\n" + " " * first.col_offset if first.lineno > call.lineno else " "
    return _replaced(text, first, f"{source},{space}{ast.get_source_segment(text, first)}")


def _source(value: Any) -> tuple[str, tuple[str, str] | None]:
    """Return a value's Python source, and the module and name to import for it."""
    match = re.fullmatch(r"([a-z_0-9.]+)\.(([A-Z]\w*)[\w.]*\(\))", value) if isinstance(value, str) else None
    return (match[2], (match[1], match[3])) if match else (repr(value), None)


def _argument(value: ast.expr | None, path: Sequence[str]) -> ast.expr | None:
    """Return the value of an argument, by its path through nested calls."""
    for part in path:
        keywords = value.keywords if isinstance(value, ast.Call) else []
        value = next((one.value for one in keywords if one.arg == part), None)
    return value


def _replaced(text: str, node: ast.expr | ast.keyword, source: str) -> str:
    """Replace the source of a node; columns count bytes."""
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
    """Edit a flag of a script, or a Hydra override, in place, or add it before the program's first one."""
    words = [str(one) for one in value] if isinstance(value, list) else [] if value is True else [str(value)]
    said = "" if value is None or value is False else " ".join([f"--{key}", *words])
    pattern = (
        rf"(?<![\w-])--{re.escape(key)}(?![\w-])"
        r"(?:[ \t]*=[ \t]*\S+|[ \t]+([\"'])[\w.:-]*\1|(?:[ \t]+(?!-{1,2}[A-Za-z]|#)[^\s\\)\"']+)*)"
    )
    code = re.sub(r"(?<!\S)#.*", lambda comment: "#" * len(comment[0]), text)
    first = rf"(?<![\w-])--(?!(?:{OF_LAUNCHERS})\b)[A-Za-z]"
    if "." in key and re.search(override := r"(?<![^\s\"'])\+{0,2}[A-Za-z_]\w*(?:\.\w+)+=", code):
        said = "" if value is None else f"{key}={json.dumps(value, separators=(',', ':'))}".replace('"', "")
        pattern, first = rf"(?<![\w.])\+{{0,2}}{re.escape(key)}=[^\s\\]*", override
    if match := re.search(pattern, code):
        return f"{text[: match.start()]}{said}{text[match.end() :]}"
    if not said:
        return text
    place = re.search(first, code)
    if place is None:
        raise _cannot(key)
    return f"{text[: place.start()]}{said} {text[place.start() :]}"


_EDITORS: Final[Mapping[str, Callable[[str, str, Any], str]]] = {
    "toml": _toml,
    "yaml": _yaml,
    "json": partial(_yaml, of_json=True),
    "arguments": _arguments,
}
