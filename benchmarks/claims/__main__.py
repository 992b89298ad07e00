"""Write docs/claims.csv, every claim with its commands, and docs/claims.md, those that are not right."""

from __future__ import annotations

import csv
import io
from itertools import chain
from pathlib import Path

from . import explainer, foundations, lesson, overview
from .claim import Claim, Verdict

DOCS = Path(__file__).parents[2] / "docs"
PAGE, ROWS = DOCS / "claims.md", DOCS / "claims.csv"
TEMPLATE = Path(__file__).parents[1] / "pages" / "claims.md"
SOURCES: dict[str, tuple[Claim, ...]] = {
    "explainer": explainer.CLAIMS,
    "lesson": lesson.CLAIMS,
    "overview": overview.CLAIMS,
    "foundations": foundations.CLAIMS,
}
HEAD = "| claim | claimed | computed | why |\n| --- | ---: | ---: | --- |"


def table(claims: tuple[Claim, ...]) -> str:
    """Claims of one source that are wrong, or right of some runs only."""
    return "\n".join([HEAD, *(claim.row() for claim in claims if claim.verdict is not Verdict.RIGHT)])


def page() -> str:
    """Text of the page."""
    tables = {name: table(claims) for name, claims in SOURCES.items()}
    claims = list(chain.from_iterable(SOURCES.values()))
    counts = {verdict.value: sum(claim.verdict is verdict for claim in claims) for verdict in Verdict}
    return TEMPLATE.read_text(encoding="utf-8").format_map(tables | counts | {"all": len(claims)})


def rows() -> str:
    """Text of the CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["source", "claim", "claimed", "computed", "verdict", "why", "commands and keys of their JSON"])
    writer.writerows([source, *claim.cells()] for source, claims in SOURCES.items() for claim in claims)
    return text.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    ROWS.write_text(rows(), encoding="utf-8")
    print(PAGE.name, ROWS.name)
