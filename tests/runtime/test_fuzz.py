"""Programs written by chance, next to their twins without a plan: equal to the bit, or stopped before the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from silent.harness import Verdict, judge
from support.fuzz_programs import POLICIES, Spec, simplest, specs

BUDGETS = ("budget:100", "budget:130")
LENIENT = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    """Sums over threads are not in a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def examine(programs: int, length: int, policies: tuple[str, ...] = POLICIES, share: int = 0) -> Counter[str]:
    """Judge so many programs; how often each outcome came, if all were fair. Other shares have other programs."""
    outcomes: Counter[str] = Counter()

    def judged(spec: Spec) -> Verdict:
        return judge(spec.build(), spec.policy)

    @seed(share)
    @settings(max_examples=programs, suppress_health_check=LENIENT, phases=[Phase.generate])
    @given(spec=specs(length, policies))
    def holds(spec: Spec) -> None:
        verdict = judged(spec)
        outcomes[verdict.outcome] += 1
        if not verdict.fair:
            least = simplest(spec, lambda less: not judged(less).fair)
            verdict = judged(least)
            pytest.fail("\n".join((*verdict.notes[:5], *verdict.warned[:3], "", least.source())), pytrace=False)

    holds()
    print(outcomes)
    return outcomes


CHANCE = [pytest.param(8, POLICIES, 0, id="policies")]
CHANCE += [pytest.param(2, BUDGETS, 4, id="budget")]


@pytest.mark.parametrize(("programs", "policies", "share"), CHANCE)
def test_programs_written_by_chance(programs: int, policies: tuple[str, ...], share: int) -> None:
    outcomes = examine(programs, 5, policies, share)
    assert outcomes["equal"] >= programs / 3, f"most of them do not run at all: {outcomes}"


@pytest.mark.slow
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize(("programs", "policies"), [(5000, POLICIES), (200, BUDGETS)], ids=["policies", "budget"])
def test_many_programs_written_by_chance(programs: int, policies: tuple[str, ...]) -> None:
    outcomes = examine(programs, 10, policies)
    assert outcomes["equal"] >= programs / 5, f"most of them do not run at all: {outcomes}"
