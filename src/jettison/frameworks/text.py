"""Pieces of the Python that is written: templates, and tables of literals wrapped so that people can read them.

NOTE [ What hooks move ]
Around a layer that is left alone, hooks see each tensor that autograd saves, in the order in which the layer's program
lists them: the file has the numbers of those that the plan moves. Around a checkpoint they see what it is given, and
nothing else: what runs again is saved inside of it, and what selective contexts keep does not pass through hooks. Of
what it is given floating-point tensors move; a buffer's type is not known here, so that bytes on the host count all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from string import Template
from textwrap import indent

from jettison.core.units import format_bytes
from jettison.frameworks.policy import LayerAction, LayerPolicy, OpCall, Subject
from jettison.spec.frameworks import FOLDER


@cache
def pieces(file: str) -> Mapping[str, str]:
    """Pieces of a template by name: what stands below each line ``#: NAME``."""
    parts = re.split(r"^#: (\w+)\n", (FOLDER / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def filled(piece: str, **values: object) -> str:
    """A piece with a value in the place of each ``$name``."""
    return Template(piece).substitute(values)


def header(subject: Subject, target: str, use: str) -> str:
    """The docstring of a generated file."""
    budget = f"{format_bytes(subject.budget_bytes)} ({subject.budget_bytes}B)"
    left_out = "".join(f"Not in these bytes: {safe(text)}\n" for text in subject.left_out)
    return (
        f'"""Activation checkpointing for {target}, exported from a Jettison plan.\n\n'
        f"Model: {safe(subject.model)}\nBudget: {budget}\nPlan: {subject.plan_hash}\n{left_out}\n{use}\n"
        '"""\n'
    )


def safe(text: str) -> str:
    """Text that ends no string and starts no line."""
    return "".join(c if c.isprintable() else "?" for c in text).replace("\\", "/").replace('"', "'")


def names(values: Iterable[object]) -> str:
    """A tuple with one value a line."""
    lines = "".join(f"    {value!r},\n" for value in values)
    return f"(\n{lines})" if lines else "()"


def rows(table: Mapping[object, object]) -> str:
    """A dict with one key a line."""
    return "{\n" + "".join(f"    {key!r}: {value!r},\n" for key, value in table.items()) + "}"


def kinds_of(values: Iterable[tuple[object, ...]]) -> dict[tuple[object, ...], str]:
    """A name for each kind of layer, in the order in which they come."""
    return {value: f"kind {number}" for number, value in enumerate(dict.fromkeys(values), 1)}


def selective_tables(layers: Mapping[object, Sequence[OpCall]]) -> str:
    """SELECTIVE and SAVES: by layer its kind, and by kind and op the numbers of the calls whose outputs stay."""
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
        "# by kind of layer and op: whose outputs stay, as numbers of its calls in the layer's forward\n"
        f"SAVES = {{\n{indent(text, '    ')}}}\n" + pieces("host.py.txt")["past_hooks"]
    )


def moves_table(policies: Mapping[object, LayerPolicy]) -> str:
    """By layer, which of the tensors that hooks see wait on the host; empty where nothing does."""
    lines = "".join(f"    {name!r}: {_numbers(policy)},\n" for name, policy in policies.items() if policy.moved)
    if not lines:
        return ""
    what = "# by layer: which tensors that autograd saves around it wait on the host, by number; ALL: what it is given"
    return f"ALL = None\n{what}\nON_HOST = {{\n{lines}}}\n"


def _numbers(policy: LayerPolicy) -> str:
    if policy.action is not LayerAction.KEEP:
        return "ALL"
    found = tuple(slot.index for slot in policy.program.slots if slot.buffer in policy.moved)
    return f"frozenset({found!r})"
