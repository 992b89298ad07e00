"""What a function's code can read without being given it: closures, defaults, and the globals that it names."""

from __future__ import annotations

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

from jettison.capture.names_in_code import mentioned_in, names_in
from jettison.capture.snapshots import MISSING, attribute_of
from jettison.core.objects import Same

_LIBRARIES = (
    *("torch", "numpy", "jettison", "transformers", "_pytest", "pytest"),
    *("accelerate", "peft", "trl", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
    *("datasets", "filelock", "fsspec", "huggingface_hub", "jinja2", "markupsafe", "packaging", "safetensors"),
    *("tokenizers", "tqdm", "yaml"),
    *("pandas", "pyarrow", "polars", "scipy", "sklearn", "matplotlib", "PIL"),
)
"""A walk that went into these would take half a second for each block of a model with adapters: 20,000 values."""
_FOREIGN = frozenset(sys.stdlib_module_names) | frozenset(_LIBRARIES)


def function_reach(function: types.FunctionType) -> Iterator[Any]:
    """What a function's code can read without being given it: its closure, its defaults, the globals that it names."""
    yield from _closed_over(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for _, _, value in globals_of(function):
        yield value


def globals_of(function: types.FunctionType, *, everywhere: bool = False) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(table, name, value) of every global that a function's code mentions, in its file or as an attribute of another
    file that it imports.

    Args:
        everywhere: also for functions of torch and of other large libraries.
    """
    if is_foreign(function.__module__) and not everywhere:
        return
    names = mentioned_in(function.__code__)
    table = function.__globals__
    package = table.get("__package__") or ""
    modules: list[Any] = _closed_over(function)
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


def _closed_over(function: types.FunctionType) -> list[Any]:
    held = [attribute_of(cell, "cell_contents") for cell in function.__closure__ or ()]
    return [value for value in held if value is not MISSING]


# what code assigns to on libraries ------------------------------------------------------------------------------------


def library_owners(function: types.FunctionType) -> Sequence[Any]:
    """Modules, classes and functions of libraries that a function's code names, on which code may set attributes."""
    return _library_owners(function.__code__, Same(function.__globals__), len(function.__globals__))


@functools.lru_cache(maxsize=16384)
def _library_owners(code: types.CodeType, table: Same[dict[str, Any]], _size: int) -> tuple[Any, ...]:
    names = mentioned_in(code)
    found: dict[int, Any] = {}
    left = [table.it.get(name, sys.modules.get(name)) for name in names]
    while left:
        owner = left.pop()
        if id(owner) not in found and _may_be_assigned_to(owner):
            found[id(owner)] = owner
            if not isinstance(owner, types.FunctionType):
                left += [vars(owner).get(name) for name in names]
    return tuple(found.values())


def _may_be_assigned_to(owner: Any) -> bool:
    if isinstance(owner, types.ModuleType):
        return is_foreign(owner.__name__)
    return isinstance(owner, type | types.FunctionType) and is_foreign(str(owner.__module__))


# which modules are whose ----------------------------------------------------------------------------------------------


def modules_by_name(function: types.FunctionType) -> list[types.ModuleType]:
    """Modules in which a function may have state that it finds by a name that it makes up as it runs: those of the
    user's program, those of the package that the function belongs to, and those that a text in its code names.
    """
    package = str(function.__module__).partition(".")[0]
    found: list[Any] = [*_of_the_program(len(sys.modules))]  # anything may be among modules
    found += [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == package]
    found += [sys.modules[text] for text in names_in(function.__code__).texts if text in sys.modules]
    return [m for m in found if isinstance(m, types.ModuleType) and not is_foreign(m.__name__)]


@functools.lru_cache(maxsize=1)
def _of_the_program(_count: int) -> tuple[types.ModuleType, ...]:
    return tuple(m for name, m in list(sys.modules.items()) if _is_program(name, m))


def is_of_the_program(module: str) -> bool:
    """Whether a module's code lies in no folder of libraries."""
    return not is_foreign(module) and _is_program(module, sys.modules.get(module))


def _is_program(name: str, module: Any) -> bool:
    if not isinstance(module, types.ModuleType):  # anything may be put there
        return False
    file = vars(module).get("__file__")
    if isinstance(file, str):
        return not _is_in_a_library(file)
    return name not in sys.builtin_module_names and vars(module).get("__path__") is None


def is_installed(module: str | None) -> bool:
    """Whether a module's code lies in a folder of libraries."""
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    return isinstance(file, str) and _is_in_a_library(file)


def package_of(value: type | types.FunctionType) -> str:
    """The package, of the outermost level, that a class or a function says that it belongs to."""
    return str(value.__module__).partition(".")[0]


@functools.lru_cache(maxsize=8192)
def _is_in_a_library(file: str) -> bool:
    return any(file.startswith(f"{folder}{os.sep}") for folder in _library_folders())


def is_foreign(module: str | None) -> bool:
    """Whether a module belongs to Python or to a large library, whose globals no model sets.

    A package of the user's own may have the name of one (``datasets``, ``token``): where its code lies decides.
    """
    name = str(module or "").partition(".")[0]  # a class may have a property for it
    return name in _FOREIGN and (name in _OURS or _is_installed(name))


_OURS = ("torch", "numpy", "jettison")  # imported by now: nobody else's can have the name


def _is_installed(name: str) -> bool:
    """Whether the package of that name which is imported is Python's or was installed."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return file is None or _lies_among_libraries(name, file)  # built in, frozen, or not imported


@functools.lru_cache(maxsize=1024)
def _lies_among_libraries(name: str, file: str) -> bool:
    folders = _library_folders()
    if any(Path(file).is_relative_to(folder) for folder in folders):
        return True
    if any((folder / name).exists() for folder in folders):  # the installed one is another
        return False
    try:  # installed for editing, its code lies where it is edited
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    found = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(map(Path, [*found, *site.getsitepackages(), site.getusersitepackages()]))
