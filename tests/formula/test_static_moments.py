"""Moments in bf16, whatever is updated."""

from __future__ import annotations

import pytest

from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of

PARAMETERS = 8_030_261_248  # of Llama 3 8B


def state(**words: str) -> int:
    stage = forecast(run_of("llama3-8b", RunRequest(**words))).stages[0]  # type: ignore[arg-type]
    return stage.static.state


@pytest.mark.parametrize(
    ("precision", "optimizer", "each"),
    [
        ("bf16-main32", "adamw", 12),
        ("bf16-main32", "adamw-bf16", 8),
        ("bf16-autocast", "adamw", 8),
        ("bf16-autocast", "adamw-bf16", 4),
        ("bf16-pure", "adamw-bf16", 4),
    ],
)
def test_bytes_of_state_for_each_parameter(precision: str, optimizer: str, each: int) -> None:
    assert state(precision=precision, optimizer=optimizer) == each * PARAMETERS
