"""Experts one after the other, each with the tokens that chose it: transformers' DBRX, whose gate and up are apart.

T tokens · c choices a token · N = Tc rows · f width of an expert. Each expert has tensors of its own; together they
have these rows, however tokens are spread (what an allocator rounds up for each is left out).
"""

from __future__ import annotations

from jettison.formula.basic import WEIGHT_COPY, for_product, multiply, weight_copies
from jettison.formula.mlp import gate_product
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.spec.model import Moe

ORDER = "token order"


def looped_experts(w: Writer, tokens: Value, weights: Value, choice: Value, spec: Moe) -> Value:
    """T × h, the weighted sum over each token's experts."""
    rows = choice.shape[0] * choice.shape[1]
    places = tuple(p for p in tokens.places if p[1] == 0)
    with w.tape.scope("experts"):
        pairs = w.tape.op("aten.nonzero.default", [choice], (rows, 2), "int64", places, grad=False)
        x = _taken(w, tokens, pairs, tokens.shape[1])
        gate, up = (_product(w, x, spec.ffn, name, spec, split="column") for name in ("gate", "up"))
        out = _product(w, gate_product(w, gate, up, spec.activation), tokens.shape[1], "down", spec, split="row")
        share = _taken(w, weights, pairs, 1)
        out = multiply(w, out, share, ("expert output", "expert weights"))
        kept = [saved(pairs, ORDER), saved(out, "expert output")]
        return w.tape.op("aten.index_add.default", [out, pairs], tokens.shape, places=tokens.places, saves=kept)


def _taken(w: Writer, x: Value, pairs: Value, width: int) -> Value:
    shape = (pairs.shape[0], width)
    return w.tape.op("aten.index.Tensor", [x, pairs], shape, places=pairs.places, saves=[saved(pairs, ORDER)])


def _product(w: Writer, x: Value, features: int, name: str, spec: Moe, *, split: str) -> Value:
    """Rows times their expert's matrix; ``split`` as in `basic.linear`."""
    with w.tape.scope(name):
        shape = (spec.experts, features, x.shape[1])
        weight = w.parameter("weight", *shape, split={"column": 1, "row": 2}[split], expert=True, product=True)
        places = tuple(p for p in x.places if p[1] == 0)
        if split == "column" and w.tape.mesh[w.expert_axis] > 1:
            places = tuple(sorted((*places, (w.expert_axis, 1))))
        copies = weight_copies(w, [weight])
        x = for_product(w, x)
        return w.tape.op(
            "aten.mm.default",
            [x, *copies],
            (x.shape[0], features),
            w.products,
            places,
            saves=[] if weight.frozen else [saved(x, "linear input"), *(saved(c, WEIGHT_COPY) for c in copies)],
            weights=[weight],
            copied=bool(copies),
            contracted=x.local_shape[1],
        )
