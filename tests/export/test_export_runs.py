"""Plans with runs of layers that hold one input together, in the words of trainers that have runs, and of others."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import jettison
from jettison.cli.plan import PlanFlags, plan, remade
from jettison.core.units import format_bytes
from jettison.frameworks.export import Exported, losses
from jettison.frameworks.megatron.write import _uniform
from jettison.frameworks.nearest_policy import DescribedPricer, subject_of
from jettison.request.options import RunRequest

LONG = {"tp": 8, "seq": 131072, "kernels": "megatron"}
INPUT = 131072 * 4096 * 2 // 8  # of a layer on one rank, under sequence parallelism


@cache
def exported(to: str, budget: str, **asked: Any) -> Exported:
    made = plan("llama3-8b", RunRequest(**asked), PlanFlags(budget=budget)).document()
    assert made["segments"]
    found = jettison.export_plan(made, to=to)
    assert [layer["plan_kept_bytes"] for layer in found.document()["layers"]] == [
        layer["kept_bytes"] for layer in made["layers"]
    ]
    return found


def settings(found: Exported) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(found.files["transformer_config.json"])
    return fields


def test_what_megatron_says_of_the_plans_own_runs_is_not_lost() -> None:
    """Four runs of eight layers, as the smallest budget has them: what is lost is ZeRO alone."""
    found = exported("megatron", "61.6GiB", dp=8, zero=3, seq=32768)
    assert settings(found)["recompute_method"] == "uniform" and settings(found)["recompute_num_layers"] == 8
    assert len(found.subject.segments) == 4
    (lost,) = found.lost
    assert "zero 3" in lost
    assert found.cost.peak_bytes == found.plan_cost.peak_bytes
    assert found.cost.layer_bytes == 4 * 32768 * 4096 * 2 == sum(policy.kept_bytes for policy in found.policies)


def test_other_runs_are_counted_beside_the_plans() -> None:
    found = exported("megatron", "27.9GiB", **LONG)
    assert settings(found)["recompute_num_layers"] == 5  # of 32: the last run has two
    assert [policy.kept_bytes for policy in found.policies] == [INPUT * (i % 5 == 0) for i in range(32)]
    (lost,) = found.lost
    assert lost == (
        "7 runs of layers share one input in the plan (3.12 GiB less than one a layer); here 7 runs of layers share "
        "one, others, 3.12 GiB less"
    )
    assert found.cost.layer_bytes == found.plan_cost.layer_bytes == 7 * INPUT
    assert found.cost.recompute_flops == found.plan_cost.recompute_flops


@pytest.mark.parametrize("to", ["torchtitan", "torch", "transformers"])
def test_who_has_no_runs_says_so(to: str) -> None:
    found = exported(to, "31GiB", **LONG)
    assert found.lost[0] == (
        "4 runs of layers share one input in the plan (1.75 GiB less than one a layer); here every layer holds its own"
    )
    assert not any("full in the plan, full here" in lost for lost in found.lost)
    shared = [bool(policy.decision.shared_bytes) for policy in found.policies]
    assert sum(shared) * INPUT == 14 * INPUT  # 18 layers in four runs


def test_runs_that_the_plan_does_not_have_are_said_as_well() -> None:
    made = plan("gpt-22b", RunRequest(tp=8, micro_batch=4, kernels="megatron"), PlanFlags(budget="55GiB")).document()
    pricer = DescribedPricer(remade(made["made_by"]).choice)
    subject = subject_of(pricer.choice, made, "gpt-22b")
    lost = losses(subject, _uniform(subject, pricer, 7).policies, "megatron")
    less = format_bytes((48 - 7) * 2 * 2048 * 4 * 6144 // 8)
    assert lost[0] == f"every layer holds its own input in the plan; here 7 runs of layers share one, {less} less"


def test_a_brief_counts_what_runs_hold() -> None:
    text = exported("brief", "27.9GiB", **LONG).files["brief.md"]
    assert "| layers.4 to layers.6 (3) | full | 0 B | 0 B |" in text
    assert "Segments of layers that keep one input together: layers.0 to layers.2; layers.3 to layers.7;" in text
