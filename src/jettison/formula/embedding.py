"""What stands before the first layer: token, position and segment embeddings."""

from __future__ import annotations

from jettison.formula.basic import add, dropout, scale
from jettison.formula.norm import norm
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved

TABLES = ("cosine", "sine")


def embedding(w: Writer) -> Value:
    """The residual stream as the first layer is given it. The vocabulary is sharded over tp."""
    model, layout = w.run.model, w.run.layout
    ids = w.tape.source("token ids", w.shape(), "int64", w.inside())
    weight = w.parameter("tokens", model.vocab, model.hidden, split=0)
    x = w.tape.op(
        "aten.embedding.default", [ids], w.shape(model.hidden), w.compute, w.inside(),
        saves=[saved(ids, "token ids")], weights=[weight], grad=True,
    )  # fmt: skip
    if w.tp > 1:
        kind = "reduce_scatter_tensor" if layout.sp else "all_reduce"
        back = "all_gather_into_tensor" if layout.sp else None
        x = w.tape.collective(kind, "tp", x, w.outside(), backward=back)
    if model.embedding_scale:
        x = scale(w, x)
    if model.token_types:
        x = add(w, x, _looked_up(w, "segments", model.token_types, "segment ids"))
    if model.learned_positions:
        x = add(w, x, _looked_up(w, "positions", model.position_rows or model.max_positions, "position ids"))
    if model.embedding_norm is not None:
        x = norm(w, x, model.embedding_norm, "norm")
    return dropout(w, x, site=model.dropout_sites.embedding, reference="arXiv 2205.05198 §4.3: sbh")


def _looked_up(w: Writer, name: str, rows: int, ids_name: str) -> Value:
    """Rows of a small table, the same for every sequence of the batch."""
    weight = w.parameter(name, rows, w.run.model.hidden)
    shape = (1, w.run.seq) if w.kernels.batch_first else (w.run.seq, 1)
    ids = w.tape.source(ids_name, shape, "int64", w.outside())
    return w.tape.op(
        "aten.embedding.default", [ids], (*shape, w.run.model.hidden), w.compute, w.outside(),
        saves=[saved(ids, ids_name)], weights=[weight], grad=True,
    )  # fmt: skip
