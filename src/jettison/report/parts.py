"""Pieces that tables are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from jettison.core.units import format_bytes
from jettison.report.fitted import FittedTable
from jettison.spec.hardware import Hardware
from jettison.spec.run import Run, Software

MOST_RUNS = 4
"""A span with more gaps than this is shortened."""


def facts_table(rows: list[tuple[str, str]]) -> Table:
    """Names and values, without a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


def titled(title: str, left: Sequence[str], right: Sequence[str]) -> FittedTable:
    """A table with columns of text and then of figures."""
    return FittedTable(title, left, right)


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
        runs = [_run(run, "-" if brief else " to ") for run in _consecutive(numbers)]
        shown = ", ".join(runs) if len(runs) <= MOST_RUNS else f"{', '.join(runs[:3])} ... {runs[-1]}"
        texts.append(shown if brief else f"{stem}{shown}")
        counted += len(members) > 1
    return ", ".join(texts) + (f" ({len(names)})" if counted and not brief else "")


def _stem(name: str) -> str | None:
    """What stands before a name's number, its dot included; None without a number."""
    stem, dot, number = name.rpartition(".")
    return f"{stem}{dot}" if number.isdecimal() else None


def _consecutive(numbers: list[int]) -> list[list[int]]:
    return [[n for _, n in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]


def _run(numbers: list[int], to: str) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}{to}{numbers[-1]}"


def device_notes(hardware: Hardware, run: Run) -> Iterator[str]:
    """What a hardware's file does not know of a run."""
    yield from stack_note(hardware, run)
    yield from rate_note(hardware, run)


def rate_note(hardware: Hardware, run: Run) -> Iterator[str]:
    """Where a recipe's products have no rate of their own in the hardware's file."""
    recipe, peaks = run.precision.recipe, hardware.flops_per_second
    if recipe is None:
        return
    if peaks.fp8 is None:
        yield f"{hardware.name} has no rate of fp8: products by {recipe.name} are priced as those of 16 bits"
    elif recipe.bits == 4 and peaks.fp4 is None:
        yield f"{hardware.name} has no rate of fp4: products by {recipe.name} are priced as fp8's"


def stack_note(hardware: Hardware, run: Run) -> Iterator[str]:
    """Where a stack was asked for that the hardware's file does not know."""
    if run.stack not in (None, Software.BASE) and hardware.under(str(run.stack)) is hardware:
        yield f"{hardware.name} has no figures of the stack {run.stack}: its file's own are taken"
