"""The ledger as JSON, schema ``jettison.ledger/1``. The only place of this room where loose input becomes typed.

Readers ignore keys they do not know, so that documents may gain some.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from jettison.errors import UsageError
from jettison.ledger.record import ENTRY_FIELDS, Ledger, Placement, SavedTensor

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
def _adapter() -> TypeAdapter[LedgerDocument]:
    return TypeAdapter(LedgerDocument)


def ledger_document(ledger: Ledger) -> dict[str, Any]:
    """The document as what JSON is made of, for callers that add keys of their own."""
    return {
        "schema": SCHEMA,
        "layers": [{"layer": layer, "bytes": nbytes} for layer, nbytes in ledger.by_layer().items()],
        "entries": [{name: _plain(getattr(entry, name)) for name in ENTRY_FIELDS} for entry in ledger],
    }


def write_ledger(ledger: Ledger) -> str:
    """The document as JSON text."""
    return json.dumps(ledger_document(ledger), indent=1, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, Placement):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def read_ledger(text: str | bytes) -> Ledger:
    """Read a document back.

    Raises:
        UsageError: the text is not JSON, or not a document of this schema.
    """
    try:
        document = _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"not a {SCHEMA} document: {where}: {first['msg']} (one of {error.error_count()})") from error
    return Ledger(document.entries, layers=tuple(entry.layer for entry in document.layers))
