"""Findings for people and programs: claims, their evidence, and what would fix each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.documents import document
from jettison.diagnose.finding import Finding
from jettison.report.tables import facts

NONE: Final = "nothing to mend was found"


@dataclass(frozen=True, kw_only=True)
class FindingsReport:
    """Findings, below a few facts.

    Args:
        schema: of the JSON document.
        facts: (name, value) in the order in which to show them.
        of: has further keys of the document as attributes.
        more: others.
    """

    schema: str
    facts: Sequence[tuple[str, str]]
    findings: tuple[Finding, ...]
    more: dict[str, Any]
    of: object = None
    tables: tuple[RenderableType, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return document(self.schema, self.of, findings=self.findings, **self.more)

    def table(self) -> RenderableType:
        """For a terminal."""
        found = [Text(), *(line for finding in self.findings for line in _lines(finding))] if self.findings else []
        return Group(facts(self.facts), *self.tables, *(found or [Text(), Text(NONE)]))


def _lines(finding: Finding) -> list[Text]:
    lines = [Text(finding.claim, style="bold")]
    lines += [Text(f"  {line}") for line in finding.evidence]
    for change in finding.changes:
        lines.append(Text(f"  → {change.line}", style="green"))
        lines.append(Text(f"    {change.why}", style="dim"))
    return [*lines, Text()]
