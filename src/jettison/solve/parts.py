"""Parts of a layer that are checkpoints of their own: attention, the feed-forward block and each norm.

NeMo AutoModel, ``components/distributed/activation_checkpointing.py``, ``apply_submodule_checkpointing``: a
``checkpoint_wrapper`` around each. What stands between them, residual sums, keeps what it keeps.
"""

from __future__ import annotations

from jettison.ledger.program import Program
from jettison.solve.policy import Full, close


def parts(program: Program) -> tuple[frozenset[int], ...]:
    """Ops of each part, in the order of the forward."""
    found: dict[str, set[int]] = {}
    for op in program.ops:
        if name := op.path.partition(".")[0]:
            found.setdefault(name, set()).add(op.index)
    return tuple(map(frozenset, found.values()))


def kept_apart(program: Program) -> frozenset[int]:
    """What the checkpoints of all parts were given, and what is saved between them."""
    between = {slot.buffer for slot in program.slots if not slot.path}
    inputs = frozenset[int]().union(*(program.given(part) for part in parts(program)))
    return close(program, inputs | between | Full().kept(program))
