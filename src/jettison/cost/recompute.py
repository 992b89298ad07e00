"""Which steps of a region's tape backward runs again."""

from __future__ import annotations

from functools import lru_cache

from jettison.cost.op_kinds import BATCHED
from jettison.formula.region import Region


@lru_cache(maxsize=16384)
def repeated(region: Region, kept: frozenset[int]) -> frozenset[int]:
    """The least: what leads from the kept buffers to those that backward asks for."""
    return frozenset(region.program.recompute_set(kept))


@lru_cache(maxsize=16384)
def to_the_end(region: Region, kept: frozenset[int]) -> frozenset[int]:
    """The same and the product that uses it: a checkpointed attention core runs to its end."""
    again = repeated(region, kept)
    made = {b for o in again for b in region.program.ops[o].outputs}
    ends = {op.index for op in region.program.ops if op.name == BATCHED and not made.isdisjoint(op.inputs)}
    return again | ends


@lru_cache(maxsize=4096)
def everything(region: Region) -> frozenset[int]:
    """The whole forward."""
    return frozenset(range(len(region.tape.steps)))
