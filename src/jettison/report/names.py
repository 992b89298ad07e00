"""What `jettison list` says: names with what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType

from jettison.report.parts import titled
from jettison.report.schemas import shaped

SCHEMA: Final = "jettison.list/1"
SENTENCES: Final = frozenset({"meaning"})
"""Columns of text; the others are figures."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One kind of names.

    Args:
        rows: one a name, as the document has it; the key ``name`` comes first.
        shown: columns for people: a header, and a cell out of a row.
    """

    name: str
    title: str
    rows: tuple[dict[str, Any], ...]
    shown: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]


@dataclass(frozen=True, kw_only=True)
class NamesReport:
    """All kinds, or the one that was asked for."""

    sections: tuple[Section, ...]

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.list/1``: a list for each kind; kinds that nobody asked for are null."""
        return shaped({"schema": SCHEMA, **{section.name: list(section.rows) for section in self.sections}})

    def table(self) -> RenderableType:
        """A table for each kind."""
        parts: list[RenderableType] = []
        for section in self.sections:
            texts = [header for header, _ in section.shown if header in SENTENCES]
            figures = [header for header, _ in section.shown if header not in SENTENCES]
            table = titled(section.title, ("name", *texts), figures)
            for row in section.rows:
                table.add_row(row["name"], *(cell(row) for _, cell in section.shown))
            parts += ["", table]
        return Group(*parts)
