"""Shapes of a batch, or of a call's arguments: what a plan was made for, and what comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

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
    """The tensors of a batch by where they are."""

    sizes: tuple[tuple[str, Size], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Any = ()) -> BatchShape:
        """Of a call's arguments."""
        return cls(
            tuple(
                (keystr(path[1:]) or "the argument", Size(tuple(inner.shape), inner.numel() * inner.element_size()))
                for path, leaf in tree_leaves_with_path((args, dict(kwargs)))
                if isinstance(leaf, Tensor)
                for inner in [plain(leaf)]
            )
        )

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
        new = [f"{where} is new ({size})" for where, size in self.sizes if where not in known]
        longer = [
            f"{where} is {size}, planned was {known[where]}"
            for where, size in self.sizes
            if where in known and not _within(size, known[where])
        ]
        return [*longer, *new]

    def __str__(self) -> str:
        """Equal shapes once."""
        found: dict[str, list[str]] = {}
        for where, size in self.sizes:
            found.setdefault(str(size), []).append(where.strip("[]'."))
        return ", ".join(f"{size} ({', '.join(wheres)})" for size, wheres in found.items()) or "no tensors"


def _within(size: Size, most: Size) -> bool:
    return (
        len(size.dims) == len(most.dims)
        and size.nbytes <= most.nbytes
        and all(a <= b for a, b in zip(size.dims, most.dims, strict=True))
    )
