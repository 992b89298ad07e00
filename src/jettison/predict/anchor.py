"""Anchors: what one measured run says about further runs of the same stack.

NOTE [ Anchored ]
A measurement of a run corrects answers about others by as few physical quantities as explain it, each with a prior:

- **Allocated** bytes are exact sums, so nothing scales them. What is left over is explained by copies of one buffer
  that a framework may hold beside (logits, parameters, gradients, the residual stream), where a whole number of them
  comes within `MATCH` of it; these are added to other runs. What nothing explains is said, and not added: on published
  runs that would make others worse.
- **Reserved** over allocated is what the caching allocator splits off. It grows about as the square root of what is
  allocated (`predict.ranges`), so its unit is GiB for each square root of a GiB.
- **Device** over reserved is the context, the communicators and what libraries allocate themselves: what is left of it
  beside the allowance for the layout is a constant. Where reserved was not measured, the allowance is taken for it.
  Neither is less than nothing: where less was measured than tensors are predicted to take, that is unexplained.
- **Step time**: seconds of kernels, of transfers and of the host each take a factor ``f``; of all that explain
  the measured step the most probable ones are taken, ``min sum (x / sigma)^2`` with the spreads of `SIGMAS`. What
  overlaps what moves with them, so that is done in rounds; then all are scaled so that the step is the measured one.
  A run whose time is nearly all kernels says nothing about its network, and its network keeps its prior.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose, sqrt
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.units import GIB, format_bytes
from jettison.predict.allowance import fixed_allowance
from jettison.predict.extra_buffers import buffers, extra_bytes
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.ranges import AGREES, Measure, lineage
from jettison.predict.time import Estimate, estimate
from jettison.spec.anchor import MOST_COPIES, MeasuredRun, RunAnchor
from jettison.spec.hardware import Hardware, slower
from jettison.spec.run import Run

MATCH: Final = 0.1
"""Share of the unexplained bytes by which copies of a buffer may be off."""
SIGMAS: Final = {"compute": 0.15, "communication": 0.35, "host": 0.5}
"""Spreads of measured over predicted seconds, a priori."""
LEAST_FACTOR: Final = 0.3
ROUNDS: Final = 6
"""Iterations of the fit: overlap changes with the factors."""


def fit_anchor(run: Run, measured: MeasuredRun, *, hardware: Hardware | None, stack: str, command: str) -> RunAnchor:
    """The smallest set of quantities that explains a measured run.

    Args:
        hardware: which it ran on; needed for a step.

    Raises:
        UsageError: a step without hardware, or figures that the run cannot have.
    """
    found = forecast(run)
    largest = max(filter(None, (measured.allocated, measured.reserved, measured.device)), default=0)
    if hardware is not None and largest > hardware.memory_bytes:
        raise UsageError(
            f"got {format_bytes(largest)} measured on {hardware.name}, which has "
            f"{format_bytes(hardware.memory_bytes)}; expected figures of one device"
        )
    anchor = RunAnchor(
        stack=stack,
        kind=lineage(Measure.ALLOCATED, run)[0],
        gpu=hardware.name if hardware else "",
        run=command,
        measured=measured,
        **_explained(found, measured),
    )
    if measured.reserved is not None or measured.device is not None:
        anchor = replace(anchor, **_beside(found, measured, anchor))
    if measured.step is not None:
        if hardware is None:
            raise UsageError("got a step without the device that it ran on; give --gpu")
        anchor = replace(anchor, **_factors(run, hardware, measured.step))
    return anchor


def fragment_bytes(anchor: RunAnchor, allocated: int) -> int:
    """Bytes that the allocator has reserved beside those that are allocated; 0 where that was not measured."""
    return round((anchor.fragments or 0.0) * sqrt(allocated * GIB))


# allocated ------------------------------------------------------------------------------------------------------------


def _explained(found: Forecast, measured: MeasuredRun) -> dict[str, Any]:
    if measured.allocated is None:
        return {}
    left = measured.allocated - found.peak_bytes
    if abs(left) > AGREES * found.peak_bytes:
        fits = [
            (n, abs(left - sign * n * size), name, sign)
            for name, size in buffers(found)
            for n in range(1, MOST_COPIES + 1)
            for sign in (1, -1)
            if size and abs(left - sign * n * size) <= MATCH * abs(left)
        ]
        if fits:
            n, _, name, sign = min(fits, key=lambda one: one[:2])
            return {"copies": sign * n, "buffer": name}
    return {"unexplained": left}


# reserved and device --------------------------------------------------------------------------------------------------


def _beside(found: Forecast, measured: MeasuredRun, anchor: RunAnchor) -> dict[str, Any]:
    """Fragments and context out of what is reserved and what the device has, beside what is allocated."""
    allocated = measured.allocated
    if allocated is None:
        allocated = found.peak_bytes + extra_bytes(anchor, found.run)
    root = sqrt(allocated * GIB)
    fixed = fixed_allowance(found.run.layout, found.run.kernels.device).expected
    reserved, device = measured.reserved, measured.device
    there: dict[str, Any] = {}
    if device is not None:
        if reserved is None:
            reserved = min(device, max(allocated, device - fixed))
        there["context"] = device - reserved - fixed
    assert reserved is not None
    if measured.allocated is None and reserved < allocated:
        there["unexplained"] = reserved - allocated
    return {**there, "fragments": max(0, reserved - allocated) / root}


# step time ------------------------------------------------------------------------------------------------------------


def _seconds(found: Estimate) -> dict[str, float]:
    """Seconds of a step by what a factor of `SIGMAS` would move; bubbles go with what stages do."""
    parts = found.breakdown
    return {
        "compute": parts.compute + parts.recompute + parts.bubble,
        "communication": parts.communication,
        "host": parts.other,
    }


def _factors(run: Run, hardware: Hardware, step: float) -> dict[str, Any]:
    """The most probable factors with which the estimate is the measured step: few rounds, since overlap moves."""
    factors = dict.fromkeys(SIGMAS, 1.0)
    for _ in range(ROUNDS):
        seconds = _seconds(estimate(run, slower(hardware, **factors)))
        apart = {name: value / factors[name] for name, value in seconds.items()}
        factors = _most_probable(apart, step)
    for _ in range(ROUNDS):
        took = estimate(run, slower(hardware, **factors)).step_seconds
        if isclose(took, step, rel_tol=1e-12):
            break
        factors = {name: factor * step / took for name, factor in factors.items()}
    return factors


def _most_probable(seconds: Mapping[str, float], step: float) -> dict[str, float]:
    """Factors of least ``sum ((f - 1) / sigma)^2`` with which the seconds add up to a step, in closed form.

    Where that would make a part nearly vanish, all take the same factor.
    """
    total = sum(seconds.values())
    weights = {name: SIGMAS[name] ** 2 * value for name, value in seconds.items()}
    price = (step - total) / sum(weights[name] * value for name, value in seconds.items())
    found = {name: 1 + price * weight for name, weight in weights.items()}
    return found if min(found.values()) > LEAST_FACTOR else dict.fromkeys(seconds, step / total)
