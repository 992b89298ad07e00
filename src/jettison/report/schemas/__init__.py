"""The shape of every document, one for each schema: JSON Schema is generated from it, and tests hold documents to it.

A document has all keys of its schema, whatever was asked: what does not apply is null, and never left out. Keys are
added within a version, never renamed; what would change the meaning of one makes a new version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jettison.report.schemas.described import EstimateDocument, LedgerDocument, SearchDocument
from jettison.report.schemas.others import (
    AppliedDocument,
    CalibrationDocument,
    DoctorDocument,
    ErrorDocument,
    ExportDocument,
    HazardsDocument,
    ListDocument,
    OomDocument,
    ProfileDocument,
    ReportDocument,
    RunDocument,
    SnapshotDocument,
    WeightsDocument,
)
from jettison.report.schemas.planned import PlanDocument, ProofDocument

SCHEMAS: Final[Mapping[str, type]] = {
    "jettison.applied/1": AppliedDocument,
    "jettison.calibration/1": CalibrationDocument,
    "jettison.doctor/1": DoctorDocument,
    "jettison.doctor_model/1": HazardsDocument,
    "jettison.error/1": ErrorDocument,
    "jettison.estimate/1": EstimateDocument,
    "jettison.export/1": ExportDocument,
    "jettison.ledger/1": LedgerDocument,
    "jettison.list/1": ListDocument,
    "jettison.oom/1": OomDocument,
    "jettison.plan/1": PlanDocument,
    "jettison.profile/1": ProfileDocument,
    "jettison.proof/1": ProofDocument,
    "jettison.report/1": ReportDocument,
    "jettison.run/1": RunDocument,
    "jettison.search/1": SearchDocument,
    "jettison.snapshot/1": SnapshotDocument,
    "jettison.weights/1": WeightsDocument,
}
"""By the name that a document says under ``schema``."""


def keys_of(schema: str) -> tuple[str, ...]:
    """Of a document, in their order."""
    return tuple(SCHEMAS[schema].__annotations__)


def shaped(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same document with all keys of its schema: those that it lacks are null."""
    keys = keys_of(document["schema"])
    return {**{key: document.get(key) for key in keys}, **{k: v for k, v in document.items() if k not in keys}}


def json_schema(schema: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a document."""
    from pydantic import TypeAdapter

    made = TypeAdapter(SCHEMAS[schema]).json_schema(mode="serialization")
    words = " ".join((SCHEMAS[schema].__doc__ or "").split())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": schema,
        **made,
        "title": schema,
        "description": words,
    }


def check(document: str | bytes) -> str:
    """Hold a document's text to its schema, unknown keys included; its schema's name.

    Raises:
        pydantic.ValidationError: it is of another shape.
        KeyError: no such schema.
    """
    import json

    from pydantic import ConfigDict, TypeAdapter

    text = document if isinstance(document, str) else document.decode()
    name: str = json.loads(text)["schema"]
    # a list of one: pydantic lets nobody state the strictness of a TypedDict from outside
    shape: Any = SCHEMAS[name]
    adapter: Any = TypeAdapter(list[shape], config=ConfigDict(extra="forbid"))
    adapter.validate_json(f"[{text}]", strict=True)
    return name
