"""Somebody's program, which mypy checks strictly against what is installed (`test_typing.py`); nobody runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import jettison


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def planned(model: nn.Module, x: torch.Tensor) -> int:
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        handle = jettison.auto_checkpoint(model, (x,), "8GiB", optimizer=optimizer)
    except jettison.Infeasible as error:
        assert_type(error.minimum_budget_bytes, jettison.Bytes)
        handle = jettison.auto_checkpoint(model, (x,), error.minimum_budget_bytes, optimizer=optimizer)
    report = handle.report()
    assert_type(report[0].kept_bytes, int)
    handle.remove()
    return sum(region.kept_bytes for region in report)


def by_hand(model: nn.Module, x: torch.Tensor) -> float:
    traced = jettison.trace(model, (x,), loss_fn=lambda out: out.sum())
    made = jettison.plan(traced, 8 * 2**30)
    assert_type(made, jettison.Plan)
    for found in jettison.sweep(traced, ["8GiB", "6GiB"]):
        if not isinstance(found, jettison.Infeasible):
            assert_type(found.predicted.peak_bytes, int)
    with jettison.apply(model, ["full"] * len(made.layers), batch=(x,)) as handle:
        proof = jettison.verify(model, (x,), handle=handle)
    assert_type(proof.passed, bool)
    return proof.step_time_ratio


def described() -> tuple[int, float]:
    run = jettison.run_of("llama3-8b", jettison.RunRequest(seq=8192, micro_batch=2, tp=8))
    assert_type(run, jettison.Run)
    memory = jettison.forecast(run)
    assert_type(memory.peak_bytes, int)
    time = jettison.estimate(run, jettison.hardware("h100-80gb"))
    assert_type(time.step_seconds, float)
    model: jettison.ModelSpec = jettison.preset("gpt2")
    other = jettison.Run(model=model, seq=1024, layout=jettison.Layout(tp=2, sp=True))
    return jettison.forecast(other).peak_bytes + memory.peak_bytes, time.mfu


def searched() -> float:
    request = jettison.SearchRequest(seq=2048, zero="1")
    found = jettison.search("gpt2", request, gpus=8, gpu="a100-80gb", global_batch=64, jobs=1)
    assert_type(found.answer.best.seconds.step, float)
    return found.seconds


def caught(error: jettison.JettisonError) -> int:
    if isinstance(error, jettison.DoesNotFit):
        assert_type(error.peak_bytes, int)
    return error.exit_code
