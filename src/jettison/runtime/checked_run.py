"""Runs that are checked op by op against the recording: the first run of every region, and any that may differ.

NOTE [ What a checked run checks ]
The op, its numbers, and shape, stride and dtype of its results; and the origin of its arguments. Each storage of the
run is matched with a buffer of the recording when it first occurs; from then on the two must go together, and every
argument must be the recorded view of its buffer. Swapped operands, another row of a table, another tensor of the same
shape are differences, although their shapes are equal. A storage is known by a weak reference, as a strong one would
keep its memory. And the mutations that an op's schema declares are checked against the bits of its registered buffers
(and of all tensors, for an op that is not torch's own): an op with undeclared writes must not be recomputed.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.capture.op_traits import computes, is_bookkeeping, writes
from jettison.capture.pytrees import op_leaves
from jettison.capture.recorder import Expected, RegionTrace, TensorRef, signature_of
from jettison.capture.tensor_subclasses import desugars, infers_shapes, plain, storage_of
from jettison.core.objects import swapped
from jettison.runtime.saved_handles import Diverged
from jettison.runtime.witness import digest, spots_of

_CHECKS = {"aten::aminmax"}
"""Ops that torch's Python-like ops run on real tensors only, to check that indices are in range."""
_TORCHS = {"aten", "prim", "prims", "_c10d_functional", "c10d_functional", "_dtensor", "rngprims"}
_NOWHERE = -1
Owners = dict[str, tuple[dict[str, Any], str]]


class SomeMode(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if desugars(types) else func(*args, **(kwargs or {}))


class SequenceCheck(TorchDispatchMode):
    """Notices the first ATen call that differs from the recorded one. See NOTE [ What a checked run checks ]."""

    def __init__(self, trace: RegionTrace, leaves: list[Any], owners: Owners) -> None:
        super().__init__()
        self.trace = trace
        self.at = 0
        self.paused = False  # while running ops are not this region's
        self.leaves = leaves
        self.owners = owners
        self.bound: dict[int, tuple[Any, int, int]] = {}  # storage -> weak reference, buffer, offset of it there
        self.skipped: set[int] = set()  # buffers of casts that did not happen
        self.diverged = ""  # first difference from the recording; nothing is compared from there on
        self.buffers = {
            storage_of(t)
            for table, leaf in owners.values()
            if (t := table[leaf]) is not None and not isinstance(t, nn.Parameter)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if desugars(types):
            return NotImplemented
        if self.paused or self.diverged or infers_shapes() or is_bookkeeping(func):
            return func(*args, **kwargs)
        unsaid = [(t, _bits(t)) for t in self._readings(func, args, kwargs)]
        out = func(*args, **kwargs)
        try:
            if any(not torch.equal(_bits(t), before) for t, before in unsaid):
                raise Diverged(f"{func} writes to what it is given, and its schema does not say so")
            if computes(func, args, kwargs, out):
                self._compare(func, args, kwargs, out)
        except Diverged as divergence:
            self.diverged = str(divergence)
        return out

    def apart(self) -> AbstractContextManager[None]:
        """Pause the check for foreign ops: of a nested region, which checks itself, or reads of values."""
        return swapped(self, paused=True)

    def _readings(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Tensors that a call's schema declares as read-only, where that needs a check."""
        own = func.namespace in _TORCHS
        if func.is_view or (own and (not self.buffers or torch.Tag.pointwise in func.tags)):
            return []
        written = {storage_of(t) for t in writes(func, args, kwargs)}
        read = [plain(t) for t in op_leaves(args, kwargs) if isinstance(t, Tensor) and storage_of(t) not in written]
        seen = [t for t in read if t.layout is torch.strided and not isinstance(t, FakeTensor)]
        return [t for t in seen if not own or storage_of(t) in self.buffers]

    def _compare(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        got = signature_of(func, args, kwargs, out)
        while self.at < len(self.trace.sequence):
            expected = self.trace.sequence[self.at]
            self.at += 1
            if expected.signature == got or (not expected.numbers and expected.signature[:2] == got[:2]):
                self._match(expected, op_leaves(args, kwargs), op_leaves(out))
                return
            if func._schema.name in _CHECKS:  # its results are not recorded, so no later op may read them
                self.at -= 1
                for tensor in op_leaves(out):
                    self._bind(plain(tensor), _NOWHERE, 0)
                return
            if not expected.skippable:
                raise Diverged(f"call {self.at} was {_text(got)}, recorded was {_text(expected.signature)}")
            self.skipped.update(ref.buffer for ref in expected.makes)
        raise Diverged(f"call {got[0]} came after the last recorded one")

    def finish(self) -> None:
        """End the forward: no recorded call may be missing."""
        missing = [expected for expected in self.trace.sequence[self.at :] if not expected.skippable]
        if missing and not self.diverged:
            self.diverged = f"{len(missing)} recorded calls did not come, first {missing[0].signature[0]}"

    def _match(self, expected: Expected, given: list[Any], made: list[Any]) -> None:
        tensors = [plain(t) for t in given if isinstance(t, Tensor)]
        if len(tensors) != len(expected.reads):
            raise Diverged(f"call {self.at}, {expected.signature[0]}, has {len(tensors)} tensors")
        for place, (tensor, ref) in enumerate(zip(tensors, expected.reads, strict=True)):
            if ref.buffer not in self.skipped and not self._is(tensor, ref):
                raise Diverged(f"argument {place} of call {self.at}, {expected.signature[0]}, is not the recorded one")
        for place, new in expected.writes:
            self._bind(tensors[place], new, 0)
        for tensor, ref in zip((plain(t) for t in made if isinstance(t, Tensor)), expected.makes, strict=True):
            entry = self._entry(tensor)
            if entry is None or entry[1] != ref.buffer:
                self._bind(tensor, ref.buffer, 0)

    def _is(self, tensor: Tensor, ref: TensorRef) -> bool:
        entry = self._entry(tensor)
        if entry is None:
            start = self._start(tensor, ref)
            if start is None:
                return False
            entry = self._bind(tensor, ref.buffer, start)
        _, buffer, start = entry
        offset = tensor.storage_offset() * tensor.element_size() - start
        return (
            buffer == ref.buffer
            and offset == ref.offset * ref.dtype.itemsize
            and (tensor.is_conj() == ref.conj and tensor.is_neg() == ref.neg)
        )

    def _start(self, tensor: Tensor, ref: TensorRef) -> int | None:
        """Return the offset in bytes of a new storage from the recorded one; None if it is another storage."""
        trace, b = self.trace, ref.buffer
        if b in trace.inputs and b in trace.given:
            leaf = self.leaves[trace.inputs[b]]
            if not isinstance(leaf, Tensor) or storage_of(leaf) != storage_of(tensor):
                return None
            recorded = trace.given[b].offset * trace.given[b].dtype.itemsize
            return plain(leaf).storage_offset() * plain(leaf).element_size() - recorded
        if b in trace.named_at:
            table, name = self.owners[trace.names[b]]
            there = plain(table[name])
            if storage_of(there) != storage_of(tensor):
                return None
            return there.storage_offset() * there.element_size() - trace.named_at[b]
        return tensor.storage_offset() * tensor.element_size() - ref.offset * ref.dtype.itemsize

    def _entry(self, tensor: Tensor) -> tuple[Any, int, int] | None:
        entry = self.bound.get(tensor.untyped_storage()._cdata)
        return None if entry is None or entry[0]() is None else entry

    def _bind(self, tensor: Tensor, buffer: int, start: int) -> tuple[Any, int, int]:
        storage, before = tensor.untyped_storage(), self._entry(tensor)
        if before is not None:
            start = before[2]  # a write makes a new buffer in the same memory
        entry = self.bound[storage._cdata] = (weakref.ref(storage), buffer, start)
        return entry


def _bits(tensor: Tensor) -> Tensor:
    return digest(tensor, spots_of(tuple(tensor.shape), tuple(tensor.stride())))


def _text(signature: tuple[Any, ...]) -> str:
    func, results, numbers = signature
    return f"{func}({', '.join(numbers)}) -> {list(results)}"
