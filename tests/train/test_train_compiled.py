"""Runs whose blocks are compiled: the budget holds, losses do not depend on it, and ranks keep to it too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.solve.plan import Plan
from jettison.train.recipe import BatchSection, LayoutSection, LogSection, ModelSection, PlanSection, TrainRecipe
from support.compiled_sending import slow_to_compute
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:The .grad attribute of a Tensor:UserWarning",  # which dynamo looks at
    ),
]


def recipe(folder: Path, zero: int = 0) -> TrainRecipe:
    return TrainRecipe(
        steps=2,
        seed=1,
        model=ModelSection(architecture="gpt", layers=3, hidden=64, heads=4, dropout=0.1, compile="blocks"),
        batch=BatchSection(global_batch=8, micro_batch=4, seq=64),
        layout=LayoutSection(zero=zero),
        log=LogSection(folder=str(folder)),
    )


def kept_budget(args: dict[str, Any]) -> dict[str, Any]:
    """The run without a plan, and under a budget between the smallest and its own peak."""
    made = recipe(Path(args["folder"]), args.get("zero", 0))
    plain = train(made)
    assert plain.second_step_peaks is not None
    budget = int(args["share"] * plain.second_step_peaks.peak_bytes)
    if "gpu" in args:
        section = PlanSection(budget=f"{budget}B", offload=True, host_budget="16MiB", gpu=args["gpu"])
        with slow_to_compute():
            planned = train(replace(made, plan=section))
    else:
        planned = train(replace(made, plan=PlanSection(budget=f"{budget}B")))
    assert planned.second_step_peaks is not None and planned.predicted_peak_bytes is not None
    return {
        "budget": budget,
        "predicted": planned.predicted_peak_bytes,
        "measured": planned.second_step_peaks.peak_bytes,
        "losses": [[run.first_loss, run.last_loss] for run in (plain, planned)],
    }


def check(found: dict[str, Any]) -> None:
    assert found["measured"] <= found["budget"]
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.03)
    assert found["losses"][0] == found["losses"][1]


def sends(folder: Path) -> bool:
    """Whether the plan of a run has something on the host."""
    made = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
    return 0 < made.predicted.host_bytes == sum(entry.offloaded_bytes for entry in made.layers)


@pytest.mark.slow  # a GPT with dropout, compiled in seven ways
def test_a_run_keeps_its_budget_with_the_losses_of_one_without(tmp_path: Path) -> None:
    check(kept_budget({"folder": str(tmp_path), "share": 0.85}))


@pytest.mark.slow  # the same, and once more
def test_a_run_sends_what_compiled_blocks_save(tmp_path: Path, slow_memory: Path) -> None:
    check(kept_budget({"folder": str(tmp_path), "share": 0.85, "gpu": str(slow_memory)}))
    assert sends(tmp_path)


@pytest.mark.slow  # two launches of two ranks
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_send_what_compiled_blocks_save(tmp_path: Path, slow_memory: Path, zero: int) -> None:
    args = {"folder": str(tmp_path), "share": 0.85, "zero": zero, "gpu": str(slow_memory)}
    for found in run_ranks(kept_budget, 2, args):
        check(found)
    assert sends(tmp_path)


@pytest.mark.slow  # two launches of two ranks
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_keep_a_budget(tmp_path: Path, zero: int) -> None:
    for found in run_ranks(kept_budget, 2, {"folder": str(tmp_path), "share": 0.85, "zero": zero}):
        check(found)


@pytest.mark.parametrize("layout", [LayoutSection(tp=2), LayoutSection(cp=2), LayoutSection(pp=2)])
def test_layouts_that_cut_blocks_or_schedules_are_refused(tmp_path: Path, layout: LayoutSection) -> None:
    with pytest.raises(UsageError, match=r'model\.compile: got "blocks" with tp ., cp . and pp .;.*expected 1 of each'):
        replace(recipe(tmp_path), layout=layout)
