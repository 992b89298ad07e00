"""The ledger as JSON, schema ``jettison.ledger/1``. The only place of this room where loose input becomes typed.

Readers ignore keys they do not know, so that documents may gain some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from jettison.core.errors import UsageError
from jettison.ledger.record import ENTRY_FIELDS, Placement, SavedTensor

SCHEMA: Literal["jettison.ledger/1"] = "jettison.ledger/1"


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What one layer saves for backward."""

    layer: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class LedgerDocument:
    """What is read. The command line writes further keys around these, about the whole step."""

    schema: Literal["jettison.ledger/1"]
    layers: tuple[LayerBytes, ...]
    entries: tuple[SavedTensor, ...]


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # writing a document needs none of it

    return TypeAdapter(LedgerDocument)


def document(layers: Mapping[str, int], entries: Iterable[SavedTensor]) -> dict[str, Any]:
    """The document as what JSON is made of, for callers that add keys of their own.

    Args:
        layers: and their bytes, in order.
    """
    return {
        "schema": SCHEMA,
        "layers": [{"layer": layer, "bytes": nbytes} for layer, nbytes in layers.items()],
        "entries": [{name: _plain(getattr(entry, name)) for name in ENTRY_FIELDS} for entry in entries],
    }


def read_document(text: str | bytes) -> tuple[tuple[str, ...], tuple[SavedTensor, ...]]:
    """The layers of a document, in order, and its entries.

    Raises:
        UsageError: the text is not JSON, or not a document of this schema.
    """
    from pydantic import ValidationError

    try:
        found: LedgerDocument = _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"not a {SCHEMA} document: {where}: {first['msg']} (one of {error.error_count()})") from error
    return tuple(entry.layer for entry in found.layers), found.entries


def _plain(value: object) -> object:
    if isinstance(value, Placement):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return value
