"""Plans for people: of live models, exported ones, and those of described runs, which are a document as well."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from jettison.core.documents import document, part
from jettison.core.errors import Infeasible
from jettison.core.objects import grouped
from jettison.core.units import format_bytes, format_count, format_flops, format_percent, format_seconds
from jettison.predict.ranges import RunFigures, figures, unlike_anchor
from jettison.report.tables import FittedTable, alike, exact, facts, grid, span
from jettison.spec.device_allowance import FitVerdict

if TYPE_CHECKING:  # reading plans takes libraries that most commands can do without
    from jettison.frameworks.export import Exported
    from jettison.frameworks.layer_policies import Cost, LayerPolicy
    from jettison.report.alternatives import NextGiB, Reason
    from jettison.search.auto_recompute import AutoForecast
    from jettison.solve.plan import Plan
    from jettison.spec.device_allowance import Limit

SCHEMA = "jettison.plan/1"
DESCRIBED = "description"
"""Value of ``made_from`` in a described run's document: it names no programs, and cannot be applied to a module."""
ROOT_NAME = "embedding, head and loss"
MOST_FLIPS = 2
"""Flips of each next GiB in the table."""


def plan_table(plan: Plan) -> RenderableType:
    """Choices of a live model's layers, and what the plan claims."""
    predicted = plan.predicted
    moves = any(entry.offloaded for entry in plan.layers)
    rows = [
        ("budget", exact(plan.budget_bytes)),
        ("predicted peak", exact(predicted.peak_bytes)),
        ("smallest budget", exact(plan.minimum_budget_bytes)),
        (f"recompute{', copies' if moves else ''}", f"{format_percent(predicted.overhead_fraction)} of a step's time"),
        ("solver", f"gap {format_percent(plan.solver.gap)}, {format_seconds(plan.solver.seconds)}"),
    ]
    if plan.segments:
        rows.append(_segments(plan.segments))
    if moves:
        rows.append(("offloaded", exact(predicted.host_bytes)))

    columns = ("kept", "offloaded", "recomputed") if moves else ("kept", "recomputed")
    table = grid("What each layer does", ("layer", "policy"), columns)
    same = alike(plan.layers, lambda e: (e.policy, e.kept_bytes, e.offloaded_bytes, e.recompute_flops))
    for name, entry in (*same, (ROOT_NAME, plan.root)):
        held = (entry.kept_bytes, entry.offloaded_bytes) if moves else (entry.kept_bytes,)
        table.add_row(name, str(entry.policy), *map(format_bytes, held), format_flops(entry.recompute_flops))
    return Group(facts(rows), table)


def _segments(segments: Sequence[Sequence[str]]) -> tuple[str, str]:
    runs = ", ".join(f"{first} to {last}" for first, last in segments)
    return "segments", f"only the first layer holds its input in {runs}"


def export_table(found: Exported) -> RenderableType:
    """A plan as another trainer's settings: its cost and the plan's, what is lost, layer by layer."""
    subject = found.subject
    rows = [
        ("target", f"{found.target}{f', checked with {found.checked_with}' if found.checked_with else ''}"),
        ("model", subject.model),
        *(("left out", text) for text in subject.left_out),
        ("budget", exact(subject.budget_bytes)),
        ("exact", "yes" if found.exact else "no: see what is lost"),
    ]
    costs = [found.plan_cost, found.cost, *(one.cost for one in found.alternatives)]
    kinds: dict[str, Callable[[Cost], str]] = {
        "peak": lambda cost: format_bytes(cost.peak_bytes),
        "kept by layers": lambda cost: format_bytes(cost.layer_bytes),
        "activations": lambda cost: "" if cost.activation_bytes is None else format_bytes(cost.activation_bytes),
        "offloaded": lambda cost: format_bytes(cost.host_bytes) if cost.host_bytes else "",
        "recomputed": lambda cost: format_flops(cost.recompute_flops),
        f"at prices of {subject.hardware.name}": lambda cost: format_seconds(cost.recompute_seconds),
        "a step": lambda c: "" if c.step_seconds is None else format_seconds(subject.expected_ratio * c.step_seconds),
    }
    cells = [(name, *map(say, costs)) for name, say in kinds.items()]
    whose = ("plan", found.target, *(one.words for one in found.alternatives))
    steps = grid("What a step costs", ("",), whose, [row for row in cells if any(row[1:])])
    layers = grid("What each layer does", ("layer", "plan", "exported"), ("kept in the plan", "kept"))
    for name, p in alike(found.policies, lambda p: (p.decision.policy, p.words or p.action, *_kept(p))):
        layers.add_row(name, p.decision.policy, p.words or str(p.action), *map(format_bytes, _kept(p)))
    remarks = [*(("lost", text) for text in found.lost), *(("note", text) for text in found.notes)]
    return Group(facts(rows), steps, layers, *([facts(remarks)] if remarks else []))


def _kept(layer: LayerPolicy) -> tuple[int, int]:
    """Kept bytes of a layer in the plan, and under the settings."""
    return layer.decision.kept_bytes, layer.kept_bytes


def infeasible_document(error: Infeasible, request: Mapping[str, Any] | None) -> dict[str, Any]:
    """In the place of a plan.

    Args:
        request: what was asked, by field.
    """
    return document(SCHEMA, error, feasible=False, request=None if request is None else dict(request))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChoice:
    """One layer's part of a plan; bytes and FLOPs are of one micro-batch on one rank."""

    layer: str
    stage: int
    policy: str
    kept_bytes: int
    offloaded_bytes: int = 0
    recompute_flops: int = 0


@dataclass(frozen=True, kw_only=True)
class ForecastPlan:
    """A planner's choice for a run, for people and as a document.

    ``reasons`` are by layer; ``what_if`` is what each next GiB would change, of one where not all were asked for
    (``all_next``). ``made_by`` is what was asked for, by flag: enough to make the plan again.
    """

    model: str
    choice: AutoForecast
    layers: tuple[LayerChoice, ...]
    reasons: dict[str, Reason]
    solver_seconds: float
    made_by: dict[str, Any] = field(default_factory=dict)
    what_if: tuple[NextGiB, ...] = ()
    all_next: bool = False
    limit: Limit | None = None
    idle: tuple[str, ...] = ()  # flags without an effect

    @property
    def warnings(self) -> tuple[str, ...]:
        """Parts of the configuration that are not in the figures, and whether the plan may not fit after all."""
        run = self.choice.forecast.run
        found = [*run.model.left_out, *self.idle, *unlike_anchor(run, self.choice.hardware.name)]
        if self.verdict is FitVerdict.CLOSE and self.limit is not None and self.limit.gpu:
            needs, gpu = self.figures.needs, self.limit.gpu
            least = self.choice.minimum_budget_bytes
            lower = f"a smaller --budget is surer, from {format_bytes(least)}"
            surer = lower if least < self.choice.forecast.peak_bytes else "no plan of this run takes less"
            found.append(f"whether this plan fits {gpu} is {self.verdict}: it needs {needs}; {surer}")
        return tuple(found)

    @property
    def figures(self) -> RunFigures:
        """Allocated, reserved and device bytes, and the step's time."""
        found, device = self.choice.forecast, self.choice.hardware
        return figures(found.run, found.peak_bytes, hardware=device.name, step_seconds=self.choice.step_seconds)

    @property
    def verdict(self) -> FitVerdict | None:
        """Whether it fits what it was planned for."""
        if self.limit is None:
            return None
        return self.figures.verdict(usable_bytes=self.limit.device_bytes, budget_bytes=self.limit.budget_bytes)

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.plan/1``. The hash covers the layers' choices and segments."""
        from jettison.report.timeline_files import (
            peak_by_role,  # the schedule's clock, which reading plans does without
        )

        choice, found = self.choice, self.choice.forecast
        layers = [asdict(layer) for layer in self.layers]
        segments = [list(each) for each in choice.segments]
        name = Path(self.model).name if Path(self.model).exists() else self.model  # wherever it lies
        decided = [name, layers, segments] if segments else [name, layers]
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        return document(
            SCHEMA,
            self,
            choice,
            found.run.recompute,
            made_from=DESCRIBED,
            feasible=True,
            predicted=part(
                "PlanPredicted", choice, found, stalled_seconds=choice.stalled_seconds * found.run.micro_batches
            ),
            peak_roles=peak_by_role(found, choice.estimate, found.worst.index),
            solver={"gap": choice.gap, "seconds": self.solver_seconds},
            layers=[part("PlanLayer", layer) for layer in self.layers],
            micro_batches_without_recompute=found.run.recompute.whole,
            hardware=choice.hardware.name,
            stages=[
                part("PlanStage", stage, stage=stage.index, peak_bytes=stage.peak.nbytes) for stage in found.stages
            ],
            reasons=tuple(self.reasons.values()),
            what_if=[part("PlanNextGiB", row, row.answer, row.answer.forecast) for row in self.what_if],
            request=self.made_by,
            hash=hashlib.sha256(text.encode()).hexdigest(),
        )

    def table(self) -> RenderableType:
        """Facts, and layers that do the same as one row."""
        choice, found = self.choice, self.choice.forecast
        recompute, share = found.run.recompute, format_percent(choice.overhead_fraction)
        rows = [
            ("model", f"{self.model}, {format_count(found.parameters)} parameters"),
            ("budget", f"{exact(choice.budget_bytes)}{self._caution()}"),
            ("predicted peak", f"{exact(found.peak_bytes)}, on stage {found.worst.index}"),
            *self.figures.rows(),
            *([] if self.verdict is None else [("verdict", self.verdict.said)]),
            ("smallest budget", exact(choice.minimum_budget_bytes)),
            ("recompute", f"{share} of a step's time, on {choice.hardware.name}"),
        ]
        if recompute.offload:
            limit = "" if choice.host_budget_bytes is None else f" of {format_bytes(choice.host_budget_bytes)}"
            waited = f"{format_seconds(choice.stalled_seconds)} of copies exposed in a micro-batch"
            rows.append(("offload", f"{format_bytes(choice.host_bytes)}{limit} of CPU memory; {waited}"))
        if choice.segments:
            rows.append(_segments(choice.segments))
        if recompute.whole:
            rows.append(("not recomputed", f"{recompute.whole} of each window of micro-batches in flight"))
        rows.append(("solver", f"gap {format_percent(choice.gap)}, {format_seconds(self.solver_seconds)}"))
        parts: list[RenderableType] = [facts(rows), self._layers_table()]
        if self.all_next:
            parts.append(_what_if_table(self.what_if))
        return Group(*parts)

    def _caution(self) -> str:
        """Note for a budget that the range of the device's bytes set: a larger one may fit, too."""
        limit = self.limit
        if limit is None or self.choice.budget_bytes >= limit.nbytes or self.verdict is not FitVerdict.FITS:
            return ""
        return f", with which 80 % of runs fit {limit.gpu}; up to --budget {format_bytes(limit.nbytes)} may fit"

    def _layers_table(self) -> FittedTable:
        groups = grouped(
            ((o.policy, str(self.reasons[o.layer]), o.kept_bytes, o.offloaded_bytes, o.recompute_flops), o)
            for o in self.layers
        )
        right = ("stage", "kept", "offloaded", "recomputed")
        table = grid("What each layer does with one micro-batch", ("layer", "policy", "why"), right)
        for (policy, why, kept, moved, flops), same in groups.items():
            stages = span([f".{stage}" for stage in dict.fromkeys(one.stage for one in same)], brief=True).lstrip(".")
            held = (format_bytes(kept), format_bytes(moved), format_flops(flops))
            table.add_row(span([one.layer for one in same]), policy, why, stages, *held)
        return table


def _what_if_table(rows: Sequence[NextGiB]) -> FittedTable:
    from jettison.report.alternatives import flips_text

    title = "What each next GiB would change"
    table = grid(title, ("budget", "tensors whose policy changes"), ("a step saves",))
    for row in rows:
        more = len(row.flips) - MOST_FLIPS
        text = flips_text(row.flips[:MOST_FLIPS]) + (f"; {more} more" if more > 0 else "")
        table.add_row(format_bytes(row.answer.budget_bytes), text, format_seconds(row.saved_seconds))
    if not rows:
        table.add_row("", "nothing is recomputed, and nothing is offloaded", "")
    return table
