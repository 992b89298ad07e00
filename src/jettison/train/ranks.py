"""The ranks of a run: under torchrun as many as it started, else this process alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import debug

_T = TypeVar("_T")
_AGREED: Final = "raised_by_every_rank"
_SETUP: Final = timedelta(minutes=30)
"""How long ranks wait for each other before the first step: one plans, or reads, while the others wait."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This process among the others. ``control`` is a gloo group of all ranks, for words and numbers of the loop."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """Is this the rank that writes and speaks?"""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value, added up over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def most(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, in the order of the ranks."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.control)
        return out

    def from_leader(self, make: Callable[[], _T]) -> _T:
        """What ``make`` returns on rank 0, on every rank; what it raises there, every rank raises."""
        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = make()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, group=self.control)
        if box[1] is not None:
            raise agreed(box[1])
        value: _T = box[0]
        return value

    def together(self, make: Callable[[], _T]) -> _T:
        """``make`` on every rank. Where it fails on one, every rank raises that error, and none waits for ever."""
        box: list[_T] = []
        error: Exception | None = None
        try:
            box.append(make())
        except Exception as caught:
            error = caught
        failed = [found for found in self.gather(error) if found is not None]
        if error is not None or failed:
            raise agreed(error or failed[0])
        return box[0]

    def _reduced(self, values: tuple[float, ...], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self.control)
        return tensor.tolist()


def said_by_leader(error: Exception) -> bool:
    """Did every rank raise this error, so that one of them may speak for all?"""
    return getattr(error, _AGREED, False)


def agreed(error: Exception) -> Exception:
    """Note that every rank raises it."""
    setattr(error, _AGREED, True)
    return error


@contextmanager
def joined() -> Iterator[World]:
    """Join the other ranks, or a group of one; a process group that is there already is used and left standing, and
    groups that were made beside it meanwhile are not.
    """
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        _initialize(device)
    before = list(c10d._world.pg_map)
    try:
        control = dist.new_group(backend="gloo")
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, control=control)
    finally:
        if ours:
            dist.destroy_process_group()
        else:
            for group in [group for group in c10d._world.pg_map if group not in before]:
                dist.destroy_process_group(group)
        _forget_meshes()


@contextmanager
def waiting_for(seconds: float) -> Iterator[None]:
    """For so long at most, in collectives of all groups that there are; afterwards for as long as before."""
    backends = [backend for group in c10d._world.pg_map for backend in _backends(group)]
    before = [backend.options._timeout for backend in backends]
    for backend in backends:
        backend._set_default_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


def _forget_meshes() -> None:
    """DTensor remembers results with their mesh, and hands the next run's equal mesh the groups that are gone now."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def _initialize(device: torch.device) -> None:
    cuda = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_SETUP)
        return
    store, rank, size = next(rendezvous("env://", timeout=_SETUP))
    turn = store.add(f"jettison/joined/{rank}", 1)  # addresses of a job's last run still stand in its store
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"jettison/{turn}", store),
        rank=rank,
        world_size=size,
        timeout=_SETUP,
        device_id=device if cuda else None,
    )


def _backends(group: dist.ProcessGroup) -> Iterator[Any]:
    """Those that wait. A group of a dry run has none."""
    kinds = [getattr(c10d, name) for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(c10d, name)]
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, tuple(kinds)):
            yield backend
