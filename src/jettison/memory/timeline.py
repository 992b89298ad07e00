"""Allocations of one device over time, recorded or predicted.

An allocation is born at one event and dies at another. Without a birth it existed before the first event; without a
death it outlives the last one. Bytes between two events are sums of integers, so that a peak is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Label of an allocation.

    Args:
        module: path of the module, or the file and line that allocated; "" if unknown.
        role: the ledger's role ("linear input"), or the phase from the stack ("forward", "optimizer").
        site: details, innermost first.
    """

    module: str
    role: str
    site: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineMark:
    """A mark before event ``event``: a phase begins, or memory runs out."""

    event: int
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Events in order (an allocation, and whether it is born), and each allocation's bytes and label."""

    title: str
    nbytes: Ints
    label_of: Ints
    labels: tuple[Label, ...]
    allocation: Ints
    is_birth: NDArray[np.bool_]
    time_ns: Ints
    marks: tuple[TimelineMark, ...] = ()

    @cached_property
    def born(self) -> Ints:
        """Birth event of each allocation; -1 if it existed before the first event."""
        born = np.full(len(self.nbytes), -1, np.int64)
        events = np.nonzero(self.is_birth)[0]
        born[self.allocation[events]] = events
        return born

    @cached_property
    def died(self) -> Ints:
        """Death event of each allocation; the number of events if it outlives the last one."""
        died = np.full(len(self.nbytes), len(self.allocation), np.int64)
        events = np.nonzero(~self.is_birth)[0]
        died[self.allocation[events]] = events
        return died

    @property
    def start_bytes(self) -> int:
        """Bytes allocated before the first event."""
        return int(self.nbytes[self.born < 0].sum())

    @cached_property
    def live_bytes(self) -> Ints:
        """Bytes allocated after each event."""
        sizes = self.nbytes[self.allocation]
        return self.start_bytes + np.cumsum(np.where(self.is_birth, sizes, -sizes))

    @property
    def peak_event(self) -> int:
        """First event with the highest bytes after it; -1 if the peak is before the first event."""
        if not len(self.live_bytes) or self.start_bytes >= self.live_bytes.max():
            return -1
        return int(self.live_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """Peak bytes."""
        return self.start_bytes if self.peak_event < 0 else int(self.live_bytes[self.peak_event])

    @property
    def end_bytes(self) -> int:
        """Bytes allocated after the last event."""
        return int(self.live_bytes[-1]) if len(self.live_bytes) else self.start_bytes

    def alive(self, event: int) -> Ints:
        """Allocations that are live after an event."""
        return np.nonzero((self.born <= event) & (self.died > event))[0]

    def shares(self, event: int, *by: str) -> dict[tuple[str, ...], tuple[int, int]]:
        """Return live bytes and their number of allocations after an event by fields of labels, the largest first."""
        alive = self.alive(event)
        nbytes, counts = np.zeros(len(self.labels), np.int64), np.bincount(self.label_of[alive])
        np.add.at(nbytes, self.label_of[alive], self.nbytes[alive])
        found: dict[tuple[str, ...], tuple[int, int]] = {}
        for at in np.nonzero(counts)[0].tolist():
            key = tuple(getattr(self.labels[at], field) for field in by)
            before, count = found.get(key, (0, 0))
            found[key] = before + int(nbytes[at]), count + int(counts[at])
        return dict(sorted(found.items(), key=lambda item: (-item[1][0], item[0])))

    @property
    def peak_roles(self) -> dict[str, int]:
        """Live bytes of the peak by role, the largest first."""
        return {role: nbytes for (role,), (nbytes, _) in self.shares(self.peak_event, "role").items()}


class TimelineWriter:
    """Builds a timeline event by event."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._labels: dict[Label, int] = {}
        self._nbytes: list[int] = []
        self._label_of: list[int] = []
        self._events: list[int] = []  # the number of an allocation; ~number for its death
        self._times: list[int] = []
        self._marks: list[TimelineMark] = []

    @property
    def events(self) -> int:
        """Number of events so far."""
        return len(self._events)

    def already(self, nbytes: int, label: Label) -> int:
        """Add an allocation from before the first event; return its number."""
        self._nbytes.append(nbytes)
        self._label_of.append(self._labels.setdefault(label, len(self._labels)))
        return len(self._nbytes) - 1

    def relabel(self, number: int, label: Label) -> None:
        """Change the label of an allocation whose stack was found later."""
        self._label_of[number] = self._labels.setdefault(label, len(self._labels))

    def allocate(self, nbytes: int, label: Label, time_ns: int) -> int:
        """Add an allocation; return its number."""
        number = self.already(nbytes, label)
        self._events.append(number)
        self._times.append(time_ns)
        return number

    def free(self, number: int, time_ns: int) -> None:
        """Free an allocation."""
        self._events.append(~number)
        self._times.append(time_ns)

    def mark(self, text: str) -> None:
        """Add a mark before the next event."""
        self._marks.append(TimelineMark(event=len(self._events), text=text))

    def timeline(self) -> MemoryTimeline:
        """Return the timeline."""
        events = np.array(self._events, np.int64)
        return MemoryTimeline(
            title=self.title,
            nbytes=np.array(self._nbytes, np.int64),
            label_of=np.array(self._label_of, np.int64),
            labels=tuple(self._labels),
            allocation=np.where(events < 0, ~events, events),
            is_birth=events >= 0,
            time_ns=np.array(self._times, np.int64),
            marks=tuple(self._marks),
        )
