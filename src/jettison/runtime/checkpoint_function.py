"""Policies for a function call (`checkpoint`) and for a module class (`checkpointable`).

`checkpoint(function, *args)` has the calling convention of `torch.utils.checkpoint.checkpoint`. In backward, parameters
are looked up in the modules that the function reaches (itself, its bound object, its closure, its globals); a tensor
that it reaches by any other way is kept.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from jettison.capture.blocks import REGION_MARK
from jettison.capture.dispatch import refuse_scripted
from jettison.capture.state_kinds import is_ours
from jettison.runtime.planned_forward import PlannedForward
from jettison.runtime.saved_tensor_hooks import is_inside
from jettison.runtime.witness import Check, check_of
from jettison.solve.checkpoint_policy import CheckpointPolicy, policy_named

Class = TypeVar("Class", bound=type[nn.Module])
Part = TypeVar("Part", nn.Module, nn.Parameter)


class _Regions(dict[Any, "_FunctionRegion"]):
    """Regions of functions that reach a module; stored on the module, and not copied with it."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[Any, set[Any]] = {}

    def clear(self) -> None:
        super().clear()
        self._held.clear()

    def told_apart(self, key: Any, held: Any) -> Any:
        """Add an object's contents to a key: a function's configuration tells calls apart, a step counter must not."""
        known = self._held.setdefault(key, set())
        if len(known) < MOST_CONFIGURATIONS:
            known.add(held)
        return key, held if held in known else None

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Regions:
        return _Regions()

    def __reduce__(self) -> Any:
        return _Regions, ()


_SHELF = "_jettison_function_regions"
MOST_CONFIGURATIONS = 16  # of one function; beyond that, witnesses notice changed contents
MOST_NUMBERS = 1000  # in a key; witnesses notice changes of further ones
DEEPEST = 4
MOST_REGIONS = 64  # of one owner; a function over a number that changes at each call would fill the memory
_ownerless = _Regions()


def regions_of(owner: nn.Module | nn.Parameter | None) -> _Regions:
    """Regions of functions whose first module or parameter this is, by key; None: of functions that reach neither."""
    if owner is None:
        return _ownerless
    return owner.__dict__.setdefault(_SHELF, _Regions())


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy: str | CheckpointPolicy = "full",
    check: str | Check = Check.ALWAYS,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)``, and treat the tensors it saves for backward by ``policy``.

    Args:
        policy: ``none``, ``selective``, ``selective-op``, ``full``, or a `CheckpointPolicy`.
        check: share of recomputed values that is compared with the forward's, as in `jettison.apply`.

    Inside a planned region (another function's, or a block) this is a plain call: the outermost region decides.

    Raises:
        UsageError: an unknown policy or check.
    """
    how = policy_named(policy) if isinstance(policy, str) else policy
    closely = check_of(check)
    if not torch.is_grad_enabled() or is_inside():
        return function(*args, **kwargs)
    found, parameters = _parts(function, nn.Module), _parts(function, nn.Parameter)
    numbers = tuple((type(v), v) for v in _flat(_reached(function)) if isinstance(v, bool | int | float | str))
    owner: Any = (*found, *parameters, None)[0]
    regions = regions_of(owner)
    plainly = (_code_of(function), how, closely, tuple(map(id, found)), tuple(map(id, parameters)), numbers)
    key = regions.told_apart(plainly, tuple(islice(_numbers(_reached(function), 0), MOST_NUMBERS)))
    region = regions.get(key)
    if region is None:
        if len(regions) >= MOST_REGIONS:
            regions.clear()
        region = regions[key] = _FunctionRegion(found, parameters, how, closely)
    return region.run(function, args, kwargs)


def checkpointable(cls: Class) -> Class:
    """Class decorator: instances are regions, in whatever container. The plan chooses their policy."""
    setattr(cls, REGION_MARK, True)
    return cls


class _Calls(threading.local):
    """The functions that are running on this thread; ours, and no state of the user's."""

    def __init__(self) -> None:
        self.stack: list[Callable[..., Any]] = []

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Calls:
        return _Calls()


class _Body(nn.Module):
    """The modules that a function reaches, as one module."""

    def __init__(self, found: tuple[nn.Module, ...], parameters: tuple[nn.Parameter, ...]) -> None:
        super().__init__()
        self.current = _Calls()
        for i, module in enumerate(found):
            self._modules[f"reached{i}"] = module
        for i, parameter in enumerate(parameters):
            self._parameters[f"given{i}"] = parameter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.current.stack[-1](*args, **kwargs)

    def bound(self) -> Callable[..., Any]:
        """The running function, to restore after a nested one."""
        return self.current.stack[-1]


class _FunctionRegion:
    def __init__(
        self, found: tuple[nn.Module, ...], parameters: tuple[nn.Parameter, ...], how: CheckpointPolicy, closely: Check
    ) -> None:
        for module in found:
            for name, part in module.named_modules():
                refuse_scripted(name or type(module).__name__, part)
        self.body = _Body(found, parameters)
        self.planned = PlannedForward(self.body, "a checkpointed function", how, fake_model=False, how=closely)
        self.planned.bound = self.body.bound

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.body.current.stack.append(function)
        try:
            return self.body(*args, **kwargs)
        finally:
            self.body.current.stack.pop()


def _code_of(function: Callable[..., Any]) -> Any:
    if isinstance(function, functools.partial):
        return "partial", _code_of(function.func)
    if isinstance(function, types.MethodType):
        return _code_of(function.__func__)
    return getattr(function, "__code__", None) or type(function)


def _reached(function: Callable[..., Any]) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from _reached(function.func)
        yield from (*function.args, *function.keywords.values())
        return
    if isinstance(function, types.MethodType):
        yield function.__self__
        function = function.__func__
    yield function
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from getattr(function, "__defaults__", None) or ()
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in code.co_names if code else ():
        if name in names:
            yield names[name]


def _flat(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def _numbers(values: Iterable[Any], depth: int) -> Iterator[tuple[type, Any]]:
    """Numbers and strings, also inside containers and plain objects (a configuration)."""
    for value in values:
        if isinstance(value, bool | int | float | str):
            yield type(value), value
        elif depth < DEEPEST and isinstance(value, list | tuple):
            yield from _numbers(list(value), depth + 1)
        elif depth < DEEPEST and isinstance(value, dict):
            yield from _numbers(list(value.values()), depth + 1)
        elif (
            depth < DEEPEST
            and not isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType)
            and not (callable(value) or is_ours(value))
        ):
            held = getattr(value, "__dict__", None)
            yield from _numbers(list(held.values()), depth + 1) if isinstance(held, dict) else ()


def _parts(function: Callable[..., Any], kind: type[Part]) -> tuple[Part, ...]:
    """Modules, or parameters, that a function reaches, each once."""
    return tuple({id(value): value for value in _flat(_reached(function)) if isinstance(value, kind)}.values())
