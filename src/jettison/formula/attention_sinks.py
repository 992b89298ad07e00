"""Attention sinks: a learned logit a head takes part in the softmax and takes weight from all keys.

arXiv 2309.17453 §3.3, as gpt-oss has them.
"""

from __future__ import annotations

from jettison.formula.tape import Value, Weight
from jettison.formula.writer import Writer, saved

REFERENCE = "arXiv 2309.17453 §3.3"


def sink_weight(w: Writer, heads: int) -> Weight:
    """One logit a head."""
    return w.parameter("sinks", heads, split=0)


def softmax_with_sinks(w: Writer, scores: Value, op: str) -> Value:
    """Probabilities of the keys alone, b × a × s × s.

    Written out, the softmax is one column wider than its scores, and so is what stays of it; the row maxima are
    subtracted by hand, and autograd keeps where they were.
    """
    weights = [sink_weight(w, scores.shape[1])]
    if w.kernels.fused_softmax:
        out = w.tape.empty(scores.shape, scores.dtype, scores.places, grad=scores.grad or not weights[0].frozen)
        w.tape.record(op, [scores], [out], saves=[saved(out, "softmax output", REFERENCE)], weights=weights)
        return out
    wider = (*scores.shape[:-1], scores.shape[-1] + 1)
    joint = w.tape.op("aten.cat.default", [scores], wider, weights=weights)
    highest = w.tape.empty((*wider[:-1], 1), joint.dtype, joint.places, grad=joint.grad)
    where = w.tape.empty(highest.shape, "int64", joint.places)
    w.tape.record("aten.max.dim", [joint], [highest, where], saves=[saved(where, "position of the maximum")])
    shifted = w.tape.op("aten.sub.Tensor", [joint, highest], passes=True)
    out = w.tape.empty(wider, joint.dtype, joint.places, grad=joint.grad)
    w.tape.record(op, [shifted], [out], saves=[saved(out, "softmax output", REFERENCE)])
    return w.tape.view(out, scores.shape)
