"""Faster ways to call an op from Python.

An ATen op called by its overload (``torch.ops.aten.mul.Tensor``) has its arguments matched with a schema, which takes
as long as the op. Generated bindings (``torch.mul``) parse theirs in half of that, and choose the overload by the
arguments. Which one a binding chooses is looked up by calling it, on tensors without memory, and stopping it there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from jettison.capture.recording import TensorRef

_HOMES = (torch._C._VariableFunctions, torch._C._nn)
_LIKE = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)


def binding(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return what calls an overload the fastest with the arguments of a recorded call (`TensorRef` in the place of
    tensors), and calls nothing else. Other functions are returned as they are.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return func
    if func.namespace == "aten":
        kinds = tuple([_kind(arg) for arg in args]), tuple([(key, _kind(value)) for key, value in kwargs.items()])
        if None not in kinds[0] and all(kind is not None for _, kind in kinds[1]):
            found = _binding(func, *kinds)
            if found is not None:
                return found
    return func._op


def _kind(value: Any) -> Any:
    """Key of an argument that a binding may choose by; None for kinds that are not looked up."""
    if isinstance(value, TensorRef):
        return Tensor if value.wrap is None and not (value.conj or value.neg) else None
    if value.__class__ in _LIKE:
        return value.__class__, value
    if isinstance(value, list | tuple):
        inside = tuple([_kind(item) for item in value])
        return None if None in inside else (value.__class__, inside)
    return None


@lru_cache(maxsize=4096)
def _binding(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Callable[..., Any] | None:
    with _disable_current_modes():
        given = [_example(kind) for kind in args]
        named = {key: _example(kind) for key, kind in kwargs}
        for home in _HOMES:
            found: Callable[..., Any] | None = getattr(home, func._schema.name.split("::")[1], None)
            if found is not None and _calls(found, func, given, named):
                return found
    return None


def _example(kind: Any) -> Any:
    if kind is Tensor:
        return torch.empty(1, device="meta")
    cls, value = kind
    return [_example(item) for item in value] if cls in (list, tuple) else value


class _Called(Exception):
    """An op was reached."""


class _Stop(TorchDispatchMode):
    """Ends a call at its first op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Called(func, args, kwargs or {})


def _calls(found: Callable[..., Any], func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a binding calls this overload with these arguments."""
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), _Stop():
            found(*args, **kwargs)
    except _Called as called:
        other, others, named = called.args
        return other is func and _same(_by_name(func, args, kwargs), _by_name(func, others, named))
    except Exception:  # it takes other arguments
        return False
    return False


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without those that are the defaults."""
    schema = func._schema.arguments
    given = {schema[n].name: value for n, value in enumerate(args)} | kwargs
    defaults = {one.name: one.default_value for one in schema if one.has_default_value()}
    return {name: value for name, value in given.items() if name not in defaults or not _same(value, defaults[name])}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return first is second
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return first.__class__ is second.__class__ and bool(first == second)
