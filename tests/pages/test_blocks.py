"""Every block of code and every command on every page is run, or says which test runs it, or why none does."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from pages.table import PAGES
from pages.worlds import Page, World
from support.consoles import first_difference, said, without_figures

ROOT = Path(__file__).resolve().parents[2]
WHOLE = {"docs/start.md", "docs/comparison.md", "docs/claims.md"}  # tests/lesson
LOG = {"docs/log.md"}  # what was run once, on one machine


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return [page for page in found if str(page.relative_to(ROOT)) not in WHOLE | LOG]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Kind and text of each block that can be run."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(python|console|sh)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def first_line(block: str) -> str:
    return block.partition("\n")[0]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    known = PAGES.get(str(page.relative_to(ROOT)), Page())
    lines = [first_line(block) for _, block in blocks(page)]
    keys = [*known.run, *known.not_here]
    for line in lines:
        assert [key for key in keys if line.startswith(key)], f"{line!r} is in no world, and has no reason"
    for key in keys:
        assert [line for line in lines if line.startswith(key)], f"{key!r} is gone from the page"
    for reason in known.not_here.values():
        assert not reason.startswith("tests/") or (ROOT / reason).exists(), reason


CASES = [(page, line, world) for page, known in PAGES.items() for line, world in known.run.items()]


def _cases(*, slow: bool) -> list[object]:
    return [pytest.param(*case, id=f"{case[0]}: {case[1][:60]}") for case in CASES if case[2].slow is slow]


@pytest.mark.parametrize(("page", "line", "world"), _cases(slow=False))
def test_it_does_what_the_page_says(
    page: str, line: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(page, line, world, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line", "world"), _cases(slow=True))
def test_it_does_what_the_page_says_in_its_time(
    page: str, line: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(page, line, world, tmp_path, monkeypatch)


def runs(page: str, line: str, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks whose first line begins so, in a folder of their own, one after another."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("BROWSER", "true")  # of --open
    before = set(sys.modules)
    names = world.setup(folder)
    try:
        for kind, block in blocks(ROOT / page):
            if not first_line(block).startswith(line):
                continue
            if kind == "python":
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(block, page, "exec"), names)
            else:
                for words, text in commands_of(kind, block):
                    prints(words, text, world)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


def commands_of(kind: str, block: str) -> list[tuple[str, str]]:
    """Commands, and what stands below them."""
    if kind == "sh":
        return [(words, "") for words in block.splitlines()]
    parts = (part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:])
    return [(words, text) for words, _, text in parts]


def prints(words: str, text: str, world: World) -> None:
    """What a command says is what stands below it; notes and errors may be wrapped there."""
    found = said(words)
    assert found.code == world.code, found.err
    if not text.strip():
        return
    if world.code:
        wanted, got = (" ".join(lines) for lines in (text.split(), " ".join(found.err).split()))
        assert re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), got), got
        return
    lines, printed = text.rstrip().splitlines(), "\n".join([*found.out, *found.err]).rstrip().splitlines()
    if world.measured:
        lines, printed = (
            [line if line == "..." else without_figures(line) for line in lines],
            [*map(without_figures, printed)],
        )
    different = first_difference(tuple(lines), printed)
    assert different is None, f"{words}: {different}"
