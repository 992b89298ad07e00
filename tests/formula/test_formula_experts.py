"""Mixtures of experts, latent attention and attention sinks in closed form: against transformers, and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jettison.formula.region import Region, layer_region
from jettison.ledger.compare import compare
from jettison.ledger.program import Anchor
from jettison.spec.kernels import Kernels
from jettison.spec.layout import Layout
from jettison.spec.model import Activation, LatentAttention, Moe
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run
from support.formula_cases import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    FormulaCase,
    cases,
    counts,
    differences,
    paired,
    spec_of,
    tiny_config,
    under_autocast,
)
from support.held_by_autograd import closed_form_bytes, observed_bytes
from support.kernel_sets import HUGGINGFACE, KERNELS, MEGATRON, PYTORCH
from support.mixtures import MIXTURES

TOKENS = BATCH * SEQUENCE

_GROUPS = (("topk_method", "group_limited_greedy"), ("n_group", 4), ("topk_group", 2))
VARIANTS = (
    FormulaCase(family="mixtral", precision="bf16-pure", batch=3, sequence=17, padding=True),
    FormulaCase(family="mixtral", more=(("num_local_experts", 5), ("num_experts_per_tok", 3))),
    FormulaCase(family="qwen3_moe", precision="bf16-pure", more=(("norm_topk_prob", False),)),
    FormulaCase(family="deepseek_v2", precision="bf16-pure", more=(("q_lora_rank", 28),)),
    FormulaCase(family="deepseek_v2", attention="sdpa", more=(("attention_bias", True), ("v_head_dim", 20))),
    FormulaCase(family="deepseek_v2", more=_GROUPS),
    FormulaCase(family="gpt_oss", precision="bf16-pure", more=(("attention_bias", False),)),
)
_INT, _BOOL = 8, 1
LET_GO = {
    "deepseek_v2": [TOKENS * 4 * _INT, TOKENS * 2 * _INT],  # the best expert of each group, and the groups
    "deepseek_v3": [TOKENS * 4 * 2 * _INT, TOKENS * 2 * _INT, TOKENS * 8 * _BOOL],  # the best two, the groups, the rest
}
"""What routing within groups gives to autograd and lets go of before the layer is over; a trace counts it."""


@pytest.mark.parametrize("case", [*paired(c for family in MIXTURES for c in cases(family)), *VARIANTS], ids=str)
def test_saved_tensors_are_those_of_transformers(case: FormulaCase) -> None:
    found = differences(case)
    grouped = case.family == "deepseek_v3" or case.more == _GROUPS
    assert [d for d in found if d.layer != "layers.1" or d.expected is not None] == []
    assert sorted(d.delta_bytes for d in found) == sorted(LET_GO[case.family] if grouped else [])


@pytest.mark.parametrize("case", [*(FormulaCase(family=family) for family in MIXTURES), *VARIANTS], ids=str)
def test_parameters_are_those_of_transformers(case: FormulaCase) -> None:
    ours, theirs = counts(case)
    assert ours == theirs


@pytest.mark.parametrize("family", MIXTURES)
def test_a_real_forward_holds_as_many_bytes(family: str) -> None:
    case = FormulaCase(family=family, precision="bf16-pure")
    assert closed_form_bytes(case) == observed_bytes(case)


def test_routing_within_groups_holds_nothing_more_in_a_real_forward() -> None:
    case = FormulaCase(family="deepseek_v2", precision="bf16-pure", more=_GROUPS)
    assert closed_form_bytes(case) == observed_bytes(case)


@pytest.mark.parametrize(("family", "indices"), [("mixtral", 3), ("gpt_oss", 4)])
def test_a_loop_over_experts_holds_its_outputs_once_more(family: str, indices: int) -> None:
    case = FormulaCase(family=family, precision="bf16-pure")
    looped = replace(case, more=(("experts_implementation", "eager"),))
    rows, experts = TOKENS * 2, 4
    more = rows * HIDDEN * 2 + 2 * rows * _INT - (indices * rows * _INT + experts * 4)
    assert observed_bytes(looped) == [size + more for size in closed_form_bytes(case)]


# by hand --------------------------------------------------------------------------------------------------------------


def region(family: str, kernels: Kernels, layout: Layout | None = None, **more: object) -> Region:
    """The last mixture layer of a tiny family in bf16."""
    run = scene_run(family, kernels, layout, **more)
    return layer_region(
        run.signature, next(layer for layer in reversed(run.model.layers) if isinstance(layer.mlp, Moe))
    )


def scene_run(family: str, kernels: Kernels, layout: Layout | None = None, **more: object) -> Run:
    model = spec_of(tiny_config(FormulaCase(family=family)))
    return Run(
        model=model,
        seq=SEQUENCE,
        micro_batch=BATCH,
        kernels=kernels,
        layout=layout or Layout(),
        **{"precision": PRECISIONS["bf16"], **more},  # type: ignore[arg-type]
    )


def held(found: Region, path: str) -> Counter[int]:
    """Bytes on one rank of each storage that ops below a path save."""
    values = {
        s.value.storage: found.tape.sizes[s.value.storage]
        for step in found.tape.steps
        if f"{step.path}.".startswith(f"{path}.")
        for s in step.saved
        if not found.tape.sources.get(s.value.storage, (None, "", False))[2]
    }
    return Counter(values.values())


def test_flops_of_a_mixture() -> None:
    h, f, e, rows, heads, kv, d = HIDDEN, 48, 4, TOKENS * 2, 4, 2, 16
    projections = 2 * TOKENS * h * d * (heads + kv + kv + heads)
    core = 2 * BATCH * heads * SEQUENCE * SEQUENCE * 2 * d
    experts = 2 * TOKENS * h * e + 3 * 2 * rows * h * f
    for kernels in KERNELS.values():
        assert region("mixtral", kernels).flops == projections + core + experts


def test_flops_of_latent_attention_with_shared_experts() -> None:
    h, a, n, p, v, rank_q, rank_kv, f, e = HIDDEN, 4, 12, 8, 16, 28, 20, 24, 8
    down = h * (rank_q + rank_kv + p)
    up = rank_q * a * (n + p) + rank_kv * a * (n + v)
    weights = down + up + a * v * h + h * e + 3 * h * f * 2 + 3 * h * f  # two experts of a token, one shared
    core = 2 * BATCH * a * SEQUENCE * SEQUENCE * (n + p + v)
    for kernels in KERNELS.values():
        assert region("deepseek_v3", kernels).flops == 2 * TOKENS * weights + core


def test_flops_are_divided_by_the_ranks_that_share_them() -> None:
    whole = region("mixtral", MEGATRON)
    spread = region("mixtral", MEGATRON, Layout(tp=2, sp=True, ep=4, dp=4))
    assert spread.flops == whole.flops // 2  # expert parallelism moves rows about, and makes none fewer


def torchtitan_mixture(x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor, choices: int) -> Tensor:
    """A mixture as torchtitan's ``moe.py`` and ``token_dispatcher.py`` compute one, in a few lines."""
    scores = functional.linear(x, gate).float().softmax(-1)
    choice = scores.detach().topk(choices, dim=-1).indices
    weights = scores.gather(1, choice)
    weights = weights / weights.sum(-1, keepdim=True)
    order = choice.view(-1).argsort(stable=True)
    weights = weights.view(-1)[order]
    origin = order // choices
    ends = choice.view(-1).bincount(minlength=gate.shape[0]).cumsum(0).to(torch.int32)
    halves = functional.grouped_mm(x[origin], w13.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    hidden = functional.silu(halves[0]) * halves[1]
    out = functional.grouped_mm(hidden, w2.transpose(-2, -1), offs=ends)
    out = (out.float() * weights.view(-1, 1)).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, origin.view(-1, 1).expand(-1, x.shape[1]), out)


def test_outputs_that_are_added_up_are_held_in_fp32() -> None:
    shapes = [(4, HIDDEN), (4, 96, HIDDEN), (4, HIDDEN, 48)]
    weights = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = torchtitan_mixture(x, *weights, choices=2)
    free = {weight.untyped_storage()._cdata for weight in weights}
    sizes = Counter(t.untyped_storage().nbytes() for key, t in saved.items() if key not in free)
    assert y.shape == x.shape
    assert held(region("mixtral", PYTORCH), "mlp") == sizes


def test_weights_that_enter_the_activation_hold_no_outputs() -> None:
    """Megatron-LM: rows, both halves of the gate and their product, a weight a row."""
    rows, f = TOKENS * 2, 48
    assert held(region("mixtral", MEGATRON), "mlp.experts") == Counter(
        [
            rows * HIDDEN * 2,
            rows * 2 * f * 2,
            rows * f * 2,
            rows * 4,
            rows * _INT,
            rows * _INT,
            4 * 4,  # which choice and which token each row is; where experts end
        ]
    )
    assert held(region("mixtral", MEGATRON), "mlp.router") == Counter(
        [TOKENS * HIDDEN * 2, TOKENS * 4 * 4, TOKENS * 2 * _INT, TOKENS * 2 * 4, TOKENS * 4]
    )


def test_rows_are_quantised_for_experts_and_tokens_not_for_the_router() -> None:
    found = region("mixtral", MEGATRON, precision=PRECISIONS["fp8"])
    assert held(found, "mlp.experts.gate_up") == Counter([TOKENS * 2 * HIDDEN, 4 * 4])
    assert held(found, "mlp.router.gate") == Counter([TOKENS * HIDDEN * 2])


@pytest.mark.parametrize(("factor", "rows"), [(1.0, 4 * 32), (1.25, 4 * 40), (0.3, 4 * 10), (2.0, 4 * 64)])
def test_a_capacity_decides_the_rows(factor: float, rows: int) -> None:
    sizes = held(region("mixtral", MEGATRON, capacity_factor=factor), "mlp.experts.down")
    assert sizes == Counter([rows * 48 * 2, 4 * 4])


def test_a_capacity_is_of_the_tokens_that_one_rank_routes() -> None:
    layout = Layout(tp=2, sp=True)  # 32 tokens, 64 choices, 16 an expert: 19.2 rows, and those of both ranks
    sizes = held(region("mixtral", MEGATRON, layout, capacity_factor=1.2), "mlp.experts.down")
    assert sizes == Counter([2 * 4 * 20 * 24 * 2, 4 * 4])


def test_expert_parallelism_spreads_experts_and_exchanges_rows() -> None:
    alone, spread = (region("mixtral", PYTORCH, layout) for layout in (Layout(), Layout(ep=4, dp=4)))
    rows = TOKENS * 2 * HIDDEN * 2
    transfers = [(c.kind, c.axis, c.nbytes, c.backward) for c in spread.collectives]
    assert sorted(transfers) == sorted(
        [("all_to_all_single", "ep", rows, backward) for backward in (False, False, True, True)]
    )
    assert alone.collectives == ()
    experts = {w.name.removeprefix("mlp.experts."): w for w in spread.weights if w.expert}
    assert {name: w.numel for name, w in experts.items()} == {
        "gate_up.weight": 1 * 96 * HIDDEN,
        "down.weight": 1 * HIDDEN * 48,
    }
    assert sum(w.numel for w in alone.weights if not w.expert) == sum(w.numel for w in spread.weights if not w.expert)
    ends = Counter([4 * 4])
    assert held(alone, "mlp") - held(spread, "mlp") == ends  # a balanced rank works on as many rows


def test_rows_of_several_experts_are_sorted_when_they_arrive() -> None:
    one, two = (held(region("mixtral", PYTORCH, Layout(ep=n, dp=n)), "mlp") for n in (4, 2))
    assert two - one == Counter([2 * 4, TOKENS * 2 * _INT])


def test_sequence_shards_meet_whole_experts() -> None:
    """T/t tokens are routed; their rows are gathered over tp, where each rank has a slice of every expert."""
    rows, f = TOKENS * 2, 48
    found = region("mixtral", PYTORCH, Layout(tp=2, sp=True, ep=2, dp=2))
    assert held(found, "mlp.experts") == Counter(
        [
            rows * HIDDEN * 2,
            rows * f * 2,
            rows * f // 2 * 2,
            rows * f // 2 * 2,  # rows, halves, activation, product
            rows // 2 * HIDDEN * 4,
            rows // 2 * 4,  # what comes back, and its weights
            rows // 2 * _INT,
            rows // 2 * _INT,
            rows * _INT,
            2 * 4,
        ]
    )
    forward = [(c.kind, c.axis, c.nbytes) for c in found.collectives if not c.backward][2:]  # after attention's
    half, full = rows * HIDDEN, rows * HIDDEN * 2
    assert forward == [
        ("all_to_all_single", "ep", half),
        ("all_gather_into_tensor", "tp", full),
        ("reduce_scatter_tensor", "tp", full),
        ("all_to_all_single", "ep", half),
    ]


def test_without_sequence_parallelism_all_tokens_are_routed_everywhere() -> None:
    found = region("mixtral", MEGATRON, Layout(tp=2))
    kinds = [(c.kind, c.nbytes, c.backward) for c in found.collectives]
    once = TOKENS * HIDDEN * 2
    assert Counter(kinds) == Counter({("all_reduce", once, False): 2, ("all_reduce", once, True): 2})
    assert held(found, "mlp.router") == held(region("mixtral", MEGATRON), "mlp.router")


def test_latent_attention_over_tensor_parallel_ranks() -> None:
    """What leads to the ranks is whole, and under sequence parallelism sharded along s; what leads up is split."""
    a, n, p, v, rank_q, rank_kv = 4, 12, 8, 16, 28, 20
    weights = {
        "query_down.weight": rank_q * HIDDEN,
        "query_norm.weight": rank_q,
        "query.weight": rank_q * a * (n + p) // 2,
        "key_value_down.weight": (rank_kv + p) * HIDDEN,
        "key_value_norm.weight": rank_kv,
        "key_value.weight": rank_kv * a * (n + v) // 2,
        "out.weight": a * v * HIDDEN // 2,
    }
    for sequence in (False, True):
        t = 2 if sequence else 1
        found = region("deepseek_v3", MEGATRON, Layout(tp=2, sp=sequence))
        local = {w.name.removeprefix("attention."): w.numel for w in found.weights if w.name.startswith("attention.")}
        assert local == weights
        low = [TOKENS * HIDDEN, TOKENS * rank_q, TOKENS * rank_q, TOKENS * (rank_kv + p), TOKENS * rank_kv]
        heads = [a * (n + p), a * (n + p), a * v, a * v]  # query, key, value, output
        statistics = [TOKENS * 4 // t, TOKENS * 4 // t, TOKENS * a * 4 // 2]  # of both norms and of the softmax
        expected = [*(size * 2 // t for size in low), *(TOKENS * size // 2 * 2 for size in heads), *statistics]
        assert held(found, "attention") == Counter(expected)


def test_a_fused_kernel_that_keeps_a_part_keeps_the_whole_storage() -> None:
    """Values are a part of the expanded key-values, unless they are copied."""
    for kernels, width in ((PYTORCH, 12 + 16), (HUGGINGFACE, 12 + 16), (MEGATRON, 16)):
        found = region("deepseek_v3", kernels)
        (value,) = {
            found.tape.sizes[s.value.storage]
            for step in found.tape.steps
            for s in step.saved
            if s.role == "attention value"
        }
        assert value == TOKENS * 4 * width * 2


def test_sinks_take_part_under_every_kernel() -> None:
    scores, wider = BATCH * 4 * SEQUENCE * SEQUENCE, BATCH * 4 * SEQUENCE * (SEQUENCE + 1)
    for kernels in KERNELS.values():
        for word in ("eager", "flash"):
            found = region("gpt_oss", kernels.with_attention(word))
            assert [w.total for w in found.weights if w.name == "attention.sinks"] == [4]
            sizes = held(found, "attention")
            written_out = word == "eager" and kernels is not MEGATRON
            assert (BATCH * 4 * SEQUENCE * _INT in sizes) is written_out  # where the maxima are
            assert (wider * 4 in sizes) is written_out
            assert sizes[scores * 2] == (word == "eager")  # 16 bit, by Megatron's kernel or cast back


@pytest.mark.parametrize("family", MIXTURES)
def test_choices_are_made_once(family: str) -> None:
    program = region(family, HUGGINGFACE).program
    choices = [op for op in program.ops if op.anchor is Anchor.DISCRETE]
    assert choices and all(op.path == "mlp.router" for op in choices)
    kept = {b for op in choices for b in op.outputs} & program.saved_buffers()
    assert sum(program.buffers[b].nbytes for b in kept) >= TOKENS * 2 * _INT


def test_experts_without_a_gate() -> None:
    """Rows, the only half and its activation; a weight a row."""
    run = scene_run("mixtral", MEGATRON)
    first = run.model.layers[0]
    assert isinstance(first.mlp, Moe)
    plain = replace(first, mlp=replace(first.mlp, gated=False, activation=Activation.GELU))
    found = layer_region(run.signature, plain)
    rows, f = TOKENS * 2, 48
    assert held(found, "mlp.experts") == Counter(
        [rows * HIDDEN * 2, rows * f * 2, rows * f * 2, rows * f * 2, rows * 4, rows * _INT, rows * _INT, 4 * 4]
    )


def test_a_query_without_a_rank_is_projected_directly() -> None:
    run = scene_run("deepseek_v2", PYTORCH)
    attention = run.model.layers[0].attention
    assert isinstance(attention, LatentAttention) and attention.query_rank is None
    names = [w.name for w in layer_region(run.signature, run.model.layers[0]).weights]
    assert "attention.query.weight" in names and "attention.query_down.weight" not in names


@pytest.mark.parametrize(
    "family",
    ["mixtral", "deepseek_v2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "gpt_oss"))],
)
def test_experts_under_autocast(family: str) -> None:
    """Routers are products, and grouped products are not on autocast's lists."""
    assert compare(*under_autocast(FormulaCase(family=family, attention="eager", precision="fp32"))) == []
