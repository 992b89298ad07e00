"""Segments in described plans: the smallest budget is the smallest, and brute force finds nothing better."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, groupby, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.cli.plan import PlanFlags, plan
from jettison.core.errors import Infeasible
from jettison.core.units import GIB, MIB
from jettison.cost.execution import execution_of
from jettison.predict.forecast import forecast, forecast_sizes
from jettison.predict.stages import FULL, KeptBuffers, kept_by
from jettison.predict.time import Timing, estimate
from jettison.report.alternatives import layer_reasons
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search.auto_recompute import AutoForecast, choose
from jettison.search.stage_choice import StageChoice, layer_points
from jettison.spec.hardware import hardware
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

H100 = hardware("h100-80gb")


@cache
def run_of(model: str, layers: int = 0, **asked: object) -> Run:
    spec = model_spec(model)
    if layers:
        spec = replace(spec, layers=spec.layers[:layers])
    return resolve(spec, RunRequest(**asked)).run


def auto(run: Run, *, offload: bool = False) -> Run:
    return replace(run, recompute=Recompute(mode=Mode.AUTO, offload=offload))


def smallest(run: Run, **more: int) -> int:
    with pytest.raises(Infeasible) as error:
        choose(run, 1, H100, **more)
    return error.value.minimum_budget_bytes


def mode_peak(run: Run, word: str, *, offload: bool = False) -> int:
    mode = Recompute.parse(word, layers=run.model.depth, offload=offload)
    return forecast_sizes(replace(run, recompute=mode)).peak_bytes


MODES = ("none", "selective", "selective-op", "full", "sqrt", "block:3", "interval:2", "interval:3")
RUNS = {
    "a long sequence": ("llama3-8b", 0, {"dp": 8, "zero": 3, "seq": 32768}),
    "gradients that stay": ("llama3-8b", 12, {"dp": 2, "micro_batches": 3, "seq": 8192}),
    "a pipeline": ("llama3-8b", 16, {"pp": 4, "micro_batches": 8}),
    "virtual stages": ("llama3-8b", 16, {"pp": 2, "virtual_stages": 2, "micro_batches": 4}),
    "dropout": ("gpt-22b", 12, {"tp": 8, "dropout": 0.1}),
    "experts": ("mixtral-8x7b", 8, {"dp": 8, "ep": 8, "zero": 1}),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_mode_needs_less_than_the_smallest_budget(name: str) -> None:
    """Nor with all that stays on the host, where that is allowed."""
    model, layers, asked = RUNS[name]
    run = run_of(model, layers, **asked)
    words = (*MODES, *(f"every:{k}" for k in range(2, run.model.depth + 1)))
    peaks = {word: mode_peak(run, word) for word in words}
    least = smallest(auto(run))
    assert least <= min(peaks.values()), min(peaks, key=lambda word: peaks[word])
    found = choose(auto(run), least, H100)
    assert found.forecast.peak_bytes == forecast(found.forecast.run, chosen_of(found)).peak_bytes <= least
    sent = {word: mode_peak(run, word, offload=True) for word in ("none", "selective-op", "full", "every:2", "sqrt")}
    assert smallest(auto(run, offload=True)) <= min(*sent.values(), least)


def test_the_smallest_budget_of_a_long_sequence() -> None:
    """The commands that once said otherwise: what one layer at a time takes, where `sqrt` takes less."""
    run = run_of("llama3-8b", 0, dp=8, zero=3, seq=32768)
    assert [round(mode_peak(run, word) / GIB, 2) for word in ("full", "every:2", "sqrt", "every:8")] == [
        68.57,
        64.57,
        62.07,
        61.57,
    ]
    assert smallest(auto(run)) == mode_peak(run, "every:8")
    assert smallest(auto(run, offload=True)) == mode_peak(run, "full", offload=True)


def test_a_mask_of_documents_goes_where_no_layer_reads_it_again() -> None:
    """All on the host: 16 MiB of booleans less than where layers compute their own mask of them again."""
    run = run_of("llama3-8b", 0, packed=512, attention="sdpa")
    sent = mode_peak(run, "none", offload=True)
    assert sent == mode_peak(run, "full", offload=True) - 16 * MIB
    least = smallest(auto(run, offload=True))
    assert least == sent
    found = choose(auto(run, offload=True), least, H100)
    assert forecast(found.forecast.run, chosen_of(found)).peak_bytes == least


def test_a_stage_of_many_alike_layers_is_cut_evenly() -> None:
    """Two stages of 64 layers: no answer of the solver's own needs as little as segments of three."""
    run = run_of("llama3-8b", 0, pp=2, micro_batches=4, seq=8192, dp=8, zero=1)
    run = replace(run, model=replace(run.model, layers=(run.model.layers[0],) * 128, vocab=1000, name="small"))
    peaks = {k: mode_peak(run, f"every:{k}") for k in range(2, 17)}
    assert min(peaks, key=lambda k: peaks[k]) == 3
    assert smallest(auto(run)) == peaks[3]


def chosen_of(answer: AutoForecast) -> list[KeptBuffers | None]:
    kept_buffers = {part.name: part.chosen for part in answer.forecast.parts}
    return [kept_buffers[name] for name in answer.forecast.run.model.layer_names]


# brute force ----------------------------------------------------------------------------------------------------------


Way = tuple[tuple[KeptBuffers, ...], float]


def cuts(count: int) -> Iterator[list[int]]:
    """Lengths that so many layers may be cut into."""
    for number in range(count):
        for places in combinations(range(1, count), number):
            ends = [0, *places, count]
            yield [b - a for a, b in pairwise(ends)]


def every_plan(run: Run, *, single_points: int) -> Iterator[tuple[int, float]]:
    """Peak and seconds of all cuts of the only stage, layers by themselves under some of their ways."""
    found = forecast(run)
    layers = [part for part in found.parts if part.is_layer]
    timing = Timing(run=run, hardware=H100, execution=execution_of(run))
    choice = StageChoice(run=run, stage=found.stages[0], timing=timing)
    points = layer_points(timing.prices(layers[0].layer), layers[0].region, layers[0].policy)
    few = points if len(points) <= single_points else (points[0], *points[1 :: max(1, len(points) // single_points)])
    alone = [((KeptBuffers(p.kept),), p.seconds) for p in few]
    kept = kept_by(layers[0].region, FULL)
    for lengths in cuts(len(layers)):
        ways: list[list[Way]] = []
        at = 1  # behind the embedding
        for length in lengths:
            together = tuple(KeptBuffers(kept, frozenset(), place, length) for place in range(length))
            ways.append(alone if length == 1 else [(together, choice.segment_seconds(at, at + length))])
            at += length
        for picked in product(*ways):
            chosen = [one for kept_buffers, _ in picked for one in kept_buffers]
            yield forecast_sizes(run, chosen).peak_bytes, sum(seconds for _, seconds in picked)


@cache
def all_plans(layers: int, seq: int, zero: int) -> tuple[tuple[int, float], ...]:
    """Of a small model with a small vocabulary, whose layers are the peak."""
    return tuple(every_plan(auto(small(layers, seq, zero)), single_points=3))


def small(layers: int, seq: int, zero: int) -> Run:
    run = run_of("llama3-8b", layers, dp=8, zero=zero, seq=seq)
    return replace(run, model=replace(run.model, vocab=1000, name="small"))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.sampled_from([4096, 16384]), st.sampled_from([0, 3]), st.floats(0, 1))
def test_brute_force_finds_nothing_that_needs_less_or_is_faster(layers: int, seq: int, zero: int, share: float) -> None:
    plans = all_plans(layers, seq, zero)
    run = auto(small(layers, seq, zero))
    least = smallest(run)
    assert least <= min(peak for peak, _ in plans)
    budget = least + round(share * (max(peak for peak, _ in plans) - least))
    answer = choose(run, budget, H100)
    assert answer.forecast.peak_bytes <= budget
    best = min((seconds for peak, seconds in plans if peak <= budget), default=float("inf"))
    step = answer.plain_seconds + answer.seconds
    assert answer.seconds <= best + answer.gap * step + 1e-9


def test_a_segment_is_priced_as_it_is_told() -> None:
    """By the estimate, by the reasons of its layers, and in the plan's document."""
    run = run_of("llama3-8b", 0, dp=8, zero=3, seq=32768)
    answer = choose(auto(run), 64 * GIB, H100)
    assert answer.segments and answer.gap <= 0.005
    chosen = chosen_of(answer)
    plain = estimate(auto(run), H100, chosen=[None] * run.model.depth).step_seconds
    added = estimate(answer.forecast.run, H100, chosen=chosen).step_seconds - plain
    assert added == pytest.approx(answer.seconds, rel=0.02)
    assert sum(r.recompute_seconds for r in layer_reasons(answer).values()) == pytest.approx(answer.seconds, rel=0.02)
    document = plan("llama3-8b", RunRequest(dp=8, zero=3, seq=32768), PlanFlags(budget="64GiB")).document()
    assert document["segments"] == [list(each) for each in answer.segments]
    inputs = 32768 * 4096 * 2
    firsts = {first for first, _ in answer.segments}
    inside = {name for first, last in answer.segments for name in names_between(run, first, last)}
    for layer in document["layers"]:
        if layer["layer"] in inside:
            assert layer["kept_bytes"] == (inputs if layer["layer"] in firsts else 0)
            assert layer["policy"] == "full"
    held = [nbytes for name, nbytes in answer.forecast.layer_bytes() if name.startswith("layers.")]
    assert held == [layer["kept_bytes"] for layer in document["layers"]]


def names_between(run: Run, first: str, last: str) -> tuple[str, ...]:
    names = run.model.layer_names
    return names[names.index(first) : names.index(last) + 1]


def test_equal_layers_are_in_runs() -> None:
    """Three policies; the solver's first answer had the fastest in layers 17 to 19, 21, 24 and 31."""
    run = auto(run_of("llama3-8b", dp=8, zero=3, micro_batch=2, seq=8192))
    found = choose(run, 64_010_537_938, hardware("a100-80gb"))
    kept = [part.kept for part in found.forecast.parts if part.is_layer]
    assert len(list(groupby(kept))) == len(set(kept)) == 3
    assert found.forecast.peak_bytes <= found.budget_bytes


def test_every_k_is_one_plan_of_the_planner() -> None:
    """The same cut, said by a mode and by a choice: the same bytes at each moment, and the same seconds."""
    run = run_of("llama3-8b", 6, seq=8192)
    kept = kept_by(next(part for part in forecast(run).parts if part.is_layer).region, FULL)
    chosen = [KeptBuffers(kept, frozenset(), i % 3, 3) for i in range(6)]
    by_choice = forecast(auto(run), chosen)
    by_mode = forecast(replace(run, recompute=Recompute.parse("every:3", layers=6)))
    assert by_choice.stages[0].timeline() == by_mode.stages[0].timeline()
    assert by_choice.layer_bytes() == by_mode.layer_bytes()
    assert len(by_choice.ledger().entries) == len(by_mode.ledger().entries)
