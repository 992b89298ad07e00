"""The plan as a file: round trip, hash, and what is said of a wrong one."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.errors import PlanMismatch, UsageError
from jettison.solve.plan import LayerPlan, Plan, PolicyName, Predicted, SolverReport


def layer_plan(layer: str, kept: tuple[int, ...] = (0, 3)) -> LayerPlan:
    return LayerPlan(
        layer=layer,
        policy=PolicyName.PER_TENSOR,
        kept_bytes=4096,
        recompute_flops=10**6,
        digest="0123456789abcdef",
        option="keep-4096",
        kept=kept,
        price=1.5e-12,
    )


def plan() -> Plan:
    return Plan(
        budget_bytes=8 << 30,
        minimum_budget_bytes=3 << 30,
        predicted=Predicted(peak_bytes=8_000_000_000, step_seconds=0.1 + 0.2, overhead_fraction=1 / 3),
        solver=SolverReport(gap=0.001, seconds=0.25),
        layers=tuple(layer_plan(f"model.layers.{i}") for i in range(3)),
        root=layer_plan(""),
        segments=(("model.layers.1", "model.layers.2"),),
        model="fingerprint",
        torch_version="2.13.0",
    )


def test_the_document_has_the_keys_of_the_contract() -> None:
    document = json.loads(plan().to_json())
    expected = {"schema", "feasible", "budget_bytes", "minimum_budget_bytes", "predicted", "solver", "layers", "hash"}
    assert expected <= set(document)
    assert (document["schema"], document["feasible"]) == ("jettison.plan/1", True)
    known = {"peak_bytes", "step_seconds", "overhead_fraction", "host_bytes", "stalled_seconds", "composed"}
    assert set(document["predicted"]) == known
    assert set(document["solver"]) == {"gap", "seconds"}
    expected = {"layer", "policy", "kept_bytes", "offloaded_bytes", "recompute_flops"}
    assert expected <= set(document["layers"][0])
    assert document["layers"][0]["policy"] == "per-tensor"


def test_round_trip() -> None:
    again = Plan.from_json(plan().to_json())
    assert again == plan()
    assert again.hash == plan().hash
    assert again.to_json() == plan().to_json()


def test_the_former_name_of_a_policy_is_read() -> None:
    text = plan().to_json()
    former = text.replace('"per-tensor"', '"mixed"')
    assert former != text
    assert Plan.from_json(former) == plan()  # and so is its hash, which covers the former name


@given(st.text(), st.lists(st.integers(0, 10**6), unique=True), st.floats(0, 1e300), st.integers(0, 10**30))
def test_round_trip_of_anything(name: str, kept: list[int], price: float, flops: int) -> None:
    entry = dataclasses.replace(
        layer_plan(f"layer {name}", tuple(sorted(kept))), price=price, recompute_flops=flops, policy=PolicyName.OFFLOAD
    )
    one = dataclasses.replace(plan(), layers=(entry,), segments=(), model=name)
    assert Plan.from_json(one.to_json()) == one


def test_unknown_keys_are_ignored() -> None:
    document = json.loads(plan().to_json()) | {"note": "written by a later version"}
    assert Plan.from_json(json.dumps(document)) == plan()


def test_a_plan_of_an_older_file_has_former_keys_and_its_hash() -> None:
    made = dataclasses.replace(plan(), gradients_preallocated=True)
    document = json.loads(made.to_json())
    assert document.pop("gradients_preallocated") is document["gradients_held"] is True
    assert Plan.from_json(json.dumps(document)) == made
    assert made.hash.startswith("f63e233c6e9df040")


def test_the_hash_covers_decisions_and_not_timings() -> None:
    same = dataclasses.replace(
        plan(),
        solver=SolverReport(gap=0.5, seconds=9.0),
        predicted=dataclasses.replace(plan().predicted, step_seconds=7.0, overhead_fraction=0.0),
        root=dataclasses.replace(layer_plan(""), price=3.0),
    )
    assert same.hash == plan().hash
    others = [
        dataclasses.replace(plan(), budget_bytes=(8 << 30) + 1),
        dataclasses.replace(plan(), model="another"),
        dataclasses.replace(plan(), segments=()),
        dataclasses.replace(plan(), root=layer_plan("", kept=(0,))),
        dataclasses.replace(plan(), predicted=Predicted(peak_bytes=1)),
    ]
    assert len({plan().hash, *(other.hash for other in others)}) == 1 + len(others)


def change(edit: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(plan().to_json())
    edit(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["layers"][0].update(kept=[0]),
        lambda d: d["layers"].pop(0),
        lambda d: d["predicted"].update(peak_bytes=1),
        lambda d: d.update(segments=[]),
        lambda d: d["root"].update(digest="f" * 16),
        lambda d: d.update(hash="0" * 64),
    ],
)
def test_a_changed_plan_is_refused(edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(PlanMismatch, match="changed after it was written"):
        Plan.from_json(change(edit))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "the document"),
        ("[]", "the document"),
        ("{", "the document"),
        (change(lambda d: d.pop("hash")), "hash"),
        (change(lambda d: d.update(schema="jettison.plan/9")), "schema"),
        (change(lambda d: d.update(feasible=False)), "feasible"),
        (change(lambda d: d.update(budget_bytes="8GiB")), "budget_bytes"),
        (change(lambda d: d.update(budget_bytes=1)), "above the budget"),
        (change(lambda d: d["layers"][1].update(policy="some")), "layers.1.policy"),
        (change(lambda d: d["layers"][1].update(kept=[3, 0])), "ascending order"),
        (change(lambda d: d["layers"][1].update(kept_bytes=-1)), "kept_bytes is -1"),
        (change(lambda d: d["layers"][1].update(layer="model.layers.0")), "distinct"),
        (change(lambda d: d["root"].update(layer="root")), "root's layer name"),
        (change(lambda d: d.update(segments=[["model.layers.2", "model.layers.1"]])), "segment"),
        (change(lambda d: d["predicted"].pop("peak_bytes")), "predicted.peak_bytes"),
    ],
)
def test_a_malformed_plan_is_named(text: str, where: str) -> None:
    with pytest.raises(UsageError, match=r"not a jettison\.plan/1 document") as error:
        Plan.from_json(text)
    assert where in str(error.value)


def test_a_plan_is_for_one_model() -> None:
    digests = {entry.layer: entry.digest for entry in (plan().root, *plan().layers)}
    plan().require(model="fingerprint", digests=digests)
    with pytest.raises(PlanMismatch, match=r"model.layers.1 has program x"):
        plan().require(model="fingerprint", digests=digests | {"model.layers.1": "x"})
    with pytest.raises(PlanMismatch, match="only in the model"):
        plan().require(model="fingerprint", digests=digests | {"model.layers.7": "x"})
    with pytest.raises(PlanMismatch, match="fingerprint is other"):
        plan().require(model="other", digests=digests)
