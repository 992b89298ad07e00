"""The largest run of its kind that fits a budget, and where exactly it stops fitting.

What is compared: `forecast(run).peak_bytes`, the allocated bytes of the worst rank from the second step on, with a
budget for allocations. On a GPU budgets are those of `ranges.fit_budgets`.

Where a planner decides what is computed again, a run fits what its smallest plan fits.

One size is changed at a time, all else stays as in the run; which settings would make it fit is `fitting_changes`' to
say. More of a batch or of a sequence is taken to need more bytes; the edge that the search ends on is checked on both
sides.
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
"""Tokens on one rank: what fused attention kernels and tensor cores work in."""
_MOST: Final = 1 << 40
"""No size is searched beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """The last value that fits and the next one that does not, each with its peak.

    Args:
        value: None where nothing fits; ``beyond`` is then the closest.
        beyond: None where every value that there is fits.
        rule: what both were held to.
        may: the last value that may fit, for a rule that is surer than that.
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
    """What fits a budget.

    Args:
        peak_bytes: of the run as it is; where a planner decides, of its smallest plan.
        micro_batch: the largest, at the run's sequence.
        seq: the longest, at the run's micro-batch, in multiples of ``seq_step``; learned positions end it, and those
            of a recorded model.
        tp: the smallest tensor-parallel size, on more or fewer devices: the other axes stay.
        zero: the smallest ZeRO stage.
        changes: with which it fits, one or two together, the cheapest in time first; where it does not as it is.
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
        """Does the run fit as it is?"""
        return self.peak_bytes <= self.budget_bytes

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"fits": self.fits, **asdict(self)}


def fit(
    run: Run, *, budget_bytes: int, surer: Sequence[FitBudget] = (), peak: Callable[[Run], int] | None = None
) -> FitAnswer:
    """What of a run fits ``budget_bytes`` of allocations on each rank.

    Args:
        surer: smaller budgets, as `fit_budgets` has them. Each edge is of the first with a value.
        peak: bytes that a run needs; left out, those of its forecast. `predict.auto_recompute.smallest_budget` has it
            for runs that a planner decides.

    Raises:
        UsageError: see `predict.forecast.forecast`.
    """
    peak = cache(_peak if peak is None else peak)
    budgets = (*surer, FitBudget(rule=FitRule.MAY if surer else FitRule.BUDGET, nbytes=budget_bytes))
    step = SEQUENCE_STEP * run.layout.cp * (run.layout.tp if run.layout.sp else 1)
    ends = run.model.learned_positions or run.model.recorder is not None  # nothing longer can be recorded
    positions = run.model.max_positions if ends else _MOST
    if run.model.patches is not None:  # an image is as long as it is
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
    """The edge of the first budget with a value; otherwise of the last."""
    *surer, last = budgets
    most = replace(edge(last.nbytes), rule=last.rule)
    for budget in surer if most.value is not None else ():
        found = edge(budget.nbytes)
        if found.value is not None:
            return replace(found, rule=budget.rule, may=most.value, may_peak_bytes=most.peak_bytes)
    return most


def _sharding(run: Run) -> Iterator[tuple[int, Run]]:
    """Stages of ZeRO; of some optimizers and recipes not all are described."""
    for zero in range(4):
        try:
            yield zero, replace(run, layout=run.layout.at_zero(zero))
        except UsageError:
            continue


def _peak(run: Run) -> int:
    return forecast(run).peak_bytes


def _largest(peak: Callable[[int], int], budget: int, *, most: int) -> Edge:
    """Of 1 to ``most``: doubling until it no longer fits, then bisection between what does and what does not."""
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
    """The edge of a number of steps as one of tokens."""
    return replace(
        edge,
        value=None if edge.value is None else edge.value * step,
        beyond=None if edge.beyond is None else edge.beyond * step,
        may=None if edge.may is None else edge.may * step,
    )


def _tensor_parallel(run: Run) -> Iterable[tuple[int, Run]]:
    """The run with each tensor-parallel size that divides it, ascending."""
    heads = gcd(*(layer.heads for layer in run.model.kinds))
    for size in (t for t in range(1, heads + 1) if heads % t == 0):
        try:
            yield size, replace(run, layout=replace(run.layout, tp=size))
        except UsageError:  # key-value heads, feed-forward width or sequence do not divide
            continue


def _smallest(peak: Callable[[Run], int], runs: Iterable[tuple[int, Run]], budget: int) -> Edge:
    """The first of ascending choices that fits, and the one before; where none fits, the one that needs least."""
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
