"""A model's repeated blocks, and the classes of equal ones."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from jettison.capture.state_kinds import attributes_of
from jettison.core.errors import UsageError
from jettison.core.objects import grouped

REGION_MARK = "__jettison_region__"


def find_blocks(model: nn.Module, regions: Iterable[str] | None = None) -> list[str]:
    """Dotted names of the modules to plan as regions, in the order in which the model names them.

    Explicit ``regions`` (names) take precedence; then classes marked with `jettison.checkpointable`; then the members
    of the outermost `ModuleList`, `Sequential`, or `ModuleDict` with numeric keys, that hold at least two composite
    modules of one class. Raise `UsageError` if a name in ``regions`` is no module of the model, or inside another.
    """
    modules = dict(model.named_modules())
    if regions is not None:
        names = list(regions)
        for name in names:
            if name not in modules:
                close = ", ".join(list(modules)[1:6])
                raise UsageError(f"region {name!r} is not a module of {type(model).__name__}; it has {close}, ...")
            for other in names:
                if name.startswith(f"{other}."):
                    raise UsageError(f"region {name!r} lies inside region {other!r}; give one of the two")
        return list(dict.fromkeys(names))
    marked = [name for name, m in modules.items() if name and getattr(type(m), REGION_MARK, False)]
    if marked:
        return _outermost(marked)
    found: list[str] = []
    for name, module in modules.items():
        members = [child for child in module._modules.values() if child is not None]  # repeated ones count each time
        kinds = [type(child) for child in members if _is_composite(child)] if _is_list(module) else []
        if len(set(kinds)) < len(kinds):
            prefix = f"{name}." if name else ""
            found.extend(prefix + child for child, m in module.named_children() if _is_composite(m))
    return _outermost(found)


def _is_list(container: nn.Module) -> bool:
    if isinstance(container, nn.ModuleDict):  # of a model that was split into pipeline stages, which keeps names
        return all(key.isdigit() for key in container)
    return isinstance(container, nn.ModuleList | nn.Sequential)


def only_blocks(model: nn.Module) -> list[str]:
    """Names of composite modules that are alone in a list: the block of a pipeline stage with only one."""
    found = []
    for name, module in model.named_modules():
        members = [child for child, m in module.named_children() if _is_composite(m)]
        if _is_list(module) and len(members) == 1 and not isinstance(module, nn.Sequential):
            found.append(f"{name}.{members[0]}" if name else members[0])
    return _outermost(found)


def _is_composite(module: nn.Module) -> bool:
    """Whether a module that can be called (no bare `ModuleList`) has several parts with parameters."""
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        return False
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules()) >= 2


def _outermost(names: list[str]) -> list[str]:
    chosen: list[str] = []
    for name in names:
        if not any(name.startswith(f"{other}.") for other in chosen):
            chosen.append(name)
    return chosen


def structural_keys(modules: dict[str, nn.Module]) -> dict[str, tuple[Any, ...]]:
    """Key of each module that is equal for modules built alike: classes, parameter shapes, flags and settings, but not
    integers that equal every sibling's position in its container.
    """
    keys = {}
    for names in grouped((name.rpartition(".")[0], name) for name in modules).values():
        ordinals = _ordinals({name: modules[name] for name in names})
        for name in names:
            keys[name] = tuple(
                (path, type(m).__module__, type(m).__qualname__, tuple(_settings(m, path, ordinals)), _tensors(m))
                for path, m in modules[name].named_modules()
            )
    return keys


def _ordinals(siblings: dict[str, nn.Module]) -> set[tuple[str, str]]:
    """(module path, attribute) pairs whose value is the sibling's own position, in every sibling."""
    found = []
    for name, module in siblings.items():
        last = name.rpartition(".")[2]
        settings = ((path, *item) for path, m in module.named_modules() for item in vars(m).items())
        position = int(last) if last.isdigit() else -1
        found.append({(path, key) for path, key, value in settings if type(value) is int and value == position})
    return set.intersection(*found) if len(found) > 1 else set()


def _settings(module: nn.Module, path: str, ordinals: set[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    plain = (bool, int, float, str, type(None))
    for key, value in sorted(vars(module).items()):
        if isinstance(value, plain):
            if (path, key) not in ordinals:
                yield key, value
        elif isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            yield key, f"{value.__module__}.{value.__qualname__}"
        elif isinstance(value, tuple) and all(isinstance(v, bool | int | float | str) for v in value):
            yield key, value
        elif not (key.startswith("_") or callable(value) or attributes_of(value) is None):  # a configuration
            held = attributes_of(value).items()
            yield key, tuple(sorted((k, v) for k, v in held if issubclass(type(v), plain)))


def _tensors(module: nn.Module) -> tuple[Any, ...]:
    def meta(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), tensor.requires_grad

    return tuple(tuple((name, meta(t)) for name, t in table.items()) for table in (module._parameters, module._buffers))
