"""Budgets of models under FSDP2, HSDP, DDP and tensor parallelism: a rank's real bytes, its gradients to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks import Launches, run_ranks
from support.wrapped_steps import (
    FIRST,
    FIRST_MORE,
    FOUR,
    MORE,
    OWN,
    REFERENCE,
    TWO,
    four_ranks,
    two_ranks,
    two_ranks_more,
)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), two_ranks)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), four_ranks)


def holds(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["same"]
        assert rank["said"] == []
        assert rank["measured"] <= rank["budget"]
        assert rank["measured"] == pytest.approx(rank["predicted"], abs=256)
    assert len({rank["hash"] for rank in found}) == 1


@pytest.mark.parametrize("how", TWO)
def test_two_ranks_keep_a_budget(two: Launches, how: str) -> None:
    holds([rank[how] for rank in two[2]])


@pytest.mark.slow
def test_two_ranks_keep_a_budget_under_other_wrappers() -> None:
    found = run_ranks(two_ranks_more, 2)
    for how in MORE:
        holds([rank[how] for rank in found])
    for how in (*FIRST, *FIRST_MORE):
        agrees([rank[how] for rank in found])
    assert len({found[0][how]["predicted"] for how in FIRST_MORE}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", FOUR)
def test_four_ranks_keep_a_budget(four: Launches, how: str) -> None:
    holds([rank[how] for rank in four[4]])


def test_a_sharded_reference_is_planned_beside(two: Launches) -> None:
    found = [rank[REFERENCE] for rank in two[2]]
    for rank in found:
        assert rank["same"]
        assert rank["measured"] <= rank["budget"]
        assert rank["measured"] == pytest.approx(rank["predicted"], rel=0.03)
    assert len({rank["hash"] for rank in found}) == 1


def test_parameters_that_another_rank_uses_are_counted(two: Launches) -> None:
    for rank in (rank[OWN] for rank in two[2]):
        assert rank["same"]
        assert rank["measured"] <= rank["budget"]
        assert rank["measured"] == pytest.approx(rank["predicted"], abs=256)


def agrees(found: list[dict[str, Any]]) -> None:
    assert all(rank["same"] for rank in found)
    assert len({(rank["predicted"], rank["hash"]) for rank in found}) == 1


@pytest.mark.parametrize("how", FIRST)
def test_ranks_whose_first_batches_differ_have_one_plan(two: Launches, how: str) -> None:
    agrees([rank[how] for rank in two[2]])


@pytest.mark.slow
def test_four_ranks_none_of_whose_first_batches_covers_another_have_one_plan(four: Launches) -> None:
    agrees([rank[FIRST[0]] for rank in four[4]])
