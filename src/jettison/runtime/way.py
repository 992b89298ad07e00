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


@dataclass(eq=False, kw_only=True)
class SegmentLink:
    """A region's place in a checkpoint segment."""

    before: SegmentLink | None = None  # the place of the one before
    inputs: tuple[tuple[int, int], ...] = ()  # which the one before recomputes: (leaf position, output leaf of that)
    outputs: tuple[int, ...] = ()  # output leaves that it recomputes itself, for the next
    # by output leaf: its storage, how that was seen, and how it is recomputed
    _left: dict[int, tuple[Any, Any, Handle]] = field(default_factory=dict, init=False)

    @property
    def is_alone(self) -> bool:
        """Neither takes from a block before nor leaves anything for one after."""
        return self.before is None and not self.inputs and not self.outputs

    def leave(self, returned: Sequence[Any], handles: Mapping[int, Handle]) -> None:
        """A call has ended: what the next block may ask for."""
        self._left = {
            leaf: (weakref.ref(plain(returned[leaf]).untyped_storage()), _how(returned[leaf]), handle)
            for leaf, handle in handles.items()
        }

    def take(self, leaves: Sequence[Any]) -> dict[int, Handle]:
        """By leaf position, how inputs of a call are computed again that are the outputs of the block before."""
        if self.before is None:
            return {}
        left, self.before._left = self.before._left, {}
        found = {}
        for position, leaf in self.inputs:
            tensor = leaves[position]
            if leaf in left and isinstance(tensor, Tensor):
                storage, how, handle = left[leaf]
                if storage() is plain(tensor).untyped_storage() and how == _how(tensor):
                    found[position] = handle
        return found

    def forget(self) -> None:
        """The next block asks for nothing that was left."""
        self._left = {}


def _how(tensor: Tensor) -> tuple[Any, ...]:
    """How a storage is seen, and its version: what comes by may be an alias of what was left (FSDP makes one)."""
    inner = plain(tensor)
    return inner.shape, inner.stride(), inner.storage_offset(), inner.dtype, wrapping(tensor), version_of(tensor)


@dataclass(frozen=True, kw_only=True)
class Way:
    """Under one plan: what is kept, and the region's place in a checkpoint segment."""

    policy: CheckpointPolicy
    link: SegmentLink = field(default_factory=SegmentLink)
    # which of its calls in one forward of the model (1: the first) is the last of all blocks' and moves nothing, since
    # backward begins there at once; 0 where another block's is
    stays: int = 0
    lives: frozenset[Place] = frozenset()  # arguments and results that the loop holds as the model's output
