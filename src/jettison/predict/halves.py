"""What units of a pipeline's chunk hold between the halves of a split backward, and how high each half rises.

See NOTE [ Two halves ] in `formula.split_backward`. The gradient of a chunk's input, which is sent, is also the input
buffer's own (``inp.grad``), until the next step begins (``stage.py``, ``clear_runtime_states``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from jettison.formula.region import EMBEDDING, HEAD, Region
from jettison.formula.split_backward import InputHalf, checkpointed_weight_half, input_half, read_by_groups, weight_half
from jettison.memory.unit import Halves, Unit, WeightStep
from jettison.predict.passes import named_passes
from jettison.predict.stage_buffers import input_kept, logits_returned, stream_bytes
from jettison.predict.stages import FULL, NONE, RegionGroup, StageRegion, kept_by
from jettison.spec.precision import GradientRule
from jettison.spec.run import Run


def splits(run: Run) -> bool:
    """Is backward torch's, in two halves?"""
    layout = run.layout
    return layout.stage_buffers and layout.pp > 1 and layout.schedule.splits


def by_torch(run: Run, part: StageRegion) -> bool:
    """Does torch's checkpoint, of a layer or of several, compute a region again between two halves of a backward?"""
    return part.chosen is None and part.policy == FULL and splits(run)


def left_bytes(run: Run, index: int) -> int:
    """Gradients of a stage's inputs that are there between steps."""
    if not splits(run):
        return 0
    both = zip(run.layout.places(index), run.layout.neighbours(index), strict=True)
    inputs = sum(place > 0 and not before for place, (before, _) in both)
    return inputs * run.micro_batches * stream_bytes(run)


def with_halves(
    run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], *, handed_back: bool = False
) -> Iterator[Unit]:
    """Units of a chunk, whose first and last are alone; the model's first chunk has no first half.

    Args:
        handed_back: the chunk before it is on the same device, and has the gradient of this one's input for a buffer.
    """
    if groups[0].part.name == EMBEDDING:
        yield from made
        return
    parts = [(name, group.part) for group in groups for name in group.names]
    at = 0
    for number, unit in enumerate(made):
        length = _length(parts[at:], unit.names[0])
        own = [part for _, part in parts[at : at + length]]
        at += length * len(unit.names)
        halves = _halves(run, own, first=number == 0, last=number == len(made) - 1)
        if handed_back and number == 0:
            halves = replace(halves, waiting=halves.waiting - stream_bytes(run))
        yield replace(unit, halves=halves)


def _length(parts: Sequence[tuple[str, StageRegion]], name: str) -> int:
    """Regions of a unit: a segment is called "FIRST to LAST"."""
    last = name.rpartition(" to ")[2]
    return 1 + next(number for number, (each, _) in enumerate(parts) if each == last)


def _halves(run: Run, own: Sequence[StageRegion], *, first: bool, last: bool) -> Halves:
    """Of one unit.

    Args:
        first, last: of its chunk. The first one's input is a buffer, and its gradient stays; the gradient of the last
            one's output is a buffer.
    """
    torchs = all(by_torch(run, part) for part in own)
    regions, kept, rule = tuple(part.region for part in own), own[0].kept, run.gradient_rule
    halves = _segment(regions, rule, torchs) if len(own) > 1 else _alone(regions[0], kept, rule, torchs)
    head, stream = own[-1].name == HEAD, stream_bytes(run)
    arriving = stream if last and not head else 0
    given = input_kept(own[0]) if first else 0
    return Halves(
        waiting=halves.gradients + (stream if first else 0) - (halves.incoming if arriving else 0),
        input_peak=halves.peak - arriving,
        detached=halves.detached + (logits_returned(own[-1]) if head else 0) if last else 0,
        steps=_steps(regions, kept, rule, torchs, last, given),
    )


@lru_cache(maxsize=4096)
def _alone(region: Region, kept: frozenset[int], rule: GradientRule, torchs: bool) -> InputHalf:
    """A region under its policy; what is computed again and stays is among ``gradients``."""
    stays = frozenset[int]() if torchs else read_by_groups(region) - kept
    half = input_half(region, kept, rule, stays=stays)
    return replace(half, gradients=half.gradients + region.program.kept_bytes(stays))


@lru_cache(maxsize=4096)
def _segment(regions: tuple[Region, ...], rule: GradientRule, torchs: bool) -> InputHalf:
    """Several regions behind one input: all of them are computed again, and differentiated from the last to the first.

    See `timeline_units._segment_backward`.
    """
    plain = [named_passes(region, NONE, rule, False) for region in regions]
    incoming, level, peak = plain[-1].output, 0, 0
    shared = regions[0].program.kept_bytes(kept_by(regions[0], FULL) & kept_by(regions[0], NONE))
    level -= shared
    for p in plain:
        peak = max(peak, incoming + level + p.forward_peak)
        level += p.resident
    there = 0
    for place in reversed(range(len(regions))):
        region, p = regions[place], plain[place]
        stays = (
            frozenset[int]() if torchs else read_by_groups(region) - (frozenset() if place else kept_by(region, FULL))
        )
        half = input_half(region, kept_by(region, NONE), rule, stays=stays, lets_go=True)
        peak = max(peak, level + there + half.peak)
        level -= p.resident
        there += half.gradients + region.program.kept_bytes(stays)
    end = input_half(regions[-1], kept_by(regions[-1], NONE), rule)
    return InputHalf(peak=peak, gradients=there, incoming=end.incoming, detached=0)


@lru_cache(maxsize=4096)
def _steps(
    regions: tuple[Region, ...], kept: frozenset[int], rule: GradientRule, torchs: bool, last: bool, given: int
) -> tuple[WeightStep, ...]:
    if torchs:
        return checkpointed_weight_half(regions, rule, last=last)
    first = weight_half(regions[0], kept, rule, last=last and len(regions) == 1, given=given)
    more = (weight_half(region, frozenset(), rule) for region in regions[1:])
    return first + tuple(step for steps in more for step in steps)
