"""A recorded program, or a part of it, as a tape: its ops with their inputs, weights and what autograd kept of each.

Ops keep their numbers, so that what is decided on the program can be timed on the tape. Which op keeps a saved tensor
is told by when autograd saved it: results after their op ran, arguments before. A value passes a gradient on where it
has numbers with a fraction and comes from a weight or from the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Final

from torch import Tensor, nn

from jettison.capture.recording import RegionTrace, TensorRef
from jettison.capture.roles import Roles, base_name
from jettison.capture.trees import op_leaves
from jettison.core.dtypes import DTYPE_BYTES, dtype_name
from jettison.cost.op_kinds import BATCHED, FLASH, HOLD
from jettison.formula.tape import Saved, Tape, TapeOp, Value, Weight
from jettison.ledger.program import Op, Slot, Source

_PASSES: Final = frozenset({"add", "add_", "sub", "clone", "alias"})
"""The gradient of an input is the output's."""
_ATTENTION: Final = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_CONSTANT: Final = ("detach", "argmax", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_empty")
"""No gradient goes back through these."""
_FACTORS: Final = frozenset({"mul", "mul_", "div", "div_"})
_SUMMAND_FIRST: Final = ("addmm", "baddbmm", "addmv")
_SHARED: Final = "shared input"


@dataclass(kw_only=True)
class TapeMaker:
    """Writes down ops of a recording, in their order.

    Args:
        module: whose forward it is.
        weights: by name of a parameter of the module, how it is counted; another that is read is somebody else's.
        free: buffers that somebody else pays for.
        streams: buffers from outside through which backward passes a gradient.
        part: the ops, where they are not all; otherwise buffers keep their numbers.
    """

    trace: RegionTrace
    module: nn.Module
    weights: Mapping[str, Weight]
    streams: Collection[int]
    free: Collection[int] = ()
    part: Sequence[Op] | None = None
    tape: Tape = field(default_factory=lambda: Tape(mesh={}))
    values: dict[int, Value] = field(default_factory=dict)
    seen: dict[TensorRef, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.trace.program
        self.roles = Roles(trace=self.trace, module=self.module)
        self.parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self.views = self._views()
        self.tape.weights.extend(self.weights.values())
        ops = program.ops if self.part is None else self.part
        self.made = {b for op in ops for b in op.outputs}
        if self.part is None:
            for b in range(len(program.buffers)):
                self.value(b, grad=self._reached[b])
        kept = self._kept_by()
        for op in ops:
            self._write(op, kept.get(op.index, ()))

    def hold(self, b: int, role: str) -> None:
        """Keep a buffer through backward for others."""
        kept = (Saved(self.value(b), role),)
        self.tape.steps.append(TapeOp(HOLD, "", (self.value(b),), (), kept, (), 0, 0, False, None, None, 0))

    def _write(self, op: Op, kept: Sequence[int]) -> None:
        found = [(ref, self._weight(ref.buffer)) for ref in self._read(op)]
        weights = {w.name: w for _, w in found if w is not None}
        inputs = tuple(self._seen(ref) for ref, weight in found if weight is None)
        outputs = tuple(self.value(b, grad=self._reached[b]) for b in op.outputs)
        self.tape.steps.append(
            TapeOp(
                _name(op),
                op.path,
                inputs,
                outputs,
                tuple(self._saved(slot) for slot in kept),
                tuple(sorted(weights.values(), key=lambda w: -len(w.shape))),
                op.flops,
                op.bytes_moved,
                base_name(op) in _PASSES,
                op.anchor,
                None,
                _spread(op, inputs, outputs, tuple(weights.values())),
            )
        )

    def _read(self, op: Op) -> list[TensorRef]:
        """Inputs of an op, operands of a matmul first."""
        call = self.trace.calls[op.index]
        refs = [leaf for leaf in op_leaves(call.args, call.kwargs) if isinstance(leaf, TensorRef)]
        return [*refs[1:], refs[0]] if base_name(op) in _SUMMAND_FIRST else refs

    # values -----------------------------------------------------------------------------------------------------------

    def value(self, b: int, *, grad: bool = False) -> Value:
        """The whole of a buffer. Who asks first says whether a gradient passes."""
        if b in self.values:
            return self.values[b]
        buffer = self.trace.program.buffers[b]
        shape, dtype = self._form(b)
        index = len(self.tape.values)
        made = Value(index, shape, dtype, (), index, grad or b in self.streams, shape, buffer.nbytes)
        self.values[b] = made
        self.tape.values.append(made)
        self.tape.sizes.append(buffer.nbytes)
        if b not in self.made or buffer.source is not Source.OP:
            source = Source.INPUT if buffer.source in (Source.OP, Source.BLOCK) else buffer.source
            name = self.trace.names.get(b, buffer.name)
            self.tape.sources[index] = (source, name, b in self.free or buffer.free)
        return made

    def _seen(self, ref: TensorRef) -> Value:
        """A buffer as somebody sees it."""
        whole, dtype = self.value(ref.buffer), dtype_name(ref.dtype)
        if (whole.shape, whole.dtype) == (ref.size, dtype):
            return whole
        if ref not in self.seen:
            at, nbytes = len(self.tape.values), prod(ref.size) * DTYPE_BYTES[dtype]
            view = replace(whole, index=at, shape=ref.size, local_shape=ref.size, dtype=dtype, nbytes=nbytes)
            self.seen[ref] = view
            self.tape.values.append(view)
            self.tape.sizes.append(0)
        return self.seen[ref]

    @cached_property
    def _reached(self) -> list[bool]:
        """By buffer, whether backward passes a gradient through it."""
        program = self.trace.program
        found = [b.index in self.streams or self._weight(b.index) is not None for b in program.buffers]
        for op in program.ops:
            if any(found[b] for b in op.inputs) and not base_name(op).startswith(_CONSTANT):
                for b in op.outputs:
                    found[b] = self._form(b)[1].startswith(("float", "bfloat", "complex"))
        return found

    def _form(self, b: int) -> tuple[tuple[int, ...], str]:
        """A shape and a dtype that make the buffer's bytes."""
        nbytes, view = self.trace.program.buffers[b].nbytes, self.views.get(b)
        if view is None:
            return (nbytes,), "uint8"
        dtype = dtype_name(view.dtype)
        if prod(view.size) * DTYPE_BYTES[dtype] == nbytes:
            return view.size, dtype
        return ((nbytes // DTYPE_BYTES[dtype],), dtype) if nbytes % DTYPE_BYTES[dtype] == 0 else ((nbytes,), "uint8")

    def _views(self) -> dict[int, TensorRef]:
        """Each buffer as the op that makes it sees it, else as an argument, else as whoever saved it does."""
        found: dict[int, TensorRef] = {}
        made = [ref for call in self.trace.calls for ref in call.outputs if ref is not None]
        for ref in (*made, *self.trace.given.values(), *self.trace.slots):
            found.setdefault(ref.buffer, ref)
        return found

    def _weight(self, b: int) -> Weight | None:
        """The parameter that a buffer is, however it is counted."""
        name = self.trace.names.get(b)
        tensor = None if name is None else self.parameters.get(name)
        if name is None or tensor is None or self.trace.program.buffers[b].source is not Source.PARAMETER:
            return None
        return self.weights.get(name) or weight_of(name, tensor, tied=True)

    # what is kept -----------------------------------------------------------------------------------------------------

    def _kept_by(self) -> dict[int, list[int]]:
        """By op, the slots that its backward reads."""
        found: dict[int, list[int]] = {}
        for slot, after in zip(self.trace.program.slots, self.trace.saved_after, strict=True):
            found.setdefault(self._keeper(slot, after), []).append(slot.index)
        return found

    def _keeper(self, slot: Slot, after: int) -> int:
        program = self.trace.program
        producer = program.buffers[slot.buffer].producer
        if producer is not None and producer == after - 1 and self.roles.saver(slot) == program.ops[producer].name:
            return producer
        later = (op.index for op in program.ops[after:] if slot.buffer in op.inputs)
        return next(later, max(0, min(after, len(program.ops)) - 1))

    def _saved(self, index: int) -> Saved:
        slot, ref = self.trace.program.slots[index], self.trace.slots[index]
        seen = self._seen(ref)
        source, _, free = self.tape.sources.get(seen.storage, (None, "", False))
        role = _SHARED if free and source is Source.INPUT else self.roles.role(slot, ref)
        return Saved(seen, role)


def _name(op: Op) -> str:
    """As prices know it: fused attention is one op, whatever the device."""
    name = base_name(op)
    return FLASH if name.startswith(_ATTENTION) else BATCHED if name == "baddbmm" else op.name


def _spread(op: Op, inputs: Sequence[Value], outputs: Sequence[Value], weights: Sequence[Weight]) -> int:
    """Bytes of a smaller factor's gradient, which is made in the product's shape and then summed."""
    if base_name(op) not in _FACTORS or not outputs:
        return 0
    size = prod(outputs[0].shape)
    smaller = any(v.grad and prod(v.shape) < size for v in inputs) or any(w.numel < size for w in weights)
    return outputs[0].nbytes if smaller else 0


def weight_of(name: str, tensor: Tensor, *, tied: bool = False) -> Weight:
    """A parameter as it stands."""
    nbytes, numel = tensor.numel() * tensor.element_size(), tensor.numel()
    return Weight(name=name, shape=tuple(tensor.shape), places=(), nbytes=nbytes, numel=numel, tied=tied)
