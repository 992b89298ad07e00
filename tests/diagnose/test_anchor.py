"""Anchors: a measured run is explained by the fewest quantities, and others of its stack are corrected by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.core.errors import UsageError
from jettison.core.units import GIB, MIB
from jettison.diagnose.fit_anchor import fit_anchor, fragment_bytes
from jettison.predict.forecast import available_bytes, buffers, extra_bytes, forecast
from jettison.predict.ranges import ANCHORED, Measure, figures, lineage, residual, segments_beyond, unlike_anchor
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.anchor import BUFFERS, MeasuredRun, RunAnchor, parse_measured, read_anchor
from jettison.spec.device_allowance import fixed_allowance
from jettison.spec.hardware import hardware, slower
from jettison.spec.run import anchored

RUN = run_of("llama3-8b", RunRequest(seq=4096, dp=8, zero=3, recompute="full", like="torchtitan"))
H100 = hardware("h100-80gb")
HEAD = 'schema = "jettison.anchor/1"\nstack = "a"\n[measured]\n'


def fitted(measured: MeasuredRun) -> RunAnchor:
    return fit_anchor(RUN, measured, hardware=H100, stack="torchtitan", command="jettison ledger llama3-8b")


def test_a_step_is_the_measured_one_and_a_network_that_hides_keeps_its_prior() -> None:
    took = estimate(RUN, H100).step_seconds
    anchor = fitted(MeasuredRun(step=1.3 * took))
    again = replace(RUN, anchor=anchor)
    assert estimate(again, H100).step_seconds == pytest.approx(1.3 * took, rel=1e-3)
    assert anchor.compute == pytest.approx(1.3, abs=0.05)
    assert anchor.communication < 1.15
    run, device = anchored(again, H100)
    assert estimate(run, device).step_seconds == estimate(again, H100).step_seconds
    assert estimate(again, H100).peak_flops_per_second == estimate(RUN, H100).peak_flops_per_second


@settings(max_examples=15)
@given(factor=st.floats(0.5, 4.0))
def test_any_step_can_be_explained(factor: float) -> None:
    took = estimate(RUN, H100).step_seconds
    anchor = fitted(MeasuredRun(step=factor * took))
    assert estimate(replace(RUN, anchor=anchor), H100).step_seconds == pytest.approx(factor * took, rel=1e-9)


@pytest.mark.parametrize("factor", [0.8, 0.95, 2.0, 5.0])
def test_a_step_of_a_host_that_cannot_keep_up_is_the_measured_one(factor: float) -> None:
    """Kernels that hide behind launches and launches behind kernels: what is left of each moves with the factors."""
    run = run_of("gpt2", RunRequest(seq=1024))
    took = estimate(run, H100).step_seconds
    anchor = fit_anchor(run, MeasuredRun(step=factor * took), hardware=H100, stack="pytorch", command="")
    assert estimate(replace(run, anchor=anchor), H100).step_seconds == pytest.approx(factor * took, rel=1e-9)


def test_copies_of_a_buffer_explain_bytes_that_are_left_over() -> None:
    found = forecast(RUN)
    for name, size in buffers(found):
        assert size > 0
        anchor = fitted(MeasuredRun(allocated=found.peak_bytes + size))
        if size < 0.02 * found.peak_bytes:
            assert (anchor.copies, anchor.unexplained) == (0, size)
            continue
        assert anchor.copies == 1
        twice = replace(RUN, micro_batch=2)
        of_tokens = name.startswith(("logits", "residual"))
        own = dict(buffers(found))[anchor.buffer]
        assert extra_bytes(anchor, RUN) == own
        assert extra_bytes(anchor, twice) == own * (1 + of_tokens) or anchor.buffer != name
    exact = fitted(MeasuredRun(allocated=found.peak_bytes))
    assert (exact.copies, exact.unexplained) == (0, 0)
    odd = fitted(MeasuredRun(allocated=found.peak_bytes + 777 * MIB))
    assert (odd.unexplained, extra_bytes(odd, RUN)) == (777 * MIB, 0) or odd.copies


def test_the_gap_to_the_device_is_context_and_fragments() -> None:
    peak = forecast(RUN).peak_bytes
    fixed = fixed_allowance(RUN.layout, RUN.kernels.device).expected
    apart = MeasuredRun(allocated=peak, reserved=peak + 3 * GIB, device=peak + 5 * GIB)
    anchor = fitted(apart)
    assert fragment_bytes(anchor, peak) == 3 * GIB
    assert fragment_bytes(anchor, 4 * peak) == 6 * GIB
    assert anchor.context == 2 * GIB - fixed
    both = fitted(MeasuredRun(allocated=peak, device=peak + 5 * GIB))
    assert (fragment_bytes(both, peak), both.context) == (5 * GIB - fixed, 0)
    less = fitted(MeasuredRun(allocated=peak, device=peak + fixed - GIB))
    assert (less.fragments, less.context) == (0, -GIB)


def test_less_than_tensors_are_predicted_to_take_is_unexplained() -> None:
    peak = forecast(RUN).peak_bytes
    for measured in (MeasuredRun(reserved=peak - GIB), MeasuredRun(device=peak - GIB)):
        anchor = fitted(measured)
        assert (anchor.fragments, anchor.unexplained) == (0, -GIB)
        found = figures(replace(RUN, anchor=anchor), peak)
        assert found.allocated.expected <= found.reserved.expected <= found.device.expected
        assert found.allocated.low <= found.reserved.low <= found.device.low
    with pytest.raises(UsageError, match="which has 80"):
        fitted(MeasuredRun(device=81 * GIB))


def test_an_anchor_of_a_prediction_changes_no_expected_figure() -> None:
    peak, took = forecast(RUN).peak_bytes, estimate(RUN, H100).step_seconds
    plain = figures(RUN, peak)
    sizes = {name: round(getattr(plain, name).expected) for name in ("allocated", "reserved", "device")}
    anchor = fitted(MeasuredRun(**sizes, step=took))
    again = replace(RUN, anchor=anchor)
    near = figures(again, peak)
    for name, size in sizes.items():
        assert getattr(near, name).expected == pytest.approx(size, abs=2)
    assert estimate(again, H100).step_seconds == took
    assert near.allocated.low >= plain.allocated.low and near.allocated.high <= plain.allocated.high
    assert near.least >= plain.least


def test_a_run_that_is_unlike_its_anchor_is_no_surer() -> None:
    peak, took = forecast(RUN).peak_bytes, estimate(RUN, H100).step_seconds
    measured = MeasuredRun(allocated=peak, reserved=peak + 3 * GIB, device=peak + 5 * GIB, step=1.2 * took)
    anchor = fitted(measured)
    other = replace(RUN, anchor=replace(anchor, kind="megatron, dense"))
    assert not any(ANCHORED in lineage(measure, other, H100.name) for measure in Measure)
    assert figures(other, peak).reserved == figures(RUN, peak).reserved
    near = replace(RUN, anchor=anchor)
    assert lineage(Measure.TIME, near, H100.name)[0] == ANCHORED
    assert lineage(Measure.TIME, near, "a100-80gb") == lineage(Measure.TIME, RUN, "a100-80gb")
    assert (unlike_anchor(RUN, ""), unlike_anchor(near, H100.name)) == ((), ())
    assert "another kind" in unlike_anchor(other, H100.name)[0]
    assert "measured on h100-80gb" in unlike_anchor(near, "a100-80gb")[0]


def test_a_context_larger_than_the_device_leaves_nothing() -> None:
    anchor = replace(fitted(MeasuredRun(step=1.0)), context=10**15)
    assert available_bytes(H100, replace(RUN, anchor=anchor)) == 0
    assert tuple(name for name, _ in buffers(forecast(RUN))) == BUFFERS


def test_the_file_says_the_same(tmp_path: Path) -> None:
    peak = forecast(RUN).peak_bytes
    anchor = fitted(MeasuredRun(allocated=peak + GIB, reserved=peak + 2 * GIB, device=peak + 4 * GIB, step=3.25))
    file = tmp_path / "anchor.toml"
    file.write_text(anchor.text())
    assert read_anchor(file) == anchor


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allocated=61.2", "without a unit"),
        ("memory=61GiB", "expected some of"),
        ("allocated=5GiB allocated=5GiB", "twice"),
        ("allocated=9GiB reserved=5GiB", "allocated <= reserved <= device"),
        ("", "nothing that was measured"),
        ("step=fast", "fast"),
        ("step=0s", "seconds of a step"),
    ],
)
def test_figures_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_measured(text)


def test_figures_as_they_are_typed() -> None:
    found = parse_measured("allocated=61.5GiB, reserved=66GiB device=72GB step=1320ms")
    assert found == MeasuredRun(allocated=int(61.5 * GIB), reserved=66 * GIB, device=72 * 10**9, step=1.32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "schema"),
        ('schema = "jettison.anchor/1"\nstack = "a"\nbytes = 3\n[measured]\nstep = 1.0', "not an anchor file"),
        ('schema = "jettison.anchor/1"\nstack = "a"\n[measured]\nstep = "x"', "not an anchor file"),
        ("x = ", "not TOML"),
        (f"{HEAD}step = nan", "seconds of a step"),
        (f"{HEAD}reserved = 0", "expected bytes of a run"),
        (f"{HEAD}step = 1.0\n[time]\ncompute = nan", "a factor above 0"),
        (f"{HEAD}step = 1.0\n[time]\nhost = -1.0", "a factor above 0"),
        (f"{HEAD}step = 1.0\n[memory]\nfragments = inf", "expected 0 to"),
        (f"{HEAD}allocated = 1\n[memory]\ncopies = 99\nbuffer = 'parameters'", "up to 3 of"),
        (f"{HEAD}allocated = 1\n[memory]\ncopies = 1\nbuffer = 'nonsense'", "up to 3 of"),
    ],
)
def test_a_file_that_is_no_anchor(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "anchor.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_anchor(file)
    with pytest.raises(UsageError, match="No such file"):
        read_anchor(tmp_path / "none.toml")


def test_a_slower_device_takes_as_many_times_as_long() -> None:
    took = estimate(RUN, H100)
    twice = estimate(RUN, slower(H100, compute=2.0, communication=2.0, host=2.0))
    assert twice.step_seconds == pytest.approx(2 * took.step_seconds, rel=0.02)


def test_ranges_of_an_anchored_run_are_those_of_anchored_runs() -> None:
    found = forecast(RUN)
    peak, took = found.peak_bytes, estimate(RUN, H100).step_seconds
    anchor = fitted(MeasuredRun(allocated=peak, reserved=peak + 3 * GIB, device=peak + 5 * GIB, step=1.2 * took))
    again = replace(RUN, anchor=anchor)
    plain, near = (figures(run, peak, hardware=H100.name, step_seconds=took) for run in (RUN, again))
    of = {measure: residual(measure, (ANCHORED,)) for measure in Measure}
    assert near.step_seconds is not None and plain.step_seconds is not None
    assert near.step_seconds.low == pytest.approx(took * of[Measure.TIME].low)
    assert near.allocated.high == pytest.approx(min(plain.allocated.high, peak * of[Measure.ALLOCATED].high))
    own = residual(Measure.FRAGMENTS, lineage(Measure.FRAGMENTS, RUN)).expected
    assert anchor.fragments is not None and anchor.context is not None
    expected = (anchor.fragments + own) / 2 + of[Measure.FRAGMENTS].expected
    cached = segments_beyond(RUN, peak) / 2
    assert near.reserved.expected == pytest.approx(peak + cached + expected * (peak * GIB) ** 0.5)
    beyond = near.device.expected - near.reserved.expected - (plain.device.expected - plain.reserved.expected)
    assert beyond == pytest.approx(anchor.context)
    assert available_bytes(H100, again) <= available_bytes(H100, RUN)
    wrong = replace(RUN, anchor=fitted(MeasuredRun(allocated=peak + peak // 3)))
    if wrong.anchor is not None and not wrong.anchor.copies:
        assert figures(wrong, peak).allocated == plain.allocated
