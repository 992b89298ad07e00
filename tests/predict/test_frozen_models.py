"""A reference frozen the policy: the forecast frozen steps of two real models, on real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

from jettison.core.errors import Infeasible, UsageError
from jettison.cost.kernel import TILED
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.presets import preset
from jettison.formula.loss import TILE_WORDS
from jettison.formula.region import head_region
from jettison.memory.span import Phase
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.time import estimate
from jettison.report.timeline_files import step_trace
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.auto_recompute import choose, smallest_budget
from jettison.spec.fine_tuning import FrozenModel, Role, When
from jettison.spec.hardware import hardware
from jettison.spec.kernels import Loss
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.formula_cases import HIDDEN, VOCABULARY, FormulaCase, model_of, run_of, tiny_config

PAIRS = 2


def log_probabilities(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits.float()
    return -cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(ids.shape).sum(1)


def preference_step(policy: nn.Module, reference: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    """Chosen and rejected in one batch of 2b, the policy's forward first, as TRL has it."""
    own = log_probabilities(policy, ids, labels)
    with torch.no_grad():
        other = log_probabilities(reference, ids, labels)
    chosen, rejected = (own - other).chunk(2)
    (-logsigmoid(0.1 * (chosen - rejected)).mean()).backward()


def with_reference(run: Run, when: When = When.AFTER) -> Run:
    return replace(run, frozen=(FrozenModel(role=Role.REFERENCE, model=run.model, when=when),))


def measured(policy: nn.Module, frozen: nn.Module, step: Callable[[], None]) -> int:
    """The peak of a second step with AdamW, all tensors counted that both models have."""
    optimizer = torch.optim.AdamW(policy.parameters(), foreach=False)

    def whole() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad()

    whole()
    state = [t for s in optimizer.state.values() for t in s.values()]
    frozen = [t for model in (policy, frozen) for t in static_tensors(model, torch.empty(0))]
    with AllocationCounter([*frozen, *state]) as counter:
        whole()
    return counter.peak_bytes


@pytest.mark.parametrize(
    ("family", "attention", "precision", "recompute"),
    [
        ("llama", "sdpa", "fp32", "none"),
        ("llama", "eager", "fp32", "full"),
        ("gpt2", "eager", "bf16-pure", "none"),
        ("qwen3", "eager", "fp32", "none"),
        ("qwen3", "sdpa", "bf16-pure", "none"),
    ],
)
def test_the_peak_of_a_step_with_two_models(family: str, attention: str, precision: str, recompute: str) -> None:
    case = FormulaCase(family=family, attention=attention, batch=2 * PAIRS, sequence=16, precision=precision)
    policy = model_of(case)
    reference = copy.deepcopy(policy).requires_grad_(False)
    if recompute == "full":
        policy.activation_checkpointing_enable({"use_reentrant": False})
    ids, labels = (torch.randint(1, VOCABULARY, (case.batch, case.sequence)) for _ in range(2))
    found = measured(policy, reference, lambda: preference_step(policy, reference, ids, labels))
    run = run_of(case)
    run = replace(run, recompute=Recompute.parse(recompute, layers=run.model.depth))
    said = forecast(with_reference(run))
    assert said.peak_bytes == pytest.approx(found + 2 * ids.nbytes, rel=0.01)
    if recompute == "none":  # what a layer takes at most without a graph is more than a backward
        assert said.worst.peak.phase is Phase.FROZEN
        assert said.peak_bytes > forecast(run).peak_bytes + frozen_bytes(with_reference(run))[0].parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_trls_own_head_keeps_what_its_word_says(precision: str) -> None:
    """``--loss dpo``: ``ChunkedLogProbFunction`` on the rows that TRL gives it, and its tile."""
    from trl.kernels import ChunkedLogProbFunction

    case = FormulaCase(family="llama", attention="sdpa", batch=2 * PAIRS, sequence=16, precision=precision)
    policy = model_of(case)
    rows = case.batch * (case.sequence - 1)
    hidden = torch.randn(rows, HIDDEN, dtype=policy.lm_head.weight.dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (rows,))
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ChunkedLogProbFunction.apply(
            hidden, policy.lm_head.weight, None, targets, 1.0, TILE_WORDS, None, 1.0, ("entropy",)
        )
    del kept[policy.lm_head.weight.data_ptr()]
    run = run_of(case)
    region = head_region(replace(run, kernels=replace(run.kernels, loss=Loss.DPO)).signature)
    (step,) = (step for step in region.tape.steps if step.name == TILED)
    assert sorted(region.tape.sizes[s.value.storage] for s in step.saved) == sorted(kept.values())
    assert step.outputs[-1].nbytes == rows * TILE_WORDS * hidden.element_size()


def test_pairs_are_two_sequences_and_their_logits_never_whole() -> None:
    run = resolve(preset("llama3-8b"), RunRequest(loss="dpo", reference="same")).run
    assert run.micro_batch == 2
    plain = replace(run, kernels=replace(run.kernels, loss=Loss.UPCAST))
    tiled, whole = (frozen_bytes(each)[0].forward for each in (run, plain))
    assert 2 * 4096 * 128_256 * 2 > tiled > 4096 * 32_768 * 2
    assert whole > 2 * 4096 * 128_256 * 8
    for asked, message in (({"micro_batch": 3}, "a pair is two sequences"), ({"tp": 2}, "--loss dpo with --tp 2")):
        with pytest.raises(UsageError, match=message):
            resolve(preset("llama3-8b"), RunRequest(loss="dpo", **asked))


def test_a_reward_model_before_the_policy() -> None:
    """transformers' classifier of one label; its forward is over when the policy's begins, and its peak is lower."""
    case = FormulaCase(family="llama", attention="sdpa", batch=4, sequence=16)
    policy = model_of(case)
    config = tiny_config(case)
    config.num_labels, config.pad_token_id = 1, 0
    scorer = transformers.LlamaForSequenceClassification(config).requires_grad_(False)
    ids, labels = (torch.randint(1, VOCABULARY, (case.batch, case.sequence)) for _ in range(2))

    def step() -> None:
        with torch.no_grad():
            rewards = scorer.model(input_ids=ids).last_hidden_state @ scorer.score.weight.T
        (log_probabilities(policy, ids, labels) * rewards[:, -1, 0]).mean().backward()

    found = measured(policy, scorer, step)
    run = run_of(case)
    said = forecast(replace(run, frozen=(FrozenModel(role=Role.REWARD, model=run.model, when=When.BEFORE),)))
    assert frozen_bytes(said.run)[0].parameters == sum(p.nbytes for p in scorer.parameters())
    assert said.peak_bytes == pytest.approx(found + 2 * ids.nbytes, rel=0.01)
    assert said.worst.peak.phase is not Phase.FROZEN


def forecast_of(**asked: object) -> Forecast:
    return forecast(resolve(preset("llama3-8b"), RunRequest(micro_batch=2, **asked)).run)  # type: ignore[arg-type]


def test_weights_lie_as_the_layout_says() -> None:
    """8,030,261,248 parameters; over the ranks of ZeRO 3 and of nothing else, in the policy's dtype or another."""
    whole = 2 * 8_030_261_248

    def parameters(**asked: object) -> int:
        return frozen_bytes(forecast_of(**asked).run)[0].parameters

    assert parameters(reference="same") == whole
    assert parameters(reference="same", dp=8, zero=2) == whole
    assert parameters(reference="same", dp=8, zero=3) == whole // 8
    assert parameters(reference="same,sharded=no", dp=8, zero=3) == whole
    assert parameters(reference="same,dtype=fp32") == 2 * whole
    assert parameters(reference="same", precision="bf16-autocast") == 2 * whole
    assert parameters(reference="same", tp=2) < 0.51 * whole
    assert parameters(reference="base", lora="r=16") == 0
    assert parameters(reference="same", lora="r=16") == whole
    assert parameters(reference="same", lora="r=16", base="nf4-double") < 0.4 * whole
    head = 2 * (128_256 - 1) * 4096
    assert parameters(reward="same") == whole - head


def test_what_a_step_holds_beside_it_is_in_its_peak() -> None:
    """The reference's forward stands on all that the policy keeps, or before it on nothing."""
    plain, after, before = (
        forecast_of(**asked) for asked in ({}, {"reference": "same"}, {"reference": "same,when=before"})
    )
    frozen = frozen_bytes(after.run)[0]
    held = after.worst.load.held(0)
    assert after.peak_bytes == after.worst.load.fixed + after.worst.load.state + held + frozen.forward
    assert before.peak_bytes == plain.peak_bytes + frozen.parameters


def test_a_step_takes_its_forward_as_well() -> None:
    """A forward of 2N FLOPs a token frozen 6N, on the same hardware."""
    asked = {"dp": 8, "zero": 3}
    plain, with_it = (
        estimate(forecast_of(**asked, **more).run, hardware("h100-80gb")) for more in ({}, {"reference": "same"})
    )
    assert with_it.model_flops() == pytest.approx(plain.model_flops() * 4 / 3)
    assert with_it.step_seconds - plain.step_seconds == pytest.approx(plain.stages[0].forward[0], rel=0.02)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"reference": "same", "pp": 2}, "--reference with --pp 2"),
        ({"reference": "base"}, "adapters disabled"),
        ({"reference": "same,dtype=int8"}, "dtype=int8; expected one of bf16, fp16, fp32"),
        ({"reference": "same,size=3"}, "expected --reference same or a model"),
        ({"reference": "nowhere"}, "nowhere"),
        ({"reward": "base", "lora": "r=16"}, "--reward base"),
        ({"reference": "gpt2", "seq": 4096}, "the reference gpt2 has 1024 positions"),
        ({"reference": "llama3-8b", "ep": 2, "dp": 2}, "has no experts"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        forecast_of(**asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"reference": "same", "recompute": "full"},
        {"reference": "same", "micro_batches": 3, "dp": 4, "zero": 3},
        {"reference": "gpt2-xl,when=before", "reward": "same", "seq": 1024},
        {"offload_optimizer": "deepspeed", "dp": 4, "zero": 3, "micro_batches": 2},
        {"packed": 512, "recompute": "full"},
    ],
    ids=str,
)
def test_the_timeline_the_clock_and_the_short_way_have_one_peak(asked: dict[str, object]) -> None:
    found = forecast_of(**asked)
    (played,) = step_trace("", found, estimate(found.run, hardware("h100-80gb"))).memory
    assert found.worst.peak.nbytes == played.peak_bytes == found.peak_bytes


def test_tiles_of_one_sequence_are_those_of_pairs() -> None:
    """TRL's SFT and DPO have one head: a pair takes what two sequences take, and one sequence alone will do."""
    pairs, rows = (forecast_of(loss=loss) for loss in ("dpo", "tiled"))
    assert pairs.layer_bytes() == rows.layer_bytes()
    assert pairs.peak_bytes == rows.peak_bytes
    one = forecast(resolve(preset("llama3-8b"), RunRequest(loss="tiled")).run)
    assert one.peak_bytes < rows.peak_bytes


def test_a_plan_counts_what_stands_beside_it() -> None:
    """A budget between what a plan needs without a reference and with it has no plan with one."""
    alone, frozen = (
        smallest_budget(forecast_of(dp=8, zero=3, **more).run, hardware("h100-80gb"))
        for more in ({}, {"reference": "same"})
    )
    asked = forecast_of(dp=8, zero=3, reference="same").run
    assert choose(asked, frozen, hardware("h100-80gb")).forecast.peak_bytes <= frozen
    with pytest.raises(Infeasible):
        choose(asked, (alone + frozen) // 2, hardware("h100-80gb"))


@pytest.mark.parametrize("like", ["huggingface", "huggingface-4.48"])
def test_a_whole_reference_beside_shards_of_a_trainer(like: str) -> None:
    """Whose outermost group has the policy's ends, which nothing of the reference has."""
    request = RunRequest(like=like, dp=2, zero=3, micro_batch=2, loss="dpo", recompute="full", seq=512)
    shared, whole = (
        forecast(resolve(preset("llama3-8b"), replace(request, reference=f"same,sharded={word}")).run)
        for word in ("yes", "no")
    )
    assert whole.peak_bytes > shared.peak_bytes + 7 * 2**30
