"""How a region is treated under each plan that it has (one for each of several batches, say), and its segment: blocks
in a row that hold one input, of which each computes its output again for the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from jettison.capture.recording import Place
from jettison.capture.tensor_subclasses import plain, version_of, wrapping
from jettison.runtime.handles import Handle
from jettison.solve.policy import CheckpointPolicy


class SegmentLink:
    """A region's place in a checkpoint segment.

    Args:
        before: the place of the one before.
        inputs: which of its inputs the one before computes again: (leaf position, output leaf of the one before).
        outputs: output leaves that it computes again itself, for the next.
    """

    def __init__(
        self,
        *,
        before: SegmentLink | None = None,
        inputs: tuple[tuple[int, int], ...] = (),
        outputs: tuple[int, ...] = (),
    ) -> None:
        self.before, self.inputs, self.outputs = before, inputs, outputs
        self._left: dict[int, tuple[_Seen, Handle]] = {}  # output leaf -> how to know it again, its recipe

    @property
    def is_alone(self) -> bool:
        """Neither takes from a block before nor leaves anything for one after."""
        return self.before is None and not self.inputs and not self.outputs

    def leave(self, returned: Sequence[Any], handles: Mapping[int, Handle]) -> None:
        """A call has ended: what the next block may ask for."""
        self._left = {leaf: (_Seen(returned[leaf]), handle) for leaf, handle in handles.items()}

    def take(self, leaves: Sequence[Any]) -> dict[int, Handle]:
        """By leaf position, how inputs of a call are computed again that are the outputs of the block before."""
        if self.before is None:
            return {}
        left, self.before._left = self.before._left, {}
        found = {}
        for position, leaf in self.inputs:
            if leaf in left:
                output, handle = left[leaf]
                if output.is_like(leaves[position]):
                    found[position] = handle
        return found

    def forget(self) -> None:
        """The next block asks for nothing that was left."""
        self._left = {}


class _Seen:
    """A tensor without holding it, to be known again when it comes by as itself or as an alias (FSDP makes one)."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = weakref.ref(plain(tensor).untyped_storage())
        self.how = self._how(tensor)

    def is_like(self, tensor: Any) -> bool:
        """Whether this is the same memory, seen in the same way and not written to since."""
        return (
            isinstance(tensor, Tensor)
            and self.storage() is plain(tensor).untyped_storage()
            and self.how == self._how(tensor)
        )

    @staticmethod
    def _how(tensor: Tensor) -> tuple[Any, ...]:
        inner = plain(tensor)
        return inner.shape, inner.stride(), inner.storage_offset(), inner.dtype, wrapping(tensor), version_of(tensor)


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
