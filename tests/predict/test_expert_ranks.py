"""Experts over ranks: what buckets, whole parameters and FSDP2's groups have of them, beside the real parameters.

Real ranks run the same steps in `benchmarks.random_ranks --experts`; some of its seeds are here, and slow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.random_ranks import Beside, compared, drawn_experts, rotary_bytes, said
from torch import nn

from jettison.predict.forecast import Stage
from support.formula_cases import model_of
from support.layout_steps import LayoutCase

CASE = LayoutCase(
    family="qwen3_moe",
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=48,
    vocabulary=256,
    layers=3,
    batch=2,
    sequence=32,
    dp=4,
    ep=2,
    experts=8,
)


def numbers(case: LayoutCase) -> tuple[list[int], list[int]]:
    """Of each parameter of a rank: what all ranks have, and its experts."""
    model: nn.Module = model_of(case.formula)
    named = list(model.named_parameters())
    common = [p.numel() for name, p in named if ".experts." not in name]
    return common, [p.numel() // case.ep for name, p in named if ".experts." in name]


def stage(case: LayoutCase) -> Stage:
    (found,) = said(case).stages
    return found


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_buckets_have_what_all_ranks_have(ep: int) -> None:
    case = replace(CASE, ep=ep, averaging="ddp")
    common, experts = numbers(case)
    beside = stage(case).load.fixed - stage(replace(case, averaging="mean")).load.fixed
    assert beside == 4 * sum(common) + (4 * sum(experts) if ep == 1 else 0)


def fullest(sizes: list[int], ranks: int) -> list[int]:
    """The largest first, each to the rank with the fewest numbers."""
    has = [0] * ranks
    for size in sorted(sizes, reverse=True):
        has[has.index(min(has))] += size
    return has


@pytest.mark.parametrize("ep", [2, 4])
def test_an_optimizer_of_whole_parameters_has_experts_of_its_own_ranks(ep: int) -> None:
    case = replace(CASE, ep=ep, zero=1)
    common, experts = numbers(case)
    shared, own = fullest(common, 4), fullest(experts, 4 // ep)
    assert stage(case).static.state == 8 * max(shared[rank] + own[rank // ep] for rank in range(4))


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("mixed", [False, True])
def test_experts_that_one_rank_has_are_copied_for_their_products(ep: int, mixed: bool) -> None:
    case = replace(CASE, ep=ep, averaging="zero", zero=3, mixed=mixed)
    whole = sum(map(sum, numbers(case)))
    assert stage(case).static.gathered == whole * (2 if mixed else 4)
    assert stage(case).static.reduced == whole * 4


@pytest.mark.parametrize(("seed", "counted"), [(0, 11_939_596), (2, 13_341_084)])
def test_experts_are_a_group_within_their_layers(seed: int, counted: int) -> None:
    """What real ranks held: 4.0 and 2.6 % more was said when a layer was one group."""
    case = drawn_experts(seed, 2)
    found = stage(case).peak.nbytes + rotary_bytes(case)
    assert abs(found - counted) < 0.001 * counted


@pytest.mark.slow
def test_real_ranks_take_as_much() -> None:
    found = list(compared([drawn_experts(seed, 2) for seed in range(12)]))
    assert len(found) >= 12
    for one in found:
        assert isinstance(one, Beside), one
        assert one.before[0] == one.before[1]
        assert abs(one.off) < 0.002, one
