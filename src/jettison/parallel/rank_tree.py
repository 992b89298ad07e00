"""Words between the ranks of a group, through the key-value store of `torch.distributed`, in a tree.

NOTE [ A tree of ranks ]
Ranks stand in a row; a *place* is where. The place above another is that with its last digit in base 16 that is not 0
set to 0. So a branch is a run of places, of which the first is at its top, and 16,384 ranks are four levels. Each rank
says one word to the rank above it, once it has heard all that are right below it: what its whole branch comes to.
Upwards nobody hears more than 15 ranks a level. Downwards the first rank sets one key that all read: the store sends it
once to each rank in any case, and copies of it for branches would only be written besides.

Keys hold no lists of ranks, and go again: a word once an answer to it has come, what was told once all ranks are known
to have gone on.

NOTE [ Waiting ]
A rank that waits asks the store now and then, instead of waiting in it: so it also sees that another rank has failed,
and learns why; Python handles signals; another thread gets at the store, whose client serves one caller at a time. It
asks after an eighth of what it has waited already, and so often that all ranks together ask some 8,000 times a second
at most. The first rank names those that did not come: it looks at the branches that it has not heard from, in which
every rank that waits for others has left a word that it is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

FAN = 16
_SOONEST_SECONDS = 0.001
_QUESTIONS_A_SECOND = 8192

Merge = Callable[[Sequence[tuple[int, bytes]]], bytes]
"""From the words of a rank and of the branches right below it, each with the place where it begins, to one word."""


class Store(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class RankFailed(RuntimeError):
    """Another rank of the group has said that it failed, and why."""


class RanksMissing(RuntimeError):
    """Ranks that did not come in time: ``places`` in the group."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(places)
        self.places = places


def parent(place: int) -> int:
    """The place above one that is not the first. See NOTE [ A tree of ranks ]."""
    span = FAN
    while place % span == 0:
        span *= FAN
    return place - place % span


def children(place: int, size: int) -> list[int]:
    """The places right below one, of so many."""
    found: list[int] = []
    span = 1
    while span < size and place % (span * FAN) == 0:
        found += range(place + span, min(place + FAN * span, size), span)
        span *= FAN
    return found


def branch(place: int, size: int) -> range:
    """A place and all below it, of so many."""
    span = 1
    while span < size and place % (span * FAN) == 0:
        span *= FAN
    return range(place, min(place + span, size))


class RankTree:
    """One rank's end of the words of a group. All ranks say the same topics, in the same order, each of them once.

    Args:
        place: of this rank in the group.
        key: of this group's words; nobody else uses keys that begin so.
        seconds: how long the first rank waits for the others; they wait a little longer for it.
    """

    def __init__(self, store: Store, *, place: int, size: int, key: str, seconds: float) -> None:
        self.store = store
        self.place = place
        self.size = size
        self.key = key
        self.seconds = seconds
        self._told: list[str] = []

    @property
    def leads(self) -> bool:
        """Is this the first rank?"""
        return self.place == 0

    def say(self, topic: str, word: bytes, merge: Merge) -> bytes | None:
        """Say a word to the rank above, with what those below have said. The first rank gets what they all come to, and
        has to `tell` something of the topic; the others get None, and have to `hear` it.

        Raises:
            RanksMissing: on the first rank, which is to say so.
            RankFailed: another rank has.
        """
        below = children(self.place, self.size)
        if below:
            if not self.leads:
                self.store.set(self._here(topic, self.place), b"")
            keys = [self._said(topic, child) for child in below]
            if not self._wait(keys, self._patience):
                raise RanksMissing(list(self._missing(topic, below)) if self.leads else [0])
            word = merge([(self.place, word), *zip(below, self.store.multi_get(keys), strict=True)])
        if self.leads:
            self._forget()
            return word
        self.store.set(self._said(topic, self.place), word)
        return None

    def hear(self, topic: str) -> bytes:
        """What the first rank tells, once all have said something.

        Raises:
            RanksMissing: the first rank.
            RankFailed: another rank has.
        """
        found = self.told(topic)
        if not self.leads:
            self.store.delete_key(self._said(topic, self.place))
            if children(self.place, self.size):
                self.store.delete_key(self._here(topic, self.place))
            self._forget()
        return found

    def tell(self, topic: str, value: bytes) -> None:
        """Tell all ranks something, whichever of them has it to tell. Those that want it ask before they say another
        topic.
        """
        key = f"{self.key}/{topic}"
        self.store.set(key, value)
        self._told.append(key)

    def told(self, topic: str) -> bytes:
        """What was told, by whichever rank.

        Raises:
            RanksMissing: nothing in time, which is put down to the first rank.
            RankFailed: another rank has.
        """
        key = f"{self.key}/{topic}"
        if not self._wait([key], self.seconds * 1.1 + 1):
            raise RanksMissing([0])
        return bytes(self.store.get(key))

    def fail(self, why: str) -> None:
        """Tell all ranks that this one will say no more. Those that wait learn it when they next ask."""
        self.store.set(f"{self.key}/failed", why.encode())

    @property
    def _patience(self) -> float:
        """The first rank's time comes before that of others, so that it can say who is missing."""
        return self.seconds if self.leads else self.seconds * 1.1 + 1

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Were they set in time? See NOTE [ Waiting ]."""
        start = time.monotonic()
        while not self.store.check(keys):
            if self.store.check([f"{self.key}/failed"]):
                raise RankFailed(self.store.get(f"{self.key}/failed").decode())
            waited = time.monotonic() - start
            if waited >= seconds:
                return False
            latest = max(0.1, self.size / _QUESTIONS_A_SECOND)
            time.sleep(min(max(waited / 8, _SOONEST_SECONDS), latest, seconds - waited))
        return True

    def _missing(self, topic: str, branches: Sequence[int]) -> Iterator[int]:
        """Places that never came, in branches of which some have not been heard."""
        for place in branches:
            if self.store.check([self._said(topic, place)]):
                continue
            below = children(place, self.size)
            if not below or not self.store.check([self._here(topic, place)]):
                yield place
            yield from self._missing(topic, below)

    def _forget(self) -> None:
        """All ranks have come to a later topic, so they know what was told before."""
        for key in self._told:
            self.store.delete_key(key)
        self._told.clear()

    def _said(self, topic: str, place: int) -> str:
        return f"{self.key}/{topic}/{place}"

    def _here(self, topic: str, place: int) -> str:
        return f"{self.key}/{topic}/{place}+"
