"""The plan of a run that only its spec describes: which layers keep what, on every pipeline stage, under a budget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from jettison.core.errors import Infeasible
from jettison.core.units import format_bytes, format_count, format_flops, format_percent, format_seconds
from jettison.report.fitted import FittedTable
from jettison.report.parts import exact, facts_table, span, titled
from jettison.report.schemas import shaped

if TYPE_CHECKING:
    from jettison.predict.auto_recompute import AutoForecast
    from jettison.report.alternatives import NextGiB, Reason

SCHEMA = "jettison.plan/1"
DESCRIBED = "description"
"""What such a document says under ``made_from``: it names no programs, and cannot be applied to a module."""
MOST_FLIPS = 2
"""Of each next GiB, in the table."""


def infeasible_document(error: Infeasible, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """In the place of a plan.

    Args:
        request: what was asked, by field.
    """
    return shaped(
        {
            "schema": SCHEMA,
            "feasible": False,
            "budget_bytes": error.budget_bytes,
            "minimum_budget_bytes": error.minimum_budget_bytes,
            "reason": error.reason,
            "request": None if request is None else dict(request),
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChoice:
    """One layer's part of a plan; bytes and FLOPs are of one micro-batch on one rank."""

    layer: str
    stage: int
    policy: str
    kept_bytes: int
    offloaded_bytes: int
    recompute_flops: int


@dataclass(frozen=True, kw_only=True)
class ForecastPlan:
    """What the planner chose for a run, for people and as a document.

    ``reasons`` are by layer; ``what_if`` is what each next GiB would change, None where nobody asked. ``made_by`` is
    what was asked for, by flag: enough to make the plan again.
    """

    model: str
    choice: AutoForecast
    layers: tuple[LayerChoice, ...]
    reasons: dict[str, Reason]
    solver_seconds: float
    made_by: dict[str, Any] = field(default_factory=dict)
    what_if: tuple[NextGiB, ...] | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the configuration is not in the figures."""
        return self.choice.forecast.run.model.left_out

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.plan/1``. The hash covers the layers' choices and segments."""
        live = ("digest", "option", "kept", "offloaded", "packed", "price")  # what of a layer only a live plan says
        layers = [{name: getattr(layer, name) for name in LayerChoice.__slots__} for layer in self.layers]
        segments = [list(each) for each in self.choice.segments]
        name = Path(self.model).name if Path(self.model).exists() else self.model  # wherever it lies
        decided = [name, layers, segments] if segments else [name, layers]
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        document = {
            "schema": SCHEMA,
            "made_from": DESCRIBED,
            "feasible": True,
            "model": self.model,
            "budget_bytes": self.choice.budget_bytes,
            "minimum_budget_bytes": self.choice.minimum_budget_bytes,
            "predicted": {
                "peak_bytes": self.choice.forecast.peak_bytes,
                "step_seconds": self.choice.step_seconds,
                "overhead_fraction": self.choice.overhead_fraction,
                "stalled_seconds": self.choice.stalled_seconds * self.choice.forecast.run.micro_batches,
                "host_bytes": self.choice.host_bytes,
                "composed": None,
            },
            "offload": self.choice.forecast.run.recompute.offload,
            "host_budget_bytes": self.choice.host_budget_bytes,
            "whole_micro_batches": self.choice.forecast.run.recompute.whole,
            "hardware": self.choice.hardware.name,
            "solver": {"gap": self.choice.gap, "seconds": self.solver_seconds},
            "stages": [
                {"stage": stage.index, "peak_bytes": stage.peak.nbytes, "in_flight": stage.in_flight}
                for stage in self.choice.forecast.stages
            ],
            "layers": [layer | dict.fromkeys(live) for layer in layers],
            "segments": segments,
            "reasons": [{"layer": name, **asdict(reason)} for name, reason in self.reasons.items()],
            "made_by": self.made_by,
            "request": self.made_by,
            "warnings": list(self.warnings),
            "what_if": None if self.what_if is None else [_next(row) for row in self.what_if],
            "hash": hashlib.sha256(text.encode()).hexdigest(),
        }
        return shaped(document)

    def table(self) -> RenderableType:
        """Facts, and neighbours that do the same as one row."""
        found = self.choice.forecast
        share = format_percent(self.choice.overhead_fraction)
        rows = [
            ("model", f"{self.model}, {format_count(found.parameters)} parameters"),
            ("budget", exact(self.choice.budget_bytes)),
            ("predicted peak", f"{exact(found.peak_bytes)}, on stage {found.worst.index}"),
            ("smallest budget", exact(self.choice.minimum_budget_bytes)),
            ("recompute", f"{share} of a step's time, on {self.choice.hardware.name}"),
        ]
        if found.run.recompute.offload:
            rows.append(("offload", self._offload()))
        if self.choice.segments:
            runs = ", ".join(f"{first} to {last}" for first, last in self.choice.segments)
            rows.append(("segments", f"only the first layer holds its input in {runs}"))
        if found.run.recompute.whole:
            rows.append(("kept whole", f"{found.run.recompute.whole} of each window of micro-batches in flight"))
        rows.append(("solver", f"gap {format_percent(self.choice.gap)}, {format_seconds(self.solver_seconds)}"))
        parts: list[RenderableType] = [facts_table(rows), self._layers_table()]
        if self.what_if is not None:
            parts.append(_what_if_table(self.what_if))
        return Group(*parts)

    def _offload(self) -> str:
        choice = self.choice
        limit = "" if choice.host_budget_bytes is None else f" of {format_bytes(choice.host_budget_bytes)}"
        waited = f"{format_seconds(choice.stalled_seconds)} of that is waiting for copies"
        return f"{format_bytes(choice.host_bytes)}{limit} on the host; {waited}, in a micro-batch"

    def _layers_table(self) -> FittedTable:
        figures = ("stage", "kept", "on the host", "recomputed")
        table = titled("What each layer does with one micro-batch", ("layer", "policy", "why"), figures)

        def key(layer: LayerChoice) -> tuple[object, ...]:
            moved = (layer.kept_bytes, layer.offloaded_bytes, layer.recompute_flops)
            return layer.policy, *moved, str(self.reasons[layer.layer])

        groups: dict[tuple[object, ...], list[LayerChoice]] = {}
        for layer in self.layers:
            groups.setdefault(key(layer), []).append(layer)
        for alike in groups.values():
            one = alike[0]
            table.add_row(
                span([entry.layer for entry in alike]),
                one.policy,
                str(self.reasons[one.layer]),
                span([f".{stage}" for stage in dict.fromkeys(entry.stage for entry in alike)], brief=True).lstrip("."),
                format_bytes(one.kept_bytes),
                format_bytes(one.offloaded_bytes),
                format_flops(one.recompute_flops),
            )
        return table


def _next(row: NextGiB) -> dict[str, Any]:
    """A next GiB as what JSON is made of."""
    return {
        "budget_bytes": row.answer.budget_bytes,
        "peak_bytes": row.answer.forecast.peak_bytes,
        "step_seconds": row.answer.step_seconds,
        "saved_seconds": row.saved_seconds,
        "host_bytes": row.answer.host_bytes,
        "flips": [asdict(flip) for flip in row.flips],
    }


def _what_if_table(rows: Sequence[NextGiB]) -> FittedTable:
    table = titled("What each next GiB would change", ("budget", "tensors that change their place"), ("a step saves",))
    for row in rows:
        words = [
            f"{flip.tensor}: {flip.before} -> {flip.after} in {span(flip.layers, brief=True)}"
            for flip in row.flips[:MOST_FLIPS]
        ]
        more = len(row.flips) - MOST_FLIPS
        text = "; ".join(words) + (f"; {more} more" if more > 0 else "")
        table.add_row(format_bytes(row.answer.budget_bytes), text or "nothing", format_seconds(row.saved_seconds))
    if not rows:
        table.add_row("", "nothing is computed again, and nothing moves", "")
    return table
