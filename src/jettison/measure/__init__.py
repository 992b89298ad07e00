"""The measure room: what really happened, in bytes, bits and seconds."""

from jettison.measure.gradients import (
    GradientDifference,
    GradientReport,
    buffer_digest,
    compare_gradients,
    independent_copy,
    parameter_digest,
    rng_digest,
    run_steps,
    same_bits,
)
from jettison.measure.peak import PeakReport, measured_peak
from jettison.measure.timing import CaseTiming, TimingReport, interleaved, timed_seconds

__all__ = [
    "CaseTiming",
    "GradientDifference",
    "GradientReport",
    "PeakReport",
    "TimingReport",
    "buffer_digest",
    "compare_gradients",
    "independent_copy",
    "interleaved",
    "measured_peak",
    "parameter_digest",
    "rng_digest",
    "run_steps",
    "same_bits",
    "timed_seconds",
]
