"""What a compiled block keeps for its backward where nobody tells the compiler: torch's own rule, on a program.

NOTE [ What torch's partitioner keeps ]
``torch/_functorch/partitioners.py``, ``solve_min_cut``: the fewest bytes between forward and backward, with ops that
may not run again left out of the cut: products, attention and what draws (``compute_intensive``, ``random``);
reductions whose results are less than a quarter of what they read; and whatever backward would have to write to memory
for an op that nothing is fused into, such as a product (``is_materialized_backwards``). So what products read and
return stays, and statistics of norms; activations, sums and rotations between them are computed again. A fused op of
ours stands for several of torch's, all of which run again or none.

A product of narrow copies reads what a cast makes, and casts are fused: what it casts may run again. torchao's
products have that for all three of a layer, unless the weight's gradient is a product of 16-bit tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from jettison.ledger.program import Anchor, Op, Program, Source
from jettison.solve.frontier import fewest_bytes_point
from jettison.solve.policy import MATMULS

WORD: Final = "compiled"
NARROW: Final = "compiled, narrow products"
REDUCES: Final = 4
"""Times as many bytes as it makes, that an op reads, make it a reduction that does not run again."""
_PRODUCTS: Final = (*MATMULS, "aten.bmm", "aten.baddbmm")


@dataclass(frozen=True, slots=True)
class Compiled:
    """See NOTE [ What torch's partitioner keeps ]."""

    word: str = WORD

    def kept(self, program: Program) -> frozenset[int]:
        """Buffers that stay."""
        casting = MATMULS if self.word == NARROW else ()
        wide = [op for op in program.ops if op.name.startswith(_PRODUCTS) and not op.name.startswith(tuple(casting))]
        read = {b for op in wide for b in op.inputs}
        ops = tuple(op if _runs_again(program, op, read) else _once(op) for op in program.ops)
        seconds = [0.0] * len(ops)
        found = fewest_bytes_point(replace(program, ops=ops), seconds).kept
        return found | _statistics(program) if self.word == NARROW else found


def _statistics(program: Program) -> frozenset[int]:
    """Of norms that are one op and run again for what they return: of torch's ops the reduction does not."""
    small = {
        b
        for op in program.ops
        for b in op.outputs
        if REDUCES * program.buffers[b].nbytes < sum(program.buffers[i].nbytes for i in op.inputs)
    }
    return program.saved_buffers() & small


def _once(op: Op) -> Op:
    return op if op.anchor is not None else replace(op, anchor=Anchor.OPAQUE)


def _runs_again(program: Program, op: Op, read_by_products: set[int]) -> bool:
    if op.name.startswith((*_PRODUCTS, "c10d.")) or not read_by_products.isdisjoint(op.outputs):
        return False
    if any(program.buffers[b].source is Source.RANDOM for b in op.inputs):
        return False
    made = sum(program.buffers[b].nbytes for b in op.outputs)
    return REDUCES * made >= sum(program.buffers[b].nbytes for b in op.inputs)
