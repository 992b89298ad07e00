"""Export targets by name, the files that they write and templates of them, and losses and costs against the plan.

NOTE [ What hooks move ]
Around a layer without recomputation, hooks see each tensor that autograd saves, in the order of the layer's program:
the file has the numbers of the offloaded ones. Around a checkpoint they see only its inputs: recomputed tensors are
saved inside of it, and tensors kept by selective contexts do not pass through hooks. Only floating-point inputs are
offloaded; a buffer's dtype is unknown here, so offloaded bytes include all inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import groupby, pairwise
from string import Template
from textwrap import indent
from typing import Any

from jettison.core.documents import data, document, part
from jettison.core.errors import known
from jettison.core.units import format_bytes
from jettison.frameworks.layer_policies import Cost, LayerAction, LayerPolicy, OpCall, Pricer, Subject, tensor_names
from jettison.frameworks.nearest_policy import Nearest
from jettison.spec.frameworks import FOLDER, named

SCHEMA = "jettison.export/1"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another policy that the target can express, and its cost."""

    words: str
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """Output of a target: files by name, the most important first.

    Args:
        lost: losses in addition to those of `losses`; None if nothing at all is lost.
    """

    files: dict[str, str]
    policies: tuple[LayerPolicy, ...]
    cost: Cost
    lost: tuple[str, ...] | None = ()
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Exported(TargetOutput):
    """Export of a plan, with all losses; ``checked_with``: versions whose own parser or class accepted such output."""

    target: str
    subject: Subject
    plan_cost: Cost
    checked_with: str
    lost: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing of the plan is lost."""
        return not self.lost

    def document(self) -> dict[str, Any]:
        """JSON document of schema ``jettison.export/1``."""
        subject = self.subject
        return document(
            SCHEMA,
            self,
            subject,
            warnings=subject.left_out,
            cost={"plan": data(self.plan_cost), "exported": data(self.cost)},
            alternatives=[part("ExportAlternative", one.cost, settings=one.words) for one in self.alternatives],
            hardware=subject.hardware.name,
            layers=[
                part(
                    "ExportLayer",
                    policy,
                    policy.decision,
                    plan=policy.decision.policy,
                    plan_recomputed=policy.decision.recomputed,
                    plan_offloaded=tensor_names(policy.program, policy.decision.offloaded),
                    exported=policy.words or str(policy.action),
                    plan_kept_bytes=policy.decision.kept_bytes,
                    saves=[f"{call.op} {call.number}" for call in policy.saves],
                )
                for policy in self.policies
            ],
        )


Exporter = Callable[[Subject, Pricer], Exported]


def exporter(target: str) -> Exporter:
    """Return the exporter of a target, around its framework's ``write``.

    An exporter raises:
        CannotSay: the target cannot express the plan or its model.
        DoesNotFit: no policy that it can express fits the plan's budget.

    Raises:
        UsageError: there is no such target.
    """
    targets = named("targets")
    entry = targets[known(target, targets, "--to")]
    write: Callable[[Nearest], TargetOutput] = import_module(f"jettison.frameworks.{entry['folder']}.write").write

    def export(subject: Subject, pricer: Pricer) -> Exported:
        found = write(Nearest(subject=subject, pricer=pricer, target=target))
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
    for name in ("offloaded", "packed"):
        touched = [p for p in policies if getattr(p.decision, name) and not p.offloaded]
        if touched:
            nbytes = sum(p.program.kept_bytes(getattr(p.decision, name)) for p in touched)
            where = "offloaded to CPU" if name == "offloaded" else "kept in fewer bytes"
            found.append(
                f"{format_bytes(nbytes)} of {len(touched)} layers are {where} in the plan; {target} cannot express it"
            )
    here = [policy for policy in policies if policy.offloaded and policy.offloaded != policy.decision.offloaded]
    if here:
        planned = sum(p.program.kept_bytes(p.decision.offloaded) for p in here)
        ours = sum(p.program.kept_bytes(p.offloaded) for p in here)
        found.append(
            f"{format_bytes(ours)} of {len(here)} layers are offloaded to CPU, in the plan {format_bytes(planned)} "
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
        other = "offloaded tensors" if any(p.offloaded != p.decision.offloaded for p in alike) else "recomputed ops"
        if plan_bytes != ours or before != after:
            word = "more" if ours > plan_bytes else "less"
            found.append(
                f"{names[0]}{f' to {names[-1]} ({len(names)})' if len(names) > 1 else ''}: {before} in the plan, "
                f"{after} here; keeps {format_bytes(abs(ours - plan_bytes))} {word} a layer"
                f"{'' if ours != plan_bytes else f', with other {other}'}"
            )
    return tuple(found)


def _other_runs(subject: Subject, policies: Sequence[LayerPolicy]) -> Iterator[str]:
    """Report segments, of which only the first layer keeps its input, if plan and export have different ones."""
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
    """Return the layer's policies and bytes in plan and export, each by itself: `_other_runs` reports segments."""
    before = policy.decision.words
    after = policy.words or str(policy.action)
    again = policy.decision.again
    same = (
        policy.kept == policy.decision.kept
        and policy.offloaded == policy.decision.offloaded
        and not policy.decision.packed
    )
    if same and (set(again) <= set(policy.again) or not again):
        after = before  # the same buffers are kept; additional recomputation is in the cost
    shared = policy.decision.shared_bytes, policy.shared_bytes
    return before, after, policy.decision.kept_bytes + shared[0], policy.kept_bytes + shared[1]


def strategy_notes(subject: Subject, policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    """Notes on settings of the strategy that wraps a live model."""
    if not subject.live:
        return ()
    found = ["the peak is of one rank with the unsharded model, as in the plan; sharding takes less"]
    if any(policy.offloaded for policy in policies):
        found.append("offload and prefetch do not overlap with compute; their time is not in these seconds")
    return tuple(found)


@cache
def pieces(file: str) -> Mapping[str, str]:
    """Pieces of a template by name: the lines below each ``#: NAME``."""
    parts = re.split(r"^#: (\w+)\n", (FOLDER / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def filled(piece: str, **values: object) -> str:
    """Substitute a value for each ``$name`` of a piece."""
    return Template(piece).substitute(values)


def header(subject: Subject, target: str, use: str) -> str:
    """Docstring of a generated file."""
    budget = f"{format_bytes(subject.budget_bytes)} ({subject.budget_bytes}B)"
    left_out = "".join(f"Not in these bytes: {safe(text)}\n" for text in subject.left_out)
    return (
        f'"""Activation checkpointing for {target}, exported from a Jettison plan.\n\n'
        f"Model: {safe(subject.model)}\nBudget: {budget}\nPlan: {subject.plan_hash}\n{left_out}\n{use}\n"
        '"""\n'
    )


def safe(text: str) -> str:
    """Replace characters that would end a string or start a line."""
    return "".join(c if c.isprintable() else "?" for c in text).replace("\\", "/").replace('"', "'")


def names(values: Iterable[object]) -> str:
    """Source of a tuple, one value a line."""
    lines = "".join(f"    {value!r},\n" for value in values)
    return f"(\n{lines})" if lines else "()"


def rows(table: Mapping[object, object]) -> str:
    """Source of a dict, one key a line."""
    return "{\n" + "".join(f"    {key!r}: {value!r},\n" for key, value in table.items()) + "}"


def kinds_of(values: Iterable[tuple[object, ...]]) -> dict[tuple[object, ...], str]:
    """Name each kind of layer, in order of appearance."""
    return {value: f"kind {number}" for number, value in enumerate(dict.fromkeys(values), 1)}


def selective_tables(layers: Mapping[object, Sequence[OpCall]]) -> str:
    """Source of SELECTIVE, kinds by layer, and SAVES, numbers of the calls whose outputs are kept by kind and op."""
    kinds = kinds_of(tuple(calls) for calls in layers.values())
    selective = {layer: kinds[tuple(calls)] for layer, calls in layers.items()}
    text = ""
    for calls, kind in kinds.items():
        by_op: dict[str, list[int]] = {}
        for call in calls:
            assert isinstance(call, OpCall)
            by_op.setdefault(call.op, []).append(call.number)
        lines = "".join(f"{op!r}: {tuple(numbers)!r},\n" for op, numbers in sorted(by_op.items()))
        text += f"{kind!r}: {{\n{indent(lines, '    ')}}},\n"
    return (
        f"SELECTIVE = {rows(selective) if selective else '{}'}\n"
        "# by kind of layer and op: numbers of the op's calls in the layer's forward whose outputs are kept\n"
        f"SAVES = {{\n{indent(text, '    ')}}}\n" + pieces("offload.py.txt")["past_hooks"]
    )


def moves_table(policies: Mapping[object, LayerPolicy]) -> str:
    """Source of ON_HOST, the tensors to offload by layer as numbers in the order of hooks; empty without any."""
    lines = "".join(f"    {name!r}: {_numbers(policy)},\n" for name, policy in policies.items() if policy.offloaded)
    if not lines:
        return ""
    what = "# by layer: tensors offloaded to CPU, as numbers in the order in which autograd saves them; ALL: its inputs"
    return f"ALL = None\n{what}\nON_HOST = {{\n{lines}}}\n"


def _numbers(policy: LayerPolicy) -> str:
    if policy.action is not LayerAction.KEEP:
        return "ALL"
    found = tuple(slot.index for slot in policy.program.slots if slot.buffer in policy.offloaded)
    return f"frozenset({found!r})"
