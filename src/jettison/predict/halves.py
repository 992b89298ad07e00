"""What units of a pipeline's chunk hold between the halves of a split backward, and how high each half rises.

See NOTE [ Two halves ] in `formula.split_backward`. The gradient of a chunk's input, which is sent, is also the input
buffer's own (``inp.grad``), until the next step begins (``stage.py``, ``clear_runtime_states``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from jettison.formula.region import EMBEDDING, HEAD, Region
from jettison.formula.split_backward import InputHalf, checkpointed_weight_half, input_half, weight_half
from jettison.ledger.halves import Halves, WeightStep
from jettison.ledger.timeline import Unit
from jettison.predict.stage_buffers import input_kept, logits_returned, stream_bytes
from jettison.predict.stages import FULL, NONE, RegionGroup, StageRegion
from jettison.spec.layout import Schedule
from jettison.spec.precision import GradientRule
from jettison.spec.run import Run


def splits(run: Run) -> bool:
    """Is backward torch's, in two halves?"""
    layout = run.layout
    return layout.stage_buffers and layout.pp > 1 and layout.schedule is Schedule.ZERO_BUBBLE


def left_bytes(run: Run, index: int) -> int:
    """Gradients of a stage's inputs that are there between steps."""
    if not splits(run):
        return 0
    inputs = sum(place > 0 for place in range(index, run.layout.pp * run.layout.virtual_stages, run.layout.pp))
    return inputs * run.micro_batches * stream_bytes(run)


def with_halves(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Iterator[Unit]:
    """Units of a chunk, whose first and last are alone; the model's first chunk has no first half."""
    if groups[0].part.name == EMBEDDING:
        yield from made
        return
    parts = [(name, group.part) for group in groups for name in group.names]
    at = 0
    for number, unit in enumerate(made):
        length = _length(parts[at:], unit.names[0])
        own = [part for _, part in parts[at : at + length]]
        at += length * len(unit.names)
        yield replace(unit, halves=_halves(run, own, first=number == 0, last=number == len(made) - 1))


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
    rule, head = run.gradient_rule, own[-1].name == HEAD
    whole = len(own) > 1 or own[0].policy == FULL
    halves = _replayed(own[-1].region, own[-1].kept, rule, whole) if len(own) == 1 else None
    assert halves is not None
    arriving = stream_bytes(run) if last and not head else 0
    returned = (logits_returned(own[-1]) if head else stream_bytes(run)) if last else 0
    gradients = halves.gradients + halves.computed + (stream_bytes(run) if first else 0)
    return Halves(
        gradients=gradients - (halves.incoming if arriving else 0),
        input_peak=halves.peak - arriving,
        detached=(halves.detached + (returned if head else 0)) if last else 0,
        steps=_steps(tuple(part.region for part in own), own[0].kept, rule, whole, input_kept(own[0]) if first else 0),
    )


@lru_cache(maxsize=4096)
def _replayed(region: Region, kept: frozenset[int], rule: GradientRule, again: bool) -> InputHalf:
    return input_half(region, kept, rule, again=again)


@lru_cache(maxsize=4096)
def _steps(
    regions: tuple[Region, ...], kept: frozenset[int], rule: GradientRule, again: bool, given: int
) -> tuple[WeightStep, ...]:
    if again:
        return checkpointed_weight_half(regions, rule)
    return weight_half(regions[0], kept, rule, given=given)
