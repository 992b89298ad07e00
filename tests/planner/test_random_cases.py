"""Cases by chance (`planner.random_cases`): the budget holds, nothing differs, nothing ends in an error of ours."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import jettison
from planner import random_cases
from planner.random_cases import FAILED, FINE, Found, judge, run, summary
from support.random_programs import WRAPPERS, Case, draw
from support.stated_peaks import WISHED, Stated

HOURS = 10
ROWS = ((6, 16),) * 3
TINY = ((1, 4),) * 3  # gradients are larger than activations
CHANGING = ((4, 9), (4, 9), (8, 16), (8, 16), (2, 25), (2, 25))
FSDP2 = Case(seed=7, source="toy:words", layers=1, wrapper="fsdp2", shapes=ROWS)
QUICK = [
    Case(seed=1, source="toy:words", dtype="bf16", tied=True, keep_output=False, check="full", budget=0.2),
    Case(
        seed=2,
        source="toy:rows",
        layers=1,
        wrapper="step",
        how="two forwards",
        gradients_preallocated=True,
        budget="below",
    ),
    Case(seed=3, source="toy:words", layers=1, wrapper="models", optimizer="Adagrad", dropout=0.1),
    Case(seed=4, source="toy:rows", wrapper="shapes", shapes=((3, 9), (8, 16), (6, 25)), frozen=0.3),
    Case(seed=5, source="toy:words", wrapper="ddp", how="accumulated", shapes=ROWS, optimizer="SGD momentum"),
    Case(
        seed=6, source="toy:rows", wrapper="ddp", gradients_preallocated=True, shapes=TINY, optimizer="none", budget=0.0
    ),
    # whole parameters stay at the root after an evaluation, and kernels of autocast take memory themselves
    replace(FSDP2, how="autocast", dropout=0.1, budget=0.3, evaluates=True),
    Case(seed=8, source="toy:words", wrapper="pipeline", shapes=ROWS, optimizer="SGD", budget=0.3),
    Case(seed=9, source="toy:rows", wrapper="changing", shapes=CHANGING, dropout=0.5, evaluates=True),
    Case(seed=10, source="toy:words", layers=1, wrapper="changing step", how="clipped", shapes=CHANGING[1:4]),
]
PLAIN = QUICK[0]
LONGER = [
    replace(draw(7000011), layers=2),  # its blocks are recorded within a step, under hooks of FSDP2
    # a gradient that holds on to what it was a part of: of a token before one image, and it is kept
    replace(draw(9000161), wrapper="plain", how="once", layers=1, shapes=((1, 16),) * 3, budget=0.0),
    # two calls in flight, of which the root holds most
    replace(draw(8000119), wrapper="step", layers=2, shapes=((8, 24),) * 3),
    replace(draw(9000161), wrapper="step", layers=1, budget=0.0),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LONGER)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.wrapper}-{case.seed}")
def test_a_case_of_each_wrapper(case: Case) -> None:
    found = judge(case)
    assert (found.outcome, found.notes) == (FINE, [])
    assert 0.5 < found.closest <= 1
    assert found.said == []
    assert any(not one.bounds for one in found.stated), "a plan stands beside the steps that it was made for"
    assert abs(found.furthest) <= WISHED, [str(one) for one in found.stated]


def test_what_is_far_from_its_plan_is_named() -> None:
    near = Stated(batch="4 x 9", steps=(0, 1), stated_bytes=1010, measured_bytes=1000, bounds=False)
    above = replace(near, stated_bytes=600, measured_bytes=1000)
    most = replace(near, stated_bytes=2000, bounds=True)  # a smaller batch under a larger one's plan
    found = [Found(case=PLAIN, stated=[near, most]), Found(case=replace(PLAIN, seed=7), stated=[near, above, most])]
    told = summary(found)
    assert told["furthest from the prediction"] == pytest.approx(-0.4)
    (named,) = told["far from what was stated"]
    assert named["seed"] == 7 and named["kind"] == ""
    assert named["stated"] == ["4 x 9: 600 bytes were stated, 1000 measured (-40.0%) in steps 0, 1"]
    found[1].varies = True
    assert summary(found)["far from what was stated"][0]["kind"] == "values or chance decide what runs"


def test_no_wrapper_is_left_out() -> None:
    assert {case.wrapper for case in QUICK} == set(WRAPPERS)


@pytest.mark.parametrize(
    ("breaks", "note"), [("budget", "bytes over"), ("gradients", "another gradient"), ("error", "RuntimeError: broken")]
)
def test_what_is_broken_fails(monkeypatch: pytest.MonkeyPatch, breaks: str, note: str) -> None:
    whole = jettison.auto_checkpoint

    def broken(model: Any, batch: Any, budget: Any, **more: Any) -> Any:
        if breaks == "error":
            raise RuntimeError("broken")
        if breaks == "gradients":
            next(model.parameters()).register_hook(lambda gradient: gradient * (1 + torch.finfo(gradient.dtype).eps))
        return whole(model, batch, budget if budget == 1 or breaks != "budget" else jettison.Bytes(2 * budget), **more)

    monkeypatch.setattr(jettison, "auto_checkpoint", broken, raising=False)
    found = judge(PLAIN)
    assert found.outcome == FAILED
    assert note in found.notes[0]


def test_a_failing_case_is_made_simpler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with_dropout(case: Case) -> Found:
        return Found(case=case, outcome=FAILED if case.dropout else FINE)

    monkeypatch.setattr(random_cases, "judge", fails_with_dropout)
    case = Case(seed=3, source="toy:words", wrapper="step", how="scaler", dropout=0.1, tied=True, layers=4)
    least = Case(seed=3, source="toy:words", dropout=0.1, layers=1, optimizer="none", budget=0.0)
    assert random_cases.shrunk(case) == least


@pytest.mark.slow
@pytest.mark.timeout(HOURS * 3600)
def test_a_thousand_cases() -> None:
    told = summary(run(range(1000), 2))
    print(json.dumps(told, indent=2))
    assert told["cases"] == 1000
    assert told["failures"] == []
    assert told["outcomes"][FINE] >= 800, "most of what is drawn has to be planned"
