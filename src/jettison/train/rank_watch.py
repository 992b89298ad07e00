"""Which rank is it that the others wait for?

NOTE [ Who hangs ]
A rank that waits in a collective learns after the recipe's timeout that somebody did not come, not who. So a thread of
each rank leaves a *beat* in the ranks' store every now and then: where its main thread is, and how many collectives it
has begun in each of its groups. In a group, ranks with fewer than others are behind. Who waits for one group may be
behind in another; the rank that hangs is behind somewhere and ahead nowhere. A process that is stopped leaves no more
beats. Between stages of a pipeline nothing is counted: there it is whoever has not given up waiting.

The first rank that has waited long enough reads the beats of all, twice; the others ask for what it found. Otherwise n
ranks would read n beats each.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from jettison.train.ranks import World

_LONGEST_SECONDS = 2.0
_READING_SECONDS = 30.0  # all beats, by the one that reads them
_AT_ONCE = 512  # beats


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
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for beat in now:
        for group, count in beat.begun.items():
            most[group] = max(count, most.get(group, count))
            least[group] = min(count, least.get(group, count))
    uneven = {group for group in most if most[group] != least[group]}

    def hangs(rank: int) -> bool:
        begun = {group: count for group, count in now[rank].begun.items() if group in uneven}
        ahead = any(count > least[group] for group, count in begun.items())
        return now[rank].number == before[rank].number or (bool(begun) and not ahead)

    ranks = range(len(now))
    found = [rank for rank in ranks if hangs(rank)]
    waiting = [rank for rank in ranks if now[rank].gave_up]
    if not found and waiting:
        found = [rank for rank in ranks if rank not in waiting]
    return found


class Watch:
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
        self._store: Any = None
        self._groups: list[Any] = []

    def __enter__(self) -> Watch:
        if self._world.size > 1:
            self._store = c10d._get_default_store()
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
        if self._store is None:
            return None
        try:
            self._beat()
            found = self._found()
        except (RuntimeError, ValueError):  # the store is gone
            return None
        others = [f"rank {rank} ({where})" for rank, where in found if rank != self._world.rank]
        return " and ".join(others) or None

    def _found(self) -> list[tuple[int, str]]:
        """Ranks that hang, and where: by this rank if it is the first that asks, else as that found."""
        self._asked += 1
        key = f"{self._world.tree.key}/hangs/{self._asked}"
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
        return f"{self._world.tree.key}/beat/{rank}"


def _where(before: Beat, now: Beat) -> str:
    return f"its process does not answer, last {now.place}" if before.number == now.number else now.place


def _counts(group: dist.ProcessGroup) -> bool:
    """Groups of dry runs count nothing."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return False
    return True
