"""One document, or two to compare, as a page, as tables, as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.errors import UsageError
from jettison.core.units import format_bytes, format_flops, format_ratio, format_seconds
from jettison.report.fitted import FittedTable
from jettison.report.page import page
from jettison.report.parts import exact, facts_table, span, titled
from jettison.report.schemas import shaped
from jettison.report.subject import Fate, Grid, LayerBytes, Subject
from jettison.report.tables import ROOT_NAME

if TYPE_CHECKING:
    from rich.console import RenderableType


SCHEMA: Final = "jettison.report/1"
_NAMES: Final = "AB"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one or two documents of a kind say."""

    subjects: tuple[Subject, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.subjects) <= len(_NAMES):
            raise UsageError(f"got {len(self.subjects)} documents; expected one, or two to compare")
        kinds = [str(subject.kind) for subject in self.subjects]
        if len(set(kinds)) > 1:
            raise UsageError(f"got a {kinds[0]} and a {kinds[1]}; expected two of one kind to compare")

    @property
    def title(self) -> str:
        """Of the page."""
        kind = str(self.subjects[0].kind)
        return kind.capitalize() if len(self.subjects) == 1 else f"Two {kind}s compared"

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.report/1``."""
        return shaped({"schema": SCHEMA, "subjects": [subject.data() for subject in self.subjects]})

    def table(self) -> RenderableType:
        """For people at a terminal."""
        return report_table(self.subjects)

    def html(self) -> str:
        """The page."""
        names = [subject.name for subject in self.subjects]
        intro = names[0] if len(names) == 1 else "A and B, side by side; a menu chooses where a figure shows one."
        command = f"jettison report {' '.join(map(shlex.quote, names))}"
        return page(
            self.title,
            intro=intro,
            scripts=("panels/report.js",),
            styles=("panels/report.css",),
            data={"report": {"subjects": [subject.data() for subject in self.subjects], "command": command}},
        )


# A report at a terminal: the same numbers as the page's, in tables that 80 columns are enough for ---------------------


def report_table(subjects: Sequence[Subject]) -> RenderableType:
    """All there is to say, document after document where two are compared, and their numbers side by side."""
    parts: list[RenderableType] = []
    for number, subject in enumerate(subjects):
        parts += [Text(f"{_mark(subjects, number)}{subject.kind} {subject.name}", style="bold"), *_said(subject)]
        parts += [facts_table(list(subject.facts)), Text("")]
    parts += [_amounts(subjects), Text(""), _phases(subjects), Text("")]
    for number, subject in enumerate(subjects):
        parts += [*_of_one(subject, _mark(subjects, number))]
    parts.append(_environment(subjects))
    return Group(*(part for part in parts if not (isinstance(part, FittedTable) and not part.row_count)))


def _mark(subjects: Sequence[Subject], number: int) -> str:
    return f"{'AB'[number]}: " if len(subjects) > 1 else ""


def _said(subject: Subject) -> Iterable[Text]:
    style = {True: "bold green", False: "bold red", None: ""}[subject.holds]
    return [Text(sentence, style=style if number == 0 else "") for number, sentence in enumerate(subject.sentences)]


def _amounts(subjects: Sequence[Subject]) -> FittedTable:
    found = [{amount.what: amount.nbytes for amount in subject.amounts} for subject in subjects]
    names = dict.fromkeys(name for one in found for name in one)
    table = titled("Budget and peaks", ("",), (*_heads(subjects),))
    for name in names:
        values = [one.get(name) for one in found]
        table.add_row(name, *(_bytes(value, whole=len(subjects) == 1) for value in values), *_difference(values))
    return table


def _heads(subjects: Sequence[Subject]) -> tuple[str, ...]:
    return ("bytes",) if len(subjects) == 1 else ("A", "B", "B - A")


def _difference(values: Sequence[int | None]) -> tuple[str, ...]:
    if len(values) == 1:
        return ()
    before, after = values
    return ("" if before is None or after is None else format_bytes(after - before),)


def _bytes(value: int | None, *, whole: bool = False) -> str:
    if value is None:
        return ""
    return exact(value) if whole else format_bytes(value)


def _phases(subjects: Sequence[Subject]) -> FittedTable:
    mark = ("document",) if len(subjects) > 1 else ()
    table = titled("Peak by phase", ("phase", *mark), ("predicted", "measured", "plain autograd"))
    for number, subject in enumerate(subjects):
        for row in subject.phases:
            sides = (row.predicted_bytes, row.measured_bytes, row.plain_bytes)
            table.add_row(row.phase, *("AB"[number] for _ in mark), *map(_bytes, sides))
    return table


def _of_one(subject: Subject, mark: str) -> Iterable[RenderableType]:
    if subject.layers:
        yield _layers(subject.layers, mark)
        yield Text("")
    for grid in subject.grids:
        yield _grid(grid, mark)
        yield Text("")
    if subject.ratio is not None:
        ratio = subject.ratio
        quartiles = f"quartiles {ratio.low:.2f} to {ratio.high:.2f}, {ratio.rounds} rounds"
        plain = format_seconds(ratio.plain_seconds)
        yield Text(f"{mark}step time {format_ratio(ratio.median)} plain autograd's {plain} ({quartiles})")
        yield Text("")


def _layers(layers: Sequence[LayerBytes], mark: str) -> FittedTable:
    """Columns for what is known of any layer; neighbours that are alike are one row."""
    columns = {
        "plain": lambda row: _bytes(row.plain_bytes),
        "predicted": lambda row: _bytes(row.predicted_bytes),
        "measured": lambda row: _bytes(row.measured_bytes),
        "on the host": lambda row: _bytes(row.host_bytes or None),
        "again": lambda row: "" if not row.recompute_flops else format_flops(row.recompute_flops),
    }
    used = {name: value for name, value in columns.items() if any(value(row) for row in layers)}
    table = titled(f"{mark}Held by each layer between forward and backward", ("layer", "policy"), tuple(used))
    for (policy, *values), group in groupby(layers, key=lambda row: (row.policy, *(v(row) for v in used.values()))):
        table.add_row(span([row.layer for row in group]), policy, *values)
    return table


def _grid(grid: Grid, mark: str) -> FittedTable:
    """Tensors by what happens to them: layers in short."""
    if grid.title == ROOT_NAME:
        table = titled(f"{mark}Saved tensors of {grid.title}", ("tensor", "happens"), ("bytes",))
    else:
        table = titled(f"{mark}Saved tensors of each layer", ("tensor", "happens in layers"), ("bytes",))
    for tensor, fates in zip(grid.tensors, grid.fates, strict=True):
        groups: dict[Fate, list[str]] = {}
        for layer, fate in zip(grid.layers, fates, strict=True):
            if fate is not None:
                groups.setdefault(fate, []).append(layer)
        alone = grid.title == ROOT_NAME
        words = [str(fate) if alone else f"{fate} {span(names, brief=True)}" for fate, names in groups.items()]
        name = f"{tensor.name}{f' of {tensor.path}' if tensor.path else ''}"
        table.add_row(name, "; ".join(words), format_bytes(tensor.nbytes) if tensor.dtype else "")
    return table


def _environment(subjects: Sequence[Subject]) -> FittedTable:
    found = [dict(subject.environment) for subject in subjects]
    table = titled("Environment", ("", *(("value",) if len(subjects) == 1 else ("A", "B"))), ())
    for name in dict.fromkeys(name for one in found for name in one):
        table.add_row(name, *(one.get(name, "") for one in found))
    return table
