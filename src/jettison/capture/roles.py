"""What a saved tensor is, in the words that papers use, read off the ops that make it and the ops that read it.

A role is a label for people and for pairing a trace with a formula. Nothing is decided by it: a tensor that no rule
knows is named after the op that makes or reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from jettison.capture.recording import RegionTrace, TensorRef
from jettison.ledger.program import Op, Program, Slot, Source

_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit")
_ACTIVATIONS = ("silu", "gelu", "relu", "tanh", "sigmoid", "leaky_relu", "elu", "softplus", "mish", "hardswish", "erf")
_SAVES_ITS_RESULT = (
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "rsqrt",
    "sqrt",
    "tanh",
    "sigmoid",
    "relu",
    "exp",
    "reciprocal",
    "native_dropout",
    *_NORMS,
    "_scaled_dot_product",
    "nll_loss_forward",
    "cumsum",
)
_ATTENTION = ("_scaled_dot_product", "jettison.causal_rows")
_SOFTMAX = ("_softmax", "_safe_softmax")
_CHOICES = ("topk", "sort", "argsort", "argmax", "nonzero")
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
    module: nn.Module  # the region's, for the classes of its parts
    readers: dict[int, list[Op]] = field(init=False)
    norms: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = {}
        for op in self.program.ops:
            for b in op.inputs if base_name(op) not in _LOOKS_ONLY else ():
                self.readers.setdefault(b, []).append(op)
        self.norms = frozenset(
            path
            for path, m in self.module.named_modules()
            if type(m).__name__.endswith("Norm") or type(m).__name__.endswith("LayerNorm")
        )

    @property
    def program(self) -> Program:
        return self.trace.program

    def producer(self, b: int) -> Op | None:
        """The op that makes a buffer."""
        index = self.program.buffers[b].producer
        return None if index is None else self.program.ops[index]

    def saver(self, slot: Slot) -> str:
        """Name of the op that saved a slot's tensor: the one that made it, or the one that reads it."""
        producer, reader = self.producer(slot.buffer), self._reader(slot)
        if producer is not None and slot.op == producer.name and base_name(producer).startswith(_SAVES_ITS_RESULT):
            return producer.name
        chosen = reader or producer
        return chosen.name if chosen is not None else slot.op

    def role(self, slot: Slot, ref: TensorRef) -> str:
        """The word for a slot's tensor."""
        source = self.program.buffers[slot.buffer].source
        if source is Source.INPUT:
            return self._input_role(slot)
        if source is Source.RANDOM:
            return "random state"
        if source is Source.BLOCK:
            return "block output"
        if source is Source.OUTER:
            return "captured tensor"
        return self._by_norm(slot) or self._by_producer(slot) or self._by_reader(slot, ref) or self._fallback(slot)

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
        """Norms that are written out op by op: what comes before the statistics, they themselves, what comes after."""
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
        if name in _SOFTMAX:
            return "softmax output"
        if name in _CHOICES:
            return "discrete choice"
        if name == "_log_softmax":
            return "log-softmax output"
        if name == "native_dropout":
            return "dropout output" if first else "dropout mask"
        if self._is_mask(op):
            return "dropout mask"
        if name in _NORMS and not first:
            return "norm statistics"
        if name.startswith(_ATTENTION):
            return "attention output" if first else "attention statistics"
        if name == "nll_loss_forward":
            return "loss weight"
        return ""

    def _is_mask(self, op: Op) -> bool:
        name = base_name(op)
        if name in ("bernoulli", "bernoulli_"):
            return True
        makers = [self.producer(b) for b in op.inputs]
        return name in ("div_", "div") and any(m is not None and base_name(m).startswith("bernoulli") for m in makers)

    def _by_reader(self, slot: Slot, ref: TensorRef) -> str:
        op = self._reader(slot)
        name = base_name(op)
        if op is None:
            return ""
        if name.startswith(_ATTENTION):
            return self._attention_operand(op, ref)
        if name in _NORMS:
            return "norm input"
        if name in ("mm", "addmm", "linear", "convolution") or name.startswith("_grouped_mm"):
            return "linear input" if self._has_weight(op) else "product operand"
        if name in ("bmm", "baddbmm"):
            return self._product_operand(op, slot.buffer)
        if name == "embedding":
            return "embedding indices"
        if name in (*_SOFTMAX, "_log_softmax"):
            return "softmax input"
        if name == "nll_loss_forward" and slot.dtype.startswith("int"):
            return "labels"
        if name in _ACTIVATIONS:
            return "activation input"
        if base_name(self.producer(slot.buffer)) in _ACTIVATIONS:
            return "activation output"
        if slot.dtype == "bool":
            return "mask"
        return "product operand" if name in ("mul", "mul_") else ""

    def _attention_operand(self, op: Op, ref: TensorRef) -> str:
        operands = self.trace.calls[op.index].args[:3]
        words = ("attention query", "attention key", "attention value")
        exact = [word for word, operand in zip(words, operands, strict=False) if operand == ref]
        if exact:
            return exact[0]
        buffers = [operand.buffer if isinstance(operand, TensorRef) else -1 for operand in operands]
        found = [word for word, b in zip(words, buffers, strict=False) if b == ref.buffer]
        if len(found) == 1:
            return found[0]
        return "attention query, key and value" if found else "attention mask"

    def _has_weight(self, op: Op) -> bool:
        def is_weight(b: int) -> bool:
            buffer, maker = self.program.buffers[b], self.producer(b)
            cast = maker is not None and base_name(maker) in ("_to_copy", "clone", "t") and len(maker.inputs) == 1
            return buffer.source is Source.PARAMETER or (cast and maker is not None and is_weight(maker.inputs[0]))

        return any(is_weight(b) for b in op.inputs)

    def _product_operand(self, op: Op, b: int) -> str:
        """Of the two batched products of attention, the second has probabilities as its first operand."""
        left = op.inputs[0] if base_name(op) == "bmm" else op.inputs[-2]
        if self._comes_from_softmax(left, 5):
            return "attention probabilities" if b == left else "attention value"
        if any(self._leads_to_softmax(out, 5) for out in op.outputs):
            return "attention query" if b == left else "attention key"
        return "product operand"

    def _comes_from_softmax(self, b: int, steps: int) -> bool:
        op = self.producer(b)
        if op is None or steps == 0 or base_name(op) in _PRODUCTS:
            return False
        return base_name(op) in _SOFTMAX or any(self._comes_from_softmax(i, steps - 1) for i in op.inputs)

    def _leads_to_softmax(self, b: int, steps: int) -> bool:
        for op in self.readers.get(b, ()) if steps else ():
            name = base_name(op)
            if name in _SOFTMAX:
                return True
            if name not in _PRODUCTS and any(self._leads_to_softmax(o, steps - 1) for o in op.outputs):
                return True
        return False

    def _fallback(self, slot: Slot) -> str:
        reader, producer = self._reader(slot), self.producer(slot.buffer)
        if reader is not None:
            return f"operand of {base_name(reader)}"
        return f"result of {base_name(producer)}" if producer is not None else "saved tensor"
