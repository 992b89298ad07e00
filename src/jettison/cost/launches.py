"""What a region launches on the device: kernels with their FLOPs and the bytes that they move, in both passes.

NOTE [ Fusion ]
A tape lists ops as PyTorch has them. An op joins the kernel of an op whose result it reads if both may be fused, the
results are of one size, and nothing that it also reads is made by another kernel in between. Elementwise ops may be
fused; compiled code fuses reductions over rows as well. A fused kernel reads what comes from outside once, and writes
what others read, what is saved for backward and nothing else. Its backward reads the gradients of what it wrote and
what its ops saved, and writes the gradients of what it read; a gradient that is the incoming one, as that of a sum is,
costs nothing. Where a value has several readers its gradients are added up: two reads and a write each.

NOTE [ Products ]
y = x W^T with x of m × k and W of n × k is a product of (m, n, k); the gradient of x is one of (m, k, n), that of W one
of (n, k, m). A bias costs one pass over the gradient of y.

NOTE [ Pieces of a ring ]
Attention over a sequence that c ranks share is c calls, one for each rank's keys as they come round. Under a causal
mask the first is of a rank's own, of the others half see half of the keys, and half are of half of the queries. What a
call returns is joined to what is there, scaled by both log-sum-exps; gradients are added up. TransformerEngine
(``context_parallel.py``, ``flash_attn_fwd_out_correction``; ``dq.add_``) reads both and writes one, PyTorch's ring
(``_context_parallel/_attention.py``, ``_SDPAMerger`` and ``_templated_ring_attention_backward``, torch 2.13) does it in
fp32, op by op: a cast (6 bytes an element), a difference, its product and another difference (32) and for every second
piece a copy of the whole; backward adds in fp32, copies, and joins keys' gradients with values' before they are sent.

What products of narrow copies launch: `narrow_kernels`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from types import MappingProxyType

from jettison.core.dtypes import DTYPE_BYTES
from jettison.cost.execution import Execution, Fusion
from jettison.cost.kernel import (
    ALL_TO_ALL,
    BATCHED,
    CHUNKED,
    FLASH,
    FUSED,
    GROUPED,
    HOLD,
    IN_ROWS,
    LOOKUPS,
    LOSSES,
    PAD,
    PICKED,
    POINTWISE,
    PRODUCTS,
    QUANTISE,
    REDUCTIONS,
    ROWS_PASSES,
    SCAN,
    SCATTERS,
    TILED,
    TRANSFER,
    Half,
    Kernel,
    KernelWork,
    Product,
)
from jettison.cost.narrow_kernels import NarrowKernels, narrow_kernels
from jettison.formula.region import Region
from jettison.formula.tape import NAMES, Tape, TapeOp, Value
from jettison.spec.fp8 import Fp8Recipe
from jettison.spec.kernels import ContextExchange

FLASH_BACKWARD = 2.5
"""FLOPs of a fused attention's backward for those of its forward, where values are as wide as queries."""
ROWS = 2
"""Of query, key and value: b × heads × s × d."""
SCAN_BACKWARD = 3
"""FLOPs of a fused scan's backward for those of its forward: gradients of both factors of each product, and the states
and scores that it works out again (``mamba_ssm/ops/triton/ssd_combined.py``, ``_mamba_chunk_scan_combined_bwd``)."""
LOSS_PASSES = 3
"""Over fp32 logits, in one direction: written, read, written as gradients."""


PIECES: Mapping[ContextExchange, tuple[float, float, int]] = MappingProxyType(
    {ContextExchange.P2P: (3 * 0.75, 3 * 0.75, 2), ContextExchange.RING: (38 / 2 * 0.75 + 2, 18 / 2, 5)}
)
"""By the exchange, for each piece but the first: passes over 16-bit outputs, over gradients of queries, keys and
values, and kernels. See NOTE [ Pieces of a ring ]."""


@lru_cache(maxsize=4096)
def work(
    region: Region, how: Execution, gradient: str, product: str | None, *, recipe: Fp8Recipe | None = None
) -> KernelWork:
    """Everything that a region launches.

    Args:
        how: the code runs it.
        gradient: dtype of weight gradients.
        product: dtype of the inputs of products with weights, where they are quantised.
        recipe: how products are narrow, if that is said.
    """
    return _Listing(region=region, how=how, gradient_bytes=DTYPE_BYTES[gradient], product=product, recipe=recipe).work()


def backward_of_attention(step: TapeOp) -> float:
    """FLOPs of a fused attention's backward: five products for the forward's two, three as wide as queries and two as
    wide as values (arXiv 2205.14135, Algorithm 4).
    """
    query, value = step.inputs[0].local_shape[-1], step.inputs[2].local_shape[-1]
    return step.flops * (3 * query + 2 * value) / (query + value)


def groups(steps: Sequence[TapeOp], fusion: Fusion, *, delayed_scaling: bool = False) -> list[list[int]]:
    """Steps that are one kernel, as in NOTE [ Fusion ] and NOTE [ Quantising ] in `narrow_kernels`."""
    fusable = {Fusion.NONE: frozenset(), Fusion.POINTWISE: POINTWISE, Fusion.COMPILED: POINTWISE | REDUCTIONS}[fusion]
    made: list[list[int]] = []
    group_of: dict[int, int] = {}
    maker: dict[int, int] = {}
    for index, step in enumerate(steps):
        chosen = None
        late = delayed_scaling and step.name == QUANTISE
        if step.name in fusable or late:
            leaders = POINTWISE | REDUCTIONS if late else fusable
            chosen = _joined(step, steps, made, group_of, maker, fusion, leaders)
        if chosen is None:
            chosen = len(made)
            made.append([])
        made[chosen].append(index)
        group_of[index] = chosen
        for out in step.outputs:
            maker[out.storage] = index
    return made


def _joined(
    step: TapeOp,
    steps: Sequence[TapeOp],
    made: list[list[int]],
    group_of: dict[int, int],
    maker: dict[int, int],
    fusion: Fusion,
    leaders: frozenset[str],
) -> int | None:
    """The group that a step may join: the last of those whose results it reads, if one of ``leaders`` starts it."""
    makers = [maker[v.storage] for v in step.inputs if v.storage in maker]
    if not makers:
        return None
    chosen = group_of[max(makers)]
    first = made[chosen][0]
    if steps[first].name not in leaders or any(group_of[i] != chosen and i > first for i in makers):
        return None
    size, other = _size(step), max(_size(steps[i]) for i in made[chosen])
    return chosen if size == other or (fusion is Fusion.COMPILED and size < other) else None


def aligned(*rows: int) -> int:
    """The largest power of two, up to 64, that divides all these lengths of rows: NOTE [ Aligned rows ] in `matmul`."""
    return gcd(64, *rows)


def _size(step: TapeOp) -> int:
    return max((prod(v.local_shape) for v in step.outputs), default=0)


@dataclass(kw_only=True)
class _Listing:
    """Writes down the kernels of one region."""

    region: Region
    how: Execution
    gradient_bytes: int
    product: str | None
    recipe: Fp8Recipe | None

    @property
    def tape(self) -> Tape:
        return self.region.tape

    @cached_property
    def narrow(self) -> NarrowKernels:
        """What products of narrow copies launch beside themselves."""
        return narrow_kernels(self.tape, self.how, self.product, self.recipe)

    @cached_property
    def experts(self) -> ExpertKernels:
        """What experts launch otherwise."""
        return ExpertKernels(tape=self.tape, loops=self.how.loops_experts, once_to_node=self.how.once_to_node)

    @cached_property
    def rotary(self) -> RotaryKernels:
        """What rotations launch."""
        return RotaryKernels(tape=self.tape, in_place=self.how.rotates_in_place)

    def work(self) -> KernelWork:
        steps = self.tape.steps
        members = [group for group in self._groups(steps) if not self._is_free(steps[group[0]])]
        readers: defaultdict[int, set[int]] = defaultdict(set)
        narrow_only: defaultdict[int, set[int]] = defaultdict(set)  # readers that take the copy in fp8
        narrowed = {step.inputs[0].index for step in steps if step.name == QUANTISE and self.narrow.joins}
        for number, group in enumerate(members):
            for i in group:
                for v in steps[i].inputs:
                    readers[v.storage].add(number)
                    if v.index in narrowed and self.narrow.takes(steps[i]):
                        narrow_only[v.storage].add(number)
        for i, step in enumerate(steps):  # transfers and what is held for others read, too
            if self._is_free(step) and step.name != NAMES:
                for v in step.inputs:
                    readers[v.storage].add(-1 - i)
        saved = {s.value.storage for step in steps for s in step.saved} | {self.region.output.storage}
        forward: list[Kernel] = []
        backward: list[Kernel] = []
        for number, group in enumerate(members):
            own = [steps[i] for i in group]
            copies = {v.storage for step in own if self.narrow.copies(step) for v in step.outputs}
            stays = saved | copies
            leaving = [v for step in own for v in step.outputs if v.storage in stays or readers[v.storage] - {number}]
            written = [
                v for v in leaving if v.storage in stays or readers[v.storage] - narrow_only[v.storage] - {number}
            ]
            forward += self._forward(group, own, written)
            backward += self._backward(group, own, leaving)
        backward += self._sums()
        return KernelWork(forward=tuple(forward), backward=tuple(reversed(backward)))

    def _groups(self, steps: Sequence[TapeOp]) -> list[list[int]]:
        return groups(steps, self.how.fusion, delayed_scaling=self.narrow.joins)

    def _is_free(self, step: TapeOp) -> bool:
        free = step.name in (HOLD, NAMES) or step.name.startswith(TRANSFER)
        return free or self.experts.sends(step) or self.narrow.counts(step) or self.rotary.is_free(step)

    # forward ----------------------------------------------------------------------------------------------------------

    def _forward(self, group: list[int], own: list[TapeOp], leaving: list[Value]) -> Iterator[Kernel]:
        """Args: leaving: values that it writes."""
        step, indices = own[0], tuple(group)
        written = sum(v.nbytes for v in leaving)
        if step.name == PICKED:
            yield Kernel(steps=indices, nbytes=2 * step.inputs[-1].nbytes)
            return
        if self.experts.is_bias(step):
            yield from self.experts.bias(step, indices, backward=False)
            return
        if (rotated := self.rotary.nbytes(step)) is not None:
            yield Kernel(steps=indices, nbytes=rotated)
            return
        if step.name in LOOKUPS:
            yield Kernel(steps=indices, nbytes=2 * written + step.inputs[-1].nbytes, rows=True)
            return
        nbytes = (
            written
            + self._read(own)
            + sum(w.nbytes for s in own if not s.copied for w in s.weights)
            + self.experts.clamps(step)[0]
        )
        if step.name in LOSSES:
            yield from self._loss(step, indices, backward=False)
        elif step.name == IN_ROWS:
            yield Kernel(steps=indices, nbytes=ROWS_PASSES[0] * step.inputs[0].nbytes)
        elif step.name == FLASH:
            if self._narrow_attention:
                yield self.narrow.attention(step, indices, None)
            yield from self._fused_attention(step, indices, nbytes, step.flops, None)
        else:
            yield from self.narrow.forward(step, group[0])
            nbytes -= self.narrow.spares(step)
            yield Kernel(
                steps=indices,
                nbytes=nbytes,
                product=self._product(step),
                scan_flops=step.flops if step.name == SCAN else 0,
                rows=step.name in SCATTERS,
                launches=step.rounds,
            )

    @property
    def _narrow_attention(self) -> bool:
        return self.how.narrow_attention and self.recipe is not None

    def _fused_attention(
        self, step: TapeOp, indices: tuple[int, ...], nbytes: int, flops: float, half: Half | None
    ) -> Iterator[Kernel]:
        """One pass of it, and what joins the pieces that it is cut into."""
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
            narrow=self._narrow_attention,
        )
        if passes and pieces > 1:
            ahead, back, launches = passes
            joined = sum(v.nbytes for v in (query, key, value)) * back if half else step.outputs[0].nbytes * ahead
            yield Kernel(steps=indices, nbytes=int((pieces - 1) * joined), half=half, launches=(pieces - 1) * launches)

    def _read(self, own: list[TapeOp]) -> int:
        """Bytes that come from outside, each storage once."""
        inside = {v.storage for step in own for v in step.outputs}
        views: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for step in own:
            for v in step.inputs:
                if v.storage not in inside:
                    views[v.storage][v.index] = v.nbytes
        return sum(min(sum(sizes.values()), self._whole(storage)) for storage, sizes in views.items())

    def _whole(self, storage: int) -> int:
        return self.tape.sizes[storage]

    def _product(self, step: TapeOp) -> Product | None:
        """The sizes of a matrix product, which its FLOPs and its result tell; None where the op is none."""
        if step.name not in PRODUCTS and step.name not in (BATCHED, GROUPED):
            return None
        shape = step.outputs[0].local_shape
        k = step.flops // max(1, 2 * prod(shape))
        if not k:  # of no elements
            return None
        narrow = self.narrow.dtype_of(step)
        dtype = step.inputs[0].dtype if narrow is None else narrow
        if step.name == BATCHED:
            return Product(prod(shape[:-2]), shape[-2], shape[-1], k, dtype, aligned=aligned(shape[-1], k))
        rows, n = prod(shape[:-1]), shape[-1]
        if step.name == GROUPED:
            matrices = next((w.numel for w in step.weights), None) or prod(step.inputs[1].local_shape)
            batch = max(1, matrices // (n * k))
            return Product(batch, -(-rows // batch), n, k, dtype, grouped=self.how.loops_experts)
        return Product(1, rows, n, k, dtype, aligned=aligned(k))

    def _loss(self, step: TapeOp, indices: tuple[int, ...], *, backward: bool) -> Iterator[Kernel]:
        """Head and loss in chunks. What makes gradients at once does all three products in the forward."""
        x, weight = step.inputs[0], step.weights[0]
        k = x.local_shape[-1]
        m, n = prod(x.local_shape[:-1]), weight.numel // k
        logits = LOSS_PASSES * m * n * 4
        at_once = step.name == FUSED
        ahead, both = Product(1, m, n, k, x.dtype, aligned=aligned(k)), aligned(n, k)
        if not backward or step.name in (CHUNKED, TILED):
            yield Kernel(steps=indices, nbytes=logits, product=ahead, half=Half.INPUTS if backward else None)
        if backward != at_once:
            back, half = Product(1, m, k, n, x.dtype, aligned=both), Half.INPUTS if backward else None
            yield Kernel(steps=indices, nbytes=logits + x.nbytes, product=back, half=half)
            if weight.frozen:
                return
            moved = x.nbytes + weight.numel * self.gradient_bytes
            half = Half.WEIGHTS if backward else None
            yield Kernel(steps=indices, nbytes=moved, product=Product(1, n, k, m, x.dtype, aligned=both), half=half)

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
        elif step.name in LOSSES:
            yield from self._loss(step, indices, backward=True)
        elif step.name == IN_ROWS:
            yield Kernel(steps=indices, nbytes=ROWS_PASSES[1] * step.inputs[0].nbytes, half=Half.INPUTS)
        elif step.name == FLASH:
            if self._narrow_attention:
                yield self.narrow.attention(step, indices, Half.INPUTS)
            nbytes = 2 * self._saved(own) + incoming
            yield from self._fused_attention(step, indices, nbytes, backward_of_attention(step), Half.INPUTS)
        elif step.name in LOOKUPS and self.how.permutes and not step.weights:
            nbytes = incoming + self._gradients(own)
            yield Kernel(steps=indices, nbytes=nbytes, half=Half.INPUTS, rows=True)
        elif step.name in LOOKUPS:
            table = step.weights[0].numel * self.gradient_bytes if step.learned else self._gradients(own)
            half = Half.WEIGHTS if step.learned else Half.INPUTS
            yield Kernel(steps=indices, nbytes=3 * incoming + table, half=half, launches=2, rows=True)
        elif (product := self._product(step)) is not None:
            yield from self._product_backward(step, indices, product, incoming)
        else:
            yield from self._memory_backward(indices, own, incoming)

    def _product_backward(self, step: TapeOp, indices: tuple[int, ...], p: Product, incoming: int) -> Iterator[Kernel]:
        if step.weights:
            weight, *bias = step.weights
            x = step.inputs[0]
            yield from self.narrow.backward(step, indices, incoming)
            p = replace(p, aligned=aligned(p.n, p.k))
            given, read, matrix = self.narrow.reads(step, incoming)
            if any(v.grad for v in step.inputs):
                moved = given + matrix + x.nbytes
                dx = replace(p, n=p.k, k=p.n)
                yield Kernel(steps=indices, nbytes=moved, product=dx, half=Half.INPUTS)
            if weight.frozen:
                return
            dw = replace(p, m=p.n, n=p.k, k=p.m)
            if self.narrow.widens and self.narrow.takes(step):
                given, read, dw = incoming, x.nbytes, replace(dw, dtype=x.dtype)
            moved = given + read + weight.numel * self.gradient_bytes
            yield Kernel(steps=indices, nbytes=moved, product=dw, half=Half.WEIGHTS)
            if bias:
                yield Kernel(steps=indices, nbytes=incoming, half=Half.WEIGHTS)
            return
        first, second = step.inputs[0], step.inputs[min(1, len(step.inputs) - 1)]
        for v, other, sizes in ((first, second, (p.m, p.k, p.n)), (second, first, (p.n, p.k, p.m))):
            if v.grad:
                moved = incoming + other.nbytes + v.nbytes
                product = Product(p.batch, *sizes, p.dtype, aligned=p.aligned)
                yield Kernel(steps=indices, nbytes=moved, product=product, half=Half.INPUTS)

    def _memory_backward(self, indices: tuple[int, ...], own: list[TapeOp], incoming: int) -> Iterator[Kernel]:
        made = self._made(own)
        workspace = sum(step.workspace for step in own) if self.how.fusion is not Fusion.COMPILED else 0
        if not made and not workspace and not any(step.learned for step in own):
            return
        launches = len(made) if len(own) == 1 and len(made) > 1 else 1
        weights = sum(w.numel for step in own for w in step.learned) * self.gradient_bytes
        nbytes = (
            launches * incoming
            + self._saved(own)
            + sum(made)
            + 2 * workspace
            + weights
            + self.experts.clamps(own[0])[1]
        )
        launches += any(step.learned for step in own) + 2 * (own[0].rounds - 1)
        rows = own[0].name in SCATTERS
        flops = SCAN_BACKWARD * own[0].flops if own[0].name == SCAN else 0
        yield Kernel(steps=indices, nbytes=nbytes, scan_flops=flops, half=Half.INPUTS, launches=launches, rows=rows)

    def _saved(self, own: list[TapeOp]) -> int:
        """Bytes that backward reads of what the steps saved, each storage once."""
        views: dict[int, int] = {}
        for step in own:
            for s in step.saved:
                storage = s.value.storage
                views[storage] = min(self._whole(storage), views.get(storage, 0) + s.value.nbytes)
        return sum(views.values())

    def _made(self, own: list[TapeOp]) -> list[int]:
        """Bytes of the gradients that are written: of what comes from outside, unless it is the incoming one."""
        inside = {v.storage for step in own for v in step.outputs}
        passed = self._passed(own)
        found: dict[int, int] = {}
        for step in own:
            for i, v in enumerate(step.inputs):
                if v.grad and v.storage not in inside and not (step.passes and passed):
                    size = v.nbytes if step.gradients is None else step.gradients[i]
                    found[v.index] = size
        return list(found.values())

    def _passed(self, own: list[TapeOp]) -> bool:
        """Do only sums stand between what a sum adds and what the group gives on? The last step tells."""
        return own[-1].passes

    def _gradients(self, own: list[TapeOp]) -> int:
        return sum(v.nbytes for step in own for v in step.inputs if v.grad)

    def _sums(self) -> Iterator[Kernel]:
        """Gradients of values with several readers."""
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


# What a layer's experts launch otherwise than their ops say -----------------------------------------------------------
#
# NOTE [ Experts in Megatron ]
# Megatron-Core before the fused kernels of 26.06 (megatron/core/transformer/moe/experts.py, TEGroupedMLP) hands a
# grouped product over expert by expert, and quantises what goes into it before. The bias of the last product is added
# by `_apply_bias`: for each expert b·p with fp32 weights p, a sum, all of them joined and cast, where one kernel would
# read and write 2 + 2 bytes. That of the first product is the product's own. Halves that are clamped (gpt-oss) are
# clamped and joined before the kernel that multiplies them (fusions/fused_bias_geglu.py), and PyTorch's backward of a
# clamp compares anew. `tests/cost/test_cost_experts.py` counts the bytes of both in PyTorch, op by op.
#
# NOTE [ Permuted rows ]
# TransformerEngine's permute (``pytorch/permutation.py``, with ``moe_permute_fusion``) goes back by a gather of the
# same rows, which it reads and writes once. PyTorch's backward of an index adds rows to zeros.


WIDE_BIAS = (28, 40)
"""Bytes an element of a bias that is added in fp32, in both directions: b·p written (4), read with the output and the
sum written (10), joined (8), cast (6); the gradient cast (6) and cast again for the output's (6), which are joined (4),
times p for b's and times b for p's (16), and both summed up (8)."""
CLAMPS = (16, 30)
"""Bytes an element of the hidden size of halves that are clamped apart and joined; and back: a half with one bound
compared (3) and chosen (5), one with two compared twice (6), both joined (3) and chosen (5), halves joined (8)."""


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """Of one tape."""

    tape: Tape
    loops: bool  # experts are handed over one by one
    once_to_node: bool  # what sends rows copies them, too, and sums what comes back

    def sends(self, step: TapeOp) -> bool:
        """Does it copy rows that are sent as they are, fill them up, or sum what has come back? The library does.

        Filling up: ``pad_multiple`` in megatron/core/transformer/moe/token_dispatcher.py of Megatron-LM.
        """
        if not self.once_to_node:
            return False
        if step.name == PAD:
            return True
        if step.name == "aten.index.Tensor":
            return step.outputs[0].storage in self._exchanged[0]
        return step.name == "aten.scatter_add.default" and step.inputs[0].storage in self._exchanged[1]

    @cached_property
    def _exchanged(self) -> tuple[frozenset[int], frozenset[int]]:
        """Storages that all-to-alls read and write."""
        steps = [s for s in self.tape.steps if s.name.startswith(ALL_TO_ALL)]
        return frozenset(s.inputs[0].storage for s in steps), frozenset(s.outputs[0].storage for s in steps)

    def is_bias(self, step: TapeOp) -> bool:
        """A bias looked up for each row, or added: see NOTE [ Experts in Megatron ]."""
        looked_up = step.name == "aten.index.Tensor" and bool(step.weights)
        added = step.name == "aten.add.Tensor" and step.path in self._biased
        return self.loops and (looked_up or added)

    @cached_property
    def _biased(self) -> frozenset[str]:
        """Paths of experts' products with a bias."""
        return frozenset(s.path for s in self.tape.steps if s.name == "aten.index.Tensor" and s.weights)

    def bias(self, step: TapeOp, indices: tuple[int, ...], *, backward: bool) -> Iterator[Kernel]:
        """All of it where it is looked up; where it is added there is nothing left to do."""
        half = Half.WEIGHTS if backward else None
        if not step.weights:
            return
        elements = prod(step.outputs[0].local_shape)
        if step.path.endswith("down"):
            yield Kernel(steps=indices, nbytes=WIDE_BIAS[backward] * elements, half=half, launches=4)
        elif backward:
            yield Kernel(steps=indices, nbytes=2 * elements, half=half)

    def clamps(self, step: TapeOp) -> tuple[int, int]:
        """Bytes in both directions."""
        if not self.loops or not step.name.endswith(".clamped"):
            return 0, 0
        elements = prod(step.outputs[0].local_shape)
        return CLAMPS[0] * elements, CLAMPS[1] * elements


# What rotating the heads of latent attention launches -----------------------------------------------------------------
#
# NOTE [ Rotated in place ]
# A query of latent attention is rotated in a quarter or a third of its width, and a key takes one rotated head for all
# of its own. With ``apply_rope_fusion`` Megatron-Core rotates that part of the query where it lies, and writes keys and
# values out of their joint product and the rotated head in one kernel; backward does the same the other way
# (``_mla_rope_fwd_inplace_kernel``, ``_mla_rope_fwd_kv_split_kernel`` in fusions/fused_mla_yarn_rope_apply.py).
# Without, parts are rotated, joined and copied, and their gradients added up.


HEADS = 1
"""Of b × heads × s × d."""


@dataclass(frozen=True, kw_only=True)
class RotaryKernels:
    """Of one tape."""

    tape: Tape
    in_place: bool  # see NOTE [ Rotated in place ]

    @cached_property
    def _joined(self) -> dict[int, Value]:
        """The rotated part, by the index of what it is joined to make."""
        if not self.in_place:
            return {}
        rotated = {out.index: out for step in self.tape.steps if step.name == "rotary" for out in step.outputs}
        return {
            step.outputs[0].index: step.inputs[-1]
            for step in self.tape.steps
            if step.name == "aten.cat.default" and step.inputs[-1].index in rotated
        }

    def is_free(self, step: TapeOp) -> bool:
        """Is it part of another's kernel?"""
        return step.name == "rotary" and step.outputs[0].index in {value.index for value in self._joined.values()}

    def nbytes(self, step: TapeOp) -> int | None:
        """Read and written in one direction; None: as any other step."""
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
        """Storages whose parts' gradients one kernel writes side by side, so that none are added up."""
        return frozenset(
            value.storage
            for step in self.tape.steps
            if step.outputs and step.outputs[0].index in self._joined
            for value in step.inputs[:-1]
        )
