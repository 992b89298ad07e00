"""Tensor and sequence parallelism on 1, 2 and 4 ranks beside a whole model in each rank's own process: loss and every
gradient, gathered and by name, of the models of record and of transformers'.

Dropout is on in the reference GPT: each site's mask is drawn for the whole model from a seed of its own, and a rank
takes the part that its activation is of it (heads, positions, or all). What ranks draw without that is another test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from jettison.formula.region import embedding_region, head_region, layer_region
from jettison.spec.layout import Layout
from jettison.spec.model import Activation, Attention, Layer, Mlp, ModelSpec, Norm, NormKind
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run
from support.kernel_sets import MEGATRON
from support.parallel_checks import FAMILIES, MORE_PLANS, PLANNED, B, S, V, huggingface, more_plans, reference
from support.ranks import Launches, run_ranks

FOUR = pytest.param(4, marks=pytest.mark.slow)
SIZES = (1, 2, FOUR)
TOLERANCE = {"torch.float64": 1e-12, "torch.float32": 5e-6}
"""Of the largest gradient of each parameter, or of 1 where that is larger."""
GPT_PARAMETERS, LLAMA_PARAMETERS = 4 + 2 * 12, 3 + 2 * 9


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), reference)


@pytest.fixture(scope="session")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    pytest.importorskip("transformers")
    return Launches(tmp_path_factory.getbasetemp(), huggingface)


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


@pytest.mark.parametrize("t", [2, FOUR])
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


@pytest.mark.parametrize("t", [2, FOUR])
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
def test_a_whole_step_sends_what_the_ledger_says(found: Any, t: int, layout: str) -> None:
    """Embedding, layers and head; and the logits, for a loss that all ranks compute."""
    norm = Norm(kind=NormKind.LAYER, bias=True)
    attention = Attention(heads=4, kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True, fused_qkv=True)
    layer = Layer(attention=attention, mlp=Mlp(ffn=128, activation=Activation.GELU, bias=True), norm=norm)
    model = ModelSpec(
        name="reference",
        family="reference",
        hidden=32,
        vocab=V,
        layers=(layer,) * 2,
        final_norm=norm,
        max_positions=S,
        learned_positions=True,
        tied_embeddings=True,
    )
    run = Run(
        model=model,
        seq=S,
        micro_batch=B,
        layout=Layout(tp=t, sp=layout == "tp_sp"),
        kernels=MEGATRON,
        precision=PRECISIONS["fp32"],
    )
    expected = Counter({"all_gather_into_tensor forward": S * B * -(-V // t) * t * 4})
    for region in (
        embedding_region(run.signature),
        *[layer_region(run.signature, layer)] * 2,
        head_region(run.signature),
    ):
        for sent in region.collectives:
            expected[f"{sent.kind} {'backward' if sent.backward else 'forward'}"] += sent.nbytes
    for rank in found[t]:
        assert rank["parity"][f"gpt {layout} torch.float32"]["sent"] == expected


@pytest.mark.parametrize(
    ("t", "model"),
    [
        pytest.param(t, model, marks=pytest.mark.slow if t == 4 else ())
        for t, models in FAMILIES.items()
        for model in models
    ],
)
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
def test_models_of_transformers(transformers: Any, t: int, layout: str, model: str) -> None:
    for rank in transformers[t]:
        check(rank[f"{model} {layout}"], 1e-12)


@pytest.mark.parametrize("t", [FOUR if t == 4 else t for t in PLANNED])
def test_models_of_transformers_give_the_same_bits_with_a_plan(transformers: Any, t: int) -> None:
    """What is sharded by its structure is recomputed by its recording: dropout on, and once under autocast."""
    for rank in transformers[t]:
        assert len(rank["plans"]) == len(PLANNED[t])
        check_plans(rank["plans"])


@pytest.mark.slow
def test_models_of_transformers_give_the_same_bits_with_other_plans() -> None:
    for rank in run_ranks(more_plans, 2):
        assert len(rank) == len(MORE_PLANS)
        check_plans(rank)


def check_plans(found: dict[str, Any]) -> None:
    for name, row in found.items():
        assert row["same"], name
        assert row["dropped"] > 0, f"{name}: nothing was dropped, so nothing was tested"
        assert row["fallbacks"] == [], name
        assert row["recordings"] == 0, name


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_read_by_four(transformers: Any) -> None:
    """GPT-2, whose joined q, k and v are sharded by heads."""
    assert [rank["checkpoint"] for rank in transformers[4]] == [0.0] * 4


@pytest.mark.parametrize("t", [2, FOUR])
def test_optimizers_and_clipping_read_partial_gradients(found: Any, t: int) -> None:
    """AdamW divides by a root, so that the last bit of a small gradient is no longer the last."""
    for rank in found[t]:
        assert max(rank["training"].values()) < 1e-10


def test_heads_norms_are_partial_without_sequence_parallelism_too(transformers: Any) -> None:
    names = {f"model.layers.{i}.self_attn.{name}_norm.weight" for i in range(2) for name in "qk"}
    assert set(transformers[2][0]["qwen3 tp"]["partial"]) == names
