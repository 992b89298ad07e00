"""Writes docs/claims.md."""

from __future__ import annotations

from pathlib import Path

from . import explainer, foundations, lesson, overview
from .claim import Claim, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
TEMPLATE = Path(__file__).parents[1] / "pages" / "claims.md"
SOURCES: dict[str, tuple[Claim, ...]] = {
    "explainer": explainer.CLAIMS,
    "lesson": lesson.CLAIMS,
    "overview": overview.CLAIMS,
    "foundations": foundations.CLAIMS,
}
HEAD = "| claim | its number | ours | | why | command, and what to read of its JSON |"
LINE = "| --- | ---: | ---: | --- | --- | --- |"


def table(claims: tuple[Claim, ...]) -> str:
    """A source's claims, one a row."""
    return "\n".join([HEAD, LINE, *(claim.row() for claim in claims)])


def page() -> str:
    """The whole page."""
    tables = {name: table(claims) for name, claims in SOURCES.items()}
    claims = [claim for found in SOURCES.values() for claim in found]
    counts = {verdict.value: sum(claim.verdict is verdict for claim in claims) for verdict in Verdict}
    return TEMPLATE.read_text(encoding="utf-8").format_map(tables | counts | {"all": len(claims)})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.name)
