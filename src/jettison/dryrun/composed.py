"""A step put together from stretches of steps that were dry-run: what a call of a block does is known once it was seen.

NOTE [ What may be put together ]
A stretch inside a call (`dryrun.tape`) is taken to hang on that call's own label alone: how its block is treated, and
its place in a run of blocks. What else it could hang on is looked at, in every step that is recorded:

- where shared storages die follows from who lets go of them (NOTE [ Who lets go of a block's tensors ]), and is
  compared with where they died;
- what a call leaves behind that dies around the blocks (weights that autocast had cast) is the call's;
- every other storage that dies in another call than the one it was made in, or was made around the blocks and dies in
  a call, must do so in every step: same places, same bytes;
- blocks are alike where their stretches are equal in the first step, in which all keep everything; a stretch that is
  met twice under one label must be the same to the byte, whichever of them ran it and whatever was beside it;
- the order of stretches, and what calls are given and return, must be the same in all steps.

What stands around the blocks hangs on its own label, and the optimizer on none. A step whose blocks are stubs shows it
in a small part of the time, once such a step was seen to be equal to what a whole one showed.

Whatever fails ends the putting together, and says why: from then on every step is dry-run whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jettison.dryrun.tape import NOBODY, Known, Place, Stretch, Tape
from jettison.ledger.levels import StepLevels

Label = Any
"""How a call's block is treated, or what is around the blocks; anything that can be hashed."""
Role = tuple[int, int]
"""What a shared storage is to a call: given (0) or returned (1), which leaf."""
OPTIMIZER: Final = "optimizer"
Due = tuple[Place, int, int]
"""A storage that a call leaves behind: where it dies around the blocks, before which level there, and its bytes."""
Facts = Mapping[tuple[Place | None, Place], "Counter[int]"]
"""Bytes of storages by where they were made and where they died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What happens in a stretch, as if no shared storage died in it.

    Args:
        levels: above what was alive when it began.
        left_bytes: that are alive on top of that when it ends.
        lets_go: of shared storages for the last time, before which level; in a call by role, else by storage.
    """

    levels: tuple[int, ...]
    left_bytes: int
    lets_go: tuple[tuple[Hashable, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """How a step is treated.

    Args:
        root: what is around the blocks.
        calls: of blocks, in order.
        runs: (first, past the last) of those that hold one input; what they do hangs on all of them.
    """

    root: Label
    calls: tuple[Label, ...]
    runs: tuple[tuple[int, int], ...] = ()

    def together(self, one: int, other: int) -> bool:
        """Whether two calls are one, or of one run."""
        return one == other or any(a <= one < b and a <= other < b for a, b in self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """Levels of a step that was put together, phase by phase."""

    start_bytes: int
    stretches: list[tuple[str, list[int]]]

    def peak_of(self, phase: str) -> int:
        """The highest of a phase; 0 where there is none."""
        return max((level for name, levels in self.stretches if name == phase for level in levels), default=0)

    def levels(self, beside_bytes: int) -> StepLevels | None:
        """In few points."""
        return StepLevels.of(self.stretches, beside_bytes=beside_bytes)


@dataclass(frozen=True, kw_only=True)
class _Outline:
    """What all steps have in common."""

    places: tuple[Place, ...]
    names: tuple[str, ...]
    touched: tuple[Mapping[Known, Role], ...]
    start_bytes: int
    alike: tuple[int, ...]  # by call: equal numbers for calls of which one may stand for the other
    facts: Facts

    def storages(self, call: int) -> dict[Hashable, Known]:
        """What a call is given and returns, by role."""
        return {role: key for key, role in self.touched[call].items()}


@dataclass(kw_only=True)
class Book:
    """Pieces that were seen. `problem` says why no step can be put together any more.

    Args:
        classes: of blocks, by call; only blocks of one class can be alike.
    """

    names: Sequence[str]
    classes: Sequence[str]
    problem: str = ""
    agreed: int = 0
    """Pieces of calls that were met again and found to be the same."""
    stubs: bool | None = None
    """Whether steps over stubs show what is around the blocks; None: nobody has tried."""
    _outline: _Outline | None = None
    _inside: dict[Hashable, Piece] = field(default_factory=dict)
    _around: dict[Hashable, Piece] = field(default_factory=dict)
    _dying: dict[Label, dict[Known, int]] = field(default_factory=dict)
    _behind: dict[Hashable, tuple[Due, ...]] = field(default_factory=dict)

    def record(self, tape: Tape, labels: Labels, live_bytes: int) -> None:
        """Take a step that was dry-run apart.

        Args:
            live_bytes: when it was over.
        """
        if self.problem:
            return
        try:
            self._record(tape, labels, live_bytes)
        except _CannotBeComposed as why:
            self.problem = str(why)

    def record_around(self, tape: Tape, label: Label, live_bytes: int) -> None:
        """Take a step over stubs apart. One whose label was seen in a whole step says what stubs are worth."""
        outline = self._outline
        assert outline is not None, "whole steps come first"
        places = [stretch.place for stretch in tape.stretches]
        alike = not tape.problem and [dict(one) for one in tape.touched] == list(outline.touched)
        if not alike or places != [place for place in outline.places if place.phase != OPTIMIZER]:
            self.stubs = False
            return
        pairs = zip(places, _pieces(tape, live_bytes), strict=True)
        pieces: dict[Hashable, Piece] = {(label, place): piece for place, piece in pairs if not place.inside}
        died = {key: nbytes for stretch in tape.stretches for key, (nbytes, _) in stretch.dead.items()}
        if self.knows_root(label):
            self.stubs = self._dying[label] == died and all(self._around[key] == one for key, one in pieces.items())
        elif self.stubs:
            self._dying[label] = died
            self._around |= pieces

    def missing(self, labels: Labels) -> list[int]:
        """Calls of which some piece was not seen under their label."""
        if self._outline is None:
            return list(range(len(labels.calls)))
        return sorted({p.call for p in self._outline.places if p.inside and self._key(p, labels) not in self._inside})

    def knows_root(self, label: Label) -> bool:
        """Whether what is around the blocks was seen under this label."""
        return label in self._dying

    def seen(self, call: int, label: Label) -> bool:
        """Whether a call like this one was seen under this label."""
        return (self.alike(call), label) in self._behind

    def alike(self, call: int) -> int:
        """A number that calls have in common of which one may stand for the other."""
        return call if self._outline is None else self._outline.alike[call]

    def compose(self, labels: Labels) -> Composed | None:
        """The step under these labels; None where pieces of it were not seen."""
        outline = self._outline
        if self.problem or outline is None or not self.knows_root(labels.root) or self.missing(labels):
            return None
        pieces = [self._piece(place, labels) for place in outline.places]
        dying: dict[int, list[tuple[int, int]]] = {}
        numbers = {place: number for number, place in enumerate(outline.places)}
        for call, alike in enumerate(outline.alike):
            for place, level, nbytes in self._behind[alike, labels.calls[call]]:
                dying.setdefault(numbers[place], []).append((level, nbytes))
        last = _last(outline, pieces)
        for key, nbytes in self._dying[labels.root].items():
            if key not in last:
                return None
            number, level = last[key]
            dying.setdefault(number, []).append((level, nbytes))
        live = outline.start_bytes
        found: list[tuple[str, list[int]]] = []
        for number, (place, piece) in enumerate(zip(outline.places, pieces, strict=True)):
            if not found or found[-1][0] != place.phase:
                found.append((place.phase, []))
            levels = [live + level for level in piece.levels]
            live += piece.left_bytes
            for at, nbytes in dying.get(number, ()):
                levels[at:] = [level - nbytes for level in levels[at:]]
                live -= nbytes
            found[-1][1].extend(levels)
        return Composed(start_bytes=outline.start_bytes, stretches=found)

    # -----------------------------------------------------------------------------------------------------------------

    def _key(self, place: Place, labels: Labels) -> Hashable:
        assert self._outline is not None
        return self._outline.alike[place.call], labels.calls[place.call], place.phase, place.again

    def _piece(self, place: Place, labels: Labels) -> Piece:
        return self._inside[self._key(place, labels)] if place.inside else self._around[_root_key(place, labels)]

    def _record(self, tape: Tape, labels: Labels, live_bytes: int) -> None:
        if tape.problem:
            raise _CannotBeComposed(tape.problem)
        if tape.names != list(self.names):
            raise _CannotBeComposed("blocks were called in another order than the one that was traced")
        places = tuple(stretch.place for stretch in tape.stretches)
        pieces = list(_pieces(tape, live_bytes))
        facts = _facts(tape.stretches)
        first = self._outline
        if first is None:
            first = self._outline = _Outline(
                places=places,
                names=tuple(tape.names),
                touched=tuple(dict(one) for one in tape.touched),
                start_bytes=tape.stretches[0].live_bytes,
                alike=_alike(self.classes, places, pieces),
                facts=facts,
            )
        elif places != first.places or [dict(one) for one in tape.touched] != list(first.touched):
            raise _CannotBeComposed("steps differ in the order of what they do")
        elif tape.stretches[0].live_bytes != first.start_bytes:
            raise _CannotBeComposed("steps begin with different bytes")
        _compare(facts, first.facts, labels)
        self._check_deaths(tape, pieces, labels)
        for place, piece in zip(places, pieces, strict=True):
            self._enter(place, piece, labels)
        for call, dues in enumerate(_left_behind(tape.stretches, len(self.names))):
            if self._behind.setdefault((first.alike[call], labels.calls[call]), dues) != dues:
                raise _CannotBeComposed(f"what block {self.names[call]} leaves behind hangs on other blocks")

    def _check_deaths(self, tape: Tape, pieces: Sequence[Piece], labels: Labels) -> None:
        assert self._outline is not None
        last = _last(self._outline, pieces)
        died: dict[Known, int] = {}
        for number, stretch in enumerate(tape.stretches):
            for key, (nbytes, level) in stretch.dead.items():
                died[key] = nbytes
                if last.get(key) != (number, level):
                    raise _CannotBeComposed("a tensor of several blocks died where none of them let go of it")
        if self._dying.setdefault(labels.root, died) != died:
            raise _CannotBeComposed("a tensor of several blocks outlives some steps, and others not")

    def _enter(self, place: Place, piece: Piece, labels: Labels) -> None:
        if place.inside:
            known = self._inside.setdefault(self._key(place, labels), piece)
        else:
            known = self._around.setdefault(_root_key(place, labels), piece)
        if known != piece:
            what = f"block {self.names[place.call]}" if place.inside else "what is around the blocks"
            raise _CannotBeComposed(f"the {place.phase} of {what} hangs on how other blocks are treated")
        self.agreed += place.inside and known is not piece


def _root_key(place: Place, labels: Labels) -> Hashable:
    return (None if place.phase == OPTIMIZER else labels.root), place


class _CannotBeComposed(Exception):
    """Steps of this model cannot be put together."""


def _last(outline: _Outline, pieces: Sequence[Piece]) -> dict[Known, tuple[int, int]]:
    """By shared storage, the stretch and the level at which somebody lets go of it for the last time."""
    found: dict[Known, tuple[int, int]] = {}
    known = [outline.storages(call) for call in range(len(outline.touched))]
    for number, (place, piece) in enumerate(zip(outline.places, pieces, strict=True)):
        for name, level in piece.lets_go:
            key = known[place.call].get(name) if place.inside else name
            if key is not None:
                found[key] = number, level  # type: ignore[index]
    return found


def _pieces(tape: Tape, live_bytes: int) -> Iterator[Piece]:
    ends = [*(s.live_bytes for s in tape.stretches[1:]), live_bytes]
    stops = [*(s.start for s in tape.stretches[1:]), len(tape.levels)]
    for stretch, end, stop in zip(tape.stretches, ends, stops, strict=True):
        levels = [level - stretch.live_bytes for level in tape.levels[stretch.start : stop]]
        left = end - stretch.live_bytes
        gone = [
            *stretch.dead.values(),
            *((n, at) for born, n, at in stretch.freed if _is_due(tape.stretches, born, stretch)),
        ]
        for nbytes, at in gone:
            levels[at:] = [level + nbytes for level in levels[at:]]
            left += nbytes
        roles = tape.touched[stretch.place.call] if stretch.place.inside else None
        goes = []
        for key, at in stretch.lets_go.items():
            if roles is not None and key not in roles:
                raise _CannotBeComposed("a block let go of a tensor that it was neither given nor returned")
            goes.append((key if roles is None else roles[key], at))
        yield Piece(levels=tuple(levels), left_bytes=left, lets_go=tuple(sorted(goes)))


def _alike(classes: Sequence[str], places: Iterable[Place], pieces: Iterable[Piece]) -> tuple[int, ...]:
    """By call, equal numbers where blocks of one class do the same."""
    seen: list[list[Hashable]] = [[name] for name in classes]
    for place, piece in zip(places, pieces, strict=True):
        if place.inside:
            seen[place.call].append((place.phase, place.again, piece))
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(tuple(one), call) for call, one in enumerate(seen))


def _facts(stretches: Sequence[Stretch]) -> Facts:
    found: dict[tuple[Place | None, Place], Counter[int]] = {}
    for stretch in stretches:
        for born, nbytes, _level in stretch.freed:
            where = None if born == NOBODY else stretches[born].place
            if not _is_due(stretches, born, stretch) and (where is None or _between_calls(where, stretch.place)):
                found.setdefault((where, stretch.place), Counter())[nbytes] += 1
    return found


def _is_due(stretches: Sequence[Stretch], born: int, died: Stretch) -> bool:
    """Whether a call's forward has left this behind, for what is around the blocks to let go of, and not at once."""
    where = stretches[born].place if born != NOBODY else died.place
    if died.place.inside or not where.inside or where.phase != "forward":
        return False
    call, last = where.call, len({s.place.call for s in stretches if s.place.inside}) - 1
    return died.place != Place("forward", call, False) or call == last


def _left_behind(stretches: Sequence[Stretch], calls: int) -> list[tuple[Due, ...]]:
    """By call."""
    found: list[list[Due]] = [[] for _ in range(calls)]
    for stretch in stretches:
        for born, nbytes, level in stretch.freed:
            if _is_due(stretches, born, stretch):
                found[stretches[born].place.call].append((stretch.place, level, nbytes))
    return [tuple(sorted(one)) for one in found]


def _between_calls(born: Place, died: Place) -> bool:
    """Whether more than one call may have a say in it, or a call and what is around."""
    return (born.inside or died.inside) and not (born.inside and died.inside and born.call == died.call)


def _compare(facts: Facts, first: Facts, labels: Labels) -> None:
    """Storages that outlive the call that made them.

    Raises:
        _CannotBeComposed: they do not do so in both steps.
    """
    for pair in facts.keys() | first.keys():
        born, died = pair
        if born is not None and born.inside and died.inside and labels.together(born.call, died.call):
            continue
        if facts.get(pair) != first.get(pair):
            raise _CannotBeComposed("how long a tensor lives hangs on several blocks")
