"""Tensor and sequence parallelism on 1, 2 and 4 ranks beside a whole model in each rank's own process: loss and every
gradient, gathered and by name; the order of a block's backward; random streams.

Dropout is on in the reference GPT: each site's mask is drawn for the whole model from a seed of its own, and a rank
takes the part that its activation is of it (heads, positions, or all). What ranks draw without that is another test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from jettison.formula.region import embedding_region, head_region, layer_region
from jettison.spec.kernels import MEGATRON
from jettison.spec.layout import Layout
from jettison.spec.model import Activation, Attention, Layer, Mlp, ModelSpec, Norm, NormKind
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run
from parallel_checks import B, S, V, everything, huggingface_parity
from ranks import run_ranks

SIZES = (1, 2, 4)
TOLERANCE = {"torch.float64": 1e-12, "torch.float32": 5e-6}
"""Of the largest gradient of each parameter, or of 1 where that is larger."""
GPT_PARAMETERS, LLAMA_PARAMETERS = 4 + 2 * 12, 3 + 2 * 9


@pytest.fixture(scope="module")
def found() -> dict[int, list[Any]]:
    return {t: run_ranks(everything, t) for t in SIZES}


@pytest.fixture(scope="module")
def huggingface() -> dict[int, list[Any]]:
    pytest.importorskip("transformers")
    return {t: run_ranks(huggingface_parity, t) for t in (2, 4)}


def check(row: dict[str, Any], tolerance: float) -> None:
    expected, loss = row["loss"]
    assert abs(loss - expected) <= tolerance * max(1, abs(expected))
    for name, (gap, largest) in row["gradients"].items():
        assert gap <= tolerance * max(1, largest), name
        assert largest > 1e-4 or name.endswith(("key.bias", "k_proj.bias")), f"{name} has no gradient worth comparing"
    assert row["lazily"] <= tolerance, "as full_tensor() reads Partial gradients"
    assert row["values"] == 0, "parameters are those of the whole model"


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
@pytest.mark.parametrize(("model", "parameters"), [("gpt", GPT_PARAMETERS), ("llama", LLAMA_PARAMETERS)])
def test_reference_models(found: Any, t: int, dtype: str, layout: str, model: str, parameters: int) -> None:
    for rank in found[t]:
        row = rank["parity"][f"{model} {layout} {dtype}"]
        assert len(row["gradients"]) == parameters
        check(row, TOLERANCE[dtype])


@pytest.mark.parametrize("t", [2, 4])
def test_gradients_are_partial_where_a_rank_sees_a_part_of_the_tokens(found: Any, t: int) -> None:
    rows = found[t][0]["parity"]
    norms = {"attention_norm.weight", "attention_norm.bias", "mlp_norm.weight", "mlp_norm.bias"}
    biases = {"attention.out.bias", "mlp.down.bias"}
    layers = {f"layers.{i}.{name}" for i in range(2) for name in norms | biases}
    row = rows["gpt tp_sp torch.float64"]
    assert set(row["partial"]) == layers | {"norm.weight", "norm.bias", "positions.weight"}
    assert row["reductions"] == 1
    whole = rows["gpt tp torch.float64"]
    assert (whole["partial"], whole["reductions"]) == ([], 0)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
def test_a_whole_step_sends_what_the_ledger_says(found: Any, t: int, layout: str) -> None:
    """Embedding, layers and head; and the logits, for a loss that all ranks compute."""
    norm = Norm(kind=NormKind.LAYER, bias=True)
    attention = Attention(heads=4, kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True, fused_qkv=True)
    layer = Layer(attention=attention, mlp=Mlp(ffn=128, activation=Activation.GELU, bias=True), norm=norm)
    model = ModelSpec(
        name="reference", family="reference", hidden=32, vocab=V, layers=(layer,) * 2, final_norm=norm,
        max_positions=S, learned_positions=True, tied_embeddings=True,
    )  # fmt: skip
    run = Run(
        model=model, seq=S, micro_batch=B, layout=Layout(tp=t, sp=layout == "tp_sp"), kernels=MEGATRON,
        precision=PRECISIONS["fp32"],
    )  # fmt: skip
    expected = Counter({"all_gather_into_tensor forward": S * B * -(-V // t) * t * 4})
    for region in (embedding_region(run.scene), *[layer_region(run.scene, layer)] * 2, head_region(run.scene)):
        for sent in region.collectives:
            expected[f"{sent.kind} {'backward' if sent.backward else 'forward'}"] += sent.nbytes
    for rank in found[t]:
        assert rank["parity"][f"gpt {layout} torch.float32"]["sent"] == expected


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_models_of_transformers(huggingface: Any, t: int, layout: str, model: str) -> None:
    for rank in huggingface[t]:
        check(rank[f"{model} {layout}"], 1e-12)


def test_a_checkpoint_of_two_ranks_is_read_by_four(huggingface: Any) -> None:
    """GPT-2, whose joined q, k and v are sharded by heads."""
    assert [rank["checkpoint"] for rank in huggingface[4]] == [0.0] * 4


@pytest.mark.parametrize("t", [2, 4])
def test_optimizers_and_clipping_read_partial_gradients(found: Any, t: int) -> None:
    """AdamW divides by a root, so that the last bit of a small gradient is no longer the last."""
    for rank in found[t]:
        assert max(rank["training"].values()) < 1e-10


def test_heads_norms_are_partial_without_sequence_parallelism_too(huggingface: Any) -> None:
    names = {f"model.layers.{i}.self_attn.{name}_norm.weight" for i in range(2) for name in "qk"}
    assert set(huggingface[2][0]["qwen3 tp"]["partial"]) == names


@pytest.mark.parametrize("t", [2, 4])
def test_a_blocks_products_share_one_gather_that_runs_beside_the_first_of_them(found: Any, t: int) -> None:
    """gate and up, then q, k and v: five products, two second gathers. dx comes before the wait, dw after it."""
    order = found[t][0]["order"]
    assert order["sent"] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2}
    names = order["order"]
    starts = [i for i, name in enumerate(names) if name == "all_gather_into_tensor"]
    for start, products in ((starts[1], 2), (starts[3], 3)):
        wait, end = names.index("wait_tensor", start), names.index("reduce_scatter_tensor", start)
        assert names[start:wait].count("mm") == 1
        assert names[wait:end].count("mm") == 2 * products - 1


@pytest.mark.parametrize("t", [2, 4])
def test_a_split_backward_gathers_for_weights_only(found: Any, t: int) -> None:
    order = found[t][0]["order"]
    inputs, weights = order["split"]
    assert inputs == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert weights["all_gather_into_tensor"] == 4
    assert order["split_equal"]


def test_frozen_weights_are_not_gathered_for(found: Any) -> None:
    assert found[2][0]["order"]["frozen"] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


def test_autocast(found: Any) -> None:
    """bf16 has 8 bits, and sums over ranks round once more."""
    for rank in found[2]:
        shares = rank["order"]["autocast"]
        assert len(shares) == 9
        assert max(shares.values()) < 0.03


def test_a_sequence_that_does_not_divide_is_an_error(found: Any) -> None:
    assert "(2, 15); its dim 1 does not divide over 2 tensor-parallel ranks" in found[2][0]["order"]["odd"]


@pytest.mark.parametrize("t", [2, 4])
def test_masks_are_equal_on_whole_activations_and_others_on_parts(found: Any, t: int) -> None:
    ranks = [rank["streams"] for rank in found[t]]
    sites = 1 + 2 * 3
    cores = {1, 4}  # after the embedding's, the first of each layer
    for layout, parts in (("tp", cores), ("tp_sp", set(range(sites)))):
        for run in range(3):
            masks = [rank[layout][run]["masks"] for rank in ranks]
            assert all(len(m) == sites for m in masks)
            for site in range(sites):
                assert len({m[site] for m in masks}) == (t if site in parts else 1), (layout, site)
            assert len({m for rank in masks for m in rank}) == len(parts) * t + sites - len(parts), "all sites differ"
        states = {rank[layout][0]["state"] for rank in ranks}
        assert len(states) == (1 if layout == "tp" else t)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
def test_masks_follow_the_seed(found: Any, t: int, layout: str) -> None:
    for rank in found[t]:
        first, second, other = (run["masks"] for run in rank["streams"][layout])
        assert first == second
        assert not set(first) & set(other)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
def test_recomputed_masks_are_the_forwards(found: Any, t: int, layout: str) -> None:
    for rank in found[t]:
        row = rank["streams"][f"recompute {layout}"]
        assert row.pop("another seed") is False
        assert all(row.values()), row


def test_a_loan_ends_with_a_failed_forward_and_never_starts_in_evaluation(found: Any) -> None:
    assert found[2][0]["streams"]["failed forward"] == [True, True]
