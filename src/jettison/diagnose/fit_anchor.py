"""Anchors: corrections of predictions for a software stack, fitted to one measured run, and what its files say of it.

NOTE [ Anchored ]
A measured run corrects predictions of others by as few physical quantities as explain it, each with a prior:

- **Allocated** bytes are exact sums, so they are not scaled. A difference is explained by additional copies of one
  buffer (logits, parameters, gradients, the residual stream), if an integer number of them is within `MATCH` of it;
  these are added to other runs. Unexplained bytes are reported and not added: that would increase errors.
- **Reserved** minus allocated is fragmentation of the caching allocator. It grows about as the square root of allocated
  bytes (`predict.ranges`), so its unit is GiB per square root of GiB.
- **Device** minus reserved is the context, the communicators and allocations of libraries: its excess over the
  layout's allowance is a constant. If reserved was not measured, the allowance replaces this difference. Neither is
  negative: if less was measured than tensors are predicted to take, the difference is unexplained.
- **Step time**: seconds of kernels, of communication and of the host each have a factor ``f``. Of all factors that
  explain the measured step the most probable ones count, ``min sum (x / sigma)^2`` with the spreads of `SIGMAS`.
  Overlap depends on the factors, so the fit iterates; then all are scaled to match the measured step. A run of kernels
  only carries no information about its network, whose factor stays at its prior.

NOTE [ Lines of logs ]
Lines of logs are the frameworks' data: ``[logs]`` of their ``defaults.toml`` has patterns whose groups name what they
find and in which unit. Groups of one match with a number at the end (``device_GiB_2``) are added to the one without; an
alternative without groups skips lines. ``process_MiB`` counts before the device's. ``mean_s`` is a mean over the
``steps_done`` since the start, ``run_s`` a duration of ``run_steps``. ``words``: a log without any of these has no such
line, which is quicker.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose, sqrt
from pathlib import Path
from statistics import median
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import read_bytes
from jettison.core.units import GIB, MIB, format_bytes
from jettison.diagnose.log import MOST_READ_BYTES, decoded
from jettison.diagnose.profile_file import is_trace, read_profile
from jettison.diagnose.snapshot import is_snapshot, read_snapshot
from jettison.diagnose.step_profile import profile_steps
from jettison.predict.forecast import Forecast, buffers, extra_bytes, forecast
from jettison.predict.ranges import AGREES, Measure, lineage
from jettison.predict.time import estimate
from jettison.spec.anchor import MEASURED_WORDS, MOST_COPIES, MeasuredRun, RunAnchor
from jettison.spec.device_allowance import fixed_allowance
from jettison.spec.frameworks import named
from jettison.spec.hardware import Hardware, slower
from jettison.spec.run import Run

MATCH: Final = 0.1
"""Tolerance of copies of a buffer, as a share of the difference that they explain."""
SIGMAS: Final = {"compute": 0.15, "communication": 0.35, "host": 0.5}
"""Prior standard deviations of measured over predicted seconds."""
LEAST_FACTOR: Final = 0.3
ROUNDS: Final = 6
"""Iterations of the fit: overlap changes with the factors."""


def fit_anchor(run: Run, measured: MeasuredRun, *, hardware: Hardware | None, stack: str, command: str) -> RunAnchor:
    """Fit the fewest quantities that explain a measured run. Raise `UsageError` for a step time without hardware, or
    figures that the run cannot have.

    Args:
        hardware: the device of the run; required with a step time.
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
        anchor = replace(anchor, **_reserved_and_device(found, measured, anchor))
    if measured.step is not None:
        if hardware is None:
            raise UsageError("got a step time without its device; give --gpu")
        anchor = replace(anchor, **_factors(run, hardware, measured.step))
    return anchor


def fragment_bytes(anchor: RunAnchor, allocated: int) -> int:
    """Reserved minus allocated bytes; 0 if not measured."""
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


def _reserved_and_device(found: Forecast, measured: MeasuredRun, anchor: RunAnchor) -> dict[str, Any]:
    """Fit fragments and context to reserved and device bytes."""
    allocated = measured.allocated
    if allocated is None:
        allocated = found.peak_bytes + extra_bytes(anchor, found.run)
    root = sqrt(allocated * GIB)
    fixed = fixed_allowance(found.run.layout, found.run.kernels.device, found.run.stack).expected
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


def _factors(run: Run, hardware: Hardware, step: float) -> dict[str, Any]:
    """Most probable factors whose estimate equals the measured step, iterated since overlap depends on them."""
    factors = dict.fromkeys(SIGMAS, 1.0)
    for _ in range(ROUNDS):
        parts = estimate(run, slower(hardware, **factors)).breakdown
        computed = parts.compute + parts.recompute + parts.bubble  # bubbles scale with compute
        seconds = {"compute": computed, "communication": parts.communication, "host": parts.other}
        factors = _most_probable({name: value / factors[name] for name, value in seconds.items()}, step)
    for _ in range(ROUNDS):
        took = estimate(run, slower(hardware, **factors)).step_seconds
        if isclose(took, step, rel_tol=1e-12):
            break
        factors = {name: factor * step / took for name, factor in factors.items()}
    return factors


def _most_probable(seconds: Mapping[str, float], step: float) -> dict[str, float]:
    """Factors with the least ``sum ((f - 1) / sigma)^2`` whose seconds sum to the step, in closed form.

    If one would be below `LEAST_FACTOR`, all are equal.
    """
    total = sum(seconds.values())
    weights = {name: SIGMAS[name] ** 2 * value for name, value in seconds.items()}
    price = (step - total) / sum(weights[name] * value for name, value in seconds.items())
    found = {name: 1 + price * weight for name, weight in weights.items()}
    return found if min(found.values()) > LEAST_FACTOR else dict.fromkeys(seconds, step / total)


# measured figures -----------------------------------------------------------------------------------------------------

WARMUP: Final = 2
"""Steps whose time is left out, where there are more."""
_BYTES: Final = {"GiB": GIB, "MiB": MIB, "GB": 10**9, "B": 1}
_TIMES: Final = {"K": 1e3, "M": 1e6}
_ROUNDED: Final = 0.001
"""Steps per second; a Trainer rounds rates to 0.001."""
_COARSE: Final = 0.01
"""Steps per second, below which rounding changes a rate by more than 5 %."""


def measured_in(path: Path, *, tokens_per_device: float, micro_batches: int, sequences: int) -> MeasuredRun:
    """Read what a file says of a run. Raise `UsageError` if it cannot be read, or says neither a peak nor a time.

    Args:
        path: a log, a CUDA memory snapshot, or a trace of ``torch.profiler``.
        tokens_per_device: of a step, tokens over devices: turns a throughput into seconds.
        micro_batches: of a step, where a log times each of them.
        sequences: of a step on all devices, where a log counts them a second.
    """
    if path.suffix in (".json", ".gz") and is_trace(path):
        profile = profile_steps(read_profile(path))
        allocated, reserved = profile.reserved_at_peak or (None, None)
        return MeasuredRun(allocated=allocated, reserved=reserved, step=profile.ns / profile.steps / 1e9)
    if is_snapshot(path):
        device = read_snapshot(path).busiest
        if not len(device.timeline.allocation):
            raise UsageError(f"{path} has no events: it shows one moment, and no peak of a step")
        peak = device.timeline.peak_bytes
        return MeasuredRun(allocated=peak, reserved=max(device.reserved_bytes, peak))
    text = decoded(read_bytes(path, most=MOST_READ_BYTES))
    found: dict[str, list[float]] = defaultdict(list)
    entries = [entry for entry in named("logs").values() if any(word in text for word in entry.get("words", ("",)))]
    for pattern in (pattern for entry in entries for pattern in entry["patterns"]):
        for match in re.finditer(pattern, text):
            figures: dict[str, float] = defaultdict(float)
            for name, value in match.groupdict().items():
                if value is not None:
                    figures[re.sub(r"_\d+$", "", name)] += _number(value)
            for name, figure in figures.items():
                found[name].append(figure)
    found["device_MiB"] = found["process_MiB"] or found["device_MiB"]
    peaks: dict[str, int] = {}
    for name in ("allocated", "reserved", "device"):
        sizes = [round(value * size) for unit, size in _BYTES.items() for value in found[f"{name}_{unit}"] if value]
        if sizes and max(sizes) >= max(peaks.values(), default=0):  # else rounded, or of another moment
            peaks[name] = max(sizes)
    steps = _after_warmup(found["steps_done"], found["mean_s"] or [1 / rate for rate in found["mean_per_s"] if rate])
    steps = steps or [ms / 1e3 for ms in found["step_ms"]] + found["step_s"]
    steps = steps or [
        s * micro_batches for s in (*(ms / 1e3 for ms in found["micro_batch_ms"]), *found["micro_batch_s"])
    ]
    steps = steps or [tokens_per_device / rate for rate in found["tokens_per_second"] if rate]
    steps = steps or [s / n for s, n in zip(found["run_s"], found["run_steps"], strict=True) if n]
    finer = [rate / sequences for rate in found["samples_per_second"] if rate and sequences]
    rates = [rate for rate in found["steps_per_second"] if rate]
    if finer and (not rates or abs(finer[-1] - rates[-1]) <= _ROUNDED):  # else the batches are not those of the run
        rates = finer
    steps = steps or [1 / rate for rate in rates if rate >= _COARSE]
    step = median(steps[min(WARMUP, len(steps) - 1) :]) if steps else None
    if not peaks and step is None:
        known = f"no line of a trainer that is known ({', '.join(named('logs'))})"
        has = f"no finer rate than {rates[-1]} steps a second, rounded to {_ROUNDED}" if rates else known
        raise UsageError(f"{path} has {has}; give the figures themselves: --measured {MEASURED_WORDS}")
    return MeasuredRun(**peaks, step=step)


def _after_warmup(done: Sequence[float], means: Sequence[float]) -> list[float]:
    """Seconds of a step after the warm-up; the last mean where a run was resumed or a log has several."""
    seconds = {n: n * mean for n, mean in reversed([*zip(done, means, strict=True)])}  # a last line says it again
    steps = sorted(seconds)[min(WARMUP, max(1, len(seconds) - 1)) - 1 :]
    if len(steps) < 2 or list(done) != sorted(done) or done[0] > max(1, done[1] - done[0]):
        return list(means[-1:])
    return [(seconds[steps[-1]] - seconds[steps[0]]) / (steps[-1] - steps[0])]


def _number(text: str) -> float:
    text = text.replace(",", "")
    return float(text[:-1]) * _TIMES[text[-1]] if text[-1] in _TIMES else float(text)
