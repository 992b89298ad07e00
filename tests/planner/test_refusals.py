"""Budgets that do not fit one of several ranks: all refuse in the same words, and find a plan when they ask again."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks import Launches
from support.refusals import two_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return Launches(tmp_path_factory.getbasetemp(), two_ranks)[2]


@pytest.mark.parametrize("how", ["sharded", "sharded, the first", "replicas"])
def test_a_budget_that_is_too_small_on_one_rank_is_refused_on_both(on_two: list[dict[str, Any]], how: str) -> None:
    one, other = (rank[how] for rank in on_two)
    assert one == other
    assert one["said"].startswith("no plan fits a budget of 97.66 KiB (100000B); the smallest feasible budget is ")
    assert 100_000 < one["budget"] < 3_000_000


@pytest.mark.parametrize("how", ["smaller, sharded", "smaller, replicas"])
def test_the_smallest_of_the_ranks_budgets_is_kept(on_two: list[dict[str, Any]], how: str) -> None:
    one, other = (rank[how] for rank in on_two)
    assert one["budget"] == other["budget"] == 2_400_000
    assert one["hash"] == other["hash"]
    assert max(one["measured"], other["measured"]) <= 2_400_000
    assert one["words"] == "2.29 MiB, the smallest of all ranks'; here 2.77 MiB"
    assert other["words"] == ""


def test_replicas_with_other_batches_plan_for_themselves(on_two: list[dict[str, Any]]) -> None:
    one, other = (rank["other batches"] for rank in on_two)
    assert one["measured"] != other["measured"]
    for rank in (one, other):
        assert rank["same"]
        assert rank["measured"] <= 2_600_000
        assert rank["measured"] == pytest.approx(rank["predicted"], abs=256)


def test_a_stage_that_does_not_fit_stops_all_stages_before_their_first_step(on_two: list[dict[str, Any]]) -> None:
    one, other = (rank["a stage"] for rank in on_two)
    assert one["said"] == other["said"]
    assert "This is what rank 1 says." in one["said"]
    assert one["budget"] == other["budget"] > 700_000
    assert one["gradients"] and other["gradients"]


def test_what_is_refused_before_planning_is_told(on_two: list[dict[str, Any]]) -> None:
    one, other = (rank["before planning"] for rank in on_two)
    assert other["wrong"].startswith("UsageError: the SGD holds no parameter of this model")
    assert one["wrong"].startswith(
        "PlanMismatch: rank 1 has no plan, so none of ranks 0, 1 starts: UsageError: the SGD"
    )
    assert one["right"] == other["right"] == ""
