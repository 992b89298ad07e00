"""Targets of an export by name, what one writes, and what is lost and costs next to the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby, pairwise
from typing import Any, Protocol

from jettison.errors import DoesNotFit, UsageError
from jettison.frameworks.policy import LayerPolicy, Subject
from jettison.spec.frameworks import named
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
class Written:
    """What a target makes of a plan: files by name, in the order in which they matter.

    Args:
        lost: beside what `losses` finds; None where nothing at all is lost.
    """

    files: dict[str, str]
    policies: tuple[LayerPolicy, ...]
    cost: Cost
    lost: tuple[str, ...] | None = ()
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What is written beside the plan itself; ``checked_with``: versions whose own parser or class took such output."""

    target: str
    subject: Subject
    files: dict[str, str]
    policies: tuple[LayerPolicy, ...]
    plan_cost: Cost
    cost: Cost
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    checked_with: str

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
            "warnings": list(subject.left_out),
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


Exporter = Callable[[Subject, Pricer], Exported]


def exporter(target: str) -> Exporter:
    """Return the exporter of a target: its framework's ``write``, which is given the target's name.

    An exporter raises:
        CannotSay: the target has no words for the plan or its model.
        DoesNotFit: nothing that it can say fits the plan's budget.

    Raises:
        UsageError: there is no such target.
    """
    targets = named("targets")
    if target not in targets:
        raise UsageError(f"got --to {target!r}; expected one of {', '.join(targets)}")
    entry = targets[target]
    write: Callable[[Subject, Pricer, str], Written] = import_module(
        f"jettison.frameworks.{entry['folder']}.write"
    ).write

    def export(subject: Subject, pricer: Pricer) -> Exported:
        found = write(subject, pricer, target)
        lost = () if found.lost is None else (*losses(subject, found.policies, target), *found.lost)
        return Exported(
            **{**vars(found), "lost": lost},
            target=target,
            subject=subject,
            plan_cost=pricer.plan(),
            checked_with=entry.get("checked_with", ""),
        )

    return export


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


def too_much(peak_bytes: int, subject: Subject, target: str, could: str) -> DoesNotFit:
    """The error for what needs more than the plan's budget, whatever is said."""
    return DoesNotFit(
        peak_bytes=peak_bytes,
        limit_bytes=subject.budget_bytes,
        limit_name="the plan's budget",
        advice=f"{target} can say {could}, which the plan goes beyond. Plan with --budget {peak_bytes}B or more",
    )


def refuse_described(subject: Subject, target: str) -> None:
    """Refuse a plan that names no modules.

    Raises:
        CannotSay: it is one.
    """
    if not subject.live:
        raise CannotSay(
            f"{target} wraps modules by name, and this plan of a described run names none; plan the config.json "
            "without a layout, or module:factory, and export that"
        )


def refuse_stacks(subject: Subject, target: str, *, in_order: bool = False) -> None:
    """Refuse a described plan whose layers are not the one list in which the target numbers them.

    Args:
        in_order: layers of several lists are numbered in the order of modules: an encoder's before a decoder's, and a
            tower of words before one of images, which a description has the other way round.

    Raises:
        CannotSay: the model is made of two stacks.
    """
    if subject.described is None:
        return
    model = subject.described.forecast.run.model
    if model.two_stacks and not (in_order and model.source is not None):
        raise CannotSay(
            f"{target} numbers layers in one list, and {subject.model} is {model.two_stacks}; plan the config.json "
            "without a layout, and export that, which names them"
        )


def refuse_images(subject: Subject, target: str) -> None:
    """Refuse a described plan of a model that reads no tokens.

    Raises:
        CannotSay: it is one.
    """
    if subject.described is not None and not subject.described.forecast.run.model.words:
        raise CannotSay(
            f"{target} is told of models of words, and {subject.model} reads none; export --to transformers"
        )


def strategy_notes(subject: Subject, policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    """Notes on settings of the strategy that wraps a live model."""
    if not subject.live:
        return ()
    found = ["the peak is of one rank that holds the whole model, as the plan's is; sharding it takes less"]
    if any(policy.moved for policy in policies):
        found.append("copies to the host and back run while nothing is computed; their time is not in these seconds")
    return tuple(found)
