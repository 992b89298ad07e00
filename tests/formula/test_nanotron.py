"""`--kernels nanotron`: NOTE [ Packed heads ] beside the same steps run by torch on a CPU, and its loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.formula.liveness import replay
from jettison.formula.region import embedding_region, head_region, layer_region
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.kernels import Loss, kernels
from jettison.spec.layout import Layout
from jettison.spec.model import ModelSpec
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run

HIDDEN, FFN, HEADS, DIM, SEQ, VOCAB = 64, 96, 4, 16, 32, 128


def model(groups: int) -> ModelSpec:
    return parse_config(
        {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": groups,
            "head_dim": DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": SEQ,
        },
        name="tiny",
    )


def described(batch: int, groups: int, **more: Any) -> Run:
    return Run(
        model=model(groups),
        seq=SEQ,
        micro_batch=batch,
        kernels=kernels("nanotron"),
        precision=PRECISIONS["bf16-pure"],
        **more,
    )


class Norm(torch.autograd.Function):
    """flash-attn's Triton kernel: it saves its input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.float().pow(2).mean(-1).rsqrt()
        ctx.save_for_backward(x, rows)
        return (x * rows[..., None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class InPlace(torch.autograd.Function):
    """flash-attn's rotation: it writes over what it is given and saves its tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return x.mul_(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return g, None, None


def layer(x: Tensor, weights: list[Tensor], tables: list[Tensor], groups: int) -> Tensor:
    """``LlamaDecoderLayer.forward`` and ``CausalSelfAttention.forward`` of nanotron, one call after the other."""
    qkv_w, out_w, gate_up_w, down_w = weights
    s, b, _ = x.shape
    qkv = F.linear(Norm.apply(x), qkv_w)
    if groups == HEADS:
        q, k, v = qkv.view(s, b, 3, HEADS, DIM).permute(2, 1, 0, 3, 4).contiguous()
    else:
        parts = torch.split(qkv, [HEADS * DIM, groups * DIM, groups * DIM], dim=-1)
        q, k, v = (part.transpose(0, 1).contiguous().view(b, s, -1, DIM) for part in parts)
    kv = torch.cat([k.unsqueeze(0), v.unsqueeze(0)], dim=0).permute(1, 2, 0, 3, 4).contiguous()
    q, kv = InPlace.apply(q, *tables), InPlace.apply(kv, *tables)
    k, v = (part.view(b, s, groups, DIM) for part in torch.split(kv, 1, dim=2))
    shared = {"enable_gqa": True} if groups < HEADS else {}
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, **shared)
    out = out.transpose(1, 2).contiguous().view(b, s, HEADS * DIM).transpose(0, 1)
    x = F.linear(out, out_w) + x
    gate, up = torch.split(F.linear(Norm.apply(x), gate_up_w), FFN, dim=-1)
    return F.linear(F.silu(gate) * up, down_w) + x


def run_by_torch(batch: int, groups: int) -> int:
    """Bytes of storages that a layer saves, without weights and tables."""

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    weights = [
        made((HEADS + 2 * groups) * DIM, HIDDEN),
        made(HIDDEN, HEADS * DIM),
        made(2 * FFN, HIDDEN),
        made(HIDDEN, FFN),
    ]
    tables = [torch.ones(SEQ, DIM // 2, dtype=torch.bfloat16) for _ in range(2)]
    known = {t.untyped_storage().data_ptr() for t in (*weights, *tables)}  # all layers have the same tables
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)  # so that no storage is made where another was
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = made(SEQ, batch, HIDDEN)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x, weights, tables, groups)
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in known)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_layer_saves_what_torch_does(batch: int) -> None:
    run = described(batch, HEADS)
    assert layer_region(run.signature, run.model.layers[0]).saved_bytes == run_by_torch(batch, HEADS)


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_that_are_shared_are_copied_by_themselves(batch: int) -> None:
    """The CPU's attention takes keys for every head: what it repeats is no part of the layer on a GPU."""
    run = described(batch, 2)
    saved = layer_region(run.signature, run.model.layers[0]).saved_bytes
    apart = described(batch, HEADS)
    unit = 2 * batch * SEQ * DIM  # of one head
    alike = layer_region(apart.signature, apart.model.layers[0]).saved_bytes
    assert alike - saved == unit * (2 * 4 + 2 * 2)  # keys and values of the copy, and of the joined ones for two heads


def test_the_product_behind_attention_has_a_copy_of_several_sequences() -> None:
    one, two = (layer_region(run.signature, run.model.layers[0]) for run in (described(1, HEADS), described(2, HEADS)))
    assert two.saved_bytes == 2 * one.saved_bytes + 2 * 2 * SEQ * HIDDEN


def test_the_loss_has_its_softmax_beside_the_logits() -> None:
    """Another fp32 copy, where Megatron's has the 16-bit logits; and then its mask, its targets and the loss."""
    run = described(1, HEADS)
    peaks = []
    for each in (run, replace(run, kernels=replace(run.kernels, loss=Loss.VOCAB_PARALLEL))):
        region = head_region(each.signature)
        peaks.append(replay(region, region.program.needed_buffers(), run.gradient_rule).forward_peak)
    assert peaks[0] - peaks[1] == (4 - 2) * SEQ * VOCAB + SEQ * (1 + 8) + 4


def test_an_embedding_over_ranks_has_its_shard_of_a_gradient() -> None:
    layout = Layout(tp=2, sp=True, gathered_inputs=True)
    found = {
        name: embedding_region(
            Run(
                model=model(HEADS), seq=SEQ, layout=layout, kernels=kernels(name), precision=PRECISIONS["bf16"]
            ).signature
        ).weights[0]
        for name in ("nanotron", "pytorch")
    }
    assert [each.gradient_numel // each.numel for each in found.values()] == [1, 2]


def test_other_models_are_not_described() -> None:
    with pytest.raises(UsageError, match=r"got --kernels nanotron for qwen3-8b \(qwen3\); only its models/llama"):
        run_of("qwen3-8b", RunRequest(like="nanotron"))
    assert run_of("qwen3-8b", RunRequest(like="nanotron", kernels="pytorch")).kernels.name == "pytorch"
