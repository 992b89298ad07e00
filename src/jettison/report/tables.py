"""Pieces of all tables: names and values, grids of rows, names in short, and notes on devices.

NOTE [ Tables on any terminal ]
Rich takes from the columns of text whatever is missing, down to nothing: the first column, which says what a row is
about, is the first to go. Here a figure is never cut, a word of a header never broken, and columns that do not
fit side by side stand in parts below, each with the first column again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, Literal, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jettison.core.units import format_bytes
from jettison.spec.frameworks import BASE_STACK, named
from jettison.spec.hardware import Hardware
from jettison.spec.run import Run

Item = TypeVar("Item", bound=Any)
MOST_RUNS = 4
"""A span with more gaps than this is shortened."""


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, without a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


def grid(
    title: str,
    left: Iterable[str],
    right: Iterable[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    last: Iterable[str] = (),
    bold: Container[int] = (),
) -> FittedTable:
    """A table with columns of text, of figures, and of text again (``last``). Rows of these indices are bold."""
    table = FittedTable(title, left, right, last)
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index in bold else "")
    return table


def alike(items: Iterable[Item], key: Callable[[Item], object]) -> Iterator[tuple[str, Item]]:
    """Neighbours with one key as one row: their names in short, and the first of them."""
    for _, group in groupby(items, key=key):
        members = list(group)
        yield span([member.layer for member in members]), members[0]


def signed(nbytes: int) -> str:
    """A change of bytes."""
    return f"+{format_bytes(nbytes)}" if nbytes > 0 else format_bytes(nbytes)


def exact(nbytes: int) -> str:
    """Rounded for people, and to the byte."""
    return f"{format_bytes(nbytes)} ({nbytes}B)"


def span(names: Sequence[str], *, brief: bool = False) -> str:
    """Numbered names in short: ``layers.0 to 31 (32)``, ``layers.0, 4, 8 ... 28 (8)``; others as they are.

    Args:
        brief: numbers alone, ``0-31``.
    """
    texts, counted = [], 0
    for stem, group in groupby(names, key=_stem):
        members = list(group)
        if stem is None:
            texts += members
            continue
        numbers = [int(name.removeprefix(stem)) for name in members]
        runs = runs_of(numbers, "-" if brief else " to ")
        shown = ", ".join(runs) if len(runs) <= MOST_RUNS else f"{', '.join(runs[:3])} ... {runs[-1]}"
        texts.append(shown if brief else f"{stem}{shown}")
        counted += len(members) > 1
    return ", ".join(texts) + (f" ({len(names)})" if counted and not brief else "")


def _stem(name: str) -> str | None:
    """Name up to its number, the dot included; None without a number."""
    stem, dot, number = name.rpartition(".")
    return f"{stem}{dot}" if number.isdecimal() else None


def runs_of(numbers: Iterable[int], to: str) -> list[str]:
    """Consecutive numbers in short, one text a run."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    members = [[n for _, n in group] for _, group in runs]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in members]


def device_notes(hardware: Hardware, run: Run) -> Iterator[str]:
    """Rates of a hardware that were not measured, and those that its file lacks for a run."""
    if hardware.reached_source.startswith("estimated"):
        yield f"how much of its peaks {hardware.name} reaches is estimated, not measured"
    states = "execution" in named("stacks").get(str(run.stack), {})  # what a code waits for is no figure of a device
    if run.stack not in (None, BASE_STACK) and not states and hardware.under(str(run.stack)) is hardware:
        yield f"{hardware.name} has no figures of the stack {run.stack}: its file's own are taken"
    yield from rate_note(hardware, run)


def rate_note(hardware: Hardware, run: Run) -> Iterator[str]:
    """Say where a recipe's GEMMs have no rate of their own in the hardware's file."""
    recipe, peaks = run.precision.recipe, hardware.flops_per_second
    if recipe is None:
        return
    if peaks.fp8 is None:
        yield f"{hardware.name} has no rate of fp8: GEMMs by {recipe.name} are priced as 16-bit ones"
    elif recipe.bits == 4 and peaks.fp4 is None:
        yield f"{hardware.name} has no rate of fp4: GEMMs by {recipe.name} are priced as fp8's"


# Tables that fit ------------------------------------------------------------------------------------------------------

LEAST_TEXT: Final = 12
LEAST_SENTENCE: Final = 28
LONG_WORD: Final = 20
"""Columns of text are not folded below the first, sentences below the second, words of up to the third not at all."""
BETWEEN: Final = 3
"""Characters of padding of each column: a space on both sides and one between."""


class FittedTable:
    """Columns of text, of figures, and of text again, for `rich` to print. See NOTE [ Tables on any terminal ]."""

    def __init__(self, title: str, left: Iterable[str], right: Iterable[str], last: Iterable[str] = ()) -> None:
        self.title = title
        names, figures = tuple(left), tuple(right)
        self._headers = (*names, *figures, *last)
        self._figures = range(len(names), len(names) + len(figures))
        self._rows: list[tuple[tuple[str, ...], str]] = []  # cells and style
        self._section_ends: set[int] = set()

    @property
    def row_count(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def add_row(self, *cells: str, style: str = "") -> None:
        """One cell a column; missing ones are empty."""
        missing = len(self._headers) - len(cells)
        assert missing >= 0, (self.title, cells)
        self._rows.append(((*cells, *[""] * missing), style))

    def add_section(self) -> None:
        """A line of space below the last row."""
        self._section_ends.add(len(self._rows) - 1)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._part(range(len(self._headers)), self.title))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, widths in enumerate(self._parts(options.max_width)):
            if number:
                yield ""
            yield self._part(list(widths), "" if number else self.title, widths)

    def _parts(self, width: int) -> list[dict[int, int]]:
        """Columns of each part with their widths; one part where everything fits."""
        every = range(len(self._headers))
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
        """Spend what is left of the width on names, the one that lacks least before the others, then on sentences,
        which read well in several lines, and then on headers.
        """
        spare = width - _needed(part)
        found = dict(part)
        for index in sorted(part, key=lambda i: (self._turn(i), self._natural(i) - part[i])):
            more = min(spare, self._natural(index) - found[index])
            found[index] += more
            spare -= more
        return found

    def _turn(self, index: int) -> int:
        return 2 if index in self._figures else int(_widest(self._cells(index)) > 2 * LEAST_SENTENCE)

    def _cells(self, index: int) -> list[str]:
        return [cells[index] for cells, _ in self._rows]

    def _natural(self, index: int) -> int:
        return max((len(self._headers[index]), *(_widest(cell.splitlines()) for cell in self._cells(index))))

    def _least(self, index: int) -> int:
        """A figure is not folded, a header between its words, text down to the widths above."""
        header, longest = _widest(self._headers[index].split()), _widest(self._cells(index))
        if index in self._figures:
            return max(header, longest)
        words = max((0, *(_widest(cell.split()) for cell in self._cells(index))))
        sentence = LEAST_SENTENCE if longest > 2 * LEAST_SENTENCE else 0
        return max(header, min(words, LONG_WORD), min(longest, LEAST_TEXT), sentence, 1)

    def _part(self, indices: Sequence[int], title: str, widths: dict[int, int] | None = None) -> Table:
        table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
        for index in indices:
            width, figures = None if widths is None else widths[index], index in self._figures
            side: Literal["left", "right"] = "right" if figures else "left"
            table.add_column(self._headers[index], justify=side, overflow="fold", width=width)
        for number, (cells, style) in enumerate(self._rows):
            ends = number in self._section_ends
            table.add_row(*(cells[index] for index in indices), style=style, end_section=ends)
        return table


def _needed(widths: dict[int, int]) -> int:
    return sum(widths.values()) + BETWEEN * len(widths) - 1


def _widest(texts: Iterable[str]) -> int:
    return max((len(text) for text in texts), default=0)
