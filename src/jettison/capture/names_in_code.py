"""Names in the bytecode of a function: what it mentions, reads and assigns to, and what it can reach without a name."""

from __future__ import annotations

import dis
import enum
import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass


class Wide(enum.Enum):
    """A way to reach state that no name in the code leads to."""

    GLOBALS = enum.auto()  # of the function's own module
    MODULES = enum.auto()  # whichever module a text names
    FRAMES = enum.auto()  # variables of callers
    OBJECTS = enum.auto()  # all that the garbage collector knows
    SUBCLASSES = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names in one code object, functions inside of it included.

    Args:
        mentioned: globals and attributes; texts as well where the code asks for `globals`.
        read: names under which it may get at something, texts among them: not those that it only assigns to.
        assigned: attributes that it sets or deletes, but for those of a method's own instance.
        texts: constants.
        wide: see `Wide`.
    """

    mentioned: tuple[str, ...]
    read: frozenset[str]
    assigned: frozenset[str]
    texts: frozenset[str]
    wide: frozenset[Wide]


@functools.lru_cache(maxsize=16384)
def mentioned_in(code: types.CodeType) -> tuple[str, ...]:
    """`Names.mentioned` alone, which needs no disassembly."""
    texts = _texts(code.co_consts) if "globals" in code.co_names else ()
    inner = (name for one in _inner(code) for name in mentioned_in(one))
    return tuple(dict.fromkeys((*code.co_names, *texts, *inner)))


@functools.lru_cache(maxsize=16384)
def names_in(code: types.CodeType) -> Names:
    """All names in a code object."""
    inner = [names_in(one) for one in _inner(code)]
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("NOP", "EXTENDED_ARG")]
    texts = _texts(code.co_consts)
    read = {one.argval for one in steps if one.opcode in dis.hasname and one.opname not in _ASSIGN}
    assigned = {one.argval for at, one in enumerate(steps) if one.opname in _SET and not _is_own(code, steps, at)}
    if not _SETTERS.isdisjoint(code.co_names):
        assigned |= {text for text in texts if text.isidentifier()}
    return Names(
        mentioned=mentioned_in(code),
        read=frozenset(read | texts).union(*(names.read for names in inner)),
        assigned=frozenset(assigned).union(*(names.assigned for names in inner)),
        texts=texts.union(*(names.texts for names in inner)),
        wide=_wide(code, steps).union(*(names.wide for names in inner)),
    )


_ASSIGN = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME")
_SET = ("STORE_ATTR", "DELETE_ATTR")
_SETTERS = frozenset(("setattr", "delattr", "__setattr__", "__delattr__", "vars", "__dict__"))


def _texts(constants: Sequence[object]) -> frozenset[str]:
    found = [one for one in constants if isinstance(one, str)]
    for one in constants:
        if isinstance(one, tuple | frozenset):
            found += [text for text in one if isinstance(text, str)]
    return frozenset(found)


_RUN = frozenset(("exec", "eval"))


def _inner(code: types.CodeType) -> list[types.CodeType]:
    """Functions inside, and texts that the code may execute."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    if not _RUN.isdisjoint(code.co_names):
        inner += [one for one in map(_compiled, _texts(code.co_consts)) if one is not None]
    return inner


def _compiled(text: str) -> types.CodeType | None:
    """The code that a text may be executed as."""
    try:
        return compile(text, "<text>", "exec")
    except (SyntaxError, ValueError):
        return None


def _is_own(code: types.CodeType, steps: Sequence[dis.Instruction], at: int) -> bool:
    """Whether an attribute is set on the first argument of a method."""
    inside, _, _ = code.co_qualname.rpartition(".")
    if not inside or inside.endswith("<locals>") or not code.co_argcount:
        return False
    before = at - 1
    if steps[before].opname == "SWAP":  # ``x.n += 1`` has loaded x first, and a copy of it
        name = steps[at].argval
        looks = (i for i in range(before, 1, -1) if steps[i].opname == "LOAD_ATTR" and steps[i].argval == name)
        before = next((i - 2 for i in looks if steps[i - 1].opname == "COPY"), -1)
    if before < 0 or not steps[before].opname.startswith("LOAD_FAST"):
        return False
    loaded = steps[before].argval
    return bool((loaded[-1] if isinstance(loaded, tuple) else loaded) == code.co_varnames[0])


def _wide(code: types.CodeType, steps: Sequence[dis.Instruction]) -> frozenset[Wide]:
    found = {_WIDE[name] for name in code.co_names if name in _WIDE}
    found |= {wide for pair, wide in _WIDE_TOGETHER.items() if set(pair) <= set(code.co_names)}
    loaded = {one.argval for one in steps if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(found | {_WIDE_BUILTINS[name] for name in loaded if name in _WIDE_BUILTINS})


_WIDE = {
    **dict.fromkeys(("import_module", "f_globals", "__globals__", "__builtins__"), Wide.MODULES),
    **dict.fromkeys(("_getframe", "currentframe", "f_back", "f_locals", "_current_frames"), Wide.FRAMES),
    **dict.fromkeys(("get_objects", "get_referrers"), Wide.OBJECTS),
    "__subclasses__": Wide.SUBCLASSES,
}
_WIDE_TOGETHER = {("sys", "modules"): Wide.MODULES, ("inspect", "stack"): Wide.FRAMES}
_WIDE_BUILTINS = {**dict.fromkeys(("exec", "eval", "__import__"), Wide.MODULES), "globals": Wide.GLOBALS}
