"""State that code can reach: names in its bytecode, and the globals they refer to."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jettison.spec.frameworks import named

# names in bytecode ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16384)
def mentioned_in(code: types.CodeType) -> tuple[str, ...]:
    """Globals and attributes that code names; strings as well if it looks up state by a string."""
    texts = () if _LOOKS_UP.isdisjoint(code.co_names) else _texts(code.co_consts)
    inner = (name for one in _inner(code) for name in mentioned_in(one))
    return tuple(dict.fromkeys((*code.co_names, *texts, *inner)))


@functools.lru_cache(maxsize=16384)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names that code may read, strings and functions inside of it included; not those that it only assigns to."""
    steps = (one for one in dis.get_instructions(code) if one.opcode in dis.hasname and one.opname not in _ASSIGN)
    return frozenset((*(one.argval for one in steps), *_texts(code.co_consts))).union(*map(names_in, _inner(code)))


_ASSIGN = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME")


def _texts(constants: Sequence[object]) -> frozenset[str]:
    inside = (text for one in constants if isinstance(one, tuple | frozenset) for text in one)
    return frozenset(text for text in (*constants, *inside) if isinstance(text, str))


_RUN = frozenset(("exec", "eval"))
_LOOKS_UP = frozenset(("globals", "import_module", "__import__", "modules"))


def _inner(code: types.CodeType) -> list[types.CodeType]:
    """Functions inside, and strings that the code may execute."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    for text in () if _RUN.isdisjoint(code.co_names) else _texts(code.co_consts):
        with contextlib.suppress(SyntaxError, ValueError):
            inner.append(compile(text, "<text>", "exec"))
    return inner


# closures, defaults, and the globals that code names ------------------------------------------------------------------

_LIBRARIES = (
    *("torch", "numpy", "jettison", "_pytest", "pytest", *named("packages")),
    *("filelock", "fsspec", "jinja2", "markupsafe", "packaging", "safetensors", "tqdm", "yaml"),
    *("pandas", "pyarrow", "polars", "scipy", "sklearn", "matplotlib", "PIL"),
)
"""Packages whose globals are not walked: half a second for each block of a model with adapters (20,000 values)."""
_FOREIGN = frozenset(sys.stdlib_module_names) | frozenset(_LIBRARIES)


def function_reach(function: types.FunctionType) -> Iterator[Any]:
    """Values that a function can read besides its arguments: its closure, its defaults, the globals that it names."""
    yield from _closed_over(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for _, _, value in globals_of(function):
        yield value


def globals_of(function: types.FunctionType, *, everywhere: bool = False) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(table, name, value) of every global that a function's code mentions, in its file or as an attribute of another
    file that it imports; ``everywhere``: also for functions of torch and of other large libraries.
    """
    if is_foreign(function.__module__) and not everywhere:
        return
    names = mentioned_in(function.__code__)
    table = function.__globals__
    package = table.get("__package__") or ""
    modules = [*_closed_over(function)]
    for name in names:
        if name in table:
            yield table, name, table[name]
            modules.append(table[name])
        else:  # imported by the function itself
            inside = f"{package}.{name}" if name else package
            modules += [sys.modules[one] for one in (name, inside) if one in sys.modules]
    seen = set()
    while modules:
        module = modules.pop()
        if not isinstance(module, types.ModuleType) or is_foreign(module.__name__) or module.__name__ in seen:
            continue
        seen.add(module.__name__)
        for name in names:
            if name in vars(module):
                yield vars(module), name, vars(module)[name]
                modules.append(vars(module)[name])


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


# owners of modules ----------------------------------------------------------------------------------------------------


def is_installed(module: str | None) -> bool:
    """Whether a module's code lies in a folder of libraries."""
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    return isinstance(file, str) and _is_in_a_library(file)


def package_of(value: type | types.FunctionType) -> str:
    """The top-level package that a class or a function claims to belong to."""
    return str(value.__module__).partition(".")[0]


@functools.lru_cache(maxsize=8192)
def _is_in_a_library(file: str) -> bool:
    return any(file.startswith(f"{folder}{os.sep}") for folder in _library_folders())


def is_foreign(module: str | None) -> bool:
    """Whether a module belongs to Python or to a large library, whose globals no model sets. A package of the user's
    own may share a library's name (``datasets``, ``token``): the location of its code decides.
    """
    name = str(module or "").partition(".")[0]  # a class may have a property for it
    if name not in _FOREIGN or name in ("torch", "numpy", "jettison"):  # imported already: no other can have the name
        return name in _FOREIGN
    found = sys.modules.get(name)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    return file is None or _lies_among_libraries(name, file)  # built in, frozen, or not imported


@functools.lru_cache(maxsize=1024)
def _lies_among_libraries(name: str, file: str) -> bool:
    folders = _library_folders()
    if any(Path(file).is_relative_to(folder) for folder in folders):
        return True
    if any((folder / name).exists() for folder in folders):  # the installed one is another
        return False
    try:  # an editable installation, whose code lies in its source folder
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    found = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(map(Path, [*found, *site.getsitepackages(), site.getusersitepackages()]))


NEVER_INSIDE = (type, types.FrameType, types.CodeType, types.FunctionType, types.BuiltinFunctionType)
