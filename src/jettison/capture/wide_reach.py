"""State that code reaches without naming it: see `Wide`.

NOTE [ What code need not name ]
Code may also reach state whose names it makes up as it runs: through `importlib.import_module`, `sys.modules`, `exec`,
`globals`, the frames of its callers, the garbage collector, the subclasses of a class (`Wide`). Where code that the
walk has come by does so, the walk takes in all data that can be reached that way: of the program's own modules, of the
function's package, of modules that a text in it names; of libraries, only what code assigns to on what it names of
them (`library_owners`), and on threads and loggers.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from jettison.capture.function_state import is_foreign, is_of_the_program, modules_by_name
from jettison.capture.names_in_code import Wide, names_in

NEVER_INSIDE = (type, types.FrameType, types.CodeType, types.FunctionType, types.BuiltinFunctionType)
WHEREVER = (Wide.FRAMES, Wide.OBJECTS, Wide.SUBCLASSES)
"""Ways that lead to the same state from any module."""
NAMES_MODULES = cast(types.FunctionType, lambda: None)
"""Stands for code that has got `sys.modules` under another name."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """State behind one way.

    Args:
        tables: globals of modules.
        values: to be looked into.
        containers: to be put back as they are, not to be looked into.
        classes: below others that are known.
    """

    tables: list[dict[str, Any]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)


def look_widely(wide: Wide, function: types.FunctionType, known: Sequence[type]) -> Found:
    """State that a function may reach in a way that names nothing. See NOTE [ What code need not name ].

    Args:
        known: classes that a walk has come by.
    """
    match wide:
        case Wide.GLOBALS:
            return Found(tables=[function.__globals__])
        case Wide.MODULES:
            return Found(tables=[function.__globals__, *map(vars, modules_by_name(function))])
        case Wide.FRAMES:
            texts, variables = names_in(function.__code__).texts, list(_variables_of_callers())
            return Found(
                values=[value for name, value in variables if name in texts],
                containers=[value for name, value in variables if name not in texts],
            )
        case Wide.OBJECTS:
            everything = gc.get_objects()
            kinds = {kind for kind in set(map(type, everything)) if is_of_the_program(str(kind.__module__))}
            return Found(values=[value for value in everything if type(value) in kinds])
        case Wide.SUBCLASSES:
            below: list[list[type]] = [type.__subclasses__(cls) for cls in known]
            return Found(classes=list(itertools.chain.from_iterable(below)))


def is_code(value: Any) -> bool:
    """Whether it is code, or a description of an attribute, rather than data."""
    return issubclass(type(value), (*NEVER_INSIDE, property, staticmethod, classmethod, *_OF_CLASSES))


_OF_CLASSES = (types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType)


def _variables_of_callers() -> Iterator[tuple[str, Any]]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_foreign(str(frame.f_globals.get("__name__"))):
            yield from list(frame.f_locals.items())
        frame = frame.f_back
