"""The plan of a run that only its spec describes: which layers keep what, on every pipeline stage, under a budget."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from jettison.report.parts import exact, facts_table, span, titled
from jettison.units import format_bytes, format_count, format_flops, format_percent, format_seconds

if TYPE_CHECKING:
    from jettison.predict.auto_recompute import AutoForecast

SCHEMA = "jettison.plan/1"
DESCRIBED = "description"
"""What such a document says under ``made_from``: it names no programs, and cannot be applied to a module."""


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
    """What the planner chose for a run, for people and as a document."""

    model: str
    choice: AutoForecast
    layers: tuple[LayerChoice, ...]
    solver_seconds: float

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.plan/1``. The hash covers the layers' choices."""
        layers = [{name: getattr(layer, name) for name in LayerChoice.__slots__} for layer in self.layers]
        text = json.dumps([self.model, layers], sort_keys=True, separators=(",", ":"))
        return {
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
            },
            "hardware": self.choice.hardware.name,
            "solver": {"gap": self.choice.gap, "seconds": self.solver_seconds},
            "stages": [
                {"stage": stage.index, "peak_bytes": stage.peak.nbytes, "in_flight": stage.in_flight}
                for stage in self.choice.forecast.stages
            ],
            "layers": layers,
            "hash": hashlib.sha256(text.encode()).hexdigest(),
        }

    def table(self) -> RenderableType:
        """Facts, and neighbours that do the same as one row."""
        found = self.choice.forecast
        share = format_percent(self.choice.overhead_fraction)
        facts = facts_table(
            [
                ("model", f"{self.model}, {format_count(found.parameters)} parameters"),
                ("budget", exact(self.choice.budget_bytes)),
                ("predicted peak", f"{exact(found.peak_bytes)}, on stage {found.worst.index}"),
                ("smallest budget", exact(self.choice.minimum_budget_bytes)),
                ("recompute", f"{share} of a step's time, on {self.choice.hardware.name}"),
                ("solver", f"gap {format_percent(self.choice.gap)}, {format_seconds(self.solver_seconds)}"),
            ]
        )
        table = titled(
            "What each layer does with one micro-batch", ("layer", "policy"), ("stage", "kept", "recomputed")
        )
        key = attrgetter("stage", "policy", "kept_bytes", "recompute_flops")
        for (stage, policy, kept, flops), alike in groupby(self.layers, key):
            names = span([entry.layer for entry in alike])
            table.add_row(names, policy, str(stage), format_bytes(kept), format_flops(flops))
        return Group(facts, table)
