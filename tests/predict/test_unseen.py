"""Runs that had not been seen, and what was found with them: each term by whole numbers."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from benchmarks.megatron_golden import HYBRIDS, MORE, aside, errors, facts, golden, why_not
from benchmarks.unsplit_blocks import unsplit_mib

from jettison.core.errors import UsageError
from jettison.core.units import GIB, KIB, MIB
from jettison.cost.pipeline import schedule_seconds
from jettison.families.config import parse_config
from jettison.frameworks.megatron.write import layout_settings, overrides_text
from jettison.memory.schedule import PipelineShape, Work, device_order
from jettison.memory.span import Phase
from jettison.predict.forecast import forecast
from jettison.report.ledger import layout_text
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.layout import Schedule

ROWS = [(row, golden(row)) for row in facts(MORE) if not why_not(row)]
F1B = Schedule.ONE_F_ONE_B


def peak(**words: Any) -> int:
    return forecast(run_of("gpt-22b", RunRequest(like="megatron-0.19", **words))).peak_bytes


def between(**words: Any) -> int:
    stage = forecast(run_of("gpt-22b", RunRequest(like="megatron-0.19", **words))).stages[-1]
    return next(m.nbytes for m in stage.timeline() if m.phase is Phase.AFTER)


# the rows ------------------------------------------------------------------------------------------------------------


def test_runs_are_met() -> None:
    counted = [errors(row, one) for row, one in ROWS if not aside(row)]
    assert len(counted) == 237
    for i in range(3):
        then, now = ([abs(each[k][i]) for each in counted] for k in (0, 1))
        assert median(then) <= 0.01  # blind
        assert median(now) <= 0.005
        assert sum(error > 0.05 for error in now) <= 3  # one expert a rank on GB200


def test_models_with_scans_are_near_at_once() -> None:
    """Tensor parallelism, one and four stages, interleaved ones: what was said before the figures were opened."""
    pairs = [(row, golden(row)) for row in facts(HYBRIDS)]
    found = [errors(row, one) for row, one in pairs if row["source"].endswith("dgx_h100.json")]
    assert len(found) == 4
    assert max(abs(error) for then, now in found for error in (*then, *now)) <= 0.005


def test_stacks_of_bert_and_t5_are_near() -> None:
    found = [one for _, one in ROWS if one.name.startswith(("bert_", "t5_"))]
    assert len(found) == 16 + 22
    assert median(max(one.errors) for one in found) <= 0.03
    assert max(max(one.errors) for one in found) <= 0.06  # tp = 4: blocks that are not split


# terms ---------------------------------------------------------------------------------------------------------------


def test_torch_sets_less_aside_on_blackwell() -> None:
    """Two threads, 32 MiB and 8.125."""
    assert peak(workspaces="te-hopper") - peak(workspaces="te-blackwell") == 2 * (32 * MIB - 8 * MIB - 128 * KIB)


def test_products_beside_transfers_have_three_workspaces() -> None:
    for tp, count in ((2, 3), (1, 0)):
        more = peak(tp=tp, tp_comm_overlap=True) - peak(tp=tp)
        assert more == count * (32 * MIB + KIB)


def test_megatrons_own_attention_has_a_buffer_for_its_scores() -> None:
    """2 bytes for each of b a s² / t, once however many layers; with TransformerEngine there is none."""
    words: dict[str, Any] = {"workspaces": "torch-ampere", "attention": "eager", "seq": 1024}
    b, a, s, h = 2, 64, 1024, 6144
    scores = {tp: between(**words, micro_batch=b, tp=tp, sp=False, zero=0) for tp in (1, 2)}
    fused = {tp: between(**words | {"attention": "flash"}, micro_batch=b, tp=tp, sp=False, zero=0) for tp in (1, 2)}
    assert {tp: scores[tp] - fused[tp] for tp in scores} == {tp: 2 * b * a // tp * s * s for tp in (1, 2)}
    gathered = between(**words | {"attention": "flash"}, micro_batch=b, tp=2, sp=True, zero=0)
    assert gathered - fused[2] == 2 * b * s * h
    assert between(**words, micro_batch=b, tp=2, sp=True, zero=0) == scores[2]  # one buffer for both, the larger


def test_a_router_has_a_workspace_of_the_library() -> None:
    asked = {"like": "megatron-0.19", "attention": "eager", "seq": 512, "ep": 8, "dp": 8}
    found = {
        name: forecast(run_of("mixtral-8x7b", RunRequest(**asked, workspaces=name))).peak_bytes
        for name in ("torch-hopper", "torch-blackwell", "torch-ampere")
    }
    assert found["torch-blackwell"] - found["torch-ampere"] == 32 * MIB + KIB - 4 * MIB
    assert found["torch-hopper"] - found["torch-blackwell"] == 2 * (32 * MIB - 8 * MIB - 128 * KIB)


@pytest.mark.parametrize("pp", [1, 4])
def test_batches_that_stay(pp: int) -> None:
    """Three int64, an fp32 and a row of the mask for each token; that of the micro-batch at work was there before."""
    words: dict[str, Any] = {"pp": pp, "micro_batches": 8, "micro_batch": 2, "seq": 1024}
    each = 2 * 1024 * (28 + 1024)
    assert between(**words, keep_batches=True) - between(**words) == 8 * each
    assert peak(**words, keep_batches=True) - peak(**words) == 7 * each


@pytest.mark.parametrize(("limit", "sp", "kept"), [(2, True, 2), (2, False, 2), (50, True, 7), (0, True, 0)])
def test_heads_gradients_that_wait(limit: int, sp: bool, kept: int) -> None:
    """Of logits and of their inputs, in 16 bits, beside those of the micro-batch at work; on the last stage alone."""
    words: dict[str, Any] = {"tp": 4, "pp": 2, "micro_batches": 8, "micro_batch": 2, "seq": 1024, "sp": sp}
    plain, waiting = (
        forecast(run_of("gpt-22b", RunRequest(like="megatron-0.19", wgrad_deferral_limit=word, **words))).stages
        for word in (0, limit)
    )
    vocab = run_of("gpt-22b", RunRequest()).model.vocab
    each = 2 * 2 * 1024 * (vocab // 4 + 6144 // (4 if sp else 1))
    assert waiting[1].peak.nbytes - plain[1].peak.nbytes == kept * each
    assert waiting[0].peak == plain[0].peak


def test_a_head_waits_in_a_pipeline_alone() -> None:
    with pytest.raises(UsageError, match="got --wgrad-deferral-limit 2; expected 0, or 1 or more with --pp 2 or more"):
        run_of("gpt-22b", RunRequest(wgrad_deferral_limit=2))
    with pytest.raises(UsageError, match="--loss fused, which has no gradients of logits that could wait"):
        run_of("gpt-22b", RunRequest(wgrad_deferral_limit=2, pp=2, loss="fused"))


def test_megatron_018_is_019_with_batches_that_stay() -> None:
    old, new = (run_of("gpt-22b", RunRequest(like=f"megatron-0.{minor}")) for minor in (18, 19))
    assert old.keep_batches
    assert not new.keep_batches
    assert old.workspaces == new.workspaces


def test_a_published_configuration_answers_as_the_test_that_it_describes() -> None:
    """Megatron's test of five micro-batches over four stages, typed as a GPT-2: its GELU is one kernel there."""
    file = {"model_type": "gpt2", "n_layer": 12, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 50304}
    stages = {"pp": 4, "virtual_stages": 3, "micro_batches": 5, "micro_batch_group": 5, "dp": 2}
    asked = RunRequest(like="megatron-0.19", accumulation="cast", attention="eager", seq=1024, micro_batch=4, **stages)
    typed = forecast(run_of(parse_config(file, name="typed"), asked))
    row, one = next(pair for pair in ROWS if "vp1_tunable_overlap/golden_values_dev_dgx_h100" in pair[0]["source"])
    assert typed.stages[-1].peak.nbytes == forecast(one.run).stages[-1].peak.nbytes
    assert typed.stages[-1].peak.nbytes == pytest.approx(float(row["memory_gib"]) * GIB, rel=1e-4)


# groups of micro-batches ---------------------------------------------------------------------------------------------


def table(micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """An independent copy of what Megatron's ``get_schedule_table`` gives: micro-batch and chunk of each forward."""
    found = []
    while micro_batches > len(found) // chunks:
        done = len(found) // chunks
        members = list(range(done, min(done + group, micro_batches)))
        for chunk in range(chunks):
            found += [(member, chunk) for member in members]
    return found


@pytest.mark.parametrize(("micro_batches", "group"), [(5, 5), (8, 4), (10, 5), (11, 6), (12, 4), (13, 9)])
def test_chunks_take_turns_by_groups(micro_batches: int, group: int) -> None:
    stages, chunks = 4, 3
    for stage in range(stages):
        shape = PipelineShape(F1B, stages=stages, micro_batches=micro_batches, virtual_stages=chunks, group=group)
        steps = shape.order(stage)
        forwards = [(s.micro_batch, s.chunk) for s in steps if s.work is Work.FORWARD]
        assert forwards == table(micro_batches, chunks, group)
        warm_up = next(i for i, s in enumerate(steps) if s.work is Work.BACKWARD)
        everything = micro_batches * chunks
        assert warm_up == min(2 * (stages - stage - 1) + (chunks - 1) * group + 1, everything)
        assert len(steps) == 2 * everything


def test_a_group_of_as_many_as_stages_is_no_other_order() -> None:
    shape = PipelineShape(F1B, stages=4, micro_batches=24, virtual_stages=2)
    grouped = replace(shape, group=4)
    assert shape.order(1) == grouped.order(1)
    assert device_order(shape, 1).fullest == device_order(grouped, 1).fullest


@pytest.mark.parametrize("left", [0, 4])
def test_many_groups_hold_what_few_do(left: int) -> None:
    """What is held is found by replaying three groups and what is left."""

    def held(groups: int) -> set[tuple[int, ...]]:
        count = groups * 6 + left
        shape = PipelineShape(F1B, stages=4, micro_batches=count, virtual_stages=2, group=6)
        return {state.forward for state in device_order(shape, 0).fullest.values()}

    assert held(4) == held(9)


def test_time_of_many_groups_goes_on_as_that_of_few() -> None:
    forward, backward = [[1.0, 1.0]] * 4, [[2.0, 2.0]] * 4
    shape = PipelineShape(F1B, stages=4, micro_batches=2000, virtual_stages=2, group=5)
    ends = [schedule_seconds(replace(shape, micro_batches=n), forward, backward).ends[0] for n in (2000, 2005, 4000)]
    assert ends[2] - ends[0] == pytest.approx(400 * (ends[1] - ends[0]))
    assert ends[1] - ends[0] == pytest.approx(5 * 2 * 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"micro_batches": 5}, "--micro-batch-group of 4 or more"),
        ({"micro_batches": 8, "micro_batch_group": 3}, "expected 4, the pipeline stages, to 8"),
        ({"micro_batches": 8, "micro_batch_group": 9}, "expected 4, the pipeline stages, to 8"),
        ({"micro_batches": 11, "micro_batch_group": 5}, "the last group, 1, has to be 0 or at least the 4"),
        ({"micro_batches": 8, "micro_batch_group": 4, "virtual_stages": 1}, "needs --virtual-stages 2 or more"),
    ],
)
def test_groups_that_megatron_refuses_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        forecast(run_of("gpt-22b", RunRequest(**{"pp": 4, "virtual_stages": 2} | words)))


def test_megatron_is_told_of_groups() -> None:
    run = run_of("gpt-22b", RunRequest(pp=4, virtual_stages=3, micro_batches=5, micro_batch_group=5))
    assert "3 virtual stages, 5 micro-batches in turn" in layout_text(run.layout)
    assert layout_settings(run)["microbatch_group_size_per_virtual_pipeline_stage"] == 5
    assert "microbatch_group_size_per_vp_stage=5" in overrides_text(run, {})


def test_stages_without_a_layer_are_named() -> None:
    """Six layers over eight chunks, as one of Megatron's tests has them."""
    with pytest.raises(
        UsageError, match=r"the first and last stage have none; for that, give --stage-layers 0,1,.*1,0"
    ):
        run_of("llama3-8b", RunRequest(pp=17, virtual_stages=2))


@pytest.mark.parametrize(("tp", "layers", "expected"), [(1, 6, 1), (2, 6, 1), (4, 6, 7), (4, 12, 13)])
def test_blocks_that_are_not_split_count_as_allocated(tp: int, layers: int, expected: int) -> None:
    """A MiB for each layer's queries, keys and values where they are of 3 MiB, and one for the whole."""
    assert unsplit_mib(tp, layers=layers, micro_batches=2) == expected
