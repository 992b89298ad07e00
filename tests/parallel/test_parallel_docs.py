"""The examples of docs/parallel.md run, on two ranks."""

from __future__ import annotations

import pytest

from support.parallel_docs import MICRO_BATCHES, run
from support.ranks import Launches


def test_examples(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, last = Launches(tmp_path_factory.getbasetemp(), run)[2]
    for rank in (first, last):
        assert [found["without"] for found in rank] == [[]] * 4, "every parameter has a gradient"
        tensor, *planned = (found["dropped"] for found in rank)
        assert tensor == 0
        assert all(dropped > 0 for dropped in planned)
    assert [first[-1]["losses"], last[-1]["losses"]] == [0, MICRO_BATCHES]
