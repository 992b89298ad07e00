"""The entry of the ledger: one `SavedTensor` for every tensor that a forward saves for its backward.

Nothing here depends on where an entry came from, and nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import prod
from typing import Final

from jettison.core.dtypes import dtype_bytes, dtype_name
from jettison.core.errors import UsageError

EACH_ROUND: Final = "each iteration's "
"""Prefix of the role of a tensor that a formula has once for all iterations of a loop; its first dim counts them."""


class Origin(StrEnum):
    """Source of an entry."""

    FORMULA = "formula"
    TRACE = "trace"
    MEASURED = "measured"


class Placement(Mapping[str, int]):
    """Mesh axis → tensor dim that is sharded over it. Frozen and hashable; an axis that is not named replicates."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, int] | Iterable[tuple[str, int]] = ()) -> None:
        pairs = items.items() if isinstance(items, Mapping) else items
        self._items = tuple(sorted(dict(pairs).items()))

    def __getitem__(self, axis: str) -> int:
        return dict(self._items)[axis]

    def __iter__(self) -> Iterator[str]:
        return (axis for axis, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"Placement({dict(self._items)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """One tensor saved for backward. Raise `UsageError` if a field contradicts another, or itself.

    ``shape`` is logical: the tensor before any mesh axis shards it. ``storage`` names the allocation: aliases and views
    share it, and it is counted once, at ``storage_bytes`` (logical as well), which may be more than this view covers,
    or less where the view is expanded. The recompute figures are the work of one rank.
    """

    layer: str
    path: str
    op: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    storage_bytes: int
    origin: Origin
    placement: Mapping[str, int] = Placement()
    recompute_flops: int = 0
    recompute_bytes_moved: int = 0
    inputs: tuple[str, ...] = ()
    anchor: str | None = None
    reference: str = ""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "shape", tuple(self.shape))
        put(self, "inputs", tuple(self.inputs))
        put(self, "dtype", dtype_name(self.dtype))
        put(self, "placement", Placement(self.placement))
        put(self, "origin", Origin(self.origin))
        put(self, "anchor", None if self.anchor is None else str(self.anchor))
        self._check()

    def _check(self) -> None:
        who = f"saved tensor {self.role!r} of {self.layer or 'no layer'}"
        if not self.storage:
            raise UsageError(f"{who} names no storage; expected an id that its aliases share")
        if any(size < 0 for size in self.shape):
            raise UsageError(f"{who} has shape {self.shape}; expected sizes of 0 or more")
        for name in ("storage_bytes", "recompute_flops", "recompute_bytes_moved"):
            if getattr(self, name) < 0:
                raise UsageError(f"{who} has {name}={getattr(self, name)}; expected 0 or more")
        for axis, dim in self.placement.items():
            if not 0 <= dim < len(self.shape):
                raise UsageError(f"{who} is sharded over {axis!r} on dim {dim}; its shape is {self.shape}")

    @property
    def nbytes(self) -> int:
        """Bytes that this view covers, before sharding."""
        return prod(self.shape) * dtype_bytes(self.dtype)

    def local_shape(self, mesh_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape on the rank that holds most: sizes are rounded up. `UsageError` if ``mesh_sizes`` lacks an axis."""
        shape = list(self.shape)
        for axis, dim in self.placement.items():
            if axis not in mesh_sizes:
                raise UsageError(f"{self.role!r} is sharded over axis {axis!r}; got sizes for {sorted(mesh_sizes)}")
            shape[dim] = -(-shape[dim] // mesh_sizes[axis])
        return tuple(shape)

    def local_bytes(self, mesh_sizes: Mapping[str, int]) -> int:
        """Bytes that this view covers on one rank."""
        return prod(self.local_shape(mesh_sizes)) * dtype_bytes(self.dtype)

    def local_storage_bytes(self, mesh_sizes: Mapping[str, int]) -> int:
        """Bytes of the storage on one rank: it shrinks as the view does, rounded up."""
        if self.nbytes == 0:
            return self.storage_bytes
        return -(-self.storage_bytes * self.local_bytes(mesh_sizes) // self.nbytes)

    def in_layer(self, layer: str) -> SavedTensor:
        """This entry of no layer as a layer has it, which names its storages. A checked entry is not checked again."""
        put, made = object.__setattr__, object.__new__(SavedTensor)
        for name in ENTRY_FIELDS:
            put(made, name, getattr(self, name))
        put(made, "layer", layer)
        put(made, "storage", layer + self.storage)
        put(made, "inputs", tuple(layer + each for each in self.inputs))
        return made

    def on_rank(self, mesh_sizes: Mapping[str, int]) -> SavedTensor:
        """This entry as one rank has it: local shape and bytes, no sharding left."""
        return replace(
            self,
            shape=self.local_shape(mesh_sizes),
            storage_bytes=self.local_storage_bytes(mesh_sizes),
            placement=Placement(),
        )


ENTRY_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(SavedTensor))
"""Names of an entry's fields, in order."""
