"""The recording of a region: its program, its ops as calls, and where its tensors are found."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from jettison.capture.signature import Switches, described
from jettison.capture.tensor_subclasses import Wrapping, plain, wrapping
from jettison.capture.trees import op_leaves
from jettison.ledger.program import Anchor, Program, Source


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a buffer; ``offset`` in elements from the start of the storage.

    Of a DTensor this is the local tensor; ``wrap`` restores the wrapper. ``conj`` and ``neg``: the view has a lazy
    conjugation or negation.
    """

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    wrap: Wrapping | None = None
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, buffer: int, tensor: Tensor) -> TensorRef:
        """A tensor's view of a buffer."""
        part, wrap = plain(tensor), wrapping(tensor)
        size, stride = tuple(part.shape), tuple(part.stride())
        return cls(buffer, size, stride, part.storage_offset(), part.dtype, wrap, part.is_conj(), part.is_neg())


@dataclass(frozen=True, slots=True)
class ValueRead:
    """A value that Python read from a tensor: the tensor's view, and the value.

    ``shape_only``: the op's output shape depends on values, and ``found`` is that shape. ``calls`` compute the tensor
    from the region's arguments, by position among its calls; None if it is made of something else.
    """

    ref: TensorRef
    found: Any
    shape_only: bool
    calls: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Tap:
    """A place at a module boundary where a buffer can be seen: call ``call`` of module ``path``, leaf ``leaf``."""

    path: str
    call: int
    is_output: bool
    leaf: int
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """A recorded op as a call. Tensors in ``args`` and ``kwargs`` are `TensorRef`s.

    ``outputs`` lines up with the op's flat tensor outputs; None for an output that is a view or no tensor. ``written``
    maps each buffer that the op overwrites to its successor. ``state_out`` is often the output of another op, which
    only moves the state: NOTE [ The state moves by shape ] in randomness.py.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]
    written: tuple[tuple[int, int], ...] = ()
    state_in: int | None = None
    state_out: int | None = None
    device: str = "cpu"
    under: Switches | None = None  # kernel switches that the forward had set; None if they are those of its start


@dataclass(frozen=True, slots=True)
class Expected:
    """Expectation of a checked run: a call's `signature_of`, and the buffers that it reads, writes and makes.

    ``reads`` lines up with the call's flat tensor arguments, ``makes`` with its flat tensor results. ``writes`` pairs a
    position among the arguments with the buffer's successor. ``skippable``: a cast that autocast may have cached.
    ``numbers``: whether its plain numbers are those of the recording, and not read from the batch.
    """

    signature: tuple[Any, ...]
    reads: tuple[TensorRef, ...]
    makes: tuple[TensorRef, ...]
    writes: tuple[tuple[int, int], ...]
    skippable: bool
    numbers: bool


Place = tuple[bool, int]
"""(is it an output, its leaf position)."""


@dataclass(kw_only=True)
class RegionTrace:
    """A recorded region: the pure `Program`, and everything needed to recompute parts of it."""

    program: Program
    inputs: dict[int, int]  # buffer -> leaf position of the region's flattened arguments
    output_leaves: list[Any]  # TensorRef, or the value itself, in the order of the flattened output
    output_spec: Any
    calls: list[RecordedOp] = field(default_factory=list)
    slots: list[TensorRef] = field(default_factory=list)
    saved_after: tuple[int, ...] = ()  # by slot, the number of ops before autograd saved it
    taps: dict[int, Tap] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # buffer -> dotted name of the parameter or registered buffer
    sequence: list[Expected] = field(default_factory=list)
    initial_states: dict[str, int] = field(default_factory=dict)  # device -> buffer of its random state at the start
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # buffer -> (nested call, output leaf)
    given: dict[int, TensorRef] = field(default_factory=dict)  # buffer -> the argument, or a nested call's result
    named_at: dict[int, int] = field(default_factory=dict)  # buffer -> offset of the parameter in its storage
    constants: frozenset[int] = frozenset()  # buffers of outputs that require no gradient
    reads: tuple[ValueRead, ...] = ()  # values that the arguments must have for the recording to hold
    made: dict[int, Tensor] = field(default_factory=dict)  # buffer -> a tensor made of Python's numbers
    problem: str = ""  # why nothing may be recomputed by it; it then only lists saved tensors
    hollow: frozenset[int] = frozenset()  # buffers that no kernel writes: their bits are uninitialized
    entangled: bool = False  # it reads a tensor with a graph that is none of its arguments
    overwritten: frozenset[int] = frozenset()  # buffers of others that it writes to
    late: frozenset[Place] = frozenset()  # arguments and outputs that others write to before backward
    late_inside: frozenset[int] = frozenset()  # buffers of its own that others write to before backward
    form: str = ""  # the program's, before anchors for later writes
    written_later: frozenset[int] = frozenset()  # all buffers of `late` and `late_inside`
    asked: frozenset[int] = frozenset()  # leaf positions of arguments that a backward inside the forward reads
    detached: dict[int, str] = field(default_factory=dict)  # op -> parameter that it reads without its graph

    def anchor(self, late: frozenset[Place], inside: frozenset[int] = frozenset()) -> None:
        """Anchor ops for later writes by others. Autograd gets the new values of saved buffers, so these may not be
        recomputed, or read for recomputation; unsaved arguments are gone by then, and not to be kept.

        """
        self.form = self.form or self.program.form()
        self.late, self.late_inside = self.late | late, self.late_inside | inside
        found = inside | self.buffers_at(late)
        self.written_later |= found
        saved = found & self.program.needed_buffers()
        given = {b for b in found - saved if self.program.buffers[b].source is not Source.OP}
        ops = tuple(
            replace(op, anchor=op.anchor or Anchor.MUTATED)
            if saved.intersection((*op.inputs, *op.outputs)) or given.intersection(op.inputs)
            else op
            for op in self.program.ops
        )
        buffers = tuple(
            replace(b, keepable=False) if b.index in found - saved - given else b for b in self.program.buffers
        )
        self.taps = {b: tap for b, tap in self.taps.items() if buffers[b].keepable}
        self.program = replace(self.program, ops=ops, buffers=buffers)

    def anchor_reads(self, names: Collection[str]) -> None:
        """Keep all results of these parameters and buffers, which are written to before backward."""
        moving = {b for b, name in self.names.items() if name in names}
        self._anchor({op.index for op in self.program.ops if moving.intersection(op.inputs)})

    def anchor_detached(self, names: Collection[str]) -> None:
        """Keep all results of these parameters without their graph: their optimizer steps inside of backward, and only
        reads that autograd knows of come before that.
        """
        self._anchor({op for op, name in self.detached.items() if name in names})
        self.detached = {op: name for op, name in self.detached.items() if name not in names}

    def _anchor(self, found: Collection[int]) -> None:
        if found:
            self.form = self.form or self.program.form()
            anchored = {op: replace(self.program.ops[op], anchor=Anchor.MUTATED) for op in found}
            ops = tuple(op if op.anchor else anchored.get(op.index, op) for op in self.program.ops)
            self.program = replace(self.program, ops=ops)

    def buffers_at(self, places: frozenset[Place]) -> frozenset[int]:
        """Buffers of some arguments and outputs."""
        found = {b for b, position in self.inputs.items() if (False, position) in places}
        for is_output, leaf in places:
            ref = self.output_leaves[leaf] if is_output and leaf < len(self.output_leaves) else None
            if isinstance(ref, TensorRef):
                found.add(ref.buffer)
        return frozenset(found)

    def share(self, positions: Collection[int]) -> None:
        """Note that arguments at these leaf positions are alive anyway, and cost this region nothing."""
        free = {b for b, position in self.inputs.items() if position in positions}
        buffers = tuple(replace(b, free=True) if b.index in free else b for b in self.program.buffers)
        self.program = replace(self.program, buffers=buffers)

    def likeness(self) -> str:
        """Equal for regions that run the same ops, with the same numbers, on the same views of similar tensors."""
        leaves = [leaf if isinstance(leaf, TensorRef) else described(leaf) for leaf in self.output_leaves]
        calls = [
            (str(c.func), described((c.args, c.kwargs)), c.outputs, c.written, c.state_in, c.under) for c in self.calls
        ]
        text = repr((self.program.digest(), calls, self.slots, self.inputs, self.names, leaves, self.reads))
        return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()

    @cached_property
    def casts(self) -> dict[int, str]:
        """Saved casts that autocast made and may have in its cache, each with the name of its parameter."""
        made = {ref.buffer: e.reads[0].buffer for e in self.sequence if e.skippable for ref in e.makes}
        return {ref.buffer: self.names[made[ref.buffer]] for ref in self.slots if ref.buffer in made}

    @property
    def draws(self) -> bool:
        """Whether the region uses a default random generator."""
        return bool(self.initial_states)


def signature_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
    """Signature that two runs must share: the op, its numbers, shape, stride and dtype of its results."""
    results = tuple((tuple(t.shape), layout(t), t.dtype) for t in op_leaves(out) if isinstance(t, Tensor))
    return func, results, tuple(repr(v) for v in op_leaves(args, kwargs) if isinstance(v, bool | int | float))


def layout(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dims that have more than one element: the others are arbitrary, and two kernels may set them
    differently.
    """
    return layout_of(tensor.shape, tensor.stride())


def layout_of(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """See `layout`."""
    return tuple([s if n != 1 else 0 for n, s in zip(size, stride, strict=True)])
