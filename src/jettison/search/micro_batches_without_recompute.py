"""Micro-batches without checkpointing in a pipeline: arXiv 2205.05198 Appendix C.

Later pipeline stages have fewer micro-batches in flight, so a plan for the first stage leaves memory free on others. A
number of micro-batches in each window is not checkpointed, the same on every stage, as in Megatron; windows of later
stages are shorter, and the share is larger there. Bytes and seconds are counted for each micro-batch:
`memory.actions.device_order` and `PipelineShape.recomputing_share`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from jettison.core.errors import UsageError
from jettison.predict.forecast import forecast_sizes
from jettison.predict.ranges import FitBudget
from jettison.predict.stages import pipeline_shape
from jettison.spec.recompute import MOST, Mode
from jettison.spec.run import Run


def most_whole(run: Run, limit_bytes: int) -> Run:
    """Return the run with as many micro-batches without checkpointing as fit, by bisection: each saves time.

    There are none in a run that does not fit without them, has no pipeline, or does not checkpoint.
    """
    if run.layout.pp == 1 or run.recompute.mode is Mode.NONE or run.recompute.to_host:
        return with_whole(run, 0)
    counts = range(1, pipeline_shape(run).window(0) + 1)  # the first stage has most in flight
    most = bisect_right(counts, limit_bytes, key=lambda whole: forecast_sizes(with_whole(run, whole)).peak_bytes)
    return with_whole(run, most)


def settled(run: Run, budgets: Sequence[FitBudget]) -> Run:
    """Return the run with `MOST` replaced by the number that fits the first budget. `UsageError` without a limit."""
    if run.recompute.whole != MOST:
        return run
    if not budgets:
        raise UsageError("--micro-batches-without-recompute most needs a limit; give --budget or --gpu")
    peak_bytes = forecast_sizes(with_whole(run, 0)).peak_bytes
    return most_whole(run, next((one for one in budgets if peak_bytes <= one.nbytes), budgets[-1]).nbytes)


def with_whole(run: Run, whole: int) -> Run:
    """Return the run with another number of micro-batches without checkpointing."""
    return replace(run, recompute=replace(run.recompute, whole=whole))
