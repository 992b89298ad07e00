"""`list`: the names that other verbs take."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from rich.console import Group, RenderableType

from jettison.cli.app import Force, Format, Out, asked, deliver, option, refuse_to_overwrite, verb
from jettison.core.errors import UsageError
from jettison.core.units import format_bytes, format_count
from jettison.families.presets import PRESETS, preset
from jettison.formula.region import parameter_count
from jettison.predict.run_request import flag_of
from jettison.report.schemas import shaped
from jettison.report.tables import grid
from jettison.spec.frameworks import named, rule
from jettison.spec.hardware import Hardware, hardware, hardware_names
from jettison.spec.precision import PRECISIONS, Precision

_MEANINGS: Final[dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


@verb("list")
def command(
    what: Annotated[
        Literal["models", "gpus", "precisions", "policies", "optimizers", "frameworks", "targets"] | None,
        option("Model", "Kind of names [default: all]."),
    ] = None,
    /,
    *,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """List names that flags take: models, GPUs, precisions, recompute policies, optimizers, frameworks, targets."""
    refuse_to_overwrite(out, force=force)
    report = list_names(what)
    deliver(report.document, report.table, form=form, out=out, request=asked(what=what))


def list_names(what: str | None = None) -> NamesReport:
    """Models, GPUs, precisions, policies, optimizers, export targets: all of them, or one kind.

    Raises:
        UsageError: there is no such kind.
    """
    if what is not None and what not in _SECTIONS:
        raise UsageError(f"got the list {what!r}; expected one of {', '.join(_SECTIONS)}")
    return NamesReport(sections=tuple(_SECTIONS[name]() for name in _SECTIONS if what in (None, name)))


def _models() -> Section:
    rows = []
    for name in PRESETS:
        model = preset(name)
        rows.append({"name": name, "parameters": parameter_count(model), "layers": model.depth, "hidden": model.hidden})
    return Section(
        name="models",
        title="Models; a config.json, its folder or a Hugging Face id will do as well",
        rows=tuple(rows),
        shown=(
            ("parameters", lambda row: format_count(row["parameters"])),
            ("layers", lambda row: str(row["layers"])),
            ("hidden", lambda row: str(row["hidden"])),
        ),
    )


def _gpus() -> Section:
    return Section(
        name="gpus",
        title="Accelerators for --gpu; a TOML file will do as well",
        rows=tuple(_gpu(hardware(name)) for name in hardware_names()),
        shown=(
            ("memory", lambda row: format_bytes(row["memory_bytes"])),
            ("usable", lambda row: format_bytes(row["usable_bytes"])),
            ("bf16", lambda row: _per_second(row["bf16_flops_per_second"], 1e12, "TFLOP/s")),
            ("memory bandwidth", lambda row: _per_second(row["memory_bytes_per_second"], 1e9, "GB/s")),
            ("links", lambda row: _per_second(row["link_bytes_per_second"], 1e9, "GB/s")),
        ),
    )


def _gpu(device: Hardware) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "usable_bytes": device.usable_bytes,
        "bf16_flops_per_second": device.flops_per_second.bf16,
        "memory_bytes_per_second": device.memory_bytes_per_second,
        "link_bytes_per_second": device.link_bytes_per_second,
        "source": device.source,
        "usable_source": device.usable_source,
        "reached_source": device.reached_source,
    }


def _per_second(value: int | None, unit: float, name: str) -> str:
    return "" if value is None else f"{value / unit:,.4g} {name}"


def _precisions() -> Section:
    return Section(
        name="precisions",
        title="Precisions for --precision",
        rows=tuple(_precision(one) for one in PRECISIONS.values()),
        shown=tuple(
            (name, _field(name)) for name in ("compute", "weights", "gradients", "accumulator", "master", "moments")
        ),
    )


def _precision(one: Precision) -> dict[str, Any]:
    return {
        "name": one.name,
        "compute": one.compute,
        "weights": one.parameter,
        "gradients": one.gradient,
        "accumulator": one.accumulator,
        "master": one.master,
        "moments": one.moment,
        **dict.fromkeys(("gemms", "products"), one.product),
    }


def _field(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: row[name] or ""


def _worded(name: str, title: str, words: dict[str, str]) -> Section:
    rows = tuple({"name": word, "meaning": meaning} for word, meaning in words.items())
    return Section(name=name, title=title, rows=rows, shown=(("meaning", _field("meaning")),))


def _frameworks() -> Iterator[tuple[str, str]]:
    for name in named("presets"):
        given = rule(name, tp=1)
        yield name, " ".join(flag_of(field) + ("" if value is True else f" {value}") for field, value in given.items())


_SECTIONS: Final[dict[str, Callable[[], Section]]] = {
    "models": _models,
    "gpus": _gpus,
    "precisions": _precisions,
    "policies": lambda: _worded("policies", "Policies for --recompute", _MEANINGS["policies"]),
    "optimizers": lambda: _worded("optimizers", "Optimizers for --optimizer", _MEANINGS["optimizers"]),
    "frameworks": lambda: _worded(
        "frameworks", "Framework presets for --like, and the flags that each sets on one GPU", dict(_frameworks())
    ),
    "targets": lambda: _worded(
        "targets", "Targets of export --to", {name: entry["says"] for name, entry in named("targets").items()}
    ),
}
KINDS: Final = tuple(_SECTIONS)


# What `jettison list` says: names with what they stand for ------------------------------------------------------------


SCHEMA: Final = "jettison.list/1"
SENTENCES: Final = frozenset({"meaning"})
"""Columns of text; the others are figures."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One kind of names.

    Args:
        rows: one a name, as the document has it; the key ``name`` comes first.
        shown: columns for people: a header, and a cell out of a row.
    """

    name: str
    title: str
    rows: tuple[dict[str, Any], ...]
    shown: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]


@dataclass(frozen=True, kw_only=True)
class NamesReport:
    """All kinds, or the one that was asked for."""

    sections: tuple[Section, ...]

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.list/1``: a list for each kind; kinds that nobody asked for are null."""
        return shaped({"schema": SCHEMA, **{section.name: list(section.rows) for section in self.sections}})

    def table(self) -> RenderableType:
        """A table for each kind."""
        parts: list[RenderableType] = []
        for section in self.sections:
            texts = [header for header, _ in section.shown if header in SENTENCES]
            figures = [header for header, _ in section.shown if header not in SENTENCES]
            table = grid(section.title, ("name", *texts), figures)
            for row in section.rows:
                table.add_row(row["name"], *(cell(row) for _, cell in section.shown))
            parts += ["", table]
        return Group(*parts)
