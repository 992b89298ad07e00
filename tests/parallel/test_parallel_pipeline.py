"""Plans on the stages of a pipeline: every schedule of torch.distributed.pipelining, and pipelines of stages that are
themselves tensor parallel or sharded by FSDP2.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.parallel_pipelines import SCHEDULES, four_ranks, tensor_parallel_pipelines, two_ranks
from support.ranks import Launches


@pytest.fixture(scope="session")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return Launches(tmp_path_factory.getbasetemp(), two_ranks)[2]


@pytest.fixture(scope="session")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return Launches(tmp_path_factory.getbasetemp(), tensor_parallel_pipelines)[4]


def assert_pipeline(found: dict[str, Any]) -> None:
    for policy in ("full", "none"):
        got = found[policy]
        assert got["same"]
        assert got["left"] == 0
        assert got["recordings"] == 0
    assert found["distance"] < 1e-12
    assert found["full"]["ops"]["_softmax"] == 2 * found["plain"]["_softmax"], "once in forward, once again"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_same_bits_with_a_plan_and_those_of_one_process(name: str, on_two: list[Any]) -> None:
    for found in (r[name] for r in on_two):
        assert_pipeline(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_trap_17_buffers_of_a_stage_are_written_once_a_micro_batch(name: str, on_two: list[Any]) -> None:
    for found in (r[name] for r in on_two):
        assert all(count == found["calls"][0] > 0 for count in found["calls"])
        assert all(found[policy]["calls"] == found["calls"] for policy in ("full", "none"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_alive_is_what_the_replay_counts(name: str, on_two: list[Any]) -> None:
    for found in (r[name] for r in on_two):
        assert_alive(found)


def assert_alive(found: dict[str, Any]) -> None:
    for policy in ("full", "none"):
        got = found[policy]
        assert got["in flight"] == found["replayed"]
        assert got["bytes"] == got["replayed bytes"] > 0
    assert found["full"]["bytes"] < found["none"]["bytes"]
    assert found["storages"] == found["none"]["storages"] == found["replayed"], "what plain autograd holds"
    assert found["full"]["storages"] == 0, "dropped as soon as it is used"
    assert found["replayed"] == found.get("known", found["replayed"])


def test_trap_19_zero_bubble_computes_once_where_torchs_checkpoint_does_several_times(on_two: list[Any]) -> None:
    for found in on_two:
        plain = found["interleaved zero bubble"]["plain"]["_softmax"]
        assert found["interleaved zero bubble"]["full"]["ops"]["_softmax"] == 2 * plain
        assert found["torch's checkpoint"]["_softmax"] > 3 * plain


@pytest.fixture(scope="session")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return Launches(tmp_path_factory.getbasetemp(), four_ranks)[4]


@pytest.mark.parametrize("name", ["1F1B", "zero bubble", "zero bubble V"])
def test_four_stages(name: str, on_four: list[Any]) -> None:
    for found in (r[name] for r in on_four):
        assert_pipeline(found)
        assert_alive(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "interleaved zero bubble"])
def test_pipelines_of_stages_with_torchs_tensor_and_sequence_parallelism(name: str, distributed: list[Any]) -> None:
    """Of those with ours, `test_parallel_layouts.py` runs two always."""
    found = [r[name] for r in distributed]
    for each in found:
        assert each["same"]
        assert each["recordings"] == 0
        assert each["distance"] < 1e-12
        assert Counter(each["order"])["all_gather_into_tensor"] > 0
    assert found[0]["order"] == found[1]["order"], "the ranks of the first stage talk in different orders"
    assert found[2]["order"] == found[3]["order"]


@pytest.mark.parametrize("name", ["1F1B", "zero bubble"])
def test_pipelines_of_stages_under_fsdp(name: str, on_four: list[Any]) -> None:
    for found in (r["sharded"][name] for r in on_four):
        assert found["same"]
        plain, planned = found["orders"]
        assert plain == planned
        assert "_allgather_base_" in plain
