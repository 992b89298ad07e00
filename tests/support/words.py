"""Count prose that avoids the field's terms: ``python tests/support/words.py [--most N] [PATH ...]`` lists places.

Prose is comments, docstrings and messages of the package, and every line of README.md and of the pages under docs/,
except decisions and generated pages. Code is left out: ``tensor.narrow()``, ``rows["beside"]`` and names in backticks.
A place is one to read again, not a verdict; ``tests/test_prose.py`` bounds the count per 1,000 lines.
"""

from __future__ import annotations

import argparse
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = {
    "a docstring names its thing, no What or How": r'"""(?:What|How|Of|That|Where|Whose|With what|The same of)\b',
    "recompute, recomputation": r"\b(?:comput\w+|runs?|ran|made|done) again\b",
    "in addition to, alongside, live at the same time as": r"\bbeside\b",
    "after": r"\bbehind (?:it|them|that|each|every|a |the )",
    "multi-token prediction": r"further tokens?",
    "matmuls, GEMMs": r"(?<!--)\b(?:matrix )?products\b",
    "FP8, FP4, low precision": r"\bnarrow(?:er)?\b",
    "offloaded to CPU": r"\bwaits? (?:on|in) the host|tensors that wait\b",
    "raises a clear error": r"\b(?:refused|said|stops?|ends?) in words\b",
    "bitwise identical": r"\bto the bit\b",
    "keeps a reference": r"\b(?:has|have) (?:a )?names? (?:for|until)|\bnames? until\b",
    "warns, logs, reports": r"\bit is said\b|\bsays so\b",
    "omit, drop": r"\bleave it away|left away\b",
    "is freed": r"\b(?:goes|is gone|are gone) (?:with|then|behind)\b",
    "unsharded, full": r"\bwhole (?:weights?|parameters?|gradients?|tensors?)\b",
}
"""What the field says instead, and what to look for."""
ON_PAGES = {
    "offloaded, offloaded to CPU": r"\b(?:on|to|from) the host\b|\bsent away\b",
    "breakdown": r"\btaken apart\b",
    "no recomputation, full recomputation": r"\beverything (?:is )?(?:kept|recomputed)\b",
    "Pareto front": r"(?<!Pareto )\bfronts?\b",
    "per-tensor": r"\bmixed\b",
    "region policy": r"\btreatments?\b",
}
"""In addition, for what a page of the product shows: `avoided` tells them in a text."""
NOT_FOR_USERS = frozenset({"decisions", "generated", "_build"})


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line that matches a pattern; `term` is the field's."""

    file: Path
    line: int
    term: str
    text: str


def pages() -> list[Path]:
    """Pages for users, README.md first."""
    docs = (ROOT / "docs").rglob("*.md")
    return [ROOT / "README.md", *sorted(path for path in docs if not NOT_FOR_USERS & set(path.parts))]


def files() -> list[Path]:
    """Every counted file."""
    package = (ROOT / "src").rglob("*")
    return [*sorted(path for path in package if path.suffix in {".py", ".md"}), *pages()]


def prose(path: Path) -> list[str]:
    """Return the file's lines with everything blanked that is no prose."""
    text = path.read_text(encoding="utf-8")
    lines = (_strings_and_comments(text) if path.suffix == ".py" else text).split("\n")
    return [re.sub(r"`+[^`]+`+", "", line) for line in lines]


def avoided(text: str) -> list[str]:
    """Return the lines of a shown text that avoid the field's terms, each with the term."""
    terms = {**dict(list(PATTERNS.items())[1:]), **ON_PAGES}
    return [f"{term}: {line}" for line in text.split("\n") for term, at in terms.items() if re.search(at, line, re.I)]


def _strings_and_comments(source: str) -> str:
    lines = [[" "] * len(line) for line in source.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name == "COMMENT" or (name in {"STRING", "FSTRING_MIDDLE"} and " " in token.string):
            (row, column), texts = token.start, token.string.split("\n")
            for offset, part in enumerate(texts):
                begin = column if offset == 0 else 0
                lines[row - 1 + offset][begin : begin + len(part)] = part
    return "\n".join("".join(line) for line in lines)


def places(paths: Iterable[Path]) -> Iterator[Place]:
    """Each line of these files that matches a pattern, once a pattern."""
    for path in paths:
        for number, line in enumerate(prose(path), 1):
            for term, pattern in PATTERNS.items():
                if re.search(pattern, line):
                    yield Place(file=path, line=number, term=term, text=line.strip())


def lines_of(paths: Iterable[Path]) -> int:
    """Number of lines, blank ones and code included."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def words_of(paths: Iterable[Path]) -> int:
    """Number of words as ``wc -w`` counts them, tables included."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--most", type=int, default=3, help="places listed for each term")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; all that is counted by default")
    options = parser.parse_args(arguments)
    under = [path.resolve() for path in options.paths]
    chosen = [path for path in files() if not under or any(path.is_relative_to(top) for top in under)]
    found = list(places(chosen))
    for term in PATTERNS:
        here = [place for place in found if place.term == term]
        if here:
            print(f"{len(here):5}  {term}")
        for place in here[: options.most]:
            print(f"         {place.file.relative_to(ROOT)}:{place.line}: {place.text[:110]}")
    lines = lines_of(chosen)
    print(f"{len(found)} places in {lines:,} lines, {1000 * len(found) / max(lines, 1):.1f} in 1,000")
    print(f"words: README.md {words_of(pages()[:1]):,}, pages {words_of(pages()[1:]):,}")


if __name__ == "__main__":
    main()
