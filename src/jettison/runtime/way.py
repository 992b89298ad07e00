"""How a region is treated, under each of the plans that it has: one for each of several batches, say."""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.runtime.segment import SegmentLink
from jettison.solve.policy import CheckpointPolicy


@dataclass(frozen=True, kw_only=True)
class Way:
    """Under one plan: what is kept, and the region's place in a checkpoint segment."""

    policy: CheckpointPolicy
    link: SegmentLink = field(default_factory=SegmentLink)

    @property
    def linked(self) -> frozenset[int]:
        """Inputs that the region before computes again."""
        return frozenset(position for position, _ in self.link.inputs)

    @property
    def handed(self) -> frozenset[int]:
        """Outputs that this one computes again for the next."""
        return frozenset(self.link.outputs)
