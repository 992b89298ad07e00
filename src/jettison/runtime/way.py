"""How a region is treated, under each of the plans that it has: one for each of several batches, say."""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.capture.recording import Place
from jettison.runtime.segment import SegmentLink
from jettison.solve.policy import CheckpointPolicy


@dataclass(frozen=True, kw_only=True)
class Way:
    """Under one plan: what is kept, and the region's place in a checkpoint segment.

    Args:
        stays: which of its calls in one forward of the model (1: the first) is the last of all blocks' and moves
            nothing, since backward begins there at once; 0 where another block's is.
        lives: arguments and results that the loop holds as the model's output: moving them would gain nothing.
    """

    policy: CheckpointPolicy
    link: SegmentLink = field(default_factory=SegmentLink)
    stays: int = 0
    lives: frozenset[Place] = frozenset()

    @property
    def linked(self) -> frozenset[int]:
        """Inputs that the region before computes again."""
        return frozenset(position for position, _ in self.link.inputs)

    @property
    def handed(self) -> frozenset[int]:
        """Outputs that this one computes again for the next."""
        return frozenset(self.link.outputs)
