"""The height of a stage's worst moment, without the moment itself: for thousands of candidates.

`ledger.timeline.peak` walks through every unit for every state of the pipeline, and can say where the peak is. Its
levels are sums of what other micro-batches hold, which a state decides, and of how far a pass through one chunk rises
above that, which it does not: so each chunk is walked through once. Tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from jettison.ledger.timeline import StageLoad, Unit
from jettison.predict.forecast import Forecast
from jettison.spec.run import Gradients


def peak_bytes(found: Forecast) -> int:
    """Of the worst stage from the second step on: `Forecast.peak_bytes`."""
    return max(stage_peak_bytes(stage.load) for stage in found.stages)


def stage_peak_bytes(load: StageLoad) -> int:
    """See NOTE [ What is there when ] in `ledger.timeline`."""
    upfront = load.gradients is Gradients.UPFRONT
    everything = load.gradient_bytes
    always = load.fixed + load.state
    base = always + (everything if upfront else 0)
    held = [load.held(chunk) for chunk in range(len(load.chunks))]
    forward = [_forward_rise(chunk) for chunk in load.chunks]
    fresh = [_backward_rise(chunk, fresh=not upfront) for chunk in load.chunks]
    adding = [_backward_rise(chunk, fresh=False) for chunk in load.chunks]
    highest = max(base + max(forward), always + everything + load.optimizer_transient)
    for occupancy in load.occupancies:
        alive = [f + w for f, w in zip(occupancy.forward, occupancy.weight, strict=True)]
        level = base + sum(n * nbytes for n, nbytes in zip(alive, held, strict=True)) + sum(alive) * load.sent
        at_work = 0 if occupancy.step is None else occupancy.step.chunk
        entering = [rise - nbytes for rise, nbytes, n in zip(forward, held, occupancy.forward, strict=True) if n]
        highest = max(highest, level + max([fresh[at_work], *entering]))
        if load.micro_batches > 1 and not upfront:
            highest = max(highest, level + everything + max([adding[at_work], *entering]))
    return highest


def _forward_rise(chunk: Sequence[Unit]) -> int:
    """How far a forward rises above what is there before it."""
    highest = level = 0
    for unit in chunk:
        level += len(unit.names) * unit.resident
        highest = max(highest, level - unit.resident + unit.forward_peak)
    return highest


def _backward_rise(chunk: Sequence[Unit], *, fresh: bool) -> int:
    """How far a backward rises above what is there before it; negative where it only falls."""
    level, highest = 0, -sum(len(unit.names) * unit.resident for unit in chunk)
    for unit in reversed(chunk):
        change = (unit.gradient if fresh else unit.pending) - unit.resident
        rise = unit.backward_peak if fresh else unit.adding_peak
        highest = max(highest, level + rise + max(0, (len(unit.names) - 1) * change))
        level += len(unit.names) * change
    return highest
