"""Programs that got wrong gradients without a word, and more of their kinds, next to their twins without a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from silent import ALL, POLICIES
from silent.harness import judge
from silent.kit import Case
from support.patience import PATIENCE


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    """Sums over threads have no fixed order. (`one_thread` also collects garbage: that takes longer than a case.)"""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QUICK = [c for c in ALL.values() if not c.slow and not c.alone]


def named(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name)


def holds(case: Case, policy: str) -> None:
    verdict = judge(case.make, policy)
    assert verdict.fair, "\n".join((*verdict.notes, *(f"warned: {w}" for w in verdict.warned)))
    assert verdict.outcome == "equal" or not case.works, f"an ordinary program is {verdict.outcome}: {verdict.notes}"


@named(QUICK)
def test_equal_or_stopped(case: Case) -> None:
    """Losses, gradients, buffers, Python state and random streams to the bit, or an error before the optimizer."""
    holds(case, "full")


@named([c for c in QUICK if c.make.__module__ in ("silent.aliasing", "silent.later", "silent.outside")])
def test_equal_or_stopped_where_some_is_kept(case: Case) -> None:
    """What is kept may share its memory with what is computed again."""
    holds(case, "share:75")


UNDER_A_BUDGET = (
    "blocks_move_a_number_that_the_root_reads_around_them",
    "list_of_the_batch_that_is_popped",
    "value_that_a_thread_reads",
)


@pytest.mark.parametrize("name", UNDER_A_BUDGET)
def test_state_that_moves_while_the_root_computes(name: str) -> None:
    """Under a budget the root recomputes as well, and the step is dry-run."""
    holds(ALL[name], "budget:100")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "full"])
@named(QUICK)
def test_equal_or_stopped_under_other_plans(case: Case, policy: str) -> None:
    holds(case, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@named([c for c in ALL.values() if c.slow])
def test_equal_or_stopped_slowly(case: Case, policy: str) -> None:
    holds(case, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "budget:100"])
@named([c for c in ALL.values() if c.alone])
def test_the_process_survives(case: Case, policy: str) -> None:
    """These may end the process that runs them."""
    here = Path(__file__).parents[1]
    paths = os.pathsep.join([str(here), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "silent", case.name, policy],
        capture_output=True,
        text=True,
        cwd=here,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-500:]}"
    assert not done.stdout.startswith("SILENT"), done.stdout


@pytest.mark.slow
@named(QUICK)
def test_the_judge_finds_nothing_without_a_plan(case: Case) -> None:
    """Torch itself does the same thing twice: what the judge finds elsewhere is not noise."""
    verdict = judge(case.make, None)
    assert verdict.outcome == "equal", verdict.notes
