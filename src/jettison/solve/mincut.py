"""Minimum s-t cut with exact integer capacities that grow with a price, restarted from the flow at a lower price.

A flow that is feasible at one price stays feasible at any higher one, because capacities only grow. Sweeping the price
upwards therefore only ever augments; a copy of the residual is the whole state. Capacities are Python integers of any
size, so the cut is exact and the same on every machine. The minimal source side of a minimum cut does not depend on the
flow that found it, which makes the answer unique.

Sources: Ford & Fulkerson 1956 (maximum flow = minimum cut); Dinic 1970 (blocking flows); Picard 1976 (closures).
"""

from __future__ import annotations

from dataclasses import dataclass, field

SOURCE, SINK = 0, 1


@dataclass(kw_only=True)
class CutNetwork:
    """A network under construction. An edge's capacity is ``fixed + price * priced``; ``fixed`` may be `unbounded`."""

    unbounded: int
    heads: list[int] = field(default_factory=list)  # edge e and its reverse e ^ 1
    fixed: list[int] = field(default_factory=list)
    priced: list[tuple[int, int]] = field(default_factory=list)  # (edge, capacity per unit of price)
    leaving: list[list[int]] = field(default_factory=lambda: [[], []])

    def add_node(self) -> int:
        """The new node's number."""
        self.leaving.append([])
        return len(self.leaving) - 1

    def add_edge(self, tail: int, head: int, *, fixed: int = 0, priced: int = 0) -> None:
        """An edge and its empty reverse."""
        edge = len(self.heads)
        self.heads += (head, tail)
        self.fixed += (fixed, 0)
        self.leaving[tail].append(edge)
        self.leaving[head].append(edge + 1)
        if priced:
            self.priced.append((edge, priced))


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A maximum flow at one price, as residual capacities, and the minimal source side of its cut."""

    price: int
    residual: list[int]
    source_side: frozenset[int]


def maximum_flow(network: CutNetwork, price: int, start: Flow | None = None) -> Flow:
    """The maximum flow at ``price``, continued from ``start`` at the same or a lower price."""
    residual = list(start.residual if start else network.fixed)
    growth = price - (start.price if start else 0)
    assert growth >= 0, "prices are swept upwards"
    for edge, per_price in network.priced:
        residual[edge] += growth * per_price
    while True:
        distance = _distances_to_sink(network, residual)
        if distance[SOURCE] < 0:
            return Flow(price=price, residual=residual, source_side=_reached(network, residual))
        _blocking_flow(network, residual, distance)


def _distances_to_sink(network: CutNetwork, residual: list[int]) -> list[int]:
    """Edges to the sink along the residual, -1 where there is no way."""
    heads, leaving = network.heads, network.leaving
    distance = [-1] * len(leaving)
    distance[SINK] = 0
    frontier = [SINK]
    while frontier and distance[SOURCE] < 0:
        following = []
        for node in frontier:
            for edge in leaving[node]:
                tail = heads[edge]
                if distance[tail] < 0 and residual[edge ^ 1]:
                    distance[tail] = distance[node] + 1
                    following.append(tail)
        frontier = following
    return distance


def _blocking_flow(network: CutNetwork, residual: list[int], distance: list[int]) -> None:
    """Saturate every shortest path, depth first, each edge looked at once."""
    heads, leaving = network.heads, network.leaving
    tried = [0] * len(leaving)
    path: list[int] = []
    node = SOURCE
    while True:
        if node == SINK:
            node = _push(path, heads, residual)
            continue
        below = distance[node] - 1
        edges = leaving[node]
        for i in range(tried[node], len(edges)):
            edge = edges[i]
            if residual[edge] and distance[heads[edge]] == below:
                tried[node] = i
                path.append(edge)
                node = heads[edge]
                break
        else:
            if not path:
                return
            distance[node] = -1
            node = heads[path.pop() ^ 1]


def _push(path: list[int], heads: list[int], residual: list[int]) -> int:
    """Send what the path can carry; cut ``path`` before its first full edge and return the node there."""
    amount = min([residual[edge] for edge in path])
    first_full = -1
    for i, edge in enumerate(path):
        residual[edge] -= amount
        residual[edge ^ 1] += amount
        if first_full < 0 and not residual[edge]:
            first_full = i
    node = heads[path[first_full] ^ 1]
    del path[first_full:]
    return node


def _reached(network: CutNetwork, residual: list[int]) -> frozenset[int]:
    heads, leaving = network.heads, network.leaving
    reached = {SOURCE}
    stack = [SOURCE]
    while stack:
        for edge in leaving[stack.pop()]:
            head = heads[edge]
            if residual[edge] and head not in reached:
                reached.add(head)
                stack.append(head)
    return frozenset(reached)
