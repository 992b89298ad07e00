"""Plans on models that are spread over ranks: agreement, DTensors, our own styles (TRAPS 5, 6, 14, 17, 19)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from jettison.core.errors import PlanMismatch
from support.parallel_plans import MORE_TENSOR_PARALLEL, TENSOR_PARALLEL, two_ranks, two_ranks_more
from support.rank_models import LENGTH, ROWS
from support.ranks import Launches, run_ranks


@pytest.fixture(scope="session")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return Launches(tmp_path_factory.getbasetemp(), two_ranks)[2]


def test_trap_14_equal_plans_agree_and_different_ones_stop_every_rank_before_the_first_step(on_two: list[Any]) -> None:
    for rank, found in enumerate(r["agreement"] for r in on_two):
        assert found["same"]["kind"] == "NoneType", found["same"]
        assert found["budget"]["kind"] == "NoneType", found["budget"]
        assert found["not distributed"]["kind"] == "NoneType"
        for case, block in (("other", "blocks.0"), ("asked for", "blocks.0"), ("talks", "layers.0")):
            assert found[case]["kind"] == PlanMismatch.__name__, (rank, found[case])
            assert "rank 1 would run another plan than rank 0" in found[case]["text"]
            assert block in found[case]["text"]
        assert found["talks alike"]["kind"] == "NoneType"
        assert not found["left behind"]


def test_trap_14_plans_that_fsdp_brings_together_are_compared_before_its_first_gather(on_two: list[Any]) -> None:
    """A plan may come before `fully_shard`, when nothing was shared yet. Ranks would wait for one another for ever."""
    for found in (r["agreement"] for r in on_two):
        for case in ("shared later", "shared later, other"):
            assert found[f"{case}: apply"]["kind"] == "NoneType"
        assert found["shared later"]["kind"] == "NoneType"
        assert found["shared later: gradients"] > 0
        other = found["shared later, other"]
        assert other["kind"] == PlanMismatch.__name__
        assert "rank 1 would run another plan than rank 0" in other["text"]
        assert found["shared later, other: gradients"] == 0


def test_trap_14_a_rank_that_fails_or_stays_away_is_named_to_the_others(on_two: list[Any]) -> None:
    zero, one = (r["agreement"] for r in on_two)
    assert (zero["fails"]["kind"], one["fails"]["kind"]) == ("PlanMismatch", "UsageError")
    assert "rank 1 has no plan" in zero["fails"]["text"]
    assert "nonsense" in zero["fails"]["text"]
    assert (zero["leader fails"]["kind"], one["leader fails"]["kind"]) == ("UsageError", "PlanMismatch")
    assert "rank 0 has no plan" in one["leader fails"]["text"]
    absent = on_two[0]["absent"]
    assert absent["kind"] == "PlanMismatch"
    assert "rank 1 did not say" in absent["text"]


def test_trap_14_a_budget_that_is_too_small_on_one_rank_is_refused_on_all(on_two: list[Any]) -> None:
    """Else one would ask again, and wait for the other, which goes on to its first step."""
    zero, one = (r["agreement"] for r in on_two)
    assert zero["refused"] == one["refused"]
    assert zero["refused"]["text"].startswith("no plan fits a budget of 1.00 KiB (1024B)")
    assert 1024 < zero["refused"]["asked"] < 1 << 20
    assert (zero["no batch"]["kind"], one["no batch"]["kind"]) == ("PlanMismatch", "UsageError")


@pytest.mark.parametrize("case", ["kept graph", "used twice"])
def test_trap_19_each_backward_of_a_tensor_parallel_model_computes_again_once(case: str, on_two: list[Any]) -> None:
    zero, one = (r["several backwards"] for r in on_two)
    backwards = 2 if case == "kept graph" else 1
    for policy in ("full", "every:2"):
        name, layers = f"{case} {policy}", zero[f"{case} "]["softmax"]
        for found in (zero, one):
            assert found[name]["same"]
            assert found[name]["softmax"] == layers * (1 + backwards)
            assert found[name]["fallbacks"] == []
        assert zero[name]["order"] == one[name]["order"], "ranks talk in different orders"


def test_trap_17_buffers_of_a_tensor_parallel_model_are_written_once(on_two: list[Any]) -> None:
    zero, one = (r["side effects"] for r in on_two)
    for found in (zero, one):
        assert len({row["buffers"] for row in found.values()}) == 1
        assert {row["load"] for row in found.values()} == {LENGTH // 2 * ROWS * 2}, "two steps"
        assert found["full"]["dropped"] > 0
        assert all(row["gradients"] == found[""]["gradients"] for row in found.values())
    assert zero[""]["buffers"] != one[""]["buffers"], "ranks see other parts: the buffers say something"


@pytest.mark.parametrize(("local", "policy"), [(local, one) for local, some in TENSOR_PARALLEL.items() for one in some])
def test_trap_14_tensor_and_sequence_parallel_gives_the_same_bits(local: bool, policy: str, on_two: list[Any]) -> None:
    assert_same_bits(on_two, policy, local=local)


@pytest.mark.slow
def test_trap_14_tensor_and_sequence_parallel_gives_the_same_bits_under_other_policies() -> None:
    ranks = run_ranks(two_ranks_more, 2)
    for local, policies in MORE_TENSOR_PARALLEL.items():
        for policy in policies:
            assert_same_bits(ranks, policy, local=local)


def assert_same_bits(ranks: list[Any], policy: str, *, local: bool) -> None:
    zero, one = (r[f"local {local}"][policy] for r in ranks)
    for found in (zero, one):
        assert found["same"]
        assert found["recordings"] == 0
        assert found["fallbacks"] == []
    assert zero["order"] == one["order"], "ranks talk in different orders"
    assert len(zero["order"]) - len(zero["plain"]) == zero["again"]
    if policy in ("full", "everything"):  # two gathers and the attention's reduce-scatter, in each of two blocks
        extra = Counter(zero["order"]) - Counter(zero["plain"])
        assert extra["all_gather_into_tensor"] >= 4
        assert extra["reduce_scatter_tensor"] == 2


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_our_own_styles_give_the_same_bits(sequence_parallel: bool, on_two: list[Any]) -> None:
    zero, one = (r["own"][str(sequence_parallel)] for r in on_two)
    for policy in ("full", "every:2"):
        assert zero[policy]["same"] and one[policy]["same"]
        assert zero[policy]["dropped"] > 0
        assert zero[policy]["order"] == one[policy]["order"]
        if sequence_parallel:
            assert len(zero[policy]["order"]) > len(zero[""]["order"]), "no collective ran again: nothing was tested"


def test_tensor_parallel_with_a_plan_is_one_process_in_double_precision(on_two: list[Any]) -> None:
    assert all(r["parity"] < 1e-12 for r in on_two)


def test_plain_data_parallelism_gives_the_same_bits(on_two: list[Any]) -> None:
    assert all(r["replicas"]["same"] for r in on_two)


def test_ranks_with_parts_of_different_sizes_agree(on_two: list[Any]) -> None:
    assert [r["uneven"]["rows"] for r in on_two] == [[34], [33]]
    assert all(r["uneven"]["same"] for r in on_two)


def test_a_write_inside_a_dtensor_between_the_passes_is_noticed(on_two: list[Any]) -> None:
    for found in (r["writes"] for r in on_two):
        assert "parameter" in found["parameter"], found
        assert "modified by an inplace operation" in found["parameter"]
        assert "modified by an inplace operation" in found["kept"], found
