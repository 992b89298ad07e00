"""What must be the same for a recorded program to stand for a call: arguments, modes, settings."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from jettison.trace.wrapped import plain, wrapping

_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def leaf_signature(leaf: Any) -> Any:
    """A tensor by its metadata, a plain value by itself, anything else by its type."""
    if isinstance(leaf, Tensor):
        inner = plain(leaf)
        return inner.shape, inner.stride(), leaf.dtype, leaf.requires_grad, leaf.device.type, wrapping(leaf)
    if isinstance(leaf, _SCALARS):
        return type(leaf), leaf
    return type(leaf)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The flat leaves of a call, and its hashable signature (positional and keyword structure included).

    Where in its memory an argument lies does not matter (micro-batches are parts of one batch), but how those that
    share memory lie to each other does.
    """
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, (spec, tuple(map(leaf_signature, leaves)), _sharing(leaves))


def _sharing(leaves: list[Any]) -> tuple[tuple[int, int, int], ...]:
    """(position, position of the first argument in the same memory, bytes between the two)."""
    first: dict[int, tuple[int, int]] = {}
    found = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            inner = plain(leaf)
            at = inner.storage_offset() * inner.element_size()
            other, start = first.setdefault(inner.untyped_storage()._cdata, (position, at))
            if other != position:
                found.append((position, other, at - start))
    return tuple(found)


def global_signature() -> tuple[Any, ...]:
    """Process-wide switches that choose kernels or cast arguments."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )


@contextlib.contextmanager
def as_signed(signature: tuple[Any, ...]) -> Iterator[None]:
    """The autocast state and the choice of attention kernels that a `global_signature` was taken under."""
    if signature == global_signature():
        yield
        return
    cpu, cpu_dtype, cuda, cuda_dtype, *kernels = signature
    switches = (
        (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
        (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
        (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    )
    before = [enabled() for enabled, _ in switches]
    with torch.autocast("cpu", dtype=cpu_dtype, enabled=cpu), torch.autocast("cuda", dtype=cuda_dtype, enabled=cuda):
        try:
            for (_, enable), wanted in zip(switches, kernels, strict=False):
                enable(wanted)
            yield
        finally:
            for (_, enable), was in zip(switches, before, strict=True):
                enable(was)


def opaque_copy(call: Any) -> Any:
    """The arguments of a call with objects that a forward may change (caches, side lists) copied; tensors are shared.

    An object that cannot be copied stays itself.
    """
    leaves, spec = tree_flatten(call)
    return tree_unflatten([_copied(leaf) for leaf in leaves], spec)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, (Tensor, nn.Module, *_SCALARS)) or callable(leaf):
        return leaf
    original = Tensor.__deepcopy__
    Tensor.__deepcopy__ = lambda self, _memo: self
    try:
        return copy.deepcopy(leaf)
    except Exception:  # a copy method of somebody else's class may fail in any way it likes
        return leaf
    finally:
        Tensor.__deepcopy__ = original


class ModuleGuard:
    """Notices that a module would run differently than when it was recorded.

    Watches train/eval, which parameters want gradients, replaced submodules and parameters, every plain setting
    (numbers, strings, functions) on the modules and on the configuration objects that they hold, and the plain globals
    that their methods name, directly or in a function of the same file.

    Args:
        ignored: settings that were seen to change without changing what is computed, as (id of their table, key).
    """

    def __init__(self, module: nn.Module, ignored: frozenset[tuple[int, str]] = frozenset()) -> None:
        self.settings: list[tuple[Mapping[str, Any], str, Any]] = []
        self.parameters: list[tuple[dict[str, Any], str, bool]] = []
        seen: set[int] = set()
        for sub in module.modules():
            self._watch(vars(sub), seen)
            self._watch_class(sub)
            for name, child in sub._modules.items():
                self.settings.append((sub._modules, name, child))
            for name, parameter in sub._parameters.items():
                if parameter is not None:
                    self.parameters.append((sub._parameters, name, parameter.requires_grad))
        for cls in {cls for sub in module.modules() for cls in _own_classes(sub)}:
            for function in vars(cls).values():
                if isinstance(function, types.FunctionType):
                    self._watch_globals(function, seen)
        if ignored:
            self.settings = [s for s in self.settings if (id(s[0]), s[1]) not in ignored]

    def _watch_globals(self, function: types.FunctionType, seen: set[int], *, nested: bool = False) -> None:
        table, code = function.__globals__, function.__code__
        if id(code) in seen:
            return
        seen.add(id(code))
        codes = [code, *(c for c in code.co_consts if isinstance(c, types.CodeType))]
        for key in dict.fromkeys(name for c in codes for name in c.co_names if name in table):
            value = table[key]
            if isinstance(value, _SCALARS):
                self.settings.append((table, key, value))
            elif isinstance(value, types.FunctionType) and value.__globals__ is table and not nested:
                self._watch_globals(value, seen, nested=True)
            elif not isinstance(value, types.ModuleType) and hasattr(value, "__dict__") and _is_configuration(value):
                self._watch(vars(value), seen, nested=True)

    def _watch(self, attributes: dict[str, Any], seen: set[int], *, nested: bool = False) -> None:
        if id(attributes) in seen:
            return
        seen.add(id(attributes))
        for key, value in attributes.items():
            if isinstance(value, (*_SCALARS, types.FunctionType, types.BuiltinFunctionType)):
                self.settings.append((attributes, key, value))
            elif not nested and key[:1] != "_" and hasattr(value, "__dict__") and _is_configuration(value):
                self._watch(vars(value), seen, nested=True)

    def _watch_class(self, module: nn.Module) -> None:
        """Settings that live on the class: there they may change, and on the module they may be covered."""
        for cls in _own_classes(module):
            for key, value in vars(cls).items():
                if isinstance(value, _SCALARS) and key[:2] != "__":
                    self.settings.append((vars(cls), key, value))
                    if key not in vars(module):
                        self.settings.append((vars(module), key, _MISSING))

    def holds(self) -> bool:
        """Whether everything watched is as it was."""
        for attributes, key, value in self.settings:
            now = attributes.get(key, _MISSING)
            if now is not value and (
                now.__class__ is not value.__class__ or isinstance(value, nn.Module) or now != value
            ):
                return False
        for attributes, key, wants in self.parameters:
            parameter = attributes.get(key)
            if parameter is None or parameter.requires_grad is not wants:
                return False
        return True

    def changed(self) -> frozenset[tuple[int, str]]:
        """The settings that are not as they were."""
        return frozenset((id(a), k) for a, k, v in self.settings if (now := a.get(k, _MISSING)) is not v and now != v)


_MISSING = object()


def _own_classes(module: nn.Module) -> tuple[type, ...]:
    return type(module).__mro__[: type(module).__mro__.index(nn.Module)]


def _is_configuration(value: Any) -> bool:
    return not isinstance(value, nn.Module | Tensor | type) and not callable(value)
