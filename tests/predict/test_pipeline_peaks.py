"""Peaks of pipelines on real ranks, every stage beside its forecast: uneven stages, what they are sent, and what they
hold of it under two schedulers' own code.

A forecast has no room for a few numbers of a step: sums of a loss, scalars of autograd. Tables of HF's rotary module
are buffers that a configuration does not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from jettison.core.errors import UsageError
from jettison.families.presets import preset
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.stages import KeptBuffers
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.layout import Layout, Schedule
from jettison.spec.recompute import Recompute
from support import megatron_pipeline
from support.formula_cases import run_of
from support.pipeline_peaks import ALL_FORWARDS_FIRST, FOUR, IN_A_V, SPLIT, TWO, Case, peaks, two_ranks
from support.ranks import Launches, run_ranks
from support.target_packages import MEGATRON, fetched

WITHIN = 2e-3
OF_ONE_ROUND = 6e-3
"""Megatron's interleaved schedule with as many micro-batches as stages: the last rank's variables are said to name an
output, and it sends none."""
COMPUTED_FOR_EACH_WEIGHT = 5e-3
"""A torch checkpoint under a split backward has its peak while a layer is computed again, and GPT-2's block has a name
for what its attention returns."""
ROTARY_BYTES = 64
"""Of ``inv_freq`` and its twin, eight numbers each."""


def forecast_of(case: Case, ranks: int, **code: bool) -> Forecast:
    """Args: code: whose pipeline it is."""
    run = run_of(case.formula)
    layout = Layout(
        pp=ranks,
        virtual_stages=len(case.stage_layers) // ranks,
        schedule=Schedule(case.schedule),
        stage_layers=case.stage_layers,
        **code,  # type: ignore[arg-type]
    )
    recompute = Recompute.parse("full" if case.full or case.planned else "none", layers=run.model.depth)
    run = replace(run, layout=layout, micro_batches=case.micro_batches, recompute=recompute)
    found = forecast(run)
    return forecast(run, [KeptBuffers(p.kept) for p in found.parts if p.is_layer]) if case.planned else found


def assert_measured(cases: Sequence[Case], found: Sequence[Sequence[dict[str, Any]]], **code: bool) -> None:
    """Each stage of each case: between steps to the byte, at its highest within a few kB."""
    for number, case in enumerate(cases):
        one_round = len(case.stage_layers) > len(found) == case.micro_batches
        within = OF_ONE_ROUND if one_round and code.get("keeps_received") else WITHIN
        within = COMPUTED_FOR_EACH_WEIGHT if case.full and Schedule(case.schedule).splits else within
        said = forecast_of(case, len(found), **code)
        for stage, got in zip(said.stages, (rank[number] for rank in found), strict=True):
            beside = ROTARY_BYTES * len(stage.groups) if case.family == "llama" else 0
            assert stage.timeline()[0].nbytes == got["before"] - beside, (case, stage.index)
            assert stage.peak.nbytes == pytest.approx(got["peak"], rel=within), (case, stage.index)


@pytest.fixture(scope="session")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return Launches(tmp_path_factory.getbasetemp(), two_ranks)[2]


def test_stages_of_torchs_pipelines(on_two: list[Any]) -> None:
    """1F1B and interleaved, with as many layers as somebody likes on each stage."""
    assert_measured(TWO, on_two, stage_buffers=True)


def test_without_its_buffers_the_forecast_is_too_low(on_two: list[Any]) -> None:
    """What the test before is worth: 1 to 40 %."""
    for number, case in enumerate(TWO):
        for stage, got in zip(forecast_of(case, 2).stages, (rank[number] for rank in on_two), strict=True):
            assert stage.peak.nbytes < 0.99 * got["peak"]


@pytest.mark.slow
def test_four_stages_of_torchs_pipelines() -> None:
    assert_measured(FOUR, run_ranks(peaks, 4, {"cases": [case.told() for case in FOUR]}), stage_buffers=True)


@pytest.mark.slow
def test_stages_that_run_all_forwards_first() -> None:
    """Two ranks: gradients are there from the second of so many backwards on, when less is in flight."""
    asked = {"cases": [case.told() for case in ALL_FORWARDS_FIRST]}
    assert_measured(ALL_FORWARDS_FIRST, run_ranks(peaks, 2, asked), stage_buffers=True)


@pytest.mark.slow
def test_four_stages_whose_backward_is_split() -> None:
    """ScheduleInterleavedZeroBubble, with one stage a rank and with two: as it is, with torch's checkpoints, which come
    to several times what everything kept comes to, and with plans.
    """
    found = run_ranks(peaks, 4, {"cases": [case.told() for case in SPLIT]})
    assert_measured(SPLIT, found, stage_buffers=True)
    for case, got in zip(SPLIT, found[1], strict=True):
        paper = forecast_of(case, 4).stages[1].peak.nbytes
        assert paper < 0.87 * got["peak"], "what the test is worth"


@pytest.mark.slow
def test_four_ranks_in_a_v() -> None:
    """ScheduleZBVZeroBubble: the first rank has the embedding and the head, and the last one hands on to itself."""
    found = run_ranks(peaks, 4, {"cases": [case.told() for case in IN_A_V]})
    assert_measured(IN_A_V, found, stage_buffers=True)
    for case, got in zip(IN_A_V, found[1], strict=True):
        assert forecast_of(case, 4).stages[1].peak.nbytes < 0.87 * got["peak"], "what the test is worth"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_stages_of_megatrons_schedules(
    ranks: int, cases: Sequence[Case], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each virtual stage's last input and its gradient are there between steps, and beside those in flight."""
    folder = fetched(tmp_path_factory.mktemp("megatron"), "megatron-core==0.19.2", how=MEGATRON)
    found = run_ranks(megatron_pipeline.peaks, ranks, {"folder": str(folder), "cases": [case.told() for case in cases]})
    assert_measured(cases, found, keeps_received=True)


def test_of_two_ways_one_is_given() -> None:
    with pytest.raises(UsageError, match="--keep-received, of schedules without these buffers"):
        resolve(preset("llama3-8b"), RunRequest(pp=2, stage_buffers=True, keep_received=True))


def test_of_8b_four_stages_have_a_buffer_for_each_micro_batch() -> None:
    """16 micro-batches of 8,192 tokens of 4,096 numbers in 16 bits: 1 GiB of inputs, as much of gradients."""
    request = RunRequest(seq=8192, pp=4, micro_batches=16, like="torchtitan", precision="bf16")
    plain, torchs = (
        forecast(resolve(preset("llama3-8b"), replace(request, stage_buffers=word)).run) for word in (False, True)
    )
    fixed = [b.load.fixed - a.load.fixed for a, b in zip(plain.stages, torchs.stages, strict=True)]
    assert fixed == [2**30, 2 * 2**30, 2 * 2**30, 2**30]
