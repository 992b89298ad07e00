"""What a step must hold at least, by what a layer holds and how far its backward rises: rules 3 and 4 of `bounds`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jettison.ledger.schedule import stage_occupancies
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

    def first_stage(self, layers: int, *, alone: bool, there: bool) -> int:
        """What the first stage has before a backward; ``there``, gradients as well."""
        found = self.settled.of(layers, alone=alone)
        return found + self.gradients.of(layers, alone=alone) if there else found


def segments_in_flight(setup: Setup, layers: tuple[int, ...], segment: int) -> int:
    """The most segments of layers, times micro-batches, that the first stage holds before a backward.

    Args:
        layers: of each chunk of the first stage.
    """
    layout = setup.layout
    count = setup.micro_batches if layout.pp > 1 else 1
    return _segments_in_flight(layout.schedule, layout.pp, count, layout.virtual_stages, layers, segment)


@lru_cache(maxsize=65536)
def _segments_in_flight(
    schedule: Schedule, stages: int, micro_batches: int, virtual_stages: int, layers: tuple[int, ...], segment: int
) -> int:
    states = stage_occupancies(
        schedule, stage=0, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    counts = [-(-n // segment) for n in layers]
    return max(sum((f + w) * n for f, w, n in zip(s.forward, s.weight, counts, strict=True)) for s in states)
