"""One document, or two to compare, as a page, as tables, as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.documents import document
from jettison.core.errors import UsageError
from jettison.core.units import format_bytes, format_flops, format_ratio, format_seconds
from jettison.report.page import page
from jettison.report.plan import ROOT_NAME
from jettison.report.report_subject import Grid, ReportSubject, SubjectLayer, TensorPolicy
from jettison.report.tables import FittedTable, alike, exact, facts, grid, span

SCHEMA: Final = "jettison.report/1"
_NAMES: Final = "AB"


@dataclass(frozen=True, kw_only=True)
class Report:
    """One document, or two of a kind side by side."""

    subjects: tuple[ReportSubject, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.subjects) <= len(_NAMES):
            raise UsageError(f"got {len(self.subjects)} documents; expected one, or two to compare")
        kinds = [str(subject.kind) for subject in self.subjects]
        if len(set(kinds)) > 1:
            raise UsageError(f"got a {kinds[0]} and a {kinds[1]}; expected two of one kind to compare")

    @property
    def title(self) -> str:
        """Title of the page."""
        kind = str(self.subjects[0].kind)
        return kind.capitalize() if len(self.subjects) == 1 else f"Two {kind}s compared"

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.report/1``."""
        return document(SCHEMA, subjects=[asdict(subject) for subject in self.subjects])

    def table(self) -> RenderableType:
        """Tables of 80 columns with the page's numbers, one document after the other."""
        subjects = self.subjects
        marks = [f"{mark}: " if len(subjects) > 1 else "" for mark in _NAMES[: len(subjects)]]
        parts: list[RenderableType] = []
        for subject, mark in zip(subjects, marks, strict=True):
            style = {True: "bold green", False: "bold red", None: ""}[subject.holds]
            said = [Text(text, style="" if number else style) for number, text in enumerate(subject.sentences)]
            parts += [Text(f"{mark}{subject.kind} {subject.name}", style="bold"), *said, facts(subject.facts), Text("")]
        parts += [_amounts(subjects), Text(""), _phases(subjects), Text("")]
        for subject, mark in zip(subjects, marks, strict=True):
            parts += [part for each in _of_one(subject, mark) for part in (each, Text(""))]
        parts.append(_environment(subjects))
        return Group(*(part for part in parts if not (isinstance(part, FittedTable) and not part.row_count)))

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
            data={"report": {"subjects": [asdict(subject) for subject in self.subjects], "command": command}},
        )


def _amounts(subjects: Sequence[ReportSubject]) -> FittedTable:
    found = [{amount.what: amount.nbytes for amount in subject.amounts} for subject in subjects]
    if len(found) == 1:
        return grid("Budget and peaks", ("",), ("bytes",), [(name, exact(n)) for name, n in found[0].items()])
    table = grid("Budget and peaks", ("",), ("A", "B", "B - A"))
    for name in dict.fromkeys(name for one in found for name in one):
        before, after = (one.get(name) for one in found)
        change = None if before is None or after is None else after - before
        table.add_row(name, *map(_bytes, (before, after, change)))
    return table


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _phases(subjects: Sequence[ReportSubject]) -> FittedTable:
    two = len(subjects) > 1
    every = [(mark, row) for mark, subject in zip(_NAMES, subjects, strict=False) for row in subject.phases]
    kinds = {"predicted": "predicted_bytes", "measured": "measured_bytes", "plain autograd": "baseline_bytes"}
    known = {name: key for name, key in kinds.items() if any(getattr(row, key) is not None for _, row in every)}
    rows = [
        (row.phase, *([mark] if two else []), *(_bytes(getattr(row, key)) for key in known.values()))
        for mark, row in every
    ]
    left = ("phase", "document") if two else ("phase",)
    return grid("Peak by phase", left, tuple(known), rows)


def _of_one(subject: ReportSubject, mark: str) -> Iterable[RenderableType]:
    if subject.peak_roles:
        rows = [(one.what, exact(one.nbytes)) for one in subject.peak_roles]
        yield grid(f"{mark}What the peak is made of", ("role",), ("bytes",), rows)
    if subject.layers:
        yield _layers(subject.layers, mark)
    if subject.next_gib:
        found = [(format_bytes(r.budget_bytes), r.changes, format_seconds(r.saved_seconds)) for r in subject.next_gib]
        columns = ("budget", "tensors whose policy changes")
        yield grid(f"{mark}What each next GiB would change", columns, ("a step saves",), found)
    for each in subject.grids:
        yield _policies(each, mark)
    if (ratio := subject.ratio) is not None:
        quartiles = f"quartiles {ratio.low:.2f} to {ratio.high:.2f}, {ratio.rounds} rounds"
        plain = format_seconds(ratio.baseline_seconds)
        yield Text(f"{mark}step time {format_ratio(ratio.median)} plain autograd's {plain} ({quartiles})")


def _layers(layers: Sequence[SubjectLayer], mark: str) -> FittedTable:
    """Columns for what is known of any layer; neighbours that are alike are one row."""

    def figures(row: SubjectLayer) -> dict[str, str]:
        return {
            "plain autograd": _bytes(row.baseline_bytes),
            "predicted": _bytes(row.predicted_bytes),
            "measured": _bytes(row.measured_bytes),
            "offloaded": _bytes(row.host_bytes or None),
            "recomputed": format_flops(row.recompute_flops) if row.recompute_flops else "",
        }

    used = [name for name in figures(layers[0]) if any(figures(row)[name] for row in layers)]
    table = grid(f"{mark}Held by each layer between forward and backward", ("layer", "policy"), used)
    for names, row in alike(layers, lambda row: (row.policy, *figures(row).values())):
        table.add_row(names, row.policy, *(figures(row)[name] for name in used))
    return table


def _policies(found: Grid, mark: str) -> FittedTable:
    """Tensors by what happens to them: layers in short."""
    alone = found.title == ROOT_NAME
    whose, happens = (found.title, "happens") if alone else ("each layer", "happens in layers")
    sizes = ("bytes",) if any(tensor.dtype for tensor in found.tensors) else ()
    table = grid(f"{mark}Saved tensors of {whose}", ("tensor", happens), sizes)
    for tensor, policies in zip(found.tensors, found.policies, strict=True):
        groups: dict[TensorPolicy, list[str]] = {}
        for layer, policy in zip(found.layers, policies, strict=True):
            if policy is not None:
                groups.setdefault(policy, []).append(layer)
        words = [str(policy) if alone else f"{policy} {span(names, brief=True)}" for policy, names in groups.items()]
        name = f"{tensor.name}{f' of {tensor.path}' if tensor.path else ''}"
        table.add_row(name, "; ".join(words), *[format_bytes(tensor.nbytes) if tensor.dtype else ""][: len(sizes)])
    return table


def _environment(subjects: Sequence[ReportSubject]) -> FittedTable:
    found = [dict(subject.environment) for subject in subjects]
    names = dict.fromkeys(name for one in found for name in one)
    heads = ("value",) if len(subjects) == 1 else ("A", "B")
    return grid("Environment", ("", *heads), (), [(name, *(one.get(name, "") for one in found)) for name in names])
