"""A `Ledger`: one `SavedTensor` for every tensor that a forward saves for its backward.

Formulas, traces and measurements return one; any two can be compared, since nothing in an entry depends on where it
came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from math import prod
from typing import Any, Final, Literal, overload

from jettison.core.dtypes import dtype_bytes, dtype_name
from jettison.core.errors import UsageError, first_problem
from jettison.core.objects import summary

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


@dataclass(frozen=True)
class Ledger(Sequence[SavedTensor]):
    """An immutable sequence of entries, with the order of the layers.

    ``layers`` may name layers that save nothing. By default it is the order in which entries first mention them. Raise
    `UsageError` if it repeats a name or lacks the layer of an entry.
    """

    entries: tuple[SavedTensor, ...] = ()
    layers: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        mentioned = tuple(dict.fromkeys(entry.layer for entry in self.entries))
        layers = tuple(self.layers) or mentioned
        if len(set(layers)) != len(layers):
            raise UsageError(f"the layer order {layers} names a layer twice")
        if missing := [layer for layer in mentioned if layer not in set(layers)]:
            raise UsageError(f"the layer order {layers} lacks {missing}, which entries belong to")
        object.__setattr__(self, "layers", layers)

    def __repr__(self) -> str:
        return summary(self, f"{len(self.entries)} saved tensors of {len(self.layers)} layers")

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> SavedTensor: ...
    @overload
    def __getitem__(self, index: slice) -> Ledger: ...
    def __getitem__(self, index: int | slice) -> SavedTensor | Ledger:
        return self._subset(self.entries[index]) if isinstance(index, slice) else self.entries[index]

    def filter(self, predicate: Callable[[SavedTensor], bool] | None = None, /, **wanted: object) -> Ledger:
        """Entries for which ``predicate`` holds and whose fields equal ``wanted``. `UsageError` for unknown fields."""
        if unknown := [name for name in wanted if name not in ENTRY_FIELDS]:
            raise UsageError(f"entries have no field {unknown[0]!r}; expected one of {', '.join(ENTRY_FIELDS)}")

        def holds(entry: SavedTensor) -> bool:
            equal = all(getattr(entry, name) == value for name, value in wanted.items())
            return equal and (predicate is None or predicate(entry))

        return self._subset(entry for entry in self.entries if holds(entry))

    def group(self, by: str | Callable[[SavedTensor], Hashable]) -> dict[Hashable, Ledger]:
        """Ledgers by the value of a field, or of a function of an entry, in order of first appearance. Raise
        `UsageError` if ``by`` names a field that entries do not have.

        Each ledger counts its own storages, so one that two groups share is in both totals.
        """
        if isinstance(by, str) and by not in ENTRY_FIELDS:
            raise UsageError(f"entries have no field {by!r}; expected one of {', '.join(ENTRY_FIELDS)}")
        groups: dict[Hashable, list[SavedTensor]] = {}
        for entry in self.entries:
            value = getattr(entry, by) if isinstance(by, str) else by(entry)
            groups.setdefault(value, []).append(entry)
        return {value: self._subset(entries) for value, entries in groups.items()}

    def storage_bytes(self) -> dict[str, int]:
        """Bytes of each storage, at the largest size that an entry states."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            sizes[entry.storage] = max(sizes.get(entry.storage, 0), entry.storage_bytes)
        return sizes

    def total_bytes(self) -> int:
        """Bytes of all storages together, each counted once."""
        return sum(self.storage_bytes().values())

    def by_layer(self) -> dict[str, int]:
        """Bytes of each layer, in layer order. A storage is counted once, in the first layer that saves it."""
        return {layer: sum(entry.storage_bytes for entry in own) for layer, own in self.storages().items()}

    def storages(self) -> dict[str, list[SavedTensor]]:
        """Each storage, at its first entry of the largest size, under the first layer that saves it, in layer order."""
        position = {layer: i for i, layer in enumerate(self.layers)}
        owner: dict[str, str] = {}
        largest: dict[str, SavedTensor] = {}
        for entry in sorted(self.entries, key=lambda entry: position[entry.layer]):
            owner.setdefault(entry.storage, entry.layer)
            known = largest.setdefault(entry.storage, entry)
            if entry.storage_bytes > known.storage_bytes:
                largest[entry.storage] = entry
        found: dict[str, list[SavedTensor]] = {layer: [] for layer in self.layers}
        for storage, layer in owner.items():
            found[layer].append(largest[storage])
        return found

    def on_rank(self, mesh_sizes: Mapping[str, int]) -> Ledger:
        """The ledger of one rank of a mesh: every entry with its local shape and bytes."""
        return replace(self, entries=tuple(entry.on_rank(mesh_sizes) for entry in self.entries))

    def to_csv(self) -> str:
        """All entries as CSV with a header; shapes as ``256x2x128``, placements as ``tp:2``."""
        import csv  # imported on use, as are the others of this module
        import io

        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(ENTRY_FIELDS)
        writer.writerows([_cell(getattr(entry, name)) for name in ENTRY_FIELDS] for entry in self.entries)
        return out.getvalue()

    def to_json(self) -> str:
        """The document ``jettison.ledger/1``: layers with their bytes, and all entries."""
        found = {
            "schema": SCHEMA,
            "layers": [{"layer": layer, "bytes": nbytes} for layer, nbytes in self.by_layer().items()],
            "entries": [{name: getattr(entry, name) for name in ENTRY_FIELDS} for entry in self.entries],
        }
        return json.dumps(found, indent=1, ensure_ascii=False, default=dict)  # a placement

    @classmethod
    def from_json(cls, text: str | bytes) -> Ledger:
        """Read a document that `to_json` or ``jettison ledger --format json`` wrote. Raise `UsageError` if the text is
        not such a document.
        """
        from pydantic import ValidationError

        try:
            found: LedgerDocument = _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            raise UsageError(f"not a {SCHEMA} document: {first_problem(error)}") from error
        return cls(found.entries, layers=tuple(entry.layer for entry in found.layers))

    def _subset(self, entries: Iterable[SavedTensor]) -> Ledger:
        chosen = tuple(entries)
        present = {entry.layer for entry in chosen}
        return Ledger(chosen, layers=tuple(layer for layer in self.layers if layer in present))


def _cell(value: object) -> object:
    if isinstance(value, Placement):
        return " ".join(f"{axis}:{dim}" for axis, dim in value.items())
    if isinstance(value, tuple):
        separator = "x" if all(isinstance(item, int) for item in value) else " "
        return separator.join(str(item) for item in value)
    return value


# document -------------------------------------------------------------------------------------------------------------
#
# The ledger as JSON, schema ``jettison.ledger/1``: the only place of this package that parses untyped input. Readers
# ignore unknown keys, so that documents may gain some.


SCHEMA: Literal["jettison.ledger/1"] = "jettison.ledger/1"


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes that one layer saves for backward."""

    layer: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class LedgerDocument:
    """The parsed fields. The command line adds keys about the whole step to the document."""

    schema: Literal["jettison.ledger/1"]
    layers: tuple[LayerBytes, ...]
    entries: tuple[SavedTensor, ...]


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # writing a document needs none of it

    return TypeAdapter(LedgerDocument)


def storage_roles(entries: Iterable[SavedTensor], mesh_sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Role and bytes of each storage on a rank: the role of its first entry, its largest size."""
    roles: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for entry in entries:
        roles.setdefault(entry.storage, entry.role)
        sizes[entry.storage] = max(sizes.get(entry.storage, 0), entry.local_storage_bytes(mesh_sizes))
    return [(roles[storage], nbytes) for storage, nbytes in sizes.items()]
