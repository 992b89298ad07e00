"""Prices that do not depend on the machine, so that offload or recomputation is the cheaper one everywhere."""

from __future__ import annotations

import pytest


def every_op_takes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of a trace, and every packing of a tensor, whatever it would take here."""
    monkeypatch.setattr("jettison.dryrun.op_costs._KNOWN", {})
    monkeypatch.setattr("jettison.dryrun.op_costs.least_seconds", lambda *_: seconds)
    monkeypatch.setattr("jettison.planner.planner.packing_seconds", lambda *_: seconds)
