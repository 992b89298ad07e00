"""Pages for newcomers: code and commands print what they say, figures of the lesson are drawn from the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.numpy_engine import figures

from support.consoles import commands, first_difference, printed, python_blocks, run_python

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "docs" / "lesson"
BEGIN = [ROOT / "docs" / f"{name}.md" for name in ("start", "comparison")]
PAGES = sorted([*LESSON.glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md"), *BEGIN])


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.stem)
def test_code_prints_what_the_page_says(page: Path) -> None:
    for text, got in run_python(page):
        assert got == text


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_print_what_the_page_says(page: Path) -> None:
    for command in commands(page):
        different = first_difference(command.lines, printed(command.words))
        assert different is None, f"{page.name}: {command.words}: {different}"


def test_figures_are_the_engines(tmp_path: Path) -> None:
    drawn = {path.name: path.read_bytes() for path in figures.write(tmp_path)}
    assert drawn.keys() == {path.name for path in LESSON.glob("*.svg")}
    for name, text in drawn.items():
        assert text == (LESSON / name).read_bytes(), f"{name}: python -m examples.numpy_engine figures"


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
