"""A step on the clock holds what the ledger says, and takes as long as the estimate does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.core.units import GIB
from jettison.memory.span import Phase
from jettison.memory.step import Event
from jettison.predict.auto_recompute import choose
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.played import PlayedStage, copies, play
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import model_spec, resolve
from jettison.predict.time import Estimate, estimate
from jettison.spec.hardware import hardware

H100 = hardware("h100-80gb")
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "one stage": ("llama3-8b", {"dp": 8, "zero": 3, "micro_batches": 2}),
    "tied": ("gpt2-xl", {"micro_batches": 3, "precision": "fp32"}),
    "1f1b": ("llama3-8b", {"pp": 4, "micro_batches": 8}),
    "segments": ("llama3-8b", {"pp": 4, "micro_batches": 8, "recompute": "every:3"}),
    "interleaved, buffers": (
        "gpt-175b",
        {"tp": 8, "pp": 8, "virtual_stages": 3, "micro_batches": 16, "recompute": "selective"},
    ),
    "gpipe, buffers": ("llama3-8b", {"pp": 4, "micro_batches": 8, "schedule": "gpipe", "gradients": "upfront"}),
    "gpipe": ("llama3-8b", {"pp": 4, "micro_batches": 8, "schedule": "gpipe"}),
    "interleaved": ("llama3-8b", {"pp": 4, "virtual_stages": 2, "micro_batches": 8}),
    "as many micro-batches as stages": ("llama3-8b", {"pp": 4, "micro_batches": 4}),
    "outputs kept": ("llama3-8b", {"pp": 4, "micro_batches": 8, "keep_stage_outputs": True}),
    "offloaded": ("llama3-8b", {"dp": 8, "zero": 3, "recompute": "full", "offload": True}),
    "zero bubble": ("llama3-8b", {"pp": 4, "micro_batches": 8, "schedule": "zero-bubble"}),
    "zero bubble, buffers": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 8, "schedule": "zero-bubble", "gradients": "upfront", "recompute": "full"},
    ),
    "torch's zero bubble": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 8, "schedule": "zero-bubble", "virtual_stages": 2, "stage_buffers": True},
    ),
    "torch's zero bubble, segments": (
        "llama3-8b",
        {"pp": 4, "micro_batches": 6, "schedule": "zero-bubble", "stage_buffers": True, "recompute": "every:2"},
    ),
    "torch's V": (
        "llama3-8b",
        {
            "pp": 4,
            "micro_batches": 8,
            "schedule": "zero-bubble-v",
            "virtual_stages": 2,
            "stage_buffers": True,
            "recompute": "full",
        },
    ),
}


def played(model: str, **asked: Any) -> tuple[Forecast, Estimate, tuple[PlayedStage, ...]]:
    run = resolve(model_spec(model), RunRequest(**asked)).run
    memory, time = forecast(run), estimate(run, H100)
    return memory, time, play(memory, time)


@pytest.mark.parametrize("case", EXACT)
def test_the_highest_instant_is_the_ledgers_peak(case: str) -> None:
    model, asked = EXACT[case]
    memory, _, stages = played(model, **asked)
    assert [stage.peak.nbytes for stage in stages] == [stage.peak.nbytes for stage in memory.stages]


@pytest.mark.parametrize("case", EXACT)
def test_a_stage_is_left_as_it_was_found(case: str) -> None:
    model, asked = EXACT[case]
    memory, _, stages = played(model, **asked)
    for stage, load in zip(stages, (each.load for each in memory.stages), strict=True):
        last = stage.passes[-1]
        profile = stage.profiles[last.profile]
        sent = last.held + profile.kept
        stays = load.there(Event.BACKWARD) - load.there(Event.FORWARD)
        if load.transfers:  # of all that a step has sent, but for what the last pass sends
            stays += memory.run.micro_batches * sum(load.transfers) - load.transfers[last.timed.step.chunk]
        assert sent == (stage.passes[0].held + stays if "keep_stage_outputs" not in asked else sent)
        assert last.gradients + profile.made == stage.gradient_bytes
        assert last.host + profile.moved == 0


@pytest.mark.parametrize("case", EXACT)
def test_passes_tile_each_stages_time(case: str) -> None:
    model, asked = EXACT[case]
    _, time, stages = played(model, **asked)
    for stage, end, busy in zip(stages, time.replay.ends, time.replay.busy, strict=True):
        passes = [each.timed for each in stage.passes]
        assert passes[-1].end == pytest.approx(end, rel=1e-12)
        assert sum(each.end - each.start for each in passes) == pytest.approx(busy, rel=1e-9)
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(passes))
        own = [i for i in stage.instants if i.phase is not Phase.OPTIMIZER]
        assert sum(i.end - i.start for i in own) == pytest.approx(busy, rel=1e-9)
    assert max(stage.optimizer[1] for stage in stages) == pytest.approx(time.step_seconds, rel=1e-12)


def test_copies_move_what_the_plan_says() -> None:
    run = resolve(
        model_spec("llama3-8b"),
        RunRequest(dp=8, zero=3, seq=8192, micro_batch=2, micro_batches=2, recompute="auto", offload=True),
    ).run
    found = choose(run, 55 * GIB, H100)
    memory = found.forecast
    chosen = [part.chosen for part in memory.parts if part.is_layer]
    (stage,) = play(memory, estimate(memory.run, H100, chosen=chosen))
    assert stage.peak.nbytes == memory.peak_bytes <= 55 * GIB
    moved = list(copies(stage, H100))
    for way in (True, False):
        own = [copy for copy in moved if copy.to_host is way]
        assert sum(copy.nbytes for copy in own) == 2 * found.host_bytes > 0
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(own)), "one link, one copy at a time"
    gone = {(copy.where, copy.micro_batch): copy.end for copy in moved if copy.to_host}
    for copy in moved:
        assert copy.to_host or copy.start >= gone[copy.where, copy.micro_batch] - 1e-9, "nothing returns before it left"


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(UsageError, match="kept whole"):
        played("llama3-8b", pp=4, micro_batches=8, recompute="full", whole_micro_batches="1")
