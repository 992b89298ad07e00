"""Fingerprint of a region's autograd graph: its nodes, the numbers they save, and their edges.

A forward may take another path without any saved tensor changing its shape: a switch somewhere in Python picks another
activation, or swaps two operands. Autograd's graph shows what really ran. Comparing it with the graph of the verified
first run costs about two microseconds a node, and notices any other path through differentiable ops.

NOTE [ When a graph is compared ]
Tensors that a run dropped before its graph is known are recomputed by the recording, whatever the graph says: witnesses
(`jettison.runtime.witness`) check those values, and end a step that would have wrong gradients. A graph that differs
discards an outdated recording. With witnesses, graphs are compared in the first runs, and then in one of `GRAPH_SHARE`;
without them, in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

GRAPH_AFTER = 4  # the first runs of a recording, whose graphs are all compared
GRAPH_SHARE = 32  # of later runs, one in this many is compared
Node = Any
Print = tuple[Any, ...]

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_CAST = "ToCopyBackward0"
_PLAIN = (int, bool, float, str, type(None))
# reshape is one of these under a dispatch mode, as in the first run, and the other without
_SAME = {"ReshapeAliasBackward0": "ViewBackward0"}


class GraphBounds:
    """Bounds of a region's graph: the sequence number of its first node; those of the regions inside it, each with the
    first past its end; (table, key) of each parameter and buffer; leaves of its arguments.
    """

    __slots__ = ("inputs", "leaves", "nested", "start")

    def __init__(
        self,
        start: int,
        nested: Sequence[tuple[int, int]],
        owners: Mapping[Any, tuple[Any, Any]],
        leaves: Sequence[Any],
    ) -> None:
        self.start, self.nested = start, nested
        self.inputs: dict[Node, Any] = {}  # nodes that produced its arguments
        # by id, parameters and leaf arguments
        self.leaves = {id(t): name for name, (table, leaf) in owners.items() if (t := table[leaf]) is not None}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                if leaf.grad_fn is None:
                    self.leaves[id(leaf)] = position
                else:
                    self.inputs[leaf.grad_fn] = position

    def outside(self, node: Node) -> Any:
        """Label of a node outside of the region; None for one of its own."""
        sequence = node._sequence_nr()
        if sequence < self.start:
            return self.inputs.get(node, "outside")
        for call, (first, past) in enumerate(self.nested):
            if first <= sequence < past:
                return "block", call
        return None


def is_turn(run: int, turn: int) -> bool:
    """Whether the graph of the ``run``-th run is compared. Regions with another ``turn`` do so in other runs."""
    return run <= GRAPH_AFTER or (run + turn) % GRAPH_SHARE == 0


def next_sequence_number() -> int:
    """Sequence number of the next node in this thread's graph."""
    return int(torch._C._autograd._get_sequence_nr())


def nodes_behind(outputs: Iterable[Tensor], start: int = 0) -> Iterator[Node]:
    """Nodes of the graph of some tensors, from that sequence number on; those that accumulate gradients have none."""
    left = [node for t in outputs if (node := t.grad_fn) is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if node._sequence_nr() >= start:
            yield node
            following = {after for after, _ in node.next_functions if after is not None} - seen
            left.extend(following)
            seen |= following


def graph_print(outputs: Iterable[Any], bounds: GraphBounds) -> Print:
    """Fingerprint that is equal for two runs with the same graph for a region's ``outputs``."""
    numbers: dict[Node, int] = {}
    order: list[Node] = []

    def number(node: Node) -> int:
        found = numbers.get(node)
        if found is None:
            found = numbers[node] = len(order)
            order.append(node)
        return found

    described: list[Any] = [
        (number(leaf.grad_fn), leaf.output_nr)
        for leaf in outputs
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    for node in order:  # grows during the loop
        name, attributes = _kind(node.__class__)
        name = name or node.name()
        if name in (_ACCUMULATE, _CAST):
            leaf = _leaf(name, node)
            if leaf is not None:
                described.append((name, bounds.leaves.get(id(leaf), "leaf")))
                continue
        outside = bounds.outside(node)
        if outside is not None:
            described.append(outside)
            continue
        edges = tuple([None if n is None else (number(n), i) for n, i in node.next_functions])
        described.append((name, attributes(node) if attributes else (), edges))
    return tuple(described)


def _leaf(name: str, node: Node) -> Tensor | None:
    """The leaf that a node accumulates into, or of which it is a cast, which autocast may have cached long before."""
    if name == _CAST:
        node = node.next_functions[0][0]
        name = node.name() if node is not None else ""
    return node.variable if name == _ACCUMULATE else None


@cache
def _kind(kind: Any) -> tuple[str, Callable[[Node], Any] | None]:
    """Name of a node class, "" if each node has one of its own, and the function that reads its numbers."""
    name = ""
    if kind.__module__ == "builtins" and kind.__name__ != "CppFunction":  # autograd's own, not a custom Function
        name = _ACCUMULATE if kind.__name__ == "AccumulateGrad" else _SAME.get(kind.__name__, kind.__name__)
    names = _attributes(kind)
    return name, (lambda node: tuple([_number(getattr(node, a)) for a in names])) if names else None


def _attributes(kind: Any) -> tuple[str, ...]:
    """Attributes of a node class that hold numbers. Saved tensors are skipped: reading one would unpack it."""
    names = set(dir(kind))
    return tuple(
        sorted(
            name
            for name in names
            if name.startswith("_saved_") and "_raw" + name not in names and not name.endswith(("_sizes", "_options"))
        )
    )


def _number(value: Any) -> Any:
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, tuple | list):
        return tuple(value)
    return repr(value)
