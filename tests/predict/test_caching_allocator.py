"""The caching allocator's rules, and steps that are replayed by them."""

from __future__ import annotations

import pytest
from benchmarks.caching_allocator import CachingAllocator, simulated

from jettison.core.units import MIB
from jettison.predict.forecast import forecast
from jettison.predict.stages import cached_segments
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of


def test_segments_of_the_allocator() -> None:
    """2 MiB for a small block, 20 MiB below 10 MiB, own ones above; what is split off and freed is taken again."""
    found = CachingAllocator()
    for key, nbytes, reserved in (("a", 1, 2), ("b", MIB + 1, 22), ("c", 11 * MIB, 22), ("d", 11 * MIB + 1, 34)):
        found.allocate((key,), nbytes)
        assert found.reserved == reserved * MIB, key
    for key in ("b", "c"):
        found.free((key,))
    found.allocate(("e",), 20 * MIB)  # both and what was left are one block again
    assert (found.reserved, found.peak) == (34 * MIB, 512 + 20 * MIB + 12 * MIB)  # 12: too little is left to split
    found.allocate(("f",), 13 * MIB)  # the free rest of no segment is that large
    assert found.reserved == 48 * MIB


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_replayed_step_allocates_what_is_predicted(recompute: str) -> None:
    """And reserves less than twice the modelled segments in addition."""
    run = run_of(
        "llama3.2-1b", RunRequest(like="huggingface", lora="r=8", seq=2048, micro_batch=2, recompute=recompute)
    )
    found, peak = simulated(run), forecast(run).peak_bytes
    assert found.peak == pytest.approx(peak, rel=0.02)
    assert 0.5 * cached_segments(run) < found.reserved - found.peak < 2 * cached_segments(run)
