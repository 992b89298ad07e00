"""Loops on two ranks whose steps change: the bits of a plain run, and on each rank the peak that was predicted."""

from __future__ import annotations

from typing import Any

import pytest

from support.loops_on_ranks import MORE, QUICK, two_ranks, two_ranks_more
from support.ranks import Launches, run_ranks


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), two_ranks)


def holds(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["same"]
        assert rank["said"] == []
        for predicted, measured in rank["peaks"]:
            assert measured <= rank["budget"]
            assert measured == pytest.approx(predicted, abs=256)


@pytest.mark.slow
@pytest.mark.parametrize("loop", QUICK)
def test_a_loop_on_two_ranks_keeps_its_budget_and_its_bits(two: Launches, loop: str) -> None:
    holds([rank[loop] for rank in two[2]])


@pytest.mark.slow
def test_more_loops_on_two_ranks_keep_their_budgets_and_their_bits() -> None:
    found = run_ranks(two_ranks_more, 2)
    for loop in MORE:
        holds([rank[loop] for rank in found])
