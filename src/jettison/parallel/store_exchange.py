"""Values that the ranks of a group exchange through the key-value store of `torch.distributed`, in a tree.

NOTE [ A tree of ranks ]
A *place* is a rank's number in the group. The parent of a place is found by setting its last nonzero digit in base 16
to 0: a branch is a run of places, and 16,384 ranks are four levels. Each rank merges its value with those of its
children, and sends the result to its parent. The first rank then sets one key, which all read. A key is deleted once it
has been answered, or once all ranks are known to have gone on.

NOTE [ Waiting ]
A waiting rank polls the store instead of blocking in it: so it learns that another rank has failed, Python handles
signals, and other threads can use the store. It polls after an eighth of the time that it has waited already, at most
some 8,000 times a second for all ranks together. The first rank names the missing ones: in branches without a value,
every rank that waits for others has left a key.
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
    """Children of a place, of so many places, level by level."""
    found, span = list[int](), 1
    while span < size and place % (span * FAN) == 0:
        found += range(place + span, min(place + FAN * span, size), span)
        span *= FAN
    return found


class Ranks:
    """A group's exchange of values, on one rank. All ranks call the same methods in the same order, except `publish`.

    Each method raises `lost` if another rank has failed, or is too late.

    Args:
        place: of this rank in the group.
        key: prefix of this group's keys, used by no other group.
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
        """The error if the other ranks cannot continue."""
        return RuntimeError(why)

    def missing(self, places: Sequence[int]) -> str:
        """Reason why they cannot, if these places did not arrive in time."""
        return f"{ranks_in_words(places)} did not come within {self.seconds:g} s"

    def merged(self, own: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """All-reduce: values merged in the order of the ranks. ``merge`` is associative."""
        topic, _ = self.send(own, partial(reduce, merge))
        return self.receive(topic)

    def gathered(self, own: Value, merge: Callable[[Value, Value], Value]) -> Value | None:
        """Reduce to the first rank; the others get None. For values that grow with the number of ranks."""
        topic, whole = self.send(own, partial(reduce, merge), lambda _: None)
        self.receive(topic)
        return whole

    def differing(self, said: Mapping[str, Value]) -> list[tuple[int, str, Value | None, Value | None]]:
        """Places whose entries differ from the first rank's: place, the first such name, its value there and here."""
        if self.leads:
            self.publish("compared", said)
        first: Mapping[str, Value] = self.published("compared")
        names = (name for name in (*first, *said) if first.get(name) != said.get(name))
        own = [(self.place, name, first.get(name), said.get(name)) for name in names][:1]
        return self.merged(own, operator.add)

    def send(
        self, own: Value, merge: Callable[[list[Value]], Value], tell: Callable[[Value], Any] = lambda whole: whole
    ) -> tuple[str, Value | None]:
        """First half of `merged`, which waits for the branch below only: return the key of the other half, and on the
        first rank the merged value.

        Args:
            merge: merges this rank's value and those of its children, in the order of their places.
            tell: makes of the merged value the one that all ranks `receive`.
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
        self.publish(topic, tell(own))
        return topic, own

    def receive(self, topic: str) -> Any:
        """Second half of `merged`."""
        found = self.published(topic)
        if not self.leads:
            self.store.delete_key(self._said(topic, self.place))
            if children(self.place, self.size):
                self.store.delete_key(self._here(topic, self.place))
            self._forget()
        return found

    def publish(self, topic: str, value: object) -> None:
        """Publish a value, once for each topic. It is deleted once all ranks have sent another one: read it before."""
        self.store.set(f"{self.key}/{topic}", _packed(value))
        self._told.append(f"{self.key}/{topic}")

    def published(self, topic: str) -> Any:
        """Value that some rank published; ranks need not read it."""
        key = f"{self.key}/{topic}"
        self._wait_for([key], lambda: [0], last=True)
        return _unpacked(self.store.get(key))

    def arrives(self, topic: str) -> bool:
        """Whether a value is published in time; `published` then returns at once."""
        return self._wait([f"{self.key}/{topic}"], last=True)

    def fail(self, why: str) -> None:
        """Mark this rank as failed. Waiting ranks see it when they poll next."""
        self.store.set(f"{self.key}/failed", why.encode())

    def _wait_for(self, keys: list[str], absent: Callable[[], list[int]], *, last: bool = False) -> None:
        if not self._wait(keys, last=last):
            text = self.missing(absent())
            if self.leads:
                self.fail(text)
            raise self.lost(text)

    def _wait(self, keys: list[str], *, last: bool) -> bool:
        """Whether the keys were set in time; the first rank, which names missing ones, waits less, unless ``last``."""
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
