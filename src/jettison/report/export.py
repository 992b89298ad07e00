"""An export for people: what it costs beside the plan, what is lost, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from jettison.core.units import format_bytes, format_flops, format_seconds
from jettison.report.fitted import FittedTable
from jettison.report.parts import exact, facts_table, span, titled

if TYPE_CHECKING:
    from jettison.frameworks.export import Exported
    from jettison.frameworks.policy import Cost, LayerPolicy


def export_table(found: Exported) -> RenderableType:
    """Facts, costs side by side, and layers that are treated alike as one row."""
    facts = [
        ("target", f"{found.target}{f', checked with {found.checked_with}' if found.checked_with else ''}"),
        ("model", found.subject.model),
        *(("left out", text) for text in found.subject.left_out),
        ("budget", exact(found.subject.budget_bytes)),
        ("exact", "yes" if found.exact else "no: see what is lost"),
    ]
    parts: list[RenderableType] = [facts_table(facts), _costs(found), _layers(found)]
    remarks = [("lost", text) for text in found.lost] + [("note", text) for text in found.notes]
    if remarks:
        parts.append(facts_table(remarks))
    return Group(*parts)


def _costs(found: Exported) -> FittedTable:
    table = titled("What a step costs", ("",), ("plan", found.target, *(one.words for one in found.alternatives)))
    costs = [found.plan_cost, found.cost, *(one.cost for one in found.alternatives)]
    rows: tuple[tuple[str, Callable[[Cost], str]], ...] = (
        ("peak", lambda cost: format_bytes(cost.peak_bytes)),
        ("kept by layers", lambda cost: format_bytes(cost.layer_bytes)),
        ("held for backward", lambda cost: "" if cost.held_bytes is None else format_bytes(cost.held_bytes)),
        ("on the host", lambda cost: format_bytes(cost.host_bytes) if cost.host_bytes else ""),
        ("computed again", lambda cost: format_flops(cost.recompute_flops)),
        (f"at prices of {found.subject.hardware.name}", lambda cost: format_seconds(cost.recompute_seconds)),
        ("a step", lambda cost: "" if cost.step_seconds is None else format_seconds(cost.step_seconds)),
    )
    for name, say in rows:
        cells = [say(cost) for cost in costs]
        if any(cells):
            table.add_row(name, *cells)
    return table


def _layers(found: Exported) -> FittedTable:
    table = titled("What each layer does", ("layer", "plan", "exported"), ("kept in the plan", "kept"))

    def key(policy: LayerPolicy) -> tuple[str, str, int, int]:
        decision = policy.decision
        return decision.policy, policy.words or str(policy.action), decision.kept_bytes, policy.kept_bytes

    for (plan, exported, before, after), group in groupby(found.policies, key=key):
        names = span([policy.layer for policy in group])
        table.add_row(names, plan, exported, format_bytes(before), format_bytes(after))
    return table
