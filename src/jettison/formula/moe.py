"""A mixture of experts: tokens sorted by expert, one grouped matmul for all experts, and outputs summed by token.

T tokens · e experts · c choices a token · f width of an expert · N rows that experts work on.

NOTE [ Rows do not depend on routing ]
Without a capacity every choice is a row: N = Tc, however tokens are spread over experts. With one, every expert has
ceil(capacity factor · Tc / e) rows, filled or not (arXiv 2101.03961 §2.2). What depends on routing is how rows divide
over ranks: under expert parallelism a rank receives Tc of them if the router is balanced, and up to ep · Tc if it
is not. Balance is assumed here.

The grouped matmul of transformers' default is modelled. Its "eager" experts, a loop over the chosen ones, hold the same
N rows in pieces, however many. They save each output once more (N × h, for `index_add_`), and two int64 a row instead
of three (four with biases) and of e ends. Routing then only decides what an allocator rounds up: less than 512 bytes
an expert and tensor on CUDA.

NOTE [ Experts and mesh axes ]
Experts are spread over "ep" (which takes its ranks from dp and cp), their width f over "tp". Rows travel over "ep" by
all-to-all, there and back. Under sequence parallelism the block receives a shard of the sequence: it routes T/t tokens
and all-gathers their rows over "tp" after they arrive, where every rank has a slice of each expert; partial sums are
reduce-scattered before they travel back. That is Megatron-LM's all-to-all dispatcher; the all-gathered rows are saved
for the first matmul. Without sequence parallelism every rank of "tp" routes all T tokens; sums are reduced last.

If an expert's width has fewer ranks than "tp" (Megatron's ``--expert-tensor-parallel-size``), "tp" is "etp" x
"tpx": rows are all-gathered over "etp" alone, and "ep" takes ranks from "tpx" as well. `imbalance` is the number of
rows that arrive at a rank, as a multiple of an even share.

NOTE [ Latent experts ]
Nemotron 3's experts work at a smaller width: ``fc1_latent_proj`` projects tokens to it (the router reads the
original tokens), and ``fc2_latent_proj`` projects their sum back (``transformers/models/nemotron_h``,
``NemotronHMoE``; Megatron-Core's ``moe_layer.py``, ``moe_latent_size``, whose two weights every rank of "tp" has). Rows
that travel have this width. Shared experts read tokens.

A grouped matmul saves its rows and the end of each expert's rows. Its kernel rounds a row up to 16 bytes; widths
are multiples of that in all published models, so rounding is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Final

from jettison.formula.fp8 import padded, quantized_rows, unpadded
from jettison.formula.mlp import activation, gate_product, halves, mlp
from jettison.formula.ops import (
    WEIGHT_COPY,
    add,
    cast,
    copy,
    discrete,
    enter,
    for_matmul,
    leave,
    linear,
    multiply,
    quantise,
    scale,
    unpacked,
    weight_copies,
)
from jettison.formula.tape import Places, Saved, Value, Weight, Writer
from jettison.ledger.program import Anchor
from jettison.spec.kernels import Combine
from jettison.spec.model import Activation, Mlp, Moe, Router

ORDER = "token order"
SCORES = ("expert output", "expert weights")
CLAMPED = "gated_activation.clamped"
"""Halves are clamped before the kernel that multiplies them."""


def moe(w: Writer, x: Value, spec: Moe) -> Value:
    """The MoE block, from the normed residual stream to what is added to it (without its dropout)."""
    with w.tape.scope("mlp"):
        sharded = w.tp > 1 and w.run.layout.sp
        whole = x if sharded else enter(w, x)[0]
        size, hidden = whole.shape[0] * whole.shape[1], whole.shape[2]
        for _ in range(spec.jitters):
            noise = w.tape.op("aten.uniform.default", [whole, w.random()], grad=False)
            whole = w.tape.op("aten.mul.Tensor", [whole, noise], saves=[Saved(noise, "noise")])
        tokens = w.tape.view(whole, (size, hidden), _token_places(w, whole))
        if w.kernels.every_token and w.run.layout.ep == 1:
            out = every_token(w, tokens, scores_of_all(w, tokens, spec), spec)
        else:
            weights, choice = route(w, tokens, spec)
            if spec.latent:
                tokens = linear(w, tokens, spec.latent, "latent_in", bias=False)
            if w.kernels.looped_experts and w.run.layout.ep == 1:
                out = looped_experts(w, tokens, weights, choice, spec)
            else:
                fused = w.kernels.fused_experts and w.run.layout.ep == w.tp == 1
                with w.tape.scope("experts"):
                    out = (_fused_experts if fused else _experts)(w, tokens, weights, choice, spec)
        out = w.tape.view(out, (*whole.shape[:2], out.shape[1]), whole.places)
        out = out if sharded else leave(w, out)
        out = linear(w, out, hidden, "latent_out", bias=False) if spec.latent else out
        if spec.shared_ffn:
            shared = Mlp(
                ffn=spec.shared_ffn, activation=spec.activation, gated=spec.gated, fused_gate_up=spec.shared_fused
            )
            own = mlp(w, x, shared, "shared")
            out = add(w, out, _gated(w, x, own) if spec.shared_gate else own)
        return out


def _gated(w: Writer, x: Value, out: Value) -> Value:
    """Output of the shared experts, weighted by one number a token."""
    score = linear(w, x, 1, "shared_gate", bias=False)
    gate = w.tape.op("aten.sigmoid.default", [score], keeps="shared gate", grad=True)
    return multiply(w, gate, out, ("shared gate", "shared output"))


def _token_places(w: Writer, whole: Value) -> Places:
    """Placement of tokens: sharded over all axes of the sequence, "tp" by its two parts if experts use one of them."""
    axes = [axis for axis, _ in whole.places]
    if w.run.layout.splits_tp and "tp" in axes:
        axes = sorted([axis for axis in axes if axis != "tp"] + ["etp", "tpx"])
    return tuple((axis, 0) for axis in axes)


def rows_of(w: Writer, tokens: Value, spec: Moe) -> int:
    """N. See NOTE [ Rows do not depend on routing ]."""
    factor = w.run.capacity_factor
    if factor is None:
        return tokens.shape[0] * spec.top_k
    shards = prod(w.tape.mesh.get(axis, 1) for axis, _ in tokens.places)
    return shards * spec.experts * ceil(factor * tokens.local_shape[0] * spec.top_k / spec.experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TokenOrder:
    """Tokens sorted by expert.

    Args:
        permutation: N, the choice of each row. ``origin``: N, its token.
    """

    permutation: Value
    origin: Value
    ends: Value  # e, end of each expert's rows
    local: Value | None  # N, received rows sorted by expert; None: they arrive sorted
    expert: Value | None  # N, expert of each row; None: not needed


def _experts(w: Writer, tokens: Value, weights: Value, choice: Value, spec: Moe) -> Value:
    """T × h, the weighted sum over each token's experts."""
    rows = rows_of(w, tokens, spec)
    order = _sort(w, choice, rows, tokens.places, spec)
    x = _take(w, tokens, order.origin)
    flat = w.tape.view(weights, (weights.shape[0] * weights.shape[1], 1))
    scores: Value | None = _take(w, flat, order.permutation)
    if spec.weighted_inputs and scores is not None:
        x, scores = multiply(w, x, scores, ("router input", SCORES[1]), w.compute), None
    x = _send(w, x, order, spec.top_k)
    early = w.kernels.combine is Combine.ACTIVATION
    sent = _send(w, scores, order, spec.top_k) if early and scores is not None else None
    arrived, experts = x.shape[0], spec.experts // w.run.layout.ep
    x, sent = padded(w, x, experts), None if sent is None else padded(w, sent, experts)
    hidden = _hidden(w, x, sent, order, spec)
    out = unpadded(w, _product(w, hidden, tokens.shape[1], "down", order, spec, split="row"), arrived)
    out = _return(w, out, order, tokens.places, spec.top_k)
    return _combined(w, out, scores, order, tokens)


def _fused_experts(w: Writer, tokens: Value, weights: Value, choice: Value, spec: Moe) -> Value:
    """T × h by one function: Liger-Kernel (ead96b6), ``ops/fused_moe.py``, ``LigerFusedMoEFunction``.

    Forward gathers tokens in its kernels, and has the activation and N outputs until it returns. Backward has gradients
    of both halves, the weighted activation and gradients of N tokens at once, and makes those of all weights, frozen
    ones included.
    """
    rows, hidden = choice.shape[0] * choice.shape[1], tokens.shape[1]
    with w.tape.scope("gate_up"):
        gate_up = w.parameter("weight", spec.experts, 2 * spec.ffn, hidden, split=1, expert=True, gemm=True)
    with w.tape.scope("down"):
        down = w.parameter("weight", spec.experts, hidden, spec.ffn, split=2, expert=True, gemm=True)
    out = w.tape.empty(tokens.shape, w.compute, tokens.places, grad=True)
    joint, inner, outputs = (
        w.tape.empty((rows, width), w.compute, tokens.places) for width in (2 * spec.ffn, spec.ffn, hidden)
    )
    order = [w.tape.empty((rows,), "int32", tokens.places) for _ in range(3)]
    kept = [Saved(tokens, "linear input"), Saved(joint, "activation input"), Saved(weights, SCORES[1])]
    kept += [Saved(each, ORDER) for each in order]
    made, flops = [out, joint, inner, outputs, *order], 2 * rows * 3 * spec.ffn * hidden
    given, both = [tokens, weights, choice], [gate_up, down]
    workspace = joint.nbytes + inner.nbytes + outputs.nbytes + sum(each.nbytes for each in both if each.frozen)
    w.tape.record("fused_experts", given, made, saves=kept, weights=both, flops=flops, workspace=workspace)
    return out


def _sort(w: Writer, choice: Value, rows: int, places: Places, spec: Moe) -> _TokenOrder:
    def index(name: str, x: Value, shape: tuple[int, ...], dtype: str, where: Places) -> Value:
        return w.tape.op(name, [x], shape, dtype, where, grad=False)

    ep = w.run.layout.ep
    permutation = index("aten.sort.default", choice, (rows,), "int64", places)
    origin = index("aten.floor_divide.default", permutation, (rows,), "int64", places)
    ends = index("aten.cumsum.default", choice, (spec.experts,), "int32", (("ep", 0),) if ep > 1 else ())
    mixed = 1 < ep < spec.experts  # each rank sends rows of several experts
    there, arrived = _gathered(w, places), _arrived(w, rows)
    local = index("aten.sort.default", ends, (arrived,), "int64", there) if mixed else None
    expert = index("aten.repeat_interleave.self_Tensor", ends, (arrived,), "int64", there) if spec.bias else None
    return _TokenOrder(permutation=permutation, origin=origin, ends=ends, local=local, expert=expert)


def _gathered(w: Writer, places: Places) -> Places:
    """Placement of rows where experts work on them."""
    return tuple(p for p in places if p[0] != w.expert_axis)


def _arrived(w: Writer, rows: int) -> int:
    """Rows of all ranks, if each received as many as the busiest."""
    return rows if w.run.imbalance == 1 else ceil(rows * w.run.imbalance)


def _take(w: Writer, x: Value, index: Value) -> Value:
    """Rows of x: backward adds gradients up by the same index."""
    shape = (index.shape[0], *x.shape[1:])
    return w.tape.op("aten.index.Tensor", [x, index], shape, places=index.places, saves=[Saved(index, ORDER)])


def _send(w: Writer, x: Value, order: _TokenOrder, copies: int) -> Value:
    """Send rows to the ranks of their experts."""
    arrived = _arrived(w, x.shape[0])
    x = w.tape.collective("all_to_all_single", "ep", x, x.places, backward="all_to_all_single", copies=copies)
    if arrived != x.shape[0]:
        x = w.tape.op("all_to_all.rows", [x], (arrived, *x.shape[1:]))
    axis = w.expert_axis
    if any(each == axis for each, _ in x.places):
        whole = _gathered(w, x.places)
        x = w.tape.collective("all_gather_into_tensor", axis, x, whole, backward="reduce_scatter_tensor")
        x = x if x.places == whole else w.tape.view(x, x.shape, whole)  # an axis of one rank
    return x if order.local is None else _take(w, x, order.local)


def _return(w: Writer, x: Value, order: _TokenOrder, places: Places, copies: int) -> Value:
    """Send rows back to the ranks of their tokens."""
    if order.local is not None:
        x = w.tape.op("aten.index_put.default", [x, order.local], saves=[Saved(order.local, ORDER)])
    if places != x.places:
        x = w.tape.collective("reduce_scatter_tensor", w.expert_axis, x, places, backward="all_gather_into_tensor")
        x = x if x.places == places else w.tape.view(x, x.shape, places)
    if x.shape[0] != order.permutation.shape[0]:
        x = w.tape.op("all_to_all.rows", [x], (order.permutation.shape[0], *x.shape[1:]))
    return w.tape.collective("all_to_all_single", "ep", x, x.places, backward="all_to_all_single", copies=copies)


def _matrices(w: Writer, x: Value, features: int, experts: int, split: str) -> tuple[Weight, Places]:
    """One weight matrix for each expert, and the placement of the matmul's result."""
    last = len(x.shape) - 1
    shape = (experts, features, x.shape[last])
    weight = w.parameter("weight", *shape, split={"column": 1, "row": 2}[split], expert=True, gemm=True)
    places: Places = tuple(p for p in x.places if p[1] != last)
    if split == "column" and w.tape.mesh[w.expert_axis] > 1:
        places = tuple(sorted((*places, (w.expert_axis, last))))
    return weight, places


def _product(w: Writer, x: Value, features: int, name: str, order: _TokenOrder, spec: Moe, *, split: str) -> Value:
    """Every row times its expert's matrix (and its bias): N × features. ``split`` as in `linear`."""
    with w.tape.scope(name):
        weight, places = _matrices(w, x, features, spec.experts, split)
        saves, workspace = [Saved(x, "linear input")], 0
        if w.recipe is not None:
            original = split == "row" and "moe_act" in w.run.again
            found = quantized_rows(w, x, weight, spec.experts // w.run.layout.ep, "linear input", original=original)
            saves, workspace = [*found.saves], found.workspace
        elif w.quantises:
            saves = [Saved(quantise(w, x), "linear input")]
        out = w.tape.op(
            "aten._grouped_mm.default",
            [x, order.ends],
            (x.shape[0], features),
            w.compute,
            places,
            saves=[*([] if weight.frozen else saves), Saved(order.ends, "ends of experts")],
            weights=[weight],
            workspace=workspace,
            contracted=x.local_shape[1],
        )
        if order.expert is None:
            return out
        bias = w.parameter("bias", spec.experts, features, split=1 if split == "column" else None, expert=True)
        chosen = w.tape.op(
            "aten.index.Tensor",
            [order.expert],
            out.shape,
            out.dtype,
            places,
            saves=[Saved(order.expert, ORDER)],
            weights=[bias],
        )
        return add(w, out, chosen)


def _hidden(w: Writer, x: Value, scores: Value | None, order: _TokenOrder, spec: Moe) -> Value:
    """N × f: input of the last matmul, times each row's weight if ``scores`` are given."""
    if not spec.gated:
        up = _product(w, x, spec.ffn, "up", order, spec, split="column")
        hidden = activation(w, up, spec.activation)
        return hidden if scores is None else multiply(w, hidden, scores, SCORES, w.compute)
    joint = _product(w, x, 2 * spec.ffn, "gate_up", order, spec, split="column")
    clamped = spec.activation is Activation.CLAMPED_SWIGLU
    if clamped:  # gate and up are interleaved columns: gpt-oss
        gate, up = (w.tape.view(joint, (joint.shape[0], spec.ffn)) for _ in range(2))
    else:
        gate, up = halves(w, joint, spec.ffn)
    if w.kernels.fused_gate:
        inputs = [gate, up] if scores is None else [gate, up, scores]
        roles = ("activation input", "activation input", SCORES[1])
        name = CLAMPED if clamped else "gated_activation"
        return w.tape.op(name, inputs, saves=[Saved(v, r) for v, r in zip(inputs, roles, strict=False)])
    hidden = _clamped(w, gate, up) if clamped else gate_product(w, gate, up, spec.activation)
    return hidden if scores is None else multiply(w, hidden, scores, SCORES, w.compute)


def _clamped(w: Writer, gate: Value, up: Value) -> Value:
    """g · sigmoid(α g) · (u + 1) with both halves clamped, op by op: gpt-oss."""
    gate, up = (w.tape.op("aten.clamp.default", [v], saves=[Saved(v, "activation input")]) for v in (gate, up))
    sigmoid = w.tape.op("aten.sigmoid.default", [scale(w, gate)], keeps="activation output")
    gated = multiply(w, gate, sigmoid, ("multiply input", "activation output"))
    shifted = w.tape.op("aten.add.Tensor", [up], passes=True)
    return multiply(w, shifted, gated, ("multiply input", "multiply input"))


def _combined(w: Writer, out: Value, scores: Value | None, order: _TokenOrder, tokens: Value) -> Value:
    """N outputs as T sums. Weights applied after the experts save their outputs, in fp32 where they are accumulated
    (torchtitan's ``combine``); weights applied in the activation do not (Megatron-LM's grouped experts).
    """
    if w.kernels.combine is Combine.SORTED:
        dtype = None if w.run.precision.casts or scores is None else scores.dtype
        weighted = out if scores is None else multiply(w, out, scores, SCORES, dtype)
        inverse = w.tape.op("aten.index_put.default", [order.permutation], grad=False)
        back = _take(w, weighted, inverse)
        return cast(w, w.tape.op("aten.sum.dim_IntList", [back], tokens.shape, places=tokens.places), tokens.dtype)
    if w.kernels.combine is Combine.ADDED and scores is not None:
        out = cast(w, multiply(w, cast(w, out, "float32"), scores, SCORES, "float32"), tokens.dtype)
    kept = [Saved(order.origin, ORDER)]
    if w.kernels.deterministic:  # megatron/core/transformer/moe/moe_utils.py, unpermute
        kept.append(Saved(out, "expert output"))
    return w.tape.op("aten.scatter_add.default", [out, order.origin], tokens.shape, places=tokens.places, saves=kept)


# router ---------------------------------------------------------------------------------------------------------------
#
# The router of a mixture of experts: from tokens to the experts of each, and the weight of each choice.
# T tokens · e experts · c choices a token. Choices must not be recomputed: one bit may send a token elsewhere.


CHOICE = "router choice"
WEIGHTS = "router weights"
REFERENCE = "arXiv 2101.03961 §2.1, router"


def route(w: Writer, tokens: Value, spec: Moe) -> tuple[Value, Value]:
    """(weights, int64 choices), both T × c. ``tokens`` is T × h.

    Groups of experts are selected without gradients. Transformers' code records a graph for that selection, but frees
    its results before the layer ends, so nothing of it is held.
    """
    shape = (tokens.shape[0], spec.top_k)
    with w.tape.scope("router"):
        logits = _logits(w, tokens, spec)
        dtype = w.compute
        if w.run.precision.casts:
            dtype = tokens.dtype if w.kernels.softmax_float32 else logits.dtype
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
            return (cast(w, weights, dtype) if w.kernels.softmax_float32 else weights), choice
        weights, choice = _scored(w, logits, shape, spec)
        if spec.normalise_top_k:
            weights = _normalise(w, weights, clamped=spec.clamped_sum)
        as_logits = w.kernels.fp32_router and w.run.precision.casts  # logits of a 16-bit matmul
        return (weights if w.kernels.weights_float32 and not as_logits else cast(w, weights, dtype)), choice


def _logits(w: Writer, tokens: Value, spec: Moe) -> Value:
    """T × e, never from fp8. In fp32, casts of tokens and weight are saved for each other's gradient."""
    with w.tape.scope("gate"):
        wide = w.kernels.router_float32 or w.kernels.fp32_router
        weight = w.parameter("weight", spec.experts, tokens.shape[-1], wide=w.kernels.fp32_router)
        weights = [weight, w.parameter("bias", spec.experts)] if spec.router_bias else [weight]
        tokens = cast(w, tokens, "float32") if wide else tokens
        casts = w.run.precision.casts is not None and not w.kernels.router_outside_autocast
        copies = weight_copies(w, weights) if casts else []
        x = for_matmul(w, tokens) if casts else tokens
        inputs, kept = [x, *copies], [] if weight.frozen else [Saved(x, "router input", REFERENCE)]
        if wide and not copies and not w.kernels.fp32_router:
            inputs.append(cast(w, w.read(weight), "float32"))
            kept += [Saved(inputs[-1], "router weight")] if x.grad else []
        kept += [Saved(c, "router weight") for c in copies[:1] if x.grad]
        name = "aten.addmm.default" if spec.router_bias else "aten.mm.default"
        shape = (tokens.shape[0], spec.experts)
        made = w.matmul_dtype if casts else x.dtype
        return w.tape.op(name, inputs, shape, made, saves=kept, weights=weights, contracted=tokens.shape[-1])


def _scored(w: Writer, logits: Value, shape: tuple[int, int], spec: Moe) -> tuple[Value, Value]:
    """Scores of all experts in fp32, and the scores that choose experts."""
    wide = logits if w.kernels.half_router_scores else cast(w, logits, "float32")
    if spec.router is Router.SOFTMAX_TOPK:
        scores = _softmax(w, wide)
        if spec.groups > 1:
            allowed = w.tape.op("aten.topk.default", [scores], dtype="bool", grad=False, anchor=Anchor.DISCRETE)
            scores = w.tape.op("aten.masked_fill.Scalar", [scores, allowed], saves=[Saved(allowed, "expert mask")])
    else:  # inputs cast before the matmul come out of it in 16 bits under autocast
        as_made = w.run.precision.casts is not None and w.kernels.router_float32
        scores = _sigmoid(w, logits if as_made else wide, wide=not as_made)
    choice = discrete(w, scores, "aten.topk.default", shape)
    return w.tape.op("aten.gather.default", [scores, choice], shape, saves=[Saved(choice, CHOICE)]), choice


def scores_of_all(w: Writer, tokens: Value, spec: Moe) -> Value:
    """T × e: the weights of the chosen experts, 0 for all others. ``tokens`` is T × h."""
    with w.tape.scope("router"):
        logits = _logits(w, tokens, spec)
        values, choice = _topk(w, logits, (tokens.shape[0], spec.top_k))
        spread = w.tape.op("aten.scatter.src", [values, choice], logits.shape, saves=[Saved(choice, CHOICE)])
        return cast(w, _sigmoid(w, spread), logits.dtype)


def sparse_mixer(w: Writer, logits: Value, top_k: int) -> tuple[Value, Value]:
    """Draw each choice from a softmax over the scores near the best, without earlier choices.

    Autograd also records each softmax's maximum and its position; the router frees them when it returns.
    """
    weights, choices, scores, column = [], [], logits, (logits.shape[0], 1)
    for _ in range(top_k):
        far = w.tape.op("aten.gt.Scalar", [scores], dtype="bool", grad=False)
        near = w.tape.op("aten.masked_fill.Scalar", [scores, far], saves=[Saved(far, "expert mask")])
        gates = _softmax(w, near)
        drawn = w.tape.op("aten.max.dim", [near, w.random()], column, "int64", grad=False, anchor=Anchor.DISCRETE)
        weight = w.tape.op("aten.gather.default", [gates, drawn], column, saves=[Saved(drawn, CHOICE)])
        kept = [Saved(weight, WEIGHTS), Saved(drawn, CHOICE), Saved(gates, "router probabilities")]
        weights.append(w.tape.op("sparse_mixer", [weight, gates, drawn], column, saves=kept))
        choices.append(drawn)
        scores = w.tape.op("aten.scatter.value", [scores, drawn], logits.shape, saves=[Saved(drawn, CHOICE)])
    shape = (logits.shape[0], top_k)
    return w.tape.op("aten.cat.default", weights, shape), w.tape.op("aten.cat.default", choices, shape, grad=False)


def _sigmoid(w: Writer, x: Value, *, wide: bool = True) -> Value:
    """Sigmoid in fp32, or in the scores' dtype."""
    x = cast(w, x, "float32") if wide else x
    return w.tape.op("aten.sigmoid.default", [x], keeps="router scores")


def _softmax(w: Writer, x: Value) -> Value:
    x = cast(w, x, "float32") if w.listed else x
    return w.tape.op("aten._softmax.default", [x], keeps="router probabilities", reference=REFERENCE)


def _topk(w: Writer, logits: Value, shape: tuple[int, int]) -> tuple[Value, Value]:
    values = w.tape.empty(shape, logits.dtype, logits.places, grad=logits.grad)
    choice = w.tape.empty(shape, "int64", logits.places)
    w.tape.record(
        "aten.topk.default", [logits], [values, choice], saves=[Saved(choice, CHOICE)], anchor=Anchor.DISCRETE
    )
    return values, choice


def _normalise(w: Writer, weights: Value, *, clamped: bool) -> Value:
    """Normalise weights to a sum of 1: both operands of the division are saved."""
    dtype = "float32" if w.listed else weights.dtype
    total = w.tape.op("aten.sum.dim_IntList", [weights], (weights.shape[0], 1), dtype)
    if clamped:
        total = w.tape.op("aten.clamp.default", [total], saves=[Saved(total, WEIGHTS)])
    return w.tape.op("aten.div.Tensor", [weights, total], saves=[Saved(weights, WEIGHTS), Saved(total, WEIGHTS)])


# looped experts: one after the other, each with its own tokens, gate and up separate (transformers' DBRX, and most
# families until its version 5) ---------------------------------------------------------------------------------------
#
# T tokens · c choices a token · N = Tc rows · f width of an expert. Each expert has its own tensors; together they
# have these rows, however tokens are routed (what an allocator rounds up for each is left out). At most `GROUPS`
# experts are written, each of which stands for several of the model's: a backward's transients of one are no smaller.
# Matrices of modules are packed like those of any other linear layer, and unpacked one at a time.

GROUPS: Final = 8


def looped_experts(w: Writer, tokens: Value, weights: Value, choice: Value, spec: Moe) -> Value:
    """T × h, the weighted sum over each token's experts."""
    rows = choice.shape[0] * choice.shape[1]
    groups = next(n for n in range(GROUPS, 0, -1) if spec.experts % n == 0)
    added: list[Value] = []
    kept: list[Saved] = []
    with w.tape.scope("experts"):
        for group in range(groups):
            own = rows * (group + 1) // groups - rows * group // groups
            out, pairs = _looped(w, tokens, weights, choice, spec, own, spec.experts // groups)
            added += [out, pairs]
            kept += [Saved(pairs, ORDER), Saved(out, "expert output")]
        return w.tape.op("aten.index_add.default", added, tokens.shape, places=tokens.places, saves=kept)


def _looped(
    w: Writer, tokens: Value, weights: Value, choice: Value, spec: Moe, rows: int, experts: int
) -> tuple[Value, Value]:
    """Weighted rows of some experts, and the tokens that they belong to."""
    places = tuple(p for p in tokens.places if p[1] == 0)
    pairs = w.tape.op("aten.nonzero.default", [choice], (rows, 2), "int64", places, grad=False)
    x = _taken(w, tokens, pairs, tokens.shape[1])
    gate, up = (_each(w, x, spec.ffn, name, experts, split="column") for name in ("gate", "up"))
    hidden = gate_product(w, gate, up, spec.activation)
    out = _each(w, hidden, tokens.shape[1], "down", experts, split="row")
    share = _taken(w, weights, pairs, 1)
    return multiply(w, out, share, ("expert output", "expert weights")), pairs


def _taken(w: Writer, x: Value, pairs: Value, width: int) -> Value:
    shape = (pairs.shape[0], width)
    return w.tape.op("aten.index.Tensor", [x, pairs], shape, places=pairs.places, saves=[Saved(pairs, ORDER)])


def _each(w: Writer, x: Value, features: int, name: str, experts: int, *, split: str) -> Value:
    """Rows, or all tokens of each expert, times their expert's matrix; ``split`` as in `basic.linear`."""
    with w.tape.scope(name):
        weight, places = _matrices(w, x, features, experts, split)
        copies = weight_copies(w, [weight])
        given, x = x, for_matmul(w, x)
        one = unpacked(w, weight, weight.shape[1:]) if weight.packed_bytes else []
        out = w.tape.op(
            "aten.mm.default" if len(x.shape) == 2 else "aten.bmm.default",
            [x, *copies, *one],
            (*x.shape[:-1], features),
            w.matmul_dtype,
            places,
            saves=[] if weight.frozen else [Saved(x, "linear input"), *(Saved(c, WEIGHT_COPY) for c in copies)],
            weights=[weight],
            contracted=x.local_shape[-1],
            workspace=sum(each.nbytes for each in one),
        )
        return cast(w, out, given.dtype) if one else out


# Experts that each process all tokens, weighted before the experts: transformers' Llama 4 -----------------------------
#
# T tokens · e experts · f width of an expert. Three matmuls of e matrices with T rows each, whatever the routing: e / c
# times the work of c choices a token, and as much more of all ops between the matmuls.


def every_token(w: Writer, tokens: Value, scores: Value, spec: Moe) -> Value:
    """T × h, the sum over experts. ``scores`` is T × e."""
    size, hidden = tokens.shape
    places = tuple((axis, 1) for axis, _ in tokens.places)
    with w.tape.scope("experts"):
        repeated = copy(w, tokens, (spec.experts, size, hidden), places)
        column = copy(w, scores, (spec.experts, size, 1), places)
        x = multiply(w, repeated, column, ("router input", "expert weights"))
        joint = _each(w, x, 2 * spec.ffn, "gate_up", spec.experts, split="column")
        gate, up = halves(w, joint, spec.ffn)
        out = _each(w, gate_product(w, gate, up, spec.activation), hidden, "down", spec.experts, split="row")
        return w.tape.op("aten.sum.dim_IntList", [out], tokens.shape, places=tokens.places)
