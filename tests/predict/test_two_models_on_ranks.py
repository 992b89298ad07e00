"""Two models, and packed documents, on two real ranks: what each allocates, beside what is forecast of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.predict.forecast import forecast
from jettison.spec.fine_tuning import FrozenModel, Role
from jettison.spec.layout import Layout
from support.formula_cases import run_of
from support.ranks import run_ranks
from support.two_models import CASE, LENGTH, peaks


@pytest.mark.slow
def test_both_ranks_allocate_what_is_forecast() -> None:
    """With AdamW, a reference or none, whole sequences or documents; replicas, and shards of both models by FSDP2."""
    found: list[dict[str, Any]] = run_ranks(peaks, 2)
    assert len(found[0]) == 8
    for key in found[0]:
        two, packed, shards = (word == "True" for word in key.split(" "))
        run = replace(run_of(CASE), layout=Layout(dp=2, zero=3 if shards else 0), packed=LENGTH if packed else 0)
        beside = FrozenModel(role=Role.REFERENCE, model=run.model)
        said = forecast(replace(run, frozen=(beside,) if two else ()))
        assert [rank[key] for rank in found] == [pytest.approx(said.peak_bytes, rel=0.002)] * 2
