"""What fits: edges against a scan of every value, and against runs that people are known to have fitted."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

import jettison
from jettison.core.documents import part
from jettison.core.errors import UsageError
from jettison.core.units import GIB, MIB
from jettison.families.presets import preset
from jettison.predict.forecast import Forecast, available_bytes, forecast, limit_of
from jettison.predict.ranges import fit_budgets
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.search import largest_fit as fit_module
from jettison.search.largest_fit import Edge, fit
from jettison.spec.device_allowance import FRAGMENTS, FitRule, available_to, fixed_allowance
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.layout import Layout, ZeroBuckets
from jettison.spec.precision import PRECISIONS, Gradients
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.kernel_sets import MEGATRON, PYTORCH

SMALL = Run(model=preset("gpt2"), seq=256, layout=Layout(tp=2, sp=True, dp=4))
LARGEST = Run(
    model=preset("llama3-405b"), seq=8192, micro_batches=16, layout=Layout(tp=8, sp=True, pp=16, dp=8, zero=1)
)


def peak(run: Run) -> int:
    return forecast(run).peak_bytes


# edges ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [3 * GIB, 5 * GIB])
def test_the_largest_batch_and_sequence_are_those_of_a_scan(budget: int) -> None:
    found = fit(SMALL, budget_bytes=budget)
    batches = {b: peak(replace(SMALL, micro_batch=b)) for b in range(1, 40)}
    most = max(b for b, nbytes in batches.items() if nbytes <= budget)
    assert 1 < most < 39
    assert found.micro_batch == Edge(
        value=most, peak_bytes=batches[most], next_value=most + 1, next_peak_bytes=batches[most + 1]
    )
    assert batches[most] <= budget < batches[most + 1]
    assert found.seq_step == 256  # 128 for each of two ranks that share a sequence


def test_the_longest_sequence_is_that_of_a_scan() -> None:
    run = replace(SMALL, model=preset("llama3-8b"), layout=Layout(tp=8, cp=2, dp=2))
    step = 256
    budget = peak(replace(run, seq=7 * step)) + 1
    found = fit(run, budget_bytes=budget)
    assert (found.seq_step, found.seq.value, found.seq.next_value) == (step, 7 * step, 8 * step)
    assert found.seq.peak_bytes == budget - 1
    assert found.seq.next_peak_bytes == peak(replace(run, seq=8 * step))


def test_learned_positions_end_a_sequence() -> None:
    found = fit(SMALL, budget_bytes=1 << 50)
    assert found.fits
    assert found.seq == Edge(value=1024, peak_bytes=peak(replace(SMALL, seq=1024)))
    split = replace(SMALL, layout=Layout(tp=4, sp=True, cp=4))
    assert fit(split, budget_bytes=1 << 50).seq == Edge()  # a step is 2048 tokens, of which there are 1024


def test_smallest_tensor_parallel_size_is_a_divisor_that_the_model_allows() -> None:
    qwen = Run(model=preset("qwen2-7b"), seq=4096, layout=Layout(tp=4, pp=2))  # 28 heads, but 18944 = 2^9 x 37
    allowed = {t: peak(replace(qwen, layout=replace(qwen.layout, tp=t))) for t in (1, 2, 4)}
    for smaller, size in ((1, 2), (2, 4)):
        found = fit(qwen, budget_bytes=allowed[size])
        assert found.tp == Edge(
            value=size, peak_bytes=allowed[size], next_value=smaller, next_peak_bytes=allowed[smaller]
        )
    assert fit(qwen, budget_bytes=allowed[4] - 1).tp == Edge(next_value=4, next_peak_bytes=allowed[4])
    assert fit(qwen, budget_bytes=allowed[1]).tp == Edge(value=1, peak_bytes=allowed[1])


def test_smallest_zero_stage() -> None:
    run = replace(SMALL, layout=Layout(dp=8))
    stages = [peak(replace(run, layout=Layout(dp=8, zero=zero))) for zero in range(4)]
    assert stages[0] > stages[1]
    assert fit(run, budget_bytes=stages[0]).zero == Edge(value=0, peak_bytes=stages[0])
    assert fit(run, budget_bytes=stages[0] - 1).zero == Edge(
        value=1, peak_bytes=stages[1], next_value=0, next_peak_bytes=stages[0]
    )


def test_nothing_fits_and_the_closest_is_named() -> None:
    found = fit(SMALL, budget_bytes=1)
    assert not found.fits
    assert found.micro_batch == Edge(next_value=1, next_peak_bytes=peak(SMALL))
    assert found.seq == Edge(next_value=256, next_peak_bytes=peak(SMALL))
    least = min(range(4), key=lambda zero: peak(replace(SMALL, layout=replace(SMALL.layout, zero=zero))))
    assert (found.zero.value, found.zero.next_value) == (None, least)


def test_edges_are_of_bytes_that_surely_fit_where_any_are() -> None:
    limit = limit_of(budget=None, gpu="a100-80gb", run=SMALL)
    assert limit is not None
    *surer, last = fit_budgets(SMALL, limit)
    assert surer[0].nbytes < surer[1].nbytes <= last.nbytes == limit.nbytes
    found = fit(SMALL, budget_bytes=last.nbytes, surer=surer)
    alone = fit(SMALL, budget_bytes=surer[0].nbytes)
    most = fit(SMALL, budget_bytes=last.nbytes)
    for name in ("micro_batch", "seq"):
        surely, may = getattr(alone, name), getattr(most, name)
        ends = {"possible_value": may.value, "possible_peak_bytes": may.peak_bytes}
        assert getattr(found, name) == replace(surely, rule=FitRule.SURELY, **ends)
    one = forecast(SMALL).peak_bytes  # fits the last alone
    tight = [replace(budget, nbytes=one - 1) for budget in surer]
    largest = fit(SMALL, budget_bytes=one, surer=tight).micro_batch
    assert (largest.value, largest.rule) == (1, FitRule.MAY)


def test_the_answer_is_plain_figures() -> None:
    document = json.loads(json.dumps(part("LedgerFit", fit(SMALL, budget_bytes=3 * GIB))))
    assert document["fits"] is True
    names = {"value", "peak_bytes", "next_value", "next_peak_bytes", "rule", "possible_value", "possible_peak_bytes"}
    assert set(document["micro_batch"]) == names | {"beyond", "beyond_peak_bytes", "may", "may_peak_bytes"}


def test_few_forecasts_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Run] = []

    def counted(run: Run) -> Forecast:
        asked.append(run)
        return forecast(run)

    monkeypatch.setattr(fit_module, "forecast", counted)
    found = fit(LARGEST, budget_bytes=500 * GIB)
    assert found.micro_batch.value is not None and found.seq.value is not None
    assert len(asked) < 40  # a few milliseconds each


# runs that fitted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pp", "virtual", "micro_batch", "micro_batches"),
    [("gpt-22b", 1, 1, 4, 1), ("gpt-175b", 8, 3, 1, 64), ("gpt-530b", 35, 3, 1, 280), ("gpt-1t", 64, 1, 1, 512)],
)
def test_figure_1_of_the_paper(name: str, pp: int, virtual: int, micro_batch: int, micro_batches: int) -> None:
    """arXiv 2205.05198 Figure 1 and Table 3: without its two techniques none of these fits an A100 of 80 GB."""
    model = preset(name)
    run = Run(
        model=model,
        seq=2048,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        layout=Layout(tp=8, pp=pp, virtual_stages=virtual),
        kernels=MEGATRON.with_attention("eager"),
        dropout=0.1,
        precision=PRECISIONS["bf16-main32"],
        gradients=Gradients.UPFRONT,
    )
    budget = available_bytes(hardware("a100-80gb"), run)
    selective = Recompute.parse("selective", layers=model.depth)
    both = replace(run, layout=replace(run.layout, sp=True), recompute=selective)
    assert not fit(run, budget_bytes=budget).fits
    assert fit(both, budget_bytes=budget).fits


def test_torchtitan_llama2_13b() -> None:
    """torchtitan docs/performance: two sequences of 4096 on each of 64 A100 of 80 GB, FSDP, no recompute."""
    run = Run(
        model=preset("llama2-13b"),
        seq=4096,
        micro_batch=2,
        layout=Layout(dp=64, zero=3),
        precision=PRECISIONS["bf16-autocast"],
    )
    found = fit(run, budget_bytes=available_bytes(hardware("a100-80gb"), run))
    assert found.fits
    assert found.micro_batch.value is not None and 2 <= found.micro_batch.value <= 3


# beside tensors -------------------------------------------------------------------------------------------------------


def needed(run: Run, peak: int) -> int:
    """Bytes that a plan leaves room for: the peak, what is fixed, and 3 % of the peak for fragments."""
    return peak + fixed_allowance(run.layout, run.kernels.device).expected + -(-peak * FRAGMENTS[1] // 1)


def test_the_allowance_of_one_device() -> None:
    run = Run(model=preset("gpt2"), seq=128)
    alone = fixed_allowance(run.layout, run.kernels.device)
    assert alone.expected == 768 * MIB + 64 * MIB  # the context, workspaces
    assert GIB // 4 < alone.low < alone.expected < alone.high < 2 * GIB
    assert needed(run, 100 * GIB) == 103 * GIB + alone.expected
    eager = fixed_allowance(run.layout, run.kernels.device, "megatron-deepspeed")  # loads all kernels
    assert eager.expected - alone.expected == (1573 - 768) * MIB
    gpu = hardware("a100-80gb")
    free = [available_to(gpu, run.layout, run.kernels.device, stack=stack) for stack in (None, "megatron-deepspeed")]
    assert free[0] - free[1] == pytest.approx((1573 - 768) * MIB / 1.03, abs=2)


def test_every_axis_has_a_communicator_and_experts_need_more() -> None:
    device = Run(model=preset("gpt2"), seq=128).kernels.device
    alone = fixed_allowance(Layout(), device).expected
    layouts = {Layout(tp=2): 1, Layout(tp=2, pp=2): 2, Layout(tp=2, pp=2, cp=2): 3, Layout(dp=2): 1}
    engine = ZeroBuckets()  # a replica; under tensor parallelism its own axis and all ranks; pairs of stages: nothing
    layouts |= {Layout(dp=2, buckets=engine): 1, Layout(dp=2, pp=2, buckets=engine): 2 + 1}
    layouts[Layout(tp=2, dp=2, pp=2, buckets=engine)] = 3 + 1 + 2
    for layout, count in layouts.items():
        assert fixed_allowance(layout, device).expected - alone == count * GIB // 2
    assert fixed_allowance(Layout(dp=2, ep=2), device).expected - alone == 2 * GIB


@pytest.mark.parametrize("run", [SMALL, LARGEST])
def test_what_is_available_is_the_largest_peak_that_fits(run: Run) -> None:
    device = hardware("h100-80gb")
    most = available_bytes(device, run)
    assert needed(run, most) <= device.usable_bytes
    assert needed(run, most + 2) > device.usable_bytes


def test_a_small_device_has_nothing_left_and_a_cpu_has_everything() -> None:
    tiny = Hardware(name="tiny", memory_bytes=GIB // 2, usable_bytes=GIB // 2)
    assert available_bytes(tiny, SMALL) == 0
    assert available_bytes(tiny, replace(SMALL, kernels=PYTORCH.on_cpu())) == GIB // 2


def test_a_run_that_a_planner_decides_is_none_yet() -> None:
    """Its peak would be that of a run which keeps everything."""
    with pytest.raises(UsageError, match="recompute='auto', which needs a planner"):
        run_of("gpt2", RunRequest(recompute="auto"))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: jettison.forecast("llama3-8b"), r"got 'llama3-8b'; expected a run, such as jettison.run_of"),
        (lambda: jettison.estimate("llama3-8b", hardware("h100-80gb")), r"got 'llama3-8b'; expected a run"),
        (lambda: jettison.estimate(run_of("gpt2"), "h100-80gb"), r"got 'h100-80gb'; expected hardware, such as"),
    ],
)
def test_a_name_where_a_run_is_expected_is_said(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask()
