"""Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), as sums of
entries: equations 1, 2, 4 and 6, Table 2, the figures of §4 to §6.

s sequence · b micro-batch · h hidden · a heads · L layers · t tensor-parallel size. The equations leave out the norms'
statistics, one or two numbers a row; everything else is equal to the byte.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from jettison.families.presets import preset
from jettison.formula.region import layer_region
from jettison.predict.forecast import Forecast, forecast
from jettison.spec.layout import Layout
from jettison.spec.model import Activation, Attention, DropoutSites, Layer, Mlp, ModelSpec, Norm, NormKind
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.kernel_sets import MEGATRON

FACTS = Path(__file__).parents[1] / "facts"
EAGER = MEGATRON.with_attention("eager")
GIB = 2**30


def rows(name: str) -> dict[str, dict[str, str]]:
    with (FACTS / name).open(encoding="utf-8") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


CONFIGS = rows("korthikanti2022_configs.csv")
MEMORY = rows("korthikanti2022_memory.csv")
PRESET = {"22B": "gpt-22b", "175B": "gpt-175b", "530B": "gpt-530b", "1T": "gpt-1t"}


def gpt(*, heads: int, head_dim: int, layers: int = 1) -> ModelSpec:
    """The paper's layer at any size."""
    norm = Norm(kind=NormKind.LAYER, bias=True)
    hidden = heads * head_dim
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim, qkv_bias=True, out_bias=True, fused_qkv=True)
    mlp = Mlp(ffn=4 * hidden, activation=Activation.GELU, bias=True)
    layer = Layer(attention=attention, mlp=mlp, norm=norm)
    return ModelSpec(
        name="gpt",
        family="paper",
        hidden=hidden,
        vocab=1024,
        layers=(layer,) * layers,
        final_norm=norm,
        max_positions=4096,
        learned_positions=True,
        tied_embeddings=True,
        dropout_sites=DropoutSites(embedding=True, attention=True, residual=True),
    )


def run_of(model: ModelSpec, *, s: int, b: int, recompute: str = "none", micro_batches: int = 1, **layout) -> Run:
    return Run(
        model=model,
        seq=s,
        micro_batch=b,
        micro_batches=micro_batches,
        layout=Layout(**layout),
        kernels=EAGER,
        dropout=0.1,
        recompute=Recompute.parse(recompute, layers=model.depth),
        gradients=Gradients.UPFRONT,
    )


def without_statistics(answer: Forecast) -> dict[str, int]:
    """Bytes of each layer on one rank, as sums of the ledger's entries, without the norms' statistics."""
    ledger = answer.ledger().on_rank(answer.run.layout.mesh_sizes)
    return ledger.filter(lambda entry: entry.role != "norm statistics").by_layer()


def table_2(s: int, b: int, h: int, a: int, t: int) -> dict[tuple[bool, str], int]:
    """Bytes of a layer by (sequence parallelism, recompute), multiplied by t; all of them are whole numbers."""
    linear, core = s * b * h, a * s * s * b
    return {
        (False, "none"): linear * (10 * t + 24) + 5 * core,  # equation 2
        (True, "none"): linear * 34 + 5 * core,  # equation 4
        (False, "selective"): linear * (10 * t + 24),
        (True, "selective"): linear * 34,  # equation 6, a layer of it
        (False, "full"): linear * 2 * t,
    }


@pytest.mark.parametrize("t", range(1, 65))
def test_equations_1_2_4_and_6_and_table_2_for_every_t(t: int) -> None:
    heads, head_dim, s, b = 2 * t, 4, 4 * t, 3
    model = gpt(heads=heads, head_dim=head_dim)
    for (sp, recompute), expected in table_2(s, b, heads * head_dim, heads, t).items():
        answer = forecast(run_of(model, s=s, b=b, recompute=recompute, tp=t, sp=sp))
        found = without_statistics(answer)["layers.0"]
        assert found * t == expected, (sp, recompute)
        statistics = answer.layer_bytes()[1][1] - found
        rows_held = s * b // (t if sp else 1)
        assert statistics == (0 if recompute == "full" else 4 * 4 * rows_held), "two norms, two fp32 numbers a row"


@pytest.mark.parametrize("t", [1, 2, 8])
def test_full_recompute_with_sequence_parallelism_holds_a_shard(t: int) -> None:
    model = gpt(heads=16, head_dim=8)
    answer = forecast(run_of(model, s=64, b=2, recompute="full", tp=t, sp=True))
    assert without_statistics(answer)["layers.0"] * t == 2 * 64 * 2 * 128


@pytest.mark.parametrize("t", [2, 4, 8])
def test_stock_dtensor_keeps_the_gathered_inputs(t: int) -> None:
    """4 + 30/t instead of 34/t: the gathered inputs of two column-parallel products stay whole."""
    model, s, b = gpt(heads=16, head_dim=8), 64, 2
    run = run_of(model, s=s, b=b, recompute="selective", tp=t, sp=True, gathered_inputs=True)
    assert without_statistics(forecast(run))["layers.0"] * t == s * b * 128 * (4 * t + 30)


def test_a_layer_of_gpt_3_in_bytes() -> None:
    """Equation 1 at s=2048, b=1: nearly three gigabytes, 70 % of it the attention core."""
    found = without_statistics(forecast(run_of(preset("gpt-175b"), s=2048, b=1)))["layers.0"]
    assert found == 2048 * 12288 * 34 + 5 * 96 * 2048 * 2048 == 2_868_903_936


@pytest.mark.parametrize(("name", "memory_percent", "flops_percent"), [("gpt-175b", 70, 2.7), ("gpt-530b", 65, 1.6)])
def test_what_selective_saves_and_costs(name: str, memory_percent: int, flops_percent: float) -> None:
    """§5. The FLOPs are those of the attention core as a share of one forward: 2.7 % and 1.6 %."""
    model = preset(name)
    plain, selective = (
        without_statistics(forecast(run_of(model, s=2048, b=1, recompute=word)))["layers.0"]
        for word in ("none", "selective")
    )
    assert round(100 * (1 - selective / plain)) == memory_percent
    region = layer_region(run_of(model, s=2048, b=1).signature, model.layers[0])
    core = sum(step.flops for step in region.tape.steps if step.name.startswith("aten.bmm"))
    assert round(100 * core / region.flops, 1) == flops_percent


@pytest.mark.parametrize("name", MEMORY)
def test_percentages_of_the_tensor_parallel_baseline(name: str) -> None:
    """Figure 7, from Table 2: to the printed digits."""
    config, published = CONFIGS[name], MEMORY[name]
    s, b, t = int(config["sequence"]), int(config["micro_batch"]), int(config["tensor_parallel"])
    model = preset(PRESET[name])

    def layer(recompute: str, sp: bool) -> int:
        return without_statistics(forecast(run_of(model, s=s, b=b, recompute=recompute, tp=t, sp=sp)))["layers.0"]

    whole = layer("none", False)
    found = {
        "tp_sp_percent": layer("none", True),
        "tp_selective_percent": layer("selective", False),
        "tp_sp_selective_percent": layer("selective", True),
        "full_percent": layer("full", False),
    }
    assert {key: f"{100 * nbytes / whole:.1f}" for key, nbytes in found.items()} == {k: published[k] for k in found}


@pytest.mark.parametrize("name", MEMORY)
def test_first_stage_in_gib(name: str) -> None:
    """§4.2.3 and Table 3: L layers' worth on the first stage, L(1 + (p-1)/(pm)) when interleaved, by replay."""
    config, published = CONFIGS[name], MEMORY[name]
    t, p, v = (int(config[key]) for key in ("tensor_parallel", "pipeline_parallel", "virtual_stages"))
    s, b = int(config["sequence"]), int(config["micro_batch"])
    micro_batches = int(config["global_batch"]) // b
    found = {}
    for key, recompute, sp in (
        ("first_stage_gib_tp", "none", False),
        ("first_stage_gib_tp_sp", "none", True),
        ("first_stage_gib_tp_selective", "selective", False),
        ("first_stage_gib_tp_sp_selective", "selective", True),
        ("first_stage_gib_full", "full", False),
    ):
        run = run_of(
            preset(PRESET[name]),
            s=s,
            b=b,
            recompute=recompute,
            micro_batches=micro_batches,
            tp=t,
            sp=sp,
            pp=p,
            virtual_stages=v,
        )
        answer = forecast(run)
        layer = without_statistics(answer)["layers.0"]
        stage = answer.stages[0]
        chunks = max(sum(state.forward) for state in stage.load.occupancies)
        layers = sum(part.is_layer for part in stage.parts[0]) * chunks
        assert layers * p * v == model_layers(name) * (p * v + p - 1 if v > 1 else p * v)
        found[key] = f"{layers * layer / GIB:.2f}"
    assert found == {key: published[key] for key in found}


def model_layers(name: str) -> int:
    return int(CONFIGS[name]["layers"])


def test_extra_terms_of_section_4_3() -> None:
    """Embedding dropout sbhp/t, final norm 2sbh/t, output layer 2sbh/t, fp32 logits 4sbv/t: 0.57 % for 22B."""
    config = CONFIGS["22B"]
    s, b, t, h, vocab = 2048, int(config["micro_batch"]), 8, 6144, 51200
    run = run_of(preset("gpt-22b"), s=s, b=b, recompute="none", tp=t, sp=True)
    answer = forecast(run)
    ledger = answer.ledger().on_rank(run.layout.mesh_sizes)
    by_layer = without_statistics(answer)
    integers = ledger.filter(lambda e: e.dtype in ("int64", "bool") and e.role != "dropout mask").by_layer()
    assert by_layer["embedding"] - integers["embedding"] == s * b * h // t
    assert (by_layer["head"] - integers["head"]) * t == 4 * s * b * h + 4 * s * b * vocab
    layers = sum(nbytes for name, nbytes in by_layer.items() if name.startswith("layers."))
    terms = (by_layer["embedding"] + by_layer["head"]) - integers["embedding"] - integers["head"]
    assert f"{100 * terms / layers:.2f}" == "0.57"


def test_appendix_b_output_tensors() -> None:
    """Appendix B: 2.73 GiB on the 530B model's first stage, of whole tensors; sharded along s it is 1/t of that."""
    config = CONFIGS["530B"]
    p, h = int(config["pipeline_parallel"]), int(config["hidden"])
    assert f"{2 * 2048 * h * p / GIB:.2f}" == "2.73"
    common = {"s": 2048, "b": 1, "recompute": "selective", "micro_batches": 280, "tp": 8, "pp": p}
    for sp in (False, True):
        kept, freed = (
            forecast(run_of(preset("gpt-530b"), **common, sp=sp, keeps_stage_outputs=keeps)).stages[0].activation_bytes
            for keeps in (True, False)
        )
        assert kept - freed == 2 * 2048 * h * p // (8 if sp else 1)


def test_crossover_near_870_for_gpt_3() -> None:
    """§4: beyond it the attention core's bytes are more than all the rest of a layer."""

    def core_share(s: int) -> float:
        model = replace(preset("gpt-175b"), max_positions=4096)
        plain, selective = (
            without_statistics(forecast(run_of(model, s=s, b=1, recompute=word)))["layers.0"]
            for word in ("none", "selective")
        )
        return (plain - selective) / plain

    assert core_share(866) < 0.5 < core_share(875)
