"""Pieces of one memory: whether two views of it can meet."""

from __future__ import annotations

from typing import Any, Protocol


class Strided(Protocol):
    """A view; ``offset`` in elements from the start of the memory."""

    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def dtype(self) -> Any: ...


def are_apart(a: Strided, b: Strided) -> bool:
    """Whether two views of one memory surely have no element in common: boxes of one grid that do not meet."""
    if a.dtype is not b.dtype:
        return False
    sizes: dict[int, list[int]] = {}  # by stride, largest first
    for place, ref in enumerate((a, b)):
        for n, step in zip(ref.size, ref.stride, strict=True):
            if n == 0:
                return True
            if n > 1:
                found = sizes.setdefault(step, [1, 1])
                if step < 1 or found[place] > 1:
                    return False  # more than one dim steps like this: no grid
                found[place] = n
    starts = [a.offset, b.offset]
    meets, room = True, None
    for step in sorted(sizes, reverse=True):
        at = [start // step for start in starts]
        starts = [start % step for start in starts]
        lengths = sizes[step]
        if room is not None and any(
            room % step or first + n > room // step for first, n in zip(at, lengths, strict=True)
        ):
            return False  # one wraps into the next row
        meets = meets and at[0] < at[1] + lengths[1] and at[1] < at[0] + lengths[0]
        room = step
    return not meets or starts[0] != starts[1]
