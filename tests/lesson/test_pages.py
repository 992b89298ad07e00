"""The lesson: figures are drawn from its engine, chapters are in the table. What its blocks print: tests/pages."""

from __future__ import annotations

import re
from pathlib import Path

from examples.numpy_engine import figures

from support.consoles import first_difference
from support.words import avoided

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "docs" / "lesson"


def test_figures_are_the_engines(tmp_path: Path) -> None:
    drawn = {path.name: path.read_bytes() for path in figures.write(tmp_path)}
    assert drawn.keys() == {path.name for path in LESSON.glob("*.svg")}
    for name, text in drawn.items():
        assert text == (LESSON / name).read_bytes(), f"{name}: python -m examples.numpy_engine figures"


def test_figures_use_the_fields_terms() -> None:
    for path in LESSON.parent.rglob("*.svg"):
        shown = re.sub(r"<[^>]+>", "\n", path.read_text(encoding="utf-8"))
        assert avoided(shown.replace("mixed", "")) == [], path  # a tensor of the engine


def test_every_chapter_is_in_the_table_and_every_exercise_has_an_answer() -> None:
    table = (LESSON / "README.md").read_text(encoding="utf-8")
    answers = (LESSON / "answers.md").read_text(encoding="utf-8")
    for chapter in sorted(LESSON.glob("0*.md")):
        text = chapter.read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        assert f"[{title}]({chapter.name})" in table
        asked = text.partition("## Exercises")[2]
        given = answers.partition(f"## {title}")[2].partition("\n## ")[0]
        for number in (1, 2, 3):
            assert f"\n{number}. " in asked and f"\n{number}. " in given, (title, number)
        assert "jettison" in text, "the way to a real model"


def test_a_difference_is_found() -> None:
    got = ["a", "b", "c", "d"]
    assert first_difference(("a", "...", "c", "d"), got) is None
    assert first_difference(("...", "b", "..."), got) is None
    assert first_difference(("a", "c"), got) == "c"
    assert first_difference(("a", "b"), got) == "and then 'c'"
    assert first_difference(("...", "d", "a"), got) == "a"
