"""Memory against compute against communication: where a step's time goes, and what else could be chosen.

NOTE [ Recompute or offload ]
A saved tensor can be recomputed, which takes the device `again` seconds, or offloaded to CPU during the forward and
prefetched during the backward. A link's bandwidth is of one direction, and the two transfers are in different passes,
so each takes bytes / bandwidth whatever the other direction could do; bandwidths that add both directions halve these
times, wrongly. Offloading costs no time while each transfer is hidden by the pass that it overlaps with. Otherwise both
transfers cost 2 bytes / bandwidth, and break even with recomputation where the link reaches 2 bytes / again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jettison.core.units import GIB, format_bytes, format_percent, format_seconds, listed
from jettison.cost.collective import host_seconds
from jettison.cost.execution import Execution, execution_of
from jettison.cost.region import Class, Item
from jettison.formula.region import HELD, Region, layer_region
from jettison.predict.forecast import available_bytes, forecast
from jettison.predict.ranges import fit_budgets, time_residual
from jettison.predict.stages import StageRegion, walk
from jettison.predict.time import Estimate, Timing, estimate
from jettison.report.tables import span
from jettison.spec.device_allowance import FitRule, Limit
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.search.auto_recompute import AutoForecast

SMALLEST: Final = 0.005
"""Tensors with less than this share of a layer's bytes are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """Link of one device to CPU memory, in bytes a second in one direction."""

    name: str
    bytes_per_second: int


LINKS: Final = (
    HostLink(name="PCIe 4.0 x16", bytes_per_second=32 * 10**9),
    HostLink(name="PCIe 5.0 x16", bytes_per_second=64 * 10**9),
    HostLink(name="NVLink-C2C shared by two (GB200)", bytes_per_second=225 * 10**9),
    HostLink(name="NVLink-C2C (GH200)", bytes_per_second=450 * 10**9),
)
"""Peaks of the PCI Express base specification, and of NVIDIA's GH200 and GB200 briefs: 900 GB/s are both directions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeOption:
    """The run under one recompute setting; ``step_seconds`` and ``mfu`` as expected.

    ``fits``: the device, with its allowance, by ``rule``; None where it does not.
    """

    recompute: str
    current: bool
    step_seconds: float
    peak_bytes: int
    fits: bool
    rule: FitRule | None
    mfu: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trade:
    """One saved tensor of a layer.

    Args:
        recompute_seconds: from other saved tensors; None: it may not be recomputed.
        transfer_seconds: to CPU, or back, over the device's link; None: it has none.
        break_even_bytes_per_second: a link in one direction that costs as much as recomputation, if nothing is hidden.
        links: those of `LINKS` over which offloading it, exposed, is faster than recomputing it.
    """

    role: str
    path: str
    nbytes: int
    recompute_seconds: float | None = field(metadata={"former": "again_seconds"})
    transfer_seconds: float | None = field(metadata={"former": "moved_seconds"})
    break_even_bytes_per_second: float | None
    links: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTransfer:
    """All that a layer saves, over one link.

    Args:
        transfer_seconds: in one direction.
        hidden: each transfer is no longer than the pass that it overlaps with.
        beats_recompute: both transfers, exposed, take less time than recomputing the layer.
    """

    link: HostLink
    transfer_seconds: float = field(metadata={"former": "one_way_seconds"})
    hidden: bool = field(metadata={"former": "hides"})
    beats_recompute: bool = field(metadata={"former": "quicker"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOffload:
    """All saved tensors of a layer, offloaded and prefetched, or recomputed from its input.

    Args:
        transfer_seconds: in one direction, over the device's own link.
        links: each of `LINKS`, and first the device's own where that is none of them.
        hidden: each transfer is shorter than the pass that it overlaps with.
        break_even_bytes_per_second: a link in one direction over which both transfers, exposed, take as long as
            recomputing the layer.
    """

    layer_bytes: int
    transfer_seconds: float = field(metadata={"former": "one_way_seconds"})
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float = field(metadata={"former": "again_seconds"})
    links: tuple[LinkTransfer, ...] = field(metadata={"former": "ways"})
    hidden: bool = field(metadata={"former": "hides"})
    break_even_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class StepAlternatives:
    """Parts of a step's time, and the alternatives; ``links`` are those that ``offload`` compares."""

    kinds: tuple[tuple[Class, float], ...]  # of the busiest stage's compute
    options: tuple[RecomputeOption, ...]
    trades: tuple[Trade, ...]
    offload: LayerOffload | None
    sentences: tuple[str, ...]
    links: tuple[HostLink, ...] = LINKS


def alternatives_of(found: Estimate) -> StepAlternatives:
    """Everything that `--explain` adds to an estimate."""
    timing = Timing(run=found.run, hardware=found.hardware, execution=found.execution)
    options, offload = tuple(_options(found)), _offload(timing)
    totals = dict.fromkeys(Class, 0.0)
    for item in (item for chunk in walk(found.run)[found.busiest] for item in timing.items(chunk)):
        for kind, seconds in item.prices.by_class(item.region).items():
            totals[kind] += item.count * found.run.micro_batches * seconds
    return StepAlternatives(
        kinds=tuple(totals.items()),
        options=options,
        trades=tuple(trades(found.run, found.hardware, found.execution)),
        offload=offload,
        sentences=tuple(_sentences(found, options, offload)),
    )


def _options(found: Estimate) -> Iterator[RecomputeOption]:
    """None, selective of both kinds, full and offloading, and the run as it is."""
    run, times = found.run, time_residual(found.run, found.hardware.name).expected
    modes = [Recompute(mode=mode) for mode in (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.FULL)]
    if found.hardware.host_bytes_per_second is not None:
        modes.append(Recompute(offload=True))
    current = run.recompute
    for mode in modes if current in modes else [current, *modes]:
        other = run.recomputed(mode)
        timed = found if mode == current else estimate(other, found.hardware, execution=found.execution)
        peak = forecast(other).peak_bytes
        limit = Limit(nbytes=available_bytes(found.hardware, other), device_bytes=found.hardware.usable_bytes)
        rule = next((budget.rule for budget in fit_budgets(other, limit) if peak <= budget.nbytes), None)
        yield RecomputeOption(
            recompute=f"{mode} + offload" if mode.offload else replace(mode, whole=0).words,
            current=mode == current,
            step_seconds=times * timed.step_seconds,
            peak_bytes=peak,
            mfu=timed.mfu / times,
            fits=rule is not None,
            rule=rule,
        )


def trades(run: Run, hardware: Hardware, execution: Execution | None = None) -> list[Trade]:
    """The saved tensors of the run's most frequent layer, largest first, each against all others being kept."""
    layer = max(run.model.kinds, key=run.model.layers.count)
    region, reached = layer_region(run.signature, layer), hardware.reached.host
    prices = Timing(run=run, hardware=hardware, execution=execution or execution_of(run)).prices(layer)
    found = []
    for buffer in dict.fromkeys(slot.buffer for slot in region.program.slots):
        nbytes = region.program.buffers[buffer].nbytes
        if region.program.buffers[buffer].free or nbytes < SMALLEST * region.saved_bytes:
            continue
        closure = region.program.closure(buffer)
        again = limit = None
        if closure.anchor is None and closure.ops:
            again = prices.seconds(region, frozenset(closure.ops)).again.seconds
            limit = 2 * nbytes / again if again else None
        role, path = called(region, buffer)
        trade = Trade(
            role=role,
            path=path,
            nbytes=nbytes,
            recompute_seconds=again,
            transfer_seconds=None if hardware.host_bytes_per_second is None else host_seconds(nbytes, hardware),
            break_even_bytes_per_second=limit,
            links=tuple(x.name for x in LINKS if limit is not None and x.bytes_per_second * reached > limit),
        )
        found.append(trade)
    return sorted(found, key=lambda row: -row.nbytes)


def called(region: Region, buffer: int) -> tuple[str, str]:
    """Name of a saved tensor (several, where several tensors share a storage), and where it is read."""
    found = [
        (saved.role, step.path)
        for step in region.tape.steps
        for saved in step.saved
        if region.buffers[saved.value.storage] == buffer and saved.role
    ]
    return (", ".join(dict.fromkeys(role for role, _ in found)), found[0][1]) if found else (HELD, "")


def _offload(timing: Timing) -> LayerOffload | None:
    hardware = timing.hardware
    if hardware.host_bytes_per_second is None:
        return None

    def first_layer(recompute: Recompute) -> Item:
        run = replace(timing.run, recompute=recompute)
        part = next(group.part for group in walk(run)[0][0] if group.part.is_layer)
        return replace(timing, run=run).item(part)

    plain, again = first_layer(Recompute()), first_layer(Recompute(mode=Mode.FULL)).seconds.again.seconds
    nbytes = plain.region.saved_bytes
    forward, backward = plain.seconds.forward.seconds, plain.seconds.backward_seconds
    at_hand = HostLink(name=f"{hardware.name}'s own", bytes_per_second=hardware.host_bytes_per_second)
    known = hardware.host_bytes_per_second in {link.bytes_per_second for link in LINKS}

    def trip(link: HostLink) -> LinkTransfer:
        took = host_seconds(nbytes, replace(hardware, host_bytes_per_second=link.bytes_per_second))
        hidden = took <= min(forward, backward)
        return LinkTransfer(link=link, transfer_seconds=took, hidden=hidden, beats_recompute=2 * took < again)

    own = trip(at_hand)
    return LayerOffload(
        layer_bytes=nbytes,
        transfer_seconds=own.transfer_seconds,
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=again,
        links=tuple(map(trip, LINKS if known else (at_hand, *LINKS))),
        hidden=own.hidden,
        break_even_bytes_per_second=2 * nbytes / again,
    )


def _sentences(found: Estimate, options: tuple[RecomputeOption, ...], offload: LayerOffload | None) -> Iterator[str]:
    parts = found.breakdown
    named = {
        "communication": parts.communication,
        "the pipeline's bubble": parts.bubble,
        "recompute": parts.recompute,
        "the optimizer and dispatch": parts.other,
    }
    largest = max(named, key=lambda name: named[name])
    yield (
        f"Of the {format_seconds(found.step_seconds)} as modelled, "
        f"{format_percent(parts.compute / found.step_seconds)} is compute; the largest other part is {largest}, "
        f"{format_seconds(named[largest])}."
    )
    fitting = [option for rule in FitRule for option in options if option.rule is rule]
    if not fitting:
        yield "None of these ways to keep activations fits the device."
    else:
        best = min((one for one in fitting if one.rule is fitting[0].rule), key=lambda option: option.step_seconds)
        assert best.rule is not None
        took, peak = format_seconds(best.step_seconds), format_bytes(best.peak_bytes)
        yield f"The quickest that {best.rule.words} is {best.recompute}, {took} a step at a peak of {peak}."
    if offload is not None:
        hides = "overlaps with both passes" if offload.hidden else "is partly exposed"
        yield (
            f"A layer saves {format_bytes(offload.layer_bytes)}: one way to the host takes "
            f"{format_seconds(offload.transfer_seconds)}, with a forward of {format_seconds(offload.forward_seconds)} "
            f"and a backward of {format_seconds(offload.backward_seconds)}: offloading all of it {hides}."
        )


# a plan, layer by layer -----------------------------------------------------------------------------------------------

MOST_NAMED = 3
"""Tensors that are named, the largest first."""

KEPT, RECOMPUTED, OFFLOADED = "kept", "recomputed", "offloaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Reasons for a layer's policy: recomputed and offloaded tensors, and the time that both take.

    Args:
        recomputed, offloaded: names of tensors that backward recomputes, and that are offloaded, largest first.
        freed_bytes: not saved because they are recomputed, in ``recompute_seconds``.
        transfer_seconds: of one transfer, which overlaps with the next region's ``forward_seconds`` or
            ``backward_seconds``.
    """

    layer: str
    recomputed: tuple[str, ...] = field(metadata={"former": "again"})
    freed_bytes: int
    recompute_seconds: float = field(metadata={"former": "again_seconds"})
    offloaded: tuple[str, ...] = field(metadata={"former": "moved"})
    offloaded_bytes: int = field(metadata={"former": "moved_bytes"})
    transfer_seconds: float = field(metadata={"former": "way_seconds"})
    forward_seconds: float
    backward_seconds: float

    @property
    def stalled_seconds(self) -> float:
        """Seconds of both transfers that nothing overlaps with."""
        return sum(max(0.0, self.transfer_seconds - s) for s in (self.forward_seconds, self.backward_seconds))

    def __str__(self) -> str:
        words = []
        if self.recomputed:
            spent, freed = format_seconds(self.recompute_seconds), format_bytes(self.freed_bytes)
            words.append(f"recomputes {listed(self.recomputed, MOST_NAMED)}: {spent} for {freed}")
        if self.offloaded:
            shortest = min(self.forward_seconds, self.backward_seconds)
            exposed = f", {format_seconds(self.stalled_seconds)} exposed" if self.stalled_seconds else ""
            took = f"{format_seconds(self.transfer_seconds)} each way"
            overlap = f"with {format_seconds(shortest)} to overlap{exposed}"
            words.append(f"offloads {listed(self.offloaded, MOST_NAMED)}: {took}, {overlap}")
        return "; ".join(words) or "everything fits"


def layer_reasons(answer: AutoForecast) -> dict[str, Reason]:
    """By layer, in the order of the model."""
    run, device = answer.forecast.run, answer.hardware
    timing = Timing(run=run, hardware=device, execution=execution_of(run))
    found: dict[str, Reason] = {}
    known: dict[tuple[object, ...], Reason] = {}
    for chunk in (chunk for stage in answer.forecast.stages for chunk in stage.parts):
        for at, part in ((at, part) for at, part in enumerate(chunk) if part.is_layer):
            after = at + (part.layers if part.first else 1)  # the region or segment that its copies overlap with
            following = chunk[after : after + chunk[after].layers] if after < len(chunk) else ()
            key = (part.region, part.chosen, *((other.region, other.chosen) for other in following))
            if key not in known:
                known[key] = _reason(timing, part, following)
            found[part.name] = replace(known[key], layer=part.name)
    return {name: found[name] for name in run.model.layer_names}


def _reason(timing: Timing, part: StageRegion, following: Sequence[StageRegion]) -> Reason:
    took, overlapped = timing.item(part).seconds, [timing.item(other).seconds for other in following]
    program = part.program
    moved = program.kept_bytes(part.chosen.offloaded) if part.chosen is not None else 0
    return Reason(
        layer=part.name,
        recomputed=_names(part, RECOMPUTED),
        freed_bytes=program.kept_bytes(program.saved_buffers()) - (program.kept_bytes(part.kept) if part.first else 0),
        recompute_seconds=took.again.seconds,
        offloaded=_names(part, OFFLOADED),
        offloaded_bytes=moved,
        transfer_seconds=host_seconds(moved, timing.hardware) if moved else 0.0,
        forward_seconds=overlapped[0].forward.seconds if overlapped else 0.0,
        backward_seconds=sum(seconds.backward_seconds for seconds in overlapped),
    )


def buffer_policies(part: StageRegion) -> Mapping[int, str]:
    """Policy of each buffer that backward reads: `KEPT`, `RECOMPUTED` or `OFFLOADED`."""
    moved = frozenset[int]() if part.chosen is None else part.chosen.offloaded
    program = part.program
    wanted = [b for b in sorted(program.needed_buffers()) if not program.buffers[b].free and program.buffers[b].nbytes]
    stays = part.kept if part.first else frozenset[int]()  # of a segment the first layer's input alone
    return {b: OFFLOADED if b in moved else KEPT if b in stays else RECOMPUTED for b in wanted}


def _names(part: StageRegion, wanted: str) -> tuple[str, ...]:
    """Names of a region's tensors with one policy, largest first."""
    found = [b for b, place in buffer_policies(part).items() if place == wanted]
    found.sort(key=lambda b: -part.region.program.buffers[b].nbytes)
    return tuple(dict.fromkeys(tensor_name(part.region, b) for b in found))


def tensor_name(region: Region, buffer: int) -> str:
    """First name of a saved tensor."""
    role, path = called(region, buffer)
    return role.split(", ")[0] or path


MOST_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """Tensors of one name whose policy changes in these layers; bytes are of one micro-batch on one rank."""

    tensor: str
    before: str
    after: str
    layers: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.tensor}: {self.before} -> {self.after} in {span(self.layers, brief=True)}"


@dataclass(frozen=True, kw_only=True)
class NextGiB:
    """One more GiB on each rank. ``saved_seconds`` of a step are what it is worth."""

    answer: AutoForecast
    saved_seconds: float
    flips: tuple[Flip, ...]


def what_if(answer: AutoForecast, *, steps: int = MOST_STEPS) -> Iterator[NextGiB]:
    """Plans for each GiB above the budget, until nothing is recomputed and no transfer is waited for."""
    from jettison.search.auto_recompute import choose  # with numpy, which an estimate does without

    before = answer
    for _ in range(steps):
        if before.seconds <= 0.0 and before.host_bytes == 0:
            return
        budget, host = before.budget_bytes + GIB, answer.host_budget_bytes
        after = choose(answer.forecast.run, budget, answer.hardware, host_budget_bytes=host)
        saved = before.step_seconds - after.step_seconds
        yield NextGiB(answer=after, saved_seconds=saved, flips=tuple(flips(before, after)))
        before = after


def flips_text(changed: Sequence[Flip]) -> str:
    """The changes in a line."""
    return "; ".join(map(str, changed)) or "nothing"


def flips(before: AutoForecast, after: AutoForecast) -> Iterator[Flip]:
    """Tensors that another plan of the same run has in another place; largest first."""
    found: defaultdict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    for old, new in zip(before.forecast.parts, after.forecast.parts, strict=True):
        places = buffer_policies(new)
        for buffer, place in buffer_policies(old).items():
            if places[buffer] != place:
                key = (tensor_name(old.region, buffer), place, places[buffer])
                found[key].append((old.name, old.region.program.buffers[buffer].nbytes))
    changed = []
    for (tensor, was, becomes), where in found.items():  # layers that only change parts with each other
        back = found.get((tensor, becomes, was), [])
        both = min(len(where), len(back))
        del where[len(where) - both :], back[len(back) - both :]
        layers, nbytes = tuple(dict.fromkeys(name for name, _ in where)), sum(nbytes for _, nbytes in where)
        changed += [Flip(tensor=tensor, before=was, after=becomes, layers=layers, nbytes=nbytes)] if where else []
    yield from sorted(changed, key=lambda flip: (-flip.nbytes, flip.tensor))
