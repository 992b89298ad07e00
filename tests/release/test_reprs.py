"""What users are handed is one line where it is printed: in a traceback, a debugger, a log."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import jettison
from jettison.frameworks.trainer_integration import TrainerPlan
from jettison.planner.handle import Applied
from support.toys import Headed, Mlp

LONGEST = 160
LLAMA = {"seq": 8192, "dp": 8, "zero": 3}


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


class Trainer:
    def training_step(self) -> None: ...


class ToyPlan(TrainerPlan):
    method = "training_step"

    def plan(self, *args: Any, **kwargs: Any) -> Applied:
        raise NotImplementedError


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """An object of each kind, as public functions return them."""
    model, x = Headed([Mlp(16, 64) for _ in range(4)], 16, 8), torch.randn(64, 16)
    run = jettison.run_of("llama3-8b", jettison.RunRequest(**LLAMA))
    asked = jettison.SearchRequest(seq=512, cp="1", tp="1", pp="1", recompute="none")
    traced = jettison.trace(model, (x,))
    handle = jettison.auto_checkpoint(model, (x,), "1MiB")
    assert handle.plan is not None
    model(x).backward()
    by_policy = jettison.apply(Headed([Mlp(16, 64), Mlp(16, 64)], 16, 8), "full", batch=(x,))
    with jettison.watch(model, out=tmp_path_factory.mktemp("watch") / "watch.json") as watched:
        pass
    return {
        "Applied": handle,
        "Applied, by a policy": by_policy,
        "Plan": handle.plan,
        "RegionReport": handle.report()[0],
        "Proof": jettison.verify(model=Headed([Mlp(8, 32)], 8, 8), batch=(x[:, :8],), budget="1GiB", rounds=1),
        "ModelTrace": traced,
        "Ledger": jettison.ledger_of(traced),
        "Run": run,
        "Forecast": jettison.forecast(run),
        "Estimate": jettison.estimate(run, jettison.hardware("h100-80gb")),
        "Hardware": jettison.hardware("h100-80gb"),
        "ModelSpec": jettison.preset("llama3-405b"),
        "Layout": run.layout,
        "RunRequest": jettison.RunRequest(**LLAMA),
        "SearchRequest": asked,
        "SearchReport": jettison.search("gpt2", asked, gpus=2, gpu="a100-80gb", global_batch=4),
        "LoopWatch": watched,
        "ToyPlan": ToyPlan(Trainer(), "8GiB", {}),
    }


def test_a_public_object_is_one_line(found: dict[str, object]) -> None:
    for name, one in found.items():
        for text in (repr(one), str(one)):
            assert len(text) <= LONGEST and "\n" not in text, (name, text)
            assert type(one).__name__ in text, (name, text)


def test_no_public_class_is_left_out(found: dict[str, object]) -> None:
    public = {name: getattr(jettison, name) for name in jettison.__all__}
    classes = {
        name
        for name, one in public.items()
        if inspect.isclass(one) and dataclasses.is_dataclass(one) and not issubclass(one, BaseException)
    }
    assert classes <= {type(one).__name__ for one in found.values()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Applied", "budget 1.00 MiB, predicted peak "),
        ("Applied", "overhead 0.0 %>"),
        ("Applied, by a policy", "<Applied: policy full, 2 blocks>"),
        ("ToyPlan", "<ToyPlan: budget 8.00 GiB, no batch so far>"),
        ("RunRequest", "RunRequest(seq=8192, dp=8, zero=3)"),
        ("Layout", "Layout(dp=8, zero=3)"),
        ("Proof", "<Proof: passed, measured peak "),
    ],
)
def test_it_says_what_matters(found: dict[str, object], name: str, text: str) -> None:
    assert text in repr(found[name])


def test_requests_are_written_as_they_can_be_written_again() -> None:
    for one in (jettison.RunRequest(**LLAMA), jettison.Layout(dp=8, zero=3), jettison.SearchRequest(tp="1,2")):
        assert eval(repr(one), vars(jettison) | {type(one).__name__: type(one)}) == one


def test_a_plan_that_was_removed_says_so() -> None:
    model, x = nn.Sequential(Mlp(8, 32), Mlp(8, 32)), torch.randn(4, 8)
    handle = jettison.auto_checkpoint(model, (x,), 2**30, loss_fn=loss)
    handle.remove()
    assert repr(handle).startswith("<Applied: removed; budget 1.00 GiB")
