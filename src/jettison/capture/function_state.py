"""What a function's code can read without being given it: closures, defaults, and the globals that it names."""

from __future__ import annotations

import dis
import functools
import importlib.metadata
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jettison.capture.snapshots import MISSING, attribute_of

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
    names = names_in(function.__code__)
    table = function.__globals__
    modules: list[Any] = _closed_over(function)
    for name in names:
        if name in table:
            yield table, name, table[name]
            modules.append(table[name])
        elif name in sys.modules:  # imported by the function itself
            modules.append(sys.modules[name])
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


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Global and attribute names that a code object mentions, functions inside it included."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    texts = (c for c in code.co_consts if isinstance(c, str)) if "globals" in code.co_names else ()
    return tuple(dict.fromkeys((*code.co_names, *texts, *(name for c in inner for name in names_in(c)))))


@functools.lru_cache(maxsize=4096)
def names_read(code: types.CodeType) -> frozenset[str]:
    """Names under which a code object may get at something, texts among them: not those that it only assigns to."""
    own = [i.argval for i in dis.get_instructions(code) if i.opcode in dis.hasname and i.opname not in _ASSIGN]
    texts = [c for c in code.co_consts if isinstance(c, str)]
    inner = [names_read(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset((*own, *texts)).union(*inner)


_ASSIGN = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME")


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
