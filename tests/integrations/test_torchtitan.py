"""torchtitan's own Trainer on a CPU, with a budget and without: the same losses and parameters, no step above it.

Its process groups, its switches of autograd and of the garbage collector stay in processes of their own.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: pip install '.[torchtitan]'"
)


def holds(found: dict[str, Any]) -> None:
    assert found["steps"] == 3
    assert found["same"]
    assert max(found["plain"]) > found["budget"]
    assert max(found["peaks"]) <= found["budget"]
    assert max(found["peaks"]) == pytest.approx(found["predicted"], abs=256)
    assert found["seen"][0] == found["seen"][1]  # the trainer's own count of tokens: planning is no step
    assert not found["left"]


def on_rank(how: str) -> dict[str, Any]:
    from support import titan

    return titan.compared(**titan.HOW[how])


def words_on_rank(_: Any) -> tuple[dict[str, str], list[Any]]:
    from support import titan

    return titan.refused(None), titan.on_the_command_line(None)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "how"), [(1, "as it comes"), (1, "chunked"), (2, "sharded")])
def test_torchtitan_keeps_its_budget(ranks: int, how: str) -> None:
    found = run_ranks(on_rank, ranks, how)
    for rank in found:
        holds(rank)
    assert len({rank["predicted"] for rank in found}) == 1


def test_its_configuration_takes_a_budget_and_what_cannot_be_planned_is_refused_in_words() -> None:
    (said, parsed), *_ = run_ranks(words_on_rank, 1)
    assert parsed == ["AutoCheckpoint", "1GiB", 5]
    words = {
        "graphs": "training.disable_cuda_graphs=True",
        "compile": "compile.enable=False",
        "pipeline": "parallelism.pipeline_parallel_degree=1",
        "tensor": "parallelism.tensor_parallel_degree=1",
        "selective": "SelectiveAC is on; set activation_checkpoint=None",
        "flex": "attn_backend='varlen'",
        "whole mesh": "parallelism.spmd_backend='partial_dtensor'",
        "nobody": "none is being built here",
    }
    assert said.keys() == words.keys()
    for name, part in words.items():
        assert part in said[name]
