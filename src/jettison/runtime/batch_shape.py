"""Shapes of a batch or of a call's arguments: the planned ones, and those that arrive.

A forward may decide by an argument's values which ops it runs (transformers leaves out a padding mask of ones). The
shape says of such a tensor whether all its elements are equal.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from jettison.capture.tensor_subclasses import plain
from jettison.runtime.device import is_capturing


@dataclass(frozen=True, slots=True)
class Size:
    """Dims and bytes of one tensor; ``uniform``: all its values are equal; None: they do not decide which ops run."""

    dims: tuple[int, ...]
    nbytes: int
    uniform: bool | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; 0 for an empty tensor."""
        return self.nbytes // max(1, math.prod(self.dims))

    def around(self, other: Size) -> Size:
        """Return the elementwise maximum of both sizes."""
        if len(self.dims) != len(other.dims):
            return max(self, other, key=lambda size: size.nbytes)
        dims = tuple(map(max, self.dims, other.dims))
        return Size(dims, math.prod(dims) * max(self.element_bytes, other.element_bytes))

    def __str__(self) -> str:
        return (" x ".join(map(str, self.dims)) or "a scalar") + " of one value" * bool(self.uniform)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of a batch's tensors by path: ``0.input_ids`` is a tensor of the first argument, a mapping."""

    sizes: tuple[tuple[str, Size], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Any = (), decisive: Collection[str] = ()) -> BatchShape:
        """Return the shape of these arguments. ``decisive``: last keys of tensors whose values decide which ops run."""
        found = tensors_by_path(args, kwargs).items()
        return cls(tuple((path, _size(plain(tensor), path.rpartition(".")[2] in decisive)) for path, tensor in found))

    @property
    def nbytes(self) -> int:
        return sum(size.nbytes for _, size in self.sizes)

    def covers(self, other: BatchShape) -> bool:
        """Whether the other has these tensors, none of them longer: a step on it takes no more memory."""
        known = dict(self.sizes)
        return all(where in known and _within(size, known[where]) for where, size in other.sizes)

    def around(self, other: BatchShape) -> BatchShape:
        """Return the elementwise maximum of both shapes."""
        found = dict(self.sizes)
        for where, size in other.sizes:
            found[where] = found[where].around(size) if where in found else size
        return BatchShape(tuple(found.items()))

    def can_become(self, other: BatchShape) -> bool:
        """Whether the other has the same tensors with other lengths."""
        return [where for where, _ in self.sizes] == [where for where, _ in other.sizes] and all(
            len(size.dims) == len(wanted.dims) and size.element_bytes == wanted.element_bytes
            for (_, size), (_, wanted) in zip(self.sizes, other.sizes, strict=True)
        )

    def beyond(self, other: BatchShape) -> list[str]:
        """Describe where this shape is longer than the other, or has more tensors."""
        known = dict(other.sizes)
        named = {where: f"argument {where}" if where[:1].isdigit() else where for where, _ in self.sizes}
        new = [f"{named[where]} is new ({size})" for where, size in self.sizes if where not in known]
        longer = [
            f"{named[where]} is {size}, planned was {known[where]}"
            for where, size in self.sizes
            if where in known and not _within(size, known[where])
        ]
        return [*longer, *new]

    def __str__(self) -> str:
        """List equal shapes once, under the part of their names in which they differ."""
        paths = [where.split(".") for where, _ in self.sizes]
        while all(len(path) > 1 for path in paths) and len({path[0] for path in paths}) == 1:
            paths = [path[1:] for path in paths]
        found: dict[str, list[str]] = {}
        for path, (_, size) in zip(paths, self.sizes, strict=True):
            found.setdefault(str(size), []).append(".".join(path))
        return ", ".join(f"{size} ({', '.join(wheres)})" for size, wheres in found.items()) or "no tensors"


def _size(tensor: Tensor, is_decisive: bool) -> Size:
    uniform = is_uniform(tensor) if is_decisive else None
    return Size(tuple(tensor.shape), tensor.numel() * tensor.element_size(), uniform)


def is_uniform(tensor: Tensor) -> bool:
    """Whether all values are known to be equal."""
    return not (tensor.is_meta or is_capturing()) and bool((tensor == tensor.reshape(-1)[:1]).all())


def tensors_by_path(args: tuple[Any, ...], kwargs: Any = ()) -> dict[str, Tensor]:
    """Tensors of a call's arguments, by their paths in its `BatchShape`."""
    return {".".join(path): tensor for tree in (args, dict(kwargs)) for path, tensor in _tensors(tree, ())}


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Tensors of a tree, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, one in _inside(value):
        yield from _tensors(one, (*path, str(key)))


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    """Items, by key, of a list, a mapping, a pytree node, or an object with tensors (a dataclass)."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if type(value) in SUPPORTED_NODES:
        return enumerate(SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    held = {} if isinstance(value, type | nn.Module) else getattr(value, "__dict__", {})
    return held.items() if any(isinstance(one, Tensor) for one in held.values()) else ()


def map_tensors(change: Callable[[str, Tensor], Tensor], value: Any, *path: str) -> Any:
    """Map the tensors of a tree; ``change`` gets each one's name, as in `BatchShape.sizes`, and the tensor."""
    if isinstance(value, Tensor):
        return change(".".join(path), value)
    changed = {key: map_tensors(change, one, *path, str(key)) for key, one in _inside(value)}
    if isinstance(value, list | tuple):
        return value._make(changed.values()) if hasattr(value, "_make") else type(value)(changed.values())
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key, one in changed.items():
            made[key] = one
        return made
    if type(value) in SUPPORTED_NODES:
        node = SUPPORTED_NODES[type(value)]
        return node.unflatten_fn(changed.values(), node.flatten_fn(value)[1])
    if changed:
        made = copy.copy(value)
        vars(made).update(changed)
        return made
    return value


def _within(size: Size, most: Size) -> bool:
    return (
        len(size.dims) == len(most.dims)
        and size.uniform == most.uniform
        and size.nbytes <= most.nbytes
        and all(a <= b for a, b in zip(size.dims, most.dims, strict=True))
    )
