"""torchtune's own layer on a CPU: bytes that it saves for its backward, with and without packed documents.

Of its wheel four modules run, each read from its file; what stands around them wants packages that are not needed here.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn


def packages(folder: str) -> None:
    """Packages that are folders and no more, and a logger for those that ask for one."""
    for name in ("torchtune", "torchtune.modules", "torchtune.utils"):
        made: Any = types.ModuleType(name)
        made.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = made
    log: Any = types.ModuleType("torchtune.utils._logging")
    log.get_logger = lambda *_: logging.getLogger("torchtune")
    log.log_once = log.log_rank_zero = lambda *_, **__: None
    log.deprecated = lambda *_, **__: lambda kind: kind
    sys.modules[log.__name__] = log
    sys.modules["torchtune.utils"].get_logger = log.get_logger  # type: ignore[attr-defined]


def layer(sizes: dict[str, int]) -> nn.Module:
    """As `llama3_2` builds it."""

    def named(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"torchtune.modules.{module}"), name)

    def linear(a: int, b: int) -> nn.Linear:
        return nn.Linear(a, b, bias=False)

    h, d, f = sizes["hidden"], sizes["head_dim"], sizes["ffn"]
    heads, groups = sizes["heads"], sizes["kv_heads"]
    attention = named("attention", "MultiHeadAttention")
    sys.modules["torchtune.modules"].MultiHeadAttention = attention  # type: ignore[attr-defined]
    rotary = named("position_embeddings", "RotaryPositionalEmbeddings")(d, max_seq_len=sizes["seq"])
    norm = named("rms_norm", "RMSNorm")
    made: nn.Module = named("transformer", "TransformerSelfAttentionLayer")(
        attn=attention(
            embed_dim=h,
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=d,
            q_proj=linear(h, heads * d),
            k_proj=linear(h, groups * d),
            v_proj=linear(h, groups * d),
            output_proj=linear(heads * d, h),
            pos_embeddings=rotary,
            max_seq_len=sizes["seq"],
        ),
        mlp=named("feed_forward", "FeedForward")(gate_proj=linear(h, f), down_proj=linear(f, h), up_proj=linear(h, f)),
        sa_norm=norm(h),
        mlp_norm=norm(h),
    ).to(torch.bfloat16)
    rotary.cache = rotary.cache.float()  # a recipe makes it anew after parameters have their dtype
    return made


def saved_bytes(made: nn.Module, x: Tensor, **given: Tensor) -> int:
    """Of one forward."""
    own = {t.untyped_storage()._cdata for t in (*made.parameters(), *made.buffers())}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made(x, **given)
    return sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in own)


def main() -> None:
    job = json.load(sys.stdin)
    packages(job["folder"])
    sizes = job["sizes"]
    made = layer(sizes)
    x = torch.randn(sizes["batch"], sizes["seq"], sizes["hidden"], dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(sizes["seq"]).expand(sizes["batch"], -1)
    print(json.dumps([saved_bytes(made, x), saved_bytes(made, x, input_pos=positions)]))


if __name__ == "__main__":
    main()
