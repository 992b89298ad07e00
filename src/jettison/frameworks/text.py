"""Templates of generated Python, and readable tables of literals.

NOTE [ What hooks move ]
Around a layer without recomputation, hooks see each tensor that autograd saves, in the order of the layer's program:
the file has the numbers of the offloaded ones. Around a checkpoint they see only its inputs: recomputed tensors are
saved inside of it, and tensors kept by selective contexts do not pass through hooks. Only floating-point inputs are
offloaded; a buffer's dtype is unknown here, so offloaded bytes include all inputs.
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
