"""Predicted step times next to published ones. No constant belongs to a row: see `benchmarks/throughput.py`."""

from __future__ import annotations

import csv
from dataclasses import replace
from statistics import mean, median

import pytest
from benchmarks import newer_runs, throughput
from benchmarks.throughput import FACTS, paper_run, paper_runs, rows

from jettison.core.units import GIB
from jettison.cost.execution import usual_execution
from jettison.cost.flops import everything, repeated, to_the_end
from jettison.cost.region import PriceModel
from jettison.formula.region import layer_region
from jettison.predict.stages import kept_by
from jettison.predict.time import estimate
from jettison.search.largest_fit import most_whole
from jettison.spec.hardware import hardware
from jettison.spec.recompute import Recompute

A100 = hardware("a100-80gb")
ROWS = rows()
NEWER = newer_runs.rows()
with (FACTS / "korthikanti2022_configs.csv").open(encoding="utf-8") as file:
    CONFIGS = {row["model"]: row for row in csv.DictReader(file)}
with (FACTS / "korthikanti2022_table4_layer_22B_ms.csv").open(encoding="utf-8") as file:
    TABLE4 = {row["case"]: row for row in csv.DictReader(file)}


# arXiv 2205.05198 -----------------------------------------------------------------------------------------------------


def test_table_5() -> None:
    """All eight iterations: mean error at most 5 %, worst at most 9 %."""
    errors = {name: estimate(run, A100).step_seconds / published - 1 for name, run, published in paper_runs()}
    assert len(errors) == 8
    sizes = [abs(error) for error in errors.values()]
    assert mean(sizes) <= 0.05, errors
    assert max(sizes) <= 0.09, errors


def test_530b_over_2240_devices() -> None:
    """§6.3: 8 replicas, 39.15 s, gradients reduced after the last backward."""
    run = paper_run(CONFIGS["530B"], recompute="selective", sp=True)
    wider = replace(run, layout=replace(run.layout, dp=8))
    found = estimate(wider, A100, execution=replace(usual_execution("megatron"), hides_data=False)).step_seconds
    assert found == pytest.approx(39.15, rel=0.09)
    assert found > estimate(wider, A100).step_seconds > estimate(run, A100).step_seconds


CASES = {
    "no_recompute": ("none", False),
    "sequence_parallel": ("none", True),
    "full": ("full", False),
    "selective": ("selective", False),
    "selective+sequence_parallel": ("selective", True),
}


def layer_ms(case: str) -> tuple[float, float]:
    """Forward and backward of one layer of 22B."""
    recompute, sp = CASES[case]
    run = paper_run(CONFIGS["22B"], recompute=recompute, sp=sp)
    region = layer_region(run.signature, run.model.layers[0])
    again = {
        "none": frozenset(),
        "full": everything(region),
        "selective": to_the_end(region, kept_by(region, "selective")),
    }[recompute]
    layout = run.layout.within_stage
    prices = PriceModel(
        hardware=A100, execution=usual_execution("megatron"), precision=run.precision, layout=layout, visible=0.5
    )
    found = prices.seconds(region, again)
    return found.forward.seconds * 1e3, found.backward.seconds * 1e3


@pytest.mark.parametrize("case", CASES)
def test_table_4_times(case: str) -> None:
    forward, backward = layer_ms(case)
    assert forward == pytest.approx(float(TABLE4[case]["forward_ms"]), rel=0.05)
    assert backward == pytest.approx(float(TABLE4[case]["backward_ms"]), rel=0.07)


@pytest.mark.parametrize(
    ("case", "points"), [("sequence_parallel", 1), ("full", 3), ("selective", 2), ("selective+sequence_parallel", 2)]
)
def test_table_4_overheads(case: str, points: float) -> None:
    overhead = 100 * (sum(layer_ms(case)) / sum(layer_ms("no_recompute")) - 1)
    assert overhead == pytest.approx(float(TABLE4[case]["overhead_percent"]), abs=points)


def test_a_checkpointed_core_runs_to_its_end() -> None:
    """Megatron's checkpoint repeats the product that ends the core, though no backward reads its result."""
    run = paper_run(CONFIGS["22B"], recompute="selective", sp=False)
    region = layer_region(run.signature, run.model.layers[0])
    kept = kept_by(region, "selective")
    more = to_the_end(region, kept) - repeated(region, kept)
    assert [region.tape.steps[i].name for i in more] == ["aten.bmm.default"]


def test_appendix_c() -> None:
    """Published: +0.7 points of MFU for 175B and +0.4 for 530B, with how much memory is not said: more than 68 GiB and
    less than all there is explains both. More room gains more, and no room gains as much as computing nothing again."""
    for model, published in throughput.APPENDIX_C.items():
        gains = [throughput.appendix_c_gain(model, limit * GIB) for limit in (56, 64, 68, 72)]
        everything = throughput.appendix_c_gain(model, None)
        assert 0 <= gains[0] < gains[1] < gains[2] < gains[3] < everything
        assert gains[2] < published < everything
        run = paper_run(CONFIGS[model], recompute="selective", sp=True)
        nothing = estimate(replace(run, recompute=Recompute()), A100).mfu - estimate(run, A100).mfu
        assert everything < 100 * nothing


def test_micro_batches_kept_whole_are_the_same_number_on_every_stage() -> None:
    """Of windows of 31, 29, ..., 17 (2 (p - 1 - i) + (v - 1) p + 1), out of 192 forwards through a chunk."""
    run = paper_run(CONFIGS["175B"], recompute="selective", sp=True)
    all_again, some = estimate(run, A100), estimate(most_whole(run, 64 * GIB), A100)
    assert some.run.recompute.whole == 4
    for i, (less, more) in enumerate(zip(some.stages, all_again.stages, strict=True)):
        window = 2 * (7 - i) + 2 * 8 + 1
        again = sum(n % window >= 4 for n in range(64 * 3))
        assert less.recomputed_flops / more.recomputed_flops == pytest.approx(again / 192)


# published runs -------------------------------------------------------------------------------------------------------


def test_published_throughput() -> None:
    """Median absolute error at most 12 % over the rows that are listed, and over those that are not."""
    for file, count in ((throughput.LISTED, 30), (throughput.FOUNDRY, 42), (throughput.NEMO, 27)):
        errors = [abs(row.error) for row in ROWS if row.file == file]
        assert len(errors) == count
        assert median(errors) <= 0.12
    assert median(abs(row.error) for row in ROWS if row.gpu == "A100-80GB") <= 0.08
    more = [row for row in ROWS if row.file == throughput.MORE]
    assert len(more) == 168 and median(abs(row.error) for row in more) <= 0.08
    assert sum(row.file == throughput.FORGE for row in ROWS) == 14
    cloud = [row for row in ROWS if row.file == throughput.CLOUD]
    assert len(cloud) == 68 and max(abs(row.error) for row in cloud) <= 0.145


FAR = ("fsdp2-cp4", "fsdp1-cp8")
"""Attention in pieces: see the page."""


@pytest.mark.parametrize("row", [r for r in ROWS if r.file == throughput.LISTED], ids=lambda row: row.name)
def test_no_listed_row_is_far_off_without_a_reason(row: throughput.Timed) -> None:
    assert abs(row.error) <= (0.65 if row.columns["layout"] in FAR else 0.25)


@pytest.mark.parametrize("row", [r for r in ROWS if r.file == throughput.NEMO], ids=lambda row: row.name)
def test_nvidias_runs_in_fp8_are_met_without_a_figure_of_their_own(row: throughput.Timed) -> None:
    """H100 within 12 %: tensor, pipeline and context parallelism over up to 1024 devices. Blackwell within 20 %."""
    assert abs(row.error) <= (0.12 if "H100" in row.gpu else 0.21)
    if row.columns["tokens_per_second_per_gpu"]:  # both units are printed: the page counts FLOPs as the ledger does
        printed = float(row.columns["teraflops_per_gpu"]) * 1e12 / row.published
        assert printed == pytest.approx(throughput.token_flops(row.run), rel=0.011 if "405b" in row.name else 2e-3)


def test_every_published_throughput_has_a_row() -> None:
    with (FACTS / "published_runs.csv").open(encoding="utf-8") as file:
        stated = [row for row in csv.DictReader(file) if row["tokens_per_second_per_gpu"]]
    known = [row for row in stated if row["gpu"] != "unstated" and "first step" not in row["extras"]]
    assert len(known) == sum(row.file == throughput.LISTED for row in ROWS)


@pytest.mark.parametrize("name", ["mpt-7b", "mpt-13b", "mpt-30b", "mpt-70b", "mpt-3b", "mpt-1b"])
def test_llm_foundrys_models_have_the_parameters_that_its_page_states(name: str) -> None:
    """At 2048 positions; they are not those of MPT with ALiBi and without biases."""
    from jettison.formula.region import parameter_count

    stated = {
        "mpt-1b": 1315950592,
        "mpt-3b": 2651837440,
        "mpt-7b": 6658859008,
        "mpt-13b": 12853954560,
        "mpt-30b": 29975214080,
        "mpt-70b": 64862437376,
    }
    assert parameter_count(throughput.mpt(name, 2048)) == stated[name]


def test_compiling_helps_as_much_as_it_did() -> None:
    """torchtitan's tables 1 and 3: 15.7 % and 16.2 % more."""
    for gpus in ("8", "128"):
        eager, compiled = (
            next(
                row
                for row in ROWS
                if row.source == "torchtitan benchmarks 2024-12"
                and row.columns["gpus"] == gpus
                and row.columns["sequence"] == "8192"
                and row.columns["extras"] == extras
                and row.columns["model"] == "llama3-8b"
            )
            for extras in ("", "compile")
        )
        predicted = compiled.found.tokens_per_second_per_gpu / eager.found.tokens_per_second_per_gpu
        assert predicted == pytest.approx(compiled.published / eager.published, abs=0.045)


def test_runs_since_2025_are_met() -> None:
    """Dense ones within 5 % in the median, those with experts within 12 %; not looked at, too."""
    for experts, limit, unseen in ((False, 0.05, 0.05), (True, 0.12, 0.12)):
        chosen = [row for row in NEWER if row.experts is experts]
        assert len(chosen) == (201 if experts else 130)
        assert median(abs(row.error) for row in chosen) <= limit
        assert median(abs(row.error) for row in chosen if not row.listed) <= unseen


@pytest.mark.parametrize("precision", ["NVFP4", "MXFP8", "FP8-CS"])
def test_dense_runs_of_each_recipe_are_met(precision: str) -> None:
    """18 in NVFP4, which nobody had looked at when the terms stood, within 6 % in the median; the others within 5 %."""
    chosen = [row for row in NEWER if f" {precision}," in row.name and not row.experts]
    assert len(chosen) == {"NVFP4": 18, "MXFP8": 31, "FP8-CS": 50}[precision]
    assert median(abs(row.error) for row in chosen) <= (0.06 if precision == "NVFP4" else 0.05)


def test_what_was_stated_blindly_held_rows_that_nobody_had_looked_at() -> None:
    """Ranges made before hold eight in ten of llm-foundry's other rows; that of a few runs is not narrow."""
    before = {"a100-80gb": (0.929, 1.403), "h100-80gb": (0.996, 1.198), "a100-40gb": (0.940, 1.168)}
    rows = [row for row in ROWS if row.file == throughput.MORE]
    inside = 0
    for row in rows:
        low, high = before[throughput.GPUS[row.gpu]]
        inside += low <= float(row.columns["blind_tokens_per_second_per_gpu"]) / row.published <= high
    assert (inside, len(rows)) == (146, 168)
