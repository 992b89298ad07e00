"""What a function's code can read without being given it: closures, defaults, and the globals that it names."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from jettison.capture.snapshots import MISSING, attribute_of

_LIBRARIES = (
    *("torch", "numpy", "jettison", "transformers", "_pytest", "pytest"),
    *("accelerate", "peft", "trl", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
    *("datasets", "filelock", "fsspec", "huggingface_hub", "jinja2", "markupsafe", "packaging", "safetensors"),
    *("tokenizers", "tqdm", "yaml"),
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


def is_foreign(module: str | None) -> bool:
    """Whether a module belongs to Python or to a large library, whose globals no model sets."""
    return (module or "").partition(".")[0] in _FOREIGN
