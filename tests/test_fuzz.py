"""Programs written by chance, next to their twins without a plan: equal to the bit, or stopped before the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402

from fuzz_programs import Spec, specs  # noqa: E402
from silent.harness import judge  # noqa: E402

LENIENT = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    """Sums over threads are not in a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def holds(spec: Spec) -> None:
    verdict = judge(spec.build(), spec.policy)
    assert verdict.fair, "\n".join((*verdict.notes[:5], *verdict.warned[:3], "", spec.source()))


@settings(max_examples=200, suppress_health_check=LENIENT)
@given(spec=specs(length=5))
def test_programs_written_by_chance(spec: Spec) -> None:
    holds(spec)


@settings(max_examples=8, suppress_health_check=LENIENT)
@given(spec=specs(length=5, policies=("smallest",)))
def test_programs_written_by_chance_under_a_budget(spec: Spec) -> None:
    holds(spec)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=5000, suppress_health_check=LENIENT)
@given(spec=specs(length=10))
def test_many_programs_written_by_chance(spec: Spec) -> None:
    holds(spec)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200, suppress_health_check=LENIENT)
@given(spec=specs(length=8, policies=("smallest",)))
def test_many_programs_written_by_chance_under_a_budget(spec: Spec) -> None:
    holds(spec)
