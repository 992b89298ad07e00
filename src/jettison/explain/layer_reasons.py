"""Why a plan treats a layer as it does: which tensors go where, what that takes, and what it hides behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jettison.cost.collective import host_seconds
from jettison.cost.execution import execution_of
from jettison.explain.trilemma import called
from jettison.formula.region import Region
from jettison.predict.auto_recompute import AutoForecast
from jettison.predict.stage_time import Timing
from jettison.predict.stages import RegionGroup, StageRegion
from jettison.units import format_bytes, format_seconds

MOST_NAMED = 3
"""Tensors that are named, the largest first."""

HERE, AGAIN, THERE = "kept", "computed again", "on the host"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One layer, of one micro-batch on one rank.

    Args:
        again, moved: names of tensors that backward computes again, and that go to the host, largest first.
        freed_bytes: that are not held because they are computed again; ``again_seconds`` is what that takes.
        way_seconds: one way to the host; ``forward_seconds`` and ``backward_seconds`` of the next region are beside it.
    """

    again: tuple[str, ...]
    freed_bytes: int
    again_seconds: float
    moved: tuple[str, ...]
    moved_bytes: int
    way_seconds: float
    forward_seconds: float
    backward_seconds: float

    @property
    def stalled_seconds(self) -> float:
        """What both ways are waited for."""
        return sum(max(0.0, self.way_seconds - beside) for beside in (self.forward_seconds, self.backward_seconds))

    def __str__(self) -> str:
        return "; ".join(self._words()) or "all of it has room"

    def _words(self) -> Iterator[str]:
        if self.again:
            spent, freed = format_seconds(self.again_seconds), format_bytes(self.freed_bytes)
            yield f"again {_named(self.again)}: {spent} for {freed}"
        if self.moved:
            shortest = min(self.forward_seconds, self.backward_seconds)
            waits = f"waits {format_seconds(self.stalled_seconds)}" if self.stalled_seconds else "hides"
            yield (
                f"to the host {_named(self.moved)}: {format_seconds(self.way_seconds)} a way {waits} behind "
                f"{format_seconds(shortest)}"
            )


def _named(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def layer_reasons(answer: AutoForecast) -> dict[str, Reason]:
    """By layer, in the order of the model."""
    run, device = answer.forecast.run, answer.hardware
    timing = Timing(run=run, hardware=device, execution=execution_of(run))
    found: dict[str, Reason] = {}
    known: dict[tuple[object, ...], Reason] = {}
    for stage in answer.forecast.stages:
        for chunk in (chunk for chunk in stage.parts if chunk):
            for at, part in enumerate(chunk):
                if part.is_layer:
                    beside = _following(chunk, at)
                    key = (part.region, part.chosen, *((other.region, other.chosen) for other in beside))
                    if key not in known:
                        known[key] = _reason(timing, part, beside)
                    found[part.name] = known[key]
    return {name: found[name] for name in run.model.layer_names}


def _following(chunk: Sequence[StageRegion], at: int) -> Sequence[StageRegion]:
    """What comes after a layer or its segment, whose passes are beside its copies: a region, or a whole segment."""
    part = chunk[at]
    after = at + (part.segment if part.first else 1)
    return chunk[after : after + chunk[after].segment] if after < len(chunk) else ()


def _reason(timing: Timing, part: StageRegion, following: Sequence[StageRegion]) -> Reason:
    took = timing.items([RegionGroup(part=part, names=(part.name,))])[0].seconds
    beside = [timing.items([RegionGroup(part=other, names=(other.name,))])[0].seconds for other in following]
    where = whereabouts(part)
    program = part.region.program
    moved = program.kept_bytes(part.chosen.moved) if part.chosen is not None else 0
    return Reason(
        again=_names(part.region, [b for b, place in where.items() if place == AGAIN]),
        freed_bytes=program.kept_bytes(program.saved_buffers()) - (program.kept_bytes(part.kept) if part.first else 0),
        again_seconds=took.again.seconds,
        moved=_names(part.region, [b for b, place in where.items() if place == THERE]),
        moved_bytes=moved,
        way_seconds=host_seconds(moved, timing.hardware) if moved else 0.0,
        forward_seconds=beside[0].forward.seconds if beside else 0.0,
        backward_seconds=sum(seconds.backward_seconds for seconds in beside),
    )


def whereabouts(part: StageRegion) -> Mapping[int, str]:
    """For each buffer that backward asks for, where it is in between."""
    moved = frozenset[int]() if part.chosen is None else part.chosen.moved
    program = part.region.program
    wanted = [b for b in sorted(program.needed_buffers()) if not program.buffers[b].free and program.buffers[b].nbytes]
    stays = part.kept if part.first else frozenset[int]()  # of a segment the first layer's input alone
    return {b: THERE if b in moved else HERE if b in stays else AGAIN for b in wanted}


def _names(region: Region, buffers: list[int]) -> tuple[str, ...]:
    ordered = sorted(buffers, key=lambda b: -region.program.buffers[b].nbytes)
    return tuple(dict.fromkeys(tensor_name(region, b) for b in ordered))


def tensor_name(region: Region, buffer: int) -> str:
    """What people call it, the first of several names."""
    role, path = called(region, buffer)
    return role.split(", ")[0] or path
