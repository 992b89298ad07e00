"""Ranks of a run: those that torchrun started, else this process alone.

NOTE [ What ranks say ]
Tensors of steps go through process groups. Rare messages (errors, the plan, digests of the text) go through the ranks'
store, in a tree (NOTE [ A tree of ranks ]): a gloo group for them would need a socket between every two ranks. Values
of every step travel with the sum of the gradient's squares (NOTE [ One sum a step ]).

NOTE [ Who hangs ]
A collective that times out does not tell which rank is missing: the rank that it waits for may wait for another, in
another group. But each rank that waits times out, within a step of the first. So each says so in the store, and a rank
that has said nothing by then hangs, or is stopped. With NCCL torch's own watchdog ends the process, and names the
collective.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import debug

from jettison.core.errors import JettisonError, UsageError
from jettison.core.process import by_default
from jettison.parallel.store_exchange import Ranks, Store, ranks_in_words

_T = TypeVar("_T")
_AGREED: Final = "raised_by_every_rank"
_SETUP_SECONDS: Final = 1800.0
"""Timeout before the first step, in which one rank may plan or read while the others wait."""
_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "gloo")
_TIMED_OUT: Final = ("timed out", "timeout")
_LONGEST_SECONDS: Final = 30.0  # between the first rank that times out and the last
_READING_SECONDS: Final = 30.0  # for the answers of all
_runs = itertools.count()


class RankLost(JettisonError, RuntimeError):
    """Another rank has gone, or hangs: progress since the last checkpoint is lost."""


class World(Ranks):
    """This rank's connection to the others, which call alike. Methods raise `RankLost` if one fails, or is late."""

    def __init__(
        self, store: Store, *, rank: int, size: int, device: torch.device, key: str, seconds: float = _SETUP_SECONDS
    ) -> None:
        super().__init__(store, place=rank, size=size, key=key, seconds=seconds)
        self.rank, self.device = rank, device

    @functools.cached_property
    def host(self) -> dist.ProcessGroup:
        """Gloo group of all ranks, created at first use, which must be the same call on all ranks."""
        with sockets_when_used():
            made: dist.ProcessGroup = dist.new_group(backend="gloo")
        return made

    def lost(self, why: str) -> RankLost:
        return RankLost(f"{why}; start again to resume")

    def missing(self, places: Sequence[int]) -> str:
        return (
            f"{ranks_in_words(places)} did not answer within the timeout of {self.seconds:g} s, and the others cannot "
            "go on without"
        )

    def most(self, value: float) -> float:
        return self.merged(value, max)

    def first(self, value: _T | None) -> _T | None:
        """Value of the first rank that has one; None if none has."""
        return self.merged(value, lambda one, other: other if one is None else one)

    def from_leader(self, make: Callable[[], _T]) -> _T:
        """Return rank 0's result of ``make`` on every rank, or raise its error on every rank."""
        topic = str(next(self.turns))
        if self.leads:
            found = _tried(make)
            self.publish(topic, (found[0], _portable(found[1])))
        else:
            found = self.published(topic)
        value, error = found
        if error is not None:
            raise agreed(error)
        return value  # type: ignore[return-value]

    def together(self, make: Callable[[], _T]) -> _T:
        """Call ``make`` on every rank; if it fails on one, every rank raises that error, and none hangs."""
        value, error = _tried(make)
        failed = self.first(_portable(error))
        if failed is not None:
            raise agreed(error or failed)
        return value  # type: ignore[return-value]

    def absent(self, error: RuntimeError) -> list[int]:
        """Ranks that hang, after a collective failed with this error: NOTE [ Who hangs ]; empty if unknown."""
        key, store = f"{self.key}/lost", cast(Any, self.store)
        store.set(f"{key}/{self.rank}", b"")
        if not any(word in str(error).lower() for word in _TIMED_OUT):
            return []
        wait = min(self.seconds, _LONGEST_SECONDS)
        if store.add(f"{key}/asking", 1) == 1:
            time.sleep(wait)
            found = [rank for rank in range(self.size) if not store.check([f"{key}/{rank}"])]
            store.set(f"{key}/absent", json.dumps(found))
            return found
        end = time.monotonic() + wait + _READING_SECONDS
        while not store.check([f"{key}/absent"]):
            if time.monotonic() > end:
                return []
            time.sleep(wait / 10)
        return list(json.loads(store.get(f"{key}/absent")))


def _tried(make: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def said_by_leader(error: BaseException) -> bool:
    """Whether every rank raised this error, so that one of them may report it."""
    return getattr(error, _AGREED, False)


def agreed(error: Exception) -> Exception:
    """Mark an error as raised by every rank."""
    setattr(error, _AGREED, True)
    return error


@contextmanager
def joined() -> Iterator[World]:
    """Join the other ranks, or a group of one. An existing process group is used and kept; groups created meanwhile are
    destroyed. If this rank fails alone, the waiting ranks get the reason.
    """
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))  # of devices that a rank sees: a launcher may show it its own alone
    device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
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
            with suppress(RuntimeError):  # the store itself may be gone
                world.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
        raise
    finally:
        if ours:
            dist.destroy_process_group()
        else:
            for group in [group for group in c10d._world.pg_map if group not in before]:
                dist.destroy_process_group(group)
        # DTensor's caches would give the next run's equal mesh groups that no longer exist
        debug._clear_sharding_prop_cache()


def sockets_when_used() -> AbstractContextManager[None]:
    """Create gloo groups lazily: they open a socket to a rank at the first send, instead of to all ranks at once. Rings
    and trees then need few sockets. torch reads this environment variable whenever a group is created.
    """
    return by_default("TORCH_GLOO_LAZY_INIT", "1")


@contextmanager
def waiting_for(world: World, seconds: float) -> Iterator[None]:
    """Set the timeout of collectives of all existing groups and of messages, and restore it afterwards."""
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


def _initialize(device: torch.device) -> None:
    cuda = device.type == "cuda"
    backend, timeout = "nccl" if cuda and dist.is_nccl_available() else "gloo", timedelta(seconds=_SETUP_SECONDS)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    turn = store.add(f"jettison/joined/{rank}", 1)  # a job's store still has addresses of its last run
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"jettison/{turn}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def _backends(group: dist.ProcessGroup) -> Iterator[Any]:
    """Yield the group's backends; a group of a dry run has none."""
    kinds = [getattr(c10d, name) for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(c10d, name)]
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, tuple(kinds)):
            yield backend


def _portable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def same_everywhere(recipe: Any, world: World) -> None:
    """Raise `UsageError` on every rank unless all have the same recipe, since others would deadlock until a timeout.
    Digests are compared; the recipe itself is sent only if they differ.
    """
    own = {name: repr(value) for name, value in _flat(asdict(recipe), "")}
    digest = hashlib.sha256(repr(own).encode()).digest()
    if world.merged(digest, lambda a, b: a if a == b else b"") == digest:
        return
    for place, name, there, here in world.differing(own)[:1]:  # equal values may have different digests
        text = f"{name}: rank {place} was given {here} and rank 0 {there}"
        raise agreed(UsageError(f"{text}; expected one recipe, with the same flags, on every rank"))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def is_loss_of_a_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank was missing."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)
