"""Memory against compute against communication: what a step's time goes into, and what else could be chosen.

NOTE [ Recompute or offload ]
A tensor that is saved can be computed again, which takes the device `again` seconds; or it goes to the host during the
forward and comes back during the backward. A link's bandwidth is of one direction, and the two ways lie in different
passes, so each way takes bytes / bandwidth whatever the other direction could do; bandwidths that add both directions
halve these times, wrongly. Offloading is free of cost as long as each way hides behind the pass that it lies in. Beyond
that, both ways together cost 2 bytes / bandwidth, and break even with computing again where the link reaches
2 bytes / again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from jettison.cost.collective import host_seconds
from jettison.cost.execution import Execution, execution_of
from jettison.cost.layer import Class, PriceModel
from jettison.errors import UsageError
from jettison.formula.region import HELD, Region, layer_region
from jettison.predict.allowance import available_bytes
from jettison.predict.forecast import forecast
from jettison.predict.stage_items import Item
from jettison.predict.stage_time import Timing
from jettison.predict.stages import RegionGroup, walk
from jettison.predict.time import Estimate, estimate
from jettison.predict.whole_micro_batches import most_whole
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run
from jettison.units import format_bytes, format_percent, format_seconds

SMALLEST: Final = 0.005
"""Tensors with less than this share of a layer's bytes are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """A way to the host, in bytes a second in one direction, for one device."""

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
class Option:
    """The run under one way of keeping or not keeping activations. ``fits``: the device, with its allowance."""

    recompute: str
    current: bool
    step_seconds: float
    peak_bytes: int
    fits: bool
    mfu: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trade:
    """One saved tensor of a layer.

    Args:
        again_seconds: to compute it from what else is saved; None: it may not be.
        moved_seconds: one way to the host over the link at hand; None: there is none.
        break_even_bytes_per_second: a link in one direction that costs as much as computing again, if nothing hides.
        links: those of `LINKS` over which moving it, unhidden, is quicker than computing it again.
    """

    role: str
    path: str
    nbytes: int
    again_seconds: float | None
    moved_seconds: float | None
    break_even_bytes_per_second: float | None
    links: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """All that a layer saves, over one link.

    Args:
        hides: each way is no longer than the pass that it lies in.
        quicker: both ways, unhidden, take less than computing the layer again.
    """

    link: HostLink
    one_way_seconds: float
    hides: bool
    quicker: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """All that a layer saves, sent away and fetched back, or computed again from its input.

    Args:
        ways: over each of `LINKS`, and first over the device's own where that is none of them.
    """

    layer_bytes: int
    one_way_seconds: float
    forward_seconds: float
    backward_seconds: float
    again_seconds: float
    ways: tuple[Way, ...]

    @property
    def hides(self) -> bool:
        """Is each way shorter than the pass that it lies in?"""
        return self.one_way_seconds <= min(self.forward_seconds, self.backward_seconds)

    @property
    def break_even_bytes_per_second(self) -> float:
        """A link in one direction over which both ways, unhidden, take as long as computing the layer again."""
        return 2 * self.layer_bytes / self.again_seconds


@dataclass(frozen=True, kw_only=True)
class Trilemma:
    """What a step's time goes into, and the alternatives."""

    estimate: Estimate
    kinds: tuple[tuple[Class, float], ...]  # of the busiest stage's compute
    options: tuple[Option, ...]
    trades: tuple[Trade, ...]
    offload: Offload | None
    sentences: tuple[str, ...]


def explain(found: Estimate) -> Trilemma:
    """Everything that `--explain` adds to an estimate."""
    run, hardware = found.run, found.hardware
    options = tuple(_options(found))
    offload = _offload(run, hardware, found.execution)
    return Trilemma(
        estimate=found,
        kinds=_kinds(found),
        options=options,
        trades=tuple(trades(run, hardware, found.execution)),
        offload=offload,
        sentences=tuple(_sentences(found, options, offload)),
    )


def _kinds(found: Estimate) -> tuple[tuple[Class, float], ...]:
    run = found.run
    timing = Timing(run=run, hardware=found.hardware, execution=found.execution)
    totals = dict.fromkeys(Class, 0.0)
    for item in (item for chunk in walk(run)[found.busiest] for item in timing.items(chunk)):
        seconds = item.prices.by_class(item.region)
        for kind in Class:
            totals[kind] += item.count * run.micro_batches * seconds[kind]
    return tuple(totals.items())


# alternatives ---------------------------------------------------------------------------------------------------------


def _options(found: Estimate) -> Iterator[Option]:
    """None, selective of both kinds, full and offloading, and the run as it is."""
    run = found.run
    modes = [Recompute(mode=mode) for mode in (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.FULL)]
    if found.hardware.host_bytes_per_second is not None:
        modes.append(Recompute(offload=True))
    current = run.recompute
    for mode in modes if current in modes else [current, *modes]:
        other = replace(run, recompute=mode)
        timed = found if mode == current else estimate(other, found.hardware, execution=found.execution)
        peak = forecast(other).peak_bytes
        yield Option(
            recompute=f"{mode} + offload" if mode.offload else replace(mode, whole=0).words,
            current=mode == current,
            step_seconds=timed.step_seconds,
            peak_bytes=peak,
            mfu=timed.mfu,
            fits=peak <= available_bytes(found.hardware, other),
        )


def trades(run: Run, hardware: Hardware, execution: Execution | None = None) -> Iterator[Trade]:
    """The saved tensors of the run's most frequent layer, largest first, each against all others being kept."""
    how = execution or execution_of(run)
    layer = max(run.model.kinds, key=run.model.layers.count)
    region = layer_region(run.scene, layer)
    prices = Timing(run=run, hardware=hardware, execution=how).prices(layer)
    program, smallest = region.program, SMALLEST * region.saved_bytes
    seen: set[int] = set()
    rows = []
    for slot in program.slots:
        buffer = program.buffers[slot.buffer]
        if slot.buffer in seen or buffer.free or buffer.nbytes < smallest:
            continue
        seen.add(slot.buffer)
        rows.append(_trade(prices, region, slot.buffer))
    yield from sorted(rows, key=lambda row: -row.nbytes)


def _trade(prices: PriceModel, region: Region, buffer: int) -> Trade:
    hardware = prices.hardware
    nbytes = region.program.buffers[buffer].nbytes
    closure = region.program.closure(buffer)
    again = None
    if closure.anchor is None and closure.ops:
        again = prices.seconds(region, frozenset(closure.ops)).again.seconds
    role, path = called(region, buffer)
    limit = 2 * nbytes / again if again else None
    quicker = (
        link.name for link in LINKS if limit is not None and link.bytes_per_second * hardware.reached.host > limit
    )
    return Trade(
        role=role,
        path=path,
        nbytes=nbytes,
        again_seconds=again,
        moved_seconds=None if hardware.host_bytes_per_second is None else host_seconds(nbytes, hardware),
        break_even_bytes_per_second=limit,
        links=tuple(quicker),
    )


def called(region: Region, buffer: int) -> tuple[str, str]:
    """What people call a saved tensor (several names, where several tensors share a storage), and where it is read."""
    storages = {index: storage for storage, index in region.buffers.items()}
    found = [
        (saved.role, step.path)
        for step in region.tape.steps
        for saved in step.saved
        if saved.value.storage == storages[buffer] and saved.role
    ]
    return (", ".join(dict.fromkeys(role for role, _ in found)), found[0][1]) if found else (HELD, "")


def _first_layer(timing: Timing) -> Item:
    part = next(group.part for group in walk(timing.run)[0][0] if group.part.is_layer)
    return timing.items([RegionGroup(part=part, names=(part.name,))])[0]


def _offload(run: Run, hardware: Hardware, execution: Execution) -> Offload | None:
    if hardware.host_bytes_per_second is None:
        return None
    plain = replace(run, recompute=Recompute())
    timing = Timing(run=plain, hardware=hardware, execution=execution)
    item = _first_layer(timing)
    repeated = _first_layer(replace(timing, run=replace(run, recompute=Recompute(mode=Mode.FULL))))
    nbytes, again = item.region.saved_bytes, repeated.seconds.again.seconds
    forward, backward = item.seconds.forward.seconds, item.seconds.backward_seconds
    at_hand = HostLink(name=f"{hardware.name}'s own", bytes_per_second=hardware.host_bytes_per_second)
    known = hardware.host_bytes_per_second in {link.bytes_per_second for link in LINKS}
    ways = []
    for link in LINKS if known else (at_hand, *LINKS):
        took = host_seconds(nbytes, replace(hardware, host_bytes_per_second=link.bytes_per_second))
        ways.append(
            Way(link=link, one_way_seconds=took, hides=took <= min(forward, backward), quicker=2 * took < again)
        )
    return Offload(
        layer_bytes=nbytes,
        one_way_seconds=host_seconds(nbytes, hardware),
        forward_seconds=forward,
        backward_seconds=backward,
        again_seconds=again,
        ways=tuple(ways),
    )


# arXiv 2205.05198 Appendix C ------------------------------------------------------------------------------------------


def microbatch_level(run: Run, hardware: Hardware, *, limit_bytes: int | None = None) -> Estimate:
    """The run with as many micro-batches of each window kept whole as fit: `predict.whole_micro_batches`.

    Args:
        limit_bytes: of tensors on a device; left out, what the hardware leaves for them.

    Raises:
        UsageError: the run computes nothing again, or does not fit as it is.
    """
    if run.recompute.mode is Mode.NONE:
        raise UsageError("got --recompute none; keeping some micro-batches whole needs a mode that keeps others less")
    limit = available_bytes(hardware, run) if limit_bytes is None else limit_bytes
    needed = forecast(run).peak_bytes
    if needed > limit:
        raise UsageError(f"the run peaks at {format_bytes(needed)}, and there are {format_bytes(limit)} for it")
    return estimate(most_whole(run, limit), hardware)


# in words -------------------------------------------------------------------------------------------------------------


def _sentences(found: Estimate, options: tuple[Option, ...], offload: Offload | None) -> Iterator[str]:
    parts = found.breakdown
    named = {
        "compute": parts.compute,
        "communication": parts.communication,
        "the pipeline's bubble": parts.bubble,
        "recompute": parts.recompute,
        "the optimizer and dispatch": parts.other,
    }
    largest = max((name for name in named if name != "compute"), key=lambda name: named[name])
    yield (
        f"Of a step of {format_seconds(found.step_seconds)}, {format_percent(parts.compute / found.step_seconds)} is "
        f"compute; the largest other part is {largest}, {format_seconds(named[largest])}."
    )
    fitting = [option for option in options if option.fits]
    if not fitting:
        yield "None of these ways to keep activations fits the device."
    else:
        best = min(fitting, key=lambda option: option.step_seconds)
        yield (
            f"The quickest of those that fit is {best.recompute}, {format_seconds(best.step_seconds)} a step at a peak "
            f"of {format_bytes(best.peak_bytes)}."
        )
    if offload is not None:
        hides = "hides behind both passes" if offload.hides else "does not hide"
        yield (
            f"A layer saves {format_bytes(offload.layer_bytes)}: one way to the host takes "
            f"{format_seconds(offload.one_way_seconds)}, beside a forward of {format_seconds(offload.forward_seconds)} "
            f"and a backward of {format_seconds(offload.backward_seconds)}: offloading all of it {hides}."
        )
