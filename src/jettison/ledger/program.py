"""The recorded program of a region: what its forward computed, and what autograd saved of it.

A *region* is one call of a module (a repeated block, or the rest of the model around the blocks). Its program is a
straight line of ATen ops over *buffers*. A buffer is one version of one storage: views of a storage are the same
buffer; an in-place write makes the next version, which is another buffer. Only bytes, costs and dependencies are
recorded here; `capture` knows how to call an op again. Nothing here needs torch: plans can be made anywhere.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any


class Source(StrEnum):
    """Origin of a buffer's bytes."""

    OP = "op"  # an op of this region computes it
    INPUT = "input"  # a tensor argument of the region
    PARAMETER = "parameter"  # a parameter or registered buffer, found again by name
    BLOCK = "block"  # the output of a nested region (root program only)
    RANDOM = "random"  # the state of the random generator at this point of the region
    OUTER = "outer"  # a tensor that reached the region by another way (closure, cache): it cannot be looked up


class Anchor(StrEnum):
    """Reason why an op may not be recomputed."""

    MUTATED = "mutated"  # reads or writes memory that the region, or later code, overwrites
    OPAQUE = "opaque"  # not one deterministic ATen call: it cannot be replayed
    DISCRETE = "discrete choice"  # router top-k and the like: a recomputed choice may differ
    GENERATOR = "private generator"  # draws from a generator that is not the default one
    COLLECTIVE = "collective order"
    HANDED = "handed on"  # other regions read it, so it is held anyway
    ASKED = "read by a backward inside the forward"  # other inputs may not exist yet at that time
    UNWRITTEN = "leaves part of its results unwritten"  # uninitialized memory differs the next time
    NONDETERMINISTIC = "order of additions"  # the kernel adds in the order in which its threads arrive


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One version of one storage. ``nbytes`` is the size of the whole storage, in bytes."""

    index: int
    nbytes: int
    source: Source
    producer: int | None = None  # index of the op that computes it, for Source.OP and the later Source.RANDOM states
    name: str = ""  # dotted parameter name, or the position of the input
    keepable: bool = False  # the runtime sees it (a saved slot, a module boundary, an input) and can keep it
    free: bool = False  # available in backward without costing this region a byte

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ValueError(f"a buffer has {self.nbytes} bytes; expected 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One recorded ATen call. ``inputs`` and ``outputs`` are buffer indices; ``bytes_moved`` is read plus written."""

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    bytes_moved: int
    path: str = ""  # module path, relative to the region
    price_key: str = ""  # equal for calls of equal cost: name, shapes, dtypes, strides
    anchor: Anchor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One tensor that autograd saved; slots are in saving order."""

    index: int
    buffer: int
    shape: tuple[int, ...]
    dtype: str
    op: str = ""  # the op that ran when it was saved
    path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Closure:
    """Ops that recompute one buffer while all other saved buffers are kept."""

    ops: tuple[int, ...]
    stops: tuple[int, ...]  # buffers that it reads
    anchor: str | None  # why recomputation is impossible, if it is


@dataclass(frozen=True, kw_only=True)
class Program:
    """A region's forward, ops in execution order. Raise `ValueError` if one reads what comes later, or nowhere."""

    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    slots: tuple[Slot, ...]
    outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = len(self.buffers)
        for i, buffer in enumerate(self.buffers):
            if buffer.index != i:
                raise ValueError(f"buffer {buffer.index} stands at position {i}")
        for op in self.ops:
            for b in (*op.inputs, *op.outputs):
                if not 0 <= b < known:
                    raise ValueError(f"op {op.index} ({op.name}) names buffer {b}; there are {known}")
            for b in op.inputs:
                producer = self.buffers[b].producer
                if producer is not None and producer >= op.index:
                    raise ValueError(f"op {op.index} ({op.name}) reads buffer {b} before op {producer} makes it")

    def needed_buffers(self) -> frozenset[int]:
        """Buffers that backward asks for: those with a slot."""
        return frozenset(slot.buffer for slot in self.slots)

    def recompute_set(self, kept: frozenset[int], *, also: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """Indices of the ops that backward recomputes when only ``kept`` buffers (and free ones) are held, in order.
        Raise `ValueError` if a needed buffer is neither kept nor can be recomputed.

        Args:
            also: buffers to recompute in addition to the saved ones.
        """
        wanted = [b for b in self.needed_buffers() | also if b not in kept]
        again, stops = self._traced(wanted, kept)
        for b in stops:
            if b not in kept and not self.buffers[b].free:
                buffer = self.buffers[b]
                raise ValueError(
                    f"buffer {b} ({buffer.source}, {buffer.name or 'unnamed'}) is not kept and has no producer"
                )
        for o in again:
            if (op := self.ops[o]).anchor is not None:
                raise ValueError(
                    f"buffer {again[o]} comes from {op.name}, which may not be recomputed ({op.anchor}), and is not "
                    "kept"
                )
        return tuple(sorted(again))

    def can_compute(self, wanted: int, kept: frozenset[int]) -> bool:
        """Whether ops that may be recomputed lead from ``kept`` and free buffers to this one."""
        ops, stops = self._traced([wanted], kept)
        there = all(b in kept or self.buffers[b].free for b in stops)
        return there and all(self.ops[o].anchor is None for o in ops)

    def closure(self, wanted: int) -> Closure:
        """Ops that recompute buffer ``wanted``; none for an argument, which no op computes."""
        ops, stops = self._traced([wanted], self.saved_buffers() - {wanted})
        if stops == [wanted]:
            return Closure(ops=(), stops=(), anchor=None)
        if anchors := [self.ops[o].anchor for o in ops if self.ops[o].anchor is not None]:
            return Closure(ops=(), stops=(), anchor=str(anchors[0]))
        return Closure(ops=tuple(sorted(ops)), stops=tuple(sorted(stops)), anchor=None)

    def _traced(self, wanted: Sequence[int], kept: frozenset[int]) -> tuple[dict[int, int], list[int]]:
        """Ops that compute buffers, each with the first buffer that asked for it, and buffers that no op has to."""
        ops: dict[int, int] = {}
        stops: list[int] = []
        stack, seen = list(wanted), set(wanted)
        while stack:
            b = stack.pop()
            buffer = self.buffers[b]
            if b in kept or buffer.free or buffer.producer is None:
                stops.append(b)
            elif buffer.producer not in ops:
                ops[buffer.producer] = b
                fresh = [each for each in self.ops[buffer.producer].inputs if each not in seen]
                seen.update(fresh)
                stack += fresh
        return ops, stops

    def kept_bytes(self, kept: frozenset[int]) -> int:
        """Bytes that stay allocated between forward and backward because of this region."""
        return sum(self.buffers[b].nbytes for b in kept if not self.buffers[b].free)

    def given(self, ops: frozenset[int]) -> frozenset[int]:
        """Buffers that these ops read and none of them produces."""
        made = {b for o in ops for b in self.ops[o].outputs}
        read = {b for o in ops for b in self.ops[o].inputs}
        return frozenset(b for b in read - made if not self.buffers[b].free)

    def saved_buffers(self) -> frozenset[int]:
        """Buffers that plain autograd holds for this region and that cost bytes."""
        return frozenset(b for b in self.needed_buffers() if not self.buffers[b].free)

    def form(self) -> str:
        """Digest that is equal for regions that run the same ops in the same order, on tensors of any shape."""
        ops = [(op.name, op.inputs, op.outputs, op.path, op.anchor) for op in self.ops]
        buffers = [(b.source, b.producer, b.name, b.keepable) for b in self.buffers]
        return _hashed(repr((ops, buffers, [slot.buffer for slot in self.slots], self.outputs)))

    def digest(self) -> str:
        """Digest that is equal for regions that compute the same thing on tensors of the same shape."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return _hashed(json.dumps(self, default=_by_field, sort_keys=True, separators=(",", ":")))


def _hashed(text: str) -> str:
    import hashlib  # imported on use, to keep the command line's start fast

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _by_field(part: Any) -> dict[str, Any]:
    """Like `dataclasses.asdict`, without copying the values."""
    return {field.name: getattr(part, field.name) for field in fields(part)}
