"""What a handle says of itself, and how budgets and policies are given in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import UsageError
from jettison.planner.handle import MOST_ROWS, HandleReport

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def stack(count: int) -> tuple[nn.Module, dict[str, Any]]:
    given = {"batch": (torch.randn(8, WIDTH),), "loss_fn": lambda out: out.square().mean()}
    return nn.Sequential(*(Block() for _ in range(count))), given


def trained(model: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    given["loss_fn"](model(*given["batch"])).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_list_is_one_policy_for_each_block_and_its_report_is_a_screen() -> None:
    model, given = stack(6)
    plain = [g.clone() for g in trained(model, given)]
    model.zero_grad()
    with jettison.apply(model, ["full", "none", "full", "full", "selective-op", "none"], **given) as handle:
        assert all(map(torch.equal, plain, trained(model, given)))
        found = handle.report()
    assert [region.word for region in found] == ["full", "none", "full", "full", "selective-op", "none", "none"]
    assert [region.slots_dropped for region in found] == [2, 0, 2, 2, 1, 0, 0]
    assert found[0].kept_bytes == 8 * WIDTH * 4  # the block's input
    lines = str(found).splitlines()
    assert len(lines) == 1 + 6 and repr(found) == str(found), "two neighbours are alike"
    assert max(map(len, lines)) <= 100
    assert lines[3].split()[:4] == ["2", "to", "3", "(2)"]
    document = json.loads(json.dumps(found.document()))
    assert document["schema"] == "jettison.applied/1"
    assert [region["name"] for region in document["regions"]] == ["0", "1", "2", "3", "4", "5", ""]
    assert len(document["regions"][0]["slots"]) == len(found[0].slots) > 0


def test_many_regions_that_differ_are_still_a_screen() -> None:
    model, given = stack(2)
    with jettison.apply(model, "full", **given) as handle:
        one = handle.report()[0]
    many = []
    for number in range(80):
        region = type(one)(**{**vars(one), "name": f"layers.{number}", "calls": number, "fallback": "it draws " * 40})
        many.append(region)
    lines = str(HandleReport(tuple(many))).splitlines()
    assert len(lines) == 1 + MOST_ROWS + 1
    assert "... 51 more" in lines[MOST_ROWS // 2 + 1]
    assert lines[-1].startswith("without a recording: layers.0 and 79 more: it draws") and len(lines[-1]) <= 120


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (["full"], "got a list of 1 policies; expected one for each of the 3 blocks, 0, 1, 2"),
        (["full", "none", "half"], "unknown policy 'half'"),
        (["full", "none", 3], "got 3 as a block's policy"),
    ],
)
def test_lists_that_say_too_little_or_nonsense(policy: list[Any], says: str) -> None:
    model, given = stack(3)
    with pytest.raises(UsageError, match=says):
        jettison.apply(model, policy, **given)
    assert trained(model, given), "the model is as it was"


def asked_for(budget: Any) -> list[Callable[[], object]]:
    """Every function that takes a budget, given this one."""
    model, given = stack(2)
    traced = jettison.trace(model, given["batch"], loss_fn=given["loss_fn"])
    search = jettison.SearchRequest(seq=128, tp="1", pp="1", cp="1", recompute="none")
    return [
        lambda: jettison.auto_checkpoint(model, given["batch"], budget, loss_fn=given["loss_fn"]).remove(),
        lambda: jettison.plan(traced, budget, measure=False),
        lambda: jettison.plan.sweep(traced, ["1GiB", budget], measure=False),
        lambda: jettison.verify(model, given["batch"], budget=budget, loss_fn=given["loss_fn"], rounds=1),
        lambda: jettison.apply(model, "offload", host_budget=budget, **given).remove(),
        lambda: jettison.search("gpt2", search, gpus=1, gpu="h100-80gb", global_batch=1, budget=budget),
    ]


@pytest.mark.parametrize("budget", [2.5, 8e9, True, torch.tensor(True), torch.tensor(8.0), "8", 0, -1])
def test_what_is_no_number_of_bytes_is_refused_everywhere(budget: Any) -> None:
    for way in asked_for(budget):
        with pytest.raises(UsageError, match=r"got .*(number of bytes|without a unit; write|at least one byte)"):
            way()


@pytest.mark.parametrize("budget", [1 << 34, np.int64(1 << 34), torch.tensor(1 << 34), jettison.Bytes(1 << 34)])
def test_a_whole_number_is_bytes_everywhere(budget: Any) -> None:
    for way in asked_for(budget):
        way()


def test_the_budget_out_of_an_error_can_be_asked_for_as_it_is() -> None:
    model, given = stack(3)
    traced = jettison.trace(model, given["batch"], loss_fn=given["loss_fn"])
    with pytest.raises(jettison.Infeasible) as caught:
        jettison.plan(traced, "1kB", measure=False)
    least = caught.value.minimum_budget_bytes
    assert isinstance(least, jettison.Bytes)
    assert jettison.plan(traced, least, measure=False).budget_bytes == least
    assert jettison.plan(traced, f"{least}B", measure=False).budget_bytes == least
    assert json.dumps({"least": least}) == f'{{"least": {int(least)}}}'
