"""Largest micro-batch, sequence and smallest sharding with which a run fits a budget, each with both sides of its edge.

`forecast(run).peak_bytes`, the allocated bytes of the worst rank from the second step on, is compared with a budget for
allocations. On a GPU budgets are those of `ranges.fit_budgets`.

With a planner (--recompute auto), a run fits if its smallest plan does.

Each size changes alone, with the rest of the run fixed; `fitting_changes` finds settings with which a run fits. Peaks
are assumed to grow with batch and sequence; the edge is checked on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import gcd
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.predict.changes import FittingChange
from jettison.predict.forecast import forecast
from jettison.predict.ranges import FitBudget, FitRule
from jettison.spec.run import Run

SEQUENCE_STEP: Final = 128
"""Tokens on one rank: tile size of fused attention kernels and tensor cores."""
_MOST: Final = 1 << 40
"""Upper end of the search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """Last value that fits and first that does not, each with its peak.

    Args:
        value: None: none fits, and ``beyond`` is the closest.
        beyond: None: all values fit.
        rule: rule of the budget of both.
        may: last value that may fit, for a stricter rule.
    """

    value: int | None = None
    peak_bytes: int | None = None
    beyond: int | None = None
    beyond_peak_bytes: int | None = None
    rule: FitRule = FitRule.BUDGET
    may: int | None = None
    may_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FitAnswer:
    """Largest sizes that fit a budget.

    Args:
        peak_bytes: of the run; with a planner, of its smallest plan.
        micro_batch: the largest, at the run's sequence.
        seq: the longest, at the run's micro-batch, in multiples of ``seq_step``, up to the learned or recorded
            positions.
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

    def document(self) -> dict[str, Any]:
        """JSON document."""
        return {"fits": self.fits, **asdict(self)}


def fit(
    run: Run, *, budget_bytes: int, surer: Sequence[FitBudget] = (), peak: Callable[[Run], int] | None = None
) -> FitAnswer:
    """Return the largest sizes of a run that fit ``budget_bytes`` of allocations on each rank.

    Args:
        surer: smaller budgets of `fit_budgets`. Each edge is of the first with a value.
        peak: function of the peak of a run; None: of its forecast; with a planner,
            `predict.auto_recompute.smallest_budget`.

    Raises:
        UsageError: see `predict.forecast.forecast`.
    """
    peak = cache(_peak if peak is None else peak)
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

    return FitAnswer(
        budget_bytes=budget_bytes,
        peak_bytes=peak(run),
        seq_step=step,
        micro_batch=_surest(budgets, lambda nbytes: _largest(with_batch, nbytes, most=_MOST)),
        seq=_in_steps(_surest(budgets, lambda nbytes: _largest(with_sequence, nbytes, most=positions // step)), step),
        tp=_surest(budgets, lambda nbytes: _smallest(peak, _tensor_parallel(run), nbytes)),
        zero=_surest(budgets, lambda nbytes: _smallest(peak, _sharding(run), nbytes)),
    )


def _surest(budgets: Sequence[FitBudget], edge: Callable[[int], Edge]) -> Edge:
    """Edge of the first budget with a value, or of the last."""
    *surer, last = budgets
    most = replace(edge(last.nbytes), rule=last.rule)
    for budget in surer if most.value is not None else ():
        found = edge(budget.nbytes)
        if found.value is not None:
            return replace(found, rule=budget.rule, may=most.value, may_peak_bytes=most.peak_bytes)
    return most


def _sharding(run: Run) -> Iterator[tuple[int, Run]]:
    """The run at each ZeRO stage that its optimizer and recipe support."""
    for zero in range(4):
        try:
            yield zero, replace(run, layout=run.layout.at_zero(zero))
        except UsageError:
            continue


def _peak(run: Run) -> int:
    return forecast(run).peak_bytes


def _largest(peak: Callable[[int], int], budget: int, *, most: int) -> Edge:
    """Edge of 1 to ``most``: doubling until it no longer fits, then bisection."""
    if most < 1:
        return Edge()
    fits, fits_bytes = 0, 0
    beyond, beyond_bytes = 1, peak(1)
    while beyond_bytes <= budget:
        fits, fits_bytes = beyond, beyond_bytes
        if fits == most:
            return Edge(value=fits, peak_bytes=fits_bytes)
        beyond = min(2 * fits, most)
        beyond_bytes = peak(beyond)
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        nbytes = peak(middle)
        if nbytes <= budget:
            fits, fits_bytes = middle, nbytes
        else:
            beyond, beyond_bytes = middle, nbytes
    if not fits:
        return Edge(beyond=beyond, beyond_peak_bytes=beyond_bytes)
    return Edge(value=fits, peak_bytes=fits_bytes, beyond=beyond, beyond_peak_bytes=beyond_bytes)


def _in_steps(edge: Edge, step: int) -> Edge:
    """Convert an edge in steps to tokens."""
    return replace(
        edge,
        value=None if edge.value is None else edge.value * step,
        beyond=None if edge.beyond is None else edge.beyond * step,
        may=None if edge.may is None else edge.may * step,
    )


def _tensor_parallel(run: Run) -> Iterable[tuple[int, Run]]:
    """The run at each tensor-parallel size that divides it, ascending."""
    heads = gcd(*(layer.heads for layer in run.model.kinds))
    for size in (t for t in range(1, heads + 1) if heads % t == 0):
        try:
            yield size, replace(run, layout=replace(run.layout, tp=size))
        except UsageError:  # key-value heads, feed-forward width or sequence do not divide
            continue


def _smallest(peak: Callable[[Run], int], runs: Iterable[tuple[int, Run]], budget: int) -> Edge:
    """First of ascending choices that fits, and the previous one; if none fits, the one with the lowest peak."""
    failed: list[tuple[int, int]] = []  # peak, choice
    for choice, run in runs:
        nbytes = peak(run)
        if nbytes <= budget:
            if not failed:
                return Edge(value=choice, peak_bytes=nbytes)
            return Edge(value=choice, peak_bytes=nbytes, beyond=failed[-1][1], beyond_peak_bytes=failed[-1][0])
        failed.append((nbytes, choice))
    closest = min(failed)
    return Edge(beyond=closest[1], beyond_peak_bytes=closest[0])
