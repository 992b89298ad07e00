"""A table that keeps all its columns on any terminal: it folds text first, and then goes on below in further parts.

Rich takes from the columns of text whatever is missing, down to nothing: the first column, which says what a row is
about, is the first to go. Here a figure is never cut, a word of a header never broken, and what does not fit beside one
another stands in parts below, each with the first column again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

LEAST_TEXT: Final = 12
LEAST_SENTENCE: Final = 28
LONG_WORD: Final = 20
"""Columns of text are not folded below the first, sentences below the second, words of up to the third not at all."""
BETWEEN: Final = 3
"""Characters beside each column: a space on both sides and one between."""


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    figures: bool


@dataclass(slots=True)
class _Row:
    cells: tuple[str, ...]
    style: str
    ends_section: bool = False


class FittedTable:
    """Columns of text and of figures; what `rich` can print."""

    def __init__(self, title: str, left: Iterable[str], right: Iterable[str]) -> None:
        self.title = title
        self._columns = [_Column(name, False) for name in left] + [_Column(name, True) for name in right]
        self._rows: list[_Row] = []

    @property
    def row_count(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def add_column(self, header: str) -> None:
        """One more column of text, behind the others."""
        self._columns.append(_Column(header, False))

    def add_row(self, *cells: str, style: str = "") -> None:
        """One cell a column; missing ones are empty."""
        missing = len(self._columns) - len(cells)
        assert missing >= 0, (self.title, cells)
        self._rows.append(_Row((*cells, *[""] * missing), style))

    def add_section(self) -> None:
        """A line of space below the last row."""
        if self._rows:
            self._rows[-1].ends_section = True

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._part(range(len(self._columns)), self.title))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, widths in enumerate(self._parts(options.max_width)):
            if number:
                yield ""
            yield self._part(list(widths), "" if number else self.title, widths)

    # what goes where ----------------------------------------------------------------------------------------------

    def _parts(self, width: int) -> list[dict[int, int]]:
        """Columns of each part with their widths; one part where everything fits."""
        every = range(len(self._columns))
        whole = {index: self._natural(index) for index in every}
        if _needed(whole) <= width:
            return [whole]
        parts = [{0: self._least(0)}]
        for index in every[1:]:
            least = self._least(index)
            if len(parts[-1]) > 1 and _needed(parts[-1]) + least + BETWEEN > width:
                parts.append({0: self._least(0)})
            parts[-1][index] = least
        return [self._widened(part, width) for part in parts]

    def _widened(self, part: dict[int, int], width: int) -> dict[int, int]:
        """What is left of the width goes to the columns that lack most."""
        spare = width - _needed(part)
        found = dict(part)
        while spare > 0:
            lacks = {index: self._natural(index) - found[index] for index in found}
            index = max(lacks, key=lambda i: (lacks[i], -i))
            if lacks[index] <= 0:
                break
            found[index] += 1
            spare -= 1
        return found

    def _cells(self, index: int) -> list[str]:
        return [row.cells[index] for row in self._rows]

    def _natural(self, index: int) -> int:
        header = len(self._columns[index].header)
        return max((header, *(_widest(cell.splitlines()) for cell in self._cells(index))))

    def _least(self, index: int) -> int:
        """A figure is not folded, a header between its words, text down to the widths above."""
        column = self._columns[index]
        header = _widest(column.header.split())
        if column.figures:
            return max((header, *(len(cell) for cell in self._cells(index))))
        longest = _widest(self._cells(index))
        words = max((0, *(_widest(cell.split()) for cell in self._cells(index))))
        sentence = LEAST_SENTENCE if longest > 2 * LEAST_SENTENCE else 0
        return max(header, min(words, LONG_WORD), min(longest, LEAST_TEXT), sentence, 1)

    def _part(self, indices: Sequence[int], title: str, widths: dict[int, int] | None = None) -> Table:
        table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
        for index in indices:
            column = self._columns[index]
            table.add_column(
                column.header,
                justify="right" if column.figures else "left",
                overflow="fold",
                width=None if widths is None else widths[index],
            )
        for row in self._rows:
            table.add_row(*(row.cells[index] for index in indices), style=row.style, end_section=row.ends_section)
        return table


def _needed(widths: dict[int, int]) -> int:
    return sum(widths.values()) + BETWEEN * len(widths) - 1


def _widest(texts: Iterable[str]) -> int:
    return max((len(text) for text in texts), default=0)
