"""Largest micro-batch, sequence and smallest sharding with which a run fits a budget, each with both sides of its edge;
most micro-batches without checkpointing.

`forecast(run).peak_bytes`, the allocated bytes of the worst rank from the second step on, is compared with a budget for
allocations. On a GPU budgets are those of `ranges.fit_budgets`.

With a planner (--recompute auto), a run fits if its smallest plan does.

Each size changes alone, with the rest of the run fixed; `fitting_changes` finds settings with which a run fits. Peaks
are assumed to grow with batch and sequence; the edge is checked on both sides.

NOTE [ Micro-batches without checkpointing ]
Later pipeline stages have fewer micro-batches in flight, so a plan for the first stage leaves memory free on others. A
number of micro-batches in each window is not checkpointed, the same on every stage, as in Megatron (arXiv 2205.05198
Appendix C); windows of later stages are shorter, and the share is larger there. Bytes and seconds are counted for each
micro-batch: `memory.actions.device_order` and `PipelineShape.recomputing_share`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.predict.forecast import forecast, forecast_sizes
from jettison.predict.ranges import FitBudget, FitRule
from jettison.predict.stages import pipeline_shape
from jettison.search.changes import FittingChange
from jettison.spec.layout import Layout
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

SEQUENCE_STEP: Final = 128
"""Tokens on one rank: tile size of fused attention kernels and tensor cores."""
_MOST: Final = 1 << 40
"""Upper end of the search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """Last value that fits and first that does not, each with its peak.

    Args:
        value: None: none fits, and ``next_value`` is the closest.
        next_value: None: all values fit.
        rule: rule of the budget of both.
        possible_value: last value that may fit, for a stricter rule.
    """

    value: int | None = None
    peak_bytes: int | None = None
    next_value: int | None = field(default=None, metadata={"former": "beyond"})
    next_peak_bytes: int | None = field(default=None, metadata={"former": "beyond_peak_bytes"})
    rule: FitRule = FitRule.BUDGET
    possible_value: int | None = field(default=None, metadata={"former": "may"})
    possible_peak_bytes: int | None = field(default=None, metadata={"former": "may_peak_bytes"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FitAnswer:
    """Largest sizes that fit a budget.

    Args:
        peak_bytes: of the run; with a planner, of its smallest plan.
        micro_batch: the largest, at the run's sequence.
        seq: the longest, at the run's micro-batch, in multiples of ``seq_step``, up to the positions.
        tp: the smallest tensor-parallel size, with the other axes fixed, on another number of devices.
        zero: the smallest ZeRO stage.
        changes: of a run that does not fit: one or two settings with which it does, the fastest first.
    """

    budget_bytes: int
    peak_bytes: int
    seq_step: int
    micro_batch: Edge
    seq: Edge
    tp: Edge
    zero: Edge
    changes: tuple[FittingChange, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.peak_bytes <= self.budget_bytes


def fit(
    run: Run, *, budget_bytes: int, surer: Sequence[FitBudget] = (), peak: Callable[[Run], int] | None = None
) -> FitAnswer:
    """Return the largest sizes of a run that fit ``budget_bytes`` of allocations on each rank.

    Args:
        surer: smaller budgets of `fit_budgets`. Each edge is of the first with a value.
        peak: function of the peak of a run; None: of its forecast; with a planner,
            `search.auto_recompute.smallest_budget`.

    Raises:
        UsageError: see `predict.forecast.forecast`.
    """
    peak = cache(peak or (lambda one: forecast(one).peak_bytes))
    budgets = (*surer, FitBudget(rule=FitRule.MAY if surer else FitRule.BUDGET, nbytes=budget_bytes))
    step = SEQUENCE_STEP * run.layout.cp * (run.layout.tp if run.layout.sp else 1)
    ends = run.model.learned_positions or run.model.recorder is not None  # recorded at most this long
    positions = run.model.max_positions if ends else _MOST
    if run.model.patches is not None:  # images have one length
        step = positions = run.seq

    def with_batch(count: int) -> int:
        return peak(replace(run, micro_batch=count))

    def with_sequence(count: int) -> int:
        return peak(replace(run, seq=count * step, source_seq=0 if run.model.audio else run.source_seq))

    def with_tp(size: int) -> Layout:
        return replace(run.layout, tp=size)

    heads = gcd(*(layer.heads for layer in run.model.kinds))
    sizes = [size for size in range(1, heads + 1) if heads % size == 0]
    return FitAnswer(
        budget_bytes=budget_bytes,
        peak_bytes=peak(run),
        seq_step=step,
        micro_batch=_surest(budgets, lambda nbytes: _largest(with_batch, nbytes, most=_MOST)),
        seq=_in_steps(_surest(budgets, lambda nbytes: _largest(with_sequence, nbytes, most=positions // step)), step),
        tp=_surest(budgets, lambda nbytes: _smallest(peak, _layouts(run, sizes, with_tp), nbytes)),
        zero=_surest(budgets, lambda nbytes: _smallest(peak, _layouts(run, range(4), run.layout.at_zero), nbytes)),
    )


def _surest(budgets: Sequence[FitBudget], edge: Callable[[int], Edge]) -> Edge:
    """Edge of the first budget with a value, or of the last."""
    *surer, last = budgets
    most = replace(edge(last.nbytes), rule=last.rule)
    for budget in surer if most.value is not None else ():
        found = edge(budget.nbytes)
        if found.value is not None:
            return replace(found, rule=budget.rule, possible_value=most.value, possible_peak_bytes=most.peak_bytes)
    return most


def _layouts(run: Run, values: Iterable[int], of: Callable[[int], Layout]) -> Iterator[tuple[int, Run]]:
    """The run in the layout of each value that it supports."""
    for value in values:
        try:
            yield value, replace(run, layout=of(value))
        except UsageError:  # heads, sequence or feed-forward width do not divide, or its optimizer has no such shards
            continue


def _largest(peak: Callable[[int], int], budget: int, *, most: int) -> Edge:
    """Edge of 1 to ``most``: doubling until it no longer fits, then bisection."""
    if most < 1:
        return Edge()
    low, high = 0, 1
    while peak(high) <= budget:
        if high == most:
            return Edge(value=high, peak_bytes=peak(high))
        low, high = high, min(2 * high, most)
    beyond = low + 1 + bisect_right(range(low + 1, high), budget, key=peak)
    found = Edge(next_value=beyond, next_peak_bytes=peak(beyond))
    return replace(found, value=beyond - 1, peak_bytes=peak(beyond - 1)) if beyond > 1 else found


def _in_steps(edge: Edge, step: int) -> Edge:
    """Convert an edge in steps to tokens."""
    steps = {"value": edge.value, "next_value": edge.next_value, "possible_value": edge.possible_value}
    tokens: dict[str, Any] = {name: count and count * step for name, count in steps.items()}
    return replace(edge, **tokens)


def _smallest(peak: Callable[[Run], int], runs: Iterable[tuple[int, Run]], budget: int) -> Edge:
    """First of ascending choices that fits, and the previous one; if none fits, the one with the lowest peak."""
    failed: list[tuple[int, int]] = []  # peak, choice
    for choice, run in runs:
        nbytes = peak(run)
        if nbytes <= budget:
            if not failed:
                return Edge(value=choice, peak_bytes=nbytes)
            return Edge(value=choice, peak_bytes=nbytes, next_value=failed[-1][1], next_peak_bytes=failed[-1][0])
        failed.append((nbytes, choice))
    closest = min(failed)
    return Edge(next_value=closest[1], next_peak_bytes=closest[0])


# micro-batches without checkpointing ----------------------------------------------------------------------------------


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
    if not budgets:
        raise UsageError("--micro-batches-without-recompute most needs a limit; give --budget or --gpu")
    peak_bytes = forecast_sizes(with_whole(run, 0)).peak_bytes
    return most_whole(run, next((one for one in budgets if peak_bytes <= one.nbytes), budgets[-1]).nbytes)


def with_whole(run: Run, whole: int) -> Run:
    """Return the run with another number of micro-batches without checkpointing."""
    return replace(run, recompute=replace(run.recompute, whole=whole))
