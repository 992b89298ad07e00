"""Results of an export: files, losses, and its cost next to the plan's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from typing import Any, Protocol

from jettison.errors import DoesNotFit, UsageError
from jettison.export.policy import LayerPolicy
from jettison.export.subject import Subject
from jettison.units import format_bytes

SCHEMA = "jettison.export/1"


class CannotSay(UsageError):
    """A target has no words for what the plan asks for, or for the model that it was made for."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one step. None where it is not known.

    Args:
        layer_bytes: kept on the device by all layers, of one micro-batch on one rank.
        held_bytes: alive between forward and backward beside what was there before, the model's output included.
        recompute_seconds: at the prices of one accelerator, with nothing else on it.
        step_seconds: of the whole step, where a described run says what that is.
    """

    layer_bytes: int
    peak_bytes: int
    held_bytes: int | None = None
    recompute_flops: int = 0
    recompute_seconds: float = 0.0
    step_seconds: float | None = None
    host_bytes: int = 0


class Pricer(Protocol):
    """Says what a step costs. Lives where the plan can be worked out again."""

    def plan(self) -> Cost:
        """Under the plan itself."""
        ...

    def cost(self, policies: Sequence[LayerPolicy], code: str = "") -> Cost:
        """Under what was exported.

        Args:
            code: Python that defines ``apply(model)``; where there is a module, this is what runs.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Something else that the target can say, and what that costs."""

    words: str
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files by name, in the order in which they matter."""

    target: str
    subject: Subject
    files: dict[str, str]
    policies: tuple[LayerPolicy, ...]
    plan_cost: Cost
    cost: Cost
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = field(default=())
    checked_with: str = ""  # versions whose own parser or class took such output

    @property
    def exact(self) -> bool:
        """Nothing of the plan is lost."""
        return not self.lost

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.export/1``."""
        subject = self.subject
        return {
            "schema": SCHEMA,
            "target": self.target,
            "checked_with": self.checked_with,
            "model": subject.model,
            "plan_hash": subject.plan_hash,
            "budget_bytes": subject.budget_bytes,
            "exact": self.exact,
            "lost": list(self.lost),
            "notes": list(self.notes),
            "warnings": list(self.subject.left_out),
            "cost": {"plan": asdict(self.plan_cost), "exported": asdict(self.cost)},
            "alternatives": [{"words": one.words, **asdict(one.cost)} for one in self.alternatives],
            "hardware": subject.hardware.name,
            "layers": [
                {
                    "layer": policy.layer,
                    "stage": policy.decision.stage,
                    "plan": policy.decision.policy,
                    "exported": policy.words or str(policy.action),
                    "plan_kept_bytes": policy.decision.kept_bytes,
                    "kept_bytes": policy.kept_bytes,
                    "saves": [f"{call.op} {call.number}" for call in policy.saves],
                    "recompute_flops": policy.recompute_flops,
                }
                for policy in self.policies
            ],
            "files": self.files,
            "request": None,
        }


def losses(subject: Subject, policies: Sequence[LayerPolicy], target: str) -> tuple[str, ...]:
    """List the parts of a plan that the export lost, in sentences."""
    found = []
    for name in ("moved", "packed"):
        touched = [p for p in policies if getattr(p.decision, name) and not p.moved]
        if touched:
            nbytes = sum(p.program.kept_bytes(getattr(p.decision, name)) for p in touched)
            where = "on the host" if name == "moved" else "in fewer bytes"
            found.append(
                f"{format_bytes(nbytes)} of {len(touched)} layers wait {where} in the plan; {target} is not told so"
            )
    here = [policy for policy in policies if policy.moved and policy.moved != policy.decision.moved]
    if here:
        planned = sum(p.program.kept_bytes(p.decision.moved) for p in here)
        ours = sum(p.program.kept_bytes(p.moved) for p in here)
        found.append(
            f"{format_bytes(ours)} of {len(here)} layers wait on the host, and in the plan {format_bytes(planned)} "
            "of them, other tensors"
        )
    found += _other_runs(subject, policies)
    if subject.root_freed_bytes:
        found.append(
            f"{format_bytes(subject.root_freed_bytes)} that the plan drops around the layers stay (the embedding, the "
            "head, the loss)"
        )
    for (before, after, plan_bytes, ours), group in groupby(policies, key=_change):
        alike = list(group)
        names = [policy.layer for policy in alike]
        other = "tensors on the host" if any(p.moved != p.decision.moved for p in alike) else "ops run again"
        if plan_bytes != ours or before != after:
            word = "more" if ours > plan_bytes else "less"
            found.append(
                f"{names[0]}{f' to {names[-1]} ({len(names)})' if len(names) > 1 else ''}: {before} in the plan, "
                f"{after} here; keeps {format_bytes(abs(ours - plan_bytes))} {word} a layer"
                f"{'' if ours != plan_bytes else f', with other {other}'}"
            )
    return tuple(found)


def _other_runs(subject: Subject, policies: Sequence[LayerPolicy]) -> Iterator[str]:
    """Runs of layers of which one holds an input for all, where the plan has others than the export."""
    planned = [bool(policy.decision.shared_bytes) for policy in policies]
    ours = [bool(policy.shared_bytes) for policy in policies]
    if planned == ours:
        return
    less = sum(policy.decision.shared_bytes for policy in policies)
    before = f"{_count(subject.segments)} share one input in the plan ({format_bytes(less)} less than one a layer)"
    runs = [first for first, second in pairwise((*ours, False)) if second and not first]
    if not subject.segments:
        before = "every layer holds its own input in the plan"
    if not runs:
        yield f"{before}; here every layer holds its own"
        return
    held = sum(policy.shared_bytes for policy in policies)
    yield f"{before}; here {_count(runs)} share one, {'others, ' * bool(subject.segments)}{format_bytes(held)} less"


def _count(runs: Sequence[object]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) > 1)} of layers"


def _change(policy: LayerPolicy) -> tuple[str, str, int, int]:
    """Words and bytes before and after, of the layer by itself: what runs of layers share is said once for all."""
    before = policy.decision.policy
    after = policy.words or str(policy.action)
    again = policy.decision.again
    same = policy.kept == policy.decision.kept and policy.moved == policy.decision.moved and not policy.decision.packed
    if same and (set(again) <= set(policy.again) or not again):
        after = before  # the same buffers stay; what is run again beside is in the cost
    shared = policy.decision.shared_bytes, policy.shared_bytes
    return before, after, policy.decision.kept_bytes + shared[0], policy.kept_bytes + shared[1]


def require_fit(cost: Cost, subject: Subject, target: str, could: str) -> Cost:
    """A cost that the plan's budget allows.

    Raises:
        DoesNotFit: it does not.
    """
    if cost.peak_bytes > subject.budget_bytes:
        raise too_much(cost.peak_bytes, subject, target, could)
    return cost


def too_much(peak_bytes: int, subject: Subject, target: str, could: str) -> DoesNotFit:
    """The error for what needs more than the plan's budget, whatever is said."""
    return DoesNotFit(
        peak_bytes=peak_bytes,
        limit_bytes=subject.budget_bytes,
        limit_name="the plan's budget",
        advice=f"{target} can say {could}, which the plan goes beyond. Plan with --budget {peak_bytes}B or more",
    )
