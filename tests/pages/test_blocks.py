"""Every block of every page runs as a reader runs it, or the table says which test runs it, or why none does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages.session import ROOT, Block, Reader, blocks_of, reading
from pages.table import PAGES, Page
from support.consoles import first_difference, without_figures

MOST_NOT_HERE = 14
MOST_FILES = 7
WRITTEN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
READ = sorted(page for page in WRITTEN if blocks_of(page))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def known(page: Path) -> Page:
    return PAGES.get(name_of(page), Page())


def begins(block: Block, keys: object) -> str:
    """The longest of the keys that a block's first line begins with; empty where none does."""
    return max((key for key in keys if block.first_line.startswith(key)), key=len, default="")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PAGES)
def test_what_is_said_of_a_page_is_about_its_blocks(name: str) -> None:
    page, lines = PAGES[name], [block.first_line for block in blocks_of(ROOT / name)]
    for key in (*page.slow, *page.measured, *page.prints, *page.not_here):
        assert [line for line in lines if line.startswith(key)], f"{key!r} is gone from the page"
    for words in page.codes:
        assert [block for block in blocks_of(ROOT / name) if f"{words}\n" in block.text], f"{words!r} is gone"
    for reason in page.not_here.values():
        assert not reason.startswith("tests/") or (ROOT / reason).exists(), reason
    text = (ROOT / name).read_text(encoding="utf-8")
    assert all(file.removesuffix(".py") in text for file in page.files), "a file that the page does not speak of"


def test_exceptions_grow_only_on_purpose() -> None:
    """Blocks that run elsewhere or nowhere, and files that a page takes for given."""
    assert (
        sum(bool(begins(block, known(page).not_here)) for page in READ for block in blocks_of(page))
        <= MOST_NOT_HERE + 3
    )
    assert sum(len(page.not_here) for page in PAGES.values()) <= MOST_NOT_HERE
    assert sum(len(page.files) for page in PAGES.values()) <= MOST_FILES


def _is_slow(page: Path) -> bool:
    return any(begins(block, known(page).slow) for block in blocks_of(page))


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_a_page_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(page, tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in READ if _is_slow(page)], ids=name_of)
def test_all_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(page, tmp_path, monkeypatch, slow=True)


def runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool) -> None:
    """The blocks of a page in their order; those that take long only where that is asked for."""
    about = known(page)
    with reading(folder, page, monkeypatch) as reader:
        for make in about.files.values():
            make(folder)
        for block in blocks_of(page):
            if begins(block, about.not_here) or (not slow and begins(block, about.slow)):
                continue
            run_block(reader, block, about)


def run_block(reader: Reader, block: Block, about: Page) -> None:
    """One block: what it prints is what stands on the page."""
    if block.file:
        reader.save(block)
    elif block.kind == "python":
        printed = reader.python(block)
        if block.output:
            assert printed == block.output
        if pattern := about.prints.get(begins(block, about.prints), ""):
            assert re.fullmatch(pattern, printed, re.DOTALL), printed
    elif block.kind == "sh":
        reader.shell(block.text)
    else:
        measured = bool(begins(block, about.measured))
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            words, _, text = part.partition("\n")
            prints(reader, words, text, code=about.codes.get(f"$ {words}", 0), measured=measured)


def prints(reader: Reader, words: str, text: str, *, code: int, measured: bool) -> None:
    """What a command prints is what stands below it; a page may leave hints out, and wraps errors."""
    found, out, err = reader.command(words)
    assert found == code, (words, err)
    if not text.strip():
        return
    lines = text.rstrip().splitlines()
    error = "jettison: " + ".*".join(map(re.escape, " ".join(lines).removeprefix("jettison: ").split("...")))
    if code and re.fullmatch(error, " ".join(" ".join(err).split())):
        return
    if measured:
        lines = [line if line == "..." else without_figures(line) for line in lines]
    different = []
    for streams in (out, [*out, *err]):
        printed = "\n".join(streams).rstrip().splitlines()
        different.append(first_difference(tuple(lines), [*map(without_figures, printed)] if measured else printed))
    assert None in different, f"{words}: {different[0]}"
