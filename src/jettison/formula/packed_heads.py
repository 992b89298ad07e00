"""What nanotron's attention makes of its joint projection.

NOTE [ Packed heads ]
``src/nanotron/models/llama.py`` of nanotron (9055c66), ``CausalSelfAttention.forward``:

- ``qkv_states.view(s, b, 3, a, d).permute(2, 1, 0, 3, 4).contiguous()`` copies queries, keys and values out as one
  tensor where each head has keys of its own; where heads share them, each of the three is copied by itself.
- ``torch.cat`` joins keys and values, and ``permute(1, 2, 0, 3, 4).contiguous()`` copies them again, which are the keys
  and values that attention keeps. They are rotated in place there (``apply_rotary_emb_kv_``).
- ``FlashRotaryEmbedding`` rotates queries where they are (flash-attn, ``layers/rotary.py``: ``apply_rotary_emb_func``
  with ``inplace=True``). So the query that attention keeps is a third of the first copy, and all of it stays.
- The output goes back to s x b x h by ``transpose(0, 1)``. The product that reads it folds s and b into one dim, which
  takes a copy where there are several sequences; attention keeps its output beside it.
"""

from __future__ import annotations

from jettison.formula.basic import copy
from jettison.formula.tape import Value
from jettison.formula.writer import Writer
from jettison.spec.model import Attention


def packed_heads(w: Writer, joint: Value, spec: Attention) -> tuple[Value, Value, Value]:
    """Query, key and value, each b x heads x s x d, rotated."""
    from jettison.formula.attention import head_places, heads_of  # it calls this one

    d, heads, groups = spec.head_dim, spec.heads, spec.kv_heads
    widths = (heads * d, groups * d, groups * d)
    if heads == groups:
        q, k, v = w.tape.split(copy(w, joint), widths)
    else:
        q, k, v = (copy(w, each) for each in w.tape.split(joint, widths))
    tables = [w.table(f"rotary {name}", (w.run.seq, d // 2), k.dtype) for name in ("cosine", "sine")]
    joined = w.tape.op("rotary", [k, v, *tables], (w.run.micro_batch, 2 * groups, w.run.seq, d), places=head_places(w))
    k, v = (w.tape.view(joined, (w.run.micro_batch, groups, w.run.seq, d)) for _ in range(2))
    return heads_of(w, q, heads, d), k, v
