"""FLOPs: the paper's appendix, the ledger's ops and PyTorch's counter say the same; MFU as others print it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from jettison.cost.flops import Counting, forward_flops, model_flops, utilisation, visible_share
from jettison.families.config import parse_config
from jettison.families.presets import preset
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.hardware import hardware
from jettison.spec.run import Run

FACTS = Path(__file__).parents[1] / "facts"
A100_FLOPS = 312e12


def facts(name: str) -> list[dict[str, str]]:
    with (FACTS / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


CONFIGS = {row["model"]: row for row in facts("korthikanti2022_configs.csv")}
TABLE5 = {row["model"]: row for row in facts("korthikanti2022_table5.csv")}
GPTS = tuple(CONFIGS)


def appendix_model_flops(*, batch: int, seq: int, hidden: int, layers: int, vocab: int) -> float:
    """72BLsh^2 (1 + s/6h + V/12hL)."""
    scale = 72 * batch * layers * seq * hidden**2
    return scale * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))


def appendix_hardware_flops(*, batch: int, seq: int, hidden: int, layers: int, vocab: int) -> float:
    """With selective recomputation, as printed: 72BLsh^2 (1 + s/3h + V/12hL)."""
    scale = 72 * batch * layers * seq * hidden**2
    return scale * (1 + seq / (3 * hidden) + vocab / (12 * hidden * layers))


def appendix_full_flops(*, batch: int, seq: int, hidden: int, layers: int, vocab: int) -> float:
    """With full recomputation: 96BLsh^2 (1 + s/6h + V/16hL) (arXiv 2104.04473, eq. 3)."""
    scale = 96 * batch * layers * seq * hidden**2
    return scale * (1 + seq / (6 * hidden) + vocab / (16 * hidden * layers))


def sizes(model: str) -> dict[str, int]:
    row = CONFIGS[model]
    names = {"batch": "global_batch", "seq": "sequence", "hidden": "hidden", "layers": "layers", "vocab": "vocabulary"}
    return {name: int(row[column]) for name, column in names.items()}


def paper_run(model: str, recompute: str = "none", *, tp: int = 1) -> Run:
    request = RunRequest(seq=2048, micro_batches=sizes(model)["batch"], recompute=recompute, tp=tp)
    return resolve(preset(f"gpt-{model.lower()}"), request).run


@pytest.mark.parametrize("model", GPTS)
def test_the_ledgers_model_flops_are_the_appendixs(model: str) -> None:
    assert model_flops(paper_run(model)) == pytest.approx(appendix_model_flops(**sizes(model)), rel=1e-12)


@pytest.mark.parametrize("model", GPTS)
def test_parallelism_does_not_change_model_flops(model: str) -> None:
    assert model_flops(paper_run(model, tp=8)) == model_flops(paper_run(model))


@pytest.mark.parametrize("model", GPTS)
def test_hardware_flops_with_full_recompute_are_the_earlier_papers(model: str) -> None:
    """arXiv 2104.04473 eq. 3: every layer's forward once more, the head's not."""
    found = estimate(paper_run(model, "full", tp=8), hardware("a100-80gb")).hardware_flops
    assert found == pytest.approx(appendix_full_flops(**sizes(model)), rel=1e-12)


@pytest.mark.parametrize("model", GPTS)
def test_selective_recompute_runs_a_third_of_what_the_appendix_charges(model: str) -> None:
    """It prints s/3h in the place of s/6h, as much again as a forward and a backward; one forward is 4Bs^2hL."""
    found = estimate(paper_run(model, "selective", tp=8), hardware("a100-80gb"))
    n = sizes(model)
    core = 4 * n["batch"] * n["seq"] ** 2 * n["hidden"] * n["layers"]
    assert found.recomputed_flops == pytest.approx(core, rel=1e-12)
    charged = appendix_hardware_flops(**n) - appendix_model_flops(**n)
    assert charged == pytest.approx(3 * core, rel=1e-12)


@pytest.mark.parametrize("model", TABLE5)
def test_mfu_and_hfu_of_table_5_follow_from_its_times(model: str) -> None:
    row, name = TABLE5[model], model.split("-")[0]
    replicas = 8 if "dp8" in model else 1
    n = sizes(name) | {"batch": replicas * sizes(name)["batch"]}
    machine = {"devices": replicas * int(CONFIGS[name]["gpus"]), "peak_flops_per_second": A100_FLOPS}
    seconds = float(row["iteration_selective_sp_s"])
    for column, flops in (("mfu_percent", appendix_model_flops(**n)), ("hfu_percent", appendix_hardware_flops(**n))):
        if row[column]:
            share = 100 * utilisation(flops, seconds=seconds, **machine)
            assert share == pytest.approx(float(row[column]), abs=0.2)


PALM_ROWS = [row for row in facts("published_runs.csv") if row["mfu_percent"] and "mpt" not in row["model"]]


@pytest.mark.parametrize("row", PALM_ROWS, ids=lambda row: f"{row['model']} {row['source']} {row['micro_batch']}")
def test_mfu_that_others_print_is_the_palm_variant(row: dict[str, str]) -> None:
    run = resolve(preset(row["model"]), RunRequest(seq=int(row["sequence"]))).run
    each = model_flops(run, Counting.PALM) / run.seq
    peak = A100_FLOPS if row["gpu"].startswith("A100") else 989.4e12
    found = 100 * utilisation(
        each * float(row["tokens_per_second_per_gpu"]), seconds=1, devices=1, peak_flops_per_second=peak
    )
    assert found == pytest.approx(float(row["mfu_percent"]), abs=0.2)


def test_variants_differ_as_their_names_say() -> None:
    run = resolve(preset("llama3-8b"), RunRequest(seq=8192)).run
    full, causal = model_flops(run), model_flops(run, Counting.CAUSAL)
    attention = 12 * 8192 * 8192 * 4096 * 32
    assert full - causal == pytest.approx(attention / 2, rel=1e-3)
    assert model_flops(run, Counting.PALM) - model_flops(run, Counting.PARAMETERS) == attention
    assert forward_flops(run) == full / 3


def test_what_a_mask_leaves() -> None:
    layer = preset("llama3-8b").layers[0]
    assert visible_share(layer, 4) == 10 / 16  # 1 + 2 + 3 + 4 of 4 x 4
    windowed = preset("mistral-7b").layers[0]
    assert visible_share(windowed, 4096) == visible_share(layer, 4096)  # the window is the sequence
    exact = sum(min(i + 1, 4096) for i in range(8192)) / 8192**2
    assert visible_share(windowed, 8192) == pytest.approx(exact, rel=1e-3)
    assert visible_share(preset("bert-base").layers[0], 512) == 1.0


# PyTorch's counter ----------------------------------------------------------------------------------------------------

TINY = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 176},
    "gpt_neox": {"intermediate_size": 256},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 176, "head_dim": 16},
}


def cpu_attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """Two products; PyTorch's registry has CUDA's kernels and not the CPU's."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3])


def counted(kind: str, attention: str, seq: int) -> tuple[int, int]:
    """Forward and total FLOPs that PyTorch counts, of a tiny model of a family."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    config = transformers.AutoConfig.for_model(kind, **common, **TINY[kind], attn_implementation=attention)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 128, (2, seq))
    mapping = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: cpu_attention_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as ahead:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False, custom_mapping=mapping) as back:
        loss.backward()
    return ahead.get_total_flops(), ahead.get_total_flops() + back.get_total_flops()


def ours(kind: str, attention: str, seq: int) -> Run:
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    model = parse_config({"model_type": kind, **common, **TINY[kind]}, name=kind)
    request = RunRequest(seq=seq, micro_batch=2, kernels="huggingface", attention=attention, precision="fp32")
    return resolve(model, request).run


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", TINY)
def test_forward_flops_are_what_pytorch_counts(kind: str, attention: str) -> None:
    assert forward_flops(ours(kind, attention, 32)) == counted(kind, attention, 32)[0]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_backward_is_twice_the_forward(kind: str) -> None:
    """Of eager attention; a fused kernel's backward computes the scores again, which model FLOPs leave out."""
    assert model_flops(ours(kind, "eager", 32)) == counted(kind, "eager", 32)[1]


def test_unregistered_attention_would_count_as_nothing() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.rand(1, 2, 8, 4)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    if counter.get_total_flops() == 0:  # as of torch 2.13: the reason for the mapping above
        assert cpu_attention_flops(q.shape, q.shape, q.shape) == 2 * 2 * 8 * 8 * (4 + 4)
    else:
        assert counter.get_total_flops() == cpu_attention_flops(q.shape, q.shape, q.shape)
