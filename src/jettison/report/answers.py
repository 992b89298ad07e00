"""What else can be asked about a run, for people: what would fit, and where the peak comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.report.fitted import FittedTable
from jettison.report.parts import titled
from jettison.units import format_bytes, format_percent

if TYPE_CHECKING:  # they are asked for rarely
    from jettison.explain.figures import Core, Explanation, Variant
    from jettison.predict.largest import Edge, FitAnswer


def fit_table(answer: FitAnswer) -> FittedTable:
    """One thing changed at a time: the last value that fits, and its neighbour that does not."""
    title = f"What fits {format_bytes(answer.budget_bytes)}, one thing changed at a time"
    table = titled(title, ("change",), ("fits", "peak", "does not fit", "its peak"))
    rows: tuple[tuple[str, Edge], ...] = (
        ("largest micro-batch", answer.micro_batch),
        (f"longest sequence, in steps of {answer.seq_step}", answer.seq),
        ("smallest --tp", answer.tp),
        ("smallest --zero", answer.zero),
    )
    for name, edge in rows:
        table.add_row(name, *_edge(edge.value, edge.peak_bytes), *_edge(edge.beyond, edge.beyond_peak_bytes))
    return table


def _edge(value: int | None, nbytes: int | None) -> tuple[str, str]:
    return "none" if value is None else str(value), "" if nbytes is None else format_bytes(nbytes)


def explanation_table(found: Explanation) -> RenderableType:
    """The sum that the peak is, the run with one thing changed, and what that means in words."""
    parts = titled(f"What the peak of stage {found.stage} is made of", ("part",), ("bytes", "share"))
    for part in found.parts:
        parts.add_row(part.name, format_bytes(part.nbytes), format_percent(part.fraction))
    variants = titled("The run with one thing changed", ("change",), ("peak", "activations", "a layer", "recomputed"))
    for group in (found.recompute, found.sequence_parallelism, found.sharding):
        for variant in group:
            variants.add_row(*_variant(variant), style="bold" if variant.current else "")
    lines = [
        *found.sentences,
        *_core(found.core),
        *(remark.text[:1].upper() + remark.text[1:] for remark in found.remarks),
    ]
    return Group(parts, "", variants, "", *(Text(line) for line in lines))


def _variant(variant: Variant) -> tuple[str, ...]:
    change = f"{variant.change} (as it is)" if variant.current else variant.change
    held = (variant.peak_bytes, variant.activation_bytes, variant.layer_bytes)
    return (change, *map(format_bytes, held), f"{format_percent(variant.of_forward)} of a forward")


def _core(core: Core) -> tuple[str, ...]:
    """What the scores of attention have to do with it."""
    if not core.saved_bytes:
        return ()
    share = f"{format_percent(core.saved_bytes / core.layer_bytes)} of a layer's bytes"
    flops = f"{format_percent(core.flops / core.layer_flops)} of its FLOPs"
    more = f"; it outweighs the rest from sequences of {core.crossover} on" if core.crossover else ""
    return (f"The attention core is {share} and {flops}{more}.",)
