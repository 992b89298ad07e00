"""Liveness of a region's tensors: its forward and backward replayed op by op, in bytes of one rank.

NOTE [ How the replay counts ]
Forward: a tensor lives from the op that makes it to the last op that reads it, or until backward if it is kept. The
region's input is referenced by its caller and lives throughout. Backward: ops in reverse. Each needs its saved
tensors, recomputed if they were not kept (an op is recomputed once, when it is first needed, and its result lives
until its last reader has run). Then it allocates a gradient for each differentiable input, or passes on the incoming
one, and frees what it needed. Inputs held only for recomputation live to the end: a checkpoint holds them as long as
anything refers to its frame (``torch/utils/checkpoint.py``,
``_CheckpointFrame.input_saver``; Megatron's and the reentrant one are single nodes of the graph). A second contribution
to a gradient is a temporary until it has been added. Weight gradients stay. Python references some values longer
than their last reader needs them, and kernels take workspace: neither counts unless a tape states it.

NOTE [ Frames ]
A checkpoint of torch, around a layer or a part of one (``torch/utils/checkpoint.py``, ``unpack_hook`` of
``_checkpoint_hook``), recomputes its whole function when the first saved tensor is unpacked, needed or not, op by op
as the forward did, and holds each saved tensor until it is unpacked. It stops at the last tensor that is saved
(``_StopRecomputationError``). Under a planner's choice each tensor is recomputed on its own, when it is needed.
Torch's selective contexts (``_CachingTorchDispatchMode``) hold every output of a listed op, read or not. In the
second forward (``_CachedTorchDispatchMode``) each op takes its output from the cache, and the last reader frees it.
Outputs after the last saved tensor are never taken, and are held until the frame is freed. A planner's choice, and a
compiled layer, keep only what is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.region import Region
from jettison.formula.tape import TapeOp, Value, Weight
from jettison.ledger.program import Anchor, Op
from jettison.spec.precision import GradientRule


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReadPeaks:
    """Peaks of a region's passes before and after the last step that reads a weight (after it may come a loss).

    Args:
        forward, backward: up to that step, and after it; as in `Passes`.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Bytes of a region's two passes on one rank.

    Args:
        backward_peak: above the bytes held by regions up to this one: the incoming gradient, recomputed tensors, this
            region's weight gradients; it may free its own saved tensors on the way.
    """

    resident: int  # held from forward to backward
    forward_peak: int  # above the bytes before it, the region's input and output included
    backward_peak: int
    gradient: int  # weight gradients that remain after backward
    recompute_flops: int  # recomputed in one backward
    output: int
    around: WeightReadPeaks  # peaks before and after the last read of a weight
    opening: int  # bytes in backward when a weight is first read


def replay(
    region: Region,
    kept: frozenset[int],
    rule: GradientRule,
    *,
    accumulates: bool = False,
    frames: Sequence[frozenset[int]] = (),
    held: frozenset[int] = frozenset(),
    reentrant: bool = False,
) -> Passes:
    """Replay a region's forward and backward.

    Args:
        kept: buffers of `region.program` that are held from forward to backward.
        rule: dtype and accumulation of weight gradients.
        accumulates: weight gradients exist already, and this backward adds to them.
        frames: ops of each checkpoint, all recomputed when one of them is first needed: NOTE [ Frames ].
        held: buffers among ``kept`` that others reference until the backward is over.
        reentrant: its checkpoint's backward (``torch/utils/checkpoint.py``, ``CheckpointFunction.backward``) references
            the recomputed output and its gradient until it returns.
    """
    program = region.program
    backward = Backward(region, kept, rule, accumulates=accumulates, frames=frames, held=held)
    last, owned = region.last_read, [w for w in region.weights if not w.tied and not w.frozen]
    forward = _forward_peaks(region, kept | {*program.outputs}, region.last_ops, last)
    around = WeightReadPeaks(forward=forward, backward=backward.run(last, reentrant=reentrant))
    return Passes(
        resident=program.kept_bytes(kept),
        forward_peak=max(around.forward),
        backward_peak=max(around.backward),
        gradient=sum(w.gradient_bytes(DTYPE_BYTES[rule.kept]) for w in owned),
        recompute_flops=sum(program.ops[o].flops for o in backward.again),
        output=region.output.nbytes,
        around=around,
        opening=backward.opening,
    )


def forward_levels(
    region: Region, stays: Collection[int], last: Mapping[int, int], cut: int, *, start: int = 0
) -> tuple[list[int], list[int]]:
    """Bytes during each op up to number ``cut``, and after it; tensors not in ``stays`` are freed after their last
    reader. They are added to ``start``."""
    program = region.program
    freed: defaultdict[int, int] = defaultdict(int)
    for b, index in last.items():
        if b not in stays and program.buffers[b].producer is not None:
            freed[index] += program.buffers[b].nbytes
    live = start + sum(b.nbytes for b in program.buffers if b.producer is None and not b.free)
    found: tuple[list[int], list[int]] = [live], []
    divided = 0 <= cut < len(program.ops) - 1
    for op in program.ops:
        if divided and op.index == cut + 1:
            found[1].append(live)
        live += sum(program.buffers[b].nbytes for b in op.outputs if program.buffers[b].producer == op.index)
        found[divided and op.index > cut].append(live)
        live -= freed[op.index]
    return found


def _forward_peaks(region: Region, stays: Collection[int], last: Mapping[int, int], cut: int) -> tuple[int, int]:
    """Peaks up to op number ``cut``, and after it."""
    before, behind = forward_levels(region, stays, last, cut)
    return max(before), max(behind, default=0)


@dataclass(frozen=True, slots=True)
class CheckpointFrame:
    """A checkpoint's ops, and those that it recomputes."""

    ops: frozenset[int]
    again: frozenset[int]


def _again(region: Region, kept: frozenset[int], frame: frozenset[int]) -> frozenset[int]:
    """Ops that a checkpoint recomputes: NOTE [ Frames ]."""
    buffers, steps = region.buffers, region.tape.steps
    last = max((i for i in frame if steps[i].differentiable and steps[i].saved), default=-1)
    if last >= 0:
        made = {buffers[v.storage] for v in region.tape.steps[last].outputs}
        own = {buffers[s.value.storage] for s in region.tape.steps[last].saved} & made - kept
        last -= not own
    return frozenset(o for o in frame if o <= last)


class Backward:
    """The replay of one backward; arguments are those of `replay`.

    ``again``: ops that it needs; ``live`` is relative to the bytes resident when it began.
    """

    def __init__(
        self,
        region: Region,
        kept: frozenset[int],
        rule: GradientRule,
        *,
        accumulates: bool = False,
        frames: Sequence[frozenset[int]] = (),
        held: frozenset[int] = frozenset(),
    ) -> None:
        self.region, self.program, self.kept = region, region.program, kept
        self.accumulates, self.held = accumulates, held
        self.again = frozenset(self.program.recompute_set(kept))
        self.frames = [CheckpointFrame(frame, _again(region, kept, frame)) for frame in frames if self.again & frame]
        runs = frozenset[int]().union(*(frame.again for frame in self.frames)) if frames else self.again
        self.fused, self.dummies = rule.fused and accumulates, rule.dummies
        self.update_bytes = rule.update_bytes if accumulates else 0
        self.weight_bytes = DTYPE_BYTES[rule.added if accumulates else rule.kept]
        self.live = self.peak = self.opening = 0
        self.pending = set(runs)
        self.computed: set[int] = set()
        several = self.frames if len(self.frames) > 1 else ()
        self.leaving = {min(f.ops): self.program.given(f.ops) & kept for f in several}
        self.saved: set[int]
        self.uses = self._count_uses(runs)
        self.gradient: dict[int, int] = {}  # storage, or ~piece of one -> gradient tensor
        self.pieces: dict[int, list[int]] = {}  # storage -> ~pieces that have gradients
        self.sizes: dict[int, int] = {}
        self.owners: dict[int, int] = {}  # gradient tensor -> storages that have it
        self.learned: set[str] = set()  # weights whose gradient this backward has made

    def _count_uses(self, again: frozenset[int]) -> dict[int, int]:
        """Number of pending reads of each buffer by backward ops and recomputed ops."""
        uses: dict[int, int] = defaultdict(int)
        for step in self.region.tape.steps:
            for b in self._saved(step):
                uses[b] += 1
        self.saved = {*uses}
        for o in again:
            for b in set(self.program.ops[o].inputs):
                uses[b] += 1
        for b in (*self.held, *(b for inputs in self.leaving.values() for b in inputs)):
            uses[b] += 1
        return uses

    def _saved(self, step: TapeOp) -> set[int]:
        return {self.region.buffers[s.value.storage] for s in step.saved} if step.differentiable else set()

    def run(self, cut: int, *, reentrant: bool = False) -> tuple[int, int]:
        """Peaks from the step with this number on, and before it in the order of the backward."""
        output, steps = self.region.output, self.region.tape.steps
        self._give(output.storage, output.nbytes)
        if reentrant:
            self.owners[self.gradient[output.storage]] += 1
            self._grow(output.nbytes)
        behind = 0
        for number in reversed(range(len(steps))):
            if number == cut:
                self.opening = self.live
                if number < len(steps) - 1:
                    behind, self.peak = self.peak, self.live
            if self._runs(steps[number]):
                self._visit(steps[number])
            for b in self.leaving.get(number, ()):
                self._release(b)
        return self.peak, behind

    def _runs(self, step: TapeOp) -> bool:
        """Whether this backward runs the step's backward."""
        return step.differentiable

    def _grow(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    # saved and recomputed tensors -------------------------------------------------------------------------------------

    def _visit(self, step: TapeOp) -> None:
        if self.pieces:
            for v in step.outputs:
                if v.storage in self.pieces:
                    self._join(v.storage)
        needed = self._saved(step)
        for b in sorted(needed):
            self._fetch(b)
        if step.in_place:  # the gradient is written where a saved tensor was
            for b in needed:
                self._release(b)
        workspace = self._workspace(step)
        self._grow(workspace)
        incoming = [self.gradient[v.storage] for v in step.outputs if v.storage in self.gradient]
        contributions = self._contributions(step, incoming)
        made = self._made(step, incoming)
        each = self.weight_bytes
        weights = [(w.name, w.gradient_bytes(each)) for w in made]
        added = sum([n for name, n in weights if self.accumulates or name in self.learned])
        self.learned.update([name for name, _ in weights])
        self._grow(sum([n for _, n in weights]))
        for b in () if step.in_place else needed:
            self._release(b)
        for v in step.outputs:
            self._drop(v.storage)
        for storage, tensor in contributions:
            self._accept(storage, tensor)
        self.live -= workspace
        if self.update_bytes and step.makes:
            self._grow(update := self.update_bytes * max(w.numel for w in step.makes))
            self.live -= update
        self.live -= added

    def _workspace(self, step: TapeOp) -> int:
        return step.workspace

    def _made(self, step: TapeOp, incoming: list[int]) -> list[Weight]:
        """Weights whose gradients this step makes; ``incoming``: gradients of its outputs."""
        # a matmul that accumulates its weight's gradient makes none
        return [w for w in step.makes if not (self.fused and w.gemm and (self.dummies or not w.head))]

    def _fetch(self, b: int) -> None:
        buffer = self.program.buffers[b]
        if b in self.kept or buffer.free or b in self.computed or buffer.producer is None:
            return
        op = self.program.ops[buffer.producer]
        if op.index not in self.pending:
            return
        if self.frames:
            self._run_frame(next(frame for frame in self.frames if op.index in frame.again))
            return
        for i in op.inputs:
            self._fetch(i)
        self._run(op)

    def _run_frame(self, frame: CheckpointFrame) -> None:
        """Recompute a checkpoint; outputs that are read later stay until the frame is left."""
        stop = max(frame.again)
        read = [b for op in self.program.ops[stop + 1 :] if op.index in frame.ops for b in op.inputs]
        for b in read:
            self.uses[b] += 1
        for each in sorted(frame.again):
            self._run(self.program.ops[each])
        for b in read:
            if b in self.saved or (self.program.buffers[b].producer or 0) <= stop:
                self._release(b)  # a cached output after it is never taken

    def _run(self, op: Op) -> None:
        """Recompute an op whose inputs are live."""
        self.pending.discard(op.index)
        for out in op.outputs:
            if self.program.buffers[out].producer == op.index and out not in self.kept:
                self.computed.add(out)
                self._grow(self.program.buffers[out].nbytes)
            elif self.frames and op.anchor is Anchor.HANDED:  # a checkpoint makes a second copy of what it handed on
                self._grow(self.program.buffers[out].nbytes)
        for i in set(op.inputs):
            self._release(i)
        for out in op.outputs:
            if out in self.computed and not self.uses[out]:
                self._free(out)

    def _release(self, b: int) -> None:
        self.uses[b] -= 1
        if self.uses[b] == 0:
            self._free(b)

    def _free(self, b: int) -> None:
        buffer = self.program.buffers[b]
        if b in self.computed:
            self.computed.discard(b)
            self.live -= buffer.nbytes
        elif b in self.kept and not buffer.free and (buffer.producer is not None or b in self.saved):
            self.live -= buffer.nbytes

    # gradients --------------------------------------------------------------------------------------------------------

    def _contributions(self, step: TapeOp, incoming: list[int]) -> list[tuple[int, int]]:
        """A gradient tensor for each differentiable input: a new one, or the incoming one passed on."""
        made: list[tuple[int, int]] = []
        for v in () if step.casts is not None else step.inputs:
            key, size = v.storage, self.region.tape.sizes[v.storage]
            if v.piece >= 0:
                key, size = ~v.piece, self.region.tape.values[v.piece].nbytes
            if not v.grad or any(before == key for before, _ in made):
                continue
            if step.passes and incoming and self.sizes[incoming[0]] == size:
                tensor = incoming[0]
                self.owners[tensor] += 1
            else:
                tensor = self._tensor(size)
            made.append((key, tensor))
        return made

    def _join(self, storage: int) -> None:
        """Merge gradients of pieces into one of the full tensor: `Tape.split`."""
        whole = self._tensor(self.region.tape.sizes[storage])
        for key in self.pieces.pop(storage):
            self._drop(key)
        self._accept(storage, whole)

    def _tensor(self, nbytes: int) -> int:
        tensor = len(self.sizes)
        self.sizes[tensor] = nbytes
        self.owners[tensor] = 1
        self._grow(nbytes)
        return tensor

    def _give(self, storage: int, nbytes: int) -> None:
        self.gradient[storage] = self._tensor(nbytes)

    def _accept(self, storage: int, tensor: int) -> None:
        """Accept a contribution; if there is one already, the sum is a new tensor if either is shared."""
        before = self.gradient.get(storage)
        if before is None:
            self.gradient[storage] = tensor
            if storage < 0:
                self.pieces.setdefault(self.region.tape.values[~storage].storage, []).append(storage)
            return
        if self.owners[before] > 1 and self.owners[tensor] > 1:
            result = self._tensor(self.sizes[before])
        else:
            result = before if self.owners[before] == 1 else tensor
            self.owners[result] += 1
        self._unown(before)
        self._unown(tensor)
        self.gradient[storage] = result

    def _drop(self, storage: int) -> None:
        tensor = self.gradient.pop(storage, None)
        if tensor is not None:
            self._unown(tensor)

    def _unown(self, tensor: int) -> None:
        self.owners[tensor] -= 1
        if self.owners[tensor] == 0:
            self.live -= self.sizes[tensor]


# Peak of a region's forward without saved tensors ---------------------------------------------------------------------
#
# NOTE [ What frames hold ]
# When autograd saves the operands of ops, it hardly matters how long Python's variables live: the graph holds them
# longer. Under ``torch.no_grad()`` only variables hold them, which die with their function, not with their last use.
# As ``transformers`` writes its models (``models/llama/modeling_llama.py``; others copy it):
#
# - ``LlamaDecoderLayer.forward`` and the module that it calls reference a block's input until the block returns.
# - ``LlamaAttention.forward`` references (rotated) query, key, value and eager attention's weights until it returns.
# - ``sdpa_attention_forward`` and ``eager_attention_forward`` reference keys and values from ``repeat_kv`` until they
#   return. A matmul's own copies are freed at once.
# - ``LlamaModel.forward`` references ``inputs_embeds`` until the last layer returns: `forward_height`'s callers add it.
# - ``GPT2Block.forward`` references attention's output until it returns (``names_outputs``).
#
# torchtitan and torchtune do the same, except for the last two.


_PRODUCT, _COPY, _WEIGHTS = "aten.bmm.default", "aten.clone.default", "aten._softmax.default"
_CORE = frozenset((_PRODUCT, _WEIGHTS, "aten._scaled_dot_product_flash_attention.default"))


def forward_height(region: Region, *, names_outputs: bool) -> tuple[int, int]:
    """Peak bytes of a forward with its input and output: while weights are read, and after that."""
    last = dict(region.last_ops)
    for value, until in _held(region, names_outputs):
        buffer = region.buffers[value.storage]
        last[buffer] = max(last.get(buffer, until), until)
    return _forward_peaks(region, region.program.outputs, last, region.last_read)


def _held(region: Region, names_outputs: bool) -> Iterator[tuple[Value, int]]:
    """Values, and the step until which a frame references them. See NOTE [ What frames hold ]."""
    steps = region.tape.steps
    makers = {v.storage: i for i, step in enumerate(steps) for v in step.outputs}
    for scope, run in groupby(range(len(steps)), lambda i: steps[i].path.partition(".")[0]):
        block = list(run)
        if not scope or scope.endswith("norm"):
            continue
        inside = set(block)
        if names_outputs and scope == "attention":
            yield from ((v, len(steps) - 1) for v in steps[block[-1]].outputs)
        for i in block:
            yield from ((v, block[-1]) for v in steps[i].inputs if makers.get(v.storage, i) not in inside)
        yield from _of_attention(steps, [i for i in block if steps[i].name in _CORE], makers, block[-1])


def _of_attention(
    steps: list[TapeOp], core: list[int], makers: dict[int, int], end: int
) -> Iterator[tuple[Value, int]]:
    """Query, key and value; their inputs before ``repeat_kv``; and attention weights."""
    if not core:
        return
    within = set(core)
    returned = core[-1] + 1 if core[-1] < end and steps[core[-1] + 1].name == _COPY else core[-1]
    for i in core:
        if steps[i].name == _WEIGHTS:
            yield from ((v, end) for v in steps[i].outputs)
            continue
        for value in steps[i].inputs:
            made = makers.get(value.storage)
            if made is None or made in within:
                continue
            if steps[i].name == _PRODUCT and steps[made].name == _COPY:  # the matmul's own copy
                (value,) = steps[made].inputs
                made = makers.get(value.storage)
            if made is not None and steps[made].name == _COPY:  # expanded to the heads that share it
                yield value, returned
                (value,) = steps[made].inputs
            yield value, end
