"""Where the peak of a run comes from, and what would lower it: figures first, words made of them.

NOTE [ Parts of a moment ]
Bytes at a moment are a sum (NOTE [ What is there when ] in `ledger.timeline`), linear in everything that a stage holds.
So the share of, say, optimizer state in the peak is the same moment of a stage that holds nothing else. No second
account of the step is kept here that could disagree with the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

from jettison.errors import UsageError
from jettison.explain.figures import Core, Explanation, Share, Variant
from jettison.explain.remarks import cause, remarks, remedy
from jettison.formula.region import Region, layer_region
from jettison.ledger.halves import Halves, WeightStep
from jettison.ledger.timeline import StageLoad, Unit, moments
from jettison.predict.forecast import Forecast, Stage, forecast
from jettison.predict.passes import passes_of
from jettison.predict.stages import StageRegion
from jettison.solve.policy import attention_core
from jettison.spec.model import AnyLayer
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

T = TypeVar("T", StageLoad, Unit, Halves, WeightStep)

FORWARDS_OF_A_STEP: Final = 3
"""A backward is two forwards: each product has one for its input's gradient and one for its weight's."""
MODES: Final = ("none", "selective", "selective-op", "full", "every:2", "sqrt")
"""Recompute modes that are compared."""
_LONGEST: Final = 1 << 24
"""Tokens; a crossover is not looked for beyond."""


def explain(found: Forecast, *, budget_bytes: int | None = None) -> Explanation:
    """Why a run's peak is what it is.

    Args:
        budget_bytes: for allocations on each rank, if there is one.
    """
    stage, run = found.worst, found.run
    moment = stage.peak
    parts = peak_parts(stage)
    recompute = _compare(found, _modes(run))
    parallel = _compare(found, _sequence_parallelism(run))
    sharding = _compare(found, _sharding(run))
    return Explanation(
        stage=stage.index,
        peak_bytes=found.peak_bytes,
        phase=str(moment.phase),
        where=moment.where,
        in_flight=stage.in_flight,
        parts=parts,
        roles=_roles(found, stage),
        core=_core(run),
        recompute=recompute,
        sequence_parallelism=parallel,
        sharding=sharding,
        remarks=tuple(remarks(found, budget_bytes)),
        sentences=(
            cause(stage, parts),
            remedy(found, (*recompute, *parallel, *sharding), sum(recomputed_flops(found)), budget_bytes),
        ),
    )


# what there is --------------------------------------------------------------------------------------------------------


def peak_parts(stage: Stage) -> tuple[Share, ...]:
    """The peak of a stage as a sum; see NOTE [ Parts of a moment ].

    Gradients are those that wait for the optimizer; what a region's backward makes of them counts as transient, as do
    what it computes again, its workspace, and the input and output of a forward.
    """
    timeline = list(moments(stage.load, first_step=False))
    position = timeline.index(stage.peak)
    found = {
        name: list(moments(_alone(stage.load, kept), first_step=False))[position].nbytes
        for name, kept in _PARTS.items()
    }
    whole = list(moments(_whole(stage.load), first_step=False))[position].nbytes
    found["activations in flight"] -= whole
    found["parameters"] += whole - stage.load.aside
    found[ASIDE] += stage.load.aside
    return _shares((name, nbytes) for name, nbytes in found.items() if nbytes or name != ASIDE)


ASIDE: Final = "set aside, received and sent"
"""Workspaces and the like, and what a pipeline's schedule holds beside micro-batches in flight."""
_PARTS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "parameters": frozenset({"fixed"}),
        "gradients": frozenset({"gradient", "pending", "copies", "made"}),
        "optimizer state": frozenset({"state"}),
        "activations in flight": frozenset({"resident", "sent", "waiting", "detached", "released"}),
        ASIDE: frozenset({"received", "around", "variables", "batches", "passed", "left"}),
        "transients": frozenset(
            {"forward_peak", "backward_peak", "adding_peak", "optimizer_transient", "cached"}
            | {"input_peak", "rise", "added", "computed"}
        ),
    }
)
"""Which fields of a stage's load and of its units each part is made of."""


def _alone(load: StageLoad, kept: frozenset[str]) -> StageLoad:
    """The stage as if it held nothing but what some fields say."""
    zeros = frozenset[str]().union(*_PARTS.values()) - kept
    chunks = tuple(
        tuple(replace(_without(unit, zeros), halves=_of_halves(unit.halves, zeros)) for unit in chunk)
        for chunk in load.chunks
    )
    return replace(_without(load, zeros), chunks=chunks)


def _of_halves(halves: Halves | None, zeros: frozenset[str]) -> Halves | None:
    if halves is None:
        return None
    return replace(_without(halves, zeros), steps=tuple(_without(step, zeros) for step in halves.steps))


def _without(it: T, zeros: frozenset[str]) -> T:
    """With nothing in some fields, of those that it has."""
    nothing: dict[str, Any] = {field.name: 0 for field in fields(it) if field.name in zeros}
    return replace(it, **nothing)


def _whole(load: StageLoad) -> StageLoad:
    """The stage as if it held nothing but weights that stay gathered behind a forward."""
    nothing = _alone(load, frozenset())
    chunks = tuple(
        tuple(replace(empty, resident=unit.whole) for empty, unit in zip(bare, chunk, strict=True))
        for bare, chunk in zip(nothing.chunks, load.chunks, strict=True)
    )
    return replace(nothing, chunks=chunks)


def _roles(found: Forecast, stage: Stage) -> tuple[Share, ...]:
    mesh = found.run.layout.mesh_sizes
    held = {name for name, nbytes in found.layer_bytes() if nbytes}
    of_region: dict[tuple[Region, frozenset[int]], Counter[str]] = {}
    total: Counter[str] = Counter()
    for part in (part for chunk in stage.parts for part in chunk if part.name in held):
        key = part.region, part.kept
        if key not in of_region:
            of_region[key] = region_roles(part, mesh, part.kept)
        total.update(of_region[key])
    return _shares(total.most_common())


def region_roles(part: StageRegion, mesh: dict[str, int], kept: frozenset[int]) -> Counter[str]:
    """Bytes of what stays of a region. A storage that several ops save has the role of the first, its largest size."""
    roles: dict[str, str] = {}
    sizes: defaultdict[str, int] = defaultdict(int)
    for entry in part.region.entries(part.name, kept):
        roles.setdefault(entry.storage, entry.role)
        sizes[entry.storage] = max(sizes[entry.storage], entry.local_storage_bytes(mesh))
    found: Counter[str] = Counter()
    for storage, role in roles.items():
        found[role] += sizes[storage]
    return found


def _shares(parts: Iterable[tuple[str, int]]) -> tuple[Share, ...]:
    known = list(parts)
    whole = sum(nbytes for _, nbytes in known)
    return tuple(Share(name=name, nbytes=nbytes, fraction=nbytes / whole if whole else 0.0) for name, nbytes in known)


# the attention core ---------------------------------------------------------------------------------------------------


def _core(run: Run) -> Core:
    layer = Counter(run.model.layers).most_common(1)[0][0]
    region = layer_region(run.scene, layer)
    core, rest = _core_and_rest(run, layer, run.seq)
    return Core(
        saved_bytes=core,
        layer_bytes=core + rest,
        flops=sum(step.flops for step in region.tape.steps if not step.weights),  # products of two activations
        layer_flops=region.flops,
        crossover=_crossover(run, layer) if core else None,
    )


def _core_and_rest(run: Run, layer: AnyLayer, seq: int) -> tuple[int, int]:
    """Bytes that a layer saves without recompute on a sequence of ``seq``, learned positions or not."""
    region = layer_region(replace(run.scene, seq=seq), layer)
    core = region.program.kept_bytes(attention_core(region.program))
    return core, region.saved_bytes - core


def _crossover(run: Run, layer: AnyLayer) -> int | None:
    """By doubling and bisection over sequences that the layout divides: the core grows faster than the rest."""
    step = run.layout.cp * (run.layout.tp if run.layout.sp else 1)

    def overtakes(count: int) -> bool:
        core, rest = _core_and_rest(run, layer, count * step)
        return core > rest

    below, above = 0, 1
    while not overtakes(above):
        below, above = above, 2 * above
        if above * step > _LONGEST:
            return None
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if overtakes(middle) else (middle, above)
    return above * step


# what if --------------------------------------------------------------------------------------------------------------


def _modes(run: Run) -> Iterator[tuple[str, Run]]:
    modes = [(word, Recompute.parse(word, layers=run.model.depth, offload=run.recompute.offload)) for word in MODES]
    if run.recompute.mode is not Mode.AUTO:
        sent = f" --offload-modules {','.join(run.recompute.sent)}" if run.recompute.sent else ""
        modes.append((f"{run.recompute}{sent}", replace(run.recompute, whole=0)))
    seen: set[Recompute] = set()
    for word, recompute in modes:
        if recompute not in seen:
            seen.add(recompute)
            try:
                yield f"--recompute {word}", replace(run, recompute=recompute)
            except UsageError:  # of compiled layers not every mode is known
                continue


def _sequence_parallelism(run: Run) -> Iterator[tuple[str, Run]]:
    if run.layout.tp == 1:
        return
    for word, on in (("--no-sp", False), ("--sp", True)):
        try:
            yield word, replace(run, layout=replace(run.layout, sp=on))
        except UsageError:  # the sequence does not divide over the ranks
            continue


def _sharding(run: Run) -> Iterator[tuple[str, Run]]:
    if run.layout.shards > 1:
        for zero in (1, 3):
            if zero not in run.states_on_host.zeros:
                continue
            try:
                yield f"--zero {zero}", replace(run, layout=replace(run.layout, zero=zero))
            except UsageError:  # of some optimizers and recipes not every stage is described
                continue


def _compare(found: Forecast, runs: Iterable[tuple[str, Run]]) -> tuple[Variant, ...]:
    return tuple(
        _variant(change, found if run == found.run else forecast(run), current=run == found.run) for change, run in runs
    )


def _variant(change: str, found: Forecast, *, current: bool) -> Variant:
    forward = sum(part.region.flops for part in found.parts)
    again = sum(recomputed_flops(found))
    return Variant(
        change=change,
        current=current,
        peak_bytes=found.peak_bytes,
        layer_bytes=max(
            nbytes for part, (_, nbytes) in zip(found.parts, found.layer_bytes(), strict=True) if part.is_layer
        ),
        activation_bytes=found.worst.activation_bytes,
        recompute_flops=again,
        of_forward=again / forward,
        of_step=again / (FORWARDS_OF_A_STEP * forward),
    )


def recomputed_flops(found: Forecast) -> Iterator[int]:
    """Of each region in one backward. In a segment all layers but the last run through to their outputs."""
    rule = found.run.gradient_rule
    size = found.run.recompute.number if found.run.recompute.mode is Mode.EVERY else 1
    for chunk in (chunk for stage in found.stages for chunk in stage.parts):
        layers = sum(part.is_layer for part in chunk)
        position = 0
        for part in chunk:
            position += part.is_layer
            inside = part.inner or (part.is_layer and position % size and position < layers)
            yield part.region.flops if inside else passes_of(part, rule).recompute_flops
