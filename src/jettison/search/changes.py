"""Changes of one or two settings that make a run fit a budget, the fastest first.

A change has a kind: recompute mode, offload, loss, optimizer, storage of a frozen base, micro-batch (with the same
sequences a step), sequence parallelism, sharding, gradient reduction. A pair has two kinds. Pairs are sorted by the sum
of their added times; peaks are computed in that order until enough fit, and those are then timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.units import format_percent, format_seconds
from jettison.predict.forecast import forecast_sizes
from jettison.predict.ranges import FitBudget, FitRule, time_residual
from jettison.predict.time import estimate
from jettison.spec.frameworks import named, rule
from jettison.spec.hardware import Hardware
from jettison.spec.kernels import Loss
from jettison.spec.layout import GradientSync
from jettison.spec.precision import Optimizer
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run
from jettison.spec.tuning import Base, Upcast

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
        yield _Setting(kind="offload", flags="--offload", of=partial(_nested, part="recompute", offload=True))
    for loss in _LOSSES:
        if run.kernels.loss is not loss:
            yield _Setting(kind="loss", flags=f"--loss {loss}", of=partial(_nested, part="kernels", loss=loss))
    for optimizer in _OPTIMIZERS.get(run.optimizer, ()):
        yield _Setting(kind="optimizer", flags=f"--optimizer {optimizer}", of=partial(replace, optimizer=optimizer))
    for base in _BASES.get(run.tuning.base, ()) if run.tuning is not None else ():
        yield _Setting(kind="base", flags=f"--base {base}", of=partial(_on_base, base=base))
    for count in (n for n in range(run.micro_batch - 1, 0, -1) if run.micro_batch % n == 0):
        times = run.micro_batches * run.micro_batch // count
        of = partial(replace, micro_batch=count, micro_batches=times)
        yield _Setting(kind="micro-batch", flags=f"--micro-batch {count} --micro-batches {times}", of=of)
    if run.layout.tp > 1 and not run.layout.sp:
        yield _Setting(kind="sequence parallelism", flags="--sp", of=partial(_nested, part="layout", sp=True))
    for zero in range(run.layout.zero + 1, 4) if run.layout.shards > 1 else ():
        if zero in run.optimizer_offload.zeros:
            yield _Setting(kind="sharding", flags=f"--zero {zero}", of=partial(_nested, part="layout", zero=zero))
    if run.layout.gradient_sync is GradientSync.LAST and not run.layout.stage_buffers:
        each = partial(_nested, part="layout", gradient_sync=GradientSync.EACH)
        yield _Setting(kind="gradient reduction", flags="--gradient-sync each", of=each)


def _on_base(run: Run, base: Base) -> Run:
    """Return the run on this frozen base; a framework preset says which parts of a 4-bit one are fp32."""
    name, layout = run.kernels.name, run.layout
    sizes = {"tp": layout.tp, "dp": layout.dp, "zero": layout.zero, "lora": 1, "packed": base.bits}
    fields = rule(name, **sizes) if name in named("presets") else {}
    return _nested(run, part="tuning", base=base, upcast=Upcast(fields.get("kbit_upcast", Upcast.NONE)))


def _nested(run: Run, part: str, **values: Any) -> Run:
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
