"""Levels of a step, cut into what each call of a block does and what happens between them.

A counter's levels are one long row. A tape says where in it a call of a block begins and ends: in forward where the
block is entered and left, in backward by the node of autograd that an operator runs in, whose number tells which call
made it. What an operator finds freed was freed by the stretch before it.

NOTE [ Who lets go of a block's tensors ]
Most storages die in the stretch that made them, or in the backward of the same call. What goes from block to block is
held by several: a hidden state by the block that made it and by the one that it is given to, a mask by all that get it.
It dies with the last of them, so that the stretch of its death hangs on what others keep. For these storages, which
are arguments or results of calls, the tape also notes how many hold them: the level before which a count goes down for
the last time in a stretch is where that stretch lets go. The stretch that lets go last is where the storage dies.
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
NOBODY: Final = -1
"""Made it before the step, or by no cut stretch."""


class Place(NamedTuple):
    """A stretch of a step, by its phase.

    Args:
        call: of a block, by number; -1 before the first.
        inside: of that call; else after it, up to the next one.
        again: how often the step was there before.
    """

    phase: str
    call: int
    inside: bool
    again: int = 0


Known = tuple[int, int, int]
"""A storage that goes from block to block: the call it was first seen at, given (0) or returned (1), which leaf."""


class Leaf(NamedTuple):
    """A tensor that a block is given, or returns: by position, with its storage."""

    position: int
    storage: int
    tensor: Tensor


@dataclass(slots=True)
class Shared:
    """Such a storage, while it lives.

    Args:
        key: where it was first seen.
        tensors: that blocks were given or returned; several may hold one of them.
        held: by how many tensors, and these by how many, when it was last asked.
    """

    key: Known
    storage: int
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    held: tuple[int, int] = (0, 0)

    def holders(self) -> tuple[int, int]:
        """How many there are now."""
        refs = 0
        for ref in self.tensors:
            tensor = ref()
            if tensor is not None:
                refs += getrefcount(tensor)
        return _use_count(self.storage), refs

    def meet(self, tensor: Tensor) -> None:
        """One more of its tensors."""
        if all(ref() is not tensor for ref in self.tensors):
            self.tensors.append(weakref.ref(tensor))


@dataclass(slots=True)
class Stretch:
    """What happens at one place.

    Args:
        start: its first level.
        live_bytes: when it begins.
        lets_go: before which level, from its own first, it lets go of shared storages for the last time.
        dead: shared storages that die in it, their bytes, and before which level.
        freed: others that die in it and were made elsewhere: where (by number), bytes, and before which level.
    """

    place: Place
    start: int
    live_bytes: int
    lets_go: dict[Known, int] = field(default_factory=dict)
    dead: dict[Known, tuple[int, int]] = field(default_factory=dict)
    freed: list[tuple[int, int, int]] = field(default_factory=list)


class Tape:
    """See the text above.

    Args:
        sequence: the number that the next node gets which this thread makes.
    """

    def __init__(self, sequence: Callable[[], int]) -> None:
        self.problem = ""  # why it cannot be cut
        self.levels: list[int] = []
        self.stretches: list[Stretch] = []
        self.names: list[str] = []  # of blocks, by call
        self.touched: list[dict[Known, tuple[int, int]]] = []  # by call: what it is given and returns, and as what
        self._sequence = sequence
        self._begin()

    def _begin(self) -> None:
        self.levels.clear()
        self.stretches.clear()
        self.names.clear()
        self.touched.clear()
        self._firsts: list[int] = []
        self._pasts: list[int] = []
        self._end = 0
        self._node: int | None = None
        self._inside = False
        self._phase = ""
        self._shared: dict[int, Shared] = {}  # alive, by storage
        self._of_call: list[list[Shared]] = []
        self._watched: Iterable[Shared] = ()
        self._withheld = self._quiet = False
        self._times: Counter[tuple[str, int, bool]] = Counter()

    # what the counter says -------------------------------------------------------------------------------------------

    @property
    def here(self) -> int:
        """The number of this stretch."""
        return len(self.stretches) - 1

    def phase(self, name: str, live_bytes: int, *, first: bool) -> None:
        """A phase begins."""
        if first:
            self._begin()
        self._phase, self._node = name, None
        self._end = self._sequence()
        self._cut(-1, False, live_bytes)

    def nothing_new(self) -> None:
        """The level that comes next is of an operator during which nobody lets go of anything."""
        self._quiet = True

    def level(self, live_bytes: int) -> None:
        """One more level."""
        if not self._quiet:
            self._look()
        self._quiet = False
        self.levels.append(live_bytes)

    def comes_late(self, is_there: bool) -> None:
        """The level that was withheld comes next, as it was a while ago; or not at all."""
        self._withheld, self._quiet = False, is_there
        if is_there:
            return
        if self.stretches:  # what was noted since then counted with it
            now, first = self.stretches[-1], len(self.levels) - self.stretches[-1].start
            now.dead = {key: (nbytes, min(level, first)) for key, (nbytes, level) in now.dead.items()}
            now.lets_go = {key: min(level, first) for key, level in now.lets_go.items()}
            now.freed = [(born, nbytes, min(level, first)) for born, nbytes, level in now.freed]

    def withhold(self) -> None:
        """The level of an operator comes late, if at all."""
        self._withheld = True

    def at(self, node: int, live_bytes: int) -> None:
        """An operator runs in this node of autograd."""
        if node == self._node or self._phase != "backward":
            return
        self._node = node
        if not 0 <= node < self._end:  # a leaf's, or made in backward
            return
        call = bisect_right(self._firsts, node) - 1
        inside = call >= 0 and node < self._pasts[call]
        now = self.stretches[-1].place
        if (call, inside) != (now.call, now.inside):
            self._cut(call, inside, live_bytes)

    def enter(self, name: str, given: Iterable[Leaf], live_bytes: int) -> None:
        """A block is called.

        Args:
            given: tensors among its arguments.
        """
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
        self._firsts.append(self._sequence())

    def leave(self, returned: Iterable[Leaf], live_bytes: int) -> None:
        """It has returned this; see `enter`."""
        if not self._inside:
            self.problem = self.problem or "a block was left that was not entered"
            return
        call = len(self.names) - 1
        self._inside = False
        self._pasts.append(self._sequence())
        self._touch(call, 1, returned)
        self._cut(call, False, live_bytes)

    def died(self, storage: int, nbytes: int, born: int) -> None:
        """A storage is gone that was made in the stretch of that number."""
        if not self.stretches:
            return
        now = self.stretches[-1]
        shared = self._shared.pop(storage, None)
        if shared is not None:
            now.dead[shared.key] = nbytes, self._next()
            now.lets_go[shared.key] = self._next()
        elif born != self.here:
            now.freed.append((born, nbytes, self._next()))

    # -----------------------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        return len(self.levels) + self._withheld - self.stretches[-1].start

    def _cut(self, call: int, inside: bool, live_bytes: int) -> None:
        if self.stretches:
            self._look()
        where = self._phase, call, inside
        place = Place(*where, self._times[where])
        self._times[where] += 1
        self.stretches.append(Stretch(place=place, start=len(self.levels), live_bytes=live_bytes))
        self._watched = self._of_call[call] if inside else list(self._shared.values())
        for one in self._watched:
            if self._shared.get(one.storage) is one:
                one.held = one.holders()

    def _touch(self, call: int, way: int, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            found = self._shared.get(leaf.storage)
            if found is None:
                found = self._shared[leaf.storage] = Shared(key=(call, way, leaf.position), storage=leaf.storage)
            found.meet(leaf.tensor)
            found.held = found.holders()
            if found.key not in self.touched[call]:
                self.touched[call][found.key] = way, leaf.position
                self._of_call[call].append(found)

    def _look(self) -> None:
        """Who has let go of what since the last time."""
        if not self.stretches:
            return
        for one in self._watched:
            if self._shared.get(one.storage) is one:
                held, before = one.holders(), one.held
                if held != before:
                    one.held = held
                    if held[0] < before[0] or held[1] < before[1]:
                        self.stretches[-1].lets_go[one.key] = self._next()


def leaves_of(tree: Any, storage_of: Callable[[Tensor], int | None]) -> list[Leaf]:
    """Tensors of arguments or results whose storage is one that may die."""
    found = ((n, leaf, storage_of(leaf)) for n, leaf in enumerate(tree_leaves(tree)) if isinstance(leaf, Tensor))
    return [Leaf(position, storage, leaf) for position, leaf, storage in found if storage is not None]
