"""`doctor --oom`: the cause when memory ran out, and the smallest changes that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jettison.diagnose.facts import MemoryFacts, Phase
from jettison.diagnose.finding import Finding
from jettison.diagnose.memory import diagnose_memory
from jettison.diagnose.oom_log import read_oom_log
from jettison.diagnose.oom_snapshot import facts_of_snapshot
from jettison.diagnose.watch_record import read_watch_record
from jettison.report.findings import FindingsReport
from jettison.traces.snapshot import read_snapshot
from jettison.units import format_gib
from jettison.verbs.snapshots import is_snapshot

OOM_SCHEMA = "jettison.oom/1"


def read_memory_facts(path: Path) -> MemoryFacts:
    """Read a snapshot, a record of `jettison.watch`, or a log.

    Raises:
        UsageError: it is none of them.
    """
    if is_snapshot(path):
        return facts_of_snapshot(read_snapshot(path))
    return read_watch_record(path) or read_oom_log(path)


def diagnose_oom(path: Path) -> FindingsReport:
    """Diagnose a file of a run whose memory ran out.

    Raises:
        UsageError: it says nothing about it.
    """
    facts = read_memory_facts(path)
    found = diagnose_memory(facts)
    return FindingsReport(schema=OOM_SCHEMA, facts=_rows(facts, found), findings=(found,), more=_document(facts, found))


def _rows(facts: MemoryFacts, found: Finding) -> list[tuple[str, str]]:
    rows = [("read", facts.source), ("it was", str(found.kind))]
    if facts.phase is not Phase.UNKNOWN:
        rows.append(("phase", str(facts.phase)))
    sizes = (
        ("asked for", facts.asked_bytes),
        ("allocated", facts.allocated_bytes),
        ("held unused", facts.unused_bytes),
        ("free", facts.free_bytes),
        ("of", facts.total_bytes),
    )
    return rows + [(name, format_gib(nbytes)) for name, nbytes in sizes if nbytes is not None]


def _document(facts: MemoryFacts, found: Finding) -> dict[str, Any]:
    names = (
        "source",
        "failed",
        "asked_bytes",
        "allocated_bytes",
        "unused_bytes",
        "free_bytes",
        "total_bytes",
        "expandable",
        "device",
        "trainer",
    )
    return {
        "cause": str(found.kind),
        "phase": str(facts.phase),
        "site": facts.site,
        "holders": [{"holder": name, "bytes": nbytes} for name, nbytes in facts.holders],
    } | {name: getattr(facts, name) for name in names}
