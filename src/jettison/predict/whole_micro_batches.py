"""Micro-batches beyond those that have to compute again, kept whole: arXiv 2205.05198 Appendix C.

A pipeline stage has fewer micro-batches in flight the later it comes, and a plan that the first one needs leaves room
on the others. So many of each window of micro-batches keep everything, the same number on every stage, as Megatron has
it; later windows are shorter, and of them these are a larger share. Bytes and seconds are counted micro-batch by
micro-batch: `memory.actions.device_order` and `memory.schedule.recomputing_share`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jettison.core.errors import UsageError
from jettison.memory.schedule import window
from jettison.predict.forecast import forecast_sizes
from jettison.predict.ranges import FitBudget
from jettison.predict.stages import schedule_sizes
from jettison.spec.recompute import MOST, Mode
from jettison.spec.run import Run


def largest_window(run: Run) -> int:
    """Of the first stage, which has most in flight."""
    return window(run.layout.schedule, stage=0, **schedule_sizes(run))


def most_whole(run: Run, limit_bytes: int) -> Run:
    """The run with as many micro-batches of each window kept whole as fit, by bisection: each of them saves seconds.

    A run that does not fit as it is, has no pipeline, or keeps everything anyway keeps none of them whole.
    """
    if run.layout.pp == 1 or run.recompute.mode is Mode.NONE or run.recompute.to_host:
        return with_whole(run, 0)
    low, high = 0, largest_window(run) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = forecast_sizes(with_whole(run, middle)).peak_bytes <= limit_bytes
        low, high = (middle, high) if fits else (low, middle)
    return with_whole(run, low)


def settled(run: Run, budgets: Sequence[FitBudget]) -> Run:
    """The same where a number is given; as many as fit the first budget that the run fits where `MOST` are asked for.

    Raises:
        UsageError: nobody says what they are to fit.
    """
    if run.recompute.whole != MOST:
        return run
    if not budgets:
        raise UsageError("--micro-batches-without-recompute most needs a limit; give --budget or --gpu")
    peak_bytes = forecast_sizes(with_whole(run, 0)).peak_bytes
    return most_whole(run, next((one for one in budgets if peak_bytes <= one.nbytes), budgets[-1]).nbytes)


def with_whole(run: Run, whole: int) -> Run:
    """The same with another number of them."""
    return replace(run, recompute=replace(run.recompute, whole=whole))
