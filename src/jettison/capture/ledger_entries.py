"""Ledger entries of a trace: every saved tensor of every block call, of the root, and of a loss outside the model.

NOTE [ Whose bytes ]
A storage has one name in the whole ledger, however many layers save views of it, and belongs to the first layer that
does; the root comes first. So arguments of several blocks (rotary tables, masks, an encoder's output) belong to the
root, since no single block owns them, and a block's own figure is the bytes that plain autograd holds by its program.
The root's program tells that block 3's argument is block 2's result: one buffer is both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from jettison.capture.model_trace import BlockClass, ModelTrace, expect_trace
from jettison.capture.pytrees import tree_leaves
from jettison.capture.recorder import RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import plain
from jettison.core.dtypes import dtype_name
from jettison.ledger.ledger import Ledger, Origin, SavedTensor
from jettison.ledger.program import Buffer, Op, Program, Slot, Source

ROOT_LAYER = "embedding, head and loss"
"""Layer name of everything around the blocks."""
OUTSIDE_LAYER = "loss after the forward"
"""Layer name of tensors saved by a loss outside of the model's forward. No plan covers them."""

Kept = Callable[[str, Program], frozenset[int]]
"""(name of a block, or "" for the root; its program) -> buffers held between forward and backward."""


def ledger_of(trace: ModelTrace, kept: Kept | None = None) -> Ledger:
    """Ledger of the tensors that one training forward saves for its backward.

    Args:
        kept: buffers held under a plan; by default those that plain autograd saves. A tensor that no slot views, kept
            because others are recomputed from it, has the role "kept for recompute".

    Parameters and registered buffers are not entries: they cost a step nothing. A block that could not be recorded has
    none either. See NOTE [ Whose bytes ].
    """
    expect_trace(trace)
    chosen = kept or (lambda _name, program: program.saved_buffers())
    ids = {b.index: f"root#{b.index}" for b in trace.root.program.buffers}
    root = _RegionCall(trace=trace.root, module=trace.fake_model, layer=ROOT_LAYER, ids=ids)
    entries = list(root.entries(chosen("", trace.root.program)))
    known = {entry.storage for entry in entries}
    blocks: list[SavedTensor] = []
    for index, call in enumerate(trace.calls):
        cls = trace.classes[call.class_key]
        if cls.problem:
            continue  # the trace's warnings name it
        for entry in _region(trace, index, cls).entries(chosen(call.name, cls.trace.program)):
            if entry.role == "shared input" and entry.storage not in known:
                known.add(entry.storage)
                entries.append(replace(entry, layer=ROOT_LAYER, path=f"{call.name}.{entry.path}"))
            blocks.append(entry)
    outside = list(_outside(trace, root))
    names = dict.fromkeys(call.name for call in trace.calls)
    layers = (ROOT_LAYER, *names, *((OUTSIDE_LAYER,) if outside else ()))
    return Ledger((*entries, *blocks, *outside), layers=layers)


@dataclass(kw_only=True)
class _RegionCall:
    """One region call, as a source of entries. ``ids`` names the storages that it shares with other regions."""

    trace: RegionTrace
    module: nn.Module
    layer: str
    ids: dict[int, str]
    prefix: str = ROOT_LAYER
    arguments: list[Any] = field(default_factory=list)
    roles: Roles = field(init=False)

    def __post_init__(self) -> None:
        self.roles = Roles(trace=self.trace, module=self.module)

    def entries(self, kept: frozenset[int]) -> Iterator[SavedTensor]:
        """One entry for each distinct view that is held, and one for each other buffer that is."""
        program = self.trace.program
        seen: set[TensorRef] = set()
        viewed: set[int] = set()
        for slot, ref in zip(program.slots, self.trace.slots, strict=True):
            buffer = program.buffers[slot.buffer]
            shared = buffer.free and buffer.source is Source.INPUT
            if ref in seen or not (shared or self._costs(slot.buffer, kept)):
                continue
            seen.add(ref)
            viewed.add(slot.buffer)
            yield self.entry(slot, "shared input" if shared else self.roles.role(slot, ref))
        inputs = {b.index for b in program.buffers if b.source is Source.INPUT}  # within a segment, not held
        shared_inputs = {b for b in inputs if program.buffers[b].free}
        reads = {b for o in program.recompute_set(kept | inputs) for b in program.ops[o].inputs}
        for b in sorted((kept | (reads & shared_inputs)) - viewed):
            buffer = program.buffers[b]
            if self._costs(b, kept) or buffer.source is Source.INPUT:
                ref = self._view(buffer)
                slot = Slot(index=-1, buffer=b, shape=ref.size, dtype=dtype_name(ref.dtype))
                yield self.entry(slot, "shared input" if buffer.free else "kept for recompute")

    def _costs(self, b: int, kept: frozenset[int]) -> bool:
        """Whether a buffer is held and is not a parameter or registered buffer, in whatever version."""
        return b in kept and not self.trace.program.buffers[b].free and b not in self.trace.names

    def entry(self, slot: Slot, role: str) -> SavedTensor:
        program = self.trace.program
        buffer = program.buffers[slot.buffer]
        closure = program.closure(slot.buffer)
        return SavedTensor(
            layer=self.layer,
            path=slot.path,
            op=self.roles.saver(slot) if slot.index >= 0 else "",
            role=role,
            shape=slot.shape,
            dtype=slot.dtype,
            storage=self.storage(slot.buffer),
            storage_bytes=buffer.nbytes,
            origin=Origin.TRACE,
            recompute_flops=sum(program.ops[o].flops for o in closure.ops),
            recompute_bytes_moved=sum(program.ops[o].bytes_moved for o in closure.ops),
            inputs=tuple(self.storage(b) for b in closure.stops),
            anchor=closure.anchor,
            reference=f"{self.prefix}: slot {slot.index}" if slot.index >= 0 else "",
        )

    def storage(self, b: int) -> str:
        if b in self.trace.names:
            prefix = "" if self.layer == ROOT_LAYER else f"{self.layer}."
            return f"parameter:{prefix}{self.trace.names[b]}"
        return self.ids.get(b, f"{self.prefix}#{b}")

    def _view(self, buffer: Buffer) -> TensorRef:
        """View of a buffer that no slot views: at a boundary, as an argument, as an op's result; else as bytes."""
        b = buffer.index
        if b in self.trace.taps:
            return self.trace.taps[b].ref
        if b in self.trace.inputs and self.arguments:
            t = plain(self.arguments[self.trace.inputs[b]])
            return TensorRef(b, tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.dtype)
        outputs = self.trace.calls[buffer.producer].outputs if buffer.producer is not None else ()
        made = next((ref for ref in outputs if ref is not None and ref.buffer == b), None)
        return made or TensorRef(b, (buffer.nbytes,), (1,), 0, torch.uint8)


def _outside(trace: ModelTrace, root: _RegionCall) -> Iterator[SavedTensor]:
    """Tensors that a loss saves after the forward; its buffers are the root's."""
    program = trace.root.program
    for ref in dict.fromkeys(trace.outside):
        buffer = program.buffers[ref.buffer]
        if not buffer.free:
            slot = Slot(index=-1, buffer=ref.buffer, shape=ref.size, dtype=dtype_name(ref.dtype))
            role = root.roles.role(slot, ref)
            yield replace(root.entry(slot, role), layer=OUTSIDE_LAYER)


def _region(trace: ModelTrace, index: int, cls: BlockClass) -> _RegionCall:
    """A block call, with the ids of shared storages: the root's buffers of its arguments and results."""
    call = trace.calls[index]
    earlier = sum(1 for other in trace.calls[:index] if other.name == call.name)
    results = {where: b for b, where in trace.root.blocks.items()}
    ids = {b: f"root#{call.given[at]}" for b, at in cls.trace.inputs.items() if at in call.given}
    for leaf, ref in enumerate(cls.trace.output_leaves):
        made = results.get((index, leaf))
        if isinstance(ref, TensorRef) and made is not None:
            ids.setdefault(ref.buffer, f"root#{made}")
    return _RegionCall(
        trace=cls.trace,
        module=trace.fake_model.get_submodule(call.name),
        layer=call.name,
        ids=ids,
        prefix=f"{call.name}@{earlier}" if earlier else call.name,
        arguments=tree_leaves((cls.args, cls.kwargs)),
    )


# roles ----------------------------------------------------------------------------------------------------------------
#
# The role of a saved tensor in the papers' terms, derived from the ops that make and read it. It is a label for people,
# and for pairing a trace with a formula. Without a rule a tensor is named after the op that makes or reads it.

_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit")
_ACTIVATIONS = ("silu", "gelu", "relu", "tanh", "sigmoid", "leaky_relu", "elu", "softplus", "mish", "hardswish", "erf")
_SAVES_ITS_RESULT = (
    *("_softmax", "_safe_softmax", "_log_softmax", "rsqrt", "sqrt", "tanh", "sigmoid", "relu", "exp", "reciprocal"),
    *("native_dropout", "_scaled_dot_product", "nll_loss_forward", "cumsum", *_NORMS),
)
_ATTENTION = ("_scaled_dot_product", "jettison.causal_rows")
_SOFTMAX = ("_softmax", "_safe_softmax")
_BY_SOURCE = {Source.RANDOM: "random state", Source.BLOCK: "block output", Source.OUTER: "captured tensor"}
_MADE_BY = {
    **dict.fromkeys(_SOFTMAX, "softmax output"),
    **dict.fromkeys(("topk", "sort", "argsort", "argmax", "nonzero"), "discrete choice"),
    "_log_softmax": "log-softmax output",
    "nll_loss_forward": "loss weight",
}
_READ_BY = {
    **dict.fromkeys(_NORMS, "norm input"),
    **dict.fromkeys(_ACTIVATIONS, "activation input"),
    **dict.fromkeys((*_SOFTMAX, "_log_softmax"), "softmax input"),
    "embedding": "embedding indices",
}
_PRODUCTS = ("bmm", "baddbmm", "mm", "addmm")
_LOOKS_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros")  # read no values


def base_name(op: Op | None) -> str:
    """``aten.mm.default`` is ``mm``; an op of another library keeps its namespace; no op is ``""``."""
    if op is None:
        return ""
    namespace, _, rest = op.name.partition(".")
    name = rest.partition(".")[0]
    return name if namespace == "aten" else f"{namespace}.{name}"


@dataclass(kw_only=True)
class Roles:
    """Names the saved tensors of one region."""

    trace: RegionTrace
    module: nn.Module  # the region's, for the classes of its submodules
    readers: dict[int, list[Op]] = field(init=False)
    norms: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = {}
        for op in self.program.ops:
            for b in op.inputs if base_name(op) not in _LOOKS_ONLY else ():
                self.readers.setdefault(b, []).append(op)
        self.norms = frozenset(path for path, m in self.module.named_modules() if type(m).__name__.endswith("Norm"))

    @property
    def program(self) -> Program:
        return self.trace.program

    def producer(self, b: int) -> Op | None:
        index = self.program.buffers[b].producer
        return None if index is None else self.program.ops[index]

    def saver(self, slot: Slot) -> str:
        """Name of the op that saved a slot's tensor: the one that produced it, or the one that reads it."""
        producer, reader = self.producer(slot.buffer), self._reader(slot)
        if producer is not None and slot.op == producer.name and base_name(producer).startswith(_SAVES_ITS_RESULT):
            return producer.name
        chosen = reader or producer
        return chosen.name if chosen is not None else slot.op

    def role(self, slot: Slot, ref: TensorRef) -> str:
        source = self.program.buffers[slot.buffer].source
        if source is Source.INPUT:
            return self._input_role(slot)
        if source in _BY_SOURCE:
            return _BY_SOURCE[source]
        if role := self._by_norm(slot) or self._by_producer(slot) or self._by_reader(slot, ref):
            return role
        if (reader := self._reader(slot)) is not None:
            return f"operand of {base_name(reader)}"
        producer = self.producer(slot.buffer)
        return f"result of {base_name(producer)}" if producer is not None else "saved tensor"

    # ------------------------------------------------------------------------------------------------------------------

    def _reader(self, slot: Slot) -> Op | None:
        readers = self.readers.get(slot.buffer, [])
        return next((op for op in readers if op.path == slot.path), readers[0] if readers else None)

    def _input_role(self, slot: Slot) -> str:
        readers = {base_name(op) for op in self.readers.get(slot.buffer, ())}
        if "embedding" in readers:
            return "token ids"
        if slot.dtype == "bool":
            return "mask"
        if slot.dtype.startswith(("int", "uint")):
            return "labels" if any("loss" in name for name in readers) else "indices"
        return "shared input" if self.program.buffers[slot.buffer].free else "block input"

    def _by_norm(self, slot: Slot) -> str:
        """Role in norms that are written out op by op: input, statistics, normalized output."""
        if slot.path not in self.norms:
            return ""
        producer = self.producer(slot.buffer)
        if base_name(producer) in _NORMS:
            return ""
        if slot.shape and slot.shape[-1] == 1:
            return "norm statistics"
        before: set[int] = set()
        for op in reversed([op for op in self.program.ops if op.path == slot.path]):
            if base_name(op) == "rsqrt" or before.intersection(op.outputs):
                before.update(op.inputs)
            elif base_name(op) in _NORMS:
                before.update(op.inputs[:1])
        return "norm input" if slot.buffer in before else "normalised input"

    def _by_producer(self, slot: Slot) -> str:
        op = self.producer(slot.buffer)
        name = base_name(op)
        if op is None:
            return ""
        first = op.outputs[0] == slot.buffer
        if name in _MADE_BY:
            return _MADE_BY[name]
        if name == "native_dropout":
            return "dropout output" if first else "dropout mask"
        makers = map(self.producer, op.inputs) if name in ("div_", "div") else ()
        if name in ("bernoulli", "bernoulli_") or any(base_name(maker).startswith("bernoulli") for maker in makers):
            return "dropout mask"
        if name in _NORMS and not first:
            return "norm statistics"
        if name.startswith(_ATTENTION):
            return "attention output" if first else "attention statistics"
        return ""

    def _by_reader(self, slot: Slot, ref: TensorRef) -> str:
        op = self._reader(slot)
        name = base_name(op)
        if op is None:
            return ""
        if name.startswith(_ATTENTION):
            return self._attention_operand(op, ref)
        if name in _READ_BY:
            return _READ_BY[name]
        if name in ("mm", "addmm", "linear", "convolution") or name.startswith("_grouped_mm"):
            return "linear input" if self._has_weight(op) else "matmul input"
        if name in ("bmm", "baddbmm"):
            return self._matmul_operand(op, slot.buffer)
        if name == "nll_loss_forward" and slot.dtype.startswith("int"):
            return "labels"
        if base_name(self.producer(slot.buffer)) in _ACTIVATIONS:
            return "activation output"
        if slot.dtype == "bool":
            return "mask"
        return "multiply input" if name in ("mul", "mul_") else ""

    def _attention_operand(self, op: Op, ref: TensorRef) -> str:
        words = ("attention query", "attention key", "attention value")
        operands = list(zip(words, self.trace.calls[op.index].args, strict=False))
        exact = [word for word, one in operands if one == ref]
        found = exact or [word for word, one in operands if isinstance(one, TensorRef) and one.buffer == ref.buffer]
        if exact or len(found) == 1:
            return found[0]
        return "attention query, key and value" if found else "attention mask"

    def _has_weight(self, op: Op) -> bool:
        def is_weight(b: int) -> bool:
            buffer, maker = self.program.buffers[b], self.producer(b)
            cast = maker is not None and base_name(maker) in ("_to_copy", "clone", "t") and len(maker.inputs) == 1
            return buffer.source is Source.PARAMETER or (cast and maker is not None and is_weight(maker.inputs[0]))

        return any(is_weight(b) for b in op.inputs)

    def _matmul_operand(self, op: Op, b: int) -> str:
        """Operand of attention's batched matmuls: the first operand of the second one is the probabilities."""
        left = op.inputs[0] if base_name(op) == "bmm" else op.inputs[-2]
        if self._near_softmax(left, 5, up=True):
            return "attention probabilities" if b == left else "attention value"
        if any(self._near_softmax(out, 5, up=False) for out in op.outputs):
            return "attention query" if b == left else "attention key"
        return "matmul input"

    def _near_softmax(self, b: int, steps: int, *, up: bool) -> bool:
        """Whether a softmax is among the ops that lead to a buffer (``up``), or from it, before the next matmul."""
        maker = self.producer(b)
        ops = self.readers.get(b, []) if not up else [] if maker is None else [maker]
        for op in ops if steps else ():
            neighbours = op.inputs if up else op.outputs
            if base_name(op) in _SOFTMAX:
                return True
            if base_name(op) not in _PRODUCTS and any(self._near_softmax(one, steps - 1, up=up) for one in neighbours):
                return True
        return False
