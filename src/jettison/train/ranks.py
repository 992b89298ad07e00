"""The ranks of a run: under torchrun as many as it started, else this process alone.

NOTE [ What ranks say ]
Tensors of the steps go through process groups. What is said a few times in a run (what went wrong where, whose plan it
is, who reads which text) goes through the ranks' store, in a tree (NOTE [ A tree of ranks ]): a gloo group for it would
be a socket from each rank to each other one. What is known anew in every step travels with the sum of the gradient's
squares (NOTE [ One sum a step ]).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import debug

from jettison.core.errors import JettisonError, UsageError
from jettison.parallel.ranks import Ranks, Store, ranks_in_words

_T = TypeVar("_T")
_AGREED: Final = "raised_by_every_rank"
_SETUP_SECONDS: Final = 1800.0
"""Seconds that ranks wait for each other before the first step: one plans, or reads, while the others wait."""
_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "gloo")
_LONGEST_SECONDS = 2.0
_READING_SECONDS = 30.0  # all beats, by the one that reads them
_AT_ONCE = 512  # beats
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
        return RankLost(f"{why}; start again to resume")

    def missing(self, places: Sequence[int]) -> str:
        return (
            f"{ranks_in_words(places)} did not answer within the timeout of {self.seconds:g} s, and the others cannot "
            "go on without"
        )

    def sum(self, value: float) -> float:
        """Sum of all ranks' values."""
        return self.merged(value, operator.add)

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        return self.merged(value, max)

    def first(self, value: _T | None) -> _T | None:
        """Value of the first rank that has one; None if none has."""
        return self.merged(value, lambda one, other: other if one is None else one)

    def from_leader(self, make: Callable[[], _T]) -> _T:
        """Result of ``make`` on rank 0, on every rank; an error of it there is raised on every rank."""
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
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def same_everywhere(recipe: Any, world: World) -> None:
    """Ranks that do different things wait for each other until a timeout. Digests are compared; what is in the recipe
    goes round only where they differ.

    Raises:
        UsageError: on every rank, about the first that was given something else than rank 0.
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
    if (found := world.first(text)) is not None:  # what is equal may be written in two ways
        raise agreed(UsageError(f"{found}; expected one recipe, with the same flags, on every rank"))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def is_loss_of_a_rank(error: RuntimeError) -> bool:
    """Was this a collective that others did not come to?"""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


# which rank is it that the others wait for? ---------------------------------------------------------------------------
#
# NOTE [ Who hangs ]
# A rank that waits in a collective learns after the recipe's timeout that somebody did not come, not who. So a thread
# of each rank leaves a *beat* in the ranks' store every now and then: where its main thread is, and how many
# collectives it has begun in each of its groups. In a group, ranks with fewer than others are behind. Who waits for
# one group may be behind in another; the rank that hangs is behind somewhere and ahead nowhere. A process that is
# stopped leaves no more beats. Between stages of a pipeline nothing is counted: there it is whoever has not given up
# waiting.
#
# The first rank that has waited long enough reads the beats of all, twice; the others ask for what it found.
# Otherwise n ranks would read n beats each.


def leave(hangs: str) -> None:
    """Collectives of a device do not return once they wait: end the process, before the device's own timeout does."""
    text = f"jettison: {hangs} has not moved for the recipe's timeout; start again to resume"
    print(text, file=sys.stderr, flush=True)
    os._exit(RankLost.exit_code)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One rank at one moment.

    Args:
        number: of the beat.
        place: of the main thread.
        begun: collectives, by the name of the group.
        gave_up: it has stopped waiting.
    """

    number: int = -1
    place: str = "nowhere yet"
    begun: Mapping[str, int] = field(default_factory=dict)
    gave_up: bool = False


def hanging(before: list[Beat], now: list[Beat]) -> list[int]:
    """Ranks that the others wait for; see NOTE [ Who hangs ]. None where that cannot be told."""
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
    """A rank's beats, while it is entered.

    Args:
        seconds: what the recipe calls a timeout.
        stuck: called by the thread when the main thread has not moved for so long and another rank is why; for
            devices whose collectives cannot be left.
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
        """The main thread has come here."""
        self._place, self._moved = place, time.monotonic()

    def who(self) -> str | None:
        """Ranks that hang, and where, in words; None where that cannot be told. Called by a rank that waited."""
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
                time.sleep(self._every / 4)  # without the store, or this rank's beats would stop
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
            except RuntimeError:  # the store is gone, and with it whoever would read
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

    def _beats(self) -> list[Beat]:
        keys = [self._key(rank) for rank in range(self._world.size)]
        return [beat for first in range(0, len(keys), _AT_ONCE) for beat in self._some_beats(keys[first:][:_AT_ONCE])]

    def _some_beats(self, keys: list[str]) -> list[Beat]:
        if self._store.check(keys):
            return [Beat(**json.loads(text)) for text in self._store.multi_get(keys)]
        return [Beat(**json.loads(self._store.get(key))) if self._store.check([key]) else Beat() for key in keys]

    def _key(self, rank: int) -> str:
        return f"{self._world.key}/beat/{rank}"


def _where(before: Beat, now: Beat) -> str:
    return f"its process does not answer, last {now.place}" if before.number == now.number else now.place


def _counts(group: dist.ProcessGroup) -> bool:
    """Groups of dry runs count nothing."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return False
    return True
