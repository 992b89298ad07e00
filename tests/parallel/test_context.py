"""Context parallelism: rows of attention on several ranks are those of one, to rounding, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from jettison.core.errors import UnsupportedModule, UsageError
from jettison.models.reference import Gpt, GptConfig, Llama, LlamaConfig, document_numbers
from jettison.parallel import Context, apply_context_parallel
from jettison.parallel import context_parallel as module_of_context
from jettison.parallel.context_parallel import causal_attention, causal_rows, causal_rows_backward, set_cores
from jettison.parallel.tp_collectives import Axis
from support.ranks import run_ranks

B, HEADS, GROUPS, S, D = 2, 4, 2, 32, 16
GPT = GptConfig(layers=2, hidden=32, heads=4, vocab=64, positions=S)
LLAMA = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
END = 7
"""The token that ends a document."""


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def attention(context: Context, *, heads_inside: bool) -> dict[str, float]:
    """How far rows of a result, and gradients, are from those of whole sequences."""
    torch.manual_seed(3)
    shapes = [(B, HEADS, S, D), (B, GROUPS, S, D), (B, GROUPS, S, D)]
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    dy = torch.randn(shapes[0], dtype=torch.float64)
    own = [context.take(x, 2) for x in whole]
    if heads_inside:
        own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in own]
    for x in (*whole, *own):
        x.requires_grad_()
    expected = functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(dy)
    out = causal_attention(own[0], own[1], own[2], context)
    out.backward(context.take(dy, 2))
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(own, whole, strict=True))]
    return {name: far(x, context.take(y, 2)) for name, (x, y) in zip("oqkv", pairs, strict=True)}  # type: ignore[arg-type]


def model(context: Context, mesh: Any, whole: nn.Module, *, documents: bool) -> dict[str, float]:
    """The same for the mean of all ranks' losses, and of their gradients."""
    torch.manual_seed(5)
    ids, labels = torch.randint(0, 64, (B, S)), torch.randint(0, 64, (B, S))
    told = document_numbers(ids, END) if documents else None
    loss = whole(ids, labels, told)
    loss.backward()
    expected = [p.grad for p in whole.parameters()]
    whole.zero_grad()
    apply_context_parallel(whole, mesh)
    part = (context.positions(S), S)
    own = whole(context.take(ids, 1), context.take(labels, 1), told, part)
    own.backward()
    found = [context.mean(p.grad) for p in whole.parameters()]
    return {
        "loss": far(context.mean(own), loss),
        "gradients": max(far(x, y) for x, y in zip(found, expected, strict=True)),
    }


def run(_: Any) -> dict[str, Any]:
    """On every rank."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    context = Context.of(mesh)
    found: dict[str, Any] = {
        "heads outside": attention(context, heads_inside=False),
        "heads inside": attention(context, heads_inside=True),
    }
    kernels, module_of_context.kernel_fits = module_of_context.kernel_fits, lambda _: False
    found["no kernel"] = attention(context, heads_inside=True)
    module_of_context.kernel_fits = kernels
    for documents in (False, True):
        for kind in (Gpt(GPT), Llama(LLAMA)):
            name = type(kind).__name__ + (" documents" if documents else "")
            found[name] = model(context, mesh, kind.double(), documents=documents)
    with pytest.raises(UsageError, match="context parallel already"):
        apply_context_parallel(kind, mesh)
    return found


def test_two_ranks_compute_what_one_does() -> None:
    ranks = run_ranks(run, 2)
    for found in ranks:
        for name, values in found.items():
            assert max(values.values()) < 1e-12, f"{name}: {values}"


@pytest.mark.slow
def test_four_ranks_compute_what_one_does() -> None:
    for found in run_ranks(run, 4):
        assert max(max(values.values()) for values in found.values()) < 1e-12, found


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_token_is_on_one_rank_and_all_read_as_much(ranks: int) -> None:
    places = [Context(Axis("", ranks, rank)).positions(12 * ranks) for rank in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(12 * ranks))
    assert len({int(p.sum()) for p in places}) == 1  # a row reads as many keys as stand before it, and itself
    x = torch.arange(12 * ranks).expand(2, -1)
    assert torch.equal(Context(Axis("", ranks, 1)).take(x, 1)[1], places[1])
    with pytest.raises(UsageError, match=f"expected a multiple of {2 * ranks}"):
        Context(Axis("", ranks, 0)).positions(12 * ranks + 1)


@pytest.mark.parametrize("heads_inside", [False, True])
def test_fakes_of_the_kernels_are_laid_out_as_their_results(heads_inside: bool) -> None:
    """Of rows that are a part of others, as they are called; sums and masks are of their own."""

    def rows(heads: int, count: int) -> Tensor:
        made = torch.randn(B, count, heads, D).transpose(1, 2)
        return made if heads_inside else made.contiguous()

    q, k, v = rows(HEADS, 16)[:, :, 8:], rows(GROUPS, S), rows(GROUPS, S)
    how = ("test_schema", "test_faketensor")
    torch.library.opcheck(causal_rows, (q, k, v, 16, 0.25), test_utils=how)
    out, sums = causal_rows(q, k, v, 16, 0.25)
    torch.library.opcheck(causal_rows_backward, (torch.randn_like(q), q, k, v, out, sums, 16, 0.25), test_utils=how)


def test_the_kernels_of_a_gpu_are_called_as_they_want() -> None:
    """On fake tensors, where names, places and types of arguments are checked; no kernel has run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = (torch.empty(B, n, s, D, device="cuda", dtype=torch.bfloat16) for n, s in ((HEADS, 8), (HEADS, S)))
        out, sums = causal_rows._init_fn(q, k, k, 16, 0.25)
        assert (out.shape, sums.shape, sums.dtype) == (q.shape, q.shape[:3], torch.float32)
        made = causal_rows_backward._init_fn(out, q, k, k, out, sums, 16, 0.25)
        assert [tuple(x.shape) for x in made] == [(B, HEADS, n, D) for n in (8, 24, 24)]


def test_what_it_refuses() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

    context = Context(Axis("", 2, 0))
    with pytest.raises(UnsupportedModule, match=r"core of Linear is unknown; known models: .* Gpt, Llama,"):
        set_cores(nn.Linear(2, 2), context)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 8}
    sliding = MistralForCausalLM(MistralConfig(**small, num_key_value_heads=2, intermediate_size=32, sliding_window=4))
    with pytest.raises(UnsupportedModule, match="a sliding window"):
        set_cores(sliding, context)
    drops = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=8, attn_pdrop=0.1))
    with pytest.raises(UnsupportedModule, match="has dropout, for which no kernel is known"):
        set_cores(drops, context)
