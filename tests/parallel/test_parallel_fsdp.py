"""Plans under FSDP2, alone and over tensor parallelism: the same bits, not one all-gather more (TRAPS 15, 17, 19)."""

from __future__ import annotations

from typing import Any

import pytest

from support.parallel_fsdp import FSDP_CASES, MORE_CASES, TWO_AXES, four_ranks, two_ranks, two_ranks_more
from support.ranks import Launches, run_ranks

CASES = [(how, f"{how}, {policy} {order}") for how, policy, order in FSDP_CASES]
TRANSFERS = {
    "per block": (5, 3),
    "three blocks": (7, 4),
    "frozen": (5, 2),  # of two blocks one is frozen whole
    "kept whole": (3, 3),
    "to a smaller mesh": (6, 3),  # the outermost unit too, where it is asked for
    "bf16": (5, 3),
    "bf16 blocks": (5, 3),
    "nested": (9, 5),
    "norm and head together": (7, 4),
    "accumulated": (15, 3),  # three micro-batches
    "kept graph": (8, 6),  # a second backward
    "used twice": (5, 2),  # the second use finds the block whole
    "counting": (5, 3),
}
"""All-gathers and reduce-scatters of a step: units are gathered for forward and backward, the outermost once."""


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), two_ranks)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), four_ranks)


@pytest.fixture
def found(case: str, two: Launches) -> list[Any]:
    """Of one case, by rank."""
    return [rank["cases"][case] for rank in two[2]]


def assert_case(found: dict[str, Any], how: str) -> None:
    assert found["same"]
    assert found["dropped"] > 0, "nothing was dropped: nothing was tested"
    assert found["fallbacks"] == []
    for row in (found, found["plain"]):
        counts = [row["collectives"][kind] for kind in ("_allgather_base_", "_reduce_scatter_base_")]
        assert tuple(counts) == TRANSFERS[how]
    assert found["sharded"] and found["gathered bytes"] == 0, "something stayed gathered after backward"
    assert found["buffers"] == found["plain"]["buffers"], "something was written twice"


@pytest.mark.parametrize(("how", "case"), CASES)
def test_trap_15_a_plan_under_fsdp_gathers_as_often_and_changes_no_bit(how: str, found: list[Any]) -> None:
    """Whether gathered parameters stay for backward or not, in mixed precision, frozen, nested, accumulated."""
    for rank in found:
        assert_case(rank, how)


@pytest.mark.slow
def test_trap_15_in_the_other_order() -> None:
    for rank in run_ranks(two_ranks_more, 2):
        for how, policy, order in MORE_CASES:
            found = rank[f"{how}, {policy} {order}"]
            assert_case(found, how)
            assert found["recordings"] == int(how in ("bf16", "bf16 blocks") and order == "before")
            if how in ("kept graph", "used twice", "accumulated"):
                assert found["softmax"] == found["plain"]["softmax"] * (3 if how == "kept graph" else 2)


@pytest.mark.parametrize("case", [case for how, case in CASES if how in ("per block", "three blocks", "nested")])
def test_trap_15_a_block_computed_again_early_asks_fsdp_for_its_parameters(case: str, found: list[Any]) -> None:
    """In a segment, blocks are computed again during the backward of the last one, when they are sharded."""
    for rank in found:
        in_time = case.startswith("per block, everything")  # a block alone is computed again in its own backward
        assert (rank["asked"] == 0) is in_time


@pytest.mark.parametrize("case", [case for how, case in CASES if how == "counting"])
def test_trap_17_buffers_under_fsdp_are_written_once(case: str, found: list[Any]) -> None:
    """Running statistics of batch norms, a router's counts."""
    for rank in found:
        assert rank["buffers"] == rank["plain"]["buffers"]
    assert found[0]["buffers"] != found[1]["buffers"], "ranks see other batches: the buffers say something"


@pytest.mark.parametrize("case", [case for how, case in CASES if how in ("kept graph", "used twice", "accumulated")])
def test_trap_19_each_backward_under_fsdp_computes_again_once(case: str, found: list[Any]) -> None:
    for rank in found:
        forwards = rank["plain"]["softmax"]
        backwards = 2 if case.startswith("kept graph") else 1
        assert rank["softmax"] == forwards * (1 + backwards)


def test_recipes_recorded_before_fsdp_hold_under_it(two: Launches) -> None:
    """They are recorded anew only where FSDP computes in another type."""
    for rank in two[2]:
        for how, case in CASES:
            before = how in ("bf16", "bf16 blocks") and case.endswith("before")
            assert rank["cases"][case]["recordings"] == int(before), case


def test_fsdp_with_a_plan_is_one_process_in_double_precision(two: Launches) -> None:
    """Each rank draws its own dropout masks; one process repeats them."""
    assert all(rank["parity"] < 1e-12 for rank in two[2])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_resharding_to_a_smaller_mesh(order: str, four: Launches) -> None:
    for found in (r[f"to a smaller mesh, everything {order}"] for r in four[4]):
        assert_case(found, "to a smaller mesh")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "order"), TWO_AXES)
def test_fsdp_over_tensor_parallel_gives_the_same_bits(how: str, order: str, four: Launches) -> None:
    found = [r[f"2D {how}, {order}"] for r in four[4]]
    for each in found:
        assert each["same"] and each["sharded"]
        assert each["dropped"] > 0 and each["fallbacks"] == []
        assert each["plain"]["collectives"]["_allgather_base_"] >= 3
        for kind in ("_allgather_base_", "_reduce_scatter_base_"):
            assert each["collectives"][kind] == each["plain"]["collectives"][kind]
        assert each["order"] == found[0]["order"]
