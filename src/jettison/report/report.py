"""One document, or two to compare, as a page, as tables, as JSON."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jettison.errors import UsageError
from jettison.report.page import page
from jettison.report.schemas import shaped
from jettison.report.subject import Subject

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA: Final = "jettison.report/1"
_NAMES: Final = "AB"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one or two documents of a kind say."""

    subjects: tuple[Subject, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.subjects) <= len(_NAMES):
            raise UsageError(f"got {len(self.subjects)} documents; expected one, or two to compare")
        kinds = [str(subject.kind) for subject in self.subjects]
        if len(set(kinds)) > 1:
            raise UsageError(f"got a {kinds[0]} and a {kinds[1]}; expected two of one kind to compare")

    @property
    def title(self) -> str:
        """Of the page."""
        kind = str(self.subjects[0].kind)
        return kind.capitalize() if len(self.subjects) == 1 else f"Two {kind}s compared"

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.report/1``."""
        return shaped({"schema": SCHEMA, "subjects": [subject.data() for subject in self.subjects]})

    def table(self) -> RenderableType:
        """For people at a terminal."""
        from jettison.report.report_tables import report_table

        return report_table(self.subjects)

    def html(self) -> str:
        """The page."""
        names = [subject.name for subject in self.subjects]
        intro = names[0] if len(names) == 1 else "A and B, side by side; a menu chooses where a figure shows one."
        command = f"jettison report {' '.join(map(shlex.quote, names))}"
        return page(
            self.title,
            intro=intro,
            scripts=("panels/report.js",),
            styles=("panels/report.css",),
            data={"report": {"subjects": [subject.data() for subject in self.subjects], "command": command}},
        )
