"""Memory that somebody writes to after a block has used it, and before its backward.

Autograd holds memory, not values. Where an op counts a write, plain autograd refuses to use what it saved; a write past
the counter (``.data``, a piece that is counted apart) changes what backward gets; a write to memory that nobody saved
changes nothing. A recording has to know of all: what is written to later is not what an op of the block gives again,
and is not there any more to compute with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from jettison.capture.model_trace import ModelTrace
from jettison.capture.recorder import Recorder
from jettison.capture.recording import Place, RegionTrace
from jettison.capture.tensor_subclasses import storage_of
from jettison.ledger.program import Anchor, Op


@dataclass(kw_only=True)
class Late:
    """Of one call of a block: arguments and outputs that are written to later, and buffers of its recording."""

    places: set[Place] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Trail:
    """What a recording leaves of its memory. Storages are known by their addresses, which nobody else gets as long as
    they are referred to. Fake ones cost nothing to keep; real ones (masks, positions) would add up over the blocks, and
    are referred to weakly: nobody can write to what nobody has.
    """

    versions: dict[int, list[int]]
    writes: frozenset[int]
    alive: list[FakeTensor | StorageWeakRef]

    @classmethod
    def of(cls, recorder: Recorder) -> Trail:
        """Of a recording that is over."""
        tensors = recorder.tensors()
        alive = [t if isinstance(t, FakeTensor) else StorageWeakRef(t.untyped_storage()) for t in tensors]
        known = {storage_of(tensor) for tensor in tensors}
        return cls(
            versions={storage: found for storage, found in recorder.versions.items() if storage in known},
            writes=frozenset(storage for storage, _ in recorder.writes if storage in known),
            alive=alive,
        )


@dataclass(kw_only=True)
class Memory:
    """Who had which memory, call by call."""

    given: list[dict[int, int]] = field(default_factory=list)  # leaf position of an argument -> storage
    made: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # storage -> (call, output leaf)
    trails: list[Trail | None] = field(default_factory=list)  # None: nothing is known of what it did

    def late(self, root: Recorder) -> list[Late]:
        """What of each call is written to later, by the root or by another block."""
        found = [Late() for _ in self.given]
        for storage, before in self._writes(root):
            for call in range(before):
                self._mark(found[call], call, storage)
            for call, leaf in self.made.get(storage, ()):
                if call < before:
                    found[call].places.add((True, leaf))
        return found

    def in_the_root(self, root: Recorder) -> dict[int, int]:
        """Buffers of the root's recording that blocks write to, and the number of its ops before the first of them."""
        found: dict[int, int] = {}
        for call, trail in enumerate(self.trails):
            for storage in trail.writes if trail else ():
                registered = root.registered.get(storage)
                for b in (*root.versions.get(storage, ()), *([] if registered is None else [registered])):
                    found.setdefault(b, root.nested_at[call])
        return found

    def _writes(self, root: Recorder) -> Iterable[tuple[int, int]]:
        """Storages, and the number of calls that were there before."""
        events = dict.fromkeys(root.writes)
        for call, trail in enumerate(self.trails):
            events.update(dict.fromkeys((storage, call) for storage in (trail.writes if trail else ())))
        return events

    def _mark(self, late: Late, call: int, storage: int) -> None:
        late.places.update((False, position) for position, found in self.given[call].items() if found == storage)
        trail = self.trails[call]
        late.inside.update(trail.versions.get(storage, ()) if trail else ())


def mark_overwritten(trace: ModelTrace, memory: Memory, root: Recorder) -> None:
    """What a block had, and somebody else writes to before backward."""
    late: dict[str, Late] = {}
    for call, found in zip(trace.calls, memory.late(root), strict=True):
        of_class = late.setdefault(call.class_key, Late())
        of_class.places |= found.places
        of_class.inside |= found.inside
    for key, found in late.items():
        if found.places or found.inside:
            trace.classes[key].trace.anchor(frozenset(found.places), frozenset(found.inside))
    for before, call in zip([None, *trace.calls], trace.calls, strict=False):
        made = late[before.class_key].places if before is not None else set()
        given = late[call.class_key].places
        call.links = tuple(
            (position, leaf)
            for position, leaf in call.links
            if (False, position) not in given and (True, leaf) not in made
        )
    anchor_root(trace.root, memory.in_the_root(root))


def anchor_root(root: RegionTrace, written: Mapping[int, int]) -> None:
    """What the root saved, and a block writes to: nobody computes it again, or with it. What the root reads after a
    block has written to it is not what the root made.

    Args:
        written: buffers that blocks write to, see `Memory.in_the_root`.
    """
    saved = root.program.needed_buffers() & written.keys()

    def is_other(op: Op) -> bool:
        return bool(saved.intersection((*op.inputs, *op.outputs))) or any(
            op.index >= written.get(b, len(root.program.ops)) for b in op.inputs
        )

    ops = tuple(replace(op, anchor=op.anchor or Anchor.MUTATED) if is_other(op) else op for op in root.program.ops)
    root.program = replace(root.program, ops=ops)
