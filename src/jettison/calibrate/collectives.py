"""How fast ranks of one machine talk: processes of their own, or the process group that there is already."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

from jettison.calibrate.fit import LinkFit
from jettison.errors import UsageError

SMALL_BYTES, LARGE_BYTES = 4 << 10, 32 << 20
WARM_UP, ROUNDS = 2, 9


def measure_link(ranks: int, device: str) -> LinkFit:
    """All-gather and all-reduce, small and large.

    Args:
        ranks: processes to start; where a process group is initialised it is used, and all its ranks must call this.
        device: "cuda", one device for each rank, or "cpu".

    Raises:
        UsageError: fewer than two ranks, fewer devices than ranks, or a torch without distribution.
    """
    if not distributed.is_available():
        raise UsageError("this torch was built without torch.distributed; leave --ranks out")
    if distributed.is_initialized():
        return _measure(distributed.get_world_size(), device)
    if ranks < 2:
        raise UsageError(f"got {ranks} ranks; collectives take 2 or more")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise UsageError(f"got {ranks} ranks for {torch.cuda.device_count()} devices; expected at most as many")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, device, folder), nprocs=ranks)
        found = json.loads((Path(folder) / "link.json").read_text(encoding="utf-8"))
    return LinkFit(ranks=ranks, bytes_per_second=found["bytes_per_second"], step_seconds=found["step_seconds"])


def _rank(rank: int, ranks: int, device: str, folder: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    try:
        link = _measure(ranks, device)
        if rank == 0:
            found = {"bytes_per_second": link.bytes_per_second, "step_seconds": link.step_seconds}
            (Path(folder) / "link.json").write_text(json.dumps(found), encoding="utf-8")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _measure(ranks: int, device: str) -> LinkFit:
    """A ring moves (n - 1) / n of a tensor in n - 1 steps to gather it, and twice that to reduce it."""
    steps = ranks - 1
    gather, reduce = (_seconds(call, SMALL_BYTES, ranks, device) for call in (_gather, _reduce))
    step = min(gather / steps, reduce / (2 * steps))
    large = [_seconds(call, LARGE_BYTES, ranks, device) for call in (_gather, _reduce)]
    moved = LARGE_BYTES * steps / ranks
    rates = [moved * passes / max(s - passes * steps * step, 0.1 * s) for s, passes in zip(large, (1, 2), strict=True)]
    return LinkFit(ranks=ranks, bytes_per_second=statistics.mean(rates), step_seconds=step)


def _gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    newer = getattr(distributed, "all_gather_single", None)  # the name that torch 2.13 prefers
    (newer or distributed.all_gather_into_tensor)(whole, part)


def _reduce(whole: torch.Tensor, _part: torch.Tensor) -> None:
    distributed.all_reduce(whole)


def _seconds(call: Callable[[torch.Tensor, torch.Tensor], None], nbytes: int, ranks: int, device: str) -> float:
    """Median over rounds of the slowest rank's seconds."""
    part = torch.zeros(nbytes // 4 // ranks, device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    samples = []
    for number in range(WARM_UP + ROUNDS):
        distributed.barrier()
        start = time.perf_counter()
        call(whole, part)
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            samples.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(samples)], device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return float(slowest.item())
