"""Ranks of a run: those that torchrun started, else this process alone.

NOTE [ What ranks say ]
Tensors of steps go through process groups. Rare messages (errors, the plan, digests of the text) go through the ranks'
store, in a tree (NOTE [ A tree of ranks ]): a gloo group for them would need a socket between every two ranks. Values
of every step travel with the sum of the gradient's squares (NOTE [ One sum a step ]).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import debug

from jettison.core.errors import JettisonError, UsageError
from jettison.core.process import by_default
from jettison.parallel.ranks import Ranks, Store, ranks_in_words

_T = TypeVar("_T")
_AGREED: Final = "raised_by_every_rank"
_SETUP_SECONDS: Final = 1800.0
"""Timeout before the first step, in which one rank may plan or read while the others wait."""
_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "gloo")
_LONGEST_SECONDS = 2.0
_READING_SECONDS = 30.0  # for all beats, on the rank that reads them
_AT_ONCE = 512  # beats
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
            self.tell(topic, (found[0], _portable(found[1])))
        else:
            found = self.told(topic)
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


def _tried(make: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def said_by_leader(error: BaseException) -> bool:
    """Did every rank raise this error, so that one of them may report it?"""
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
    backend, timeout = "nccl" if cuda else "gloo", timedelta(seconds=_SETUP_SECONDS)
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
    own = dict(_flat(asdict(recipe), ""))
    digest = hashlib.sha256(repr(own).encode()).digest()
    if world.merged(digest, lambda a, b: a if a == b else b"") == digest:
        return
    expected: dict[str, Any] = world.from_leader(lambda: own)
    text = next(
        (
            f"{name}: rank {world.rank} was given {own[name]!r} and rank 0 {value!r}"
            for name, value in expected.items()
            if own[name] != value
        ),
        None,
    )
    if (found := world.first(text)) is not None:  # equal values may have different digests
        raise agreed(UsageError(f"{found}; expected one recipe, with the same flags, on every rank"))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def is_loss_of_a_rank(error: RuntimeError) -> bool:
    """Did a collective fail because another rank was missing?"""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


# finding the rank that hangs ------------------------------------------------------------------------------------------
#
# NOTE [ Who hangs ]
# A collective that times out does not tell which rank is missing. So a thread of each rank regularly writes a *beat* to
# the ranks' store: the place of its main thread, and the number of collectives begun in each of its groups. In a group,
# ranks with fewer collectives are behind. A rank that waits in one group may be behind in another; the rank that hangs
# is behind somewhere and ahead nowhere. A stopped process writes no more beats. Sends between pipeline stages are not
# counted: there the rank that hangs is the one that has not timed out.
#
# The first rank that times out reads the beats of all, twice; the others read its result: n ranks read n beats.


def leave(hangs: str) -> None:
    """End the process, since a hanging collective on a device does not return; before the device's own timeout."""
    text = f"jettison: {hangs} has not moved for the recipe's timeout; start again to resume"
    print(text, file=sys.stderr, flush=True)
    os._exit(RankLost.exit_code)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """One rank's state at one moment: its main thread's place, collectives begun by group, whether it timed out."""

    number: int = -1
    place: str = "nowhere yet"
    begun: Mapping[str, int] = field(default_factory=dict)
    gave_up: bool = False


def hanging(before: list[Heartbeat], now: list[Heartbeat]) -> list[int]:
    """Return the ranks that the others wait for: NOTE [ Who hangs ]; empty if unknown."""
    begun: defaultdict[str, list[int]] = defaultdict(list)
    for group, count in (one for beat in now for one in beat.begun.items()):
        begun[group].append(count)
    least = {group: min(counts) for group, counts in begun.items() if min(counts) != max(counts)}

    def hangs(rank: int) -> bool:
        own = {group: count for group, count in now[rank].begun.items() if group in least}
        ahead = any(count > least[group] for group, count in own.items())
        return now[rank].number == before[rank].number or (bool(own) and not ahead)

    ranks = range(len(now))
    found = [rank for rank in ranks if hangs(rank)]
    waiting = [rank for rank in ranks if now[rank].gave_up]
    if not found and waiting:
        found = [rank for rank in ranks if rank not in waiting]
    return found


class HangWatch:
    """Context whose thread writes this rank's heartbeats, and calls ``stuck`` when another rank has kept the main
    thread waiting for the recipe's timeout, on devices whose collectives cannot be interrupted.
    """

    def __init__(self, world: World, seconds: float, stuck: Callable[[str], None] | None = None) -> None:
        self._world, self._seconds, self._stuck = world, seconds, stuck
        self._every = min(_LONGEST_SECONDS, seconds / 8)
        self._place, self._moved = "nowhere yet", time.monotonic()
        self._number, self._gave_up, self._asked = 0, False, 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = world.store
        self._groups: list[Any] = []

    def __enter__(self) -> HangWatch:
        if self._world.size > 1:
            self._groups = [group for group in c10d._world.pg_map if group.size() > 1 and _counts(group)]
            self._thread = threading.Thread(target=self._run, name="jettison-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def at(self, place: str) -> None:
        self._place, self._moved = place, time.monotonic()

    def who(self) -> str | None:
        """Describe the ranks that hang, and where; None if unknown. Called by a rank that timed out."""
        self._gave_up = True
        if self._world.size == 1:
            return None
        try:
            self._beat()
            found = self._found()
        except (RuntimeError, ValueError):  # the store is gone
            return None
        others = [f"rank {rank} ({where})" for rank, where in found if rank != self._world.rank]
        return " and ".join(others) or None

    def _found(self) -> list[tuple[int, str]]:
        self._asked += 1
        key = f"{self._world.key}/hangs/{self._asked}"
        if self._store.add(f"{key}/asking", 1) > 1:
            end = time.monotonic() + 2.5 * self._every + _READING_SECONDS
            while not self._store.check([key]):
                if time.monotonic() > end:
                    return []
                time.sleep(self._every / 4)  # not a blocking read of the store, or this rank's beats would stop
            return [(rank, where) for rank, where in json.loads(self._store.get(key))]
        before = self._beats()
        time.sleep(2.5 * self._every)
        now = self._beats()
        found = [(rank, _where(before[rank], now[rank])) for rank in hanging(before, now)]
        self._store.set(key, json.dumps(found))
        return found

    def _run(self) -> None:
        while not self._over.wait(self._every):
            try:
                self._beat()
            except RuntimeError:  # the store is gone, so nobody could read
                return
            if self._stuck is not None and time.monotonic() - self._moved > self._seconds:
                if (found := self.who()) is not None:
                    self._stuck(found)
                    return
                self._moved = time.monotonic()

    def _beat(self) -> None:
        self._number += 1
        values = {
            "number": self._number,
            "place": self._place,
            "gave_up": self._gave_up,
            "begun": {group.group_name: group._get_sequence_number_for_group() for group in self._groups},
        }
        self._store.set(self._key(self._world.rank), json.dumps(values))

    def _beats(self) -> list[Heartbeat]:
        keys = [self._key(rank) for rank in range(self._world.size)]
        return [beat for first in range(0, len(keys), _AT_ONCE) for beat in self._some_beats(keys[first:][:_AT_ONCE])]

    def _some_beats(self, keys: list[str]) -> list[Heartbeat]:
        if self._store.check(keys):
            return [Heartbeat(**json.loads(text)) for text in self._store.multi_get(keys)]
        return [
            Heartbeat(**json.loads(self._store.get(key))) if self._store.check([key]) else Heartbeat() for key in keys
        ]

    def _key(self, rank: int) -> str:
        return f"{self._world.key}/beat/{rank}"


def _where(before: Heartbeat, now: Heartbeat) -> str:
    return f"its process does not answer, last {now.place}" if before.number == now.number else now.place


def _counts(group: dist.ProcessGroup) -> bool:
    """Whether the group counts collectives; groups of dry runs do not."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return False
    return True
