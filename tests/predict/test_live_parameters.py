"""Parameters all-gathered module by module, against DeepSpeed's own coordinator and by whole numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.predict.forecast import forecast
from jettison.predict.live_parameters import Call, Coordinator, Parameter
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.layout import ZeroBuckets

TRACES = json.loads((Path(__file__).parents[1] / "facts" / "live_parameters.json").read_text())
BF16 = 2


def found(**words: Any) -> int:
    request = RunRequest(seq=512, like="deepspeed", recompute="full", **{"dp": 4, **words})
    return forecast(run_of("llama3-8b", request)).peak_bytes


@pytest.mark.parametrize("trace", TRACES)
def test_deepspeed_has_as_many_elements_at_every_call(trace: dict[str, Any]) -> None:
    """Live elements and their storages, but for what persists, of the fourth step of DeepSpeed 0.19.8 on two ranks."""
    numel: dict[str, int] = trace["parameters"]
    own: dict[str, list[int]] = {}
    for at, name in enumerate(numel):
        own.setdefault(name.rpartition(".")[0], []).append(at)
    calls = [
        Call(tuple(own.get(module, ())), backward=kind == "B", stays=kind == "B" and "embed" in module)
        for kind, module, _, _ in trace["calls"]
    ]
    parameters = [Parameter(count, BF16 * count) for count in numel.values()]
    coordinator = Coordinator(parameters=parameters, trace=calls, buckets=ZeroBuckets(**trace["buckets"]))
    peaks = coordinator.run()
    assert coordinator.fetched == [(elements, BF16 * storages) for *_, elements, storages in trace["calls"]]
    assert all(peak >= nbytes for peak, (_, nbytes) in zip(peaks, coordinator.fetched, strict=True))


def test_gradients_have_their_bucket_for_good() -> None:
    small, large = (found(zero=3, zero_buckets=f"live=0,reuse=0,prefetch=0,reduce={n}") for n in ("1e9", "2e9"))
    assert large - small == BF16 * 10**9


def test_a_full_bucket_is_reduced_through_a_copy() -> None:
    """Under ZeRO 2, too, which gathers nothing."""
    parameters = [Parameter(6, 0, gradient=6)] * 3
    calls = [Call((at,), backward=True, makes_gradients=True) for at in range(3)]
    coordinator = Coordinator(parameters=parameters, trace=calls, buckets=ZeroBuckets(reduce=12))
    assert coordinator.run() == [0, 0, BF16 * 12]


def test_one_rank_copies_each_parameter_from_the_host() -> None:
    """``NoGatherCoalescedHandle``: without the buffer that several parameters are gathered into."""
    parameters = [Parameter(6, BF16 * 6)] * 2
    peaks = {}
    for ranks in (1, 2):
        calls, buckets = [Call((0, 1))], ZeroBuckets(persist=0, live=0, reuse=0)
        peaks[ranks] = Coordinator(parameters=parameters, trace=calls, buckets=buckets, copying=ranks).run()
    assert peaks == {1: [BF16 * 12], 2: [2 * BF16 * 12]}


def test_overlap_has_a_second_bucket_under_zero_2() -> None:
    one, two = (found(zero=2, dp=64, zero_buckets=f"reduce=1e9,buckets={n}") for n in (1, 2))
    assert two - one == BF16 * 10**9


def test_more_live_parameters_take_more() -> None:
    peaks = [found(zero=3, dp=64, zero_buckets=f"live={n}") for n in ("0", "1e9", "2e9", "1e12")]
    assert peaks == sorted(peaks)
    assert peaks[2] > peaks[1] > peaks[0]


def test_transformers_sizes_follow_the_hidden_size() -> None:
    """``trainer_config_finalize``: h * h, 0.9 of it, and 10 h."""
    assert ZeroBuckets.parse("reduce=auto,prefetch=auto,persist=auto", hidden=64) == ZeroBuckets(
        reduce=4096, prefetch=3686, persist=640
    )
    assert ZeroBuckets.parse("live=2e9,sub-group=5", hidden=64) == ZeroBuckets(live=2 * 10**9, sub_group=5)
    assert ZeroBuckets.parse("default", hidden=64) == ZeroBuckets()
    assert ZeroBuckets.parse("none", hidden=64) is None


@pytest.mark.parametrize("text", ["", "live", "live=auto", "lives=1", "reduce=0", "reduce=-1", "prefetch=1e999"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="got --zero-buckets"):
        ZeroBuckets.parse(text, hidden=64)


def test_one_of_fsdp_and_deepspeed_gathers() -> None:
    with pytest.raises(UsageError, match="got --zero-buckets"):
        found(zero=3, zero_buckets="default", fsdp_version=1)
    assert run_of("llama3-8b", RunRequest(like="deepspeed", zero=3, dp=4, fsdp_version=1)).layout.buckets is None
    trainer = RunRequest(like="huggingface", zero=3, dp=4, zero_buckets="default")
    assert run_of("llama3-8b", trainer).layout.by_module
    assert not run_of("llama3-8b", RunRequest(like="deepspeed", zero=3, dp=4, zero_buckets="none")).layout.by_module
