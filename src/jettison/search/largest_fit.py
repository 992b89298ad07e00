"""Largest micro-batch and sequence with which a run fits a budget, its smallest sharding, and changes that make it fit.

`forecast(run).peak_bytes`, the allocated bytes of the worst rank from the second step on, is compared with a budget for
allocations. On a GPU budgets are those of `ranges.fit_budgets`. With a planner (--recompute auto), a run fits if its
smallest plan does.

Each size changes alone, with the rest of the run fixed; peaks are assumed to grow with batch and sequence, and both
sides of the edge are checked.

A change has a kind: recompute mode, offload, loss, optimizer, storage of a frozen base, micro-batch (with the same
sequences a step), sequence parallelism, sharding, gradient reduction. A pair has two kinds. Pairs are sorted by the sum
of their added times; peaks are computed in that order until enough fit, and those are then timed.

NOTE [ Micro-batches without checkpointing ]
Later pipeline stages have fewer micro-batches in flight, so a plan for the first stage leaves memory free on others. A
number of micro-batches in each window is not checkpointed, the same on every stage, as in Megatron (arXiv 2205.05198
Appendix C); windows of later stages are shorter, and the share is larger there. Bytes and seconds are counted for each
micro-batch: `memory.schedule.device_order` and `PipelineShape.recomputing_share`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from math import gcd
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.units import format_percent, format_seconds
from jettison.predict.forecast import forecast, forecast_sizes
from jettison.predict.ranges import time_residual
from jettison.predict.stages import pipeline_shape
from jettison.predict.time import estimate
from jettison.spec.device_allowance import FitBudget, FitRule
from jettison.spec.fine_tuning import Base, Upcast
from jettison.spec.frameworks import named, rule
from jettison.spec.hardware import Hardware
from jettison.spec.kernels import Loss
from jettison.spec.layout import GradientSync, Layout
from jettison.spec.precision import Optimizer
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

MOST_LISTED: Final = 5
MOST_TRIED: Final = 80
"""Upper limit of pairs whose peaks are computed."""
_RECOMPUTE: Final = ("selective", "selective-op", "full", "sqrt")
_LOSSES: Final = (Loss.CHUNKED, Loss.FUSED)
_OPTIMIZERS: Final = {
    Optimizer.ADAMW_FOREACH: (Optimizer.ADAMW, Optimizer.ADAM8BIT),
    Optimizer.ADAMW: (Optimizer.ADAM8BIT,),
}
_BASES: Final = {Base.FP32: (Base.PLAIN, Base.NF4), Base.PLAIN: (Base.NF4,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingChange:
    """One or two changes with which a run fits.

    Args:
        flags: their flags.
        step_seconds: expected, of a step of as many sequences; None: a figure is missing in the hardware's file.
        added_fraction: added time as a share of the step without it; negative: faster.
        rule: rule of the budget that it fits.
    """

    flags: str
    peak_bytes: int
    step_seconds: float | None
    added_fraction: float | None
    rule: FitRule

    @property
    def cost(self) -> str:
        """Added step time, for messages; empty: unknown."""
        if self.step_seconds is None or self.added_fraction is None:
            return ""
        more = "more" if self.added_fraction >= 0 else "less"
        return f", {format_percent(abs(self.added_fraction))} {more} of a step, {format_seconds(self.step_seconds)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """One change; ``of`` returns the run with it or raises a `UsageError`."""

    kind: str
    flags: str
    of: Callable[[Run], Run]


def fitting_changes(
    run: Run, budgets: Sequence[FitBudget], hardware: Hardware, *, most: int = MOST_LISTED
) -> tuple[FittingChange, ...]:
    """List changes that lower the peak and fit the last of these budgets, the fastest first.

    Empty with a planner. The fastest change of the first budget that any fits is always included.
    """
    if run.recompute.mode is Mode.AUTO:
        return ()
    singles, before = list(_tried(run, [(one,) for one in _changes(run)], hardware)), _seconds(run, hardware)
    most_bytes = min(budgets[-1].nbytes, forecast_sizes(run).peak_bytes - 1)
    sure = [one for one in singles if one.peak_bytes <= budgets[0].nbytes]
    pairs = [
        (first.seconds + then.seconds - before, (*first.changes, *then.changes))
        for first, then in combinations(singles, 2)
        if first.changes[0].kind != then.changes[0].kind
        if all(one not in sure or first.seconds + then.seconds - before < one.seconds for one in (first, then))
    ]
    together = [pair for _, pair in sorted(pairs, key=lambda one: one[0])[:MOST_TRIED]]
    found = [one for one in singles if one.peak_bytes <= most_bytes]
    enough = len(found) + most
    for one in _tried(run, together, hardware, most_bytes):
        alone = (each for each in found if each.changes[0] in one.changes and len(each.changes) == 1)
        if any(each.peak_bytes <= one.peak_bytes and each.seconds <= one.seconds for each in alone):
            continue
        found.append(one)
        if len(found) >= enough and any(each.peak_bytes <= budgets[0].nbytes for each in found):
            break
    found.sort(key=lambda one: (one.seconds, len(one.changes)))
    listed, surest = found[:most], min(found, key=lambda one: budgets.index(one.held_to(budgets)), default=None)
    if surest is not None and surest not in listed:
        listed[-1] = surest
    return tuple(one.fitting(budgets, before) for one in listed)


def _changes(run: Run) -> Iterator[_Setting]:
    for word in _RECOMPUTE:
        mode = Recompute.parse(word, layers=run.model.depth, offload=run.recompute.offload)
        if mode != run.recompute:
            yield _Setting(kind="recompute", flags=f"--recompute {word}", of=partial(Run.recomputed, recompute=mode))
    if not run.recompute.to_host:
        yield _Setting(kind="offload", flags="--offload", of=partial(nested, part="recompute", offload=True))
    for loss in _LOSSES:
        if run.kernels.loss is not loss:
            yield _Setting(kind="loss", flags=f"--loss {loss}", of=partial(nested, part="kernels", loss=loss))
    for optimizer in _OPTIMIZERS.get(run.optimizer, ()):
        yield _Setting(kind="optimizer", flags=f"--optimizer {optimizer}", of=partial(replace, optimizer=optimizer))
    for base in _BASES.get(run.tuning.base, ()) if run.tuning is not None else ():
        yield _Setting(kind="base", flags=f"--base {base}", of=partial(_on_base, base=base))
    for count in (n for n in range(run.micro_batch - 1, 0, -1) if run.micro_batch % n == 0):
        times = run.micro_batches * run.micro_batch // count
        of = partial(replace, micro_batch=count, micro_batches=times)
        yield _Setting(kind="micro-batch", flags=f"--micro-batch {count} --micro-batches {times}", of=of)
    if run.layout.tp > 1 and not run.layout.sp:
        yield _Setting(kind="sequence parallelism", flags="--sp", of=partial(nested, part="layout", sp=True))
    for zero in range(run.layout.zero + 1, 4) if run.layout.shards > 1 else ():
        if zero in run.optimizer_offload.zeros:
            yield _Setting(kind="sharding", flags=f"--zero {zero}", of=partial(nested, part="layout", zero=zero))
    if run.layout.gradient_sync is GradientSync.LAST and not run.layout.stage_buffers:
        each = partial(nested, part="layout", gradient_sync=GradientSync.EACH)
        yield _Setting(kind="gradient reduction", flags="--gradient-sync each", of=each)


def _on_base(run: Run, base: Base) -> Run:
    """Return the run on this frozen base; a framework preset says which parts of a 4-bit one are fp32."""
    name, layout = run.kernels.name, run.layout
    sizes = {"tp": layout.tp, "dp": layout.dp, "zero": layout.zero, "lora": 1, "packed": base.bits}
    fields = rule(name, **sizes) if name in named("presets") else {}
    return nested(run, part="tuning", base=base, upcast=Upcast(fields.get("kbit_upcast", Upcast.NONE)))


def nested(run: Run, part: str, **values: Any) -> Run:
    """Return the run with other values in one of its parts, such as its layout."""
    return replace(run, **{part: replace(getattr(run, part), **values)})


@dataclass(frozen=True, kw_only=True, slots=True)
class _TriedSettings:
    """Tried changes; ``seconds``: of a step; 0: unknown."""

    changes: tuple[_Setting, ...]
    peak_bytes: int
    seconds: float

    def held_to(self, budgets: Sequence[FitBudget]) -> FitBudget:
        """First budget that the peak fits."""
        return next(budget for budget in budgets if self.peak_bytes <= budget.nbytes)

    def fitting(self, budgets: Sequence[FitBudget], before: float) -> FittingChange:
        """Result for users; ``before``: seconds of a step without the changes."""
        return FittingChange(
            flags=" ".join(change.flags for change in self.changes),
            peak_bytes=self.peak_bytes,
            step_seconds=self.seconds or None,
            added_fraction=self.seconds / before - 1 if self.seconds and before else None,
            rule=self.held_to(budgets).rule,
        )


def _tried(
    run: Run, asked: Iterable[tuple[_Setting, ...]], hardware: Hardware, most_bytes: int | None = None
) -> Iterator[_TriedSettings]:
    """Yield peaks and times of valid changes with a peak of at most ``most_bytes``."""
    for changes in asked:
        other = run
        try:
            for change in changes:
                other = change.of(other)
            peak = forecast_sizes(other).peak_bytes
        except UsageError:
            continue
        if most_bytes is None or peak <= most_bytes:
            yield _TriedSettings(changes=changes, peak_bytes=peak, seconds=_seconds(other, hardware))


def _seconds(run: Run, hardware: Hardware) -> float:
    try:
        return time_residual(run, hardware.name).expected * estimate(run, hardware).step_seconds
    except UsageError:  # a figure missing in the hardware's file
        return 0.0


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
