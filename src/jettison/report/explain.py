"""Explanation of a run's peak, and of what would lower it: figures first, then sentences of them.

NOTE [ Parts of a moment ]
Bytes at a moment are a sum (NOTE [ Memory over a step ] in `memory.step`), linear in everything that a stage holds.
So the share of, say, optimizer state in the peak is the same moment of a stage that holds nothing else. No second
account of the step is kept here that could disagree with the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.units import format_bytes, format_percent
from jettison.cost.flops import PASSES
from jettison.formula.region import layer_region
from jettison.ledger.ledger import storage_roles
from jettison.memory.span import Phase
from jettison.memory.stage_unit import Halves, Unit, WeightStep
from jettison.memory.step import Lifetime, Moment, StageLoad, moments
from jettison.predict.forecast import GRADIENT_COPIES, Forecast, Stage, forecast
from jettison.predict.stages import StageRegion, passes_of
from jettison.search.largest_fit import FittingChange, fitting_changes, nested
from jettison.solve.checkpoint_policy import attention_core
from jettison.spec.device_allowance import FitBudget, FitRule
from jettison.spec.hardware import Hardware, usual_hardware
from jettison.spec.model import AnyLayer
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

MODES: Final = ("none", "selective", "selective-op", "full", "every:2", "sqrt")
"""Recompute modes that are compared."""
_LONGEST: Final = 1 << 24
"""Tokens; a crossover is not looked for beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakShare:
    """Bytes of a part, and the fraction that they are of the whole."""

    name: str
    nbytes: int
    fraction: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """The attention core (scores, softmax, their product with the values) in the most frequent layer, on one rank.

    Args:
        saved_bytes: of it for one micro-batch; 0 with fused attention, which stores no scores.
        layer_bytes: of the layer, without recompute.
        flops: of its two GEMMs in one forward.
        layer_flops: of the layer's forward.
        crossover: the shortest sequence at which its bytes are more than those of the rest of the layer; None: never.
    """

    saved_bytes: int
    layer_bytes: int
    flops: int
    layer_flops: int
    crossover: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The run with one thing changed.

    Args:
        change: as it is typed.
        current: it is the run as it is.
        layer_bytes: of the layer that saves most for one micro-batch.
        activation_bytes: held between forwards and backwards on the worst stage, at most.
        recompute_flops: of GEMMs, for one micro-batch through the whole model on one rank of each stage.
            Only what backward needs is recomputed, which may be less than the forward of a layer.
        forward_fraction: the same as a share of a forward's FLOPs; ``step_fraction`` of a forward's and a backward's.
    """

    change: str
    current: bool
    peak_bytes: int
    layer_bytes: int
    activation_bytes: int
    recompute_flops: int
    forward_fraction: float = field(metadata={"former": "of_forward"})
    step_fraction: float = field(metadata={"former": "of_step"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """Something that a run does in vain, or that its user should know."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of the worst stage of a forecast; see the classes of the fields.

    Args:
        parts: of the peak; their bytes add up to it.
        roles: of what one micro-batch leaves on the worst stage for its backward, largest first, each storage once.
        sequence_parallelism: off and on; empty without tensor parallelism.
        sharding: ZeRO 1 and 3; empty where there is one data-parallel rank.
        changes: one or two together with which the run fits, where it does not surely fit as it is.
    """

    stage: int
    peak_bytes: int
    phase: str
    where: str
    in_flight: int
    parts: tuple[PeakShare, ...]
    roles: tuple[PeakShare, ...]
    core: Core
    recompute: tuple[Variant, ...]
    sequence_parallelism: tuple[Variant, ...]
    sharding: tuple[Variant, ...]
    remarks: tuple[Remark, ...]
    changes: tuple[FittingChange, ...]
    sentences: tuple[str, ...]


def explain(found: Forecast, *, budgets: Sequence[FitBudget] = (), hardware: Hardware | None = None) -> Explanation:
    """Why a run's peak is what it is.

    Args:
        budgets: for allocations on each rank, as `fit_budgets` has them.
        hardware: whose seconds say which of two changes together is the cheapest; left out, the usual one.
    """
    stage, run = found.worst, found.run
    moment = stage.peak
    parts = peak_parts(stage)
    recompute, parallel, sharding = (
        tuple(_compare(found, changes(run))) for changes in (_modes, _sequence_parallelism, _sharding)
    )
    changes = None
    if budgets and found.peak_bytes > budgets[0].nbytes and run.recompute.mode is not Mode.AUTO:
        changes = fitting_changes(run, budgets, usual_hardware(run.kernels.device) if hardware is None else hardware)
    held = {name for name, nbytes in found.layer_bytes() if nbytes}
    roles: Counter[str] = Counter()
    for part in (part for chunk in stage.parts for part in chunk if part.name in held):
        roles.update(region_roles(part, run.layout.mesh_sizes, part.kept))
    return Explanation(
        stage=stage.index,
        peak_bytes=found.peak_bytes,
        phase=str(moment.phase),
        where=moment.where,
        in_flight=stage.in_flight,
        parts=parts,
        roles=_shares(roles.most_common()),
        core=_core(run),
        recompute=recompute,
        sequence_parallelism=parallel,
        sharding=sharding,
        remarks=tuple(remarks(found, budgets[-1].nbytes if budgets else None)),
        changes=changes or (),
        sentences=(
            cause(stage, parts),
            remedy(found, (*recompute, *parallel, *sharding), sum(recomputed_flops(found)), changes),
        ),
    )


def peak_parts(stage: Stage) -> tuple[PeakShare, ...]:
    """The peak of a stage as a sum; see NOTE [ Parts of a moment ].

    Gradients are those that wait for the optimizer; what a region's backward makes of them counts as transient, as do
    what it recomputes, its workspace, and the input and output of a forward.
    """
    position = list(moments(stage.load)).index(stage.peak)
    found = {name: list(moments(_alone(stage.load, kept)))[position].nbytes for name, kept in _PARTS.items()}
    return _shares((name, nbytes) for name, nbytes in found.items() if nbytes or name != ASIDE)


ASIDE: Final = "workspaces, pipeline buffers"
"""Workspaces, and what a pipeline's schedule keeps in addition to micro-batches in flight."""
_PARTS: Final[Mapping[str, frozenset[str]]] = {
    "parameters": frozenset({"fixed", "whole", "weights"}),
    "gradients": frozenset({"gradient", "pending", GRADIENT_COPIES, "made", "shards", "freed"}),
    "optimizer state": frozenset({"state"}),
    "activations in flight": frozenset({"resident", "sent", "waiting", "detached", "released"}),
    ASIDE: frozenset({"aside", "received", "lifetimes", "transfers"}),
    "transients": frozenset(
        {"forward_peak", "backward_peak", "adding_peak", "optimizer_transient", "cached", "lingering"}
        | {"input_peak", "rise", "added", "computed", "reducing"}
    ),
}
"""Fields of a load, its units and their parts, by part; ``fixed`` less ``aside``, ``resident`` less ``whole``."""
_BYTES: Final = frozenset[str]().union(*_PARTS.values())


def _alone(it: Any, kept: frozenset[str]) -> Any:
    """A stage's load, or units of it, as if it held nothing but what some fields say."""
    if type(it) is tuple:
        return tuple(_alone(one, kept) for one in it)
    if isinstance(it, Lifetime):
        return it if (it.name if it.name == GRADIENT_COPIES else "lifetimes") in kept else replace(it, nbytes=0)
    if not isinstance(it, StageLoad | Unit | Halves | WeightStep):
        return it
    own = {name: getattr(it, name) for name in (it._fields if isinstance(it, tuple) else it.__dataclass_fields__)}
    for whole, part in (("fixed", "aside"), ("resident", "whole")):
        if whole in own:
            own[whole] = (whole in kept) * (own[whole] - own[part]) + (part in kept) * own[part]
    gone = _BYTES - kept - {"fixed", "resident", "lifetimes"}
    nothing = {name: (0,) * len(v) if isinstance(v, tuple) else 0 for name, v in own.items() if name in gone}
    return type(it)(**{name: _alone(value, kept) for name, value in own.items()} | nothing)


def region_roles(part: StageRegion, mesh: dict[str, int], kept: frozenset[int]) -> Counter[str]:
    """Bytes of what stays of a region."""
    found: Counter[str] = Counter()
    for role, nbytes in storage_roles(part.region.entries(part.name, kept), mesh):
        found[role] += nbytes
    return found


def _shares(parts: Iterable[tuple[str, int]]) -> tuple[PeakShare, ...]:
    known = list(parts)
    whole = sum(n for _, n in known)
    return tuple(
        PeakShare(name=name, nbytes=nbytes, fraction=nbytes / whole if whole else 0.0) for name, nbytes in known
    )


def _core(run: Run) -> Core:
    layer = Counter(run.model.layers).most_common(1)[0][0]
    region = layer_region(run.signature, layer)
    core, rest = _core_and_rest(run, layer, run.seq)
    return Core(
        saved_bytes=core,
        layer_bytes=core + rest,
        flops=sum(step.flops for step in region.tape.steps if not step.weights),  # GEMMs of two activations
        layer_flops=region.flops,
        crossover=_crossover(run, layer) if core else None,
    )


def _core_and_rest(run: Run, layer: AnyLayer, seq: int) -> tuple[int, int]:
    """Bytes that a layer saves without recompute on a sequence of ``seq``, learned positions or not."""
    region = layer_region(replace(run.signature, seq=seq), layer)
    core = region.program.kept_bytes(attention_core(region.program))
    return core, region.saved_bytes - core


def _crossover(run: Run, layer: AnyLayer) -> int | None:
    """By bisection over sequences that the layout divides: the core grows faster than the rest."""
    step = run.layout.cp * (run.layout.tp if run.layout.sp else 1)

    def overtakes(seq: int) -> bool:
        core, rest = _core_and_rest(run, layer, seq)
        return core > rest

    lengths = range(step, _LONGEST + 1, step)
    at = bisect_left(lengths, True, key=overtakes)
    return lengths[at] if at < len(lengths) else None


# what if --------------------------------------------------------------------------------------------------------------

Changes = Mapping[str, Callable[[], Run]]
"""By flag, the run under it; `UsageError` where no such run is described."""


def _modes(run: Run) -> Changes:
    modes = [(word, Recompute.parse(word, layers=run.model.depth, offload=run.recompute.offload)) for word in MODES]
    if run.recompute.mode is not Mode.AUTO:
        sent = f" --offload-modules {','.join(run.recompute.sent)}" if run.recompute.sent else ""
        modes.append((f"{run.recompute}{sent}", replace(run.recompute, whole=0)))
    named: dict[Recompute, str] = {}
    for word, recompute in modes:
        named.setdefault(recompute, f"--recompute {word}")
    return {word: partial(run.recomputed, recompute) for recompute, word in named.items()}


def _sequence_parallelism(run: Run) -> Changes:
    flags = {"--no-sp": False, "--sp": True} if run.layout.tp > 1 else {}
    return {flag: partial(nested, run, "layout", sp=sp) for flag, sp in flags.items()}


def _sharding(run: Run) -> Changes:
    def changed(zero: int) -> Run:
        return replace(run, layout=run.layout.at_zero(zero))

    stages = [zero for zero in (1, 3) if zero in run.optimizer_offload.zeros] if run.layout.shards > 1 else []
    return {f"--zero {zero}": partial(changed, zero) for zero in stages}


def _compare(found: Forecast, changes: Changes) -> Iterator[Variant]:
    for change, changed in changes.items():
        try:
            run = changed()
        except UsageError:  # of compiled layers not every mode is known, of some optimizers not every ZeRO stage
            continue
        other = found if run == found.run else forecast(run)
        forward, again = sum(part.region.flops for part in other.parts), sum(recomputed_flops(other))
        saved = zip(other.parts, other.layer_bytes(), strict=True)
        yield Variant(
            change=change,
            current=other is found,
            peak_bytes=other.peak_bytes,
            layer_bytes=max(nbytes for part, (_, nbytes) in saved if part.is_layer),
            activation_bytes=other.worst.activation_bytes,
            recompute_flops=again,
            forward_fraction=again / forward,
            step_fraction=again / (PASSES * forward),
        )


def recomputed_flops(found: Forecast) -> Iterator[int]:
    """FLOPs recomputed for each region in one backward. In a segment all layers but the last run to their outputs."""
    for part in (part for stage in found.stages for chunk in stage.parts for part in chunk):
        yield part.region.flops if part.inner else passes_of(part, found.run.gradient_rule).recompute_flops


# sentences ------------------------------------------------------------------------------------------------------------


def remarks(found: Forecast, budget_bytes: int | None) -> Iterator[Remark]:
    """Remarks: options without effect, and what a user should know."""
    run, peak = found.run, found.peak_bytes
    mode = run.recompute
    if mode.mode is Mode.SELECTIVE:
        plain = forecast(run.recomputed(replace(mode, mode=Mode.NONE)))
        if found.layer_bytes() == plain.layer_bytes():
            yield Remark(
                code="selective-saves-nothing",
                text=f"selective recomputation drops attention scores, and {run.kernels.attention} attention never "
                f"stores them: layers save the same bytes as with --recompute none, and the peak is "
                f"{format_bytes(peak)} with either",
            )
    if mode.mode is Mode.EVERY and mode.number > 1:
        full = forecast(run.recomputed(replace(mode, mode=Mode.FULL, number=1))).peak_bytes
        if peak > full:
            yield Remark(
                code="segments-above-full",
                text=f"segments of {mode.number} layers hold fewer inputs, but backward computes {mode.number} layers "
                f"again at once: the peak is {format_bytes(peak)}, with --recompute full {format_bytes(full)}",
            )
    if mode.offload:
        plain = forecast(run.recomputed(replace(mode, offload=False)))
        if peak >= plain.peak_bytes:
            held, before = found.worst.activation_bytes, plain.worst.activation_bytes
            yield Remark(
                code="offload-misses-peak",
                text=f"offloading lowers what is held between the passes from {format_bytes(before)} to "
                f"{format_bytes(held)}, but not the peak ({format_bytes(plain.peak_bytes)} without it, "
                f"{format_bytes(peak)} with it), which is reached {_place(found.worst.peak)}",
            )
    if budget_bytes is not None and found.first_step_peak_bytes <= budget_bytes < peak:
        yield Remark(
            code="second-step-exceeds",
            text=f"the first step fits ({format_bytes(found.first_step_peak_bytes)}), the second does not "
            f"({format_bytes(peak)}): only the first optimizer step allocates "
            f"{format_bytes(found.worst.static.state)} of state",
        )


def cause(stage: Stage, parts: tuple[PeakShare, ...]) -> str:
    """Place of the peak, and its largest part."""
    largest = max(parts, key=lambda part: part.nbytes)
    what = largest.name
    if what == "activations in flight" and stage.in_flight > 1:
        what = f"activations of up to {stage.in_flight} micro-batches in flight"
    return (
        f"The peak of {format_bytes(stage.peak.nbytes)} is reached on stage {stage.index} {_place(stage.peak)}; the "
        f"largest part of it is {what}, {format_bytes(largest.nbytes)} ({format_percent(largest.fraction)})."
    )


def remedy(
    found: Forecast,
    variants: tuple[Variant, ...],
    recompute_flops: int,
    changes: tuple[FittingChange, ...] | None = None,
) -> str:
    """Name the fastest changes that fit; without a budget, the one that helps most.

    Args:
        recompute_flops: of the run itself.
        changes: that fit; None where none is needed.
    """
    if changes:
        surest = min(changes, key=lambda change: list(FitRule).index(change.rule))
        named = {"the fastest that": surest} | ({} if surest is changes[0] else {"faster, and": changes[0]})
        return " ".join(
            f"{one.flags} is {place} {one.rule.words}: {format_bytes(one.peak_bytes)}{one.cost}."
            for place, one in named.items()
        )
    best = min(variants, key=lambda variant: (variant.peak_bytes, variant.recompute_flops))
    neither = "" if changes is None else " No two settings fit together either."
    if best.peak_bytes >= found.peak_bytes:
        return f"None of the {len(variants)} changes tried lowers it.{neither}"
    cost = ""
    if best.recompute_flops > recompute_flops:
        cost = f", for {format_percent(best.forward_fraction)} of a forward recomputed"
    return (
        f"Of the changes tried, {best.change} lowers it most: to {format_bytes(best.peak_bytes)}, by "
        f"{format_bytes(found.peak_bytes - best.peak_bytes)}{cost}.{neither}"
    )


def _place(moment: Moment) -> str:
    places = {
        Phase.OPTIMIZER: "in the optimizer step",
        Phase.BEFORE: "between steps",
        Phase.AFTER: "between steps",
        Phase.LOSS: "in the forward of the loss",
    }
    return places.get(moment.phase, f"in the {moment.phase} of {moment.where}")
