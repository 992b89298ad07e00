"""A traced model as the regions of a described one: what is around its blocks, and the blocks.

NOTE [ Around the blocks ]
What no block's result leads to stands before the blocks. What a result leads to, and leads to a block again (the norm
after an encoder, a projection between two stacks), is counted there, too: it is held as long. The rest stands after
them. A storage is paid for once: a tensor that several blocks are given by what stands before them, one that a block
is given alone by that block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from jettison.capture.model_trace import BlockCall, BlockClass, ModelTrace
from jettison.capture.recording import TensorRef
from jettison.capture.trees import tree_leaves
from jettison.errors import UsageError
from jettison.formula.region import RecordedRegion, RecordedRegions, Region
from jettison.formula.tape import Value, Weight
from jettison.ledger.program import Op, Program, Source
from jettison.models.recorded_tape import TapeMaker, weight_of


def regions_of(trace: ModelTrace) -> RecordedRegions:
    """All regions of a trace.

    Raises:
        UsageError: a block could not be recorded, or there is none.
    """
    if not trace.calls:
        why = "; ".join(trace.warnings) or "nothing to lay out or to recompute"
        raise UsageError(f"{type(trace.fake_model).__name__} has no blocks that repeat: {why}")
    for cls in trace.classes.values():
        if cls.opaque:
            raise UsageError(f"blocks like {cls.example} cannot be recorded: {cls.problem}")
    made = _Regions(trace)
    return RecordedRegions(before=made.before(), blocks=tuple(made.blocks()), after=made.after())


def is_chain(trace: ModelTrace) -> bool:
    """Is the result of one block all that a gradient goes back through from the next?"""
    blocks = trace.root.blocks
    for index, call in enumerate(trace.calls[1:], 1):
        cls = trace.classes[call.class_key]
        leaves = tree_leaves((cls.args, cls.kwargs))
        given = [root for position, root in call.given.items() if _differentiable(leaves[position])]
        if any(blocks.get(root, (-1, 0))[0] != index - 1 for root in given):
            return False
    return True


@dataclass
class _Regions:
    trace: ModelTrace

    @property
    def program(self) -> Program:
        return self.trace.root.program

    def called(self, call: BlockCall) -> BlockClass:
        return self.trace.classes[call.class_key]

    # weights ----------------------------------------------------------------------------------------------------------

    @cached_property
    def owned(self) -> tuple[list[dict[str, Weight]], dict[str, Weight]]:
        """By call the parameters that it is the first to have, and those of no block, each by its name."""
        seen: set[int] = set()
        by_call = []
        for call in self.trace.calls:
            module = self.trace.fake_model.get_submodule(call.name)
            by_call.append({name: weight_of(name, p) for name, p in module.named_parameters() if id(p) not in seen})
            seen.update(id(p) for p in module.parameters())
        rest = {n: weight_of(n, p) for n, p in self.trace.fake_model.named_parameters() if id(p) not in seen}
        return by_call, rest

    # blocks -----------------------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Region]:
        """By call; alike ones are one object."""
        known: dict[object, Region] = {}
        for call, weights, free in zip(self.trace.calls, self.owned[0], self.handed_on, strict=True):
            key = call.class_key, tuple(weights), free
            if key not in known:
                known[key] = self._block(call, weights, free)
            yield known[key]

    def _block(self, call: BlockCall, weights: dict[str, Weight], free: frozenset[int]) -> Region:
        cls = self.called(call)
        leaves = tree_leaves((cls.args, cls.kwargs))
        streams = {b for b, at in cls.trace.inputs.items() if _differentiable(leaves[at])}
        module = self.trace.fake_model.get_submodule(call.name)
        maker = TapeMaker(trace=cls.trace, module=module, weights=weights, streams=streams)
        buffers = tuple(replace(b, free=True) if b.index in free else b for b in cls.trace.program.buffers)
        output = maker.value(_output(cls))
        return RecordedRegion(tape=maker.tape, output=output, recording=replace(cls.trace.program, buffers=buffers))

    @cached_property
    def handed_on(self) -> list[frozenset[int]]:
        """By call, what it keeps of its results that another block keeps as its argument: that one pays."""
        found = []
        for index, call in enumerate(self.trace.calls):
            trace = self.called(call).trace
            saved = trace.program.saved_buffers()
            refs = [(leaf, ref) for leaf, ref in enumerate(trace.output_leaves) if isinstance(ref, TensorRef)]
            kept = {ref.buffer for leaf, ref in refs if ref.buffer in saved and (index, leaf) in self.kept_results}
            found.append(frozenset(kept))
        return found

    @cached_property
    def kept_results(self) -> set[tuple[int, int]]:
        """Results, by call and leaf, that another block keeps as an argument of its own."""
        return {self.trace.root.blocks[b] for b in self.kept_alone if b in self.trace.root.blocks}

    @cached_property
    def kept_alone(self) -> set[int]:
        """Buffers of the root that a block keeps as an argument that it alone is given."""
        return {root for root, free in self._kept_arguments() if not free}

    def _kept_arguments(self) -> Iterator[tuple[int, bool]]:
        """Buffers of the root that blocks keep, and whether a block counts them as others'."""
        for call in self.trace.calls:
            program = self.called(call).trace.program
            inputs = self.called(call).trace.inputs
            for b in program.needed_buffers():
                if b in inputs and inputs[b] in call.given:
                    yield call.given[inputs[b]], program.buffers[b].free

    # around them ------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> tuple[list[Op], list[Op]]:
        """Ops before and after the blocks. See NOTE [ Around the blocks ]."""
        after: set[int] = {b.index for b in self.program.buffers if b.source is Source.BLOCK}
        late = []
        for op in self.program.ops:
            if after.intersection(op.inputs):
                after.update(op.outputs)
                late.append(op)
        wanted = {b for call in self.trace.calls for b in call.given.values()}
        between: set[int] = set()
        for op in reversed(late):
            if wanted.intersection(op.outputs):
                between.add(op.index)
                wanted.update(op.inputs)
        later = {op.index for op in late} - between
        ops = self.program.ops
        return [op for op in ops if op.index not in later], [op for op in ops if op.index in later]

    def _kept_of(self, ops: list[Op]) -> set[int]:
        """Buffers that autograd saved for these ops."""
        maker = self._maker(ops, {}, set())
        back = {value.storage: b for b, value in maker.values.items()}
        return {back[s.value.storage] for step in maker.tape.steps for s in step.saved}

    @cached_property
    def saved_before(self) -> set[int]:
        """Buffers that the part before the blocks saves for itself, or for several of them."""
        return self._kept_of(self.parts[0]) | self.held

    @cached_property
    def held(self) -> set[int]:
        """Buffers that several blocks keep, and that none of them counts."""
        shared = {root for root, free in self._kept_arguments() if free} - self.kept_alone
        return {b for b in shared if self._costs(b) and not self._kept_inside(b)}

    def _costs(self, b: int) -> bool:
        buffer = self.program.buffers[b]
        return not buffer.free and buffer.source is not Source.PARAMETER and b not in self.trace.root.names

    def _kept_inside(self, b: int) -> bool:
        """Does the block that made it keep it as well?"""
        if b not in self.trace.root.blocks:
            return False
        call, leaf = self.trace.root.blocks[b]
        trace = self.called(self.trace.calls[call]).trace
        ref = trace.output_leaves[leaf]
        saved = trace.program.saved_buffers() - self.handed_on[call]
        return isinstance(ref, TensorRef) and ref.buffer in saved

    def _maker(self, ops: list[Op], weights: dict[str, Weight], free: set[int]) -> TapeMaker:
        program, root = self.program, self.trace.root
        streams = {b.index for b in program.buffers if b.source is Source.BLOCK and b.index not in root.constants}
        return TapeMaker(
            trace=root, module=self.trace.fake_model, weights=weights, streams=streams, free=free, part=ops
        )

    def before(self) -> Region:
        """Region before the blocks; its result is the first block's stream."""
        ops, later = self.parts
        theirs = {name: w for name, w in self.owned[1].items() if name not in self._only_read_by(later)}
        inside = {b for b in self.trace.root.blocks if self._kept_inside(b)}
        maker = self._maker(ops, theirs, self.kept_alone | inside)
        for b in sorted(self.held):
            maker.hold(b, "shared input")
        return Region(tape=maker.tape, output=self._stream(maker))

    def _stream(self, maker: TapeMaker) -> Value:
        first = self.trace.calls[0]
        cls = self.called(first)
        leaves = tree_leaves((cls.args, cls.kwargs))
        places = [p for p in sorted(first.given) if isinstance(leaves[p], Tensor) and leaves[p].is_floating_point()]
        wanted = [p for p in places if leaves[p].requires_grad] or places
        if not wanted:
            raise UsageError(f"block {first.name} is given no stream of numbers")
        return maker.value(first.given[wanted[0]])

    def after(self) -> Region:
        """Region after the blocks, with the loss."""
        _, ops = self.parts
        only = self._only_read_by(ops)
        weights = {name: w for name, w in self.owned[1].items() if name in only}
        read = {self.trace.root.names[b] for op in ops for b in op.inputs if b in self.trace.root.names}
        weights |= {name: replace(w, tied=True) for name, w in self.owned[1].items() if name in read - only}
        inside = {b for b in self.trace.root.blocks if self._kept_inside(b)}
        maker = self._maker(ops, weights, self.saved_before | self.kept_alone | inside)
        for ref in dict.fromkeys(self.trace.outside):
            if self._costs(ref.buffer):
                maker.hold(ref.buffer, "kept by the loss")
        return Region(tape=maker.tape, output=self._loss(maker))

    def _only_read_by(self, ops: list[Op]) -> set[str]:
        """Names of parameters that no other op around the blocks reads."""
        names, chosen = self.trace.root.names, {op.index for op in ops}
        here = {names[b] for op in ops for b in op.inputs if b in names}
        elsewhere = {names[b] for op in self.program.ops if op.index not in chosen for b in op.inputs if b in names}
        return here - elsewhere

    def _loss(self, maker: TapeMaker) -> Value:
        """The first scalar of the output, or the last that was made."""
        leaves = [leaf for leaf in self.trace.root.output_leaves if isinstance(leaf, TensorRef) and not leaf.size]
        if leaves:
            return maker.value(leaves[0].buffer)
        made = [value for value in maker.values.values() if not value.shape and value.grad]
        return made[-1] if made else maker.tape.values[-1]


def _differentiable(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad


def _output(cls: BlockClass) -> int:
    """The buffer of a block's stream: its first result that passes a gradient."""
    refs = [leaf for leaf in cls.trace.output_leaves if isinstance(leaf, TensorRef)]
    chosen = [ref for ref in refs if ref.buffer not in cls.trace.constants and ref.dtype.is_floating_point] or refs
    if not chosen:
        raise UsageError(f"block {cls.example} returns no tensor")
    return chosen[0].buffer
