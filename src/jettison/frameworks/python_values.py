"""Values of a Python configuration file or of a training script, without executing it: literals, arguments of calls,
local functions.

A call such as ``SelectiveAC.Config(debug=True)`` becomes a table of its arguments, by position or name, with the
function's name under the empty key. Functions of the file itself and assignments to attributes
(``config.training.steps = 10``) are evaluated. Other expressions become their text, other statements a key.

A file that runs something when it is executed, or makes a trainer, is a script, whose calls are collected in their
order. Names count that are assigned once, or outside of branches and loops; command-line arguments have their defaults.
"""

from __future__ import annotations

import ast
import operator
import posixpath
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

from jettison.core.errors import UsageError

_DEPTH: Final = 20
_STEPS: Final = 50_000
_MOST: Final = 1 << 62


def _operators(names: str) -> Mapping[type, Callable[[Any, Any], Any]]:
    pairs = (pair.partition(":") for pair in names.split())
    return MappingProxyType({getattr(ast, node): getattr(operator, name) for node, _, name in pairs})


SUMS: Final = _operators("Add:add Sub:sub Mult:mul FloorDiv:floordiv Div:truediv Mod:mod")
_COMPARED: Final = _operators("Eq:eq NotEq:ne Is:is_ IsNot:is_not Gt:gt GtE:ge Lt:lt LtE:le")
_CASTS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"int": int, "float": float, "str": str, "bool": bool, "list": list}
)
_BF16: Final = ("is_bfloat16_supported", "is_bf16_supported", "is_available")
_OF_THE_GPU: Final = {**dict.fromkeys(_BF16, True), "get_device_capability": [8, 0]}
"""Answers of any GPU with bf16."""
_OVERRIDDEN: Final = ("compute_loss", "training_step", "create_optimizer")  # methods of a trainer
_PATHS: Final[Mapping[str, Callable[..., str]]] = {
    **dict.fromkeys(("path.join", "path.abspath", "path.realpath", "Path"), posixpath.join),
    "path.dirname": lambda path: posixpath.dirname(path) or "..",
}
_HALVES: Final = ("bfloat16", "float16", "half")
GIVEN: Final = "the file that is given with it"
_CHANGES: Final = ("append", "extend", "insert", "pop", "remove", "setdefault", "update")
_Table = dict[str, Any]
_Branch = tuple[tuple[int, bool], ...]
_Load = Callable[[str], Any]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class UnknownValue(str):
    """Text of an expression, or of alternatives, whose value is unknown without execution; ``line``: where it is."""

    line: int

    def __new__(cls, node: ast.AST | str, line: int = 0) -> UnknownValue:
        """Make it of an expression, or of a text at a line."""
        found = super().__new__(cls, node if isinstance(node, str) else " ".join(ast.unparse(node).split()))
        found.line = line or getattr(node, "lineno", 0)
        return found


class _Unknown(Exception):
    """The expression's value is unknown without execution."""


def python_values(text: str, name: str | None, notes: str, load: _Load) -> tuple[Mapping[str, Any], bool]:
    """Return the value that a function returns or a variable of the module holds, or of a script the arguments of its
    calls by ``NAME()``, with their lines by ``$NAME``; and whether it is a script.

    Args:
        name: of the function or variable; None: the only function without required arguments, or without any the only
            variable that holds a call. Of a script with several trainings, the variable that holds the arguments or the
            trainer of one, or its line.
        notes: key of notes.
        load: returns the contents of a file that the script parses, by its name, empty if that is unknown; None without
            such a file.

    Raises:
        SyntaxError: the text is not Python.
        UsageError: no such name, or several candidates for None.
    """
    module = _Module(ast.parse(text), load)
    if not module.script:
        return module.values(name), False
    calls, found = module.training(name), dict[str, Any]()
    sure = {id(call) for call in calls if call.branch == module.chosen[: len(call.branch)]}
    for call in calls:
        for key, value in call.given.items():
            made = value[""] if _called(value) else ""  # an object, whose arguments are keys of their own
            if made.rpartition(".")[2][:1].isupper() or made.endswith("from_pretrained"):
                found[f"${call.name}.{key}"] = True
            elif key:
                text = f"{made}(...)" if made else str(value)
                alike = [one for one in calls if one.name == call.name and one.given.get(key) == value]
                unsure = id(call) not in sure and len(alike) < 2  # in a branch, unless another one says the same
                known = (
                    UnknownValue(text, getattr(value, "line", call.line)) if made or unsure or _open(value) else value
                )
                before = found.setdefault(f"{call.name}().{key}", known)
                if before != known:
                    found[f"{call.name}().{key}"] = UnknownValue(f"{before} or {known}", call.line)
    found |= {
        f"${one.name}": f"line {one.line}" if id(one) in sure else UnknownValue(one.name, one.line) for one in calls
    }
    said = [f"{file}, which the script parses, is read too" for file in module.loaded]
    if module.used:
        used = ", ".join(f"{key} = {value}" for key, value in module.used.items())
        said.append(f"arguments of the script's command line and environment have their defaults: {used}")
    found |= {notes: said} if said else {}
    return found, True


def call_line(text: str, name: str | None, call: str) -> int:
    """Return the line of the last such call for a script's training; 0 without one."""
    return max((one.line for one in _Module(ast.parse(text)).training(name) if one.name == call), default=0)


def configurations(text: str) -> list[str]:
    """Names of a file's configurations: functions that return something and need no argument, trainings' first."""
    module = _Module(ast.parse(text))
    return [*module.trainings()] if module.script else module.configurations()


def _called(value: Any) -> bool:
    """Whether the value is the result of a call."""
    return isinstance(value, dict) and "" in value


def _open(value: Any) -> bool:
    """Whether the value, or an element of it, is unknown."""
    if isinstance(value, list | dict):
        return any(_open(one) or _called(one) for one in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, UnknownValue)


def _only(known: Collection[str], where: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the only name of a configuration; a `UsageError` that lists several."""
    if len(known) != 1:
        listed = ", ".join(f"{name} ({where[name]})" if name in where else name for name in [*known][:12])
        more = ", ..." if len(known) > 12 else ""
        raise UsageError(
            f"it has {len(known) or 'no'} configurations{': ' + listed + more if known else ''}; expected one, or "
            f"FILE.py:NAME, such as FILE.py:{next(iter(known), 'pretrain')}"
        )
    return next(iter(known))


@dataclass(frozen=True, kw_only=True)
class _ScriptCall:
    """One call. ``bound``: the variable that holds it. ``stage``: trainings before. ``branch``: what it is in of
    statements that may not run, each with its block."""

    name: str
    line: int
    bound: str = ""
    stage: int = 0
    branch: _Branch = ()
    given: Mapping[str, Any]


class _Module:
    def __init__(self, tree: ast.Module, load: _Load = lambda _: None) -> None:
        self.load, self.loaded = load, dict[str, None]()
        self.script = any(
            (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
            for node in tree.body
        ) or any(isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Trainer") for node in ast.walk(tree))
        nodes = [*ast.walk(tree)] if self.script else tree.body
        self.functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        self.sites = defaultdict[str, list[ast.Call]](list)
        self.loads = Counter(["", *_loaded(tree.body)])
        self.shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        self.modules, self.members = dict[str, str](), dict[str, str]()
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.plain = {one.name: one.body for one in classes if not one.bases}
        self.own = {one.name for one in classes if any(ast.unparse(base).endswith("Module") for base in one.bases)}
        for node in nodes:
            if isinstance(node, ast.Call):
                self.sites[
                    node.func.id if isinstance(node.func, ast.Name) else f".{getattr(node.func, 'attr', '')}"
                ].append(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                into = self.modules if isinstance(node, ast.Import) else self.members
                into |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
        self.names: dict[str, Any] = {"__file__": "./script.py"}  # other files are looked up from its folder
        self.steps = self.depth = self.stage = 0
        self.branch: _Branch = ()
        self.chosen: _Branch = ()
        self.calls: list[_ScriptCall] = []
        self.options: dict[str, Any] = {}
        self.used: dict[str, Any] = {}
        self._results: dict[ast.AST, Any] = {}
        self._follow(tree.body, self.names, {})
        for name, function in self.functions.items() if self.script else ():
            self.call(name, [], {})
            self.calls += [_ScriptCall(name=name, line=function.lineno, given={})] if name in _OVERRIDDEN else []
        self.calls = [one for one in self.calls if self.loads[one.bound] or one.name.endswith("Trainer")]

    # configurations ---------------------------------------------------------------------------------------------------

    def values(self, name: str | None) -> Mapping[str, Any]:
        known = self.configurations() or [key for key, value in self.names.items() if _called(value)]
        name = name or _only(known)
        found = self.call(name, [], {}) if name in self.functions else self.names.get(name)
        if not isinstance(found, dict):
            raise UsageError(f"it has no configuration {name!r}; expected one of {', '.join(known) or 'none'}")
        return {key: value for key, value in found.items() if key}

    def configurations(self) -> list[str]:
        """Functions without required arguments that return something."""
        return [
            name
            for name, node in self.functions.items()
            if len(node.args.args) == len(node.args.defaults)
            and all(node.args.kw_defaults)
            and not name.startswith("_")
            and any(isinstance(one, ast.Return) and one.value is not None for one in node.body)
        ]

    def trainings(self) -> Mapping[str, _ScriptCall]:
        """A script's trainers that differ in their arguments, by name."""
        holders = {id(call.given): call.bound for call in self.calls if call.bound}
        all_ = (one for one in self.calls if one.name.endswith("Trainer") and {"model", "args", "0"} & one.given.keys())
        several = {id(args) if _called(args := one.given.get("args")) else one.line: one for one in all_}.values()
        names = [holders.get(id(one.given.get("args"))) or one.bound for one in several]
        return {
            name if name and names.count(name) == 1 else str(one.line): one
            for name, one in zip(names, several, strict=True)
        }

    def training(self, name: str | None) -> list[_ScriptCall]:
        """Return the calls for one training, its arguments first; of each function those of the last stage before."""
        several = self.trainings()
        if not several:
            return self.calls
        name = name or _only(several, {key: f"line {call.line}, {call.name}" for key, call in several.items()})
        one = several.get(name) or next((one for one in several.values() if name in (one.bound, str(one.line))), None)
        if one is None:
            raise UsageError(f"it has no configuration {name!r}; expected one of {', '.join(several)}")
        first = [call for call in self.calls if call is one or call.given is one.given.get("args")]
        last = {call.name: call.stage for call in self.calls if call.stage <= one.stage}
        last |= {call.name: -1 for call in first}
        self.chosen = one.branch
        other = {(at, not body) for at, body in one.branch}  # blocks that do not run if the training does
        gone = {id(given) for call in several.values() for given in (call.given, call.given.get("args"))}
        calls = [call for call in self.calls if other.isdisjoint(call.branch) and id(call.given) not in gone]
        rest = [call for call in calls if last.get(call.name) == call.stage]
        return [*first, *rest]

    # statements -------------------------------------------------------------------------------------------------------

    def call(self, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        """Return the value of a function of the file; of a script each is followed once."""
        node = self.functions[name]
        if self.script and node in self._results:
            return None
        self._results[node] = None
        parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        defaults = dict(
            zip(reversed(parameters), (self.value(one, {}) for one in reversed(node.args.defaults)), strict=False)
        )
        named_only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        defaults |= {one.arg: self.value(default, {}) for one, default in named_only if default is not None}
        local = {**defaults, **dict(zip(parameters, given, strict=False)), **named}
        if self.script:
            every = [one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)]
            unknown, sites = {*every} - local.keys(), self.sites["." * (every[:1] == ["self"]) + name]
            said = {"".join(map(ast.unparse, [*one.args, *one.keywords])) for one in sites}
            unpacked = "*" in "".join([*named, *(one[:1] for one in given if isinstance(one, UnknownValue))])
            if unpacked or len(said if given or named else said | {""}) > 1:  # its calls differ, and one is followed
                unknown = {*every}
            local |= {one: UnknownValue(one, node.lineno) for one in unknown}
        self.depth += 1
        if self.depth > _DEPTH:
            raise ValueError(f"more than {_DEPTH} calls within each other")
        unread: dict[str, Any] = {}
        found = self._follow(node.body, local, unread)
        self.depth -= 1
        if isinstance(found, dict) and not self.script:
            found |= unread
        return found

    def _follow(
        self, body: Sequence[ast.stmt], local: _Table, unread: _Table, stored: Counter[str] | None = None
    ) -> Any:
        """Evaluate a body, and return its return value; statements that are not followed are added to ``unread``.

        Args:
            stored: how often the function assigns each name, if it is uncertain whether the body runs.
        """
        often = Counter([*_stored(body), *local]) if stored is None else stored
        returns = False
        for node in body:
            value = cast("ast.expr | None", getattr(node, "value", None))
            to = getattr(node, "targets", [getattr(node, "target", None)])
            name = to[0].id if [*map(type, to)] == [ast.Name] and isinstance(node, ast.Assign | ast.AnnAssign) else ""
            if self.script:
                self._calls(node, local, name)
            found = None if value is None else self.value(value, local)
            found = found if stored is None or often[name] == 1 or value is None else UnknownValue(value)
            match node:
                case ast.Return() if value is not None and stored is None:
                    return UnknownValue(value) if returns else found
                case ast.Assign() | ast.AnnAssign() if name and value is not None:
                    local[name] = found
                case ast.Assign(targets=[ast.Attribute() as owner]) if self._set(owner, found, local):
                    pass
                case ast.Assign(targets=[ast.Tuple(elts=into)]) if isinstance(found, list) and len(into) == len(found):
                    local |= {ast.unparse(one): each for one, each in zip(into, found, strict=True)}
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=table), slice=ast.Constant(value=key))]) if (
                    stored is None and isinstance(local.get(table), dict)
                ):
                    local[table] = {**local[table], str(key): found}
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    if not self.script:
                        local[node.name] = f"def {node.name}"
                case ast.If() if not _open(tested := self.value(node.test, local)) and not _called(tested):
                    self.loads.subtract(_loaded(node.orelse if tested else node.body))
                    found = self._follow(node.body if tested else node.orelse, local, unread, stored)
                    if found is not None:
                        return found
                case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.Pass() | ast.Import() | ast.ImportFrom():
                    pass
                case _ if self.script:
                    runs = isinstance(node, ast.With | ast.Try) or "__name__" in ast.unparse(
                        getattr(node, "test", node)
                    )
                    sure = runs and not getattr(node, "handlers", ())
                    changed = _stored(getattr(node, "items", []) if sure else [node])
                    local |= {other: UnknownValue(other, node.lineno) for other in changed}
                    for item in getattr(node, "items", []):
                        local |= {name: self.value(item.context_expr, local) for name in _stored([item])}
                    returns |= not runs and any(isinstance(one, ast.Return) and one.value for one in ast.walk(node))
                    for key in ("body", "handlers", "orelse", "finalbody"):
                        for block in getattr(node, key, ()):
                            inside = block.body if isinstance(block, ast.ExceptHandler) else [block]
                            outer, place = self.branch, (node.lineno, key == "body")
                            self.branch = outer if runs else (*outer, place)
                            found = self._follow(inside, local, unread, stored if sure else often)
                            self.branch = outer
                            if found is not None and runs:
                                return found
                case _:
                    said = " ".join(ast.unparse(node).split())
                    unread[said] = said
        return None

    def _calls(self, node: ast.stmt, local: dict[str, Any], name: str) -> None:
        """Record the calls in a statement, except those in its blocks."""
        for part in ast.iter_child_nodes(node) if not isinstance(node, _Function | ast.ClassDef) else ():
            if isinstance(part, ast.expr | ast.withitem):
                self._reached(part, local, name if part is getattr(node, "value", None) else "")

    def _reached(self, node: ast.AST, local: dict[str, Any], name: str = "") -> None:
        """Record the calls in an expression; of a conditional one those of the branch that runs, or uncertain ones."""
        parts, outer = [*ast.iter_child_nodes(node)], self.branch
        if isinstance(node, ast.IfExp):
            self._reached(node.test, local)
            tested = self.value(node.test, local)
            known = not (_open(tested) or _called(tested))
            self.branch = outer if known else (*outer, (-node.lineno, True))
            taken, other = (node.body, node.orelse) if tested else (node.orelse, node.body)
            parts = [taken] if known else [taken, other]
            self.loads.subtract(_loaded([other] if known else []))
        elif isinstance(node, ast.Call):
            self._call(node, local, name)
        for part in parts:
            self._reached(part, local)
        self.branch = outer

    def _set(self, target: ast.Attribute, value: Any, local: dict[str, Any]) -> bool:
        """Set an attribute of a table; False if the object is no table. Of a script only arguments are set."""
        path = [target.attr]
        owner: ast.expr = target.value
        while isinstance(owner, ast.Attribute):
            path.insert(0, owner.attr)
            owner = owner.value
        table = local.get(owner.id) if isinstance(owner, ast.Name) else None
        if table is None or (_called(table) and "pars" in table[""]):
            self.options.pop(target.attr, None)  # a default of the command line that the script replaces
        if target.attr == "requires_grad" and value is not True:
            self.calls.append(_ScriptCall(name="requires_grad", line=target.lineno, given={}))
        if self.script and (len(path) > 1 or not isinstance(table, dict) or "." in table.get("", ".")):
            return True
        for name in path[:-1]:
            table = table.setdefault(name, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            return False
        table[path[-1]] = value
        return True

    # expressions ------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, local: Mapping[str, Any]) -> Any:
        """Return the value of an expression, or its text."""
        try:
            return self._known(node, local)
        except _Unknown:
            return UnknownValue(node)

    def _known(self, node: ast.expr, local: Mapping[str, Any]) -> Any:
        self.steps += 1
        if self.steps > _STEPS:
            raise ValueError(f"more than {_STEPS:,} expressions")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self.value(item, local) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key is not None]
                # an empty key, as in device_map={"": 0}, is no name of a call
                return {str(self.value(key, local)) or "''": self.value(value, local) for key, value in pairs}
            case ast.Name(id=name) if (name in local or name in self.names) and name not in self.shared:
                return local[name] if name in local else self.names[name]
            case ast.Attribute(value=ast.Name(id=module), attr=name) if self.script and module not in local:
                if module in self.modules or module in self.members:
                    return name
        match node:
            case ast.Attribute(value=owner, attr=name) if self._default(name, self.value(owner, local)):
                return self.used[name]
            case ast.Attribute(value=owner, attr=name):
                table = self._known(owner, local)
                if isinstance(table, dict) and name in table:
                    return table[name]
                if name == "parent" and isinstance(table, str) and not _open(table):
                    return _PATHS["path.dirname"](table)
            case ast.BinOp(left=left, op=ast.Div(), right=right) if isinstance(self.value(left, local), str):
                return posixpath.join(self._sure(left, local), str(self._sure(right, local)))
            case ast.Subscript(value=owner, slice=place):
                several, key = self._sure(owner, local), self._sure(place, local)
                if isinstance(several, dict | list):  # not the text that stands for sys.argv
                    with suppress(KeyError, IndexError, TypeError):
                        return several[str(key)] if isinstance(several, dict) else several[key]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._sure(operand, local, number=True)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._sure(operand, local)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in SUMS:
                first, then = (self._sure(one, local, number=True) for one in (left, right))
                try:
                    found = SUMS[type(op)](first, then)
                except (ArithmeticError, ValueError):
                    raise _Unknown from None
                if abs(found) <= _MOST:
                    return found
            case ast.BoolOp(op=op, values=values):
                found, decides = None, isinstance(op, ast.Or)
                return next((found for value in values if bool(found := self._sure(value, local)) is decides), found)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                with suppress(TypeError):
                    return _COMPARED[type(op)](self._sure(left, local), self._sure(right, local))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._known(body if self._sure(test, local) else orelse, local)
            case ast.Call():
                return self._call(node, local)
        raise _Unknown

    def _call(self, node: ast.Call, local: Mapping[str, Any], bound: str = "") -> Any:
        """Return a call's value, or the table of its arguments; of a script it is recorded, once."""
        if self.script and node in self._results:
            return self._results[node]
        self._results[node] = UnknownValue(node)
        (given, named), function = self._arguments(node, local), ast.unparse(node.func)
        if isinstance(node.func, ast.Name) and function in self.functions and function not in local:
            found = self.call(function, given, named)
            found = UnknownValue(node) if found is None and self.script else found
        elif function in ("replace", "dataclasses.replace") and given and isinstance(given[0], dict):
            found = {**given[0], **named}
        elif not self.script:
            found = {"": function, **{str(n): value for n, value in enumerate(given)}, **named}
        else:
            found = self._of_script(node, given, named, local, bound)
        self._results[node] = found
        return found

    def _of_script(
        self, node: ast.Call, given: list[Any], named: dict[str, Any], local: Mapping[str, Any], bound: str
    ) -> Any:
        """Return the value of a call of no function of the file, or record it and return its arguments."""
        first, *rest = ast.unparse(node.func).split(".")
        name = ".".join([*([self.members.get(first, first)] if first not in self.modules or not rest else []), *rest])
        last, flags = name.rpartition(".")[2], [str(one) for one in given if str(one).startswith("--")]
        parses = last in ("load", "safe_load", "full_load") or (last == "loads" and given and _called(given[0]))
        if parses and given and (found := self._parsed(given[0])) is not None:
            return found
        if last == "get" and isinstance(node.func, ast.Attribute) and given:
            table = self.value(node.func.value, local)
            if isinstance(table, dict) and not _called(table):
                return table.get(str(given[0]), given[1] if len(given) > 1 else None)
        for one in (*node.args, *(keyword.value for keyword in node.keywords)):
            if isinstance(one, ast.Name) and one.id in self.functions:  # which the call calls
                self.call(one.id, [], {})
        if last in _OF_THE_GPU:
            return _OF_THE_GPU[last]
        if name in _PATHS and given and not any(_open(one) or _called(one) for one in given):
            return _PATHS[name](*map(str, given))
        if last in ("resolve", "absolute", "read") and isinstance(node.func, ast.Attribute):
            return self.value(node.func.value, local)
        if name in ("environ.get", "getenv") and len(given) > 1:
            self.used[str(given[0])] = given[1]
            return given[1]
        if name in _CASTS and len(given) == 1 and not _open(given[0]) and not _called(given[0]):
            with suppress(ValueError, TypeError, OverflowError):
                return _CASTS[name](given[0])
        if last == "add_argument" and flags:
            switch = {"store_true": False, "store_false": True}.get(str(named.get("action")))
            self.options[str(named.get("dest", flags[0].lstrip("-").replace("-", "_")))] = named.get("default", switch)
        if last == "requires_grad_" and any(one is not True for one in (*given, *named.values())):
            name = "requires_grad"
        if name in self.plain and any(key.startswith("**") for key in named):
            return UnknownValue(node)
        if name in self.plain:
            return {"": name, **self._fields(self.plain[name], given), **named}
        name = "nn.Module" if name in self.own else name
        name = ast.unparse(node.func) if last == "compile" else name  # of torch, a model or a pattern
        if cast := [one for one in (*given, *named.values()) if last == "to" and str(one) in _HALVES]:
            name = f"{name[:-2]}{cast[0]}"  # ``model.to(torch.bfloat16)`` as ``model.bfloat16()``
        places = ["model", "args"] if last.endswith("Trainer") else []
        keys = [*places[: len(given)], *map(str, range(len(places), len(given)))]
        found = {"": name, **dict(zip(keys, given, strict=True)), **named}
        self.calls.append(
            _ScriptCall(name=name, line=node.lineno, bound=bound, stage=self.stage, branch=self.branch, given=found)
        )
        owner = local.get(first, self.names.get(first, ""))
        self.stage += last == "train" and str(owner[""] if _called(owner) else owner).endswith("rainer")
        return found

    def _fields(self, body: Sequence[ast.stmt], given: list[Any]) -> _Table:
        """Return the fields of an object of the script's own, such as a dataclass: those given, else their defaults."""
        fields = {ast.unparse(one.target): one.value for one in body if isinstance(one, ast.AnnAssign)}
        usual = {name: self.value(value, {}) for name, value in fields.items() if value is not None}
        usual = {name: value.get("default") if _called(value) else value for name, value in usual.items()}
        return usual | dict(zip(fields, given, strict=False))

    def _parsed(self, source: Any) -> Any:
        """Return the contents of a file that is opened, or named as OmegaConf has it, or of the one that is given with
        the script if the name is unknown; None if there is none."""
        name = source.get("0") if _called(source) and source[""] == "open" else source
        known = isinstance(name, str) and not isinstance(name, UnknownValue)
        found = self.load(str(name) if known else "")
        self.loaded |= {} if found is None else {str(name) if known else GIVEN: None}
        return found

    def _default(self, name: str, owner: Any) -> bool:
        """Whether the command line has a default for this argument of its, not another object's. It is noted."""
        found = self.options.get(name)
        known = not (found is None or _open(found) or _called(found)) and (not _called(owner) or "pars" in owner[""])
        self.used |= {name: found} if known else {}
        return known

    def _arguments(self, node: ast.Call, local: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        named = {one.arg: self.value(one.value, local) for one in node.keywords if one.arg is not None}
        for one in node.keywords:
            if one.arg is None:
                more = self.value(one.value, local)
                opened = (isinstance(more, dict) and more.get("", "dict") == "dict") or not self.script
                more = more if opened and isinstance(more, dict) else {f"**{(said := UnknownValue(one.value))}": said}
                named |= {str(key): value for key, value in more.items() if key}
        return [self.value(one, local) for one in node.args], named

    def _sure(self, node: ast.expr, local: Mapping[str, Any], *, number: bool = False) -> Any:
        """Return the value of an operand that is neither unknown nor the result of a call; ``number``: it is one."""
        found = self._known(node, local)
        wrong = number and (isinstance(found, bool) or not isinstance(found, int | float))
        if wrong or _open(found) or _called(found):
            raise _Unknown
        return found


def _loaded(body: Sequence[ast.AST]) -> Iterator[str]:
    found = (one for node in body for one in ast.walk(node) if isinstance(one, ast.Name))
    return (one.id for one in found if isinstance(one.ctx, ast.Load))


def _stored(body: Sequence[ast.AST]) -> Iterator[str]:
    """Names that statements assign, or whose elements they change, outside of the functions and classes in them."""
    waiting = [*body]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _CHANGES:
                yield name
        if not isinstance(node, _Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
