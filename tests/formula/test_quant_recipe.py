"""Products that a recipe leaves to 16 bits, or to another recipe, and layers whose weights are those before them."""

from __future__ import annotations

from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.cost.execution import execution_of
from jettison.cost.region_kernels import work
from jettison.families.config import parse_config
from jettison.formula.region import Region, layer_region, parameter_count
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve, run_of
from jettison.spec.fp8 import FP4, MXFP8, fp8_recipe
from jettison.spec.run import Run

HYBRID = {
    "model_type": "nemotron_h",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "ME*EME",
    "num_attention_heads": 8,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "moe_latent_size": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "mlp_hidden_act": "relu2",
}
WORDS: dict[str, Any] = {"kernels": "megatron", "seq": 256, "attention": "flash"}


def hybrid(**more: Any) -> Run:
    return resolve(parse_config(HYBRID, name="tiny"), RunRequest(**WORDS, **more)).run


def regions(run: Run) -> list[Region]:
    return [layer_region(run.signature, layer) for layer in run.model.layers]


def dtypes(run: Run, region: Region) -> dict[str, str]:
    """What products of a forward read, by their paths."""
    kernels = work(
        region, execution_of(run), "bfloat16", run.precision.gemm_inputs, recipe=run.precision.recipe
    ).forward
    return {region.tape.steps[k.steps[0]].path: k.gemm.dtype for k in kernels if k.gemm is not None}


def test_layers_at_the_ends_are_as_without_a_recipe() -> None:
    wide, narrow = (
        run_of("llama3-8b", RunRequest(**WORDS)),
        run_of("llama3-8b", RunRequest(**WORDS, fp8_recipe="mxfp8")),
    )
    mixed = run_of("llama3-8b", RunRequest(**WORDS, fp8_recipe="mxfp8", quant_recipe="first:1=bf16,last:2=bf16"))
    held = [region.saved_bytes for region in regions(mixed)]
    first, other = regions(wide)[0], regions(narrow)[0]
    assert held == [r.saved_bytes for r in (first, *[other] * 29, first, first)]
    assert first.saved_bytes != other.saved_bytes
    assert sum(w.quantized_bytes for w in regions(mixed)[-1].weights) == 0
    assert set(dtypes(mixed, regions(mixed)[-1]).values()) == {"bfloat16"}
    assert set(dtypes(mixed, regions(mixed)[1]).values()) == {MXFP8}
    copies = sum(w.quantized_bytes for w in other.weights)
    pairs = zip(forecast(narrow).stages, forecast(mixed).stages, strict=True)
    assert [a.static.parameters - b.static.parameters for a, b in pairs] == [3 * copies]


def test_globs_choose_products_and_the_first_counts() -> None:
    """As the recipe of Nemotron 3 Super has it."""
    run = hybrid(
        fp8_recipe="nvfp4", quant_recipe="attention.qkv=bf16,attention.*=mxfp8,latent_*=bf16,mixer.out_proj=mxfp8"
    )
    scan, experts, attention, *_ = regions(run)
    assert dtypes(run, attention) == {"attention.qkv": "bfloat16", "attention.out": MXFP8}
    assert dtypes(run, scan) == {"mixer.in_proj": FP4, "mixer.out_proj": MXFP8}
    found = dtypes(run, experts)
    assert {path for path, dtype in found.items() if dtype == FP4} == {
        "mlp.experts.up",
        "mlp.experts.down",
        "mlp.shared.up",
        "mlp.shared.down",
    }
    out = next(w for w in scan.weights if w.name == "mixer.out_proj.weight")
    assert out.quantized_bytes == fp8_recipe("mxfp8", "megatron").weight_bytes(out.shape)
    latent = next(w for w in experts.weights if "latent" in w.name)
    assert latent.quantized_bytes == 0


def test_further_tokens_stay_wide_and_one_layer_serves_both() -> None:
    words: dict[str, Any] = {"fp8_recipe": "nvfp4", "quant_recipe": "mtp=bf16"}
    apart, one = hybrid(mtp_num_layers=2, **words), hybrid(mtp_num_layers=2, mtp_use_repeated_layer=True, **words)
    assert {dtype for at in (6, 7) for dtype in dtypes(one, regions(one)[at]).values()} == {"bfloat16"}
    own = sum(w.total for w in regions(apart)[7].weights if not w.tied)
    assert (
        parameter_count(apart.model) - parameter_count(one.model)
        == own
        == parameter_count(hybrid(mtp_num_layers=2).model) - parameter_count(hybrid(mtp_num_layers=1).model)
    )
    assert [r.saved_bytes for r in regions(apart)] == [r.saved_bytes for r in regions(one)]
    for stages in (1, 2):  # the same stage has both
        a, b = (
            forecast(resolve(run.model, RunRequest(**WORDS, pp=stages, dp=1)).run).stages[-1] for run in (apart, one)
        )
        assert a.static.parameters - b.static.parameters == 2 * own


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"quant_recipe": "last:1=bf16"}, "without a recipe"),
        ({"fp8_recipe": "mxfp8", "quant_recipe": "last:1"}, "expected what=how"),
        ({"fp8_recipe": "mxfp8", "quant_recipe": "last:7=bf16"}, "expected 0 to 6 layers"),
        ({"fp8_recipe": "mxfp8", "quant_recipe": "last:1=nvfp4"}, "expected 0 to 6 layers, in bf16"),
        ({"fp8_recipe": "mxfp8", "quant_recipe": "mtp=bf16"}, "--mtp-num-layers"),
        ({"fp8_recipe": "mxfp8", "quant_recipe": "attention.*=fp16"}, "expected bf16, "),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hybrid(**words)
