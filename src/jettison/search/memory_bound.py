"""What a step must hold at least, by what a layer holds and how far its backward rises: rules 3 and 4 of `bounds`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from jettison.memory.actions import OrderOptions, device_order
from jettison.memory.schedule import Work
from jettison.search.space import Setup
from jettison.spec.layout import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Of one micro-batch on one rank, by the layer that has least of each; of ``shared`` the one that has most.

    Args:
        resident: between the passes.
        forward, backward: how far passes rise above what is held before them.
        output: what it returns.
        shared: of ``resident``, what is held where only the input is.
    """

    resident: int
    forward: int
    backward: int
    output: int
    shared: int

    def segment(self, layers: int) -> int:
        """How far the backward of a segment rises that holds its input and runs so many layers again."""
        again = self.output + (layers - 1) * self.resident + self.forward
        return max(again, layers * self.resident + self.backward) - self.shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Bytes of a layer, the least; of the embedding, and of the head."""

    layer: int
    first: int
    last: int

    def of(self, layers: int, *, alone: bool) -> int:
        """Of the first stage with so many layers; ``alone``, it has the head, too."""
        return self.first + layers * self.layer + (self.last if alone else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardBytes:
    """Of one stage of ZeRO.

    Args:
        everything: parameters, state and gradients of the whole model.
        settled: parameters and state.
        gathered: beside any pass of a layer.
    """

    everything: int
    settled: Parts
    gradients: Parts
    gathered: int

    def first_stage(self, layers: int, *, alone: bool) -> int:
        """What the first stage has when its optimizer steps."""
        return self.settled.of(layers, alone=alone) + self.gradients.of(layers, alone=alone)


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """What the first stage holds before a backward.

    Args:
        segments: of layers, times micro-batches.
        learned: layers whose gradients are there; ``entrance``: those of the first chunk are, and of the embedding.
        adds: the backward finds its chunk's gradients there.
    """

    segments: int
    learned: int
    entrance: bool
    adds: bool

    def covers(self, other: InFlight) -> bool:
        """Is nothing of the other one higher? Where gradients appear, their backward may rise higher: a bound does
        without it.
        """
        within = self.adds >= other.adds and self.entrance >= other.entrance
        return within and self.segments >= other.segments and self.learned >= other.learned


def in_flight(setup: Setup, layers: tuple[int, ...], segment: int, *, upfront: bool) -> tuple[InFlight, ...]:
    """The fullest of these states.

    Args:
        layers: of each chunk of the first stage.
        segment: so many layers are one.
        upfront: gradients are there from the start.
    """
    layout = setup.layout
    schedule = layout.schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B
    return _in_flight(schedule, layout.pp, setup.micro_batches, layout.virtual_stages, layers, segment, upfront)


@lru_cache(maxsize=65536)
def _in_flight(
    schedule: Schedule,
    stages: int,
    micro_batches: int,
    virtual_stages: int,
    layers: tuple[int, ...],
    segment: int,
    upfront: bool,
) -> tuple[InFlight, ...]:
    order = device_order(
        schedule,
        stage=0,
        stages=stages,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
        walk=OrderOptions(learning=not upfront),
    )
    counts = [-(-n // segment) for n in layers]
    found: list[InFlight] = []
    for state in order.fullest.values():
        if state.step.work is Work.FORWARD:
            continue
        learned = state.learned or (1,) * virtual_stages
        found.append(
            InFlight(
                segments=sum(map(mul, state.alive, counts)),
                learned=sum(map(mul, learned, layers)),
                entrance=bool(learned[0]),
                adds=bool(learned[state.step.chunk]),
            )
        )
    kept: list[InFlight] = []
    for each in sorted(found, key=lambda each: (each.segments, each.learned, each.entrance, each.adds), reverse=True):
        if not any(other.covers(each) for other in kept):
            kept.append(each)
    return tuple(kept)
