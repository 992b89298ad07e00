"""Quantisation kernels of FP8 and FP4 GEMMs, and the bytes that these GEMMs read.

NOTE [ Quantising ]
For an FP8 GEMM each of x, W and the gradient of y is read for its amax, then read once more and written in one byte.
The tape has the second step for x, which is saved. With delayed scaling nothing is read twice, a norm or elementwise
kernel that computes x writes it in one byte, and the optimizer step quantises weights. This is without a recipe.

NOTE [ Passes of a recipe ]
With a recipe of TransformerEngine (2.20) one kernel reads a 16-bit tensor once and writes every copy that a GEMM reads,
with its scales (``cast/dispatch/quantize.cuh``; ``nvfp4`` with its Hadamard transform:
``row_cast_col_hadamard_transform_cast_fusion.cu``). An amax of the tensor takes one more read before, under
``tensorwise`` (``csrc/quantizer.cpp``, ``Float8CurrentScalingQuantizer::quantize_impl``) and ``nvfp4``
(``nvte_hadamard_transform_amax``), but not under ``mxfp8`` and ``blockwise``, whose scales cover a kernel's own block.
Weights are quantised once a step (``module/base.py``, ``quantize_weight``), or never if they are FP8 parameters. If
another op keeps x in 16 bits and backward quantises its columns from that, x is read twice. Copies of 16 tensors on a
B300 and an H200, timed by TransformerEngine (docs/examples/gemm_profiling), take the time of these bytes within 12 %
(tests/facts/transformer_engine_products.csv).

NOTE [ Shards that are gathered ]
Under sequence parallelism a shard is quantised before the all-gather (``pytorch/distributed.py``,
``gather_along_first_dim``): of an input the rowwise copy in forward, the saved one in backward; of a gradient both
copies (``module/base.py``, ``grad_output_preprocess``), or with per-tensor scales the rowwise one, which Hopper then
transposes.

Left out: norms and activations of TransformerEngine that compute the amax, too (``FUSED_NORM_AMAX_FP8``): one in three
of a layer's inputs, and one of its two or three reads. Experts of 26.06 on (``ops/fused/grouped_mlp.py``) quantise a
layer's input and its gradient, and the activation between their two GEMMs in the kernel that computes it.

NOTE [ Passes in torchao ]
torchao quantises input and weight for each GEMM, in backward as well (``float8/float8_linear.py``,
``matmul_with_hp_or_float8_args``). Compiled, a row's amax costs no pass of its own in a kernel that reads the row, and
forward's amax of a tensor is kept. In backward rowwise scales are those of columns of row-major tensors: one more pass
each for the amax of weight, input and the gradient's second copy. Rowwise scales are priced as per-tensor ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from jettison.cost.execution import Execution, Fusion
from jettison.cost.kernel import GEMMS, GROUPED, QUANTISE, Half, Kernel
from jettison.formula.tape import Collective, Tape, TapeOp, Value, Weight
from jettison.spec.fp8 import BF16_GEMMS, Fp8Recipe, Library, Scales

BF16_BYTES = 2
LAST = "down"
"""The second GEMM of an expert."""


@dataclass(frozen=True, kw_only=True)
class LowPrecisionGemms:
    """Quantisation kernels of one tape."""

    tape: Tape
    how: Execution
    gemm: str | None  # dtype of GEMMs' inputs; None: not quantised
    recipe: Fp8Recipe | None  # if known

    @property
    def joins(self) -> bool:
        """Whether the kernel that computes an input writes its copies."""
        return self.how.delayed_scaling if self.recipe is None else self.recipe.history > 0

    @property
    def dtype(self) -> str | None:
        """Dtype of GEMMs, by its name in `cost.kernel`."""
        return self.gemm if self.recipe is None else self.recipe.gemm_dtype

    def counts(self, step: TapeOp) -> bool:
        """Whether a quantisation is counted here, with its GEMM."""
        return step.name == QUANTISE and self.recipe is not None and not self.joins

    def copies(self, step: TapeOp) -> bool:
        """Whether a step writes quantised copies, all of which some GEMM reads."""
        return step.name == QUANTISE and self.recipe is not None

    def takes(self, step: TapeOp) -> bool:
        """Whether a step is an FP8 or FP4 GEMM: under a recipe routers and gates are not, the head only by option."""
        if self.gemm is None or step.name not in GEMMS or self._stays_wide(step):
            return False
        if self.recipe is None or not step.weights:
            return self.recipe is None
        weight = step.weights[0]
        return weight.gemm and not ((weight.head and not self.how.fp8_head) or weight.shape[0] == 1 or weight.adapter)

    def dtype_of(self, step: TapeOp) -> str | None:
        """Dtype of a quantised GEMM, by its name in `cost.kernel`; None if it is not quantised."""
        return self._by(step).dtype if self.takes(step) or self._experts(step) else None

    def _stays_wide(self, step: TapeOp) -> bool:
        return bool(step.weights) and step.weights[0].recipe == BF16_GEMMS

    def _by(self, step: TapeOp) -> LowPrecisionGemms:
        """Kernels by the GEMM's own recipe, if it has one."""
        own = step.weights[0].recipe if step.weights else None
        if own is None or own == BF16_GEMMS or own == self.recipe:
            return self
        if own not in self._others:
            self._others[own] = replace(self, recipe=own)
        return self._others[own]

    @cached_property
    def _others(self) -> dict[Fp8Recipe, LowPrecisionGemms]:
        return {}

    def _experts(self, step: TapeOp) -> bool:
        is_grouped = self.gemm is not None and step.name == GROUPED and bool(step.weights)
        return is_grouped and not self._stays_wide(step)

    def forward(self, step: TapeOp, index: int) -> Iterator[Kernel]:
        """Kernels before a GEMM in forward."""
        if (other := self._by(step)) is not self:
            yield from other.forward(step, index)
            return
        if self.recipe is None:
            if self.takes(step) and not self.how.delayed_scaling:
                weight, x = step.weights[0], step.inputs[0]
                yield Kernel(steps=(index,), nbytes=x.nbytes + 2 * weight.nbytes + weight.numel, launches=3)
            return
        if not self.takes(step) and not self._experts(step):
            return
        if self.recipe.library is Library.TORCHAO:
            yield Kernel(steps=(index,), nbytes=self._weights(step, self._looks), launches=1 + self._looks)
        if self.joins or (self._experts(step) and not self.how.loops_experts and step.path.endswith(LAST)):
            return
        x = self._source(step)
        if self._first[x.index] == index:
            columns = not (step.weights[0].frozen or self._keeps_original(step) or self._turns(step, x))
            made = self._made.get(x.index)
            steps = (index,) if made is None else (made, index)
            yield Kernel(steps=steps, nbytes=self._copies(x, both=columns), launches=1 + self._looks)

    def backward(self, step: TapeOp, indices: tuple[int, ...], incoming: int) -> Iterator[Kernel]:
        """Kernels before the two GEMMs of a backward."""
        if (other := self._by(step)) is not self:
            yield from other.backward(step, indices, incoming)
            return
        if not self.takes(step) and not self._experts(step):
            return
        x, y = self._source(step), step.outputs[0]
        if self.recipe is None:
            if step.name == GROUPED and not self.how.loops_experts:
                return
            reads = 1 if self.how.delayed_scaling else 2
            nbytes = reads * incoming + prod(y.local_shape)
            yield Kernel(steps=indices, nbytes=nbytes, half=Half.INPUTS, launches=reads)
            return
        if self.recipe.library is Library.TORCHAO:
            yield from self._backward_in_torchao(step, indices)
            return
        trained, given = not step.weights[0].frozen, self._reduced.get(y.storage, y)
        turned = trained and self._turns(step, given, y)
        if self.how.loops_experts or not self._experts(step) or step.path.endswith(LAST):
            nbytes = self._copies(given, both=trained and not turned)
            yield Kernel(steps=indices, nbytes=nbytes, half=Half.INPUTS, launches=1 + self._looks)
        for value in (*((y,) if turned else ()), *((step.inputs[0],) if trained and self._turns(step, x) else ())):
            yield Kernel(steps=indices, nbytes=2 * self._copy_bytes(value), half=Half.WEIGHTS)
        if trained and self._keeps_original(step):
            nbytes = self._copies(x, both=False)
            yield Kernel(steps=indices, nbytes=nbytes, half=Half.WEIGHTS, launches=1 + self._looks)

    def _backward_in_torchao(self, step: TapeOp, indices: tuple[int, ...]) -> Iterator[Kernel]:
        """See NOTE [ Passes in torchao ]."""
        assert self.recipe is not None
        rows = self.recipe.inputs is Scales.ROW
        again = int(rows) if rows or self._compiled else self._looks
        x, y = step.inputs[0], step.outputs[0]
        copied = not (step.weights[0].frozen or self.recipe.high_precision_weight_gradient)
        nbytes = self._copies(y, both=copied and not rows)
        yield Kernel(steps=indices, nbytes=nbytes, half=Half.INPUTS, launches=1 + self._looks)
        yield Kernel(steps=indices, nbytes=self._weights(step, again), half=Half.INPUTS, launches=1 + again)
        for value in (*((y,) if rows else ()), x) if copied else ():
            nbytes = copying_bytes(self.recipe, *_sizes(value), both=False, looks=again)
            yield Kernel(steps=indices, nbytes=nbytes, half=Half.WEIGHTS, launches=1 + again)

    def attention(self, step: TapeOp, indices: tuple[int, ...], half: Half | None) -> Kernel:
        """Quantisation for FP8 attention: query, key and value, and in backward the output's gradient, rowwise and
        columnwise each (``backends.py`` of TransformerEngine, ``FusedAttnFunc``). Its results have 16 bits.
        """
        tensors = step.inputs[:3] if half is None else step.outputs[:1]
        nbytes = sum(self._copies(value, both=True) for value in tensors)
        return Kernel(steps=indices, nbytes=nbytes, half=half, launches=len(tensors))

    @property
    def widens(self) -> bool:
        """Whether the weight-gradient GEMM is one of 16-bit tensors."""
        return self.recipe is not None and self.recipe.high_precision_weight_gradient

    def reads(self, step: TapeOp, incoming: int) -> tuple[int, int, int]:
        """Bytes that a GEMM reads of its result's gradient, of its input and of its weight."""
        if (other := self._by(step)) is not self:
            return other.reads(step, incoming)
        x, weight = step.inputs[0], step.weights[0]
        if self.recipe is None or not (self.takes(step) or self._experts(step)):
            return incoming, x.nbytes, weight.nbytes
        return self._copy_bytes(step.outputs[0]), self._copy_bytes(x), self._matrix(weight)

    def spares(self, step: TapeOp) -> int:
        """Bytes that a GEMM saves by reading quantised copies."""
        if not step.weights or step.name not in (*GEMMS, GROUPED):
            return 0
        _, copy, matrix = self.reads(step, 0)
        return step.inputs[0].nbytes - copy + step.weights[0].nbytes - matrix

    def _matrix(self, weight: Weight) -> int:
        assert self.recipe is not None
        return weight.numel * self.recipe.bits // 8

    def gathered_share(self, c: Collective) -> float:
        """Share of a collective's bytes if it gathers quantised copies: NOTE [ Shards that are gathered ]."""
        if self.recipe is None or self.recipe.library is not Library.TE or "all_gather" not in c.kind:
            return 1.0
        step = self.tape.steps[c.step]
        if c.backward and "reduce_scatter" in step.name:
            made, value = self._gemms.get(step.inputs[0].storage), step.inputs[0]
            copies = 1 if self.recipe.rows_are_gathered else 2
        else:
            made, value, copies = self._readers.get(step.outputs[0].storage), step.outputs[0], 1
        return 1.0 if made is None else copies * self._by(made)._copy_bytes(value) / value.nbytes

    @cached_property
    def _gemms(self) -> dict[int, TapeOp]:
        """Quantised GEMMs, by their output's storage."""
        return {s.outputs[0].storage: s for s in self.tape.steps if self.takes(s)}

    @cached_property
    def _readers(self) -> dict[int, TapeOp]:
        """Quantised GEMMs, by their input's storage."""
        return {s.inputs[0].storage: s for s in self.tape.steps if self.takes(s)}

    @cached_property
    def _reduced(self) -> dict[int, Value]:
        """A rank's shard of a reduce-scatter, by the storage of its input."""
        steps = [s for s in self.tape.steps if s.name == "c10d.reduce_scatter_tensor"]
        return {s.inputs[0].storage: s.outputs[0] for s in steps}

    @cached_property
    def _first(self) -> dict[int, int]:
        """First of the GEMMs that read a tensor, which share its copies."""
        found: dict[int, int] = {}
        for index, step in enumerate(self.tape.steps):
            if self.takes(step) or self._experts(step):
                found.setdefault(self._source(step).index, index)
        return found

    @cached_property
    def _made(self) -> dict[int, int]:
        """Steps that quantise a tensor, by the tensor."""
        return {s.inputs[0].index: index for index, s in enumerate(self.tape.steps) if s.name == QUANTISE}

    @cached_property
    def _originals(self) -> dict[int, Value]:
        """Original of each quantised copy, by the copy's storage."""
        return {out.storage: s.inputs[0] for s in self.tape.steps if s.name == QUANTISE for out in s.outputs}

    def _source(self, step: TapeOp) -> Value:
        """Tensor that a GEMM's input is quantised from: the shard of it, if that is what is saved."""
        x = step.inputs[0]
        kept = step.saved[0].value if step.saved else x
        return self._originals.get(kept.storage, kept if kept.dtype == x.dtype else x)

    def _turns(self, step: TapeOp, shard: Value, whole: Value | None = None) -> bool:
        """Whether columnwise copies are transposed from gathered rowwise ones."""
        assert self.recipe is not None
        whole = step.inputs[0] if whole is None else whole
        recipe = self.recipe
        return recipe.rows_are_gathered and not recipe.either_way and _sizes(shard) != _sizes(whole)

    @property
    def _compiled(self) -> bool:
        """Whether a kernel that casts may compute the amax, too."""
        return self.how.fusion is Fusion.COMPILED

    @property
    def _looks(self) -> int:
        assert self.recipe is not None
        return 0 if self._compiled and self.recipe.inputs is Scales.ROW else self.recipe.looks

    def _copy_bytes(self, value: Value) -> int:
        """Bytes of a rowwise copy."""
        assert self.recipe is not None
        return self.recipe.copy_bytes(self.recipe.inputs, *_sizes(value), columnwise=False)

    def _copies(self, value: Value, *, both: bool) -> int:
        assert self.recipe is not None
        return copying_bytes(self.recipe, *_sizes(value), both=both, looks=self._looks)

    def _weights(self, step: TapeOp, looks: int) -> int:
        weight = step.weights[0]
        return (1 + looks) * weight.nbytes + self._matrix(weight)

    def _keeps_original(self, step: TapeOp) -> bool:
        """Whether the input saved for backward is a 16-bit tensor."""
        return bool(step.saved) and step.saved[0].value.dtype == step.inputs[0].dtype


def copying_bytes(recipe: Fp8Recipe, rows: int, columns: int, *, both: bool, looks: int) -> int:
    """Bytes read and written to quantise a 16-bit matrix: NOTE [ Passes of a recipe ].

    Args:
        both: rowwise and columnwise, unless GEMMs read one copy either way.
        looks: reads before the one that casts.
    """
    wide = BF16_BYTES * rows * columns * (1 + looks)
    if both:
        return wide + recipe.both_bytes(recipe.inputs, rows, columns)
    return wide + recipe.copy_bytes(recipe.inputs, rows, columns, columnwise=False)


def _sizes(value: Value) -> tuple[int, int]:
    """Return the rows and columns on one rank."""
    return prod(value.local_shape[:-1]), value.local_shape[-1]
