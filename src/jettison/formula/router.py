"""The router of a mixture of experts: from tokens to the experts of each, and the weight of each choice.

T tokens · e experts · c choices a token. What is chosen may not be chosen a second time: a bit of difference in the
logits sends a token elsewhere.
"""

from __future__ import annotations

from jettison.formula.basic import cast, discrete, for_product, weight_copies
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
        narrow = logits.dtype if w.run.precision.casts else w.compute
        if spec.correction_frozen:
            w.parameter("correction", 1, spec.experts, fixed=True)
        if spec.router is Router.SPARSE_MIXER:
            return sparse_mixer(w, logits, spec.top_k)
        if spec.router is Router.TOPK_SIGMOID:
            values, choice = _topk(w, logits, shape)
            return cast(w, _sigmoid(w, values), logits.dtype), choice
        if spec.router is Router.TOPK_SOFTMAX:
            values, choice = _topk(w, logits, shape)
            wide = w.kernels.weights_float32 or w.kernels.softmax_float32
            weights = _softmax(w, cast(w, values, "float32" if wide else logits.dtype))
            return (cast(w, weights, tokens.dtype) if w.kernels.softmax_float32 else weights), choice
        weights, choice = _scored(w, logits, shape, spec)
        if spec.normalise_top_k:
            weights = _normalise(w, weights, clamped=spec.clamped_sum)
        as_logits = w.kernels.wide_routers and w.run.precision.casts  # which come out of a product in 16 bits
        return (weights if w.kernels.weights_float32 and not as_logits else cast(w, weights, narrow)), choice


def _logits(w: Writer, tokens: Value, spec: Moe) -> Value:
    """T × e, never from fp8. In fp32 copies stay: of the tokens for the weight's gradient, and the other way round."""
    with w.tape.scope("gate"):
        wide = w.kernels.router_float32 or w.kernels.wide_routers
        weight = w.parameter("weight", spec.experts, tokens.shape[-1], wide=w.kernels.wide_routers)
        weights = [weight, w.parameter("bias", spec.experts)] if spec.router_bias else [weight]
        tokens = cast(w, tokens, "float32") if wide else tokens
        casts = w.run.precision.casts is not None and not w.kernels.routers_apart
        copies = weight_copies(w, weights) if casts else []
        x = for_product(w, tokens) if casts else tokens
        inputs, kept = [x, *copies], [] if weight.frozen else [saved(x, "router input", REFERENCE)]
        if wide and not copies and not w.kernels.wide_routers:
            dtype, learned = w.held(frozen=weight.frozen), not weight.frozen
            held = w.tape.source("weight", weight.shape, dtype, weight.places, grad=learned, free=True)
            inputs.append(cast(w, held, "float32"))
            kept += [saved(inputs[-1], "router weight")] if x.grad else []
        kept += [saved(c, "router weight") for c in copies[:1] if x.grad]
        name = "aten.addmm.default" if spec.router_bias else "aten.mm.default"
        shape = (tokens.shape[0], spec.experts)
        made = w.products if casts else x.dtype
        return w.tape.op(
            name, inputs, shape, made, saves=kept, weights=weights, contracted=tokens.shape[-1], copied=bool(copies)
        )


def _scored(w: Writer, logits: Value, shape: tuple[int, int], spec: Moe) -> tuple[Value, Value]:
    """Scores of all experts in fp32, and of them those that are chosen."""
    wide = logits if w.kernels.narrow_routers else cast(w, logits, "float32")
    if spec.router is Router.SOFTMAX_TOPK:
        scores = _softmax(w, wide)
        if spec.groups > 1:
            allowed = w.tape.op("aten.topk.default", [scores], dtype="bool", grad=False, anchor=Anchor.DISCRETE)
            scores = w.tape.op("aten.masked_fill.Scalar", [scores, allowed], saves=[saved(allowed, "expert mask")])
    else:  # what was cast before the product comes out of it narrow under autocast
        as_made = w.run.precision.casts is not None and w.kernels.router_float32
        scores = _sigmoid(w, logits if as_made else wide, wide=not as_made)
    choice = discrete(w, scores, "aten.topk.default", shape)
    return w.tape.op("aten.gather.default", [scores, choice], shape, saves=[saved(choice, CHOICE)]), choice


def scores_of_all(w: Writer, tokens: Value, spec: Moe) -> Value:
    """T × e: the weights of those that were chosen, 0 for all others. ``tokens`` is T × h."""
    with w.tape.scope("router"):
        logits = _logits(w, tokens, spec)
        values, choice = _topk(w, logits, (tokens.shape[0], spec.top_k))
        spread = w.tape.op("aten.scatter.src", [values, choice], logits.shape, saves=[saved(choice, CHOICE)])
        return cast(w, _sigmoid(w, spread), logits.dtype)


def sparse_mixer(w: Writer, logits: Value, top_k: int) -> tuple[Value, Value]:
    """Each choice is drawn from a softmax over the scores that are near the best; those before it are left out.

    What was the best of each softmax is asked for as well, with its place; nothing is differentiated by that, and it is
    let go of when the router returns, as above.
    """
    weights, choices, scores, column = [], [], logits, (logits.shape[0], 1)
    for _ in range(top_k):
        far = w.tape.op("aten.gt.Scalar", [scores], dtype="bool", grad=False)
        near = w.tape.op("aten.masked_fill.Scalar", [scores, far], saves=[saved(far, "expert mask")])
        gates = _softmax(w, near)
        drawn = w.tape.op("aten.max.dim", [near, w.random()], column, "int64", grad=False, anchor=Anchor.DISCRETE)
        weight = w.tape.op("aten.gather.default", [gates, drawn], column, saves=[saved(drawn, CHOICE)])
        kept = [saved(weight, WEIGHTS), saved(drawn, CHOICE), saved(gates, "router probabilities")]
        weights.append(w.tape.op("sparse_mixer", [weight, gates, drawn], column, saves=kept))
        choices.append(drawn)
        scores = w.tape.op("aten.scatter.value", [scores, drawn], logits.shape, saves=[saved(drawn, CHOICE)])
    shape = (logits.shape[0], top_k)
    return w.tape.op("aten.cat.default", weights, shape), w.tape.op("aten.cat.default", choices, shape, grad=False)


def _sigmoid(w: Writer, x: Value, *, wide: bool = True) -> Value:
    """In fp32, or as they come."""
    x = cast(w, x, "float32") if wide else x
    out = w.tape.empty(x.shape, x.dtype, x.places, grad=x.grad)
    w.tape.record("aten.sigmoid.default", [x], [out], saves=[saved(out, "router scores")])
    return out


def _softmax(w: Writer, x: Value) -> Value:
    x = cast(w, x, "float32") if w.listed else x
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


def _normalise(w: Writer, weights: Value, *, clamped: bool) -> Value:
    """Weights that sum to 1: both sides of the division stay."""
    total = w.tape.op("aten.sum.dim_IntList", [weights], (weights.shape[0], 1))
    if clamped:
        total = w.tape.op("aten.clamp.default", [total], saves=[saved(total, WEIGHTS)])
    return w.tape.op("aten.div.Tensor", [weights, total], saves=[saved(weights, WEIGHTS), saved(total, WEIGHTS)])
