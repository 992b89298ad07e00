"""The router of a mixture of experts: from tokens to the experts of each, and the weight of each choice.

T tokens · e experts · c choices a token. What is chosen may not be chosen a second time: a bit of difference in the
logits sends a token elsewhere.
"""

from __future__ import annotations

from jettison.formula.basic import cast, discrete
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.ledger.program import Anchor
from jettison.spec.model import Moe, Router

CHOICE = "router choice"
WEIGHTS = "router weights"
REFERENCE = "arXiv 2101.03961 §2.1, router"


def route(w: Writer, tokens: Value, spec: Moe) -> tuple[Value, Value]:
    """(weights, int64 choices), both T × c. ``tokens`` is T × h.

    Which groups of experts may be chosen from is worked out without gradients. Transformers' code asks autograd for it,
    but lets go of the results before the layer is over, and so nothing of that is held.
    """
    shape = (tokens.shape[0], spec.top_k)
    with w.tape.scope("router"):
        logits = _logits(w, tokens, spec)
        if spec.router is Router.TOPK_SOFTMAX:
            values, choice = _topk(w, logits, shape)
            wide = w.kernels.weights_float32 or w.kernels.softmax_float32
            weights = _softmax(w, cast(w, values, "float32" if wide else logits.dtype))
            return (cast(w, weights, w.compute) if w.kernels.softmax_float32 else weights), choice
        weights, choice = _scored(w, logits, shape, spec)
        if spec.normalise_top_k:
            weights = _normalise(w, weights)
        return (weights if w.kernels.weights_float32 else cast(w, weights, w.compute)), choice


def _logits(w: Writer, tokens: Value, spec: Moe) -> Value:
    """T × e, never from fp8. In fp32 copies stay: of the tokens for the weight's gradient, and the other way round."""
    with w.tape.scope("gate"):
        weight = w.parameter("weight", spec.experts, tokens.shape[-1])
        weights = [weight, w.parameter("bias", spec.experts)] if spec.router_bias else [weight]
        x = cast(w, tokens, "float32") if w.kernels.router_float32 else tokens
        inputs, kept = [x], [] if weight.frozen else [saved(x, "router input", REFERENCE)]
        if w.kernels.router_float32:
            dtype, learned = w.held(frozen=weight.frozen), not weight.frozen
            held = w.tape.source("weight", weight.shape, dtype, weight.places, grad=learned, free=True)
            inputs.append(cast(w, held, "float32"))
            kept += [saved(inputs[-1], "router weight")] if x.grad else []
        name = "aten.addmm.default" if spec.router_bias else "aten.mm.default"
        shape = (tokens.shape[0], spec.experts)
        return w.tape.op(name, inputs, shape, saves=kept, weights=weights, contracted=tokens.shape[-1])


def _scored(w: Writer, logits: Value, shape: tuple[int, int], spec: Moe) -> tuple[Value, Value]:
    """Scores of all experts in fp32, and of them those that are chosen."""
    wide = cast(w, logits, "float32")
    if spec.router is Router.SOFTMAX_TOPK:
        scores = _softmax(w, wide)
        if spec.groups > 1:
            allowed = w.tape.op("aten.topk.default", [scores], dtype="bool", grad=False, anchor=Anchor.DISCRETE)
            scores = w.tape.op("aten.masked_fill.Scalar", [scores, allowed], saves=[saved(allowed, "expert mask")])
    else:
        scores = w.tape.empty(wide.shape, wide.dtype, wide.places, grad=wide.grad)
        w.tape.record("aten.sigmoid.default", [wide], [scores], saves=[saved(scores, "router scores")])
    choice = discrete(w, scores, "aten.topk.default", shape)
    return w.tape.op("aten.gather.default", [scores, choice], shape, saves=[saved(choice, CHOICE)]), choice


def _softmax(w: Writer, x: Value) -> Value:
    out = w.tape.empty(x.shape, x.dtype, x.places, grad=x.grad)
    w.tape.record("aten._softmax.default", [x], [out], saves=[saved(out, "router probabilities", REFERENCE)])
    return out


def _topk(w: Writer, logits: Value, shape: tuple[int, int]) -> tuple[Value, Value]:
    values = w.tape.empty(shape, logits.dtype, logits.places, grad=logits.grad)
    choice = w.tape.empty(shape, "int64", logits.places)
    w.tape.record(
        "aten.topk.default", [logits], [values, choice], saves=[saved(choice, CHOICE)], anchor=Anchor.DISCRETE
    )
    return values, choice


def _normalise(w: Writer, weights: Value) -> Value:
    """Weights that sum to 1: both sides of the division stay."""
    total = w.tape.op("aten.sum.dim_IntList", [weights], (weights.shape[0], 1))
    return w.tape.op("aten.div.Tensor", [weights, total], saves=[saved(weights, WEIGHTS), saved(total, WEIGHTS)])
