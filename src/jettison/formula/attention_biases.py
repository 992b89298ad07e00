"""Biases of scores by distance: 1 × heads × queries × keys, made once for a stack or by each layer.

arXiv 1910.10683 §2.1: distances are sorted into buckets, and a table has a number for each bucket and head. In
transformers (``models/t5/modeling_t5.py``, ``T5Attention.compute_bias``) the first layer looks all of them up and hands
the result on; attention that asks an encoder has zeros in their place. Under ``gradient_checkpointing_enable`` a
gradient is asked of these (``T5Attention.forward``, ``position_bias.requires_grad``), which no fused kernel of a CPU
makes.
"""

from __future__ import annotations

from jettison.formula.basic import copy
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.ledger.program import Anchor
from jettison.spec.biases import Biases
from jettison.spec.model import Attention

REFERENCE = "arXiv 1910.10683 §2.1"
BIASES = "position biases"


def made_biases(w: Writer, spec: Attention, rows: int, keys: int) -> Value:
    """What is added to scores. What this layer hands on is not computed again: other layers read it, and have it."""
    shape = (1, spec.heads, rows, keys)
    places = (("tp", 1),) if w.tp > 1 else ()
    dtype = w.compute if spec.buckets else w.products  # zeros are made in the dtype of queries
    if spec.biases is Biases.GIVEN:
        return w.tape.source(BIASES, shape, dtype, places, grad=spec.buckets > 0 or w.kernels.learned_zeros, free=True)
    anchor = Anchor.HANDED if spec.biases is Biases.FIRST else None
    with w.tape.scope("biases"):
        positions = w.table("positions", (keys,), "int64")
        if not spec.buckets:
            learned = w.kernels.learned_zeros
            return w.tape.op("aten.zeros.default", [positions], shape, dtype, places, anchor=anchor, grad=learned)
        buckets = w.tape.op("aten.add.Tensor", [positions], (rows, keys), grad=False)
        made = w.tape.op(
            "aten.embedding.default",
            [buckets],
            (rows, keys, spec.heads),
            w.compute,
            (("tp", 2),) if w.tp > 1 else (),
            saves=[saved(buckets, "bucket of each distance", REFERENCE)],
            weights=[w.parameter("table", spec.buckets, spec.heads, split=1)],
            anchor=anchor,
        )
    return w.tape.view(made, shape, places)


def as_mask(w: Writer, spec: Attention, added: Value) -> Value:
    """As a fused kernel takes them: heads outermost in memory, and what lies ahead masked. Zeros are so already.

    transformers' ``integrations/sdpa_attention.py``, ``create_position_bias_mask``.
    """
    if not spec.buckets:
        return added
    if spec.causal:
        positions = w.table("positions", added.shape[-1:], "int64")
        seen = w.tape.op("aten.ge.Tensor", [positions], (1, 1, *added.shape[2:]), "bool", grad=False)
        added = w.tape.op("aten.where.self", [added, seen], saves=[saved(seen, "attention mask")])
    return copy(w, added)


def biases_workspace(q: Value, added: Value | None) -> int:
    """A kernel makes their gradient for each sequence of a batch before it is summed."""
    return 0 if added is None or not added.grad else q.local_shape[0] * added.nbytes
