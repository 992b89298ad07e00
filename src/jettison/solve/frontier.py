"""Pareto front of one region: bytes kept until backward against seconds of recomputation, its exact lower hull.

NOTE [ Keep or recompute is a cut ]
For a price per byte, choose the recomputed ops so that `seconds of recomputation + price * bytes kept` is least. Let
`n_b` mean that backward needs buffer b, and `r_o` that op o is recomputed. Slots are needed; a recomputed op needs
its inputs; a needed buffer is kept unless its op is recomputed:

    minimise  sum_o seconds_o r_o + price * sum_b bytes_b max(0, n_b - r_op(b))
    with      n_b = 1 for slots,   r_o <= n_b for every input b of o

Free buffers are left out. This is a minimum s-t cut, with n_b -> r_op(b) at the price of the bytes (to the sink if the
op must not be recomputed; unbounded if the buffer cannot be kept), r_o -> sink at its seconds, and r_o -> n_b
unbounded. Sweeping the price walks the lower hull of all (bytes, seconds) pairs; a query at the slope between two
neighbours either finds a vertex between them or proves that there is none (Eisner & Severance 1976). Seconds are
counted in whole picoseconds and prices as multiples of 1 / resolution with resolution > 2 * (all bytes)^2, which is
fine enough that no vertex is missed: two lines between integer points differ by at least 1 / (all bytes). Of equally
cheap choices the cut takes the one that needs the least (its minimal source side), which is unique.

Torch's min-cut partitioner solves such a cut at one price, for the joint graph of forward and backward.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jettison.ledger.program import Program

PICOSECONDS = 10**12
NONE_KEY = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """One option of a region: the buffers kept, their bytes, and the seconds of recomputation in backward.

    ``price`` (seconds per byte) is one at which no other choice is cheaper. ``key`` names the point within its program.
    Of the buffers kept, ``offloaded`` are on CPU and ``packed`` are packed losslessly; ``kept_bytes`` counts
    the bytes that remain on the device.
    """

    key: str
    kept: frozenset[int]
    kept_bytes: int
    seconds: float
    price: float = 0.0
    offloaded: frozenset[int] = frozenset()
    offloaded_bytes: int = 0
    packed: frozenset[int] = frozenset()


def plain_point(program: Program) -> FrontierPoint:
    kept = program.saved_buffers()
    return FrontierPoint(key=NONE_KEY, kept=kept, kept_bytes=program.kept_bytes(kept), seconds=0.0)


def pareto_frontier(
    program: Program, seconds: Callable[[int], float] | Sequence[float], *, max_points: int = 16
) -> tuple[FrontierPoint, ...]:
    """Points of the hull from the fewest bytes (with the fewest seconds for these) to plain autograd, sorted by bytes.
    Raise `ValueError` if a needed buffer can neither be kept nor recomputed, or an argument is out of range.

    Both ends are always included. If the hull has more than ``max_points`` vertices, those with the widest gaps around
    them are returned. See NOTE [ Keep or recompute is a cut ].

    Args:
        program: the region.
        seconds: of each op, by op index; values below a picosecond count as one.
        max_points: at least 2.
    """
    if max_points < 2:
        raise ValueError(f"max_points is {max_points}; a frontier has two ends")
    plain = plain_point(program)
    sweep = _Sweep.of(program, seconds)
    hull = [v.point for v in _hull(sweep, max_points - 1)]
    if hull[-1].seconds == 0.0 and hull[-1].kept_bytes == plain.kept_bytes:
        hull.pop()
    return (*hull, plain)


def fewest_bytes_point(program: Program, seconds: Callable[[int], float] | Sequence[float]) -> FrontierPoint:
    """The point with the fewest bytes kept, and among these the fewest seconds."""
    sweep = _Sweep.of(program, seconds)
    return sweep.query(sweep.highest_price, None).point


@dataclass(frozen=True, kw_only=True)
class _Vertex:
    """A point of the hull, its seconds in the sweep's integers, and its flow."""

    point: FrontierPoint
    picoseconds: int
    flow: Flow

    def cost(self, price: int, resolution: int) -> int:
        return resolution * self.picoseconds + price * self.point.kept_bytes


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """A program, its costs in integers, and its cut."""

    program: Program
    seconds: tuple[float, ...]
    picoseconds: tuple[int, ...]
    resolution: int
    network: CutNetwork
    needed_node: dict[int, int]  # keepable buffer -> node "backward needs it"
    again_node: dict[int, int]  # op -> node "it is recomputed"

    @classmethod
    def of(cls, program: Program, seconds: Callable[[int], float] | Sequence[float]) -> _Sweep:
        price_of = seconds if callable(seconds) else seconds.__getitem__
        by_op = tuple(float(price_of(op.index)) for op in program.ops)
        if any(not 0 <= s < float("inf") for s in by_op):
            raise ValueError("an op's seconds must be finite and 0 or more")
        picoseconds = tuple(max(1, round(s * PICOSECONDS)) for s in by_op)
        total = sum(b.nbytes for b in program.buffers) + 1
        resolution = 1 << (2 * total * total).bit_length()
        unbounded = resolution * (sum(picoseconds) + 1) * (total + 1) * 2
        network, needed_node, again_node = _build_network(program, picoseconds, resolution, unbounded)
        return cls(
            program=program,
            seconds=by_op,
            picoseconds=picoseconds,
            resolution=resolution,
            network=network,
            needed_node=needed_node,
            again_node=again_node,
        )

    @property
    def highest_price(self) -> int:
        """A price at which one byte outweighs all ops together."""
        return self.resolution * (sum(self.picoseconds) + 1)

    def query(self, price: int, start: Flow | None) -> _Vertex:
        """The cheapest choice at ``price / resolution`` picoseconds per byte."""
        flow = maximum_flow(self.network, price, start)
        side, program = flow.source_side, self.program
        kept = [
            b
            for b, node in self.needed_node.items()
            if node in side
            and ((maker := program.buffers[b].producer) is None or self.again_node.get(maker, -1) not in side)
        ]
        again = program.recompute_set(frozenset(kept))
        nbytes = program.kept_bytes(frozenset(kept))
        point = FrontierPoint(
            key=f"keep-{nbytes}",
            kept=frozenset(kept),
            kept_bytes=nbytes,
            seconds=sum(self.seconds[o] for o in again),
            price=price / self.resolution / PICOSECONDS,
        )
        return _Vertex(point=point, picoseconds=sum(self.picoseconds[o] for o in again), flow=flow)


def _build_network(
    program: Program, picoseconds: Sequence[int], resolution: int, unbounded: int
) -> tuple[CutNetwork, dict[int, int], dict[int, int]]:
    """The network of NOTE [ Keep or recompute is a cut ], over buffers that backward may need."""
    repeatable = _repeatable_ops(program)
    wanted, again = _reachable(program, repeatable)
    network = CutNetwork()
    again_node: dict[int, int] = {}
    for o, leader in _leaders(program, wanted, again).items():
        again_node[o] = network.add_node() if leader == o else again_node[leader]
    needed_node = {b: network.add_node() for b in wanted if program.buffers[b].keepable}

    def producer(b: int) -> int | None:
        """The op that may recompute b."""
        made_by = program.buffers[b].producer
        return made_by if made_by in repeatable else None

    def node(b: int) -> int:
        """Node of "backward needs b"; if b cannot be kept, the node of its op, which has to be recomputed."""
        made_by = producer(b)
        return needed_node[b] if program.buffers[b].keepable or made_by is None else again_node[made_by]

    for b, tail in needed_node.items():
        made_by = producer(b)
        network.add_edge(tail, SINK if made_by is None else again_node[made_by], priced=program.buffers[b].nbytes)
    for o, tail in again_node.items():
        network.add_edge(tail, SINK, fixed=resolution * picoseconds[o])
        for b in _costly(program, program.ops[o].inputs):
            if node(b) != tail:
                network.add_edge(tail, node(b), fixed=unbounded)
    for b in _costly(program, program.needed_buffers()):
        network.add_edge(SOURCE, node(b), fixed=unbounded)
    return network, needed_node, again_node


def _reachable(program: Program, repeatable: frozenset[int]) -> tuple[list[int], list[int]]:
    """Buffers that backward may need, ops it may recompute. `ValueError`: a slot that cannot be kept or recomputed."""
    wanted = set(_costly(program, program.needed_buffers()))
    for b in sorted(wanted):
        buffer = program.buffers[b]
        if not buffer.keepable and buffer.producer not in repeatable:
            what = f"buffer {b} ({buffer.source}, {buffer.name or 'unnamed'})"
            raise ValueError(f"{what} is needed in backward and can neither be kept nor recomputed")
    again = []
    for op in reversed(program.ops):
        if op.index in repeatable and any(b in wanted and program.buffers[b].producer == op.index for b in op.outputs):
            again.append(op.index)
            wanted.update(_costly(program, op.inputs))
    return sorted(wanted), again


def _leaders(program: Program, wanted: Iterable[int], again: Iterable[int]) -> dict[int, int]:
    """For each op, last first, the op that decides whether it is recomputed: itself, or its only reader.

    An op with a single reader whose results can be neither kept nor are saved has no choice of its own. Chains of such
    ops become one node, which keeps the network small.
    """
    readers: dict[int, set[int]] = {b: set() for b in wanted}
    leaders: dict[int, int] = {}
    needed = program.needed_buffers()
    for o in again:
        results = [b for b in program.ops[o].outputs if b in readers and program.buffers[b].producer == o]
        forced = {leader for b in results for leader in readers[b]}
        own = len(forced) != 1 or any(program.buffers[b].keepable or b in needed for b in results)
        leaders[o] = o if own else forced.pop()
        for b in _costly(program, program.ops[o].inputs):
            readers[b].add(leaders[o])
    return leaders


def _costly(program: Program, buffers: Iterable[int]) -> list[int]:
    """Buffers that are not free, each once, in order."""
    return sorted({b for b in buffers if not program.buffers[b].free})


def _repeatable_ops(program: Program) -> frozenset[int]:
    """Ops that may be recomputed and whose inputs are all available."""
    repeatable: set[int] = set()
    for op in program.ops:
        if op.anchor is None and all(
            program.buffers[b].free or program.buffers[b].keepable or program.buffers[b].producer in repeatable
            for b in op.inputs
        ):
            repeatable.add(op.index)
    return frozenset(repeatable)


def _hull(sweep: _Sweep, max_points: int) -> list[_Vertex]:
    """Vertices by bytes, ascending; the widest gap is queried first."""
    fastest = sweep.query(1, None)
    smallest = sweep.query(sweep.highest_price, fastest.flow)
    if smallest.point.kept_bytes == fastest.point.kept_bytes:
        return [fastest]
    if max_points < 2:
        return [smallest]
    found = [fastest, smallest]
    open_intervals: list[tuple[int, int, _Vertex, _Vertex]] = []

    def push(fast: _Vertex, small: _Vertex) -> None:
        area = (fast.point.kept_bytes - small.point.kept_bytes) * (small.picoseconds - fast.picoseconds)
        heapq.heappush(open_intervals, (-area, small.point.kept_bytes, fast, small))

    push(fastest, smallest)
    while open_intervals and len(found) < max_points:
        *_, fast, small = heapq.heappop(open_intervals)
        fewer_bytes = fast.point.kept_bytes - small.point.kept_bytes
        slope = (sweep.resolution * (small.picoseconds - fast.picoseconds) + fewer_bytes // 2) // fewer_bytes
        price = max(slope, fast.flow.price)
        middle = sweep.query(price, fast.flow)
        limit = min(fast.cost(price, sweep.resolution), small.cost(price, sweep.resolution))
        if middle.cost(price, sweep.resolution) < limit:
            found.append(middle)
            push(fast, middle)
            push(middle, small)
    return sorted(found, key=lambda v: v.point.kept_bytes)


# minimum cut ----------------------------------------------------------------------------------------------------------
#
# NOTE [ A cut whose price rises ]
# Capacities are exact integers that grow with a price. A flow that is feasible at one price is feasible at any higher
# one, so a sweep of prices only ever augments, and a copy of the residual is the whole state. The minimal source side
# of a minimum cut does not depend on the flow that found it, so the answer is unique. Sources: Ford & Fulkerson 1956
# (maximum flow = minimum cut); Dinic 1970 (blocking flows); Picard 1976 (closures).


SOURCE, SINK = 0, 1


@dataclass(kw_only=True)
class CutNetwork:
    """A network under construction. An edge's capacity is ``fixed + price * priced``."""

    heads: list[int] = field(default_factory=list)  # edge e and its reverse e ^ 1
    fixed: list[int] = field(default_factory=list)
    priced: list[tuple[int, int]] = field(default_factory=list)  # (edge, capacity per unit of price)
    leaving: list[list[int]] = field(default_factory=lambda: [[], []])

    def add_node(self) -> int:
        self.leaving.append([])
        return len(self.leaving) - 1

    def add_edge(self, tail: int, head: int, *, fixed: int = 0, priced: int = 0) -> None:
        """Add an edge and its empty reverse."""
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


def maximum_flow(network: CutNetwork, price: int, start: Flow | None) -> Flow:
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
    """Number of edges to the sink along the residual, -1 without a path."""
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
    """Saturate every shortest path, depth first; each edge is visited once."""
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
    """Send as much as the path can carry; cut ``path`` before its first full edge and return the node there."""
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
