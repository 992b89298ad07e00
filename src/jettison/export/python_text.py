"""Pieces of the Python that is written: names as literals, wrapped so that people can read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent

from jettison.export.policy import OpCall
from jettison.export.subject import Subject
from jettison.units import format_bytes


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


def saves_table(kinds: Mapping[str, Sequence[OpCall]]) -> str:
    """By kind of layer, by op, the numbers of the calls whose outputs stay."""
    text = ""
    for kind, calls in kinds.items():
        by_op: dict[str, list[int]] = {}
        for call in calls:
            by_op.setdefault(call.op, []).append(call.number)
        rows = "".join(f"{op!r}: {tuple(numbers)!r},\n" for op, numbers in sorted(by_op.items()))
        text += f"{kind!r}: {{\n{indent(rows, '    ')}}},\n"
    return f"{{\n{indent(text, '    ')}}}"


PAST_HOOKS = """
# what selective contexts save never went through hooks around the layer; from torch 2.15 on, it has to be asked for
_ASKED = "respect_saved_tensors_hooks"
PAST_HOOKS = {_ASKED: False} if _ASKED in signature(checkpoint).parameters else {}
"""
"""Python of an exported file: settings of a selective checkpoint, with which all versions of torch do the same."""
