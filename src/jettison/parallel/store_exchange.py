"""Values that the ranks of a group exchange through the key-value store of `torch.distributed`, in a tree.

NOTE [ A tree of ranks ]
Ranks stand in a row; a *place* is where. The place above another is that with its last digit in base 16 that is not 0
set to 0: a branch is a run of places, and 16,384 ranks are four levels. Each rank sends one value to the rank above it,
once it has heard all right below: what its branch comes to. Downwards the first rank sets one key that all read. A key
goes again once an answer to it has come, or once all ranks are known to have gone on.

NOTE [ Waiting ]
A rank that waits asks the store now and then, instead of waiting in it: so it learns that another rank has failed,
Python handles signals, and other threads get at the store. It asks after an eighth of what it has waited already, all
ranks together some 8,000 times a second at most. The first rank names those that did not come: in branches that it has
not heard from, every rank that waits for others has left a note.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol, TypeVar

FAN = 16
RUNS = 8
"""Runs of ranks that are named; of those beyond only the number is."""
_SOONEST_SECONDS = 0.001
_QUESTIONS_A_SECOND = 8192
_SHORT = 512  # bytes, below which compressing gains nothing

Value = TypeVar("Value")


class Store(Protocol):
    """Methods needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def children(place: int, size: int) -> list[int]:
    """The places right below one, of so many, a level at a time."""
    found, span = list[int](), 1
    while span < size and place % (span * FAN) == 0:
        found += range(place + span, min(place + FAN * span, size), span)
        span *= FAN
    return found


class Ranks:
    """One rank's end of what a group exchanges. All ranks call the same methods in the same order, `tell` aside.

    Each method raises `lost` where another rank has failed, or does not come in time.

    Args:
        place: of this rank in the group.
        key: of this group's values; nobody else uses keys that begin so.
        seconds: how long the first rank waits for the others; they wait a little longer for it.
    """

    def __init__(self, store: Store, *, place: int, size: int, key: str, seconds: float) -> None:
        self.store, self.place, self.size, self.key, self.seconds = store, place, size, key, seconds
        self.turns = itertools.count()
        self._told: list[str] = []

    @property
    def leads(self) -> bool:
        return self.place == 0

    def lost(self, why: str) -> Exception:
        """The error where the others cannot go on."""
        return RuntimeError(why)

    def missing(self, places: Sequence[int]) -> str:
        """Reason why they cannot, if these places did not arrive in time."""
        return f"{ranks_in_words(places)} did not come within {self.seconds:g} s"

    def merged(self, own: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """Values of all ranks, merged in the order of the ranks, on every rank. ``merge`` is associative."""
        topic, _ = self.say(own, partial(reduce, merge))
        return self.hear(topic)

    def gathered(self, own: Value, merge: Callable[[Value, Value], Value]) -> Value | None:
        """As `merged`, for the first rank alone; the others get None. For what grows with the number of ranks."""
        topic, whole = self.say(own, partial(reduce, merge), lambda _: None)
        self.hear(topic)
        return whole

    def differing(self, said: Mapping[str, Value]) -> list[tuple[int, str, Value | None, Value | None]]:
        """Places whose entries differ from the first rank's: place, the first such name, its value there and here."""
        if self.leads:
            self.tell("compared", said)
        first: Mapping[str, Value] = self.told("compared")
        names = (name for name in (*first, *said) if first.get(name) != said.get(name))
        own = [(self.place, name, first.get(name), said.get(name)) for name in names][:1]
        return self.merged(own, operator.add)

    def say(
        self, own: Value, merge: Callable[[list[Value]], Value], tell: Callable[[Value], Any] = lambda whole: whole
    ) -> tuple[str, Value | None]:
        """The first half of `merged`, which waits for ranks below in the tree only: the topic of the other half, and on
        the first rank the whole.

        Args:
            merge: of this rank and the branches right below it, in the order of their places.
            tell: what all ranks get to `hear` of the whole.
        """
        topic = str(next(self.turns))
        below = children(self.place, self.size)
        if below:
            if not self.leads:
                self.store.set(self._here(topic, self.place), b"")
            keys = [self._said(topic, child) for child in below]
            self._wait_for(keys, lambda: list(self._missing(topic, below)) if self.leads else [0])
            own = merge([own, *map(_unpacked, self.store.multi_get(keys))])
        if not self.leads:
            self.store.set(self._said(topic, self.place), _packed(own))
            return topic, None
        self._forget()
        self.tell(topic, tell(own))
        return topic, own

    def hear(self, topic: str) -> Any:
        """The second half of `merged`."""
        found = self.told(topic)
        if not self.leads:
            self.store.delete_key(self._said(topic, self.place))
            if children(self.place, self.size):
                self.store.delete_key(self._here(topic, self.place))
            self._forget()
        return found

    def tell(self, topic: str, value: object) -> None:
        """Tell all ranks, once a topic; it is gone when all have said something else: whoever wants it asks first."""
        self.store.set(f"{self.key}/{topic}", _packed(value))
        self._told.append(f"{self.key}/{topic}")

    def told(self, topic: str) -> Any:
        """Value that some rank tells of a topic. Ranks that do not ask miss nothing."""
        key = f"{self.key}/{topic}"
        self._wait_for([key], lambda: [0], last=True)
        return _unpacked(self.store.get(key))

    def comes(self, topic: str) -> bool:
        """Whether a topic is told in time; `told` then has it at once."""
        return self._wait([f"{self.key}/{topic}"], last=True)

    def fail(self, why: str) -> None:
        """Tell all ranks that this one will say no more. Those that wait learn it when they next ask."""
        self.store.set(f"{self.key}/failed", why.encode())

    def _wait_for(self, keys: list[str], absent: Callable[[], list[int]], *, last: bool = False) -> None:
        if not self._wait(keys, last=last):
            text = self.missing(absent())
            if self.leads:
                self.fail(text)
            raise self.lost(text)

    def _wait(self, keys: list[str], *, last: bool) -> bool:
        """Whether they were set in time; the first rank, which names who is missing, waits less, unless ``last``."""
        start, seconds = time.monotonic(), self.seconds if self.leads and not last else self.seconds * 1.1 + 1
        while not self.store.check(keys):
            if self.store.check([f"{self.key}/failed"]):
                raise self.lost(self.store.get(f"{self.key}/failed").decode())
            waited = time.monotonic() - start
            if waited >= seconds:
                return False
            latest = max(0.1, self.size / _QUESTIONS_A_SECOND)
            time.sleep(min(max(waited / 8, _SOONEST_SECONDS), latest, seconds - waited))
        return True

    def _missing(self, topic: str, branches: Sequence[int]) -> Iterator[int]:
        for place in branches:
            if not self.store.check([self._said(topic, place)]):
                below = children(place, self.size)
                if not below or not self.store.check([self._here(topic, place)]):
                    yield place
                yield from self._missing(topic, below)

    def _forget(self) -> None:
        for key in self._told:
            self.store.delete_key(key)
        self._told.clear()

    def _said(self, topic: str, place: int) -> str:
        return f"{self.key}/{topic}/{place}"

    def _here(self, topic: str, place: int) -> str:
        return f"{self.key}/{topic}/{place}+"


def _packed(value: object) -> bytes:
    found = pickle.dumps(value, protocol=4)
    return found if len(found) < _SHORT else zlib.compress(found)


def _unpacked(packed: bytes) -> Any:
    return pickle.loads(packed if packed[:1] == b"\x80" else zlib.decompress(packed))


def listed(ranks: Iterable[int]) -> str:
    """Text for ranks in ascending order, with runs shortened: the first few, and how many follow."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([run] if len(run) > 2 else [[rank] for rank in run])]
    text = ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts[:RUNS])
    more = sum(map(len, parts[RUNS:]))
    return f"{text} and {more:,} more" if more else text


def ranks_in_words(ranks: Iterable[int]) -> str:
    every = list(ranks)
    return f"rank{'s' if len(every) != 1 else ''} {listed(every)}"
