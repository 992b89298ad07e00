"""Vector clocks: whether every read and write of a piece of memory is ordered after what it depends on.

NOTE [ What counts as a race ]
Work in one stream comes in order; between streams only events order it. Two accesses of the same bytes, one of them a
write, race unless one is ordered before the other. Memory that is given back counts as written to by the stream that it
belongs to, at once: the allocator may hand it to that stream's next op. So a copy whose source was freed too early
races although nobody has written there yet. This is about order alone, not about time, so a race is found in runs in
which it did no harm.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

Clock = dict[Hashable, int]
"""By stream, how much of its work is known to be over."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A range of a block of memory. Blocks are told apart by their keys."""

    block: Hashable
    begin: int = 0
    end: int = 1

    def meets(self, other: Bytes) -> bool:
        """Whether they share a byte of one block."""
        return self.begin < other.end and other.begin < self.end

    def covers(self, other: Bytes) -> bool:
        """Whether all of the other, of the same block, is in this one."""
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Access:
    """One op's use of some bytes."""

    what: str
    where: Bytes
    writes: bool
    stream: Hashable
    time: int  # of its stream


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders."""

    later: Access
    earlier: Access

    def __str__(self) -> str:
        a, b = self.later, self.earlier
        return f"{a.what} ({a.stream}) is not ordered after {b.what} ({b.stream}), and uses the same memory"


@dataclass
class HappensBefore:
    """Follows a schedule as it is queued. ``races`` is what was found so far, in order."""

    races: list[Race] = field(default_factory=list)
    _clocks: dict[Hashable, Clock] = field(default_factory=dict)
    _seen: dict[Hashable, list[Access]] = field(default_factory=dict)  # by block

    def record(self, stream: Hashable) -> Clock:
        """An event: all that is queued in the stream so far."""
        return dict(self._clock(stream))

    def wait(self, stream: Hashable, event: Clock) -> None:
        """What comes in the stream from here on comes after the event."""
        clock = self._clock(stream)
        for other, time in event.items():
            clock[other] = max(clock.get(other, 0), time)

    def run(self, stream: Hashable, what: str, *, reads: Iterable[Bytes] = (), writes: Iterable[Bytes] = ()) -> None:
        """One op is queued in a stream."""
        clock = self._clock(stream)
        clock[stream] += 1
        for where in reads:
            self._access(Access(what, where, False, stream, clock[stream]))
        for where in writes:
            self._access(Access(what, where, True, stream, clock[stream]))

    def free(self, stream: Hashable, block: Hashable, nbytes: int) -> None:
        """A block goes back to its stream's memory, for good: the next one has another key."""
        self.run(stream, "reuse of freed memory", writes=[Bytes(block, 0, nbytes)])
        self._seen.pop(block, None)

    def _clock(self, stream: Hashable) -> Clock:
        return self._clocks.setdefault(stream, {stream: 0})

    def _access(self, now: Access) -> None:
        before = self._seen.setdefault(now.where.block, [])
        clock = self._clocks[now.stream]
        for other in before:
            ordered = clock.get(other.stream, 0) >= other.time
            if (now.writes or other.writes) and now.where.meets(other.where) and not ordered:
                self.races.append(Race(now, other))
        if now.writes:  # whoever comes after this comes after what this came after
            before[:] = [other for other in before if not now.where.covers(other.where)]
        else:
            before[:] = [
                other
                for other in before
                if other.writes or other.stream != now.stream or not now.where.covers(other.where)
            ]
        before.append(now)
