"""A `Ledger`: all entries of a forward. Formulas, traces and measurements return one; any two can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, overload

from jettison.core.errors import UsageError, first_problem
from jettison.core.objects import summary
from jettison.ledger.record import ENTRY_FIELDS, Placement, SavedTensor


@dataclass(frozen=True)
class Ledger(Sequence[SavedTensor]):
    """An immutable sequence of entries, with the order of the layers.

    ``layers`` may name layers that save nothing. By default it is the order in which entries first mention them.

    Raises:
        UsageError: ``layers`` repeats a name or lacks the layer of an entry.
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
