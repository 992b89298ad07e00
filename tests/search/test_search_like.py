"""A framework's rule in a search: what it says of tensor-parallel ranks holds in the layouts that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jettison.families.config import parse_config
from jettison.predict.forecast import forecast
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import resolve
from jettison.predict.time import estimate
from jettison.search.request import SearchRequest
from jettison.search.search import search
from jettison.search.space import SearchCandidate, Setup, setup_run
from jettison.spec.hardware import hardware
from jettison.spec.kernels import Loss
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
    asked = SearchRequest(states_on_host=rule, precision=precision, seq=512, recompute="none,selective-op,full,every")
    whole = asked.space(SMALL, A100, gpus=gpus, global_batch=4)
    best: dict[Setup, float] = {}
    for setup in whole.setups:
        runs = [setup_run(setup, whole.template, plan) for plan in whole.plans(setup)]
        best[setup] = min(estimate(run, A100).step_seconds for run in runs)
    found = search(whole, A100, budget_bytes=10**13, top=4).ranked[:4]
    assert [f.seconds.step for f in found] == pytest.approx(sorted(best.values())[:4], rel=1e-9)
