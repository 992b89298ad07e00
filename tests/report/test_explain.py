"""Explanations: the paper's figures, sums that can be done by hand, and remarks that come and go with their cause."""

import json
import math
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from jettison.core.units import format_bytes
from jettison.families.presets import preset
from jettison.formula.model_states import ModelStates
from jettison.memory.schedule import OrderOptions, PipelineShape, device_order
from jettison.memory.stage_unit import Unit
from jettison.memory.step import StageLoad
from jettison.predict.forecast import Stage, available_bytes, forecast, limit_of
from jettison.predict.ranges import figures, fit_budgets, time_residual
from jettison.predict.time import estimate
from jettison.report.explain import ASIDE, Explanation, Variant, explain, peak_parts
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve, run_of
from jettison.search.largest_fit import fitting_changes
from jettison.spec.device_allowance import FitBudget, FitRule, FitVerdict
from jettison.spec.hardware import hardware
from jettison.spec.kernels import Loss
from jettison.spec.layout import GradientSync, Layout, Schedule
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run
from support.kernel_sets import MEGATRON

S, H, A, LAYERS = 2048, 12288, 96, 96  # of gpt-175b; b = 1
STATISTICS = 2 * 2 * 4 * S
"""Of a layer: a mean and a deviation for each token, fp32, in both norms. arXiv 2205.05198 leaves them out."""


def paper(name: str = "gpt-175b", **more: object) -> Run:
    return replace(Run(model=preset(name), seq=S, kernels=MEGATRON.with_attention("eager"), dropout=0.1), **more)


def within(nbytes: int | None) -> tuple[FitBudget, ...]:
    return () if nbytes is None else (FitBudget(rule=FitRule.BUDGET, nbytes=nbytes),)


def explained(run: Run, budget_bytes: int | None = None) -> Explanation:
    return explain(forecast(run), budgets=within(budget_bytes))


def named(variants: tuple[Variant, ...], change: str) -> Variant:
    (found,) = [variant for variant in variants if variant.change == change]
    return found


def with_mode(run: Run, word: str, *, offload: bool = False) -> Run:
    return replace(run, recompute=Recompute.parse(word, layers=run.model.depth, offload=offload))


# the paper's figures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "saved", "work"), [("gpt-175b", 0.70, 0.027), ("gpt-530b", 0.65, 0.016)])
def test_section_5_what_selective_recomputation_saves_and_costs(name: str, saved: float, work: float) -> None:
    """arXiv 2205.05198 §5: 70 % and 65 % of the bytes, for 2.7 % and 1.6 % of the FLOPs."""
    found = explained(paper(name))
    selective = named(found.recompute, "--recompute selective").layer_bytes
    assert round(1 - selective / named(found.recompute, "--recompute none").layer_bytes, 2) == saved
    assert round(found.core.flops / found.core.layer_flops, 3) == work


def test_selective_runs_one_of_the_two_products_again() -> None:
    """What the second makes, backward does not ask for: the layer keeps it as the projection's input."""
    found = explained(paper())
    assert found.core.flops == 4 * S * S * H
    assert named(found.recompute, "--recompute selective").recompute_flops == LAYERS * 2 * S * S * H


@pytest.mark.parametrize(
    ("layout", "shortest", "longest"),
    [
        (Layout(), 860, 880),  # 5as/h = 34 at 870.4
        (Layout(tp=8), 2662, 2665),  # 5as/(ht) = 10 + 24/t at 2662.4
        (Layout(tp=8, sp=True), 872, 872),  # 870.4 again, and a multiple of 8
    ],
)
def test_crossover_of_gpt_3(layout: Layout, shortest: int, longest: int) -> None:
    crossover = explained(paper(layout=layout)).core.crossover
    assert crossover is not None and shortest <= crossover <= longest


def test_crossover_does_not_depend_on_the_sequence_that_is_trained() -> None:
    assert explained(paper(seq=128)).core.crossover == explained(paper()).core.crossover


def test_fused_attention_never_crosses_over() -> None:
    core = explained(Run(model=preset("llama3-8b"), seq=8192)).core
    assert (core.saved_bytes, core.crossover) == (0, None)
    assert core.flops == 4 * 8192 * 8192 * 4096
    assert core.layer_bytes == forecast(Run(model=preset("llama3-8b"), seq=8192)).layer_bytes()[1][1]


@pytest.mark.parametrize("t", [2, 8])
def test_what_sequence_parallelism_takes_from_a_layer(t: int) -> None:
    """arXiv 2205.05198 Equations 2 and 4: sbh(10 + 24/t + 5as/(ht)) becomes sbh(34 + 5as/h)/t."""
    found = explained(paper(layout=Layout(tp=t)))
    off, on = (named(found.sequence_parallelism, word) for word in ("--no-sp", "--sp"))
    assert (off.current, on.current) == (True, False)
    assert on.layer_bytes == (34 * S * H + 5 * A * S * S + STATISTICS) // t
    assert off.layer_bytes - on.layer_bytes == (10 * S * H + STATISTICS) * (t - 1) // t
    assert on.peak_bytes < off.peak_bytes


def test_a_layer_by_role() -> None:
    """arXiv 2205.05198 §4.1, summed over the layers of a stage. The embedding drops out as well."""
    run = paper(layout=Layout(pp=8), micro_batches=8)
    found = explained(run)
    assert found.stage == 0
    layers = LAYERS // 8
    roles = {role.name: role.nbytes for role in found.roles}
    assert roles["softmax output"] == layers * 2 * A * S * S
    assert roles["dropout mask"] == layers * (A * S * S + 2 * S * H) + S * H
    assert roles["norm input"] == layers * 4 * S * H
    assert roles["activation input"] == layers * 8 * S * H
    assert roles["norm statistics"] == layers * STATISTICS
    saved = forecast(run).layer_bytes()
    assert sum(roles.values()) == sum(nbytes for _, nbytes in saved[: 1 + layers])
    assert [role.nbytes for role in found.roles] == sorted(roles.values(), reverse=True)
    assert sum(role.fraction for role in found.roles) == pytest.approx(1)


def test_full_recomputation_is_another_forward_of_the_layers() -> None:
    """A third of a step, as is often said, less what the head takes of a forward: 2sbhV of L(24sbh^2 + 4bs^2h) more."""
    found = explained(paper())
    full = named(found.recompute, "--recompute full")
    layers, head = LAYERS * (24 * S * H * H + 4 * S * S * H), 2 * S * H * 51200
    assert full.recompute_flops == layers
    assert full.forward_fraction == pytest.approx(layers / (layers + head))
    assert full.step_fraction == pytest.approx(full.forward_fraction / 3)
    assert named(found.recompute, "--recompute none").recompute_flops == 0


def test_segments_run_whole_layers_again_but_for_the_last() -> None:
    """Without dropout a layer's backward does not ask for the last product's output, 8sbh^2; the next layer does."""
    run = paper(dropout=0.0)
    found = explained(run)
    whole, last = 24 * S * H * H + 4 * S * S * H, 8 * S * H * H
    flops = {v.change.removeprefix("--recompute "): v.recompute_flops for v in found.recompute}
    assert flops["full"] == LAYERS * (whole - last)
    assert flops["every:2"] == LAYERS * whole - LAYERS // 2 * last
    assert flops["sqrt"] == LAYERS * whole - 10 * last  # 9 segments of 10, and one of 6


# the sum that a peak is -----------------------------------------------------------------------------------------------


_STAGES = {"pp": 4, "dp": 8, "zero": 3, "micro_batches": 8, "recompute": "full"}


@pytest.mark.parametrize(
    ("model", "like", "asked"),
    [
        # weights of a pipeline that passes all-gather and reshard, and chunks that are reduced in turn
        ("gpt2", "torchtitan", _STAGES | {"reshard_after_forward": "always"}),
        ("gpt2", "torchtitan", _STAGES | {"reshard_after_forward": "never"}),
        # inputs and gradients that hooks reference to the end of a backward
        ("gpt2", "unsloth", {"dp": 8, "zero": 3, "lora": "r=8", "fsdp_version": 1, "reentrant": True}),
        ("llama3.2-1b", "torchtitan", {"dp": 8, "zero": 3, "micro_batches": 4, "gradient_sync": "last"}),
    ],
)
def test_parts_of_fsdp_are_the_peak(model: str, like: str, asked: dict[str, Any]) -> None:
    for stage in forecast(run_of(model, RunRequest(like=like, **asked))).stages:
        parts = peak_parts(stage)
        assert sum(part.nbytes for part in parts) == stage.peak.nbytes
        assert all(part.nbytes >= 0 for part in parts)


def stage_of(gradients: Gradients, micro_batches: int = 1, transient: int = 0) -> Stage:
    """Two small ones and a large one; the large one's backward is the worst moment."""
    first = Unit(names=("a", "b"), resident=5, forward_peak=11, backward_peak=17, adding_peak=19, gradient=2)
    second = Unit(names=("c",), resident=100, forward_peak=120, backward_peak=400, adding_peak=500, gradient=5)
    load = StageLoad(
        chunks=((first, second),),
        order=device_order(
            PipelineShape(Schedule.ONE_F_ONE_B, stages=1, micro_batches=micro_batches),
            0,
            walk=OrderOptions(learning=True),
        ),
        micro_batches=micro_batches,
        fixed=1000,
        state=2000,
        gradients=gradients,
        optimizer_transient=transient,
    )
    return Stage(index=0, groups=((),), load=load, static=ModelStates(parameters=1000, gradients=9, state=2000))


@pytest.mark.parametrize(
    ("stage", "gradients", "activations", "transients"),
    [
        (stage_of(Gradients.ONE_BY_ONE), 0, 110, 400),
        (stage_of(Gradients.ONE_BY_ONE, micro_batches=2), 9, 110, 500),
        (stage_of(Gradients.UPFRONT), 9, 110, 500),
        (stage_of(Gradients.UPFRONT, transient=5000), 9, 0, 5000),
    ],
)
def test_a_sum_done_by_hand(stage: Stage, gradients: int, activations: int, transients: int) -> None:
    parts = {part.name: part.nbytes for part in peak_parts(stage)}
    assert parts == {
        "parameters": 1000,
        "gradients": gradients,
        "optimizer state": 2000,
        "activations in flight": activations,
        "transients": transients,
    }
    assert stage.peak.nbytes == sum(parts.values())


@pytest.mark.parametrize(
    "run",
    [
        paper(layout=Layout(tp=8, sp=True, pp=8, virtual_stages=3), micro_batches=64, gradients=Gradients.UPFRONT),
        paper(layout=Layout(tp=8, pp=4, schedule=Schedule.GPIPE, keeps_stage_outputs=True), micro_batches=8),
        with_mode(paper(layout=Layout(tp=8, sp=True, dp=4, zero=3)), "every:5", offload=True),
        Run(model=preset("gpt2"), seq=1024, micro_batch=8, micro_batches=4),
        Run(model=preset("gpt2"), seq=16, kernels=MEGATRON.on_cpu()),
    ],
)
def test_parts_add_up_to_the_peak(run: Run) -> None:
    found = explained(run)
    parts = {part.name: part for part in found.parts}
    worst = forecast(run).worst
    assert sum(part.nbytes for part in found.parts) == found.peak_bytes == forecast(run).peak_bytes
    gathered = {unit.whole for chunk in worst.load.chunks for unit in chunk}  # stay so behind a forward
    assert parts["parameters"].nbytes - worst.static.parameters in {0, *gathered}
    assert parts["optimizer state"].nbytes == worst.static.state
    assert parts["activations in flight"].nbytes <= worst.activation_bytes
    assert all(part.nbytes >= 0 for part in found.parts)


def test_a_first_stage_holds_p_micro_batches() -> None:
    """arXiv 2205.05198 §4.2.3: under 1F1B the first stage holds the activations of all L layers, whatever p is."""
    run = with_mode(paper(layout=Layout(tp=8, sp=True, pp=8), micro_batches=64), "selective")
    found = explained(run)
    assert (found.stage, found.in_flight) == (0, 8)
    layers = LAYERS * (34 * S * H + STATISTICS) // 8
    activations = next(part.nbytes for part in found.parts if part.name == "activations in flight")
    assert 1 <= activations / layers < 1.02  # with what the embedding saves


# what if --------------------------------------------------------------------------------------------------------------


def test_the_run_as_it_is_stands_among_its_variants() -> None:
    for word in ("none", "sqrt", "every:7", "block:3"):
        run = with_mode(paper(layout=Layout(tp=8, dp=2, zero=1)), word)
        found = explained(run)
        for group in (found.recompute, found.sequence_parallelism, found.sharding):
            (current,) = [variant for variant in group if variant.current]
            assert current.peak_bytes == found.peak_bytes
        assert len({variant.change for variant in found.recompute}) == len(found.recompute)
        assert named(found.recompute, f"--recompute {word}").current


def test_variants_that_make_no_sense_are_left_out() -> None:
    found = explained(paper())
    assert (found.sequence_parallelism, found.sharding) == ((), ())
    odd = explained(Run(model=preset("llama3-8b"), seq=4097, layout=Layout(tp=2)))
    assert [variant.change for variant in odd.sequence_parallelism] == ["--no-sp"]


def test_sharding_the_optimizer_takes_its_state_apart() -> None:
    run = paper(layout=Layout(tp=8, pp=8, dp=4), micro_batches=64)
    state, found = forecast(run).worst.static.state, explained(run)
    saved = found.peak_bytes - named(found.sharding, "--zero 1").peak_bytes
    assert saved == pytest.approx(state * 3 / 4, rel=1e-6)
    assert named(found.sharding, "--zero 3").peak_bytes < named(found.sharding, "--zero 1").peak_bytes


# words ----------------------------------------------------------------------------------------------------------------


def codes(run: Run, budget_bytes: int | None = None) -> list[str]:
    return [remark.code for remark in explained(run, budget_bytes).remarks]


def test_selective_recomputation_is_in_vain_with_fused_attention_only() -> None:
    assert codes(with_mode(paper(), "selective")) == []
    fused = with_mode(Run(model=preset("llama3-8b"), seq=8192), "selective")
    found = explained(fused)
    assert [remark.code for remark in found.remarks] == ["selective-saves-nothing"]
    none, selective = (named(found.recompute, f"--recompute {word}") for word in ("none", "selective"))
    assert (none.layer_bytes, none.peak_bytes) == (selective.layer_bytes, selective.peak_bytes)


def test_long_segments_may_need_more_than_single_layers() -> None:
    run = paper(layout=Layout(tp=8, sp=True, pp=8), micro_batches=64)
    assert codes(with_mode(run, "full")) == []
    found = explained(with_mode(run, "every:12"))
    assert [remark.code for remark in found.remarks] == ["segments-above-full"]
    full = named(found.recompute, "--recompute full").peak_bytes
    assert full < found.peak_bytes
    assert format_bytes(full) in found.remarks[0].text and format_bytes(found.peak_bytes) in found.remarks[0].text


def test_offloading_may_miss_the_peak() -> None:
    run = paper("gpt-22b", layout=Layout(tp=8, sp=True))
    assert codes(with_mode(run, "none", offload=True)) == []
    missed = with_mode(run, "full", offload=True)
    assert codes(missed) == ["offload-misses-peak"]
    plain = forecast(with_mode(run, "full"))
    assert forecast(missed).worst.activation_bytes < plain.worst.activation_bytes
    assert forecast(missed).peak_bytes >= plain.peak_bytes


def test_a_first_step_that_fits_does_not_mean_that_the_second_does() -> None:
    found = forecast(paper(layout=Layout(tp=8, pp=8), micro_batches=8))
    first, later = found.first_step_peak_bytes, found.peak_bytes
    assert first < later
    for budget, expected in ((None, []), (later, []), (later - 1, ["second-step-exceeds"]), (first - 1, [])):
        assert codes(found.run, budget) == expected


def test_sentences_are_made_of_the_figures() -> None:
    found = explained(paper(layout=Layout(tp=8, pp=8, dp=2), micro_batches=64))
    cause, remedy = found.sentences
    largest = max(found.parts, key=lambda part: part.nbytes)
    assert largest.name == "activations in flight"
    assert format_bytes(found.peak_bytes) in cause and format_bytes(largest.nbytes) in cause
    assert "up to 8 micro-batches" in cause and f"backward of {found.where}" in cause
    best = min((*found.recompute, *found.sequence_parallelism, *found.sharding), key=lambda v: v.peak_bytes)
    assert best.change in remedy and format_bytes(best.peak_bytes) in remedy


def test_nothing_is_recommended_where_nothing_helps() -> None:
    found = explained(paper("gpt-530b"))
    assert "optimizer state" in found.sentences[0]
    assert found.sentences[1] == f"None of the {len(found.recompute)} changes tried lowers it."


def test_the_explanation_is_plain_figures() -> None:
    document = json.loads(json.dumps(asdict(explained(paper(layout=Layout(tp=8, dp=2))))))
    assert document["parts"][0].keys() == {"name", "nbytes", "fraction"}
    assert document["phase"] == "backward"
    assert document["core"]["crossover"] > 0


def test_the_fastest_change_that_fits_is_named_before_the_one_that_saves_most() -> None:
    """GPT-175B's selective recomputation takes 3.4 % of a step, the layers' whole forward 35 %."""
    run = paper("gpt-175b", layout=Layout(tp=8, sp=True, pp=8), micro_batches=8)
    found = forecast(run)
    selective = forecast(replace(run, recompute=Recompute(mode=Mode.SELECTIVE))).peak_bytes
    answer = explain(found, budgets=within(selective))
    assert f"{answer.changes[0].flags} is the fastest that fits: " in answer.sentences[1]
    added = {change.flags: change.added_fraction for change in answer.changes}
    assert added["--recompute selective"] == pytest.approx(0.034, abs=0.001)
    assert "lowers it most" in explain(found).sentences[1]
    between = forecast(replace(run, recompute=Recompute.parse("sqrt", layers=run.model.depth))).peak_bytes
    alone = [one.flags for one in explain(found, budgets=within(between)).changes if one.flags.count("--") == 1]
    assert alone == ["--recompute full", "--recompute sqrt"]


def test_two_changes_are_named_where_one_does_not_fit() -> None:
    """The cheapest in time of those that fit: on 4 A100 of 40 GB full recompute with a chunked loss, or a fused one."""
    run = resolve(preset("llama3-8b"), RunRequest(dp=4, zero=3, seq=8192, micro_batch=2)).run
    found, device = forecast(run), hardware("a100-40gb")
    budget = available_bytes(device, run)
    said = explain(found, budgets=within(budget), hardware=device).sentences[1]
    changes = fitting_changes(run, within(budget), device)
    full = replace(run, recompute=Recompute(mode=Mode.FULL))
    for change, loss in zip(changes, (Loss.FUSED, Loss.CHUNKED), strict=False):
        other = replace(full, kernels=replace(run.kernels, loss=loss))
        assert change.flags == f"--recompute full --loss {loss}"
        assert change.peak_bytes == forecast(other).peak_bytes <= budget < forecast(full).peak_bytes
        expected = time_residual(run, device.name).expected
        assert change.step_seconds == expected * estimate(other, device).step_seconds
    assert (
        f"{changes[0].flags} is the fastest that fits: {format_bytes(changes[0].peak_bytes)}, 21.8 % more of a" in said
    )
    assert " fits: " not in explain(found).sentences[1]
    assert explain(found, budgets=within(1)).sentences[1].endswith("No two settings fit together either.")


def test_changes_say_how_surely_they_fit() -> None:
    """The fastest that surely fits a GPU is listed, whatever is faster and may not."""
    asked = RunRequest(dp=8, zero=3, seq=9216, micro_batch=2, like="torchtitan")
    run, device = resolve(preset("llama3-8b"), asked).run, hardware("h100-80gb")
    limit = limit_of(budget=None, gpu="h100-80gb", run=run)
    assert limit is not None
    budgets = fit_budgets(run, limit)
    assert [budget.rule for budget in budgets] == [FitRule.SURELY, FitRule.EXPECTED, FitRule.MAY]
    changes = fitting_changes(run, budgets, device)
    for change in changes:
        held_to = next(budget for budget in budgets if change.peak_bytes <= budget.nbytes)
        assert change.rule is held_to.rule
        verdict = figures(run, change.peak_bytes, hardware=device.name).verdict(usable_bytes=device.usable_bytes)
        assert (verdict is FitVerdict.FITS) == (change.rule is FitRule.SURELY)
    assert [change.rule for change in changes].count(FitRule.SURELY) == 1 and changes[-1].rule is FitRule.SURELY
    said = explain(forecast(run), budgets=budgets, hardware=device).sentences[1]
    assert f"{changes[-1].flags} is the fastest that surely fits: " in said
    how = {FitRule.EXPECTED: "is expected to fit", FitRule.MAY: "may fit"}[changes[0].rule]
    assert f"{changes[0].flags} is faster, and {how}: " in said


def test_reducing_in_each_micro_batch_is_a_change() -> None:
    """A Trainer's gradients are unsharded until the last micro-batch, 2 bytes a parameter on each rank."""
    asked = RunRequest(dp=8, zero=3, seq=4096, micro_batches=8, like="huggingface", recompute="full", optimizer="adamw")
    run = resolve(preset("llama3-8b"), asked).run
    each = replace(run, layout=replace(run.layout, gradient_sync=GradientSync.EACH))
    budget = forecast(each).peak_bytes
    assert forecast(run).peak_bytes - budget > 1.3 * 8 * 10**9
    (alone,) = (
        change
        for change in fitting_changes(run, within(budget), hardware("a100-40gb"), most=80)
        if change.flags == "--gradient-sync each"
    )
    assert alone.peak_bytes == budget


@pytest.mark.parametrize(("like", "close"), [("huggingface", 0), ("huggingface-4.57", 0.01)])
def test_a_quantized_base_is_a_change(like: str, close: float) -> None:
    """As its flag resolves it; before TRL 0.27 the embedding of a 4-bit base is fp32."""
    asked = RunRequest(lora="r=16", base="fp32", like=like, precision="bf16-autocast", recompute="full")
    run, packed = (resolve(preset("llama3-8b"), one).run for one in (asked, replace(asked, base="nf4")))
    budget = forecast(packed).peak_bytes
    found = fitting_changes(run, within(2 * budget), hardware("rtx4090-24gb"), most=80)
    (alone,) = (change for change in found if change.flags == "--base nf4")
    assert alone.peak_bytes == pytest.approx(budget, rel=close, abs=0)
    whole = resolve(preset("llama3-8b"), RunRequest(like=like)).run
    assert not any("--base" in one.flags for one in fitting_changes(whole, within(1 << 40), hardware("h100-80gb")))


def test_changes_keep_the_sequences_of_a_step_and_are_of_two_kinds() -> None:
    run = resolve(preset("llama3-405b"), RunRequest(dp=8, tp=8, pp=16, micro_batch=4, micro_batches=16, seq=8192)).run
    device = hardware("h100-80gb")
    begin = time.process_time()
    changes = fitting_changes(run, within(available_bytes(device, run)), device)
    assert time.process_time() - begin < 2
    assert changes
    for change in changes:
        words = change.flags.split()
        assert words.count("--recompute") <= 1
        if "--micro-batch" in words:
            sizes = (int(words[words.index(name) + 1]) for name in ("--micro-batch", "--micro-batches"))
            assert math.prod(sizes) == 64
    seconds = [change.step_seconds or 0 for change in changes]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_of_a_peak_are_the_peak_where_backward_is_split(recompute: str) -> None:
    """With torch's checkpoints it is in a second half, and what was recomputed there is a transient."""
    split = {"pp": 4, "schedule": "zero-bubble", "stage_buffers": True, "recompute": recompute}
    found = forecast(resolve(preset("llama3-8b"), RunRequest(micro_batches=8, **split)).run)
    for stage in found.stages:
        parts = {part.name: part.nbytes for part in peak_parts(stage)}
        assert sum(parts.values()) == stage.peak.nbytes
        assert parts["parameters"] == stage.static.parameters
        assert all(nbytes >= 0 for nbytes in parts.values())
        if stage.index:
            more = parts["transients"] > parts["activations in flight"]
            assert more == (recompute == "full")


def test_parts_of_a_peak_are_the_peak_where_libraries_set_bytes_aside() -> None:
    asked = RunRequest(like="megatron-0.19", tp=4, pp=4, virtual_stages=2, micro_batches=8, dp=2, zero=1, seq=1024)
    stage = forecast(resolve(replace(preset("llama3-8b"), layers=preset("llama3-8b").layers[:16]), asked).run).worst
    parts = {part.name: part.nbytes for part in peak_parts(stage)}
    assert sum(parts.values()) == stage.peak.nbytes
    assert parts["parameters"] == stage.static.parameters
    assert parts[ASIDE] >= stage.load.aside > 0
