"""How a run ends that cannot go on: other ranks that are gone, hang or do something else, numbers that are none.

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

import hashlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from jettison.core.errors import JettisonError, UsageError
from jettison.train.ranks import RankLost, World, agreed
from jettison.train.recipe import TrainRecipe
from jettison.train.setup import Session

_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "gloo")
_TIMED_OUT: Final = ("timed out", "timeout")
_LONGEST_SECONDS = 2.0
_READING_SECONDS = 30.0  # all beats, by the one that reads them
_AT_ONCE = 512  # beats


class NotFinite(JettisonError, RuntimeError):
    """A loss or gradient is not finite, and the recipe says to stop then, or skipping did not help."""


def same_everywhere(recipe: TrainRecipe, world: World) -> None:
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
    """Keys of sections, such as plan.budget, with what they are."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def lost(error: RuntimeError, session: Session, watch: Watch) -> RankLost:
    """An error of a collective, with the rank that is why if that can be told."""
    first, step = str(error).splitlines()[0][:200], session.step + 1
    hangs = watch.who() if any(word in str(error).lower() for word in _TIMED_OUT) else None
    if hangs is None:
        return RankLost(f"another rank has gone during step {step}: {first}; start again to resume")
    return RankLost(
        f'{hangs} has not moved for timeout = "{session.recipe.timeout}", and the others wait in step {step}; '
        "start again to resume, with a longer timeout where this was no fault"
    )


def leave(hangs: str) -> None:
    """Collectives of a device do not return once they wait: end the process, before the device's own timeout does."""
    text = f"jettison: {hangs} has not moved for the recipe's timeout; start again to resume"
    print(text, file=sys.stderr, flush=True)
    os._exit(RankLost.exit_code)


def out_of_range(error: IndexError, session: Session) -> UsageError:
    """An embedding was asked for what it does not have; most are found before, see `survey.vocabulary`."""
    return UsageError(
        f"model: it cannot look up what it was given in step {session.step + 1}: {error}; the text has tokens up to "
        f"{session.text.highest}, and batch.seq is {session.recipe.batch.seq}. Expected a vocabulary and positions "
        "above these"
    )


def is_loss_of_a_rank(error: RuntimeError) -> bool:
    """Was this a collective that others did not come to?"""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


# which rank is it that the others wait for? ---------------------------------------------------------------------------


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
        self._store: Any = world.store
        self._groups: list[Any] = []

    def __enter__(self) -> Watch:
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
        """Ranks that hang, and where: by this rank if it is the first that asks, else as that found."""
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
