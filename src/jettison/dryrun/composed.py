"""Peaks of planned steps, each dry-run completely or composed of intervals of earlier dry runs.

A single choice is dry-run completely. If many are needed, as in a sweep of budgets, most parts of a step were seen
before: the same block under the same policy, in another place. A dry run of a mixture, in which every block has another
policy, shows many of them at once. The first composed step is also dry-run completely, and must be equal in every
level.

NOTE [ What may be composed ]
An interval inside a call (`dryrun.tape`) is assumed to depend on that call's own label alone: its block's policy, and
its place in a run of blocks. Other possible dependencies are checked in every step that is recorded:

- the place where a shared storage is freed follows from who drops references to it (NOTE [ Last references to a
  block's tensors ]), and is compared with the real one;
- tensors that a call leaves and that are freed around the blocks (weights that autocast had cast) are the call's;
- every other storage that is freed in another call than the one it was made in, or was made around the blocks and is
  freed in a call, must do so in every step: same places, same bytes;
- blocks are equivalent if their intervals are equal in the first step, in which all keep everything; an interval that
  occurs twice under one label must be equal to the byte, whichever of them ran it and whatever ran around it;
- the order of intervals, and the arguments and results of calls, must be the same in all steps.

The part around the blocks depends on its own label, and the optimizer on none. A step whose blocks are stubs shows it
in a small part of the time, once such a step was equal to a complete one.

Any failure ends composition, with its reason: from then on every step is dry-run completely.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Final, NamedTuple

from jettison.capture.model_trace import ModelTrace
from jettison.dryrun.counter import AllocationCounter, Workspace, quiet_gc
from jettison.dryrun.levels import RootLevels, StubsFallShort, is_entangled, over_stubs
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks, step_of
from jettison.dryrun.tape import NOBODY, IntervalTape, Place, SharedKey, StepInterval
from jettison.ledger.levels import StepLevels
from jettison.solve.policy import CheckpointPolicy, KeepAll

Label = Any
"""A call's policy and its place in a run of blocks, or the policy around the blocks; anything hashable."""
OPTIMIZER: Final = "optimizer"
ALIKE: Final = 2
"""Average number of equivalent blocks above which a mixture shows more than the choice itself."""
FreedBytes = Mapping[tuple[Place | None, Place], "Counter[int]"]
"""Bytes of storages by where they were made and where they were freed."""


class IntervalLevels(NamedTuple):
    """An interval as if no shared storage were freed in it: levels above its start, bytes that it leaves, and the level
    before which it drops its last reference to each shared storage (in a call by role, else by storage).
    """

    levels: tuple[int, ...]
    left_bytes: int
    last_references: tuple[tuple[Hashable, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPolicies:
    """Labels of a step; in a run of blocks that hold one input, each depends on all of them."""

    root: Label
    calls: tuple[Label, ...]
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, part: ModulePolicy) -> StepPolicies:
        names = [call.name for call in part.trace.calls]
        runs = tuple((names.index(run[0]), names.index(run[-1]) + 1) for run in part.segments)
        places = {call: (call - first, past - first) for first, past in runs for call in range(first, past)}
        calls = tuple((part.policies[name], places.get(call)) for call, name in enumerate(names))
        return cls(root=part.root, calls=calls, runs=runs)

    def together(self, one: int, other: int) -> bool:
        """Whether two calls are one, or of one run."""
        return one == other or any(a <= one < b and a <= other < b for a, b in self.runs)


@dataclass(frozen=True, kw_only=True)
class _Outline:
    """Common properties of all steps; ``alike``: by call, equal numbers for equivalent calls."""

    places: list[Place]
    touched: list[dict[SharedKey, tuple[int, int]]]
    start_bytes: int
    alike: tuple[int, ...]
    freed_bytes: FreedBytes


class _CannotBeComposed(Exception):
    """Steps of this model cannot be composed."""


def why_whole(trace: ModelTrace, dry_step: DryStep, *, offloads: bool) -> str:
    """Reason why steps of this kind are not composed; empty if they may be."""
    names = [call.name for call in trace.calls]
    if not isinstance(dry_step, OneBatch):
        return "the step is somebody's own"
    if offloads:
        return "tensors move to the host, and blocks wait for each other's copies"
    if any(cls.stood_in for cls in trace.classes.values()):
        return "some blocks are stood in for"
    if not names or len(set(names)) < len(names):
        return "the model has no blocks" if not names else "a block is called twice"
    return ""


def _around_stubs(
    trace: ModelTrace, policy: CheckpointPolicy, dry_step: DryStep, workspace: Workspace | None = None
) -> IntervalTape | None:
    """Tape of a step whose blocks are stubs, without its optimizer; None if stubs do not suffice. Its levels around the
    blocks are those of the step, in a small part of its time.
    """
    if is_entangled(trace):
        return None
    tape = IntervalTape()
    levels = RootLevels(AllocationCounter(), [(0, 0)] * len(trace.calls))
    try:
        with over_stubs(trace, levels, policy), dry_step.around(trace), quiet_gc():
            levels.counter = AllocationCounter(
                dry_step.alive(), workspace=workspace, device=trace.device_type, record_levels=True, tape=tape
            )
            with levels.counter:
                *_, held = dry_step.passes(levels.counter)
                levels.counter.reset_peak()
                tape.end_bytes = levels.counter.live_bytes
                del held
    except StubsFallShort:
        return None
    finally:
        trace.fake_model.zero_grad()
    return tape


@dataclass(kw_only=True)
class Judge:
    """Peaks of one model's steps."""

    trace: ModelTrace
    dry_step: DryStep
    pricing: Pricing
    problem: str = "nobody asked for it"  # why every step is dry-run completely; empty if steps are composed
    offers: dict[str, list[CheckpointPolicy]] = field(default_factory=dict)  # by class of blocks, most likely first
    _first: _Outline | None = None
    _pieces: dict[Hashable, IntervalLevels] = field(default_factory=dict)
    _dying: dict[Label, dict[SharedKey, int]] = field(default_factory=dict)  # bytes of shared storages, by root
    _behind: dict[Hashable, list[tuple[Place, int, int]]] = field(default_factory=dict)  # where, level, bytes
    _proven: bool = False
    _stubs: bool | None = None  # whether steps over stubs show the part around the blocks; None: not tried yet
    _last_root: CheckpointPolicy | None = None  # of a complete step in which something around the blocks was dropped

    def whole(self, part: ModulePolicy) -> StepPeaks:
        if self.problem:
            return step_of([part], self.dry_step, self.pricing)
        tape = IntervalTape()
        found = step_of([part], self.dry_step, self.pricing, tape)
        self._last_root = part.root if not isinstance(part.root, KeepAll) else self._last_root
        try:
            self._record(tape, StepPolicies.of(part))
        except _CannotBeComposed as why:
            self.problem = str(why)
        return found

    def step(self, part: ModulePolicy) -> StepPeaks:
        """Compose a step if possible; else dry-run it."""
        if self.problem:
            return self.whole(part)
        labels = StepPolicies.of(part)
        if labels.root not in self._dying:
            if self._stubs is None and self._last_root is not None:
                self._see_around(self._last_root)
            if self._stubs:
                self._see_around(labels.root)
        found = self.compose(labels)
        if found is None and (mixture := self._mixture(part, labels)) is not None:
            self.whole(mixture)
            found = self.compose(labels)
        if found is None:
            return self.whole(part)
        if self._proven:
            return found
        seen = self.whole(part)
        self._proven = seen == replace(found, composed=False)
        if not self._proven:
            self.problem = "a step that was put together is not what it is when it is run"
        return seen

    def compose(self, labels: StepPolicies) -> StepPeaks | None:
        """The step under these labels; None if pieces of it were not seen."""
        first = self._first
        if self.problem or first is None or labels.root not in self._dying or self._missing(labels):
            return None
        pieces = [self._pieces[self._key(place, labels)] for place in first.places]
        gone: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        numbers = {place: number for number, place in enumerate(first.places)}
        for kind_and_label in zip(first.alike, labels.calls, strict=True):
            for place, level, nbytes in self._behind[kind_and_label]:
                gone[numbers[place]].append((level, nbytes))
        last = _last(first, pieces)
        if not self._dying[labels.root].keys() <= last.keys():
            return None
        for key, nbytes in self._dying[labels.root].items():
            number, level = last[key]
            gone[number].append((level, nbytes))
        live = first.start_bytes
        found: list[tuple[str, list[int]]] = []
        for number, (place, piece) in enumerate(zip(first.places, pieces, strict=True)):
            if not found or found[-1][0] != place.phase:
                found.append((place.phase, []))
            levels = [live + level for level in piece.levels]
            live += piece.left_bytes
            for at, nbytes in gone[number]:
                levels[at:] = [level - nbytes for level in levels[at:]]
                live -= nbytes
            found[-1][1].extend(levels)
        peak = {name: max(levels, default=0) for name, levels in found}
        forward, extra = peak["forward"], self.trace.loop.elsewhere_bytes
        return StepPeaks.of(
            forward,
            max(forward, peak.get("backward", 0)),
            peak.get(OPTIMIZER, 0) if self.dry_step.last else None,
            static_bytes=first.start_bytes,
            extra_bytes=extra,
            levels=StepLevels.of(found, extra_bytes=extra),
            composed=True,
        )

    # seen intervals ---------------------------------------------------------------------------------------------------

    def _key(self, place: Place, labels: StepPolicies) -> Hashable:
        """Key that is equal for intervals that are assumed to be equal."""
        if not place.inside:
            return (None if place.phase == OPTIMIZER else labels.root), place
        assert self._first is not None
        return self._first.alike[place.call], labels.calls[place.call], place.phase, place.again

    def _missing(self, labels: StepPolicies) -> list[int]:
        """Calls with a piece that was not seen under their label."""
        assert self._first is not None
        inside = (place for place in self._first.places if place.inside)
        return sorted({place.call for place in inside if self._key(place, labels) not in self._pieces})

    def _record(self, tape: IntervalTape, labels: StepPolicies) -> None:
        """Cut a step that was dry-run into pieces. Raises `_CannotBeComposed` if it contradicts an earlier step."""
        if tape.problem:
            raise _CannotBeComposed(tape.problem)
        if tape.names != [call.name for call in self.trace.calls]:
            raise _CannotBeComposed("blocks were called in another order than the one that was traced")
        places, pieces = tape.places, list(_pieces_of(tape))
        freed_bytes, behind = _freed_storages(tape)
        first, start_bytes = self._first, tape.intervals[0].live_bytes
        if first is None:
            classes = [call.class_key for call in self.trace.calls]
            first = self._first = _Outline(
                places=places,
                touched=[dict(one) for one in tape.touched],
                start_bytes=start_bytes,
                alike=_alike(classes, places, pieces),
                freed_bytes=freed_bytes,
            )
        elif places != first.places or tape.touched != first.touched:
            raise _CannotBeComposed("steps differ in the order of what they do")
        elif start_bytes != first.start_bytes:
            raise _CannotBeComposed("steps begin with different bytes")
        for pair in freed_bytes.keys() | first.freed_bytes.keys():
            born, died = pair
            own = born is not None and born.inside and died.inside and labels.together(born.call, died.call)
            if not own and freed_bytes.get(pair) != first.freed_bytes.get(pair):
                raise _CannotBeComposed("how long a tensor lives hangs on several blocks")
        last = _last(first, pieces)
        for number, interval in enumerate(tape.intervals):
            if any(last.get(key) != (number, level) for key, (_, level) in interval.dead.items()):
                raise _CannotBeComposed("a tensor of several blocks died where none of them let go of it")
        if self._dying.setdefault(labels.root, tape.died_bytes) != tape.died_bytes:
            raise _CannotBeComposed("a tensor that several blocks share outlives some steps and not others")
        for place, piece in zip(places, pieces, strict=True):
            if self._pieces.setdefault(self._key(place, labels), piece) != piece:
                what = f"block {tape.names[place.call]}" if place.inside else "what is around the blocks"
                raise _CannotBeComposed(f"the {place.phase} of {what} depends on the policies of other blocks")
        for call, dues in enumerate(behind):
            if self._behind.setdefault((first.alike[call], labels.calls[call]), dues) != dues:
                raise _CannotBeComposed(f"what block {tape.names[call]} leaves behind hangs on other blocks")

    def _see_around(self, root: CheckpointPolicy) -> None:
        """Cut a step over stubs into pieces. If its root was also in a complete step, the two are compared."""
        tape = self.pricing.known(lambda workspace: _around_stubs(self.trace, root, self.dry_step, workspace))
        first = self._first
        assert first is not None, "whole steps come first"
        wanted = [place for place in first.places if place.phase != OPTIMIZER]
        if tape is None or tape.problem or tape.touched != first.touched or tape.places != wanted:
            self._stubs = False
            return
        pairs = zip(tape.places, _pieces_of(tape), strict=True)
        pieces: dict[Hashable, IntervalLevels] = {(root, place): piece for place, piece in pairs if not place.inside}
        if root in self._dying:
            same = all(self._pieces[key] == piece for key, piece in pieces.items())
            self._stubs = same and self._dying[root] == tape.died_bytes
        elif self._stubs:
            self._dying[root] = tape.died_bytes
            self._pieces |= pieces

    def _mixture(self, part: ModulePolicy, labels: StepPolicies) -> ModulePolicy | None:
        """Return a step that shows missing pieces of another step, and more; None if the other shows enough itself."""
        alike = range(len(labels.calls)) if self._first is None else self._first.alike
        missing = list(alike) if self._first is None else self._missing(labels)
        kinds: defaultdict[int, list[int]] = defaultdict(list)
        for call, kind in enumerate(alike):
            kinds[kind].append(call)
        in_runs = any(first <= call < past for first, past in labels.runs for call in missing)
        if not missing or len(labels.calls) < ALIKE * len(kinds) or in_runs:
            return None
        policies = dict(part.policies)
        for kind, calls in kinds.items():
            wanted = [labels.calls[call] for call in calls if call in missing]
            offered = ((policy, None) for policy in self.offers.get(self.trace.calls[calls[0]].class_key, ()))
            wanted += [label for label in offered if (kind, label) not in self._behind]
            labels_once = list(dict.fromkeys(wanted))
            to_and_fro = cycle([*labels_once, *reversed(labels_once)])  # so that each comes next to others
            for call, label in zip(calls, to_and_fro, strict=False):
                policies[self.trace.calls[call].name] = label[0]
        return replace(part, policies=policies, segments=())


def _last(outline: _Outline, pieces: Sequence[IntervalLevels]) -> dict[SharedKey, tuple[int, int]]:
    """By shared storage, the interval and the level of its last reference."""
    found: dict[Hashable, tuple[int, int]] = {}
    roles: list[dict[Hashable, SharedKey]] = [{role: key for key, role in of.items()} for of in outline.touched]
    for number, (place, piece) in enumerate(zip(outline.places, pieces, strict=True)):
        for name, level in piece.last_references:
            key = roles[place.call].get(name) if place.inside else name
            if key is not None:
                found[key] = number, level
    return found  # type: ignore[return-value]


def _pieces_of(tape: IntervalTape) -> Iterator[IntervalLevels]:
    ends = [*(s.live_bytes for s in tape.intervals[1:]), tape.end_bytes]
    stops = [*(s.start for s in tape.intervals[1:]), len(tape.levels)]
    for interval, end, stop in zip(tape.intervals, ends, stops, strict=True):
        levels = [level - interval.live_bytes for level in tape.levels[interval.start : stop]]
        left = end - interval.live_bytes
        due = [(nbytes, at) for born, nbytes, at in interval.freed if _freed_around(tape, born, interval)]
        for nbytes, at in (*interval.dead.values(), *due):
            levels[at:] = [level + nbytes for level in levels[at:]]
            left += nbytes
        goes: list[tuple[Hashable, int]] = list(interval.last_references.items())
        if interval.place.inside:
            roles = tape.touched[interval.place.call]
            if any(key not in roles for key in interval.last_references):
                raise _CannotBeComposed("a block let go of a tensor that it was neither given nor returned")
            goes = [(roles[key], at) for key, at in interval.last_references.items()]
        yield IntervalLevels(tuple(levels), left, tuple(sorted(goes)))


def _alike(classes: Sequence[str], places: Iterable[Place], pieces: Iterable[IntervalLevels]) -> tuple[int, ...]:
    """By call, equal numbers for blocks of one class with equal pieces."""
    seen: list[list[Hashable]] = [[name] for name in classes]
    for place, piece in zip(places, pieces, strict=True):
        if place.inside:
            seen[place.call].append((place.phase, place.again, piece))
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(tuple(one), call) for call, one in enumerate(seen))


def _freed_storages(tape: IntervalTape) -> tuple[FreedBytes, list[list[tuple[Place, int, int]]]]:
    """Storages that depend on more than one call, or on a call and the part around it; and by call, storages that it
    leaves: where they are freed around the blocks, before which level there, and their bytes.
    """
    found: defaultdict[tuple[Place | None, Place], Counter[int]] = defaultdict(Counter)
    behind: list[list[tuple[Place, int, int]]] = [[] for _ in tape.names]
    for interval in tape.intervals:
        died = interval.place
        for born, nbytes, level in interval.freed:
            made = None if born == NOBODY else tape.intervals[born].place
            if made is not None and _freed_around(tape, born, interval):
                behind[made.call].append((died, level, nbytes))
            elif made is None or made.inside is not died.inside or (made.inside and made.call != died.call):
                found[made, died][nbytes] += 1
    return found, [sorted(dues) for dues in behind]


def _freed_around(tape: IntervalTape, born: int, died: StepInterval) -> bool:
    """Whether a call's forward has left this for the part around the blocks to free, later."""
    if born == NOBODY or died.place.inside:
        return False
    made = tape.intervals[born].place
    if not made.inside or made.phase != "forward":
        return False
    return died.place != Place("forward", made.call, False) or made.call == len(tape.names) - 1
