"""`list`: the names that other verbs take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from rich.console import Group, RenderableType

from jettison.cli.app import Force, Format, Out, asked, deliver, option, refuse_to_overwrite, verb
from jettison.core.documents import document
from jettison.core.files import read_table
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
    return NamesReport(rows={name: tuple(made()) for name, made in _MADE.items() if what in (None, name)})


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


_MADE: Final[Mapping[str, Callable[[], Iterator[Row]]]] = {
    "models": _models,
    "gpus": _gpus,
    "precisions": _precisions,
    "policies": lambda: _worded({mode.form: mode.meaning for mode in Mode} | _SQRT),
    "optimizers": lambda: _worded({optimizer: optimizer.meaning for optimizer in Optimizer}),
    "frameworks": _frameworks,
    "targets": lambda: _worded({name: one["says"] for name, one in named("targets").items()}),
}
"""Rows by kind, one a name, as the document has them; the key ``name`` comes first."""
_SHOWN: Final = read_table(Path(__file__).with_suffix(".toml"))
_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "text": str,
    "count": format_count,
    "bytes": format_bytes,
    "TFLOP/s": lambda rate: f"{rate / 1e12:,.4g} TFLOP/s",
    "GB/s": lambda rate: f"{rate / 1e9:,.4g} GB/s",
}
SCHEMA: Final = "jettison.list/1"


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
            columns: dict[str, list[str]] = _SHOWN[name]["columns"]
            texts, figures = ([one for one in columns if (one == "meaning") is said] for said in (True, False))
            cells = [(row["name"], *(_cell(row[key], how) for key, how in columns.values())) for row in rows]
            parts += ["", grid(_SHOWN[name]["title"], ("name", *texts), figures, cells)]
        return Group(*parts)


def _cell(value: Any, how: str) -> str:
    return "" if value is None else _FORMATS[how](value)
