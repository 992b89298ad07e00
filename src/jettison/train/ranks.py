"""The ranks of a run: under torchrun as many as it started, else this process alone.

NOTE [ What ranks say ]
Tensors of the steps go through process groups. Everything else that ranks say to each other (what went wrong where,
whose plan it is, who reads which text) is said a few times in a run and goes through the ranks' store, in a tree
(NOTE [ A tree of ranks ]). A gloo group for it would be a socket from each rank to each other one. What is known anew
in every step, such as whether some rank was asked to stop, travels with the sum of the gradient's squares
(NOTE [ One sum a step ]).
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import debug

from jettison.core.errors import JettisonError
from jettison.parallel.ranks import Ranks, Store, ranks_in_words

_T = TypeVar("_T")
_AGREED: Final = "raised_by_every_rank"
_SETUP_SECONDS: Final = 1800.0
"""How long ranks wait for each other before the first step: one plans, or reads, while the others wait."""
_runs = itertools.count()


class RankLost(JettisonError, RuntimeError):
    """Another rank has gone, or hangs: what was computed since the last checkpoint is lost, the checkpoint is not."""


class World(Ranks):
    """This process among the others. All ranks call the same methods in the same order.

    Each of them raises `RankLost` where a rank fails instead, or does not come in time.

    Args:
        key: see `Ranks`.
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, device: torch.device, key: str, seconds: float = _SETUP_SECONDS
    ) -> None:
        super().__init__(store, place=rank, size=size, key=key, seconds=seconds)
        self.rank, self.device = rank, device

    @functools.cached_property
    def host(self) -> dist.ProcessGroup:
        """A gloo group of all ranks. Made when it is first asked for, which all of them do at the same place."""
        with sockets_when_used():
            made: dist.ProcessGroup = dist.new_group(backend="gloo")
        return made

    def lost(self, why: str) -> RankLost:
        """See `Ranks.lost`."""
        return RankLost(f"{why}; start again to resume")

    def missing(self, places: Sequence[int]) -> str:
        """See `Ranks.missing`."""
        return (
            f"{ranks_in_words(places)} did not answer within the timeout of {self.seconds:g} s, and the others cannot "
            "go on without"
        )

    def sum(self, value: float) -> float:
        """Of all ranks' values."""
        return self.merged(value, operator.add)

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        return self.merged(value, max)

    def first(self, value: _T | None) -> _T | None:
        """That of the first rank which has one; None where none has."""
        return self.merged(value, lambda one, other: other if one is None else one)

    def from_leader(self, make: Callable[[], _T]) -> _T:
        """What ``make`` returns on rank 0, on every rank; what it raises there, every rank raises."""
        topic = str(next(self.turns))
        if self.leads:
            found = _tried(make)
            self.tell(topic, (found[0], _portable(found[1])))
        else:
            found = self.told(topic)
        value, error = found
        if error is not None:
            raise agreed(error)
        return value  # type: ignore[return-value]

    def together(self, make: Callable[[], _T]) -> _T:
        """``make`` on every rank. Where it fails on one, every rank raises that error, and none waits for ever."""
        value, error = _tried(make)
        failed = self.first(_portable(error))
        if failed is not None:
            raise agreed(error or failed)
        return value  # type: ignore[return-value]


def _tried(make: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def said_by_leader(error: BaseException) -> bool:
    """Did every rank raise this error, so that one of them may speak for all?"""
    return getattr(error, _AGREED, False)


def agreed(error: Exception) -> Exception:
    """Note that every rank raises it."""
    setattr(error, _AGREED, True)
    return error


@contextmanager
def joined() -> Iterator[World]:
    """Join the other ranks, or a group of one; a process group that is there already is used and left standing, and
    groups that were made beside it meanwhile are not. If this rank fails alone, those that wait for it learn why.
    """
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        with sockets_when_used():
            _initialize(device)
    before = list(c10d._world.pg_map)
    rank, store = dist.get_rank(), c10d._get_default_store()
    world = World(store, rank=rank, size=dist.get_world_size(), device=device, key=f"jettison/run/{next(_runs)}")
    try:
        yield world
    except BaseException as error:
        if not said_by_leader(error) and not isinstance(error, RankLost):
            with suppress(RuntimeError):  # the store may be what is gone
                world.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
        raise
    finally:
        if ours:
            dist.destroy_process_group()
        else:
            for group in [group for group in c10d._world.pg_map if group not in before]:
                dist.destroy_process_group(group)
        _forget_meshes()


@contextmanager
def sockets_when_used() -> Iterator[None]:
    """Gloo groups made in here open a socket to another rank once they send to it, instead of one to each at once.

    Rings and trees then have a few each. It is torch's own switch, which it reads whenever a group is made.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@contextmanager
def waiting_for(world: World, seconds: float) -> Iterator[None]:
    """For so long at most, in collectives of all groups that there are, and for words; afterwards as long as before."""
    backends = [backend for group in c10d._world.pg_map for backend in _backends(group)]
    before = [backend.options._timeout for backend in backends]
    patience = world.seconds
    for backend in backends:
        backend._set_default_timeout(timedelta(seconds=seconds))
    world.seconds = seconds
    try:
        yield
    finally:
        world.seconds = patience
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


def _forget_meshes() -> None:
    """DTensor remembers results with their mesh, and hands the next run's equal mesh the groups that are gone now."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def _initialize(device: torch.device) -> None:
    cuda = device.type == "cuda"
    backend, timeout = "nccl" if cuda else "gloo", timedelta(seconds=_SETUP_SECONDS)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    turn = store.add(f"jettison/joined/{rank}", 1)  # addresses of a job's last run still stand in its store
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"jettison/{turn}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def _backends(group: dist.ProcessGroup) -> Iterator[Any]:
    """Those that wait. A group of a dry run has none."""
    kinds = [getattr(c10d, name) for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(c10d, name)]
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, tuple(kinds)):
            yield backend


def _portable(error: Exception | None) -> Exception | None:
    """An error that other processes can read: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
