"""`layout.cp`: the curve of one process on ranks that share sequences, budgets that hold, plans that change no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvalSection,
    LayoutSection,
    LogSection,
    ModelSection,
    PlanSection,
    TrainRecipe,
)
from support.ranks import run_ranks

GPT = {"architecture": "gpt", "layers": 3, "hidden": 64, "heads": 4}
LLAMA = {"architecture": "llama", "layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2}
HUB = {**LLAMA, "code": "huggingface"}
NEWLINE = 10
TWO: dict[str, dict[str, Any]] = {"llama": {"model": LLAMA, "layout": {"cp": 2}, "share": 0.8}}
MORE: dict[str, dict[str, Any]] = {
    "hub, documents": {"model": HUB, "layout": {"cp": 2}, "document_end": NEWLINE, "policy": "full"},
    "gpt": {"model": GPT, "layout": {"cp": 2}, "share": 0.85},
    "gpt, documents": {"model": GPT, "layout": {"cp": 2}, "document_end": NEWLINE, "share": 0.85},
    "hub, documents, zero 3": {"model": HUB, "layout": {"cp": 2, "zero": 3}, "document_end": NEWLINE, "share": 0.85},
    "hub, eager, zero 2": {"model": {**HUB, "attention": "eager"}, "layout": {"cp": 2, "zero": 2}, "share": 0.85},
    "gpt2": {"model": {**GPT, "code": "huggingface"}, "layout": {"cp": 2}, "share": 0.85},
    "dropout": {"model": {**GPT, "dropout": 0.1}, "layout": {"cp": 2}, "share": 0.85},
    "policy": {"model": LLAMA, "layout": {"cp": 2}, "policy": "full"},
}
FOUR: dict[str, dict[str, Any]] = {
    "cp 4": {"model": LLAMA, "layout": {"cp": 4}, "share": 0.9},
    "dp, zero 3": {"model": LLAMA, "layout": {"dp": 2, "cp": 2, "zero": 3}, "share": 0.75},
    "replicas": {"model": GPT, "layout": {"dp": 2, "cp": 2, "zero": 2, "shards": 2}, "share": 0.75},
    "tp": {"model": LLAMA, "layout": {"tp": 2, "cp": 2}, "share": 0.85},
    "tp without sp, dropout": {
        "model": {**GPT, "dropout": 0.1},
        "layout": {"tp": 2, "sp": False, "cp": 2},
        "share": 0.8,
    },
    "tp, hub, zero 3": {"model": HUB, "layout": {"tp": 2, "cp": 2, "zero": 3}, "share": 0.75},
}


def recipe(folder: Path, case: dict[str, Any], **more: Any) -> TrainRecipe:
    data = DataSection(document_end=case.get("document_end"))
    return TrainRecipe(
        model=ModelSection(**case["model"]),
        steps=more.pop("steps", 2),
        layout=LayoutSection(**more.pop("layout", case["layout"])),
        batch=BatchSection(global_batch=4, micro_batch=2, seq=128),
        data=data,
        eval=EvalSection(data=data, batches=1),
        log=LogSection(folder=str(folder)),
        **more,
    )


def curve(folder: Path) -> list[float]:
    """Losses and norms of gradients of all steps, and the losses of evaluations."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    steps = [value for e in lines if e["event"] == "step" for value in (e["loss"], e["grad_norm"])]
    return steps + [e["loss"] for e in lines if e["event"] == "eval"]


def budgets(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: each case without a plan, and under a share of the peak that it had."""
    out = {}
    for number, (name, case) in enumerate(args["cases"].items()):
        folders = [Path(args["folder"]) / f"{number}-{kind}" for kind in ("plain", "planned")]
        plain = train(recipe(folders[0], case))
        peak = plain.second_step_peaks.peak_bytes  # type: ignore[union-attr]
        budget = int(case.get("share", 1) * peak)
        section = PlanSection(policy=case["policy"]) if "policy" in case else PlanSection(budget=f"{budget}B")
        planned = train(recipe(folders[1], case, plan=section))
        out[name] = {
            "plain": peak,
            "budget": budget,
            "predicted": planned.predicted_peak_bytes,
            "measured": planned.second_step_peaks.peak_bytes,  # type: ignore[union-attr]
            "curves": [curve(folder) for folder in folders],
        }
    return out


def check(found: dict[str, Any], cases: dict[str, Any], folder: Path) -> None:
    for name, case in found.items():
        assert case["curves"][0] == case["curves"][1], f"{name}: a plan changes no bit"
        if "policy" in cases[name]:
            assert case["measured"] < case["plain"], f"{name}: {case}"
        else:
            assert case["measured"] <= case["predicted"] <= case["budget"], f"{name}: {case}"
            assert case["measured"] >= 0.97 * case["predicted"], f"{name}: {case}"
            assert case["predicted"] >= 0.85 * case["budget"], f"{name}: what the budget allows is used: {case}"
        if not cases[name]["model"].get("dropout"):
            train(recipe(folder / name, cases[name], layout={}))
            assert case["curves"][0] == pytest.approx(curve(folder / name), rel=2e-6), name


def kept_in_two(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: the first step of three, saved."""
    folder = Path(args["folder"])
    made = recipe(folder / "shared", TWO["llama"], checkpoint=CheckpointSection(folder=str(folder / "ck")), steps=1)
    train(made)
    return {}


def quick(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: what one launch can show."""
    return {"budgets": budgets(args), "kept": kept_in_two(args)}


def test_two_ranks_share_sequences(tmp_path: Path) -> None:
    ranks = run_ranks(quick, 2, {"folder": str(tmp_path), "cases": TWO})
    for found in ranks:
        check(found["budgets"], TWO, tmp_path / "alone")
    goes_on = recipe(
        tmp_path / "on", TWO["llama"], layout={}, checkpoint=CheckpointSection(folder=str(tmp_path / "ck")), steps=2
    )
    result = train(goes_on, must_resume=True)
    assert result.resumed_step == 1
    shared = ranks[0]["budgets"]["llama"]["curves"][0]
    assert curve(tmp_path / "on")[:2] == pytest.approx(shared[2:4], rel=2e-6)


@pytest.mark.slow
def test_two_ranks_with_other_models(tmp_path: Path) -> None:
    check(run_ranks(budgets, 2, {"folder": str(tmp_path), "cases": MORE})[0], MORE, tmp_path / "alone")


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    check(run_ranks(budgets, 4, {"folder": str(tmp_path), "cases": FOUR})[0], FOUR, tmp_path / "alone")


def test_what_a_recipe_may_not_ask_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="context parallelism and pipelines exclude each other"):
        LayoutSection(cp=2, pp=2)
    with pytest.raises(UsageError, match="expected a multiple of 2 x cp = 6"):
        recipe(tmp_path, TWO["llama"], layout={"cp": 3})
    with pytest.raises(UsageError, match="dp x cp x tp x pp = 1 x 2 x 1 x 1 = 2, but there is 1 rank"):
        train(recipe(tmp_path, TWO["llama"]))
    with pytest.raises(UsageError, match="with tp 1, cp 2 and pp 1"):
        recipe(tmp_path, {"model": {**LLAMA, "compile": "blocks"}, "layout": {"cp": 2}})
