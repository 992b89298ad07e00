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
from jettison.measure.kernels import OpRequest, TensorMeta
from jettison.measure.memory import (
    AllocationCounter,
    AllocationEvent,
    Mark,
    layer_marks,
    static_tensors,
    unique_bytes,
)
from jettison.measure.ops import MeasuredWorkspace, OpPrice, Pricing, measure_ops
from jettison.measure.peak import PeakReport, measured_peak
from jettison.measure.timing import CaseTiming, TimingReport, interleaved, timed_seconds

__all__ = [
    "AllocationCounter",
    "AllocationEvent",
    "CaseTiming",
    "GradientDifference",
    "GradientReport",
    "Mark",
    "MeasuredWorkspace",
    "OpPrice",
    "OpRequest",
    "PeakReport",
    "Pricing",
    "TensorMeta",
    "TimingReport",
    "buffer_digest",
    "compare_gradients",
    "independent_copy",
    "interleaved",
    "layer_marks",
    "measure_ops",
    "measured_peak",
    "parameter_digest",
    "rng_digest",
    "run_steps",
    "same_bits",
    "static_tensors",
    "timed_seconds",
    "unique_bytes",
]
