"""Measured peaks and step time of a run, from its log, a memory snapshot or a trace.

Lines of logs are the frameworks' data: ``[logs]`` of their ``defaults.toml`` has patterns whose groups name what they
find and in which unit. Groups of one match with a number at the end (``device_GiB_2``) are added to the one without; an
alternative without groups skips lines. ``words``: a log without any of these has no such line, which is quicker.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.files import read_bytes
from jettison.core.units import GIB, MIB
from jettison.diagnose.log import MOST_READ_BYTES, decoded
from jettison.diagnose.profile_file import is_trace, read_profile
from jettison.diagnose.snapshot import is_snapshot, read_snapshot
from jettison.diagnose.step_profile import profile_steps
from jettison.spec.anchor import MEASURED_WORDS, MeasuredRun
from jettison.spec.frameworks import named

WARMUP: Final = 2
"""Steps whose time is left out, where there are more."""
_BYTES: Final = {"GiB": GIB, "MiB": MIB, "GB": 10**9}
_TIMES: Final = {"K": 1e3, "M": 1e6}
_ROUNDED: Final = 0.001
"""Steps per second; a Trainer rounds rates to 0.001."""


def measured_in(path: Path, *, tokens_per_device: float, micro_batches: int, sequences: int = 0) -> MeasuredRun:
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
    peaks: dict[str, int] = {}
    for name in ("allocated", "reserved", "device"):
        sizes = [round(value * size) for unit, size in _BYTES.items() for value in found[f"{name}_{unit}"]]
        if sizes and max(sizes) >= max(peaks.values(), default=0):  # else rounded, or of another moment
            peaks[name] = max(sizes)
    steps = [ms / 1e3 for ms in found["step_ms"]] + found["step_s"]
    steps = steps or [ms / 1e3 * micro_batches for ms in found["micro_batch_ms"]]
    steps = steps or [tokens_per_device / rate for rate in found["tokens_per_second"] if rate]
    finer = [rate / sequences for rate in found["samples_per_second"] if rate and sequences]
    rates = [rate for rate in found["steps_per_second"] if rate]
    if finer and (not rates or abs(finer[-1] - rates[-1]) <= _ROUNDED):  # else the batches are not those of the run
        rates = finer
    steps = steps or [1 / rate for rate in rates]
    step = median(steps[WARMUP:] or steps) if steps else None
    if not peaks and step is None:
        raise UsageError(
            f"{path} has no line of a trainer that is known ({', '.join(named('logs'))}); give the figures themselves: "
            f"--measured {MEASURED_WORDS}"
        )
    return MeasuredRun(**peaks, step=step)


def _number(text: str) -> float:
    text = text.replace(",", "")
    return float(text[:-1]) * _TIMES[text[-1]] if text[-1] in _TIMES else float(text)
