"""Plans of described runs that may offload: bytes and seconds are the estimate's, and they pay where they should."""

from dataclasses import replace
from functools import cache

import pytest

from jettison.core.errors import Infeasible, UsageError
from jettison.core.units import GIB, MIB
from jettison.cost.execution import execution_of
from jettison.memory.span import Phase
from jettison.predict.forecast import available_bytes, forecast
from jettison.predict.stages import Chosen, KeptBuffers
from jettison.predict.time import Timing, estimate
from jettison.report.alternatives import layer_reasons, trades, what_if
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search.auto_recompute import AutoForecast, choose, layer_policies
from jettison.search.stage_choice import LEAST_MOVED, StageChoice, StageOutcome
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

H100, GB200 = hardware("h100-80gb"), hardware("gb200-192gb")
PCIE5 = replace(GB200, name="the same chip on PCIe 5", host_bytes_per_second=64 * 10**9)


def run_of(model: str, *, offload: bool = True, **asked: object) -> Run:
    run = resolve(model_spec(model), RunRequest(**asked)).run
    return replace(run, recompute=Recompute(mode=Mode.AUTO, offload=offload))


def chosen_of(answer: AutoForecast) -> Chosen:
    kept_buffers = {part.name: part.chosen for part in answer.forecast.parts}
    return [kept_buffers[name] for name in answer.forecast.run.model.layer_names]


def seconds_of(answer: AutoForecast) -> float:
    return estimate(answer.forecast.run, answer.hardware, chosen=chosen_of(answer)).step_seconds


def host_bytes(answer: AutoForecast) -> int:
    """Counted again, of a single stage without micro-batches in flight."""
    parts = [p for p in answer.forecast.parts if p.chosen is not None]
    return sum(p.region.program.kept_bytes(p.chosen.offloaded) for p in parts)


@pytest.mark.parametrize(("pp", "inputs"), [(1, 31), (4, 4 * 7)])
def test_host_bytes_of_a_mode(pp: int, inputs: int) -> None:
    """Under full recomputation inputs of layers, s × h in 16 bits, of all micro-batches in flight; the last layer of a
    chunk offloads nothing, nor do the embedding, the head and the loss."""
    asked = RunRequest(recompute="full", offload=True, seq=4096, pp=pp, micro_batches=8)
    assert forecast(resolve(model_spec("llama3-8b"), asked).run).host_bytes == inputs * 4096 * 4096 * 2


def test_a_timeline_has_what_is_on_its_way() -> None:
    """Each moment is that of the same plan with nothing moved, less what is on the host, and the neighbours' copies."""
    answer = choose(run_of("llama3-8b", dp=8, zero=1, micro_batch=2), 48 * GIB, H100)
    run, chosen = answer.forecast.run, chosen_of(answer)
    sent = [0, *(p.region.program.kept_bytes(p.chosen.offloaded) if p.chosen else 0 for p in answer.forecast.parts)]
    assert sum(map(bool, sent)) > 10
    assert sent[-2:] == [0, 0], "the head, which is no layer, and what ends before it may"
    stays = [None if s is None else KeptBuffers(s.buffers) for s in chosen]
    names = [part.name for part in answer.forecast.parts]
    moved, whole = (
        {(m.phase, m.where): m.nbytes for m in forecast(run, c).stages[0].timeline() if m.where}
        for c in (chosen, stays)
    )
    assert set(moved) == set(whole)
    for r, name in enumerate(names):
        before, ahead = sum(sent[: r + 1]), sent[r]  # sent[r] is of the region before r
        for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
            if (phase, name) in whole:
                own = sent[r + 1] if phase is Phase.BACKWARD else 0
                gone = before + (own if phase is Phase.BACKWARD else 0)
                assert moved[phase, name] == whole[phase, name] - gone + own + ahead, (phase, name)
    assert answer.host_bytes == host_bytes(answer) == sum(sent)


@pytest.mark.parametrize(("rate", "waits"), [(4, True), (8, True), (16, False), (64, False)])
def test_stalls_are_the_estimates(rate: int, waits: bool) -> None:
    """At the smallest budget: a link that is too slow is waited for where there is no other way."""
    device = replace(H100, host_bytes_per_second=rate * 10**9)
    asked = run_of("llama3-8b", dp=8, zero=1, micro_batch=2, micro_batches=3)
    with pytest.raises(Infeasible) as error:
        choose(asked, GIB, device)
    answer = choose(asked, error.value.minimum_budget_bytes, device)
    run, chosen = answer.forecast.run, chosen_of(answer)
    assert answer.host_bytes > 0
    assert (answer.stalled_seconds > 0.0) is waits
    stays = [None if s is None else replace(s, offloaded=frozenset()) for s in chosen]
    waited = seconds_of(answer) - estimate(run, device, chosen=stays).step_seconds
    assert waited == pytest.approx(run.micro_batches * answer.stalled_seconds, abs=1e-9)
    named = sum(reason.stalled_seconds for reason in layer_reasons(answer).values())
    assert named == pytest.approx(answer.stalled_seconds, abs=1e-9)


def test_a_plan_that_needs_no_offload_makes_none() -> None:
    run = run_of("llama3-8b", dp=8, zero=3)
    answer = choose(run, available_bytes(H100, run), H100)
    assert {word for _, word in layer_policies(answer)} == {"none"}
    assert (answer.host_bytes, answer.seconds, answer.stalled_seconds) == (0, 0.0, 0.0)
    assert list(what_if(answer)) == []


@pytest.mark.parametrize("gib", [30, 40, 50, 60, 70])
def test_offload_is_never_slower_than_doing_without(gib: int) -> None:
    asked = {"dp": 8, "zero": 3, "micro_batch": 4}
    budget = gib * GIB
    try:
        without = choose(run_of("llama3-8b", offload=False, **asked), budget, H100)
    except Infeasible as error:
        least = choose(run_of("llama3-8b", **asked), budget if gib >= 40 else error.minimum_budget_bytes, H100)
        assert least.minimum_budget_bytes < error.minimum_budget_bytes
        return
    answer = choose(run_of("llama3-8b", **asked), budget, H100)
    assert answer.forecast.peak_bytes <= budget
    assert answer.seconds <= without.seconds
    assert seconds_of(answer) <= seconds_of(without)
    assert answer.host_bytes <= (H100.host_memory_bytes or 0)


def test_of_a_named_mode_the_last_layer_stays_as_do_embedding_and_head() -> None:
    device = replace(H100, host_bytes_per_second=4 * 10**9)
    run = replace(run_of("llama3-8b", dp=8, zero=1, micro_batch=2), recompute=Recompute(offload=True))
    found = forecast(run).stages[0]
    parts = found.parts[0]
    assert [part.is_layer for part in parts] == [False, *[True] * 32, False]
    stays = sum(part.region.program.kept_bytes(part.kept) for part in (parts[0], *parts[-2:]))
    assert found.activation_bytes == stays
    plain = replace(run, recompute=Recompute(mode=Mode.AUTO))
    passes = Timing(run=plain, hardware=device, execution=execution_of(run)).items(found.groups[0])[1].seconds
    way = parts[1].region.saved_bytes / (device.host_bytes_per_second * device.reached.host)
    waited = 31 * (2 * way - passes.forward.seconds - passes.backward.seconds)
    assert waited > 0.0
    more = estimate(run, device).step_seconds - estimate(plain, device).step_seconds
    assert more == pytest.approx(waited)


# 70B on the link of a Grace -------------------------------------------------------------------------------------------


@cache
def seventy(device: Hardware, *, offload: bool = True) -> AutoForecast:
    """Llama 3 70B, 2 x 8192 tokens on each of 8 devices under ZeRO 3."""
    run = run_of("llama3-70b", dp=8, zero=3, micro_batch=2, seq=8192, offload=offload)
    return choose(run, available_bytes(device, run), device)


def test_70b_on_gb200_mixes_and_beats_either_alone() -> None:
    answer, again = seventy(GB200), seventy(GB200, offload=False)
    words = {word for _, word in layer_policies(answer)}
    assert words == {"per-tensor"}, "each layer computes some again and sends some"
    run = replace(answer.forecast.run, recompute=Recompute(offload=True))
    moved = estimate(run, GB200).step_seconds
    assert seconds_of(answer) < 0.97 * moved, "all of it over the link, if the host had room for that"
    assert seconds_of(answer) < 0.84 * seconds_of(again)
    assert answer.forecast.peak_bytes <= answer.budget_bytes
    assert answer.host_bytes <= (GB200.host_memory_bytes or 0) < 480 * 10**9 // 2 + 1


def test_70b_on_pcie_5_moves_what_the_link_hides_and_no_more() -> None:
    answer = seventy(PCIE5)
    assert answer.stalled_seconds == 0.0
    assert seconds_of(seventy(GB200)) < seconds_of(answer) < seconds_of(seventy(PCIE5, offload=False))
    reasons = [reason for reason in layer_reasons(answer).values() if reason.offloaded_bytes]
    assert len(reasons) == 79, "all but the last layer"
    for reason in reasons:
        assert reason.transfer_seconds <= min(reason.forward_seconds, reason.backward_seconds)
    assert sum(r.transfer_seconds for r in reasons) > 0.75 * sum(r.forward_seconds for r in reasons), (
        "and nearly all of that"
    )


def test_the_plan_flips_where_the_link_breaks_even() -> None:
    """With nothing beside a copy, 2 bytes / link against seconds: what `estimate --explain` prints decides the plan."""
    run = run_of("llama3-70b", tp=8, micro_batch=2, seq=8192)
    rows = [row for row in trades(run, GB200) if row.break_even_bytes_per_second and row.nbytes >= LEAST_MOVED]
    rates = [row.break_even_bytes_per_second or 0.0 for row in rows]
    assert min(rates) < 32e9 < 225e9 < max(rates), "links on both sides of it: PCIe 4 and NVLink-C2C"
    stage = forecast(run).stages[0]

    def at(rate: float) -> StageOutcome:
        device = replace(GB200, host_bytes_per_second=int(rate / GB200.reached.host), host_memory_bytes=None)
        execution = execution_of(run).without_overlap()
        choice = StageChoice(run=run, stage=stage, timing=Timing(run=run, hardware=device, execution=execution))
        _, answer = choice.solve((stage.peak.nbytes + forecast(full).peak_bytes) // 2)
        assert answer is not None
        return answer

    full = replace(run, recompute=Recompute(mode=Mode.FULL))
    slow, between, fast = at(min(rates) / 4), at((min(rates) * max(rates)) ** 0.5), at(max(rates) * 4)
    assert slow.host_bytes == 0 and slow.added_seconds > 0.0
    assert 0 < between.stalled_seconds < between.added_seconds, "some is moved, and some computed again"
    assert fast.stalled_seconds > 0.95 * fast.added_seconds, "all that goes is moved, but for what is small"
    assert fast.added_seconds < between.added_seconds < slow.added_seconds


# pipelines ------------------------------------------------------------------------------------------------------------


def test_175b_first_stages_compute_again_and_the_last_need_not() -> None:
    run = run_of("gpt-175b", offload=False, tp=8, pp=8, micro_batches=64)
    answer = choose(run, 56 * GIB, hardware("a100-80gb"))
    words = dict(layer_policies(answer))
    by_stage = [{words[p.name] for chunk in s.parts for p in chunk if p.is_layer} for s in answer.forecast.stages]
    assert "none" not in by_stage[0]
    assert by_stage[-1] == {"none"}
    counts = [
        sum(words[p.name] != "none" for chunk in s.parts for p in chunk if p.is_layer) for s in answer.forecast.stages
    ]
    assert counts == sorted(counts, reverse=True)


def test_micro_batches_in_flight_are_on_the_host_each() -> None:
    """Every stage's last layer stays; the first stage has four micro-batches on the host, the last one."""
    run = run_of("llama3-70b", tp=8, pp=4, micro_batches=16)
    answer = choose(run, 43 * GIB, H100)
    most = 0
    for stage in answer.forecast.stages:
        parts = [part for chunk in stage.parts for part in chunk if part.is_layer]
        assert parts[-1].chosen is not None and not parts[-1].chosen.offloaded
        moved = sum(p.region.program.kept_bytes(p.chosen.offloaded) for p in parts if p.chosen is not None)
        most = max(most, stage.in_flight * moved)
        assert stage.peak.nbytes <= 43 * GIB
    assert answer.host_bytes == most > 0


def test_a_stage_without_layers_does_nothing() -> None:
    run = run_of("llama3-8b", pp=4, dp=2, zero=1, micro_batch=4, micro_batches=8, stage_layers="12,0,10,10")
    answer = choose(run, 70 * GIB, H100)
    assert [len(list(stage.parts[0])) for stage in answer.forecast.stages] == [13, 0, 10, 11]
    assert set(layer_reasons(answer)) == set(run.model.layer_names)


# what else ------------------------------------------------------------------------------------------------------------


def test_the_next_gib_is_priced_and_says_what_flips() -> None:
    answer = choose(run_of("llama3-8b", dp=8, zero=3, micro_batch=4), 60 * GIB, H100)
    rows = list(what_if(answer, steps=3))
    assert [row.answer.budget_bytes // GIB for row in rows] == [61, 62, 63]
    for before, row in zip([answer, *(row.answer for row in rows)], rows, strict=False):
        assert row.saved_seconds == pytest.approx(before.step_seconds - row.answer.step_seconds)
        assert row.saved_seconds >= 0.0
        assert row.flips
        for flip in row.flips:
            assert flip.before != flip.after and flip.layers and flip.nbytes > 0


def test_a_host_budget_that_is_too_small_is_told() -> None:
    run = run_of("llama3-8b", dp=8, zero=3, micro_batch=4)
    lowest = choose(run, 76 * GIB, H100).minimum_budget_bytes
    with pytest.raises(Infeasible, match=r"offloads it to 256\.00 MiB of CPU memory") as error:
        choose(run, lowest, H100, host_budget_bytes=256 * MIB)
    assert error.value.minimum_budget_bytes > lowest
    tight = choose(run, error.value.minimum_budget_bytes, H100, host_budget_bytes=256 * MIB)
    assert tight.host_bytes <= 256 * MIB


def test_hardware_without_a_link_cannot_offload() -> None:
    with pytest.raises(UsageError, match="does not state its link to the host"):
        choose(run_of("llama3-8b", dp=8, zero=3), 60 * GIB, replace(H100, host_bytes_per_second=None))
