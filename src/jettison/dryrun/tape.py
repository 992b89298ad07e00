"""Levels of a step, cut into what each call of a block does and what happens between them.

A counter records levels one after the other. A tape records at which of them a call of a block begins and ends: in
forward where the block is entered and left, in backward by the autograd node that an operator runs in, whose sequence
number tells which call made it. What an operator finds freed was freed by the interval before it.

NOTE [ Last references to a block's tensors ]
Most storages are freed in the interval that allocated them, or in the backward of the same call. Arguments and results
of calls are referenced by several: a hidden state by the block that made it and by the next one, a mask by all blocks.
The interval that frees them depends on which tensors others keep. So the tape counts references: an interval drops its
last one before the level at which the count decreases for the last time in it; the last of these frees the storage.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from jettison.capture.trees import tree_leaves

_use_count: Final = torch._C._storage_Use_Count
_next_node: Final = torch._C._autograd._get_sequence_nr
"""The number that the next node gets which this thread makes."""
NOBODY: Final = -1
"""Allocated before the step, or outside of all intervals."""


class Place(NamedTuple):
    """Interval of a step: inside a call of a block, by number (-1 before the first), or after it until the next one;
    ``again``: how often the step was there before.
    """

    phase: str
    call: int
    inside: bool
    again: int = 0


SharedKey = tuple[int, int, int]
"""A storage that goes from block to block: the call it was first seen at, given (0) or returned (1), which leaf."""


class Leaf(NamedTuple):
    """A tensor that a block is given, or returns: by position, with its storage."""

    position: int
    storage: int
    tensor: Tensor


@dataclass(slots=True)
class _Shared:
    """Such a storage, while it lives; ``held``: by how many tensors, and these by how many, when last asked."""

    key: SharedKey
    storage: int
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    held: tuple[int, int] = (0, 0)

    def holders(self) -> tuple[int, int]:
        refs = 0
        for ref in self.tensors:
            tensor = ref()
            if tensor is not None:
                refs += getrefcount(tensor)
        return _use_count(self.storage), refs


@dataclass(slots=True)
class StepInterval:
    """Events of one interval of a step; levels are counted from its first, and an event comes before its level."""

    place: Place
    start: int  # its first level
    live_bytes: int  # when it begins
    last_references: dict[SharedKey, int] = field(default_factory=dict)  # level at which a shared storage's last drops
    dead: dict[SharedKey, tuple[int, int]] = field(default_factory=dict)  # bytes and level of shared ones that die here
    freed: list[tuple[int, int, int]] = field(default_factory=list)  # of others made elsewhere: interval, bytes, level


class IntervalTape:
    """See the text above. One may record several steps; it has the last."""

    def __init__(self) -> None:
        self.problem = ""  # why it cannot be cut
        self.begin()

    def begin(self) -> None:
        """Forget what was recorded."""
        self.levels: list[int] = []
        self.intervals: list[StepInterval] = []
        self.names: list[str] = []  # of blocks, by call
        self.touched: list[dict[SharedKey, tuple[int, int]]] = []  # by call, what it is given and returns, and as what
        self.end_bytes = 0  # alive when the step was over
        self._firsts: list[int] = []
        self._pasts: list[int] = []
        self._end = 0
        self._node: int | None = None
        self._inside = False
        self._phase = ""
        self._shared: dict[int, _Shared] = {}  # alive, by storage
        self._of_call: list[list[_Shared]] = []
        self._watched: Iterable[_Shared] = ()
        self._withheld = self._quiet = False
        self._times: Counter[tuple[str, int, bool]] = Counter()

    @property
    def places(self) -> list[Place]:
        """Places of its intervals, in order."""
        return [interval.place for interval in self.intervals]

    @property
    def died_bytes(self) -> dict[SharedKey, int]:
        """Bytes of shared storages that died in the step."""
        return {key: nbytes for interval in self.intervals for key, (nbytes, _) in interval.dead.items()}

    @property
    def here(self) -> int:
        """The number of this interval."""
        return len(self.intervals) - 1

    # what the counter says -------------------------------------------------------------------------------------------

    def phase(self, name: str, live_bytes: int, *, first: bool) -> None:
        """A phase begins."""
        if first:
            self.begin()
        self._phase, self._node = name, None
        self._end = _next_node()
        self._cut(-1, False, live_bytes)

    def ran(self, *, withheld: bool) -> None:
        """An operator has run, during which nobody let go of anything: its level comes next, or late, if at all."""
        self._withheld, self._quiet = withheld, self._quiet or not withheld

    def level(self, live_bytes: int) -> None:
        """Record a level."""
        if not self._quiet:
            self._look()
        self._quiet = False
        self.levels.append(live_bytes)

    def comes_late(self, is_there: bool) -> None:
        """The level that was withheld comes next, as it was a while ago; or not at all."""
        self._withheld, self._quiet = False, is_there
        if not is_there and self.intervals:  # what was noted since then counted with it
            now, first = self.intervals[-1], len(self.levels) - self.intervals[-1].start
            now.dead = {key: (nbytes, min(level, first)) for key, (nbytes, level) in now.dead.items()}
            now.last_references = {key: min(level, first) for key, level in now.last_references.items()}
            now.freed = [(born, nbytes, min(level, first)) for born, nbytes, level in now.freed]

    def at(self, node: int, live_bytes: int) -> None:
        """An operator runs in this node of autograd."""
        if node == self._node or self._phase != "backward":
            return
        self._node = node
        if not 0 <= node < self._end:  # a leaf's, or made in backward
            return
        call = bisect_right(self._firsts, node) - 1
        inside = call >= 0 and node < self._pasts[call]
        now = self.intervals[-1].place
        if (call, inside) != (now.call, now.inside):
            self._cut(call, inside, live_bytes)

    def enter(self, name: str, given: Iterable[Leaf], live_bytes: int) -> None:
        """A block is called with these tensors among its arguments."""
        if self._inside or self._phase != "forward":
            self.problem = self.problem or "a block runs inside of another one, or in backward"
            return
        self._inside = True
        call = len(self.names)
        self.names.append(name)
        self.touched.append({})
        self._of_call.append([])
        self._cut(call, True, live_bytes)
        self._touch(call, 0, given)
        self._firsts.append(_next_node())

    def leave(self, returned: Iterable[Leaf], live_bytes: int) -> None:
        """It has returned this; see `enter`."""
        if not self._inside:
            self.problem = self.problem or "a block was left that was not entered"
            return
        call = len(self.names) - 1
        self._inside = False
        self._pasts.append(_next_node())
        self._touch(call, 1, returned)
        self._cut(call, False, live_bytes)

    def died(self, storage: int, nbytes: int, born: int) -> None:
        """A storage is gone that was made in the interval of that number."""
        if not self.intervals:
            return
        now = self.intervals[-1]
        shared = self._shared.pop(storage, None)
        if shared is not None:
            now.dead[shared.key] = nbytes, self._next()
            now.last_references[shared.key] = self._next()
        elif born != self.here:
            now.freed.append((born, nbytes, self._next()))

    # -----------------------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        return len(self.levels) + self._withheld - self.intervals[-1].start

    def _cut(self, call: int, inside: bool, live_bytes: int) -> None:
        self._look()
        where = self._phase, call, inside
        self.intervals.append(StepInterval(Place(*where, self._times[where]), len(self.levels), live_bytes))
        self._times[where] += 1
        self._watched = self._of_call[call] if inside else list(self._shared.values())
        for one in self._watched:
            if self._shared.get(one.storage) is one:
                one.held = one.holders()

    def _touch(self, call: int, role: int, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            found = self._shared.get(leaf.storage)
            if found is None:
                found = self._shared[leaf.storage] = _Shared((call, role, leaf.position), leaf.storage)
            if all(ref() is not leaf.tensor for ref in found.tensors):
                found.tensors.append(weakref.ref(leaf.tensor))
            found.held = found.holders()
            if found.key not in self.touched[call]:
                self.touched[call][found.key] = role, leaf.position
                self._of_call[call].append(found)

    def _look(self) -> None:
        """Who has let go of what since the last time."""
        if not self.intervals:
            return
        for one in self._watched:
            if self._shared.get(one.storage) is one:
                before, one.held = one.held, one.holders()
                if one.held[0] < before[0] or one.held[1] < before[1]:
                    self.intervals[-1].last_references[one.key] = self._next()


def leaves_of(tree: Any, storage_of: Callable[[Tensor], int | None]) -> list[Leaf]:
    """Tensors of arguments or results whose storage is one that may die."""
    found = ((n, leaf, storage_of(leaf)) for n, leaf in enumerate(tree_leaves(tree)) if isinstance(leaf, Tensor))
    return [Leaf(position, storage, leaf) for position, leaf, storage in found if storage is not None]
