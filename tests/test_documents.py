"""What the documents say can be done: links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in targets:
        path, _, place = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{target} is not there"
        if place:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert place in anchors, f"{target}: no such heading"


def test_no_merge_was_left_half_done() -> None:
    """Its marks may stand in docstrings and pages, where nothing else minds them."""
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    folders = ("src", "tests", "benchmarks", "docs", "examples", "recipes")
    files = [*PAGES, *(file for name in folders for kind in ("py", "md") for file in (ROOT / name).rglob(f"*.{kind}"))]
    assert [str(file) for file in files if marks.search(file.read_text(encoding="utf-8"))] == []
