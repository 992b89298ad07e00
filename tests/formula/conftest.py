"""Families that a file of tests describes are known to the cases in it."""

from __future__ import annotations

import pytest

from support import formula_cases
from support.formula_cases import TinyFamily


@pytest.fixture(autouse=True)
def own_families(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its tables `TINY` and `REAL`, if it has any."""
    tables = [getattr(request.module, name, {}) for name in ("TINY", "REAL")]
    own = {name: family for table in tables for name, family in table.items() if isinstance(family, TinyFamily)}
    if own:
        monkeypatch.setattr(formula_cases, "FAMILIES", formula_cases.FAMILIES | own)
