"""Seconds of transfers between ranks: latency and bandwidth, within a node or between nodes.

Ranks are numbered tp first, then cp, dp and pp; consecutive ranks fill a node; experts are spread over dp x cp. A ring
over several nodes has one network adapter for each of its ranks in a node: its bandwidth is the smaller of the links'
and of those adapters' together.

NOTE [ A rank's own part ]
An all-gather also writes a rank's own part into the result, and a reduce-scatter reads it: within a node NCCL takes as
long for that as for half a step of the ring, so two ranks reach two thirds of the bandwidth of many. With 0.5 one share
of the links describes NCCL's times for 512 MB and more over 2, 4 and 8 devices within 4 % on B200, GB200 and GB300, 8 %
on H100, H200 and A100 (ai-dynamo/aiconfigurator, systems/data, nccl-tests; tests/facts/nccl_times.csv). An all-reduce
works in place, and takes half of that in each direction. Between nodes the network hides it.

NOTE [ Latencies of NCCL ]
NCCL's tuner chooses algorithms by 8.4 µs a collective and, for each step of a ring, 3.4 µs over NVLink or 14 µs over a
network; an all-reduce's tree goes along the ranks of a node and doubles over nodes (NVIDIA/nccl 5067397c, src/graph/
tuning.cc, ``ncclTunerConstantsDefaults``, ``ncclTopoTuneModel``). With these 130 times of 8 to 256 MB within a node are
off by 8 % in the median, with 2 µs a step by 19 %. An all-to-all's sends do not wait for each other: of 512 bytes it
takes 6 to 16 µs, over 2 devices as over 8 (aiconfigurator, nccl-tests on A100, H100 and B200).

NOTE [ Once to each node ]
Expert-parallel libraries (DeepEP, HybridEP: Megatron-Core's flex dispatcher) send a token once to each node that has
one of its experts, from there once to each such rank, and add results up on the way back (README of
deepseek-ai/DeepEP, "NVLink and RDMA forwarding"). With c experts chosen evenly over M places, M (1 - (1 - 1/M)^c)
places receive the token, instead of c rows. Rows are neither copied before the transfer nor summed after: `launches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Layout

OWN_PART: Final = 0.5
"""Share of a ring's step that a rank's own part takes: NOTE [ A rank's own part ]."""
LEAST_HOST_BYTES_PER_SECOND: Final = 10**6
"""Slowest link to CPU memory accepted: over a slower one a step would take days."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Number of ranks in a transfer, and of those that share a node."""

    size: int
    in_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes that the ranks are on."""
        return ceil(self.size / self.in_node)


def group(layout: Layout, axis: str, node: int) -> RankGroup:
    """Return the ranks of one axis: "tp", "cp", "ep", "dp", "pp", or "shards" of ZeRO and of gradients."""
    inner = {"tp": 1, "cp": layout.tp, "ep": layout.tp, "shards": layout.tp, "dp": layout.tp * layout.cp}
    inner |= {"experts": layout.tp * layout.ep, "pp": layout.tp * layout.cp * layout.dp}
    sizes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp, "pp": layout.pp}
    parts = layout.expert_tp if layout.splits_tp else layout.tp  # tp = etp (within an expert) x tpx (the rest)
    sizes |= {"etp": parts, "tpx": layout.tp // parts}
    inner |= {"etp": 1, "tpx": parts} | ({"ep": parts} if layout.splits_tp else {})
    sizes |= {"shards": layout.shards, "experts": layout.expert_shards}
    size = sizes[axis]
    return RankGroup(size, min(size, max(1, node // inner[axis])))


def transfer_seconds(kind: str, nbytes: float, ranks: RankGroup, hardware: Hardware, *, copies: int = 1) -> float:
    """Seconds of one collective.

    Args:
        kind: all_gather_into_tensor, reduce_scatter_tensor, all_reduce or all_to_all_single.
        nbytes: of the full tensor, gathered or reduced; for an all-to-all, of one rank's tensor.
        copies: rows of a token in an all-to-all that sends it once to each node and rank: NOTE [ Once to each node ].
    """
    n = ranks.size
    if n == 1 or not nbytes:
        return 0.0
    moved = nbytes * (n - 1) / n
    if kind.startswith("all_to_all"):
        away = nbytes * (n - ranks.in_node) / n
        outside = away * _share_sent_once(copies, ranks.nodes) / _network(hardware) if away else 0.0
        if copies > 1:  # rows from the network are forwarded over the links
            moved, away = moved * _share_sent_once(copies, n), 0.0
        inside = (moved - away) / _link(hardware, ranks, all_to_all=True) if ranks.in_node > 1 else 0.0
        return max(inside, outside) + _delay(hardware, min(1, ranks.nodes - 1), min(1, ranks.in_node - 1))
    if ranks.nodes == 1:
        moved += nbytes / n * (OWN_PART / 2 if kind == "all_reduce" else OWN_PART)
    seconds = moved / bandwidth(ranks, hardware)
    if kind == "all_reduce":
        return 2 * (seconds + _delay(hardware, ceil(log2(ranks.nodes)), ranks.in_node - 1)) - hardware.delays.start
    return seconds + _delay(hardware, ranks.nodes - 1, n - ranks.nodes)


def ring_bytes(kind: str, nbytes: int, ranks: int) -> int:
    """Bytes that each rank sends in a ring: all chunks but one; twice for an all-reduce, a reduce-scatter and an
    all-gather. ``nbytes`` is the full tensor's, gathered or reduced.
    """
    once = -(-nbytes // ranks) * (ranks - 1)
    return 2 * once if kind == "all_reduce" else once


def point_seconds(nbytes: float, layout: Layout, hardware: Hardware) -> float:
    """Seconds of a send to the next pipeline stage."""
    ranks = group(layout, "pp", hardware.node)
    if ranks.in_node == ranks.size:
        return nbytes / _link(hardware, ranks) + hardware.delays.link
    return nbytes / _network(hardware) + hardware.delays.network


def host_seconds(nbytes: float, hardware: Hardware) -> float:
    """Seconds of a copy to or from CPU memory, one way. `UsageError` if the file states no link, or too slow a one."""
    if hardware.host_bytes_per_second is None:
        raise UsageError(f"hardware {hardware.name} does not state its link to the host, which offloading needs")
    reached = hardware.host_bytes_per_second * hardware.reached.host
    if reached < LEAST_HOST_BYTES_PER_SECOND:
        raise UsageError(
            f"hardware {hardware.name} moves {reached:.3g} bytes a second to the host; expected "
            f"{LEAST_HOST_BYTES_PER_SECOND:,} or more, or no host under [gigabytes_per_second] where there is no link"
        )
    return nbytes / reached


def cpu_seconds(nbytes: float, hardware: Hardware) -> float:
    """Seconds to read and write these bytes of CPU memory, while the other devices of the host do so too."""
    return nbytes / (hardware.cpu_bytes_per_second * hardware.reached.cpu)


def bandwidth(ranks: RankGroup, hardware: Hardware) -> float:
    """Bytes per second of a ring, at each rank."""
    if ranks.nodes == 1:
        return _link(hardware, ranks)
    across = ranks.in_node * _network(hardware)
    return across if ranks.in_node == 1 else min(across, _link(hardware, ranks))


def _share_sent_once(copies: int, places: int) -> float:
    """Share of a token's rows that travel when each place with one of its experts is sent one."""
    return 1.0 if places == 1 else places * (1 - (1 - 1 / places) ** copies) / copies


def _delay(hardware: Hardware, between: int, within: int) -> float:
    return hardware.delays.start + between * hardware.delays.network + within * hardware.delays.link


def _link(hardware: Hardware, ranks: RankGroup, *, all_to_all: bool = False) -> float:
    if hardware.link_bytes_per_second is not None:
        reached = hardware.reached
        share = reached.all_to_all if all_to_all and reached.all_to_all is not None else reached.link
        return hardware.link_bytes_per_second * share
    if hardware.host_bytes_per_second is not None:  # devices without links of their own transfer through the host
        return hardware.host_bytes_per_second * hardware.reached.host
    raise UsageError(f"hardware {hardware.name} states no link between devices, and the layout needs {ranks.size}")


def _network(hardware: Hardware) -> float:
    if hardware.network_bytes_per_second is None:
        raise UsageError(
            f"hardware {hardware.name} does not state its network, and the layout takes more than one node of "
            f"{hardware.node}; add network to [gigabytes_per_second] of its file"
        )
    return hardware.network_bytes_per_second * hardware.reached.network
