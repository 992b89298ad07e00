"""Kernels that a region launches in forward and backward, with their FLOPs and the bytes that they move.

NOTE [ Fusion ]
A tape lists PyTorch's ops. An op joins the kernel of an op whose result it reads if both may be fused, the results have
the same size, and no other kernel in between writes one of its inputs. Elementwise ops may be fused; compiled code
fuses reductions over rows as well. A fused kernel reads each outside input once, and writes only values that others
read or that are saved for backward. Its backward reads the gradients of its outputs and its saved tensors, and writes
the gradients of its inputs; a gradient that equals the incoming one, as a sum's does, costs nothing. Gradients of a
value with several readers are added: two reads and a write each.

NOTE [ Products ]
y = x W^T with x of m × k and W of n × k is a GEMM of (m, n, k); the gradient of x is one of (m, k, n), that of W one of
(n, k, m). A bias costs one pass over the gradient of y.

NOTE [ Pieces of a ring ]
Attention over a sequence sharded over c ranks is c calls, one for each rank's keys as they pass by in the ring. Under a
causal mask the first takes a rank's own keys; of the others one half sees half of the keys, the other half of the
queries. A call's output is merged with the previous ones, scaled by both log-sum-exps; gradients are added.
TransformerEngine (``context_parallel.py``, ``flash_attn_fwd_out_correction``; ``dq.add_``) reads both and writes one.
PyTorch's ring (``_context_parallel/_attention.py``, ``_SDPAMerger`` and ``_templated_ring_attention_backward``,
torch 2.13) merges in fp32, op by op: a cast (6 bytes an element), a subtraction, a multiplication and another
subtraction (32), and for every second piece a full copy; backward adds in fp32, copies, and concatenates the gradients
of keys and values before they are sent.

Kernels of FP8 and FP4 GEMMs: `cost.fp8`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from types import MappingProxyType

from jettison.core.dtypes import DTYPE_BYTES
from jettison.cost import kernel as ops
from jettison.cost.execution import Execution, Fusion
from jettison.cost.fp8 import LowPrecisionGemms
from jettison.cost.kernel import Gemm, Half, Kernel, KernelWork
from jettison.formula.region import Region
from jettison.formula.tape import NAMES, Tape, TapeOp, Value
from jettison.spec.fp8 import Fp8Recipe
from jettison.spec.kernels import CpCommType

FLASH_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward's, for values as wide as queries."""
ROWS = 2
"""Sequence dim of query, key and value: b × heads × s × d."""
SCAN_BACKWARD = 3
"""FLOPs of a fused scan's backward over its forward's: gradients of both factors of each matmul, and the recomputed
states and scores (``mamba_ssm/ops/triton/ssd_combined.py``, ``_mamba_chunk_scan_combined_bwd``)."""
LOSS_PASSES = 3
"""Passes over fp32 logits, in one direction: written, read, written as gradients."""

PIECES: Mapping[CpCommType, tuple[float, float, int]] = MappingProxyType(
    {CpCommType.P2P: (3 * 0.75, 3 * 0.75, 2), CpCommType.RING: (38 / 2 * 0.75 + 2, 18 / 2, 5)}
)
"""Passes and kernels of each piece but the first, by exchange. See NOTE [ Pieces of a ring ]."""


@lru_cache(maxsize=4096)
def work(
    region: Region, how: Execution, gradient: str, gemm: str | None, *, recipe: Fp8Recipe | None = None
) -> KernelWork:
    """Kernels of a region.

    Args:
        how: execution choices.
        gradient: dtype of weight gradients.
        gemm: dtype of the inputs of GEMMs with weights, if they are quantised.
        recipe: of FP8 or FP4 GEMMs, if known.
    """
    return _Listing(region=region, how=how, gradient_bytes=DTYPE_BYTES[gradient], gemm=gemm, recipe=recipe).work()


def backward_of_attention(step: TapeOp) -> float:
    """FLOPs of fused attention's backward: three matmuls of queries' width, two of values' (arXiv 2205.14135)."""
    query, value = step.inputs[0].local_shape[-1], step.inputs[2].local_shape[-1]
    return step.flops * (3 * query + 2 * value) / (query + value)


def groups(steps: Sequence[TapeOp], fusion: Fusion, *, delayed_scaling: bool = False) -> list[list[int]]:
    """Group steps into kernels: NOTE [ Fusion ], and NOTE [ Quantising ] in `cost.fp8`."""
    pointwise, both = ops.POINTWISE, ops.POINTWISE | ops.REDUCTIONS
    fusable = {Fusion.NONE: frozenset[str](), Fusion.POINTWISE: pointwise, Fusion.COMPILED: both}[fusion]
    made: list[list[int]] = []
    group_of: dict[int, int] = {}
    maker: dict[int, int] = {}

    def joined(step: TapeOp, leaders: frozenset[str]) -> int | None:
        """Return the group that a step may join: the last one whose results it reads, if it starts with a leader."""
        makers = [maker[v.storage] for v in step.inputs if v.storage in maker]
        if not makers:
            return None
        chosen = group_of[max(makers)]
        first = made[chosen][0]
        if steps[first].name not in leaders or any(group_of[i] != chosen and i > first for i in makers):
            return None
        size, other = _size(step), max(_size(steps[i]) for i in made[chosen])
        return chosen if size == other or (fusion is Fusion.COMPILED and size < other) else None

    for index, step in enumerate(steps):
        late = delayed_scaling and step.name == ops.QUANTISE
        chosen = joined(step, both if late else fusable) if late or step.name in fusable else None
        if chosen is None:
            chosen = len(made)
            made.append([])
        made[chosen].append(index)
        group_of[index] = chosen
        maker |= {out.storage: index for out in step.outputs}
    return made


def aligned(*rows: int) -> int:
    """Largest power of two, up to 64, that divides all these lengths of rows: NOTE [ Aligned rows ] in `kernel`."""
    return gcd(64, *rows)


def _size(step: TapeOp) -> int:
    return max((prod(v.local_shape) for v in step.outputs), default=0)


@dataclass(kw_only=True)
class _Listing:
    """Lists the kernels of one region."""

    region: Region
    how: Execution
    gradient_bytes: int
    gemm: str | None
    recipe: Fp8Recipe | None

    @property
    def tape(self) -> Tape:
        return self.region.tape

    @cached_property
    def low_precision(self) -> LowPrecisionGemms:
        """Quantisation of FP8 and FP4 GEMMs."""
        recipe = self.recipe or self.how.recipe
        return LowPrecisionGemms(tape=self.tape, how=self.how, gemm=self.gemm, recipe=recipe)

    @cached_property
    def experts(self) -> ExpertKernels:
        """Kernels of experts that differ from their ops."""
        return ExpertKernels(tape=self.tape, loops=self.how.loops_experts, once_to_node=self.how.once_to_node)

    @cached_property
    def rotary(self) -> RotaryKernels:
        """Kernels of rotary embeddings."""
        return RotaryKernels(tape=self.tape, in_place=self.how.rotates_in_place)

    def work(self) -> KernelWork:
        steps = self.tape.steps
        found = groups(steps, self.how.fusion, delayed_scaling=self.low_precision.joins)
        members = [group for group in found if not self._is_free(steps[group[0]])]
        readers: defaultdict[int, set[int]] = defaultdict(set)
        low_precision_only: defaultdict[int, set[int]] = defaultdict(set)  # readers of the fp8 copy
        quantized = {step.inputs[0].index for step in steps if step.name == ops.QUANTISE and self.low_precision.joins}
        for number, group in enumerate(members):
            for i in group:
                for v in steps[i].inputs:
                    readers[v.storage].add(number)
                    if v.index in quantized and self.low_precision.takes(steps[i]):
                        low_precision_only[v.storage].add(number)
        for i, step in enumerate(steps):  # transfers and kept references read, too
            if self._is_free(step) and step.name != NAMES:
                for v in step.inputs:
                    readers[v.storage].add(-1 - i)
        saved = {s.value.storage for step in steps for s in step.saved} | {self.region.output.storage}
        forward: list[Kernel] = []
        backward: list[Kernel] = []
        for number, group in enumerate(members):
            own = [steps[i] for i in group]
            copies = {v.storage for step in own if self.low_precision.copies(step) for v in step.outputs}
            stays = saved | copies
            leaving = [v for step in own for v in step.outputs if v.storage in stays or readers[v.storage] - {number}]
            written = [
                v
                for v in leaving
                if v.storage in stays or readers[v.storage] - low_precision_only[v.storage] - {number}
            ]
            forward += self._forward(group, own, written)
            backward += self._backward(group, own, leaving)
        backward += self._sums()
        return KernelWork(forward=tuple(forward), backward=tuple(reversed(backward)))

    def _is_free(self, step: TapeOp) -> bool:
        free = step.name in (ops.HOLD, NAMES) or step.name.startswith(ops.TRANSFER)
        return free or self.experts.sends(step) or self.low_precision.counts(step) or self.rotary.is_free(step)

    # forward ----------------------------------------------------------------------------------------------------------

    def _forward(self, group: list[int], own: list[TapeOp], leaving: list[Value]) -> Iterator[Kernel]:
        """Args: leaving: values that the group writes."""
        step, indices = own[0], tuple(group)
        written = sum(v.nbytes for v in leaving)
        if step.name == ops.PICKED:
            yield Kernel(steps=indices, nbytes=2 * step.inputs[-1].nbytes)
            return
        if self.experts.is_bias(step):
            yield from self.experts.bias(step, indices, backward=False)
            return
        if (rotated := self.rotary.nbytes(step)) is not None:
            yield Kernel(steps=indices, nbytes=rotated)
            return
        if step.name in ops.LOOKUPS:
            yield Kernel(steps=indices, nbytes=2 * written + step.inputs[-1].nbytes, rows=True)
            return
        nbytes = (
            written
            + self._read(own)
            + sum(w.nbytes for s in own if not s.copied for w in s.weights)
            + self.experts.clamps(step)[0]
        )
        if step.name in ops.LOSSES:
            yield from self._loss(step, indices, backward=False)
        elif step.name == ops.IN_ROWS:
            yield Kernel(steps=indices, nbytes=ops.ROWS_PASSES[0] * step.inputs[0].nbytes)
        elif step.name == ops.FLASH:
            if self._fp8_attention:
                yield self.low_precision.attention(step, indices, None)
            yield from self._fused_attention(step, indices, nbytes, step.flops, None)
        else:
            yield from self.low_precision.forward(step, group[0])
            nbytes -= self.low_precision.spares(step)
            yield Kernel(
                steps=indices,
                nbytes=nbytes,
                gemm=self._gemm(step),
                scan_flops=step.flops if step.name == ops.SCAN else 0,
                rows=step.name in ops.SCATTERS,
                launches=step.rounds,
                singly=self._singly(own),
            )

    def _singly(self, own: list[TapeOp], *, backward: bool = False) -> int:
        """Elements that a kernel computes one by one: NOTE [ Vectorized kernels ] in `kernel`."""
        step = own[0]
        if step.name == ops.UNPACKED:
            return round(ops.UNPACKED_ELEMENTS * prod(step.outputs[0].local_shape))
        if self.how.fusion is not Fusion.NONE or not step.outputs:
            return 0
        if step.name == ops.MEAN:  # its gradient is broadcast
            return prod(step.inputs[0].local_shape) if backward else 0
        if step.name not in ops.GENERAL:
            return 0
        out, given = step.outputs[0], step.inputs
        lowers = any(v.dtype == "float32" for v in given) and out.dtype != "float32"
        if step.name == ops.CAST:
            apart = backward if lowers else not backward
        elif step.name == ops.IN_ORDER:
            apart = sum(v.nbytes for v in given) > out.nbytes  # slices of its inputs
        else:
            apart = bool(step.weights) or any((v.dtype, v.local_shape) != (out.dtype, out.local_shape) for v in given)
        return prod(out.local_shape) if apart else 0

    @property
    def _fp8_attention(self) -> bool:
        return self.how.fp8_attention and self.recipe is not None

    def _fused_attention(
        self, step: TapeOp, indices: tuple[int, ...], nbytes: int, flops: float, half: Half | None
    ) -> Iterator[Kernel]:
        """One pass of fused attention, and the merging of its pieces."""
        query, key, value, *_ = step.inputs
        passes = PIECES.get(self.how.exchange)
        pieces = -(-key.shape[ROWS] // key.local_shape[ROWS]) if passes else 1
        yield Kernel(
            steps=indices,
            nbytes=nbytes,
            attention_flops=flops,
            half=half,
            launches=pieces * (1 if half is None else 2),
            head_dim=query.local_shape[-1],
            keys=key.shape[ROWS] // pieces,
            pieces=pieces,
            fp8_attention=self._fp8_attention,
        )
        if passes and pieces > 1:
            ahead, back, launches = passes
            joined = sum(v.nbytes for v in (query, key, value)) * back if half else step.outputs[0].nbytes * ahead
            yield Kernel(steps=indices, nbytes=int((pieces - 1) * joined), half=half, launches=(pieces - 1) * launches)

    def _read(self, own: list[TapeOp]) -> int:
        """Bytes read from outside the group, each storage once."""
        inside = {v.storage for step in own for v in step.outputs}
        views: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for step in own:
            for v in step.inputs:
                if v.storage not in inside:
                    views[v.storage][v.index] = v.nbytes
        return sum(min(sum(sizes.values()), self.tape.sizes[storage]) for storage, sizes in views.items())

    def _gemm(self, step: TapeOp) -> Gemm | None:
        """Sizes of a matmul, from its FLOPs and its result; None for other ops."""
        if step.name not in ops.GEMMS and step.name not in (ops.BATCHED, ops.GROUPED):
            return None
        shape = step.outputs[0].local_shape
        k = step.flops // max(1, 2 * prod(shape))
        if not k:  # no elements
            return None
        quantized = self.low_precision.dtype_of(step)
        dtype = step.inputs[0].dtype if quantized is None else quantized
        if step.name == ops.BATCHED:
            rows = aligned(shape[-1], k)
            if self.how.simt_batches and rows < ops.WHOLE_LOAD:  # NOTE [ Aligned rows ] in `kernel`
                dtype, rows = "float32", ops.WHOLE_LINE
            return Gemm(prod(shape[:-2]), shape[-2], shape[-1], k, dtype, aligned=rows)
        rows, n = prod(shape[:-1]), shape[-1]
        if step.name == ops.GROUPED:
            matrices = next((w.numel for w in step.weights), None) or prod(step.inputs[1].local_shape)
            batch = max(1, matrices // (n * k))
            return Gemm(batch, -(-rows // batch), n, k, dtype, grouped=self.how.loops_experts)
        return Gemm(1, rows, n, k, dtype, aligned=aligned(k))

    def _loss(self, step: TapeOp, indices: tuple[int, ...], *, backward: bool) -> Iterator[Kernel]:
        """Head and loss in chunks. `FUSED` computes gradients, too, in forward: all three GEMMs."""
        x, weight = step.inputs[0], step.weights[0]
        k = x.local_shape[-1]
        m, n = prod(x.local_shape[:-1]), weight.numel // k
        logits = LOSS_PASSES * m * n * 4
        at_once = step.name == ops.FUSED
        ahead, both = Gemm(1, m, n, k, x.dtype, aligned=aligned(k)), aligned(n, k)
        if not backward or step.name in (ops.CHUNKED, ops.TILED):
            yield Kernel(steps=indices, nbytes=logits, gemm=ahead, half=Half.INPUTS if backward else None)
        if backward != at_once:
            back, half = Gemm(1, m, k, n, x.dtype, aligned=both), Half.INPUTS if backward else None
            yield Kernel(steps=indices, nbytes=logits + x.nbytes, gemm=back, half=half)
            if weight.frozen:
                return
            moved = x.nbytes + weight.numel * self.gradient_bytes
            half = Half.WEIGHTS if backward else None
            yield Kernel(steps=indices, nbytes=moved, gemm=Gemm(1, n, k, m, x.dtype, aligned=both), half=half)

    # backward ---------------------------------------------------------------------------------------------------------

    def _backward(self, group: list[int], own: list[TapeOp], leaving: list[Value]) -> Iterator[Kernel]:
        if not any(step.differentiable for step in own):
            return
        step, indices = own[0], tuple(group)
        incoming = sum(v.nbytes for v in leaving if v.grad)
        if self.experts.is_bias(step):
            yield from self.experts.bias(step, indices, backward=True)
        elif (rotated := self.rotary.nbytes(step)) is not None:
            yield Kernel(steps=indices, nbytes=rotated, half=Half.INPUTS)
        elif step.name in ops.LOSSES:
            yield from self._loss(step, indices, backward=True)
        elif step.name == ops.IN_ROWS:
            yield Kernel(steps=indices, nbytes=ops.ROWS_PASSES[1] * step.inputs[0].nbytes, half=Half.INPUTS)
        elif step.name == ops.FLASH:
            if self._fp8_attention:
                yield self.low_precision.attention(step, indices, Half.INPUTS)
            nbytes = 2 * self._saved(own) + incoming
            yield from self._fused_attention(step, indices, nbytes, backward_of_attention(step), Half.INPUTS)
        elif step.name in ops.LOOKUPS and self.how.permutes and not step.weights:
            nbytes = incoming + self._gradients(own)
            yield Kernel(steps=indices, nbytes=nbytes, half=Half.INPUTS, rows=True)
        elif step.name in ops.LOOKUPS:
            table = step.weights[0].numel * self.gradient_bytes if step.learned else self._gradients(own)
            half = Half.WEIGHTS if step.learned else Half.INPUTS
            yield Kernel(steps=indices, nbytes=3 * incoming + table, half=half, launches=2, rows=True)
        elif (gemm := self._gemm(step)) is not None:
            yield from self._gemm_backward(step, indices, gemm, incoming)
        else:
            yield from self._memory_backward(indices, own, incoming)

    def _gemm_backward(self, step: TapeOp, indices: tuple[int, ...], p: Gemm, incoming: int) -> Iterator[Kernel]:
        if step.weights:
            weight, *bias = step.weights
            x = step.inputs[0]
            yield from self.low_precision.backward(step, indices, incoming)
            p = replace(p, aligned=aligned(p.n, p.k))
            given, read, matrix = self.low_precision.reads(step, incoming)
            if any(v.grad for v in step.inputs):
                moved = given + matrix + x.nbytes
                yield Kernel(steps=indices, nbytes=moved, gemm=replace(p, n=p.k, k=p.n), half=Half.INPUTS)
                if weight.packed_bytes:  # unpacked once more: ``MatMul4Bit.backward`` of bitsandbytes
                    singly = round(ops.UNPACKED_ELEMENTS * weight.numel) * (
                        weight.packed_bytes < weight.numel
                    )  # 4 bits
                    moved = weight.packed_bytes + step.workspace
                    yield Kernel(steps=indices, nbytes=moved, half=Half.INPUTS, singly=singly)
            if weight.frozen:
                return
            dw = replace(p, m=p.n, n=p.k, k=p.m)
            if self.low_precision.widens and self.low_precision.takes(step):
                given, read, dw = incoming, x.nbytes, replace(dw, dtype=x.dtype)
            moved = given + read + weight.numel * self.gradient_bytes
            yield Kernel(steps=indices, nbytes=moved, gemm=dw, half=Half.WEIGHTS)
            if bias:
                yield Kernel(steps=indices, nbytes=incoming, half=Half.WEIGHTS)
            return
        first, second = step.inputs[0], step.inputs[min(1, len(step.inputs) - 1)]
        for v, other, sizes in ((first, second, (p.m, p.k, p.n)), (second, first, (p.n, p.k, p.m))):
            if v.grad:
                moved = incoming + other.nbytes + v.nbytes
                gemm = Gemm(p.batch, *sizes, p.dtype, aligned=p.aligned)
                yield Kernel(steps=indices, nbytes=moved, gemm=gemm, half=Half.INPUTS)

    def _memory_backward(self, indices: tuple[int, ...], own: list[TapeOp], incoming: int) -> Iterator[Kernel]:
        made = self._made(own)
        workspace = sum(step.workspace for step in own) if self.how.fusion is not Fusion.COMPILED else 0
        if not made and not workspace and not any(step.learned for step in own):
            return
        launches = len(made) if len(own) == 1 and len(made) > 1 else 1
        weights = sum(w.numel for step in own for w in step.learned) * self.gradient_bytes
        moved = launches * incoming + self._saved(own) + sum(made) + 2 * workspace + weights
        nbytes = moved + self.experts.clamps(own[0])[1]
        launches += any(step.learned for step in own) + 2 * (own[0].rounds - 1)
        rows = own[0].name in ops.SCATTERS
        flops = SCAN_BACKWARD * own[0].flops if own[0].name == ops.SCAN else 0
        yield Kernel(
            steps=indices,
            nbytes=nbytes,
            scan_flops=flops,
            half=Half.INPUTS,
            launches=launches,
            rows=rows,
            singly=self._singly(own, backward=True),
        )

    def _saved(self, own: list[TapeOp]) -> int:
        """Bytes of saved tensors that backward reads, each storage once."""
        views: dict[int, int] = {}
        for step in own:
            for s in step.saved:
                storage = s.value.storage
                views[storage] = min(self.tape.sizes[storage], views.get(storage, 0) + s.value.nbytes)
        return sum(views.values())

    def _made(self, own: list[TapeOp]) -> list[int]:
        """Bytes of each outside input's gradient, unless it is the incoming one, as that of a last sum is."""
        inside = {v.storage for step in own for v in step.outputs}
        passed = own[-1].passes
        found: dict[int, int] = {}
        for step in own:
            for i, v in enumerate(step.inputs):
                if v.grad and v.storage not in inside and not (step.passes and passed):
                    found[v.index] = v.nbytes if step.gradients is None else step.gradients[i]
        return list(found.values())

    def _gradients(self, own: list[TapeOp]) -> int:
        return sum(v.nbytes for step in own for v in step.inputs if v.grad)

    def _sums(self) -> Iterator[Kernel]:
        """Sums of gradients of values with several readers."""
        contributions: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, step in enumerate(self.tape.steps):
            if not step.differentiable:
                continue
            for v in {v.storage: v for v in step.inputs if v.grad}.values():
                if v.storage not in self.rotary.apart:
                    contributions[v.storage].append((i, v.nbytes))
        each = 1 if self.how.fusion is Fusion.COMPILED else 3
        for found in contributions.values():
            for i, nbytes in found[1:]:
                launches = 0 if self.how.fusion is Fusion.COMPILED else 1
                yield Kernel(steps=(i,), nbytes=each * nbytes, half=Half.INPUTS, launches=launches)


# kernels of experts that differ from their ops ------------------------------------------------------------------------
#
# NOTE [ Experts in Megatron ]
# Megatron-Core before the fused kernels of 26.06 (megatron/core/transformer/moe/experts.py, TEGroupedMLP) launches a
# grouped GEMM expert by expert, after quantising its inputs. The bias of the last GEMM is added by `_apply_bias`: for
# each expert b·p with fp32 weights p, a sum, all of them concatenated and cast, where one kernel would read and write
# 2 + 2 bytes. The first GEMM adds its bias itself. Clamped halves (gpt-oss) are clamped and concatenated before the
# kernel that multiplies them (fusions/fused_bias_geglu.py), and PyTorch's backward of a clamp repeats the comparison.
# `tests/cost/test_cost_experts.py` counts the bytes of both in PyTorch, op by op.
#
# NOTE [ Permuted rows ]
# The backward of TransformerEngine's permute (``pytorch/permutation.py``, with ``moe_permute_fusion``) gathers the same
# rows: one read and one write. PyTorch's backward of an index adds rows to zeros.


WIDE_BIAS = (28, 40)
"""Bytes per element of a bias that is added in fp32. Forward: b·p written (4), read with the output and the sum written
(10), concatenated (8), cast (6). Backward: the gradient cast (6), cast once more for the output's (6), concatenated
(4), times p for b's and times b for p's (16), and both summed (8)."""
CLAMPS = (16, 30)
"""Bytes per element of the hidden size of halves that are clamped apart and concatenated. Backward: a half with one
bound compared (3) and selected (5), one with two compared twice (6), both combined (3) and selected (5), halves
concatenated (8)."""


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """Kernels of experts in one tape."""

    tape: Tape
    loops: bool  # experts are launched one by one
    once_to_node: bool  # the all-to-all library copies and sums rows, too

    def sends(self, step: TapeOp) -> bool:
        """Whether the all-to-all library does this step: copy rows before sending, pad them, or sum received ones.

        Padding: ``pad_multiple`` in megatron/core/transformer/moe/token_dispatcher.py of Megatron-LM.
        """
        if not self.once_to_node:
            return False
        if step.name == ops.PAD:
            return True
        if step.name == "aten.index.Tensor":
            return step.outputs[0].storage in self._exchanged[0]
        return step.name == "aten.scatter_add.default" and step.inputs[0].storage in self._exchanged[1]

    @cached_property
    def _exchanged(self) -> tuple[frozenset[int], frozenset[int]]:
        """Storages that all-to-alls read and write."""
        steps = [s for s in self.tape.steps if s.name.startswith(ops.ALL_TO_ALL)]
        return frozenset(s.inputs[0].storage for s in steps), frozenset(s.outputs[0].storage for s in steps)

    def is_bias(self, step: TapeOp) -> bool:
        """Whether this step looks up a bias for each row, or adds it. See NOTE [ Experts in Megatron ]."""
        looked_up = step.name == "aten.index.Tensor" and bool(step.weights)
        added = step.name == "aten.add.Tensor" and step.path in self._biased
        return self.loops and (looked_up or added)

    @cached_property
    def _biased(self) -> frozenset[str]:
        """Paths of experts' GEMMs with a bias."""
        return frozenset(s.path for s in self.tape.steps if s.name == "aten.index.Tensor" and s.weights)

    def bias(self, step: TapeOp, indices: tuple[int, ...], *, backward: bool) -> Iterator[Kernel]:
        """Kernels of the lookup, which include the addition; none for the addition."""
        half = Half.WEIGHTS if backward else None
        if not step.weights:
            return
        elements = prod(step.outputs[0].local_shape)
        if step.path.endswith("down"):
            yield Kernel(steps=indices, nbytes=WIDE_BIAS[backward] * elements, half=half, launches=4)
        elif backward:
            yield Kernel(steps=indices, nbytes=2 * elements, half=half)

    def clamps(self, step: TapeOp) -> tuple[int, int]:
        """Bytes of clamping, in forward and in backward."""
        if not self.loops or not step.name.endswith(".clamped"):
            return 0, 0
        elements = prod(step.outputs[0].local_shape)
        return CLAMPS[0] * elements, CLAMPS[1] * elements


# rotary embeddings of latent attention --------------------------------------------------------------------------------
#
# NOTE [ Rotated in place ]
# Multi-head latent attention rotates a quarter or a third of a query's width, and one head that all keys share. With
# ``apply_rope_fusion`` Megatron-Core rotates that part of the query in place, and writes keys and values from their
# joint projection and the rotated head in one kernel; backward reverses it (``_mla_rope_fwd_inplace_kernel``,
# ``_mla_rope_fwd_kv_split_kernel`` in fusions/fused_mla_yarn_rope_apply.py). Without it, parts are rotated,
# concatenated and copied, and their gradients added.


HEADS = 1
"""Dim of heads: b × heads × s × d."""


@dataclass(frozen=True, kw_only=True)
class RotaryKernels:
    """Kernels of rotary embeddings in one tape."""

    tape: Tape
    in_place: bool  # see NOTE [ Rotated in place ]

    @cached_property
    def _joined(self) -> dict[int, Value]:
        """The rotated part, by the index of the concatenation's result."""
        if not self.in_place:
            return {}
        rotated = {out.index: out for step in self.tape.steps if step.name == "rotary" for out in step.outputs}
        return {
            step.outputs[0].index: step.inputs[-1]
            for step in self.tape.steps
            if step.name == "aten.cat.default" and step.inputs[-1].index in rotated
        }

    def is_free(self, step: TapeOp) -> bool:
        """Whether the step is part of another step's kernel."""
        return step.name == "rotary" and step.outputs[0].index in {value.index for value in self._joined.values()}

    def nbytes(self, step: TapeOp) -> int | None:
        """Bytes read and written in one direction; None for steps without this kernel."""
        part = self._joined.get(step.outputs[0].index) if step.outputs else None
        if part is None:
            return None
        whole = step.outputs[0]
        if part.local_shape[HEADS] == whole.local_shape[HEADS]:
            return 2 * part.nbytes
        plain = prod(whole.local_shape[:-1]) * (whole.local_shape[-1] - part.local_shape[-1])
        return plain * (whole.nbytes // prod(whole.local_shape)) + part.nbytes + whole.nbytes

    @cached_property
    def apart(self) -> frozenset[int]:
        """Storages whose gradients one kernel writes part by part, so that none are added."""
        return frozenset(
            value.storage
            for step in self.tape.steps
            if step.outputs and step.outputs[0].index in self._joined
            for value in step.inputs[:-1]
        )
