"""`list`: the names that other verbs take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from rich.console import Group, RenderableType

from jettison.cli.app import Force, Format, Out, asked, deliver, option, refuse_to_overwrite, verb
from jettison.core.documents import document
from jettison.core.units import format_bytes, format_count
from jettison.families.presets import PRESETS, preset
from jettison.formula.region import parameter_count
from jettison.report.tables import grid
from jettison.request.resolve import flag_of
from jettison.spec.frameworks import named, rule
from jettison.spec.hardware import hardware, hardware_names
from jettison.spec.precision import PRECISIONS, Optimizer
from jettison.spec.recompute import Mode


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


def list_names(what: str | None) -> NamesReport:
    """Models, GPUs, precisions, policies, optimizers, export targets: all of them, or one kind."""
    return NamesReport(rows={name: tuple(kind.made()) for name, kind in _SECTIONS.items() if what in (None, name)})


Row = dict[str, Any]


def _models() -> Iterator[Row]:
    for name in PRESETS:
        model = preset(name)
        yield {"name": name, "parameters": parameter_count(model), "layers": model.depth, "hidden": model.hidden}


def _gpus() -> Iterator[Row]:
    for device in map(hardware, hardware_names()):
        stated = {name: getattr(device, name) for name in ("name", "memory_bytes", "usable_bytes")}
        stated["bf16_flops_per_second"] = device.flops_per_second.bf16
        rest = ("memory_bytes_per_second", "link_bytes_per_second", "source", "usable_source", "reached_source")
        yield stated | {name: getattr(device, name) for name in rest}


def _per_second(key: str, unit: float, name: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key] / unit:,.4g} {name}"


def _precisions() -> Iterator[Row]:
    for one in PRECISIONS.values():
        stated: Row = {"name": one.name, "compute": one.compute, "weights": one.parameter, "gradients": one.gradient}
        stated |= {"accumulator": one.accumulator, "master": one.master, "moments": one.moment}
        yield stated | dict.fromkeys(("gemms", "products"), one.gemm_inputs)


def _frameworks() -> Iterator[Row]:
    for name in named("presets"):
        flags = ((flag_of(field), value) for field, value in rule(name, tp=1).items())
        yield {"name": name, "meaning": " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags)}


_SQRT: Final = {"sqrt": "every:K, K being the square root of the number of layers"}


def _worded(words: Mapping[str, str]) -> Iterator[Row]:
    return ({"name": word, "meaning": meaning} for word, meaning in words.items())


def _field(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name] or "")


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of names.

    Args:
        made: rows, one a name, as the document has them; the key ``name`` comes first.
        shown: columns for people: a header, and a cell out of a row.
    """

    title: str
    made: Callable[[], Iterator[Row]]
    shown: Mapping[str, Callable[[Row], str]] = field(default_factory=lambda: {"meaning": _field("meaning")})


_SECTIONS: Final = {
    "models": Section(
        "Models; a config.json, its folder or a Hugging Face id will do as well",
        _models,
        {
            "parameters": lambda row: format_count(row["parameters"]),
            "layers": _field("layers"),
            "hidden": _field("hidden"),
        },
    ),
    "gpus": Section(
        "Accelerators for --gpu; a TOML file will do as well",
        _gpus,
        {
            "memory": lambda row: format_bytes(row["memory_bytes"]),
            "usable": lambda row: format_bytes(row["usable_bytes"]),
            "bf16": _per_second("bf16_flops_per_second", 1e12, "TFLOP/s"),
            "memory bandwidth": _per_second("memory_bytes_per_second", 1e9, "GB/s"),
            "links": _per_second("link_bytes_per_second", 1e9, "GB/s"),
        },
    ),
    "precisions": Section(
        "Precisions for --precision",
        _precisions,
        {name: _field(name) for name in ("compute", "weights", "gradients", "accumulator", "master", "moments")},
    ),
    "policies": Section("Policies for --recompute", lambda: _worded({m.form: m.meaning for m in Mode} | _SQRT)),
    "optimizers": Section("Optimizers for --optimizer", lambda: _worded({o: o.meaning for o in Optimizer})),
    "frameworks": Section("Framework presets for --like, and the flags that each sets on one GPU", _frameworks),
    "targets": Section(
        "Targets of export --to", lambda: _worded({name: one["says"] for name, one in named("targets").items()})
    ),
}

SCHEMA: Final = "jettison.list/1"
SENTENCES: Final = frozenset({"meaning"})
"""Columns of text; the others are figures."""


@dataclass(frozen=True, kw_only=True)
class NamesReport:
    """All kinds, or the one that was asked for."""

    rows: Mapping[str, tuple[Row, ...]]

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.list/1``: a list for each kind; kinds that were not requested are null."""
        return document(SCHEMA, **self.rows)

    def table(self) -> RenderableType:
        """A table for each kind."""
        parts: list[RenderableType] = []
        for name, rows in self.rows.items():
            title, shown = _SECTIONS[name].title, _SECTIONS[name].shown
            texts = [header for header in shown if header in SENTENCES]
            cells = [(row["name"], *(cell(row) for cell in shown.values())) for row in rows]
            parts += ["", grid(title, ("name", *texts), [one for one in shown if one not in SENTENCES], cells)]
        return Group(*parts)
