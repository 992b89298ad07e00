"""A budget on every layout: what a rank's step peaks at is what was dry-run, and below the budget, on real ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from benchmarks.train_two_ranks import RECIPE, TOLERANCE, measure

from jettison.cli.train import train
from jettison.core.errors import Infeasible, PlanMismatch, UsageError
from jettison.core.parse_units import parse_bytes
from jettison.train.recipe import (
    BatchSection,
    LayoutSection,
    LogSection,
    ModelSection,
    PlanSection,
    TrainRecipe,
    read_recipe,
)
from support.ranks import run_ranks

GPT = ModelSection(architecture="gpt", layers=4, hidden=64, heads=4, dropout=0.1)
LLAMA = ModelSection(architecture="llama", layers=3, hidden=64, heads=4, kv_heads=2, code="huggingface")
TWO: dict[str, dict[str, Any]] = {"zero 2, accumulated": {"layout": {"zero": 2}, "batch": (12, 2)}}
MORE: dict[str, dict[str, Any]] = {
    "tp": {"layout": {"tp": 2}, "llama": True, "share": 0.75},  # also in test_train_ranks
    "ddp, accumulated": {"batch": (12, 2)},
    "zero 3": {"layout": {"zero": 3}},
    "zero 3, bf16": {"layout": {"zero": 3}, "precision": "bf16", "llama": True, "share": 0.75},
}
PIPELINES: dict[str, dict[str, Any]] = {
    "gpipe": {"layout": {"pp": 2, "schedule": "gpipe"}},
    "1f1b": {"layout": {"pp": 2}},
    "1f1b, autocast": {"layout": {"pp": 2}, "precision": "bf16-autocast"},
    "zero-bubble": {"layout": {"pp": 2, "schedule": "zero-bubble"}, "share": 0.85},
}
LONGER: dict[str, dict[str, Any]] = {
    "gpipe": {"layout": {"pp": 2, "schedule": "gpipe"}, "batch": (20, 2)},
    "1f1b": {"layout": {"pp": 2}, "batch": (20, 2)},
    "interleaved": {"layout": {"pp": 2, "virtual_stages": 2}},
    "zero-bubble": {"layout": {"pp": 2, "schedule": "zero-bubble"}, "batch": (24, 2), "share": 0.9},
    "zero-bubble, interleaved": {"layout": {"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble"}, "share": 0.9},
}
FOUR: dict[str, dict[str, Any]] = {
    "replicas, zero 2, bf16": {"layout": {"zero": 2, "shards": 2}, "precision": "bf16"},
    "replicas, zero 3, accumulated": {"layout": {"zero": 3, "shards": 2}, "batch": (16, 2)},
    "tp, zero 3": {"layout": {"tp": 2, "zero": 3}},
    "tp, replicas": {"layout": {"tp": 2, "zero": 3, "shards": 1}},
    "tp, gpipe, autocast": {"layout": {"tp": 2, "pp": 2, "schedule": "gpipe"}, "precision": "bf16-autocast"},
    "zero-bubble, zero 2": {"layout": {"pp": 2, "zero": 2, "schedule": "zero-bubble"}, "share": 0.9},
}


def recipe(folder: Path, case: dict[str, Any]) -> TrainRecipe:
    global_batch, micro_batch = case.get("batch", (8, 2))
    return TrainRecipe(
        model=LLAMA if case.get("llama") else GPT,
        steps=2,
        layout=LayoutSection(**case.get("layout", {})),
        precision=case.get("precision", "fp32"),
        batch=BatchSection(global_batch=global_batch, micro_batch=micro_batch, seq=128),
        log=LogSection(folder=str(folder)),
    )


def budgets(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: each case without a plan, and under a share of the peak that it had."""
    out = {}
    for number, (name, case) in enumerate(args["cases"].items()):
        made = recipe(Path(args["folder"]) / str(number), case)
        plain = train(made)
        budget = int(case.get("share", 0.65) * plain.second_step_peaks.peak_bytes)  # type: ignore[union-attr]
        planned = train(replace(made, plan=PlanSection(budget=f"{budget}B")))
        out[name] = {
            "budget": budget,
            "predicted": planned.predicted_peak_bytes,
            "measured": planned.second_step_peaks.peak_bytes,  # type: ignore[union-attr]
            "losses": [[run.first_loss, run.last_loss] for run in (plain, planned)],
        }
    return out


def check(found: dict[str, Any]) -> None:
    for name, case in found.items():
        assert case["measured"] <= case["budget"], f"{name}: {case}"
        assert case["predicted"] <= case["budget"], f"{name}: {case}"
        assert 0.98 <= case["predicted"] / case["measured"] <= 1.1, f"{name}: {case}"
        assert case["predicted"] >= 0.85 * case["budget"], f"{name}: what the budget allows is used: {case}"
        assert case["losses"][0] == case["losses"][1], f"{name}: a plan changes no bit"


def quick(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: what one launch can show in less than a minute."""
    return {"budgets": budgets(args), "another recipe": another_recipe(args)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(quick, 2, {"folder": str(tmp_path_factory.mktemp("two")), "cases": TWO})


def test_two_ranks(ranks: list[dict[str, Any]]) -> None:
    check(ranks[0]["budgets"])


@pytest.mark.slow
@pytest.mark.parametrize("cases", [MORE, PIPELINES, LONGER], ids=["more", "pipelines", "longer"])
def test_two_ranks_under_other_layouts(tmp_path: Path, cases: dict[str, Any]) -> None:
    check(run_ranks(budgets, 2, {"folder": str(tmp_path), "cases": cases})[0])


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    found = run_ranks(budgets, 4, {"folder": str(tmp_path), "cases": FOUR})
    check(found[0])


def another_recipe(args: dict[str, Any]) -> dict[str, str]:
    """On every rank: what is said where rank 1 alone has no plan, or another one."""
    made = recipe(Path(args["folder"]) / "another", {"layout": {"zero": 3}})
    found = {}
    for name, plans in (
        ("none", (PlanSection(policy="full"), PlanSection())),
        ("other", (PlanSection(policy="full"), PlanSection(budget="2GiB"))),
    ):
        with pytest.raises(UsageError) as error:
            train(replace(made, plan=plans[int(os.environ["RANK"])]))
        found[name] = str(error.value)
    return found


def test_ranks_with_different_recipes_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in (rank["another recipe"] for rank in ranks):
        assert rank["none"].startswith("plan.policy: rank 1 was given None and rank 0 'full'")
        assert rank["other"].startswith("plan.budget: rank 1 was given '2GiB' and rank 0 None")


def given_again(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: a pipeline under a budget, and under the plans that it left; what is said of one file alone."""
    folder = Path(args["folder"])
    made = recipe(folder / "first", args["case"])
    first = train(replace(made, plan=PlanSection(budget=args["budget"])))
    left = sorted(path.name for path in (folder / "first").glob("plan*.json"))
    elsewhere = replace(made, log=LogSection(folder=str(folder / "again")))
    again = train(replace(elsewhere, plan=PlanSection(file=str(folder / "first"))))
    said = []
    for wrong in (folder / "first" / "plan-0.json", folder / "nowhere"):
        with pytest.raises(UsageError) as error:
            train(replace(elsewhere, plan=PlanSection(file=str(wrong))))
        said.append(str(error.value))
    other = replace(elsewhere, batch=replace(made.batch, seq=64), plan=PlanSection(file=str(folder / "first")))
    with pytest.raises(PlanMismatch, match="of another model, batch or layout"):
        train(other)
    runs = [
        [run.predicted_peak_bytes, run.second_step_peaks.peak_bytes, run.first_loss, run.last_loss]  # type: ignore[union-attr]
        for run in (first, again)
    ]
    return {"left": left, "runs": runs, "said": said}


@pytest.mark.slow
def test_the_plans_of_a_pipeline_can_be_given_again(tmp_path: Path) -> None:
    case = {"layout": {"pp": 2, "virtual_stages": 2}}
    for rank in run_ranks(given_again, 2, {"folder": str(tmp_path), "case": case, "budget": "7500kB"}):
        assert rank["left"] == [f"plan-{number}.json" for number in range(4)]
        assert rank["runs"][0] == rank["runs"][1]
        assert "every stage of a pipeline has a plan of its own" in rank["said"][0]
        assert "cannot be read" in rank["said"][1]


def too_little(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: what is said of a budget that no stage can keep to, and whether what is said is enough."""
    made = recipe(Path(args["folder"]), PIPELINES["1f1b"])
    with pytest.raises(Infeasible) as error:
        train(replace(made, plan=PlanSection(budget="10kB")))
    enough = error.value.minimum_budget_bytes
    result = train(replace(made, plan=PlanSection(budget=f"{enough}B")))
    return {"said": str(error.value), "enough": enough, "measured": result.second_step_peaks.peak_bytes}  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_the_neediest_stage_needs_is_said(tmp_path: Path) -> None:
    one, other = run_ranks(too_little, 2, {"folder": str(tmp_path)})
    assert one == other
    assert one["measured"] <= one["enough"] and "Stage 1 of the pipeline needs this" in one["said"]
    assert {file.name for file in tmp_path.glob("*.json*")} == {"log.jsonl", "plan-0.json", "plan-1.json"}


def two_ranks_recipe(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: the peaks of the benchmark's ways that the README names."""
    found = measure(2, Path(args["folder"]) / "benchmark", ("stock", "ours-budget"))
    return {way: [one["peak_bytes"], one["losses"]] for way, one in found.items()}


@pytest.mark.slow
def test_the_recipe_keeps_to_a_budget_that_dtensor_alone_exceeds(tmp_path: Path) -> None:
    found = run_ranks(two_ranks_recipe, 2, {"folder": str(tmp_path)})[0]
    budget = parse_bytes(str(read_recipe(str(RECIPE)).plan.budget))
    assert found["ours-budget"][0] <= budget < found["stock"][0]
    assert found["ours-budget"][1] == pytest.approx(found["stock"][1], rel=TOLERANCE)
