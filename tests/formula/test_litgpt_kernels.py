"""litgpt's blocks, written here in its form: one QKV matmul whose adapters are one convolution padded with zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jettison.families.config import parse_config
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve

B, S, H, HEADS, FFN, RANK = 2, 64, 64, 4, 176, 4
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return (normed * self.weight.float()).to(dtype)


class Joint(nn.Module):
    """A frozen matmul of query, key and value; adapters of those that are named."""

    def __init__(self, widths: tuple[int, int, int], adapted: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(H, sum(widths), bias=False).requires_grad_(False)
        ends = torch.tensor(widths).cumsum(0).tolist()
        ranges = [torch.arange(end - width, end) for width, end in zip(widths, ends, strict=True)]
        self.sizes = [width for width, on in zip(widths, adapted, strict=True) if on]
        self.index = torch.cat([part for part, on in zip(ranges, adapted, strict=True) if on])
        self.down = nn.Parameter(torch.randn(RANK * len(self.sizes), H))
        self.up = nn.Parameter(torch.randn(sum(self.sizes), RANK))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        low = functional.linear(torch.native_dropout(x, 0.1, True)[0], self.down).transpose(-2, -1)
        parts = zip(low.chunk(len(self.sizes), dim=1), self.up.unsqueeze(-1).split(self.sizes), strict=True)
        high = torch.cat([functional.conv1d(a, b) for a, b in parts], dim=1).transpose(-2, -1)
        if len(self.index) < out.shape[-1]:
            zeros = high.new_zeros(out.shape)
            high = zeros.index_copy_(-1, self.index.clone(), high)
        return out + high * 2.0


class Block(nn.Module):
    def __init__(self, groups: int, adapted: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.groups, d = groups, H // HEADS
        self.widths = (H, groups * d, groups * d)
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.qkv = Joint(self.widths, adapted)
        self.out = nn.Linear(H, H, bias=False).requires_grad_(False)
        self.gate, self.up = (nn.Linear(H, FFN, bias=False).requires_grad_(False) for _ in range(2))
        self.down = nn.Linear(FFN, H, bias=False).requires_grad_(False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).split(self.widths, dim=-1)
        q, k, v = (part.view(B, S, -1, H // HEADS).transpose(1, 2) for part in (q, k, v))
        q, k = (torch.cat((_rotated(part, cos, sin), part[..., H:]), dim=-1) for part in (q, k))
        if self.groups < HEADS:
            k, v = (part.repeat_interleave(HEADS // self.groups, dim=1) for part in (k, v))
        read = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).reshape(B, S, H))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize(("targets", "adapted"), [("q_proj+v_proj", (True, False, True)), ("qkv", (True, True, True))])
def test_a_block_saves_what_its_code_saves(groups: int, targets: str, adapted: tuple[bool, bool, bool]) -> None:
    """But for rotary tables, which all layers share, and indices of expanded heads."""
    model = parse_config({**LLAMA, "num_key_value_heads": groups}, name="small")
    lora = f"r={RANK},targets={targets},dropout=0.1"
    request = RunRequest(seq=S, micro_batch=B, kernels="litgpt", precision="bf16-pure", lora=lora)
    described = dict(forecast(resolve(model, request).run).layer_bytes())["layers.1"]
    block, kept = Block(groups, adapted).to(torch.bfloat16), dict[int, int]()
    shared = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    tables = [torch.randn(S, H // HEADS) for _ in range(2)]
    shared |= {table.untyped_storage().data_ptr() for table in tables}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in shared and x.numel() != H:  # weights, and their fp32 copies
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = block(x, *tables)
    heads = 2 * 8 * HEADS if groups < HEADS else 0  # indices of ``repeat_interleave``
    assert out.shape == x.shape
    assert abs(sum(kept.values()) - heads - described) <= 256, (sum(kept.values()), described)


def test_norms_of_older_versions_save_16_bits_for_their_weight() -> None:
    """Before 916a84ca ``RMSNorm`` returned ``x_normed.to(dtype) * self.weight``: two bytes a number less, twice."""

    def kept(kernels: str) -> int:
        request = RunRequest(seq=S, micro_batch=B, precision="bf16-pure", kernels=kernels)
        return dict(forecast(resolve(parse_config(LLAMA, name="small"), request).run).layer_bytes())["layers.1"]

    assert kept("litgpt") - kept("litgpt-0.4.5") == 2 * 2 * B * S * H
