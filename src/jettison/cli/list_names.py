"""`list`: the names that other verbs take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter
from rich.console import Group, RenderableType

from jettison.cli.app import Force, Format, Out, asked, deliver, refuse_to_overwrite
from jettison.errors import UsageError
from jettison.families.presets import PRESETS, preset
from jettison.formula.parameters import parameter_count
from jettison.report.parts import titled
from jettison.report.schemas import shaped
from jettison.spec.frameworks import named
from jettison.spec.hardware import Hardware, hardware, hardware_names
from jettison.spec.precision import PRECISIONS, Optimizer, Precision
from jettison.units import format_bytes, format_count

POLICIES: Final = {
    "none": "keep everything that backward needs",
    "selective": "the attention core is computed again (arXiv 2205.05198, section 5)",
    "selective-op": "outputs of matrix products and of fused attention stay, the rest is computed again",
    "selective-op-alternate": "the same, and every second product is computed again (torchtitan)",
    "full": "only a layer's input stays",
    "parts": "attention, feed-forward block and norms of a layer are a checkpoint each (NeMo AutoModel)",
    "every:K": "segments of K layers, of which the segment's input stays (arXiv 1604.06174)",
    "block:N": "the first N layers of a stage are full, the others none (Megatron's block method)",
    "interval:K": "one layer in K is full, the others none (torchtitan's selective layers)",
    "modules:A+B": "parts of a layer by Megatron-Core's names, as in --recompute-modules A,B",
    "sqrt": "every:K, K being the square root of the number of layers",
    "auto": "what the planner chooses for a budget",
}
"""Recompute modes of described runs. Live models take none, selective, selective-op, full and every:K."""

OPTIMIZERS: Final = {
    Optimizer.ADAMW: "two moments; fused, as trainers have it",
    Optimizer.ADAMW_FOREACH: "the same as torch runs it by default on CUDA: 4 bytes a parameter more within its step",
    Optimizer.ADAMW_DEEPSPEED: "the same on copies of gradients, 1e9 elements at a time under ZeRO 3: DeepSpeed",
    Optimizer.ADAMW_BF16: "two moments in bf16, whatever is updated, as torchtitan's fused_opt_states_bf16",
    Optimizer.SGD: "no state",
    Optimizer.SGD_MOMENTUM: "one moment",
    Optimizer.ADAM8BIT: "two moments of one byte, with a scale for each 256 (arXiv 2110.02861)",
    Optimizer.ADAFACTOR: "a row and a column of each matrix (arXiv 1804.04235)",
    Optimizer.MUON: "one moment for matrices of layers, AdamW for the rest",
    Optimizer.DIST_MUON: "the same over ranks, each of which has whole matrices (Megatron's, its layout by default)",
    Optimizer.DIST_MUON_PINGPONG: "the same, each rank with whole tensors of every kind (Megatron's older way)",
    Optimizer.NONE: "no optimizer: a forward and a backward",
}


def command(
    what: Annotated[
        Literal["models", "gpus", "precisions", "policies", "optimizers", "targets"] | None,
        Parameter(help="One kind of names; all of them without it."),
    ] = None,
    /,
    *,
    form: Format = "human",
    out: Out = None,
    force: Force = False,
) -> None:
    """The names that other commands take: models, GPUs, precisions, policies, optimizers, targets of exports."""
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
        title="Words for --precision",
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
        "products": one.product,
    }


def _field(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: row[name] or ""


def _worded(name: str, title: str, words: dict[Any, str]) -> Section:
    rows = tuple({"name": str(word), "meaning": meaning} for word, meaning in words.items())
    return Section(name=name, title=title, rows=rows, shown=(("meaning", _field("meaning")),))


_SECTIONS: Final[dict[str, Callable[[], Section]]] = {
    "models": _models,
    "gpus": _gpus,
    "precisions": _precisions,
    "policies": lambda: _worded("policies", "Words for --recompute", POLICIES),
    "optimizers": lambda: _worded("optimizers", "Words for --optimizer", OPTIMIZERS),
    "targets": lambda: _worded(
        "targets", "Words for export --to", {name: entry["says"] for name, entry in named("targets").items()}
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
            table = titled(section.title, ("name", *texts), figures)
            for row in section.rows:
                table.add_row(row["name"], *(cell(row) for _, cell in section.shown))
            parts += ["", table]
        return Group(*parts)
