"""Budgets that are not given in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jettison
from jettison.core.errors import UsageError
from jettison.core.units import format_bytes
from jettison.planner import budget as room
from jettison.planner.budget import budget_of
from jettison.runtime import offload
from support.toys import Headed, Mlp

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable:    4194304 kB\nBuffers: 1 kB\n")
    monkeypatch.setattr(offload, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(offload, "GROUP", tmp_path)
    return tmp_path


def test_bytes_are_bytes() -> None:
    assert budget_of("8GiB", [nn.Linear(2, 2)]) == room.Budget(nbytes=8 * GIB)
    for number in (123, jettison.Bytes(123), torch.tensor(123)):
        assert budget_of(number, [nn.Linear(2, 2)]).nbytes == 123


@pytest.mark.parametrize("asked", [0.9, 8.0, True, "8", None])
def test_what_is_no_budget_is_refused_with_all_that_is_one(asked: Any) -> None:
    with pytest.raises(UsageError, match='or "90%" of what the device has left, or "auto"'):
        budget_of(asked, [nn.Linear(2, 2)])


def test_what_a_machine_has_left(machine: Path) -> None:
    """What the model holds already is part of it: the budget counts parameters, too."""
    model = nn.Linear(1024, 1024, bias=False)
    left = 4 * GIB + 1024 * 1024 * 4
    assert budget_of("auto", [model]).nbytes == int(left * 0.95)
    assert budget_of(" 90 %", [model]).nbytes == int(left * 0.9)
    assert budget_of("12.5%", [model, model]).nbytes == left // 8  # a model that is there twice counts once
    assert budget_of("auto", [model]).words == (
        "3.80 GiB: 95.0 % of the 4.00 GiB that this machine's memory has left for this process"
    )


def test_ranks_of_a_host_share_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget_of("50%", [nn.Module()]).nbytes == GIB // 2


def test_a_container_may_have_less(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{3 * GIB}\n")
    (machine / "memory.current").write_text(f"{GIB}\n")
    assert budget_of("50%", [nn.Module()]).nbytes == GIB
    (machine / "memory.max").write_text("max\n")
    assert budget_of("50%", [nn.Module()]).nbytes == 2 * GIB


@pytest.mark.parametrize(("asked", "text"), [("0%", "above 0 %"), ("101%", "up to 100 %"), ("all", "number of bytes")])
def test_other_words_are_refused(machine: Path, asked: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        budget_of(asked, [nn.Linear(2, 2)])


def test_a_machine_that_does_not_say(machine: Path) -> None:
    (machine / "meminfo").unlink()
    with pytest.raises(UsageError, match="give the budget in bytes"):
        budget_of("auto", [nn.Linear(2, 2)])


def test_a_model_is_planned_for_what_is_left(machine: Path) -> None:
    model, x = Headed([Mlp(32, 128) for _ in range(4)], 32, 8), torch.randn(64, 32)
    said: list[str] = []
    handle = jettison.auto_checkpoint(model, (x,), "auto", progress=said.append)
    assert handle.plan is not None
    assert handle.plan.budget_bytes == budget_of("auto", [model], (x,)).nbytes
    assert said[0] == "planning Headed under a budget of what the device has left"
    assert said[1] == f"budget {handle.budget}"
    assert said[-1].startswith(f"planned Headed: budget {format_bytes(handle.plan.budget_bytes)}, predicted peak ")
    assert "95.0 %" in handle.budget
