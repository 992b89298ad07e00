"""The four figures of an answer, each as expected and as a range: allocated, reserved, device, and the step's time.

- *allocated*: what tensors take at the peak, ``torch.cuda.max_memory_allocated``.
- *reserved*: what the caching allocator has taken for them, ``torch.cuda.max_memory_reserved``.
- *device*: what nvidia-smi shows for the process: reserved, the CUDA context, communicators and workspaces
  (`predict.allowance`).

NOTE [ Ranges of published runs ]
A range is conformal: where measured over predicted of published runs was, in four cases of five, for runs that took no
part. `ranges.toml` has it by class; ``python -m benchmarks.accuracy`` writes it from docs/accuracy.csv.

- *time*: measured over modelled seconds. Its expected value is between 1 and the median, nearer to the median with
  more sources.
- *allocated*: measured over modelled bytes. Its expected value is 1: bytes are counted, and no factor mends a count.
- *fragments*: what is reserved, or in use less the fixed parts, beyond the modelled allocated bytes. It grows more
  slowly than they do: in published runs of 5 to 175 GiB about as their square root. So its unit is GiB for each square
  root of a GiB. What allocated bytes are off is in it, so that reserved and device need no second range.

Classes are a tree: stack x kind x hardware (of times), below stack x kind, below stack (but of fragments), below kind,
below all. The stack is the framework whose kernels run, or the software that ``--stack`` names, which is for who runs a
vendor's tuned recipes. A class with fewer than five independent sources borrows what it lacks from the class above it.

What a device has in use has in its range what context and communicators may take more or less than expected, too. On
the CPU nothing is reserved beyond tensors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jettison.core.units import GIB, format_bytes, format_seconds
from jettison.predict.allowance import FRAGMENTS, Limit, fixed_allowance
from jettison.spec.frameworks import named
from jettison.spec.kernels import Device
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.layout import Layout
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.predict.time import Estimate
    from jettison.spec.anchor import RunAnchor

DATA: Final = Path(__file__).with_name("ranges.toml")
ALL: Final = "all"
OTHERS: Final = "others"
"""Folder of software that is no framework's alone."""
ANCHORED: Final = "anchored"
"""The class of runs of which one of the same source, stack, kind and hardware was measured."""
AGREES: Final = 0.02
"""Share of the allocated bytes by which a ledger of a stack that was read may be off."""
NAMES: Final = {
    "allocated": ", of tensors",
    "reserved": ", by the caching allocator",
    "device": ", as nvidia-smi shows it",
}
"""Explanation of each memory figure in tables."""
ON_HOST: Final = ", of tensors; a host has no caching allocator, and no driver that takes more"


class Measure(StrEnum):
    """Measures that are compared with published runs."""

    TIME = "time"
    ALLOCATED = "allocated"
    FRAGMENTS = "fragments"


class FitVerdict(StrEnum):
    """Whether a run fits, from the range of what it needs."""

    FITS = "fits"
    CLOSE = "too close to call"
    DOES_NOT_FIT = "does not fit"

    @property
    def said(self) -> str:
        """For people, in capitals where it is no plain yes."""
        return str(self) if self is FitVerdict.FITS else self.upper()


class FitRule(StrEnum):
    """Which end of a device's range a choice was held to."""

    SURELY = "surely"
    EXPECTED = "expected"
    MAY = "may"
    BUDGET = "budget"  # a budget for tensors was given

    @property
    def words(self) -> str:
        """For a sentence about what fits."""
        return _RULE_WORDS[self]


_RULE_WORDS: Final = {
    FitRule.SURELY: "surely fits",
    FitRule.EXPECTED: "is expected to fit",
    FitRule.MAY: "may fit",
    FitRule.BUDGET: "fits",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitBudget:
    """Allocated bytes that a choice is held to, and by which rule."""

    rule: FitRule
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """Residual of published runs of one class, measured against modelled; units as in `Measure`.

    Args:
        kind: the class.
        runs, sources: that the class has of its own.
        of_this_kind: the class is the run's own, with its stack; otherwise one above it.
    """

    kind: str
    runs: int
    sources: int
    low: float
    expected: float
    high: float
    of_this_kind: bool = True

    def seconds(self, modelled: float) -> tuple[float, float]:
        """The range around a modelled time."""
        return modelled * self.low, modelled * self.high

    @property
    def words(self) -> str:
        """Text for people: the share, the runs and the class."""
        among = "" if self.of_this_kind else "no run of this class was compared; "
        runs = f"{self.runs} published run{'s' * (self.runs != 1)} of {self.sources} source{'s' * (self.sources != 1)}"
        return f"{among}80 % range by {runs} ({self.kind})"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A figure as expected, and between which ends it is in four cases of five."""

    expected: float
    low: float
    high: float

    def within(self, limit: float) -> FitVerdict:
        """Whether what needs this fits into so much."""
        if self.high <= limit:
            return FitVerdict.FITS
        return FitVerdict.CLOSE if self.low <= limit else FitVerdict.DOES_NOT_FIT

    def words(self, form: Callable[[float], str]) -> str:
        """For people, as ``form`` writes one value."""
        return f"{form(self.expected)} ({form(self.low)} to {form(self.high)})"

    def whole(self) -> dict[str, int]:
        """Bytes for programs."""
        return {name: round(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """The figures of one answer. Bytes are of the worst rank; ``step_seconds`` is None where no time was asked for.

    ``least``: bytes of the device without which it cannot run, at the low end: an allocator that runs short gives back
    what it has cached, so that little of what is reserved where there is room has to be there.
    """

    allocated: Range
    reserved: Range
    device: Range
    least: float
    step_seconds: Range | None = None

    def rows(self) -> Iterator[tuple[str, str]]:
        """For people: a name and what is expected, with its range; of a host allocated bytes alone."""
        on_host = self.device is self.allocated
        for name, found in (("allocated", self.allocated), ("reserved", self.reserved), ("device", self.device)):
            if name == "allocated" or not on_host:
                yield name, found.words(_bytes) + (NAMES[name] if not on_host else ON_HOST)
        if self.step_seconds is not None:
            yield "step time", self.step_seconds.words(format_seconds)

    @property
    def needs(self) -> str:
        """For people: what it needs of its device."""
        return self.device.words(_bytes) + (ON_HOST if self.device is self.allocated else NAMES["device"])

    def document(self) -> dict[str, Any]:
        """For programs; on a host all three are the same."""
        return {
            "allocated_bytes": self.allocated.whole(),
            "reserved_bytes": self.reserved.whole(),
            "device_bytes": self.device.whole(),
            "step_seconds": self.step_seconds and asdict(self.step_seconds),
        }

    def verdict(self, *, usable_bytes: int | None = None, budget_bytes: int | None = None) -> FitVerdict:
        """The worse of two: what is in use against what a device has, allocated bytes against a budget for them."""
        found = [FitVerdict.FITS]
        if usable_bytes is not None:
            found.append(replace(self.device, low=self.least).within(usable_bytes))
        found += [] if budget_bytes is None else [self.allocated.within(budget_bytes)]
        return max(found, key=list(FitVerdict).index)


def figures(
    run: Run,
    allocated_bytes: int,
    *,
    layout: Layout | None = None,
    hardware: str = "",
    step_seconds: float | None = None,
) -> RunFigures:
    """The figures of a run.

    Args:
        allocated_bytes, step_seconds: as modelled.
        layout: in place of the run's.
        hardware: its name.
    """
    anchor = run.anchor
    if anchor is not None and anchor.copies:
        from jettison.predict.extra_buffers import extra_bytes  # few runs have an anchor

        allocated_bytes += extra_bytes(anchor, run)
    allocated = _allocated(run, allocated_bytes)
    reserved, device, least = allocated, allocated, allocated.low
    if run.kernels.device is not Device.CPU:
        first, *above = lineage(Measure.FRAGMENTS, run)
        beyond, scale = residual(Measure.FRAGMENTS, (first, *above)), sqrt(allocated_bytes * GIB)
        centre = 0.0
        if anchor is not None and first == ANCHORED:  # halfway: one run alone says little about another's
            centre = ((anchor.fragments or 0.0) + residual(Measure.FRAGMENTS, tuple(above)).expected) / 2
        reserved = Range(
            expected=allocated_bytes + (centre + beyond.expected) * scale,
            low=max(allocated.low, allocated_bytes + (centre + beyond.low) * scale),
            high=max(allocated.high, allocated_bytes + (centre + beyond.high) * scale),
        )
        fixed = fixed_allowance(layout or run.layout, run.kernels.device)
        more = 0 if anchor is None else anchor.context or 0
        device = Range(
            expected=reserved.expected + max(0, fixed.expected + more),
            low=reserved.low + max(0, fixed.low + more),
            high=reserved.high + max(0, fixed.high + more),
        )
        least = min(device.low, allocated.low * float(1 + FRAGMENTS[0]) + max(0, fixed.low + more))
    took = None
    if step_seconds is not None:
        took = scaled(residual(Measure.TIME, lineage(Measure.TIME, run, hardware)), step_seconds)
    return RunFigures(allocated=allocated, reserved=reserved, device=device, least=least, step_seconds=took)


def fit_budgets(run: Run, limit: Limit, *, layout: Layout | None = None) -> tuple[FitBudget, ...]:
    """Return the budgets that every choice is held to, in this order: the first with an answer decides.

    On a device: bytes that surely fit, then those that are expected to, then those that may.

    Args:
        layout: in place of the run's.
    """
    if limit.budget_bytes is not None or limit.device_bytes is None:
        return (FitBudget(rule=FitRule.BUDGET, nbytes=limit.nbytes),)
    surely, expected = (
        min(limit.nbytes, fitting_bytes(run, limit.device_bytes, surely=surely, layout=layout))
        for surely in (True, False)
    )
    return (
        FitBudget(rule=FitRule.SURELY, nbytes=surely),
        FitBudget(rule=FitRule.EXPECTED, nbytes=expected),
        FitBudget(rule=FitRule.MAY, nbytes=limit.nbytes),
    )


def fitting_bytes(run: Run, usable_bytes: int, *, surely: bool, layout: Layout | None = None) -> int:
    """Return the largest allocated peak whose device bytes are within ``usable_bytes``; 0 if none are.

    Args:
        surely: the upper end of their range, not only what is expected.
        layout: in place of the run's.
    """
    low, high = 0, usable_bytes
    while low < high:
        middle = (low + high + 1) // 2
        device = figures(run, middle, layout=layout).device
        fits = (device.high if surely else device.expected) <= usable_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def most_bytes(run: Run, layout: Layout, *, usable_bytes: int, budget_bytes: int | None = None) -> int:
    """The most modelled bytes of a run that may fit, at the low end of their range: see `RunFigures.verdict`."""
    low = _allocated(run, GIB).low / GIB
    fixed = fixed_allowance(layout, run.kernels.device).low
    fragments = 1.0 if run.kernels.device is Device.CPU else float(1 + FRAGMENTS[0])
    more = 0 if run.anchor is None else max(0, run.anchor.context or 0)
    most = (usable_bytes - fixed - more) / (low * fragments)
    return max(0, int(most if budget_bytes is None else min(most, budget_bytes / low)))


def _allocated(run: Run, nbytes: int) -> Range:
    """The range of allocated bytes: of an anchored run, what both its own class and anchored runs allow.

    An anchor that agrees never makes them less sure.
    """
    classes = lineage(Measure.ALLOCATED, run)
    near, own = (scaled(residual(Measure.ALLOCATED, found), nbytes) for found in (classes, _own(classes)))
    return Range(expected=near.expected, low=max(near.low, own.low), high=min(near.high, own.high))


def _own(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Without what an anchor adds."""
    return classes[classes[0] == ANCHORED :]


def _bytes(nbytes: float) -> str:
    return format_bytes(round(nbytes))


def scaled(found: Residual, modelled: float) -> Range:
    """The range of a modelled time, or of modelled bytes."""
    return Range(expected=modelled * found.expected, low=modelled * found.low, high=modelled * found.high)


def residual(measure: Measure, classes: tuple[str, ...]) -> Residual:
    """Return the residual of the first of these classes that has one: the only place where a stack's correction enters.

    Args:
        classes: as `lineage` has them.
    """
    table = _table()[measure]
    kind = next(kind for kind in classes if kind in table)
    row = table[kind]
    above = 2 if measure is Measure.FRAGMENTS else 3
    return Residual(kind=kind, of_this_kind=kind in classes[:-above], **row)


def lineage(measure: Measure, run: Run, hardware: str = "") -> tuple[str, ...]:
    """The classes of a run for a measure, its own first.

    A run that is anchored on a measured one of its stack, kind and hardware is first of all one of those
    (`predict.anchor`); one that is not alike is corrected all the same, and is no surer.
    """
    stack, kind = stack_of(run), kind_of(run)
    own, anchor = classes_of(measure, stack, kind, hardware), run.anchor
    if anchor is None or anchor.kind not in ("", f"{stack}, {kind}"):
        return own
    elsewhere = measure is Measure.TIME and anchor.gpu != hardware
    return (ANCHORED, *own) if _anchors(anchor, measure) and not elsewhere else own


def unlike_anchor(run: Run, hardware: str) -> tuple[str, ...]:
    """Notes on how a run differs from its anchor's."""
    anchor = run.anchor
    if anchor is None:
        return ()
    own = f"{stack_of(run)}, {kind_of(run)}"
    said = []
    if anchor.kind not in ("", own):
        said.append(f"the anchor is of a run of another kind ({anchor.kind}; this one: {own}): ranges are not anchored")
    elif anchor.measured.step is not None and hardware not in ("", anchor.gpu):
        said.append(
            f"the anchor's step was measured on {anchor.gpu}, this one is of {hardware}: its range is not anchored"
        )
    return tuple(said)


def _anchors(anchor: RunAnchor, measure: Measure) -> bool:
    """Whether the anchor's run says anything about this; of a ledger that it contradicts, it does not."""
    measured = anchor.measured
    if measure is Measure.TIME:
        return measured.step is not None
    if measure is Measure.FRAGMENTS:
        return anchor.fragments is not None
    return measured.allocated is not None and abs(anchor.unexplained) <= AGREES * measured.allocated


def classes_of(measure: Measure, stack: str, kind: str, hardware: str) -> tuple[str, ...]:
    """Classes by name. Bytes do not depend on the hardware; fragments are the allocator's, not a stack's."""
    near = (f"{stack}, {kind}, {hardware}",) if measure is Measure.TIME else ()
    code = () if measure is Measure.FRAGMENTS else (stack,)
    return *near, f"{stack}, {kind}", *code, kind, ALL


def stack_of(run: Run) -> str:
    """The software that ``--stack`` names, without its release; without one or beside another framework's kernels, the
    framework whose these are.
    """
    own = str(named("kernels")[run.kernels.name]["folder"])
    if run.stack is None or named("stacks").get(run.stack, {}).get("folder", OTHERS) not in (own, OTHERS):
        return own
    return run.stack.partition("-")[0]


def kind_of(run: Run) -> str:
    """Kind of a run: its kind of model, and whether adapters are trained."""
    model = run.model
    experts = any(getattr(getattr(layer, "mlp", None), "experts", 0) for layer in model.layers)
    adapters = "" if run.tuning is None else ", adapters"
    return f"{_shape(model, run.kernels.name)}{'experts' if experts else 'dense'}{adapters}"


def _shape(model: ModelSpec, kernels: str) -> str:
    """Kind of a model that is not one of the compared decoders; empty where it is one of them. Of layers
    that carry a state, those of one stack alone were.
    """
    if model.two_stacks:
        return "two stacks, "
    if not model.words:
        return "images, " if model.audio is None else "sound, "
    scans = any(layer.scan is not None for layer in model.described)
    return "scans, " if scans and not kernel_set(kernels).stacks else ""


def time_residual(run: Run, hardware: str) -> Residual:
    """Residual of the modelled step time of such a run."""
    return residual(Measure.TIME, lineage(Measure.TIME, run, hardware))


def time_residual_of(found: Estimate) -> Residual:
    """Residual of an estimate's step time."""
    return time_residual(found.run, found.hardware.name)


@cache
def _table() -> dict[Measure, dict[str, dict[str, Any]]]:
    rows = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return {
        measure: {row["kind"]: {key: value for key, value in row.items() if key != "kind"} for row in rows[measure]}
        for measure in Measure
    }
