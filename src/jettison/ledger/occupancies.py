"""What a device of a pipeline holds as it works: the states of its order that are worth pricing.

Orders are those of `memory.schedule`; chunks and stages are as there. What a device holds depends on its own order
alone, not on when each step runs, so no clock is needed. Left out: what is held beside the activations of micro-batches
in flight, such as receive buffers, or an output kept after it was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from math import lcm
from operator import add, ge, itemgetter
from typing import Final, NamedTuple

from jettison.errors import UsageError
from jettison.memory.schedule import ScheduledPass, Work, check_sizes, order, window
from jettison.spec.layout import Schedule


class Weights(StrEnum):
    """Of chunks whose weights a forward shards again and a backward leaves whole."""

    RESIDENT = "resident"  # none does
    GATHERED = "gathered"  # by each pass that finds shards
    FETCHED = "fetched"  # of the next `ACTIVE` chunks at work, before they are; of others they are sharded


ACTIVE: Final = 3
"""``torch/distributed/pipelining/schedules.py``, ``_add_unshard_reshard``: ``max_active_stages``."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a device holds as ``step`` starts, in micro-batches for each chunk.

    Args:
        forward: through their forward and not yet through their backward, the one that a backward is about included.
        weight: through the first half of a split backward and not yet through the second.
        step: what is about to run; None where the counts are not of one moment.
        passed: outputs, of what is not alive any more, and gradients of inputs that have been sent, where they count.
        learned: by chunk, one where a backward, or a weight step of a split one, has run, so that gradients are there;
            of forwards that count apart their own chunk's. Empty where it does not matter.
        reduced: by chunk, one where the last backward of the step has run, and what it leaves has been reduced. Empty
            where it does not matter.
        whole: by chunk, one where its weights are whole, if passes change that.
    """

    forward: tuple[int, ...]
    weight: tuple[int, ...]
    step: ScheduledPass | None = None
    passed: int = 0
    learned: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Micro-batch chunks that are alive, whole or half."""
        return sum(self.forward) + sum(self.weight)


Sending = tuple[int, ...]
"""By chunk, what it sends for each micro-batch: one if its output, and one more if the gradient of its input."""


def occupancies(
    order: Sequence[ScheduledPass],
    chunks: int = 0,
    sending: Sending = (),
    learning: int = 0,
    reducing: bool = False,
    weights: Weights = Weights.RESIDENT,
) -> tuple[Occupancy, ...]:
    """The states worth pricing while a device works through ``order``, as they come.

    Take the state just before each step, priced at so many bytes for each chunk, whole or half, and for each chunk that
    has learned, plus whatever that kind of work on that chunk adds, which may differ where the chunk has learned. The
    dearest of the states returned is the dearest of all, at any prices of zero or more: left out are repetitions,
    states that hold no more of anything than another before the same work on the same chunk, and states halfway between
    two others.

    Args:
        chunks: of the device; left out, as many as there are in ``order``.
        sending: whose transfers count, as a price of their own; left out, none.
        learning: chunks that learn, where that matters: those from there on are the first ones' again.
        reducing: each of them is reduced behind its last backward, and holds less from there on.

    Raises:
        UsageError: ``order`` has no backward, so that there is no such state.
    """
    groups: defaultdict[tuple[Work, int, int], dict[tuple[int, ...], tuple[int, Occupancy]]] = defaultdict(dict)
    backwards = 0
    count = chunks or 1 + max((step.chunk for step in order), default=0)
    for number, state in enumerate(_replay(order, count, sending, learning, reducing, weights)):
        step = state.step
        assert step is not None
        adds = learning and state.learned[step.chunk % learning]
        backwards += step.work is not Work.FORWARD
        counts = (*state.forward, *state.weight, state.passed, *state.learned, *(1 - each for each in state.reduced))
        counts = (*counts, *state.whole)
        whole = state.whole[step.chunk % learning] if state.whole else 0
        kind = step.work, step.chunk, whole + 2 * (0 if step.work is Work.FORWARD else adds)
        groups[kind].setdefault(counts, (number, state))
    if not backwards:
        raise UsageError(f"got an order of {len(order)} steps without a backward; expected one that `order` gives")
    kept = [states[counts] for states in groups.values() for counts in _maximal(_ends(list(states)))]
    return tuple(state for _, state in sorted(kept, key=itemgetter(0)))


def reductions(
    order: Sequence[ScheduledPass],
    chunks: int,
    sending: Sending = (),
    learning: int = 1,
    weights: Weights = Weights.RESIDENT,
) -> tuple[Occupancy, ...]:
    """The state behind each chunk's last backward, before it is reduced; ``step`` is that backward.

    As ``_add_reduce_grad`` of ``torch/distributed/pipelining/schedules.py`` puts REDUCE_GRAD into an order.
    """
    after = list(_replay([*order, order[-1]], chunks, sending, learning, False, weights))[1:]
    found: list[Occupancy] = []
    reduced = [0] * learning
    for number in sorted(_last(order, learning).values()):
        whole = tuple(has and not gone for has, gone in zip(after[number].whole, reduced, strict=False))
        found.append(replace(after[number], step=order[number], reduced=tuple(reduced), whole=tuple(map(int, whole))))
        reduced[order[number].chunk % learning] = 1
    return tuple(found)


def _last(order: Sequence[ScheduledPass], learning: int) -> dict[int, int]:
    """By chunk, the number of the last step that makes gradients of weights."""
    split = any(step.work is Work.WEIGHT for step in order)
    work = Work.WEIGHT if split else Work.BACKWARD
    return {step.chunk % learning: number for number, step in enumerate(order) if step.work is work}


def _replay(
    order: Sequence[ScheduledPass], chunks: int, sending: Sending, learning: int, reducing: bool, weights: Weights
) -> Iterator[Occupancy]:
    """The state before each step."""
    split = any(step.work is Work.WEIGHT for step in order)
    forward, weight, passed, learned = [0] * chunks, [0] * chunks, 0, [0] * learning
    ends = _last(order, learning) if reducing else {}
    whole = [0] * (0 if weights is Weights.RESIDENT else learning)
    active: set[int] = set()
    for number, step in enumerate(order):
        reduced = tuple(int(ends[chunk] < number) for chunk in range(learning)) if reducing else ()
        if weights is Weights.FETCHED:
            coming = _coming(order, number, learning)
            for chunk in active ^ coming:
                whole[chunk] = int(chunk in coming)
            active = coming
        yield Occupancy(tuple(forward), tuple(weight), step, passed, tuple(learned), reduced, tuple(whole))
        if whole:
            own = step.chunk % learning
            whole[own] = int(step.work is not Work.FORWARD and ends.get(own) != number)
        if step.work is Work.FORWARD:
            forward[step.chunk] += 1
            continue
        if sending and not (split and step.work is Work.BACKWARD):
            passed += sending[step.chunk % len(sending)]
        if learning and not (split and step.work is Work.BACKWARD):
            learned[step.chunk % learning] = 1
        if step.work is Work.WEIGHT:
            weight[step.chunk] -= 1
            continue
        forward[step.chunk] -= 1
        weight[step.chunk] += split


def _coming(order: Sequence[ScheduledPass], number: int, learning: int) -> set[int]:
    """The next `ACTIVE` chunks at work, from a step on."""
    found: set[int] = set()
    for step in order[number:]:
        found.add(step.chunk % learning)
        if len(found) == min(ACTIVE, learning):
            break
    return found


def _ends(states: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without those halfway between the one before and the one after, so that of an even series the ends are left."""
    inner = zip(states, states[1:], states[2:], strict=False)
    return states[:1] + [b for a, b, c in inner if tuple(map(add, a, c)) != tuple(map(add, b, b))] + states[1:][-1:]


def _maximal(states: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those whose counts no other's reach or exceed throughout, the fullest first."""
    kept: list[tuple[int, ...]] = []
    for counts in sorted(states, key=sum, reverse=True):  # what exceeds a state comes before it
        if not any(all(map(ge, other, counts)) for other in kept):
            kept.append(counts)
    return kept


class _Marks(NamedTuple):
    """What of a state matters, and which states."""

    learning: bool
    reducing: bool
    behind: bool
    weights: Weights


def stage_occupancies(
    schedule: Schedule,
    *,
    stage: int,
    stages: int,
    micro_batches: int,
    virtual_stages: int = 1,
    group: int = 0,
    whole: int = 0,
    sending: Sending = (),
    learning: bool = False,
    reducing: bool = False,
    behind: bool = False,
    weights: Weights = Weights.RESIDENT,
) -> tuple[Occupancy, ...]:
    """The `occupancies` of one device, without replaying thousands of micro-batches.

    Warm-up takes at most (v + 1) p - 2 forwards; from there the order repeats itself every v p pairs, p micro-batches,
    until the forwards run out. Within 3 p micro-batches a full period follows the warm-up, so more show nothing new.
    With groups of another size that is p here, and what is left for the last group is replayed as well.

    Args:
        whole: where above 0, forwards that keep everything, so many of each `window`, count as those of chunks of their
            own: chunk c of them is chunk v + c. Which they are repeats itself with the order and with the window.
        sending: see `occupancies`; of micro-batches that are not replayed all has passed.
        learning: it matters which chunks have learned.
        reducing: and which have been reduced.
        behind: the states are those of `reductions`, where both matter.
        weights: what passes do to chunks' weights; where they do something, it matters which chunks have learned.

    Raises:
        UsageError: see `order`.
    """
    marks = _Marks(learning or behind, reducing or behind, behind, weights)
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages, "group": group}
    check_sizes(schedule, stage=stage, **sizes)
    turn = group or stages
    left = micro_batches % turn if group else 0
    if schedule is Schedule.GPIPE:  # the same on every stage, and it holds all that there is
        stage, replayed = 0, micro_batches
    else:
        replayed = min(micro_batches, 3 * turn + left)
    if not whole:
        found = _order_occupancies(schedule, stage, stages, replayed, virtual_stages, group, 1, 0, sending, marks)
        return _later(found, (micro_batches - replayed) * sum(sending))
    size = window(schedule, stage=stage, **sizes)
    if schedule is not Schedule.GPIPE:
        periods = lcm(size, turn * virtual_stages) // (turn * virtual_stages)
        replayed = min(micro_batches, (3 + periods) * turn + left)
    kept = min(whole, size)
    found = _order_occupancies(schedule, stage, stages, replayed, virtual_stages, group, size, kept, sending, marks)
    return _later(found, (micro_batches - replayed) * sum(sending))


def _later(found: tuple[Occupancy, ...], passed: int) -> tuple[Occupancy, ...]:
    return tuple(replace(each, passed=each.passed + passed) for each in found) if passed else found


@cache
def _order_occupancies(
    schedule: Schedule,
    stage: int,
    stages: int,
    micro_batches: int,
    virtual_stages: int,
    group: int,
    size: int,
    whole: int,
    sending: Sending,
    marks: _Marks,
) -> tuple[Occupancy, ...]:
    learning, reducing, behind, weights = marks
    steps = order(
        schedule, stage=stage, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages, group=group
    )
    learns = virtual_stages if learning else 0
    chunks = 2 * virtual_stages if whole else virtual_stages
    if whole:
        steps = tuple(apart(steps, virtual_stages, size, whole))
    if behind:
        return reductions(steps, chunks, sending, learns, weights)
    return occupancies(steps, chunks, sending, learns, reducing, weights)


def apart(steps: Sequence[ScheduledPass], chunks: int, size: int, whole: int) -> Iterator[ScheduledPass]:
    """With chunks of their own for forwards that keep everything, and for their backwards.

    Args:
        chunks: of the device, without these.
        size: of a `window`; ``whole`` of each keep everything.
    """
    kept: set[tuple[int, int]] = set()
    forwards = 0
    for step in steps:
        key = step.micro_batch, step.chunk
        if step.work is Work.FORWARD:
            if forwards % size < whole:
                kept.add(key)
            forwards += 1
        yield ScheduledPass(step.work, step.micro_batch, step.chunk + (chunks if key in kept else 0))


def in_flight(order: Sequence[ScheduledPass]) -> Occupancy:
    """The most that each chunk ever holds, whole and half: peaks that need not fall on one moment, so ``step`` is None.

    Raises:
        UsageError: ``order`` has no backward.
    """
    states = occupancies(order)
    return Occupancy(
        tuple(max(counts) for counts in zip(*(state.forward for state in states), strict=True)),
        tuple(max(counts) for counts in zip(*(state.weight for state in states), strict=True)),
    )


def peak_in_flight(order: Sequence[ScheduledPass]) -> int:
    """The most micro-batch chunks that are alive at one moment, whole or half.

    Raises:
        UsageError: ``order`` has no backward.
    """
    return max(state.total for state in occupancies(order))
