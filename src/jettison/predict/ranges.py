"""Figures of a run with ranges: allocated, reserved and device bytes, and step time.

- *allocated*: peak of tensors, ``torch.cuda.max_memory_allocated``.
- *reserved*: peak of the caching allocator, ``torch.cuda.max_memory_reserved``.
- *device*: peak of the process in nvidia-smi: reserved, the CUDA context, communicators and workspaces.

NOTE [ Ranges of published runs ]
A range is conformal: it holds 80 % of measured over predicted figures of published runs, for held-out sources, and of
first answers, for held-out blind rounds: most of today's residuals are of rows that were looked into.
`ranges.toml` has it by class; ``python -m benchmarks.accuracy`` writes it from docs/accuracy.csv.

- *time*: measured over modelled seconds. Expected is between 1 and the median, nearer to it with more sources.
- *allocated*: measured over modelled bytes. Its expected value is 1: bytes are counted, not scaled.
- *fragments*: reserved bytes, or device bytes less the fixed parts, minus the modelled allocated bytes and cached
  segments. The unit is GiB per square root of allocated GiB, which they grow with in published runs of 5 to 175 GiB.
  Errors of allocated bytes are included, so that reserved and device need no second range.

Classes form a tree: stack x kind x hardware (of times), below stack x kind, below stack (except of fragments), below
kind, below all. The stack is the framework of the kernels, or the software stack of ``--stack``, for a vendor's tuned
recipes. A class with fewer than five independent sources borrows the missing ones from its parent.
Fragments of micro-batches that differ in length have a class of their own, below all.

The range of device bytes includes that of context and communicators. On CPU nothing is reserved beyond tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from math import sqrt
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jettison.core.files import read_table
from jettison.core.units import GIB, format_bytes, format_seconds
from jettison.predict.optimizer_step import flat_buffers, segments_after_update
from jettison.predict.stages import cached_segments, other_streams, segments_before_training
from jettison.spec.device_allowance import FRAGMENTS, FitBudget, FitRule, FitVerdict, Limit, Range, fixed_allowance
from jettison.spec.frameworks import named
from jettison.spec.hardware import hardware as accelerator
from jettison.spec.hardware import hardware_names
from jettison.spec.kernels import Device
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.layout import Layout
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.spec.anchor import RunAnchor

DATA: Final = Path(__file__).with_name("ranges.toml")
ALL: Final = "all"
UNEVEN: Final = "lengths differ"
"""Class of fragments of runs whose micro-batches differ in length, and the end of the names of their kinds."""
ANCHORED: Final = "anchored"
"""Class of runs with an anchor of the same source, stack, kind and hardware."""
AGREES: Final = 0.02
"""Tolerance of allocated bytes for stacks whose code was read."""
ANCHOR_WEIGHT: Final = 1 / 2
"""Weight of an anchor's fragments against its class's: nearest on published runs, whichever source is left out."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """Residual of published runs of one class, measured against modelled; units as in `Measure`.

    Args:
        kind: the class.
        runs, sources: of the class itself, without those it borrows.
        own_class: the class is the run's own, with its stack; otherwise a parent.
    """

    kind: str
    runs: int
    sources: int
    low: float
    expected: float
    high: float
    own_class: bool = field(default=True, metadata={"former": "of_this_kind"})

    def of(self, modelled: float) -> Range:
        """Range of a modelled time, or of modelled bytes."""
        return Range(expected=modelled * self.expected, low=modelled * self.low, high=modelled * self.high)

    @property
    def words(self) -> str:
        """Share, runs and class of the range, for tables."""
        among = "" if self.own_class else "no run of this class was compared; "
        runs = f"{self.runs} published run{'s' * (self.runs != 1)} of {self.sources} source{'s' * (self.sources != 1)}"
        return f"{among}80 % range by {runs} ({self.kind})"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """Figures of a run. Bytes are of the worst rank; ``step_seconds`` is None without a step time.

    ``least``: device bytes at the low end that the run cannot do without: an allocator that runs out frees cached
    blocks, so that most of the fragments are not required.
    """

    allocated: Range
    reserved: Range
    device: Range
    least: float
    step_seconds: Range | None = None

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield name and text of each figure for tables; on CPU only allocated bytes."""
        on_host = self.device is self.allocated
        for name, text in NAMES.items() if not on_host else (("allocated", ON_HOST),):
            yield name, getattr(self, name).words(_bytes) + text
        if self.step_seconds is not None:
            yield "step time", self.step_seconds.words(format_seconds)

    @property
    def needs(self) -> str:
        """Text of the device bytes, for messages; with `least` where the verdict may depend on it."""
        freed = f", or at least {_bytes(self.least)} where the caching allocator frees its unused blocks"
        text = self.device.words(_bytes) + (ON_HOST if self.device is self.allocated else NAMES["device"])
        return text + freed * (self.least < self.device.low)

    def document(self) -> dict[str, Any]:
        """JSON document; on CPU all three ranges are equal."""
        sizes = {f"{name}_bytes": getattr(self, name).whole() for name in NAMES}
        return sizes | {"step_seconds": self.step_seconds and asdict(self.step_seconds)}

    def verdict(self, *, usable_bytes: int | None = None, budget_bytes: int | None = None) -> FitVerdict:
        """Worse verdict of device bytes against usable memory, and allocated bytes against a budget."""
        limits = ((replace(self.device, low=self.least), usable_bytes), (self.allocated, budget_bytes))
        found = [size.within(limit) for size, limit in limits if limit is not None]
        return max((FitVerdict.FITS, *found), key=list(FitVerdict).index)


def figures(run: Run, allocated_bytes: int, *, hardware: str = "", step_seconds: float | None = None) -> RunFigures:
    """Return the figures of a run.

    ``allocated_bytes``, ``step_seconds``: modelled figures; ``hardware``: its name.
    """
    anchor = run.anchor
    if anchor is not None and anchor.copies:
        from jettison.predict.forecast import extra_bytes  # few runs have an anchor

        allocated_bytes += extra_bytes(anchor, run)
    allocated = _allocated(run, allocated_bytes)
    reserved, device, least = allocated, allocated, allocated.low
    if run.kernels.device is not Device.CPU:
        first, *above = lineage(Measure.FRAGMENTS, run)
        beyond, scale = residual(Measure.FRAGMENTS, (first, *above)), sqrt(allocated_bytes * GIB)
        modelled = float(segments_beyond(run, allocated_bytes, hardware))
        if anchor is not None and first == ANCHORED:
            modelled += residual(Measure.FRAGMENTS, tuple(above)).expected * scale
            modelled += ANCHOR_WEIGHT * ((anchor.fragments or 0.0) * scale - modelled)
        modelled += allocated_bytes
        least *= float(1 + FRAGMENTS[0])
        floors = {"low": least, "expected": least, "high": allocated.high}
        reserved = Range(**{end: max(floor, modelled + getattr(beyond, end) * scale) for end, floor in floors.items()})
        fixed = fixed_allowance(run.layout, run.kernels.device, run.stack)
        more = 0 if anchor is None else anchor.context or 0
        device = Range(**{end: at + max(0, getattr(fixed, end) + more) for end, at in asdict(reserved).items()})
        least += max(0, fixed.low + more)
    took = None if step_seconds is None else time_residual(run, hardware).of(step_seconds)
    return RunFigures(allocated=allocated, reserved=reserved, device=device, least=least, step_seconds=took)


def segments_beyond(run: Run, allocated_bytes: int, hardware: str = "") -> int:
    """Return modelled bytes in segments in addition to those allocated at the peak of a step."""
    cached = min(cached_segments(run), allocated_bytes // (1 if run.outgrows_segments else 4)) + other_streams(run)
    cached += flat_buffers(run, allocated_bytes)
    reserved = max(segments_before_training(run, hardware), segments_after_update(run))
    found = max(cached, reserved - allocated_bytes)
    if hardware in hardware_names():  # an allocator that runs short frees its cached segments
        room = accelerator(hardware).usable_bytes - fixed_allowance(run.layout, run.kernels.device, run.stack).expected
        found = min(found, max(0, room - allocated_bytes))
    return found


def fit_budgets(run: Run, limit: Limit) -> tuple[FitBudget, ...]:
    """Return the budgets to try in order; the first with a solution counts.

    On a device: bytes that surely fit, then those that are expected to, then those that may.
    """
    if limit.budget_bytes is not None or limit.device_bytes is None:
        return (FitBudget(rule=FitRule.BUDGET, nbytes=limit.nbytes),)
    found = [fitting_bytes(run, limit.device_bytes, surely=surely) for surely in (True, False)]
    sizes = (*(min(limit.nbytes, nbytes) for nbytes in found), limit.nbytes)
    return tuple(FitBudget(rule=rule, nbytes=nbytes) for rule, nbytes in zip(FitRule, sizes, strict=False))


def fitting_bytes(run: Run, usable_bytes: int, *, surely: bool) -> int:
    """Return the largest allocated peak whose device bytes are within ``usable_bytes``; 0 if none are.

    Args:
        surely: the upper end of their range has to fit, not only the expected value.
    """
    end = attrgetter("device.high" if surely else "device.expected")
    return bisect_right(range(1, usable_bytes + 1), float(usable_bytes), key=lambda nbytes: end(figures(run, nbytes)))


def most_bytes(run: Run, layout: Layout, *, usable_bytes: int, budget_bytes: int | None = None) -> int:
    """Largest modelled bytes of a run that may fit, at the low end of their range: see `RunFigures.verdict`."""
    low = _allocated(run, GIB).low / GIB
    fixed = fixed_allowance(layout, run.kernels.device, run.stack).low
    fragments = 1.0 if run.kernels.device is Device.CPU else float(1 + FRAGMENTS[0])
    more = 0 if run.anchor is None else max(0, run.anchor.context or 0)
    most = (usable_bytes - fixed - more) / (low * fragments)
    return max(0, int(most if budget_bytes is None else min(most, budget_bytes / low)))


def _allocated(run: Run, nbytes: int) -> Range:
    """Range of allocated bytes; of an anchored run, the intersection of its class's and that of anchored runs.

    So an anchor that agrees never widens it.
    """
    classes = lineage(Measure.ALLOCATED, run)
    others = classes[classes[0] == ANCHORED :]
    near, own = (residual(Measure.ALLOCATED, found).of(nbytes) for found in (classes, others))
    return Range(expected=near.expected, low=max(near.low, own.low), high=min(near.high, own.high))


def _bytes(nbytes: float) -> str:
    return format_bytes(round(nbytes))


def residual(measure: Measure, classes: tuple[str, ...]) -> Residual:
    """Return the residual of the first of these classes that has one: the only correction by stack.

    Args:
        classes: of `lineage`.
    """
    table = _table()[measure]
    kind = next(kind for kind in classes if kind in table)
    row = table[kind]
    above = 2 if measure is Measure.FRAGMENTS else 3
    return Residual(kind=kind, own_class=kind in (classes[0], *classes[:-above]), **row)


def lineage(measure: Measure, run: Run, hardware: str = "") -> tuple[str, ...]:
    """Classes of a run for a measure, its own first.

    The first class of a run with an anchor of its stack, kind and hardware is `ANCHORED` (`diagnose.fit_anchor`); other
    anchors correct the figures but leave the ranges as they are.
    """
    stack, kind = stack_of(run), kind_of(run)
    own, anchor = classes_of(measure, stack, kind, hardware), run.anchor
    if anchor is None or anchor.kind not in ("", f"{stack}, {kind}"):
        return own
    elsewhere = measure is Measure.TIME and anchor.gpu != hardware
    return (ANCHORED, *own) if _anchors(anchor, measure) and not elsewhere else own


def unlike_anchor(run: Run, hardware: str) -> tuple[str, ...]:
    """Notes on how a run differs from its anchor's."""
    return () if run.anchor is None else run.anchor.unlike(f"{stack_of(run)}, {kind_of(run)}", hardware)


def _anchors(anchor: RunAnchor, measure: Measure) -> bool:
    """Whether the anchor's run measured this, and agrees with the ledger."""
    measured = anchor.measured
    if measure is Measure.TIME:
        return measured.step is not None
    if measure is Measure.FRAGMENTS:
        return anchor.fragments is not None
    return measured.allocated is not None and abs(anchor.unexplained) <= AGREES * measured.allocated


def classes_of(measure: Measure, stack: str, kind: str, hardware: str) -> tuple[str, ...]:
    """Names of classes. Bytes do not depend on the hardware, and fragments not on the stack but on the allocator."""
    even = kind.removesuffix(f", {UNEVEN}")
    if measure is Measure.FRAGMENTS:
        return (f"{stack}, {even}", even, ALL) if even == kind else (UNEVEN, ALL)
    near = (f"{stack}, {even}, {hardware}",) if measure is Measure.TIME else ()
    return *near, f"{stack}, {even}", stack, even, ALL


def stack_of(run: Run) -> str:
    """Software stack of ``--stack`` without its release; else, or with another's kernels, the kernels' framework."""
    own = str(named("kernels")[run.kernels.name]["folder"])
    if run.stack is None or named("stacks").get(run.stack, {}).get("folder", "others") not in (own, "others"):
        return own
    return run.stack.partition("-")[0]


def kind_of(run: Run) -> str:
    """Kind of a run: its kind of model, whether adapters are trained, and whether micro-batches differ in length."""
    model = run.model
    experts = any(getattr(getattr(layer, "mlp", None), "experts", 0) for layer in model.layers)
    adapters = "" if run.tuning is None else ", adapters"
    shape = ""  # of the compared decoders
    if model.two_stacks:
        shape = "two stacks, "
    elif not model.words:
        shape = "images, " if model.audio is None else "sound, "
    elif any(layer.scan is not None for layer in model.described) and not kernel_set(run.kernels.name).stacks:
        shape = "scans, "  # state-space and linear-attention layers were compared in one stack only
    return f"{shape}{'experts' if experts else 'dense'}{adapters}" + f", {UNEVEN}" * run.pad_to_longest


def time_residual(run: Run, hardware: str) -> Residual:
    """Residual of the modelled step time of such a run."""
    return residual(Measure.TIME, lineage(Measure.TIME, run, hardware))


@cache
def _table() -> dict[Measure, dict[str, dict[str, Any]]]:
    rows = read_table(DATA)
    return {
        measure: {row["kind"]: {key: value for key, value in row.items() if key != "kind"} for row in rows[measure]}
        for measure in Measure
    }
