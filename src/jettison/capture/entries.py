"""From a trace to the ledger: every saved tensor of every block call, of the root, and of a loss outside the model.

NOTE [ Whose bytes ]
A storage has one name in the whole ledger, however many layers save views of it, and belongs to the first layer of the
order that does; the root comes first. So what several blocks are given (rotary tables, masks, an encoder's output) is
the root's, since no single block holds it, and a block's own figure is what its program says plain autograd holds.
To know that block 3's argument is block 2's result, the root is run once more and asked for the buffer behind each
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.model_trace import BlockClass, ModelTrace, as_call, expect_trace
from jettison.capture.recording import RegionTrace, TensorRef
from jettison.capture.roles import Roles
from jettison.capture.signature import call_signature, global_signature
from jettison.capture.tensor_subclasses import plain, storage_of
from jettison.capture.tracer import Tracer, uncached_autocast
from jettison.capture.trees import tree_leaves
from jettison.core.dtypes import dtype_name
from jettison.core.errors import TraceError
from jettison.ledger.ledger import Ledger
from jettison.ledger.program import Buffer, Program, Slot, Source
from jettison.ledger.record import Origin, SavedTensor

ROOT_LAYER = "embedding, head and loss"
"""Name of everything around the blocks."""
OUTSIDE_LAYER = "loss after the forward"
"""Name of what a loss saves that is computed outside of the model's forward. Nobody plans it."""

Kept = Callable[[str, Program], frozenset[int]]
"""(name of a block, or "" for the root; its program) -> buffers held between forward and backward."""


def ledger_of(trace: ModelTrace, kept: Kept | None = None) -> Ledger:
    """The record of what one training forward leaves behind for its backward.

    Args:
        kept: what is held under a plan; left out, what plain autograd saves. A tensor that no slot views, held because
            others are computed from it, has the role "kept for recompute".

    Parameters and registered buffers are not entries: they cost a step nothing. A block that could not be recorded has
    none either. See NOTE [ Whose bytes ].

    Raises:
        TraceError: the model runs differently now than when it was traced.
    """
    expect_trace(trace)
    links = _link(trace)
    root = _Region(trace=trace.root, module=trace.fake_model, layer=ROOT_LAYER, ids=links.root)
    entries = list(root.entries(_chosen(kept, "", trace.root.program)))
    shared: list[SavedTensor] = []
    blocks: list[SavedTensor] = []
    for index, call in enumerate(trace.calls):
        cls = trace.classes[call.class_key]
        if cls.opaque:
            continue  # the trace's warnings say so
        region = links.region(trace, index, cls)
        for entry in region.entries(_chosen(kept, call.name, cls.trace.program)):
            if entry.role == "shared input":
                shared.append(replace(entry, layer=ROOT_LAYER, path=f"{call.name}.{entry.path}"))
            blocks.append(entry)
    known = {entry.storage for entry in entries}
    for entry in shared:
        if entry.storage not in known:
            known.add(entry.storage)
            entries.append(entry)
    outside = list(_outside(trace, root))
    names = dict.fromkeys(call.name for call in trace.calls)
    layers = (ROOT_LAYER, *names, *((OUTSIDE_LAYER,) if outside else ()))
    return Ledger((*entries, *blocks, *outside), layers=layers)


def _chosen(kept: Kept | None, name: str, program: Program) -> frozenset[int]:
    return program.saved_buffers() if kept is None else kept(name, program)


@dataclass(kw_only=True)
class _Region:
    """One region call, as a source of entries. ``ids`` names the storages that other regions see as well."""

    trace: RegionTrace
    module: nn.Module
    layer: str
    ids: dict[int, str]
    prefix: str = ""
    arguments: list[Any] = field(default_factory=list)
    roles: Roles = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = self.prefix or self.layer
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
        for b in sorted((kept | self._shared_reads(kept)) - viewed):
            buffer = program.buffers[b]
            if self._costs(b, kept) or buffer.source is Source.INPUT:
                ref = self._view(buffer)
                slot = Slot(index=-1, buffer=b, shape=ref.size, dtype=dtype_name(ref.dtype))
                yield self.entry(slot, "shared input" if buffer.free else "kept for recompute")

    def _costs(self, b: int, kept: frozenset[int]) -> bool:
        """Whether a buffer is held and is neither a parameter nor a registered buffer, in whatever version."""
        return b in kept and not self.trace.program.buffers[b].free and b not in self.trace.names

    def _shared_reads(self, kept: frozenset[int]) -> frozenset[int]:
        """Shared inputs that the recompute of what is not kept reads."""
        program = self.trace.program
        inputs = {b.index for b in program.buffers if b.source is Source.INPUT}  # within a segment, held by nobody
        reads = {b for o in program.recompute_set(kept | inputs) for b in program.ops[o].inputs}
        return frozenset(b for b in reads if program.buffers[b].free and program.buffers[b].source is Source.INPUT)

    def entry(self, slot: Slot, role: str) -> SavedTensor:
        """The record of one held tensor."""
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
        """The id of a buffer's storage."""
        if b in self.trace.names:
            prefix = "" if self.layer == ROOT_LAYER else f"{self.layer}."
            return f"parameter:{prefix}{self.trace.names[b]}"
        return self.ids.get(b, f"{self.prefix}#{b}")

    def _view(self, buffer: Buffer) -> TensorRef:
        """How a buffer that no slot views is seen: at a boundary, as an argument, as an op's result; else as bytes."""
        b = buffer.index
        if b in self.trace.taps:
            return self.trace.taps[b].ref
        if b in self.trace.inputs and self.arguments:
            t = plain(self.arguments[self.trace.inputs[b]])
            return TensorRef(b, tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.dtype)
        outputs = self.trace.calls[buffer.producer].outputs if buffer.producer is not None else ()
        made = next((ref for ref in outputs if ref is not None and ref.buffer == b), None)
        return made or TensorRef(b, (buffer.nbytes,), (1,), 0, torch.uint8)


def _outside(trace: ModelTrace, root: _Region) -> Iterator[SavedTensor]:
    """What the loss saves after the forward; its buffers are the root's."""
    program = trace.root.program
    for ref in dict.fromkeys(trace.outside):
        buffer = program.buffers[ref.buffer]
        if not buffer.free:
            slot = Slot(index=-1, buffer=ref.buffer, shape=ref.size, dtype=dtype_name(ref.dtype))
            role = root.roles.role(slot, ref)
            yield replace(root.entry(slot, role), layer=OUTSIDE_LAYER)


# who sees whose buffers -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Links:
    """Root buffers behind the arguments and results of every block call."""

    root: dict[int, str]
    arguments: list[dict[int, int]]  # by call: leaf position -> root buffer
    results: dict[tuple[int, int], int]  # (call, output leaf) -> root buffer

    def region(self, trace: ModelTrace, index: int, cls: BlockClass) -> _Region:
        """A block call, with the ids of what it shares with others."""
        call = trace.calls[index]
        earlier = sum(1 for other in trace.calls[:index] if other.name == call.name)
        ids = {
            b: f"root#{self.arguments[index][position]}"
            for b, position in cls.trace.inputs.items()
            if position in self.arguments[index]
        }
        for leaf, ref in enumerate(cls.trace.output_leaves):
            made = self.results.get((index, leaf))
            if isinstance(ref, TensorRef) and made is not None:
                ids.setdefault(ref.buffer, f"root#{made}")
        return _Region(
            trace=cls.trace,
            module=trace.fake_model.get_submodule(call.name),
            layer=call.name,
            ids=ids,
            prefix=f"{call.name}@{earlier}" if earlier else call.name,
            arguments=tree_leaves((cls.args, cls.kwargs)),
        )


class _Linker(Tracer):
    """Runs the root as the trace did, and writes down what each block call was given."""

    def __init__(self, trace: ModelTrace) -> None:
        super().__init__(trace.fake_model, trace.mode, list(dict.fromkeys(call.name for call in trace.calls)))
        self.known = trace.classes
        self.traced = trace.calls
        self.arguments: list[dict[int, int]] = []

    def _block(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.root is not None:
            leaves, signature = call_signature(args, kwargs)
            before = next(iter(self.traced[len(self.calls) :]), None)
            if before is None or before.name != name or before.signature != (signature, global_signature()):
                raise TraceError(
                    f"block {name} runs on other tensors now than when it was traced; "
                    "read the ledger under the same autocast and train/eval state"
                )
            storages = {p: storage_of(t) for p, t in enumerate(leaves) if isinstance(t, Tensor)}
            current = self.root._current
            self.arguments.append({p: current[key] for p, key in storages.items() if key in current})
        return super()._block(name, module, forward, args, kwargs)

    def _observe(self, name: str, problem: str, args: Any, kwargs: Any) -> RegionTrace:
        return self.known[self.traced[len(self.calls)].class_key].trace  # no real model is here to watch again

    def _class_of(self, found: BlockClass, module: nn.Module, signature: Any) -> BlockClass:
        return self.known[self.traced[len(self.calls)].class_key]


def _link(trace: ModelTrace) -> _Links:
    linker = _Linker(trace)
    with trace.context(), linker.installed(), uncached_autocast(), torch.enable_grad():
        linker.forward(*as_call(trace.batch))
    return _Links(
        root={b.index: f"root#{b.index}" for b in trace.root.program.buffers},
        arguments=linker.arguments,
        results={where: b for b, where in trace.root.blocks.items()},
    )
