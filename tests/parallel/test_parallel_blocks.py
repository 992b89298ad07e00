"""A tensor-parallel layer on 2 and 4 ranks: the order of its backward, what it may be given, its random streams."""

from __future__ import annotations

from typing import Any

import pytest

from support.parallel_blocks import blocks
from support.ranks import Launches

SIZES = (2, pytest.param(4, marks=pytest.mark.slow))


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), blocks)


@pytest.mark.parametrize("t", SIZES)
def test_a_blocks_products_share_one_gather_that_runs_beside_the_first_of_them(found: Any, t: int) -> None:
    """gate and up, then q, k and v: five products, two second gathers. dx comes before the wait, dw after it."""
    order = found[t][0]["backward_order"]
    assert order["sent"] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2}
    names = order["order"]
    starts = [i for i, name in enumerate(names) if name == "all_gather_into_tensor"]
    for start, products in ((starts[1], 2), (starts[3], 3)):
        wait, end = names.index("wait_tensor", start), names.index("reduce_scatter_tensor", start)
        assert names[start:wait].count("mm") == 1
        assert names[wait:end].count("mm") == 2 * products - 1


@pytest.mark.parametrize("t", SIZES)
def test_a_split_backward_gathers_for_weights_only(found: Any, t: int) -> None:
    order = found[t][0]["backward_order"]
    inputs, weights = order["split"]
    assert inputs == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert weights["all_gather_into_tensor"] == 4
    assert order["split_equal"]


def test_frozen_weights_are_not_gathered_for(found: Any) -> None:
    assert found[2][0]["backward_order"]["frozen"] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


def test_autocast(found: Any) -> None:
    """bf16 has 8 bits, and sums over ranks round once more."""
    for rank in found[2]:
        shares = rank["backward_order"]["autocast"]
        assert len(shares) == 9
        assert max(shares.values()) < 0.03


def test_a_sequence_that_does_not_divide_is_an_error(found: Any) -> None:
    assert "(2, 15); its dim 1 does not divide over 2 tensor-parallel ranks" in found[2][0]["backward_order"]["odd"]


@pytest.mark.parametrize("t", SIZES)
def test_masks_are_equal_on_whole_activations_and_others_on_parts(found: Any, t: int) -> None:
    ranks = [rank["random_streams"] for rank in found[t]]
    sites = 1 + 2 * 3
    cores = {1, 4}  # after the embedding's, the first of each layer
    for layout, parts in (("tp", cores), ("tp_sp", set(range(sites)))):
        for run in range(3):
            masks = [rank[layout][run]["masks"] for rank in ranks]
            assert all(len(m) == sites for m in masks)
            for site in range(sites):
                assert len({m[site] for m in masks}) == (t if site in parts else 1), (layout, site)
            assert len({m for rank in masks for m in rank}) == len(parts) * t + sites - len(parts), "all sites differ"
        states = {rank[layout][0]["state"] for rank in ranks}
        assert len(states) == (1 if layout == "tp" else t)


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
def test_masks_follow_the_seed(found: Any, t: int, layout: str) -> None:
    for rank in found[t]:
        first, second, other = (run["masks"] for run in rank["random_streams"][layout])
        assert first == second
        assert not set(first) & set(other)


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("layout", ["tp", "tp_sp"])
def test_recomputed_masks_are_the_forwards(found: Any, t: int, layout: str) -> None:
    for rank in found[t]:
        row = rank["random_streams"][f"recompute {layout}"]
        assert row.pop("another seed") is False
        assert all(row.values()), row


def test_a_loan_ends_with_a_failed_forward_and_never_starts_in_evaluation(found: Any) -> None:
    assert found[2][0]["random_streams"]["failed forward"] == [True, True]


def test_a_gather_is_under_way_before_the_other_ranks_have_begun_theirs(found: Any) -> None:
    """So the product between its start and its end does not wait for them."""
    assert all(rank["asynchronous"] for rank in found[2])


@pytest.mark.parametrize("t", SIZES)
def test_what_a_layer_may_be_given(found: Any, t: int) -> None:
    """Inputs that are not contiguous, two forwards before a backward, several backwards, weights that are frozen, and
    forwards that nobody differentiates: fp64, beside a whole layer.
    """
    for rank in found[t]:
        rows = rank["inputs"]
        assert len(rows) == 8
        assert max(rows.values()) < 1e-12, rows


@pytest.mark.parametrize("t", SIZES)
def test_styles_drop_into_torchs_parallelize_module(found: Any, t: int) -> None:
    for rank in found[t]:
        assert rank["by_hand"] == {"torch": True, "ours": True}


def test_what_does_not_divide_is_said_before_anything_is_changed(found: Any) -> None:
    for rank in found[2]:
        said = rank["refusals"]
        assert (
            "layers.0.attention.key: 1 heads of 4 outputs do not divide over 2 tensor-parallel ranks" in said["heads"]
        )
        assert said["as it was"]
        assert "its dim 1 does not divide over 2 tensor-parallel ranks" in said["sequence"]
        assert "is distributed already" in said["twice"]
        assert "runs under a plan" in said["planned"]
