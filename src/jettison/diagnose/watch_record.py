"""Records of `jettison.watch`: bytes between steps, batches, and the error, if any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError, first_problem
from jettison.diagnose.facts import Failure, MemoryFacts, StepBytes, StepPhase, Survivor
from jettison.diagnose.log import facts_of_log
from jettison.diagnose.snapshot import facts_of_snapshot, read_snapshot

SCHEMA: Final = "jettison.watch/1"
_OF_THE_MESSAGE: Final = (
    "total_bytes",
    "outside_bytes",
    "other_processes_bytes",
    "unaccounted_bytes",
    "shared_bytes",
    "trainer",
    "evaluating",
    "colocated",
    "own_optimizer",
    "device",
)
"""Facts that only an error message has."""


@dataclass(frozen=True, kw_only=True)
class WatchRecord:
    """One watched loop.

    Args:
        error: traceback and message of a failed request; "": bytes only grew.
        allocator: settings of the allocator, in the format of PyTorch's environment variable.
        snapshot: name of a memory snapshot in the same folder; "": none.
    """

    device: str
    steps: tuple[StepBytes, ...]
    survivors: tuple[Survivor, ...] = ()
    error: str = ""
    allocator: str = ""
    snapshot: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {"schema": SCHEMA, **asdict(self)}


def read_watch_record(path: Path) -> MemoryFacts | None:
    """Read a record, and the snapshot next to it; None if the file is not a record. Raise `UsageError` for an invalid
    record or snapshot.
    """
    try:
        with path.open("rb") as file:
            if file.read(1) != b"{":
                return None
        text = path.read_text(encoding="utf-8", errors="replace")
        document = json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give a file that exists") from error
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        return None
    from pydantic import TypeAdapter, ValidationError  # a loop that is watched does without

    try:
        record: WatchRecord = TypeAdapter(WatchRecord).validate_json(text, strict=True)
    except ValidationError as error:
        problem = first_problem(error)
        raise UsageError(f"{path} is a broken {SCHEMA} ({problem}); expected what jettison.watch() wrote") from error
    return _facts(record, path)


def _facts(record: WatchRecord, path: Path) -> MemoryFacts:
    expandable = "expandable_segments:true" in record.allocator.lower() or None
    kept = path.parent / Path(record.snapshot).name if record.snapshot else None
    facts = MemoryFacts(source=path.name, failed=False, device=record.device)
    if record.error:
        facts = facts_of_log(record.error, path.name)
    if kept is not None and kept.exists():
        seen = facts_of_snapshot(read_snapshot(kept))
        if record.error and seen.failed and facts.failure is Failure.REQUEST:
            told = {name: getattr(facts, name) for name in _OF_THE_MESSAGE}
            phase = facts.phase if seen.phase is StepPhase.UNKNOWN else seen.phase
            facts = replace(seen, **told, phase=phase, logits=seen.logits or facts.logits, source=path.name)
        else:
            facts = replace(facts, parts=seen.parts, survivors=seen.survivors)
    if not facts.failed and record.steps:
        facts = replace(facts, allocated_bytes=record.steps[-1].peak_bytes or record.steps[-1].between_bytes)
    return replace(
        facts,
        steps=record.steps,
        survivors=facts.survivors or record.survivors,
        expandable=facts.expandable or expandable,
    )
