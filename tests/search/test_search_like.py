"""A framework's rule in a search: what it says of tensor-parallel ranks holds in the layouts that have them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.predict.forecast import forecast
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search.bounds import whole_seconds
from jettison.search.evaluate import Evaluated, Figures, Seconds
from jettison.search.search import SearchRequest, by_slack, on_own_framework, search
from jettison.search.space import SearchCandidate, Setup, setup_run
from jettison.spec.frameworks import named
from jettison.spec.hardware import hardware
from jettison.spec.kernels import Loss
from jettison.spec.layout import Layout
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Recompute

A100 = hardware("a100-80gb")
LLAMA = parse_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
    },
    name="wide-vocabulary",
)
SMALL = parse_config(
    {"model_type": "gpt2", "n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 4096, "n_positions": 1024},
    name="small-gpt2",
)


def as_typed(setup: Setup, **common: object) -> RunRequest:
    """What `ledger` is given for it."""
    lay = setup.layout
    return RunRequest(
        tp=lay.tp, sp=lay.sp, dp=lay.dp, pp=lay.pp, zero=lay.zero, micro_batch=setup.micro_batch,
        micro_batches=setup.micro_batches, **common,
    )  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"like": "torchtitan"},
        {"like": "torchtitan", "loss": "compiled"},
        {"like": "torchtitan", "gathered_inputs": False},
        {"like": "nanotron"},
        {"like": "huggingface"},
        {"like": "huggingface", "gradients": "upfront"},
    ],
)
def test_layouts_have_what_the_rule_says_of_their_tensor_ranks(given: dict[str, object]) -> None:
    asked = SearchRequest(**given, tp="1,2,4", pp="1", cp="1", micro_batch="2")
    whole = asked.space(LLAMA, A100, gpus=4, global_batch=8)
    assert {setup.layout.tp for setup in whole.setups} == {1, 2, 4}
    for setup in whole.setups:
        ours, typed = setup_run(setup, whole.template), resolve(LLAMA, as_typed(setup, **given)).run
        assert ours == typed
        assert forecast(ours).peak_bytes == forecast(typed).peak_bytes


def test_the_trainers_replicas_have_buckets_where_they_shard_nothing() -> None:
    whole = SearchRequest(like="huggingface", tp="1", pp="1", cp="1").space(LLAMA, A100, gpus=2, global_batch=4)
    runs = [setup_run(setup, whole.template) for setup in whole.setups]
    assert {run.layout.zero for run in runs} == {0, 1, 2, 3}
    assert all((run.gradients is Gradients.BUCKETS) is (run.layout.zero == 0) for run in runs)
    best = search(SearchRequest(like="huggingface", zero="0", tp="1", pp="1", cp="1", micro_batch="2", recompute="none")
                  .space(LLAMA, A100, gpus=2, global_batch=4), A100).best  # fmt: skip
    plain = RunRequest(like="huggingface", dp=2, micro_batch=2)
    buckets = forecast(resolve(LLAMA, plain).run)
    assert best.figures.peak_bytes == buckets.peak_bytes
    alone = forecast(resolve(LLAMA, replace(plain, gradients="one-by-one")).run)
    assert buckets.peak_bytes == alone.peak_bytes + alone.worst.static.gradients


def test_gradients_that_a_preset_has_for_a_stage_of_zero_are_a_searchs() -> None:
    """DeepSpeed's stage 3 has a buffer of them: with one micro-batch the peak is another."""
    whole = SearchRequest(like="deepspeed", tp="1", pp="1", cp="1").space(LLAMA, A100, gpus=2, global_batch=2)
    for setup in whole.setups:
        layout = setup.layout
        typed = RunRequest(
            like="deepspeed", dp=layout.dp, zero=layout.zero, micro_batch=setup.micro_batch,
            micro_batches=setup.micro_batches,
        )  # fmt: skip
        assert setup_run(setup, whole.template) == resolve(LLAMA, typed).run
        upfront = setup_run(setup, whole.template).gradients is Gradients.UPFRONT
        assert upfront is (layout.zero == 3)


def test_a_sharded_base_is_not_upcast_in_a_search() -> None:
    """TRL's fp32 norms make the residual stream of each replica fp32, but not of tensor-parallel ranks."""
    adapters: dict[str, Any] = {"like": "huggingface-4.57", "lora": "16", "base": "nf4-double"}
    asked = SearchRequest(**adapters, tp="1,2", pp="1", cp="1", sp=False, micro_batch="2")
    whole = asked.space(LLAMA, A100, gpus=4, global_batch=8)
    assert {(setup.layout.tp, setup.layout.zero) for setup in whole.setups} >= {(1, 0), (1, 3), (2, 0), (2, 3)}
    for setup in whole.setups:
        typed = resolve(LLAMA, as_typed(setup, **adapters)).run
        assert forecast(setup_run(setup, whole.template)).peak_bytes == forecast(typed).peak_bytes
    with pytest.raises(UsageError, match="got --tp 1,2 with --kbit-upcast norms"):
        replace(asked, kbit_upcast="norms").space(LLAMA, A100, gpus=4, global_batch=8)
    with pytest.raises(UsageError, match="got --zero 3; --kbit-upcast norms"):
        replace(asked, kbit_upcast="norms", tp="1", zero="3").space(LLAMA, A100, gpus=4, global_batch=8)


def test_a_frozen_base_in_fp8_is_searched_without_shards_of_parameters() -> None:
    asked = SearchRequest(lora="16", base="fp8", tp="1", pp="1", cp="1")
    assert {setup.layout.zero for setup in asked.space(LLAMA, A100, gpus=2, global_batch=2).setups} == {0, 1, 2}
    with pytest.raises(UsageError, match="got --zero 3; --base fp8 is modelled for"):
        replace(asked, zero="3").space(LLAMA, A100, gpus=2, global_batch=2)


def test_gathers_module_by_module_have_no_groups_of_fsdp() -> None:
    asked = SearchRequest(like="huggingface", zero_buckets="default", zero="2,3", tp="1", pp="1", cp="1")
    setups = asked.space(LLAMA, A100, gpus=2, global_batch=2).setups
    assert {setup.layout.zero for setup in setups} == {2, 3}
    assert all(setup.layout.by_module for setup in setups)


def test_what_another_framework_cannot_run_is_refused() -> None:
    lists = SearchRequest(like="megatron-0.19", recompute_modules="mlp", runs_on="torchtitan")
    with pytest.raises(UsageError, match="which torchtitan cannot run; give --recompute"):
        lists.space(LLAMA, A100, gpus=2, global_batch=4)
    assert replace(lists, runs_on="megatron").space(LLAMA, A100, gpus=2, global_batch=4).axes.lists
    with pytest.raises(UsageError, match="got --like torchtitan, which is --zero 3"):
        SearchRequest(like="torchtitan", runs_on="megatron").space(LLAMA, A100, gpus=2, global_batch=4)


def test_a_searched_peak_is_the_ledgers() -> None:
    """Logits, 16 bits, and DTensor's loss beside them: with the loss of tp = 1 it would be another number."""
    asked = SearchRequest(like="torchtitan", tp="2", sp=True, pp="1", cp="1", micro_batch="4", recompute="none")
    whole = asked.space(LLAMA, A100, gpus=2, global_batch=4)
    (setup,) = whole.setups
    typed = resolve(LLAMA, as_typed(setup, like="torchtitan")).run
    best = search(whole, A100).best
    assert typed.kernels.loss is Loss.DTENSOR
    assert best.figures.peak_bytes == forecast(typed).peak_bytes
    upcast = replace(typed, kernels=replace(typed.kernels, loss=Loss.UPCAST))
    assert best.figures.peak_bytes != forecast(upcast).peak_bytes


def test_inputs_of_adapters_have_gradients_where_a_candidate_recomputes() -> None:
    """As `ledger` and `--explain` have it: PEFT asks for them with checkpoints alone, and a flag decides for all."""
    for asks in (None, True, False):
        asked = SearchRequest(lora="r=8", tp="1", pp="1", cp="1", zero="0", micro_batch="1", input_gradients=asks)
        whole = asked.space(LLAMA, A100, gpus=1, global_batch=2)
        (setup,) = whole.setups
        for word in ("none", "full"):
            typed = resolve(LLAMA, as_typed(setup, lora="r=8", recompute=word, input_gradients=asks)).run
            run = setup_run(setup, whole.template, typed.recompute)
            assert (run.model, run.tuning) == (typed.model, typed.tuning)
            assert forecast(run).peak_bytes == forecast(typed).peak_bytes
            assert run.model.layers[0].detached is not (word == "full" if asks is None else asks)


def test_candidates_with_another_loss_are_not_taken_for_each_other() -> None:
    """What a journal knows of one is not an answer to the other, although their templates are the same."""
    one, other = (
        SearchRequest(like="torchtitan", loss=loss, tp="2", pp="1", cp="1").space(LLAMA, A100, gpus=2, global_batch=4)
        for loss in (None, "upcast")
    )
    assert one.template == other.template
    texts = [{SearchCandidate(setup=s, recompute=Recompute()).text for s in whole.setups} for whole in (one, other)]
    assert not texts[0] & texts[1]


@pytest.mark.parametrize(
    ("rule", "precision", "gpus"),
    [("fsdp2", "bf16-autocast", 1), ("fsdp2", "bf16-pure", 2), ("deepspeed-parameters", "bf16", 2)],
)
def test_the_best_with_weights_on_the_host_is_the_best_of_all(rule: str, precision: str, gpus: int) -> None:
    """What recompute hides goes both ways: gradients beside backwards, and weights that the next group waits for."""
    asked = SearchRequest(
        offload_optimizer=rule, precision=precision, seq=512, recompute="none,selective-op,full,every"
    )
    whole = asked.space(SMALL, A100, gpus=gpus, global_batch=4)
    best: dict[Setup, float] = {}
    for setup in whole.setups:
        runs = [setup_run(setup, whole.template, plan) for plan in whole.plans(setup)]
        best[setup] = min(estimate(run, A100).step_seconds for run in runs)
    found = search(whole, A100, budget_bytes=10**13, top=4).ranked[:4]
    assert [f.seconds.step for f in found] == pytest.approx(sorted(best.values())[:4], rel=1e-9)


@pytest.mark.parametrize("preset", ["huggingface", "automodel"])
def test_presets_that_reduce_in_fp32_after_the_last_micro_batch_are_searched(preset: str) -> None:
    space = SearchRequest(seq=256, like=preset, zero="0,3", pp="1", recompute="none").space(
        LLAMA, A100, gpus=8, global_batch=64
    )
    found = search(space, A100, budget_bytes=10**13, top=20).ranked
    assert {one.candidate.setup.layout.zero for one in found} == {0, 3}
    for one in found:
        step = estimate(one.candidate.run(space.template), A100).step_seconds
        assert one.seconds.step == pytest.approx(step, rel=1e-9), one.candidate.flags


def test_gradients_reduced_last_are_searched_where_a_ledger_takes_them() -> None:
    """A flag is asked of every layout; a preset's is of layouts without pipelines."""
    asked = SearchRequest(seq=256, zero="3", gradient_sync="last", cp="1", recompute="none")
    setups = asked.space(LLAMA, A100, gpus=4, global_batch=16).setups
    assert {setup.layout.pp for setup in setups} == {1}
    for setup in setups:
        assert resolve(LLAMA, as_typed(setup, gradient_sync="last")).run.layout.gradient_sync == "last"
    of_preset = replace(asked, gradient_sync=None, like="huggingface").space(LLAMA, A100, gpus=4, global_batch=16)
    words = {setup.layout.pp: str(setup.layout.gradient_sync) for setup in of_preset.setups if setup.layout.dp > 1}
    assert words == {1: "last", 2: "each"}


@pytest.mark.parametrize(("preset", "both"), [("huggingface", True), ("automodel", True), ("torchtitan", False)])
def test_both_gradient_reductions_are_searched_where_a_setting_chooses(preset: str, both: bool) -> None:
    """The reduction in each micro-batch takes less memory and may take more time, as `ledger` and `estimate` say."""
    asked = SearchRequest(seq=256, like=preset, zero="3", tp="1", pp="1", cp="1", recompute="none,full")
    asked = on_own_framework(asked, LLAMA, A100, gpus=8, global_batch=32)
    whole = asked.space(LLAMA, A100, gpus=8, global_batch=32)
    others = [setup for setup in whole.setups if setup.sync]
    assert {setup.micro_batches for setup in others} == ({2, 4} if both else set())
    assert all(setup.flags.endswith(" --gradient-sync each") for setup in others)
    found = search(whole, A100, budget_bytes=10**13, top=20).ranked
    assert len(found) == len(whole.setups)
    for one in found:
        setup = one.candidate.setup
        run = resolve(
            LLAMA,
            as_typed(setup, like=preset, seq=256, gradient_sync=setup.sync, recompute=str(one.candidate.recompute)),
        ).run
        assert one.needed_bytes == forecast(run).peak_bytes
        assert one.seconds.step == pytest.approx(estimate(run, A100).step_seconds, rel=1e-9)
    least = min(whole.setups, key=lambda setup: forecast(setup_run(setup, whole.template)).peak_bytes)
    assert least.micro_batches == 1 or least.sync or not both
    assert (
        replace(asked, gradient_sync="last" if both else None).space(LLAMA, A100, gpus=8, global_batch=32).axes.syncs
        == ()
    )


# what a framework can run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", sorted(named("runs")))
def test_a_search_keeps_to_what_a_framework_can_run(framework: str) -> None:
    """Axes above 1, stages of ZeRO, orders of pipelines and recompute modes are those of its `runs`."""
    able = named("runs")[framework]
    found = SearchRequest(seq=256, runs_on=framework).space(LLAMA, A100, gpus=8, global_batch=8)
    above = {
        name
        for setup in found.setups
        for name in ("tp", "pp", "cp", "ep", "virtual_stages")
        if getattr(setup.layout, name) > 1
    }
    assert above <= set(able["axes"]) and (above or "tp" not in able["axes"])
    assert {setup.layout.zero for setup in found.setups} <= set(able["zero"])
    assert "sp" in able["axes"] or not any(setup.layout.sp for setup in found.setups)
    assert {str(plan) for setup in found.setups for plan in found.plans(setup)} >= {"none", "full"}
    assert found.axes.plans == tuple(able["recompute"])


@pytest.mark.parametrize("preset", sorted(named("presets")))
def test_a_preset_is_searched_for_what_its_framework_runs(preset: str) -> None:
    """Unless a field asks for something else."""
    folder, sizes = named("presets")[preset]["folder"], {"gpus": 8, "global_batch": 8}
    found = on_own_framework(SearchRequest(seq=256, like=preset), LLAMA, A100, **sizes)
    assert found.runs_on == (folder if folder in named("runs") else None)
    for more in ({"recompute": "every:2,interval:3"}, {"runs_on": "any"}):
        asked = SearchRequest(seq=256, like=preset, **more)
        assert on_own_framework(asked, LLAMA, A100, **sizes) == asked
    anything = replace(asked, recompute="interval:3").space(LLAMA, A100, **sizes)
    assert anything.axes.plans == ("interval:3",)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"runs_on": "transformers", "pp": "1,2"}, "got --pp 1,2, which transformers cannot run"),
        ({"runs_on": "transformers", "sp": True}, "got --sp, which transformers cannot run"),
        ({"runs_on": "megatron", "zero": "3"}, "got --zero 3; --runs-on megatron"),
        ({"runs_on": "megatron", "recompute": "selective-op"}, "expected some of none, selective, full, every, block"),
        ({"runs_on": "nanotron", "schedule": "interleaved"}, "got --schedule interleaved, which nanotron cannot run"),
        ({"runs_on": "nobody"}, "expected one of accelerate, "),
    ],
)
def test_what_a_framework_cannot_run_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        SearchRequest(seq=256, **asked).space(LLAMA, A100, gpus=8, global_batch=8)


def test_what_is_not_tried_may_be_asked_for() -> None:
    """Blocks of Megatron, and a planner's choice where this package plugs into a trainer."""
    for framework, word in (("megatron", "block:2"), ("torchtitan", "auto"), ("torchtitan", "interval:3")):
        request = SearchRequest(seq=256, runs_on=framework, recompute=word)
        assert request.space(LLAMA, A100, gpus=8, global_batch=8).axes.plans == (word,)


def test_candidates_within_one_percent_are_in_the_order_of_the_room_they_leave() -> None:
    def made(seconds: float, needed: int) -> Evaluated:
        fields = dict.fromkeys(("compute", "communication", "bubble", "recompute", "other", "mfu"), 0.0)
        took = Seconds(step=seconds, least=seconds, tokens_per_second_per_gpu=1.0, **fields)
        candidate = SearchCandidate(setup=Setup(layout=Layout(), micro_batch=1, micro_batches=1), recompute=Recompute())
        figures = Figures(peak_bytes=needed, static_bytes=0, seconds=took)
        return Evaluated(candidate=candidate, figures=figures, number=(needed, 0), limit_bytes=1000)

    fast, alike, same = made(1.0, 900), made(1.005, 504), made(1.009, 500)
    slow, last = made(1.02, 300), made(1.025, 200)
    assert by_slack([fast, alike, same, slow, last]) == (alike, same, fast, last, slow)
    assert by_slack([]) == ()


def test_a_bound_of_seconds_has_no_casts_of_autocast_where_fsdp_casts() -> None:
    device, spec = hardware("h100-80gb"), model_spec("llama3-8b")
    for zero in (2, 3):
        asked = RunRequest(like="transformers", seq=4096, dp=8, zero=zero, micro_batches=8)
        run = resolve(spec, asked).run
        assert 8 * whole_seconds(run, device) < estimate(run, device).step_seconds
