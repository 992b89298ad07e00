"""The caching allocator's rules, and steps that are replayed by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.blind_runs import described
from benchmarks.caching_allocator import CachingAllocator, simulated, simulated_pipeline

from jettison.core.units import GIB, MIB
from jettison.predict.forecast import forecast
from jettison.predict.optimizer_step import segments_after_update
from jettison.predict.ranges import segments_beyond
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


def test_longer_micro_batches_leave_segments_of_shorter_ones() -> None:
    """About two more sets of what the head's passes allocate, where lengths grow, and none in the opposite order."""
    given = RunRequest(like="huggingface", lora="r=8", seq=2048, recompute="full")
    run, uneven = (run_of("llama3.2-1b", replace(given, pad_to_longest=apart)) for apart in (False, True))
    lengths = [256 * n for n in (1, 2, 4, 3, 5, 6, 8, 7)]

    def unused(order: Sequence[int]) -> int:
        found = simulated(uneven, [(length,) for length in order])
        return found.reserved - found.peak

    logits = 3 * 4 * 2048 * 128256  # fp32: logits, their log-softmax, the gradient
    assert 2 * logits < cached_segments(uneven) < 2.1 * logits
    assert cached_segments(uneven) < unused(lengths) < 1.2 * cached_segments(uneven)
    assert unused(sorted(lengths, reverse=True)) < 2 * cached_segments(run) < 0.25 * cached_segments(uneven)
    assert segments_beyond(uneven, 3 * logits) == cached_segments(uneven)  # more than a quarter


def test_expandable_segments_grow_with_lengths() -> None:
    like = RunRequest(like="unsloth", lora="r=8", seq=2048)
    assert cached_segments(run_of("llama3.2-1b", replace(like, pad_to_longest=True))) == cached_segments(
        run_of("llama3.2-1b", like)
    )


def test_optimizer_state_takes_segments_of_logits() -> None:
    """From the second step on all that an update holds is reserved, and another set of logits."""
    given = RunRequest(like="huggingface", optimizer="adamw-foreach", micro_batch=4, seq=1024, recompute="full")
    run = run_of("llama3.2-1b", given)
    first, second = (simulated(run, [()] * steps).reserved for steps in (1, 2))
    update = 5 * forecast(run).worst.static.parameters  # a gradient, two moments and a temporary of each
    logits = 3 * 4 * 4 * 1024 * 128256  # fp32: logits, their log-softmax, the gradient
    assert update + logits < segments_after_update(run) < update + 1.1 * logits
    assert first + 4 * GIB < second == pytest.approx(segments_after_update(run), rel=0.03)
    assert segments_beyond(run, update) == segments_after_update(run) - update
    plain, in_backward = (replace(given, optimizer="adamw", gradients=g) for g in ("one-by-one", "in-backward"))
    held = [segments_after_update(run_of("llama3.2-1b", one)) for one in (given, plain, in_backward)]
    assert [held[0] - nbytes for nbytes in held[1:]] == [update // 5, 2 * update // 5]  # temporaries; gradients


def test_flat_gradients_of_a_pipeline_do_not_fit_into_what_passes_free() -> None:
    """BigScience's layouts at one, two and four sequences: the mean of what is reserved beyond the peak."""
    given = (
        "--kernels megatron --like deepspeed --attention eager --dropout 0.1 --seq 2048 --tp 8 --no-sp --pp 12 --dp 4"
    )
    shares = []
    for micro_batch in (1, 2, 4):
        command = f"tests/facts/blind/meg-181b.json {given} --zero 1 --micro-batches 64 --recompute full"
        run = described(f"{command} --micro-batch {micro_batch}")
        found, peak = simulated_pipeline(run), forecast(run).stages[0].peak_bytes
        assert found.peak == pytest.approx(peak, rel=0.02)
        shares.append((found.reserved - peak) / segments_beyond(run, peak))
    assert 0.75 < min(shares) < max(shares) < 2
    assert 1 < sum(shares) / len(shares) < 1.5
