"""Experts that are each given all tokens, weighted before they come: transformers' Llama 4.

T tokens · e experts · f width of an expert. Three products of e matrices with T rows each, whatever was chosen: e / c
times the work of c choices a token, and as much more of everything between the products.
"""

from __future__ import annotations

from jettison.formula.basic import WEIGHT_COPY, copy, for_product, multiply, weight_copies
from jettison.formula.mlp import gate_product, halves
from jettison.formula.tape import Places, Value
from jettison.formula.writer import Writer, saved
from jettison.spec.model import Moe


def every_token(w: Writer, tokens: Value, scores: Value, spec: Moe) -> Value:
    """T × h, the sum over experts. ``scores`` is T × e."""
    size, hidden = tokens.shape
    places = tuple((axis, 1) for axis, _ in tokens.places)
    with w.tape.scope("experts"):
        repeated = copy(w, tokens, (spec.experts, size, hidden), places)
        column = copy(w, scores, (spec.experts, size, 1), places)
        x = multiply(w, repeated, column, ("router input", "expert weights"))
        joint = _product(w, x, 2 * spec.ffn, "gate_up", split="column")
        gate, up = halves(w, joint, spec.ffn)
        out = _product(w, gate_product(w, gate, up, spec.activation), hidden, "down", split="row")
        return w.tape.op("aten.sum.dim_IntList", [out], tokens.shape, places=tokens.places)


def _product(w: Writer, x: Value, features: int, name: str, *, split: str) -> Value:
    """e × T × features; ``split`` as in `basic.linear`."""
    with w.tape.scope(name):
        shape = (x.shape[0], features, x.shape[2])
        weight = w.parameter("weight", *shape, split={"column": 1, "row": 2}[split], expert=True, product=True)
        places: Places = tuple(p for p in x.places if p[1] != 2)
        if split == "column" and w.tape.mesh[w.expert_axis] > 1:
            places = tuple(sorted((*places, (w.expert_axis, 2))))
        copies = weight_copies(w, [weight])
        x = for_product(w, x)
        return w.tape.op(
            "aten.bmm.default",
            [x, *copies],
            (*x.shape[:2], features),
            w.products,
            places,
            saves=[] if weight.frozen else [saved(x, "linear input"), *(saved(c, WEIGHT_COPY) for c in copies)],
            weights=[weight],
            copied=bool(copies),
            contracted=x.local_shape[2],
        )
