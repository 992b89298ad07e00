"""Ranges of published runs: how often they hold runs that took no part, what classes borrow, and verdicts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import sqrt
from statistics import mean

import pytest
from benchmarks import accuracy, ranges
from benchmarks.ranges import Row, ordered, pool, quantile, shares, stated

from jettison.cli.main import run as run_command
from jettison.core.units import GIB, format_bytes
from jettison.predict.forecast import forecast
from jettison.predict.optimizer_step import flat_buffers, segments_after_update
from jettison.predict.ranges import (
    DATA,
    UNEVEN,
    Measure,
    classes_of,
    figures,
    fitting_bytes,
    kind_of,
    lineage,
    residual,
    segments_beyond,
)
from jettison.predict.stages import cached_segments, other_streams, outline, passes_of, segments_before_training
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.device_allowance import FitVerdict, Range, fixed_allowance
from jettison.spec.fine_tuning import Upcast
from jettison.spec.hardware import hardware
from jettison.spec.kernels import Device
from jettison.spec.layout import Layout
from jettison.spec.recompute import Mode, Recompute

ROWS = accuracy.stored()
CLASSES = classes_of(Measure.TIME, "torch", "dense", "h100-80gb")


def row(source: str, value: float, *, stack: str = "torch", hardware: str = "h100-80gb") -> Row:
    return Row(figure="time", source=source, stack=stack, kind="dense", hardware=hardware, run="", value=value)


@pytest.mark.parametrize("measure", list(Measure))
def test_ranges_hold_four_in_five_rows_of_sources_that_took_no_part(measure: Measure) -> None:
    """On each figure, counted by rows and counted by sources."""
    chosen = ranges.of_measure(ROWS, measure)
    _, held = ranges.ends_of(measure, chosen)
    for figure in {one.row.figure for one in held}:
        own = [one for one in held if one.row.figure == figure]
        assert min(shares(own)) >= ranges.CLAIMED, figure
        assert len({one.row.source for one in own}) >= 4
    assert len({one.row.source for one in held}) >= 5


@pytest.mark.parametrize(("figure", "publishers"), [("time", 34), ("allocated", 14), ("reserved", 3), ("device", 5)])
def test_ranges_hold_first_answers_of_four_in_five_publishers_whose_round_took_no_part(
    figure: str, publishers: int
) -> None:
    measure = ranges.FIGURES[figure]
    chosen = ranges.of_measure(ROWS, measure)
    ends, _ = ranges.ends_of(measure, chosen)
    held = ranges.first_answers(measure, chosen, ends, [one for one in chosen if one.figure == figure])
    assert len({ranges.of_round(one.row) for one in held}) >= publishers
    assert ranges.share_by(held, ranges.of_round) >= ranges.CLAIMED


def test_fragments_have_the_closest_ends_that_hold() -> None:
    """Each end has a factor of its own: neither can come closer without holding fewer than four in five of a figure."""
    chosen = ranges.of_measure(ROWS, Measure.FRAGMENTS)
    answered = [one for one in chosen if one.first is not None]
    (tail, below, above), _ = ranges.ends_of(Measure.FRAGMENTS, chosen)

    def least(*ends: float) -> float:
        today = ranges.cross_validated(Measure.FRAGMENTS, chosen, (tail, *ends))
        first = ranges.first_answers(Measure.FRAGMENTS, chosen, (tail, *ends), answered)
        found = []
        for figure in ("reserved", "device"):
            found.append(min(shares([one for one in today if one.row.figure == figure])))
            found.append(ranges.share_by([one for one in first if one.row.figure == figure], ranges.of_round))
        return min(found)

    assert least(below, above) >= ranges.CLAIMED
    assert max(least(below, above - 0.2), least(below - 0.2, above)) < ranges.CLAIMED


def test_first_answers_widen_ranges_but_for_stacks_whose_code_was_read() -> None:
    """They move ends of times, and of allocated bytes unless four in five rows of the stack agree today."""
    ends = (0.0, 1.0, 1.0)
    asked = [replace(row(name, 1.0), first=1.5, round="r") for name in "abcde"]
    assert stated(Measure.TIME, asked, CLASSES, ends) == Range(expected=1.0, low=1.0, high=1.5)
    agree = [replace(one, figure="allocated") for one in asked]
    classes = classes_of(Measure.ALLOCATED, "torch", "dense", "")
    assert stated(Measure.ALLOCATED, agree, classes, ends) == Range(expected=1.0, low=1.0, high=1.0)
    assert stated(Measure.ALLOCATED, agree, classes[2:], ends).high == 1.5  # of no stack
    assert stated(Measure.ALLOCATED, agree[1:], classes, ends).high == 1.5  # too few
    off = [replace(one, value=1.03) for one in agree[:2]]
    assert stated(Measure.ALLOCATED, [*off, *agree[2:]], classes, ends).high == 1.5


def test_a_round_is_held_against_ranges_without_it() -> None:
    rows = [replace(row(name, 1.0), first=2.0, round="left out") for name in "abc"]
    rows += [replace(row("d", 1.0), first=1.2, round="other")]
    held = ranges.first_answers(Measure.TIME, rows, (0.0, 1.0, 1.0), rows)
    assert [(one.range.high, one.inside) for one in held] == [(1.2, False)] * 3 + [(2.0, True)]
    assert ranges.share_by(held, ranges.of_round) == 0.25


def test_ranges_and_the_page_are_what_the_rows_say() -> None:
    assert DATA.read_text(encoding="utf-8") == accuracy.data(ROWS), "run python -m benchmarks.accuracy"
    written = accuracy.PAGE.read_text(encoding="utf-8")
    assert written == accuracy.page(accuracy.lines()), "run python -m benchmarks.accuracy"


def test_rows_are_what_is_predicted_today() -> None:
    written = accuracy.CSV.read_text(encoding="utf-8")
    assert written == accuracy.table(accuracy.entries()), "run python -m benchmarks.accuracy"


def test_a_range_holds_what_its_row_says() -> None:
    """Ends are in the unit of the figure, around what is predicted, and agree with the residual's verdict."""
    counted = [line for line in accuracy.lines() if line["inside"]]
    for line in counted:
        low, predicted, high, there = (float(line[name]) for name in ("low", "predicted", "high", "published"))
        digit = 10.0 ** -accuracy.DIGITS[line["unit"]]
        if line["figure"] != "time":  # whose expected value is corrected, what is modelled is not
            assert low - digit <= predicted <= high + digit, line
        near = max(digit, 1e-3 * there)
        assert (low - near <= there <= high + near) or line["inside"] == "no", line
    assert len(counted) >= 1314


def test_micro_batches_of_other_lengths_have_fragments_of_their_own() -> None:
    """Their rows are in no class of one length. Other measures have no such class."""
    uneven = [one for one in ROWS if UNEVEN in one.classes]
    assert {"ms-swift", "huggingface/blog", "unslothai/notebooks"} < {one.source for one in uneven}
    assert len(uneven) == 112
    assert {one.member_of for one in uneven} == {(UNEVEN,)}
    even, ragged = (
        run_of("llama3-8b", RunRequest(lora="r=16", like="huggingface", pad_to_longest=longest))
        for longest in (False, True)
    )
    assert kind_of(ragged) == f"{kind_of(even)}, {UNEVEN}"
    assert residual(Measure.FRAGMENTS, lineage(Measure.FRAGMENTS, ragged)).own_class
    alike, apart = (figures(run, 16 * GIB, step_seconds=1.0) for run in (even, ragged))
    assert (apart.allocated, apart.step_seconds) == (alike.allocated, alike.step_seconds)
    assert apart.reserved.high > alike.reserved.high
    beyond = (apart.reserved.high - 16 * GIB) / (4 * GIB)  # GiB over the square root of 16 GiB
    assert mean(one.value <= beyond for one in uneven) >= 0.9


def test_layouts_that_ran_and_that_ran_out_of_memory() -> None:
    """At most 5 % of the layouts that ran out are called fitting, at most 2 % of those that ran are not."""
    layouts = list(accuracy.layouts())
    found = Counter((ran, verdict) for _, ran, verdict in layouts)
    ran, out = (sum(found[there, verdict] for verdict in FitVerdict) for there in (True, False))
    assert (ran, out) == (164, 88)
    assert found[False, FitVerdict.FITS] <= 0.05 * out
    assert found[True, FitVerdict.DOES_NOT_FIT] <= 0.02 * ran
    sheets = [verdict for where, there, verdict in layouts if there and where == "of three sheets"]
    assert sheets.count(FitVerdict.FITS) >= 0.8 * len(sheets)  # posts are often of a longest context


def test_anchors_are_tried_as_answers_have_them() -> None:
    """An anchor's fragments replace part of the segments that a step caches, so that rows have to have these."""
    found = ranges.of_measure(ROWS, Measure.FRAGMENTS)
    assert sum(one.cached > 0 for one in found) > 0.9 * len(found)
    none = [replace(one, cached=0.0) for one in found]
    near, without = (ranges.anchored(Measure.FRAGMENTS, tuple(rows)) for rows in (found, none))
    assert mean(abs(one.value) for one in near) < mean(abs(one.value) for one in without)


def test_a_source_weighs_one_however_many_rows_it_has() -> None:
    rows = [*(row("many", 2.0) for _ in range(100)), *(row(name, 1.0) for name in "abcdef")]
    found = pool(Measure.TIME, rows, CLASSES)
    assert {source: weight for source, (weight, _) in found.items()} == dict.fromkeys(("many", *"abcdef"), 1.0)
    assert [quantile(ordered(found.values()), share) for share in (0.5, 0.86)] == [1.0, 2.0]


def test_a_class_of_few_sources_borrows_what_it_lacks() -> None:
    """One source of its own, and eight of the class above: these have six parts of seven together."""
    rows = [row("own", 2.0), *(row(name, 1.0, hardware="a100-80gb") for name in "abcdefgh")]
    found = pool(Measure.TIME, rows, CLASSES)
    assert found["own"][0] == 1.0
    assert sum(weight for weight, _ in found.values()) == pytest.approx(7)
    own = pool(Measure.TIME, [*rows, *(row(name, 2.0) for name in "uvwxyz")], CLASSES)
    assert own.keys() == {"own", *"uvwxyz"}


def test_a_vendors_models_are_one_source() -> None:
    models = [row(f"vendor, {name}", 2.0) for name in "abcdefgh"]
    found = pool(Measure.TIME, [*models, row("guest", 1.0)], CLASSES)
    assert found == {"vendor": (1.0, [2.0] * 8), "guest": (1.0, [1.0])}
    assert [
        one.range.high for one in ranges.cross_validated(Measure.TIME, [*models, row("guest", 1.0)], (0.0, 1.0, 1.0))
    ] == [1.0] * 8 + [2.0]


def test_times_are_corrected_towards_the_median_and_bytes_never() -> None:
    """Seven sources and the model, which counts as seven: half of the way; fourteen: two thirds."""
    slow = [row(name, value) for name, value in zip("abcdefg", (1.1, 1.2, 1.3, 1.4, 0.9, 1.0, 1.25), strict=True)]
    assert stated(Measure.TIME, slow, CLASSES, (0.0, 1.0, 1.0)) == Range(expected=1.1, low=0.9, high=1.4)
    more = [*slow, *(row(name, 1.3) for name in "tuvwxyz")]
    assert stated(Measure.TIME, more, CLASSES, (0.0, 1.0, 1.0)).expected == pytest.approx(1.2)
    assert stated(Measure.ALLOCATED, slow, CLASSES, (0.0, 1.0, 1.0)) == Range(expected=1.0, low=0.9, high=1.4)
    apart = [replace(one, figure="reserved", value=one.value - 1.25) for one in slow]
    classes = classes_of(Measure.FRAGMENTS, "torch", "dense", "")
    assert stated(Measure.FRAGMENTS, apart, classes, (0.0, 1.0, 1.0)).expected == 0  # no allocator reserves less
    more = [replace(one, value=one.value + 0.25) for one in apart]
    assert stated(Measure.FRAGMENTS, more, classes, (0.0, 1.0, 1.0)).expected == pytest.approx(0.2)


def test_reserved_is_beyond_allocated_and_device_beyond_reserved() -> None:
    run = run_of("llama3-8b", RunRequest(like="huggingface", dp=8, zero=3))
    found, fixed = figures(run, 16 * GIB, step_seconds=2.0), fixed_allowance(run.layout, run.kernels.device)
    beyond = residual(Measure.FRAGMENTS, lineage(Measure.FRAGMENTS, run))
    cached = segments_beyond(run, 16 * GIB)
    assert found.reserved.expected == pytest.approx(cached + (16 + 4 * beyond.expected) * GIB)  # 4: the root of 16
    assert found.device.expected == found.reserved.expected + fixed.expected
    assert (found.device.low, found.device.high) == (found.reserved.low + fixed.low, found.reserved.high + fixed.high)
    assert found.step_seconds is not None and found.step_seconds.low < 2.0 < found.step_seconds.high
    assert fixed_allowance(Layout(dp=4, tp=2), Device.CUDA).expected - fixed.expected == GIB // 2  # a communicator


def test_segments_of_a_layers_forward_are_cached_while_logits_are_allocated() -> None:
    """The layer's forward less what it keeps, weights that ZeRO 3 gathers, and a fifth of the head's forward."""
    run = run_of("llama3-8b", RunRequest(like="torchtitan", seq=4096, dp=8, zero=3, recompute="full"))
    stage = forecast(run).worst
    (layer,) = {part for part in stage.parts[0] if part.name == "layers.0"}
    passes = [passes_of(part, run.gradient_rule) for part in (layer, stage.parts[0][-1])]
    gathered = sum(2 * w.numel for w in layer.region.weights)
    of_layer = passes[0].forward_peak - passes[0].resident + gathered
    assert cached_segments(run) == of_layer + passes[1].forward_peak // 5
    assert cached_segments(run) < cached_segments(replace(run, micro_batch=2)) < 2 * cached_segments(run)
    planned = cached_segments(replace(run, recompute=Recompute(mode=Mode.AUTO)))
    assert planned == cached_segments(run) > cached_segments(replace(run, recompute=Recompute()))
    long = run_of("llama3-8b", RunRequest(like="huggingface", kernels="liger", lora="r=8", base="nf4", seq=2**18))
    few = segments_after_update(long)
    assert cached_segments(long) > few // 4 == segments_beyond(long, few)  # a quarter of allocated bytes at most


def test_cached_segments_are_freed_where_a_device_is_full() -> None:
    """Up to what the device has beyond allocated bytes and the fixed parts."""
    run = run_of("llama3-8b", RunRequest(like="torchtitan", seq=4096, dp=8, zero=3, recompute="full"))
    room = hardware("h100-80gb").usable_bytes - fixed_allowance(run.layout, run.kernels.device).expected
    beyond = segments_beyond(run, 40 * GIB)
    assert segments_beyond(run, 40 * GIB, "h100-80gb") == beyond
    assert segments_beyond(run, room - GIB, "h100-80gb") == GIB < beyond
    assert segments_beyond(run, room + GIB, "h100-80gb") == 0


def test_segments_of_casts_before_the_first_step() -> None:
    """Embedding and head take fp32 copies over 4 bits; transformers 4.57 allocates half of the 16-bit base before."""
    lora = RunRequest(like="huggingface-4.57", base="nf4-double", lora="r=32", optimizer="adam8bit", recompute="full")
    run = run_of("qwen3-8b", replace(lora, seq=256))
    table = 151936 * 4096
    plain = sum(
        len(group.names) * group.part.static.parameters
        for group in outline(replace(run, tuning=replace(run.tuning, upcast=Upcast.NONE)))[0][0]
    )
    assert segments_before_training(run) == plain + 2 * 4 * table
    ahead = segments_before_training(run, "a100-40gb")  # without the head; adapters fit into it
    assert ahead == 8_190_735_360 - table + 2 * 4 * table
    assert ahead == pytest.approx(11.959 * GIB, rel=0.03)  # TRL's sft_trl_lora_qlora.ipynb, 28bba8c6b
    free = hardware("t4-16gb").usable_bytes - 12 * GIB // 10
    assert segments_before_training(run, "t4-16gb") == free // 2 + 2 * 4 * table
    mistral = run_of("mistral-7b", lora)  # both copies fit into what is freed
    assert segments_before_training(mistral, "a100-40gb") == 7_241_732_096 - 32000 * 4096
    for other in (replace(lora, kbit_upcast="none"), replace(lora, like="huggingface")):
        assert segments_before_training(run_of("qwen3-8b", other), "a100-40gb") == 0
    older = run_of("qwen3-8b", replace(lora, like="huggingface-4.48"))
    assert segments_before_training(older, "a100-40gb") == segments_before_training(older)
    found, peak = figures(run, 7 * GIB, hardware="a100-40gb"), 7 * GIB
    beyond = residual(Measure.FRAGMENTS, lineage(Measure.FRAGMENTS, run))
    assert found.reserved.expected == pytest.approx(ahead + beyond.expected * sqrt(peak * GIB))
    assert figures(run, 30 * GIB, hardware="a100-40gb") == figures(run, 30 * GIB)  # steps need more


def test_streams_of_fsdp_have_segments_of_their_own() -> None:
    """Shards of gradients, unless a micro-batch before had them at the peak, and the largest gathered unit."""
    run = run_of("llama3-8b", RunRequest(like="torchtitan", dp=8, zero=3, recompute="full"))
    head, shards = 2 * (128256 + 1) * 4096, 8_030_261_248 // 8
    assert other_streams(run) == pytest.approx(head + 4 * shards, rel=1e-4)
    assert other_streams(replace(run, micro_batches=2)) == head  # with the final norm
    assert segments_beyond(run, 40 * GIB) == cached_segments(run) + other_streams(run)
    for other in ({"like": "deepspeed"}, {"like": "torchtitan", "zero": 2}, {"like": "torchtitan", "dp": 1}):
        assert other_streams(run_of("llama3-8b", RunRequest(**({"dp": 8, "zero": 3} | other)))) == 0


def test_flat_gradients_of_deepspeed_have_segments_of_their_own() -> None:
    """Two copies of a rank's gradients, which a peak within the step has, and a bucket under ZeRO 1."""
    given = RunRequest(like="deepspeed", dp=4, zero=1, recompute="full", micro_batches=2)
    run, copies, bucket = run_of("llama3-8b", given), 6 * 8_030_261_248 // 4, 2 * 500_000_000
    assert flat_buffers(run, 80 * GIB) == copies + bucket
    assert flat_buffers(run, 40 * GIB) == bucket
    assert segments_beyond(run, 80 * GIB) == cached_segments(run) + copies + bucket
    assert flat_buffers(run_of("llama3-8b", replace(given, zero=2)), 80 * GIB) == copies
    for other in ({"zero": 3}, {"zero": 2, "offload_optimizer": "deepspeed"}, {"optimizer": "adamw"}):
        assert flat_buffers(run_of("llama3-8b", replace(given, **other)), 80 * GIB) == 0


@pytest.mark.parametrize("size", [2, 16, 120, 700])
@pytest.mark.parametrize("like", ["megatron-0.19", "torchtitan", "huggingface", "unsloth"])
def test_no_end_of_reserved_is_below_that_of_allocated_nor_of_device_below_reserved(like: str, size: int) -> None:
    found = figures(run_of("mixtral-8x7b", RunRequest(like=like, seq=1024)), size * GIB)
    for end in ("low", "expected", "high"):
        ends = [getattr(one, end) for one in (found.allocated, found.reserved, found.device)]
        assert ends == sorted(ends), end
    assert found.least >= found.allocated.low


@pytest.mark.parametrize("like", ["megatron-0.19", "torchtitan", "huggingface"])
def test_bytes_that_fit_are_the_most(like: str) -> None:
    """One more byte and the upper end of the device's range, or what is expected of it, is beyond the device."""
    run, usable = run_of("gpt2", RunRequest(like=like)), 80 * GIB
    surely, expected = (fitting_bytes(run, usable, surely=sure) for sure in (True, False))
    assert 0 < surely < expected < usable
    assert figures(run, surely).device.high <= usable < figures(run, surely + 1).device.high
    assert figures(run, expected).device.expected <= usable < figures(run, expected + 1).device.expected
    assert figures(run, surely).verdict(usable_bytes=usable) is FitVerdict.FITS
    assert figures(run, surely + 1).verdict(usable_bytes=usable) is FitVerdict.CLOSE
    assert fitting_bytes(run, 0, surely=True) == 0


def test_a_stack_of_another_frameworks_kernels_is_no_class() -> None:
    own = run_of("llama3-8b", RunRequest(like="megatron-0.19", stack="nemo-26.06"))
    other = run_of("llama3-8b", RunRequest(like="torchtitan", stack="nemo-26.06"))
    torch = run_of("llama3-8b", RunRequest(like="huggingface", stack="torch-2.11"))
    classes = [lineage(Measure.TIME, run)[0] for run in (own, other, torch)]
    assert classes == ["nemo, dense, ", "torch, dense, ", "transformers, dense, "]


def test_on_the_cpu_nothing_is_reserved_beyond_tensors() -> None:
    run = run_of("gpt2", RunRequest())
    found = figures(replace(run, kernels=run.kernels.on_cpu()), GIB)
    assert found.allocated == found.reserved == found.device


def test_needs_name_the_low_end_of_the_verdict() -> None:
    """Cached blocks that can be freed are in the range of device bytes, but no reason for *does not fit*."""
    run = run_of("qwen2.5-7b", RunRequest(like="huggingface", micro_batch=4, recompute="full"))
    found, spared = figures(run, 20 * GIB), figures(replace(run, kernels=run.kernels.on_cpu()), 20 * GIB)
    assert found.verdict(usable_bytes=round(found.least) + 1) is FitVerdict.CLOSE
    assert f"or at least {format_bytes(round(found.least))} where" in found.needs
    assert found.least < found.device.low
    assert "at least" not in spared.needs


def test_verdicts_are_of_both_limits() -> None:
    found = figures(run_of("llama3-8b", RunRequest()), 16 * GIB)
    low, high = round(found.least), round(found.device.high)
    for usable, verdict in (
        (high + 1, FitVerdict.FITS),
        (high - 1, FitVerdict.CLOSE),
        (low + 1, FitVerdict.CLOSE),
        (low - 1, FitVerdict.DOES_NOT_FIT),
    ):
        assert found.verdict(usable_bytes=usable) is verdict
    assert found.verdict() is FitVerdict.FITS
    assert found.verdict(usable_bytes=high + 1, budget_bytes=16 * GIB) is FitVerdict.CLOSE
    assert found.verdict(usable_bytes=low - 1, budget_bytes=1 << 50) is FitVerdict.DOES_NOT_FIT


@pytest.mark.parametrize("verb", ["ledger", "plan", "estimate", "search"])
def test_a_host_has_allocated_bytes_alone(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever kernels are named: no GPU's allocator or driver takes anything there."""
    own = ["--gpus", "1", "--global-batch", "1"] if verb == "search" else []
    command = [verb, "gpt2", "--gpu", "cpu-23gb", "--seq", "512", "--kernels", "huggingface", *own]
    assert run_command(command) == 0
    said = capsys.readouterr().out
    assert "nvidia-smi" not in said
    assert "by the caching allocator" not in said
    assert run_command([*command, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    found = found["candidates"][0]["figures"] if verb == "search" else found["figures"]
    assert found["allocated_bytes"] == found["reserved_bytes"] == found["device_bytes"]
