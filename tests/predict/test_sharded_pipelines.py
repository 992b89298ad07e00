"""Pipelines whose stages FSDP2 shards, on four real ranks, every stage beside its forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from jettison.predict.forecast import Forecast, forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.layout import Layout, Reshard, Schedule
from jettison.spec.precision import PRECISIONS
from jettison.spec.recompute import Recompute
from support import formula_cases
from support.ranks import run_ranks
from support.sharded_pipelines import SHARDS, ShardedCase, peaks

ROTARY_BYTES = 64
CASES = (
    ShardedCase(family="llama", stage_layers=(3, 2)),
    ShardedCase(family="llama", stage_layers=(3, 2), mixed=True),
    ShardedCase(family="llama", stage_layers=(3, 2), mixed=True, full=True),
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 0), mixed=True, micro_batches=8),
    ShardedCase(family="llama", stage_layers=(3, 2), mixed=True, batch=1, sequence=16),
    ShardedCase(family="llama", stage_layers=(3, 2), batch=1, sequence=16, micro_batches=2),
    # fullest before the first backward
    ShardedCase(family="llama", stage_layers=(3, 2), mixed=True, micro_batches=2),
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 1), mixed=True, micro_batches=2),
    # fullest when one chunk has been reduced
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 1), full=True, micro_batches=2),
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 1), full=True, mixed=True, micro_batches=4),
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 1, 1, 1), full=True, micro_batches=2, batch=1),
    # backward is split
    ShardedCase(family="llama", stage_layers=(3, 2), schedule="zero-bubble"),
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 1), schedule="zero-bubble"),
    # weights are whole from a backward to the next forward
    ShardedCase(family="llama", stage_layers=(3, 2), reshard=True),
    ShardedCase(family="llama", stage_layers=(3, 2), reshard=True, mixed=True, full=True),
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 1), reshard=True),
    ShardedCase(family="llama", stage_layers=(2, 1, 2, 1), reshard=True, mixed=True, full=True, micro_batches=2),
    ShardedCase(
        family="llama", stage_layers=(2, 1, 1, 1, 1, 1, 1, 1), reshard=True, full=True, micro_batches=2, batch=1
    ),
)


def said(case: ShardedCase) -> Forecast:
    run = formula_cases.run_of(case.formula)
    layout = Layout(
        pp=2,
        dp=SHARDS,
        zero=3,
        virtual_stages=len(case.stage_layers) // 2,
        stage_layers=case.stage_layers,
        stage_buffers=True,
        reshard=Reshard.ALWAYS if case.reshard else Reshard.BUT_FIRST,
        schedule=Schedule(case.schedule),
    )
    recompute = Recompute.parse("full" if case.full else "none", layers=run.model.depth)
    precision = PRECISIONS["bf16-autocast" if case.mixed else "fp32"]
    return forecast(
        replace(run, layout=layout, micro_batches=case.micro_batches, recompute=recompute, precision=precision)
    )


@pytest.mark.slow
def test_stages_that_are_sharded() -> None:
    """Between steps to the byte, at the highest within 0.2 %."""
    found = run_ranks(peaks, 2 * SHARDS, {"cases": [case.told() for case in CASES]})
    for number, case in enumerate(CASES):
        for stage in said(case).stages:
            got = found[stage.index * SHARDS][number]
            assert stage.timeline()[0].nbytes == got["before"] - ROTARY_BYTES * len(stage.groups), (case, stage.index)
            assert stage.peak.nbytes == pytest.approx(got["peak"], rel=0.002), (case, stage.index)


def test_whole_gradients_of_a_405b_stage() -> None:
    """fp32 gradients of 16 layers on one of eight tensor-parallel ranks: 4 bytes each, not an eighth of that."""
    asked = RunRequest(like="torchtitan", tp=8, pp=8, dp=8, seq=8192, micro_batches=8, recompute="full")
    whole, sharded = (
        forecast(replace(run, layout=replace(run.layout, stage_buffers=word)))
        for run in (run_of("llama3-405b", asked),)
        for word in (True, False)
    )
    stage = whole.stages[1]
    count = stage.static.reduced // 4
    assert count == 16 * (16384 * (16384 * 2 + 2 * 1024 + 3 * 53248) // 8 + 2 * 16384)
    assert sum(unit.gradient * len(unit.names) for unit in stage.load.chunks[0]) == 4 * count
    assert stage.load.shards == sharded.stages[1].static.gradients == 4 * count // 8
    after = stage.timeline()[-1].nbytes
    assert after < stage.peak.nbytes - 4 * count
