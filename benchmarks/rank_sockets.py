"""Sockets of a run's gloo groups: computed for any number of ranks, and measured on a few real processes.

    python -m benchmarks.rank_sockets 8

A group opens one to each other rank at once, or where it first sends, which the groups of `jettison train` do
(`jettison.train.ranks.sockets_when_used`). On an accelerator tensors of steps go over NCCL, which is not counted.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import ceil, log2
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist

from jettison.train.ranks import sockets_when_used

PATIENCE_SECONDS = 300
SETTLED = 10
"""Looks in a row that find as many."""


def sockets(size: int, axes: Sequence[int], *, before: bool, device: str) -> dict[str, int]:
    """Of a run with checkpoints, on a mesh with such axes: of rank 0 and, the most, of another rank."""
    others = size - 1
    if before:  # the default group, one for words, one for checkpoints; the axes' own on CPUs
        each = 3 * others + (sum(n - 1 for n in axes) if device == "cpu" else 0)
        return {"rank 0": each, "another": each}
    groups_of_steps = [min(n - 1, 2) for n in (size, *axes)] if device == "cpu" else []
    return {"rank 0": sum(groups_of_steps) + others, "another": sum(groups_of_steps) + checkpoint_sockets(size)}


def checkpoint_sockets(size: int) -> int:
    """The most that a rank other than 0 opens in the group of `torch.distributed.checkpoint`: two in a ring, and a
    tree's. Rank 0 opens one to each: torch gathers there.
    """
    return min(size - 1, 2 + ceil(log2(size)))


def measured(size: int) -> dict[str, list[int]]:
    """Sockets that each of so many real processes opens: in sums of a step, in a checkpoint, in a group that opens all
    at once.
    """
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = [sys.executable, "-m", "benchmarks.rank_sockets", str(size), str(store.port), name]
        ranks = [subprocess.Popen([*call, str(rank)]) for rank in range(size)]
        try:
            for rank, process in enumerate(ranks):
                status = process.wait(timeout=PATIENCE_SECONDS)
                assert status == 0, f"rank {rank} ended with {status}"
        finally:
            for process in ranks:
                process.kill()
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return {kind: [of_rank[kind] for of_rank in found] for kind in found[0]}


def _measure(rank: int, size: int, port: int, folder: Path) -> None:
    """On one of them."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    with sockets_when_used():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        group = dist.new_group(backend="gloo")
    counts = [_open_sockets()]
    for _ in range(3):
        dist.all_reduce(torch.zeros(5, dtype=torch.float64))
    counts.append(_open_sockets())
    tensors = {f"w{rank}": torch.ones(3), "shared": torch.zeros(4)}
    dcp.save(tensors, checkpoint_id=str(folder / "ck"), process_group=group)
    dcp.load(tensors, checkpoint_id=str(folder / "ck"), process_group=group)
    counts.append(_open_sockets())
    dist.new_group(backend="gloo")
    counts.append(_open_sockets() - 1)  # it listens on one
    steps, checkpoint, at_once = (after - before for before, after in itertools.pairwise(counts))
    found = {"steps": steps, "checkpoint": checkpoint, "at once": at_once}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _open_sockets() -> int:
    """Once nothing opens or closes any more: gloo's threads close what they met others by a moment later."""
    counts: list[int] = []
    while len(set(counts[-SETTLED:])) != 1 or len(counts) < SETTLED:
        found = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        counts.append(sum(os.readlink(file).startswith("socket") for file in found if file.is_symlink()))
        time.sleep(0.1)
    return counts[-1]


def main(size: str, port: str = "", folder: str = "", rank: str = "") -> None:
    """The command line, and that of one of the processes which it starts."""
    if rank:
        _measure(int(rank), int(size), int(port), Path(folder))
    else:
        print(json.dumps(measured(int(size))))


if __name__ == "__main__":
    main(*sys.argv[1:])
