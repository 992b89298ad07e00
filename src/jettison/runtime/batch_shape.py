"""Shapes of a batch, or of a call's arguments: what a plan was made for, and what comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from jettison.capture.tensor_subclasses import plain


@dataclass(frozen=True, slots=True)
class Size:
    """Of one tensor."""

    dims: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return " x ".join(map(str, self.dims)) or "a scalar"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The tensors of a batch by where they are: ``0.input_ids`` is a tensor of the first argument, a mapping."""

    sizes: tuple[tuple[str, Size], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Any = ()) -> BatchShape:
        """Of a call's arguments."""
        found = [*_tensors(args, ()), *_tensors(dict(kwargs), ())]
        return cls(tuple((".".join(path), _size(plain(tensor))) for path, tensor in found))

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(size.nbytes for _, size in self.sizes)

    def covers(self, other: BatchShape) -> bool:
        """Whether the other is like this one, and nowhere longer: a step on it takes no more."""
        known = dict(self.sizes)
        return all(where in known and _within(size, known[where]) for where, size in other.sizes)

    def beyond(self, other: BatchShape) -> list[str]:
        """Where this one is longer than the other, or has more, in words."""
        known = dict(other.sizes)
        new = [f"{_named(where)} is new ({size})" for where, size in self.sizes if where not in known]
        longer = [
            f"{_named(where)} is {size}, planned was {known[where]}"
            for where, size in self.sizes
            if where in known and not _within(size, known[where])
        ]
        return [*longer, *new]

    def __str__(self) -> str:
        """Equal shapes once, under the part of their names in which they differ."""
        paths = [where.split(".") for where, _ in self.sizes]
        while all(len(path) > 1 for path in paths) and len({path[0] for path in paths}) == 1:
            paths = [path[1:] for path in paths]
        found: dict[str, list[str]] = {}
        for path, (_, size) in zip(paths, self.sizes, strict=True):
            found.setdefault(str(size), []).append(".".join(path))
        return ", ".join(f"{size} ({', '.join(wheres)})" for size, wheres in found.items()) or "no tensors"


def _named(where: str) -> str:
    return f"argument {where}" if where[:1].isdigit() else where


def _size(tensor: Tensor) -> Size:
    return Size(tuple(tensor.shape), tensor.numel() * tensor.element_size())


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Tensors in lists, mappings (a tokenizer's ``BatchEncoding``), trees that torch knows, and the attributes of
    objects that hold some (dataclasses), with their paths.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, list | tuple):
        inside: Any = enumerate(value)
    elif hasattr(value, "keys") and hasattr(value, "__getitem__"):
        inside = [(key, value[key]) for key in value.keys()]  # noqa: SIM118 (it may be no Mapping)
    elif type(value) in SUPPORTED_NODES:
        inside = enumerate(SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    elif not isinstance(value, type | nn.Module) and any(
        isinstance(one, Tensor) for one in getattr(value, "__dict__", {}).values()
    ):
        inside = vars(value).items()
    else:
        return
    for key, one in inside:
        yield from _tensors(one, (*path, str(key)))


def _within(size: Size, most: Size) -> bool:
    return (
        len(size.dims) == len(most.dims)
        and size.nbytes <= most.nbytes
        and all(a <= b for a, b in zip(size.dims, most.dims, strict=True))
    )
