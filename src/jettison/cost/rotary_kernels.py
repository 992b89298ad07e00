"""What rotating the heads of latent attention launches.

NOTE [ Rotated in place ]
A query of latent attention is rotated in a quarter or a third of its width, and a key takes one rotated head for all of
its own. With ``apply_rope_fusion`` Megatron-Core rotates that part of the query where it lies, and writes keys and
values out of their joint product and the rotated head in one kernel; backward does the same the other way
(``_mla_rope_fwd_inplace_kernel``, ``_mla_rope_fwd_kv_split_kernel`` in fusions/fused_mla_yarn_rope_apply.py). Without,
parts are rotated, joined and copied, and their gradients added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from jettison.formula.tape import Tape, TapeOp, Value

HEADS = 1
"""Of b × heads × s × d."""


@dataclass(frozen=True, kw_only=True)
class RotaryKernels:
    """Of one tape.

    Args:
        in_place: see NOTE [ Rotated in place ].
    """

    tape: Tape
    in_place: bool

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
