"""What a layer's experts launch otherwise than their ops say.

NOTE [ Experts in Megatron ]
Megatron-Core before the fused kernels of 26.06 (megatron/core/transformer/moe/experts.py, TEGroupedMLP) hands a grouped
product over expert by expert, and quantises what goes into it before. The bias of the last product is added by
`_apply_bias`: for each expert b·p with fp32 weights p, a sum, all of them joined and cast, where one kernel would read
and write 2 + 2 bytes. That of the first product is the product's own. Halves that are clamped (gpt-oss) are clamped and
joined before the kernel that multiplies them (fusions/fused_bias_geglu.py), and PyTorch's backward of a clamp compares
anew. `tests/cost/test_cost_experts.py` counts the bytes of both in PyTorch, op by op.

NOTE [ Permuted rows ]
TransformerEngine's permute (``pytorch/permutation.py``, with ``moe_permute_fusion``) goes back by a gather of the same
rows, which it reads and writes once. PyTorch's backward of an index adds rows to zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jettison.cost.kernel import Half, Kernel
from jettison.cost.op_kinds import ALL_TO_ALL, PAD
from jettison.formula.tape import Tape, TapeOp

WIDE_BIAS = (28, 40)
"""Bytes an element of a bias that is added in fp32, in both directions: b·p written (4), read with the output and the
sum written (10), joined (8), cast (6); the gradient cast (6) and cast again for the output's (6), which are joined (4),
times p for b's and times b for p's (16), and both summed up (8)."""
CLAMPS = (16, 30)
"""Bytes an element of the hidden size of halves that are clamped apart and joined; and back: a half with one bound
compared (3) and chosen (5), one with two compared twice (6), both joined (3) and chosen (5), halves joined (8)."""


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """Of one tape.

    Args:
        loops: experts are handed over one by one.
        once_to_node: what sends rows copies them, too, and sums what comes back.
    """

    tape: Tape
    loops: bool
    once_to_node: bool

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
