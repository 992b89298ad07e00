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
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import debug

from jettison.errors import JettisonError
from jettison.parallel.camps import ranks_in_words
from jettison.parallel.rank_tree import RankFailed, RanksMissing, RankTree

_T = TypeVar("_T")
_AGREED: Final = "raised_by_every_rank"
_SETUP: Final = timedelta(minutes=30)
"""How long ranks wait for each other before the first step: one plans, or reads, while the others wait."""
_runs = itertools.count()


class RankLost(JettisonError, RuntimeError):
    """Another rank has gone, or hangs: what was computed since the last checkpoint is lost, the checkpoint is not."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This process among the others. All ranks call the same methods in the same order.

    Each of them raises `RankLost` where a rank fails instead, or does not come in time.
    """

    rank: int
    size: int
    device: torch.device
    tree: RankTree
    _turns: Iterator[int] = field(default_factory=itertools.count)

    @property
    def leads(self) -> bool:
        """Is this the rank that writes and speaks?"""
        return self.rank == 0

    @functools.cached_property
    def host(self) -> dist.ProcessGroup:
        """A gloo group of all ranks. Made when it is first asked for, which all of them do at the same place."""
        with sockets_when_used():
            made: dist.ProcessGroup = dist.new_group(backend="gloo")
        return made

    def merged(self, own: _T, merge: Callable[[_T, _T], _T]) -> _T:
        """What every rank has, merged in the order of the ranks, on every rank. ``merge`` is associative."""
        topic, _ = self.say(own, merge)
        found: _T = self.hear(topic)
        return found

    def gathered(self, own: _T, merge: Callable[[_T, _T], _T]) -> _T | None:
        """As `merged`, for rank 0 alone; the others get None. For what is the larger the more ranks there are."""
        topic, whole = self.say(own, merge, tell=False)
        self.hear(topic)
        return whole

    def say(self, own: Any, merge: Callable[[Any, Any], Any], *, tell: bool = True) -> tuple[str, Any]:
        """The first half of `merged`, which waits for ranks below in the tree only: the topic of the other half, and on
        rank 0 the whole.
        """
        topic = str(next(self._turns))

        def join(words: Sequence[tuple[int, bytes]]) -> bytes:
            return _packed(reduce(merge, (_unpacked(word) for _, word in words)))

        with self._words():
            word = self.tree.say(topic, _packed(own), join)
        if word is None:
            return topic, None
        self.tree.tell(topic, word if tell else _packed(None))
        return topic, _unpacked(word)

    def hear(self, topic: str) -> Any:
        """The second half of `merged`."""
        with self._words():
            return _unpacked(self.tree.hear(topic))

    def sum(self, value: float) -> float:
        """Of all ranks' values."""
        return self.merged(value, lambda a, b: a + b)

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        return self.merged(value, max)

    def first(self, value: _T | None) -> _T | None:
        """That of the first rank which has one; None where none has."""

        def either(one: _T | None, other: _T | None) -> _T | None:
            return other if one is None else one

        return self.merged(value, either)

    def tell(self, topic: str, value: object) -> None:
        """Tell all ranks, whichever of them has it to tell. A topic is told once in a run, and is gone once all have
        said something else: whoever wants it asks first.
        """
        self.tree.tell(topic, _packed(value))

    def told(self, topic: str) -> Any:
        """What some rank tells of a topic. Those that do not ask miss nothing."""
        with self._words():
            return _unpacked(self.tree.told(topic))

    def from_leader(self, make: Callable[[], _T]) -> _T:
        """What ``make`` returns on rank 0, on every rank; what it raises there, every rank raises."""
        topic = str(next(self._turns))
        if self.leads:
            value: _T | None = None
            error: Exception | None = None
            try:
                value = make()
            except Exception as caught:
                error = caught
            self.tell(topic, (value, _portable(error)))
            found: tuple[Any, Exception | None] = (value, error)
        else:
            found = self.told(topic)
        if found[1] is not None:
            raise agreed(found[1])
        return found[0]

    def together(self, make: Callable[[], _T]) -> _T:
        """``make`` on every rank. Where it fails on one, every rank raises that error, and none waits for ever."""
        box: list[_T] = []
        error: Exception | None = None
        try:
            box.append(make())
        except Exception as caught:
            error = caught
        failed = self.first(_portable(error))
        if failed is not None:
            raise agreed(error or failed)
        return box[0]

    @contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except RankFailed as error:
            raise RankLost(f"{error}; start again to resume") from None
        except RanksMissing as error:
            text = (
                f"{ranks_in_words(error.places)} did not answer within the timeout of {self.tree.seconds:g} s, and the "
                "others cannot go on without"
            )
            if self.leads:
                self.tree.fail(text)
            raise RankLost(f"{text}; start again to resume") from None


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
    rank, size = dist.get_rank(), dist.get_world_size()
    tree = RankTree(
        c10d._get_default_store(),
        place=rank,
        size=size,
        key=f"jettison/run/{next(_runs)}",
        seconds=_SETUP.total_seconds(),
    )
    try:
        yield World(rank=rank, size=size, device=device, tree=tree)
    except BaseException as error:
        if not said_by_leader(error) and not isinstance(error, RankLost):
            with suppress(RuntimeError):  # the store may be what is gone
                tree.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
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
    words = world.tree.seconds
    for backend in backends:
        backend._set_default_timeout(timedelta(seconds=seconds))
    world.tree.seconds = seconds
    try:
        yield
    finally:
        world.tree.seconds = words
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


def _forget_meshes() -> None:
    """DTensor remembers results with their mesh, and hands the next run's equal mesh the groups that are gone now."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def _initialize(device: torch.device) -> None:
    cuda = device.type == "cuda"
    backend = "nccl" if cuda else "gloo"
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


def _packed(value: object) -> bytes:
    return zlib.compress(pickle.dumps(value))


def _unpacked(word: bytes) -> Any:
    return pickle.loads(zlib.decompress(word))


def _portable(error: Exception | None) -> Exception | None:
    """An error that other processes can read: itself, or its text."""
    try:
        _unpacked(_packed(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
