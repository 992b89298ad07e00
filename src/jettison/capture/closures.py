"""Functions that modules hold and that close over modules: a forward that somebody has put around the class's own.

`copy.deepcopy` takes a function for a constant. On a copy of a model such a function would go on running the modules
that it was made for, with their parameters.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import nn


def close_over_copies(model: nn.Module, copies: Mapping[int, Any]) -> None:
    """Functions among the attributes of a model's copied modules close over the copies from now on.

    Args:
        copies: by id of the original, as `copy.deepcopy` leaves them in its memo.
    """
    for module in model.modules():
        attributes = vars(copies.get(id(module), module))
        if attributes is vars(module):
            continue
        for name, value in attributes.items():
            if isinstance(value, types.FunctionType | functools.partial):
                attributes[name] = _over_copies(value, copies, {})


def _over_copies(value: Any, copies: Mapping[int, Any], made: dict[int, Any]) -> Any:
    """The module's copy; the method, of the copy; the function, over copies. Anything else as it is.

    Args:
        made: by id of a function, what became of it: functions may close over themselves.
    """
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType):
        own = _over_copies(value.__self__, copies, made)
        return value if own is value.__self__ else types.MethodType(value.__func__, own)
    if isinstance(value, functools.partial):
        return _partial(value, copies, made)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) not in made:
        made[id(value)] = value
        cells = tuple(_cell(cell, copies, made) for cell in value.__closure__)
        if any(ours is not theirs for ours, theirs in zip(cells, value.__closure__, strict=True)):
            made[id(value)] = _with_cells(value, cells)
    return made[id(value)]


def _partial(value: Any, copies: Mapping[int, Any], made: dict[int, Any]) -> Any:
    theirs = [value.func, *value.args, *value.keywords.values()]
    ours = [_over_copies(one, copies, made) for one in theirs]
    if all(a is b for a, b in zip(ours, theirs, strict=True)):
        return value
    function, *rest = ours
    count = len(value.args)
    return functools.partial(function, *rest[:count], **dict(zip(value.keywords, rest[count:], strict=True)))


def _cell(cell: types.CellType, copies: Mapping[int, Any], made: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    own = _over_copies(content, copies, made)
    return cell if own is content else types.CellType(own)


def _with_cells(function: types.FunctionType, cells: tuple[types.CellType, ...]) -> types.FunctionType:
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
    vars(made).update(vars(function))
    return made
