"""Prose in the field's terms: how many places still are not, and how much there is to read. Bounds only go down."""

from pathlib import Path

from support import words

MOST_PLACES_IN_1000_LINES = 0.3
MOST_WORDS_OF_README = 900
MOST_WORDS_OF_PAGES = 60_000


def test_prose_uses_the_fields_terms() -> None:
    files = words.files()
    found = list(words.places(files))
    assert 1000 * len(found) <= MOST_PLACES_IN_1000_LINES * words.lines_of(files), found[-20:]


def test_words_to_read() -> None:
    readme, *pages = words.pages()
    assert words.words_of([readme]) <= MOST_WORDS_OF_README
    assert words.words_of(pages) <= MOST_WORDS_OF_PAGES


def test_code_is_no_prose(tmp_path: Path) -> None:
    source = [
        '"""What it is."""',
        'rows["beside"] = x.narrow(0, 0, 1)  # made again',
        'raise E(f"held beside {x}")',
        "# `beside`",
    ]
    (tmp_path / "a.py").write_text("\n".join(source))
    (tmp_path / "b.md").write_text("Products are\nrun again, ``to the bit``.\n")
    found = words.places([tmp_path / "a.py", tmp_path / "b.md"])
    assert [(place.file.name, place.line) for place in found] == [("a.py", 1), ("a.py", 2), ("a.py", 3), ("b.md", 2)]
