"""A mixture of experts: tokens sorted by expert, one grouped product for all experts, and outputs summed by token.

T tokens · e experts · c choices a token · f width of an expert · N rows that experts work on.

NOTE [ Rows do not depend on routing ]
Without a capacity every choice is a row: N = Tc, however tokens are spread over experts. With one, every expert has
ceil(capacity factor · Tc / e) rows, filled or not (arXiv 2101.03961 §2.2). What depends on routing is how rows divide
over ranks: under expert parallelism a rank is given Tc of them when the router is balanced, and up to ep · Tc when it
is not. Balance is assumed here.

Transformers' default, one grouped product, is what is written here. Its "eager" experts, a loop over those that were
chosen, hold the same N rows in pieces, however many. They keep each output once more (N × h, for `index_add_`), and two
int64 a row in the place of three (four with biases) and of e ends. Routing then decides only what an allocator rounds
up: less than 512 bytes an expert and tensor on CUDA.

NOTE [ Experts and mesh axes ]
Experts are spread over "ep" (which takes its ranks from dp and cp), their width f over "tp". Rows travel over "ep" by
all-to-all, there and back. Under sequence parallelism the block is given a shard of the sequence: it routes T/t tokens
and gathers their rows over "tp" when they have arrived, where every rank has a slice of each expert; partial sums are
reduce-scattered before they travel back. That is Megatron-LM's all-to-all dispatcher, and the gathered rows stay for
the first product. Without sequence parallelism every rank of "tp" routes all T tokens and sums are reduced at the end.

With fewer ranks for an expert's width than "tp" has (Megatron's ``--expert-tensor-parallel-size``), "tp" is "etp" x
"tpx": rows are gathered over "etp" alone, and "ep" takes its ranks from "tpx", too. `imbalance` is how many rows arrive
at a rank, as a multiple of an even share.

NOTE [ Latent experts ]
Nemotron 3's experts read and return a narrower width: ``fc1_latent_proj`` makes it of the tokens, beside the router,
which reads them as they are, and ``fc2_latent_proj`` tokens of the sum (``transformers/models/nemotron_h``,
``NemotronHMoE``; Megatron-Core's ``moe_layer.py``, ``moe_latent_size``, whose two weights every rank of "tp" has). So
rows that travel are narrower. Shared experts read tokens.

What a grouped product saves are its rows and where each expert's end. Its kernel rounds a row up to 16 bytes; widths
are multiples of that in all published models, and rounding is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from jettison.formula.basic import add, cast, enter, leave, linear, multiply, quantise
from jettison.formula.every_token import every_token
from jettison.formula.looped_experts import looped_experts
from jettison.formula.mlp import activation, gate_product, mlp
from jettison.formula.narrow import narrow_rows, padded, unpadded
from jettison.formula.router import route, scores_of_all
from jettison.formula.tape import Places, Value
from jettison.formula.writer import Writer, saved
from jettison.spec.kernels import Combine
from jettison.spec.model import Activation, Mlp, Moe

ORDER = "token order"
SCORES = ("expert output", "expert weights")
CLAMPED = "gated_activation.clamped"
"""Halves are clamped before the kernel that multiplies them."""


def moe(w: Writer, x: Value, spec: Moe) -> Value:
    """The whole block, from the normed residual stream to what is added to it (without its dropout)."""
    with w.tape.scope("mlp"):
        sharded = w.tp > 1 and w.run.layout.sp
        whole = x if sharded else enter(w, x)[0]
        size, hidden = whole.shape[0] * whole.shape[1], whole.shape[2]
        for _ in range(spec.jitters):
            noise = w.tape.op("aten.uniform.default", [whole, w.random()], grad=False)
            whole = w.tape.op("aten.mul.Tensor", [whole, noise], saves=[saved(noise, "noise")])
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
                with w.tape.scope("experts"):
                    out = _experts(w, tokens, weights, choice, spec)
        out = w.tape.view(out, (*whole.shape[:2], out.shape[1]), whole.places)
        out = out if sharded else leave(w, out)
        out = linear(w, out, hidden, "latent_out", bias=False) if spec.latent else out
        if spec.shared_ffn:
            shared = Mlp(
                ffn=spec.shared_ffn, activation=spec.activation, gated=spec.gated, fused_gate_up=spec.shared_fused
            )
            beside = mlp(w, x, shared, "shared")
            out = add(w, out, _gated(w, x, beside) if spec.shared_gate else beside)
        return out


def _gated(w: Writer, x: Value, out: Value) -> Value:
    """What shared experts return, weighted by one number a token."""
    score = linear(w, x, 1, "shared_gate", bias=False)
    gate = w.tape.empty(score.shape, score.dtype, score.places, grad=True)
    w.tape.record("aten.sigmoid.default", [score], [gate], saves=[saved(gate, "shared gate")])
    return multiply(w, gate, out, ("shared gate", "shared output"))


def _token_places(w: Writer, whole: Value) -> Places:
    """Tokens are sharded over all axes that shard the sequence; "tp" by its two parts where experts use one of them."""
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
class _Order:
    """Tokens sorted by expert.

    Args:
        permutation: N, which choice each row is. ``origin``: N, which token.
        ends: e, where each expert's rows end.
        local: N, rows as they arrive, sorted by expert; None: they arrive so.
        expert: N, whose row each is; None: nobody asks.
    """

    permutation: Value
    origin: Value
    ends: Value
    local: Value | None
    expert: Value | None


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


def _sort(w: Writer, choice: Value, rows: int, places: Places, spec: Moe) -> _Order:
    def index(name: str, x: Value, shape: tuple[int, ...], dtype: str, where: Places) -> Value:
        return w.tape.op(name, [x], shape, dtype, where, grad=False)

    ep = w.run.layout.ep
    permutation = index("aten.sort.default", choice, (rows,), "int64", places)
    origin = index("aten.floor_divide.default", permutation, (rows,), "int64", places)
    ends = index("aten.cumsum.default", choice, (spec.experts,), "int32", (("ep", 0),) if ep > 1 else ())
    mixed = 1 < ep < spec.experts  # rows of several experts arrive from each rank
    there, arrived = _gathered(w, places), _arrived(w, rows)
    local = index("aten.sort.default", ends, (arrived,), "int64", there) if mixed else None
    expert = index("aten.repeat_interleave.self_Tensor", ends, (arrived,), "int64", there) if spec.bias else None
    return _Order(permutation=permutation, origin=origin, ends=ends, local=local, expert=expert)


def _gathered(w: Writer, places: Places) -> Places:
    """Placement of rows where experts work on them."""
    return tuple(p for p in places if p[0] != w.expert_axis)


def _arrived(w: Writer, rows: int) -> int:
    """Rows of all ranks, were each sent as many as the busiest."""
    return rows if w.run.imbalance == 1 else ceil(rows * w.run.imbalance)


def _take(w: Writer, x: Value, index: Value) -> Value:
    """Rows of x: backward adds gradients up by the same index."""
    shape = (index.shape[0], *x.shape[1:])
    return w.tape.op("aten.index.Tensor", [x, index], shape, places=index.places, saves=[saved(index, ORDER)])


def _send(w: Writer, x: Value, order: _Order, copies: int) -> Value:
    """Rows to the ranks that have their experts."""
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


def _return(w: Writer, x: Value, order: _Order, places: Places, copies: int) -> Value:
    """The way back."""
    if order.local is not None:
        x = w.tape.op("aten.index_put.default", [x, order.local], saves=[saved(order.local, ORDER)])
    if places != x.places:
        x = w.tape.collective("reduce_scatter_tensor", w.expert_axis, x, places, backward="all_gather_into_tensor")
        x = x if x.places == places else w.tape.view(x, x.shape, places)
    if x.shape[0] != order.permutation.shape[0]:
        x = w.tape.op("all_to_all.rows", [x], (order.permutation.shape[0], *x.shape[1:]))
    return w.tape.collective("all_to_all_single", "ep", x, x.places, backward="all_to_all_single", copies=copies)


def _product(w: Writer, x: Value, features: int, name: str, order: _Order, spec: Moe, *, split: str) -> Value:
    """Every row times its expert's matrix (and its bias): N × features. ``split`` as in `linear`."""
    with w.tape.scope(name):
        shape = (spec.experts, features, x.shape[1])
        weight = w.parameter("weight", *shape, split={"column": 1, "row": 2}[split], expert=True, product=True)
        places = tuple(p for p in x.places if p[1] == 0)
        axis = w.expert_axis
        if split == "column" and w.tape.mesh[axis] > 1:
            places = tuple(sorted((*places, (axis, 1))))
        saves, workspace = [saved(x, "linear input")], 0
        if w.recipe is not None:
            original = split == "row" and "moe_act" in w.run.again
            found = narrow_rows(w, x, weight, spec.experts // w.run.layout.ep, "linear input", original=original)
            saves, workspace = [*found.saves], found.workspace
        elif w.quantises:
            saves = [saved(quantise(w, x), "linear input")]
        out = w.tape.op(
            "aten._grouped_mm.default",
            [x, order.ends],
            (x.shape[0], features),
            w.compute,
            places,
            saves=[*([] if weight.frozen else saves), saved(order.ends, "ends of experts")],
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
            saves=[saved(order.expert, ORDER)],
            weights=[bias],
        )
        return add(w, out, chosen)


def _hidden(w: Writer, x: Value, scores: Value | None, order: _Order, spec: Moe) -> Value:
    """N × f: what goes into the last product, times each row's weight where ``scores`` are given."""
    if not spec.gated:
        up = _product(w, x, spec.ffn, "up", order, spec, split="column")
        hidden = activation(w, up, spec.activation)
        return hidden if scores is None else multiply(w, hidden, scores, SCORES, w.compute)
    joint = _product(w, x, 2 * spec.ffn, "gate_up", order, spec, split="column")
    gate, up = (w.tape.view(joint, (joint.shape[0], spec.ffn)) for _ in range(2))
    if w.kernels.fused_gate:
        inputs = [gate, up] if scores is None else [gate, up, scores]
        roles = ("activation input", "activation input", SCORES[1])
        name = CLAMPED if spec.activation is Activation.CLAMPED_SWIGLU else "gated_activation"
        return w.tape.op(name, inputs, saves=[saved(v, r) for v, r in zip(inputs, roles, strict=False)])
    clamped = spec.activation is Activation.CLAMPED_SWIGLU
    hidden = _clamped(w, gate, up) if clamped else gate_product(w, gate, up, spec.activation)
    return hidden if scores is None else multiply(w, hidden, scores, SCORES, w.compute)


def _clamped(w: Writer, gate: Value, up: Value) -> Value:
    """g · sigmoid(α g) · (u + 1) for both halves clamped, op by op: gpt-oss."""
    gate, up = (w.tape.op("aten.clamp.default", [v], saves=[saved(v, "activation input")]) for v in (gate, up))
    wide = w.tape.op("aten.mul.Tensor", [gate])
    sigmoid = w.tape.empty(wide.shape, wide.dtype, wide.places, grad=wide.grad)
    w.tape.record("aten.sigmoid.default", [wide], [sigmoid], saves=[saved(sigmoid, "activation output")])
    gated = multiply(w, gate, sigmoid, ("product operand", "activation output"))
    shifted = w.tape.op("aten.add.Tensor", [up], passes=True)
    return multiply(w, shifted, gated, ("product operand", "product operand"))


def _combined(w: Writer, out: Value, scores: Value | None, order: _Order, tokens: Value) -> Value:
    """N outputs as T sums. Weights that come after the experts keep their outputs, in fp32 where they are added up
    (torchtitan's ``combine``); those that entered the activation do not (Megatron-LM's grouped experts).
    """
    if w.kernels.combine is Combine.SORTED:
        dtype = None if w.run.precision.casts or scores is None else scores.dtype
        weighted = out if scores is None else multiply(w, out, scores, SCORES, dtype)
        inverse = w.tape.op("aten.index_put.default", [order.permutation], grad=False)
        back = _take(w, weighted, inverse)
        return cast(w, w.tape.op("aten.sum.dim_IntList", [back], tokens.shape, places=tokens.places), tokens.dtype)
    if w.kernels.combine is Combine.ADDED and scores is not None:
        out = cast(w, multiply(w, cast(w, out, "float32"), scores, SCORES, "float32"), tokens.dtype)
    kept = [saved(order.origin, ORDER)]
    if w.kernels.deterministic:  # megatron/core/transformer/moe/moe_utils.py, unpermute
        kept.append(saved(out, "expert output"))
    return w.tape.op("aten.scatter_add.default", [out, order.origin], tokens.shape, places=tokens.places, saves=kept)
