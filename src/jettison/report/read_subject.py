"""A file becomes a `Subject`: plans, proofs, and logs of training runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from jettison.errors import PlanMismatch, UsageError
from jettison.report.plan import DESCRIBED
from jettison.report.proof import SCHEMA as PROOF_SCHEMA
from jettison.report.proof import Proof
from jettison.report.subject import Subject
from jettison.report.subject_described import described_plan, described_subject
from jettison.report.subject_live import plan_subject, proof_subject
from jettison.report.subject_run import RUN_SCHEMA, run_subject
from jettison.report.untrusted import all_printable, parse_json, read_text
from jettison.solve.plan import SCHEMA as PLAN_SCHEMA
from jettison.solve.plan import Plan

LOG: Final = "log.jsonl"
Read = TypeVar("Read")
_EXPECTED: Final = f"expected {PLAN_SCHEMA}, {PROOF_SCHEMA}, or {LOG} of a run ({RUN_SCHEMA})"


def read_subject(path: Path) -> Subject:
    """What a file, or the log folder of a run, says.

    Raises:
        UsageError: it is none of these documents, or does not keep to its schema or to the limits.
    """
    if path.is_dir():
        path = path / LOG
        if not path.is_file():
            raise UsageError(f"there is no {LOG} in {path.parent}; give a run's log folder, or a file")
    text, name = read_text(path), str(path)
    if path.suffix == ".jsonl":
        return _clean(replace(run_subject(text, name, plans=_plans_beside(path)), name=name))
    document = parse_json(text, name)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == PROOF_SCHEMA:
        return _clean(proof_subject(_read(lambda: Proof.from_json(text), name), name))
    if schema != PLAN_SCHEMA:
        raise UsageError(f"{name}: {f'schema {schema!r}' if schema else 'no schema'}; {_EXPECTED}")
    if document.get("feasible") is False:
        raise UsageError(f"{name} says that no plan fits its budget; there is nothing to report about")
    if document.get("made_from") == DESCRIBED:
        described = _read(lambda: described_plan().validate_json(text), name)
        return _clean(described_subject(described, name))
    plan = _read(lambda: Plan.from_json(text), name)
    about = _read(lambda: _about().validate_json(text), name)
    return _clean(plan_subject(plan, name, about.environment or {}))


def _read(read: Callable[[], Read], name: str) -> Read:
    try:
        return read()
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    except PlanMismatch as error:
        raise UsageError(f"{name}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"{name}: {where}: {first['msg']} (one of {error.error_count()})") from None


def _clean(subject: Subject) -> Subject:
    """Whatever was in the file, nothing in it makes a terminal do something."""
    made: Subject = TypeAdapter(Subject).validate_python(all_printable(subject.data()))
    return made


def _plans_beside(log: Path) -> tuple[Plan, ...]:
    """Plans that the run left beside its log; none where there are none, or they cannot be read."""
    found = []
    for path in sorted(log.parent.glob("plan*.json"))[:64]:
        try:
            found.append(Plan.from_json(read_text(path)))
        except (UsageError, PlanMismatch):
            continue
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _About:
    """What a live plan's document says beside the plan."""

    environment: dict[str, str] | None = None


@cache
def _about() -> TypeAdapter[_About]:
    return TypeAdapter(_About)
