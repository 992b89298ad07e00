"""Values of a Python configuration file, without executing it: literals, arguments of calls, local functions.

A call such as ``SelectiveAC.Config(debug=True)`` becomes a table of its arguments, by position or name, with the
function's name under the empty key. Functions of the file itself and assignments to attributes
(``config.training.steps = 10``) are evaluated. Other expressions become their text, other statements a key.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.core.errors import UsageError

_DEPTH: Final = 20
_STEPS: Final = 50_000
_MOST: Final = 1 << 62
SUMS: Final[Mapping[type, Callable[[Any, Any], Any]]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Div: operator.truediv,
        ast.Mod: operator.mod,
    }
)


class _Unknown(Exception):
    """The expression's value is unknown without execution."""


def python_values(text: str, name: str | None) -> Mapping[str, Any]:
    """Return the value that a function of a file returns, or that a variable of the module holds.

    Args:
        name: of the function or variable; None: the only function without required arguments, or without any the only
            variable that holds a call.

    Raises:
        SyntaxError: the text is not Python.
        UsageError: no such name, or several candidates for None.
    """
    return _Module(ast.parse(text)).values(name)


def configurations(text: str) -> list[str]:
    """Names of a file's configurations: functions without required arguments that return something."""
    return _Module(ast.parse(text)).configurations()


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.names: dict[str, Any] = {}
        self.steps = self.depth = 0
        for node in tree.body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=target)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                ):
                    self.names[target] = self.value(value, {})

    def values(self, name: str | None) -> Mapping[str, Any]:
        called = [key for key, value in self.names.items() if isinstance(value, dict) and "" in value]
        known = self.configurations() or called
        if name is None:
            if len(known) != 1:
                listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
                raise UsageError(
                    f"it has {len(known) or 'no'} configurations{': ' + listed if known else ''}; "
                    f"expected one, or FILE.py:NAME, such as FILE.py:{known[0] if known else 'pretrain'}"
                )
            name = known[0]
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

    def call(self, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        node = self.functions[name]
        parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        defaults = dict(
            zip(reversed(parameters), (self.value(one, {}) for one in reversed(node.args.defaults)), strict=False)
        )
        for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default is not None:
                defaults[one.arg] = self.value(default, {})
        local = {**defaults, **dict(zip(parameters, given, strict=False)), **named}
        self.depth += 1
        if self.depth > _DEPTH:
            raise ValueError(f"more than {_DEPTH} calls within each other")
        unread: dict[str, Any] = {}
        found = self._run(node.body, local, unread)
        self.depth -= 1
        if isinstance(found, dict):
            found |= unread
        return found

    def _run(self, body: list[ast.stmt], local: dict[str, Any], unread: dict[str, Any]) -> Any:
        """Evaluate a body's return value; other statements are added to ``unread``."""
        for node in body:
            match node:
                case ast.Return(value=ast.expr() as value):
                    return self.value(value, local)
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    local[name] = self.value(value, local)
                case ast.Assign(targets=[ast.Attribute() as target], value=value) if self._set(target, value, local):
                    pass
                case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.Pass() | ast.Import() | ast.ImportFrom():
                    pass
                case ast.FunctionDef(name=name):
                    local[name] = f"def {name}"
                case _:
                    said = " ".join(ast.unparse(node).split())
                    unread[said] = said
        return None

    def _set(self, target: ast.Attribute, value: ast.expr, local: dict[str, Any]) -> bool:
        """Set an attribute of a table; False if the object is no table."""
        path = [target.attr]
        owner: ast.expr = target.value
        while isinstance(owner, ast.Attribute):
            path.insert(0, owner.attr)
            owner = owner.value
        table = local.get(owner.id) if isinstance(owner, ast.Name) else None
        for name in path[:-1]:
            table = table.setdefault(name, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            return False
        table[path[-1]] = self.value(value, local)
        return True

    def value(self, node: ast.expr, local: Mapping[str, Any]) -> Any:
        """Return the value of an expression, or its text."""
        try:
            return self._known(node, local)
        except _Unknown:
            return " ".join(ast.unparse(node).split())

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
                return {str(self.value(key, local)): self.value(value, local) for key, value in pairs}
            case ast.Name(id=name) if name in local or name in self.names:
                return local[name] if name in local else self.names[name]
            case ast.Attribute(value=owner, attr=name):
                table = self._known(owner, local)
                if isinstance(table, dict) and name in table:
                    return table[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, local)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._known(operand, local)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in SUMS:
                first, then = self._number(left, local), self._number(right, local)
                try:
                    found = SUMS[type(op)](first, then)
                except (ArithmeticError, ValueError):
                    raise _Unknown from None
                if abs(found) <= _MOST:
                    return found
            case ast.BoolOp(op=op, values=values):
                known = [self._known(value, local) for value in values]
                return all(known) if isinstance(op, ast.And) else any(known)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions and name not in local:
                return self.call(name, *self._arguments(node, local))
            case ast.Call():
                (given, named), function = self._arguments(node, local), ast.unparse(node.func)
                if function in ("replace", "dataclasses.replace") and given and isinstance(given[0], dict):
                    return {**given[0], **named}
                return {"": function, **{str(n): value for n, value in enumerate(given)}, **named}
        raise _Unknown

    def _arguments(self, node: ast.Call, local: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        named = {one.arg: self.value(one.value, local) for one in node.keywords if one.arg is not None}
        for one in node.keywords:
            if one.arg is None:
                more = self.value(one.value, local)
                more = more if isinstance(more, dict) else {f"**{more}": more}
                named |= {str(key): value for key, value in more.items() if key}
        return [self.value(one, local) for one in node.args], named

    def _number(self, node: ast.expr, local: Mapping[str, Any]) -> Any:
        found = self._known(node, local)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise _Unknown
        return found
