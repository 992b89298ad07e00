"""What moves under FSDP2 and tensor parallelism: parts of DTensors, beside parameters that are gathered and let go."""

from __future__ import annotations

import pytest

from support.offload_ranks import BLOCKS, check
from support.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrappers", "own"),
    [(["fsdp"], True), (["tensor parallel", "tensor parallel, dtensor"], False)],
    ids=["fsdp", "tensor parallel"],
)
def test_ranks(wrappers: list[str], own: bool) -> None:
    for rank in run_ranks(check, 2, {"wrappers": wrappers, "own": own}):
        assert rank.keys() == {f"{how}, {word}" for how in wrappers for word in ("all", "inputs")}
        for case, found in rank.items():
            assert not found["differing"] and not found["races"] and not found["fallbacks"], (case, found)
            assert found["left"] == 0
            tensors = 3 if case.endswith("all") else 1  # the input, what goes into GELU, what comes out
            assert found["slots"] == found["out"] == tensors * (BLOCKS - 1), case  # the last block's stay
