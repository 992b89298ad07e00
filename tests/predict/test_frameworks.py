"""What frameworks hold beside the tensors of the mathematics: each term by hand, all on other people's runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks import bridge, megatron_golden, simumax

from jettison.cli.main import run as command
from jettison.core.errors import UsageError
from jettison.core.units import KIB, MIB, format_bytes
from jettison.families.presets import preset
from jettison.formula.region import head_region, layer_region
from jettison.memory.span import Phase
from jettison.memory.step import Event
from jettison.predict.forecast import forecast
from jettison.predict.stage_units import mask_bytes
from jettison.predict.stages import NONE, chosen_passes, kept_by
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.frameworks import named, rule
from jettison.spec.run import Run

LLAMA = replace(preset("llama3-8b"), layers=preset("llama3-8b").layers[:8])


def made(**request: object) -> Run:
    return resolve(LLAMA, RunRequest(**{"seq": 1024, **request})).run  # type: ignore[arg-type]


def saved(run: Run) -> dict[str, int]:
    """By role, bytes of a layer's storages; what is saved under two roles counts under the first."""
    found: dict[str, tuple[str, int]] = {}
    for entry in layer_region(run.signature, run.model.layers[0]).entries("layer"):
        found.setdefault(entry.storage, (entry.role, entry.local_storage_bytes(run.layout.mesh_sizes)))
    sizes: dict[str, int] = {}
    for role, nbytes in found.values():
        sizes[role] = sizes.get(role, 0) + nbytes
    return sizes


# the loss -------------------------------------------------------------------------------------------------------------


def head_peak(loss: str, seq: int, vocab: int) -> int:
    """Of a head's two passes, without what its weight's gradient takes."""
    model = replace(LLAMA, vocab=vocab)
    run = resolve(model, RunRequest(seq=seq, loss=loss, kernels="megatron", accumulation="fused")).run
    region = head_region(run.signature)
    passes = chosen_passes(region, kept_by(region, NONE), run.gradient_rule, True)
    return max(passes.forward_peak, passes.resident + passes.backward_peak)


@pytest.mark.parametrize(
    ("loss", "bytes_a_logit"),
    [
        ("vocab-parallel", 6),
        ("native", 10),
        ("te", 2),
        ("in-forward", 6),
        ("compiled", 4),
        ("upcast", 12),
        ("chunked-cross-entropy", 6.125),
        ("dtensor", 16),
    ],
)
def test_bytes_a_logit_at_the_worst_moment(loss: str, bytes_a_logit: float) -> None:
    """What grows with tokens times vocabulary and with neither alone. Tokens are many: a weight's gradient is small."""
    s, v = 64 * 4096, 8192
    corner = head_peak(loss, 2 * s, 2 * v) - head_peak(loss, 2 * s, v) - head_peak(loss, s, 2 * v)
    assert corner + head_peak(loss, s, v) == bytes_a_logit * s * v


# gradients and workspaces ---------------------------------------------------------------------------------------------


def fixed(run: Run, stage: int = 0) -> int:
    found = forecast(run).stages[stage]
    return found.load.fixed - found.static.parameters


def test_one_empty_gradient_for_each_shape_stays() -> None:
    tp, h, f, kv = 2, 4096, 14336, 1024
    shapes = ((h + 2 * kv) * h, h * h, 2 * f * h, h * f, 128256 * h)
    with_dummies, fused = (
        made(kernels="megatron", precision="bf16-main32", accumulation=word, tp=tp) for word in ("fused-dummy", "fused")
    )
    assert fixed(with_dummies) - fixed(fused) == 2 * sum(shapes) // tp
    experts = resolve(preset("mixtral-8x7b"), RunRequest(seq=128, kernels="megatron", accumulation="fused-dummy")).run
    assert fixed(experts) == 2 * ((h + 2 * kv) * h + h * h + 2 * f * h + h * f + 32000 * h), (
        "one expert's, not all experts'"
    )


@pytest.mark.parametrize(("accumulation", "beside"), [("autograd", 4), ("cast", 2), ("fused", 0), ("fused-dummy", 0)])
def test_what_lives_beside_a_gradient_while_it_is_added(accumulation: str, beside: int) -> None:
    """One token: a layer's backward is its largest weight's gradient, which the norms' do not reach."""
    run = made(seq=1, kernels="megatron", precision="bf16-main32", gradients="upfront", accumulation=accumulation)
    region = layer_region(run.signature, run.model.layers[0])
    rise = chosen_passes(region, kept_by(region, NONE), run.gradient_rule, True).backward_peak
    assert abs(rise - beside * 2 * 14336 * 4096) < MIB


def test_workspaces_are_a_threads_and_a_librarys() -> None:
    torch_only, both = (made(workspaces=f"{word}-hopper", kernels="megatron", pp=2) for word in ("torch", "te"))
    assert [fixed(torch_only, stage) for stage in (0, 1)] == [64 * MIB, 64 * MIB]
    assert fixed(both, 0) == 32 * MIB + KIB, "the first stage has no product of torch's"
    assert fixed(both, 1) == 96 * MIB + KIB, "the last has the head"
    experts = resolve(preset("mixtral-8x7b"), RunRequest(seq=128, workspaces="te-ampere")).run
    assert fixed(experts) == 2 * (8 * MIB + 128 * KIB) + 5 * 4 * MIB, "its own, and one for each of four streams"


def test_the_first_step_has_masters_and_half_the_workspace() -> None:
    """One micro-batch: the loss, where the peak is, comes before the first product of a backward."""
    run = made(seq=8192, workspaces="torch-hopper", precision="bf16-main32", gradients="upfront")
    stage = forecast(run).worst
    assert stage.peak.where == stage.first_step_peak.where == "head"
    moments = 8 * sum(w.numel for part in stage.parts[0] for w in part.region.weights)
    assert stage.peak.nbytes - stage.first_step_peak.nbytes == moments + 32 * MIB


def test_copies_of_fp16_gradients_stay_until_the_next_step() -> None:
    stage = forecast(made(precision="fp16-main32")).worst
    timeline = {moment.phase: moment.nbytes for moment in stage.timeline()}
    assert timeline[Phase.AFTER] - timeline[Phase.BEFORE] == 4 * stage.static.parameters // 2


@pytest.mark.parametrize(
    ("precision", "state", "in_a_step"), [("bf16-aware", 6, 10), ("bf16-aware-grad32", 6, 12), ("bf16-bridge", 8, 16)]
)
def test_precision_aware_optimizers_hold_moments_in_bf16(precision: str, state: int, in_a_step: int) -> None:
    stage = forecast(made(precision=precision, gradients="upfront")).worst
    parameters = stage.static.parameters // 2
    assert stage.static.state == state * parameters
    step = next(moment for moment in stage.timeline() if moment.phase is Phase.OPTIMIZER)
    assert step.nbytes == in_a_step * parameters


@pytest.mark.parametrize("more", [{"optimizer": "muon"}, {"offload_optimizer": "deepspeed", "zero": 2, "dp": 2}])
def test_precision_aware_optimizers_are_adamw_on_the_device(more: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="precision-aware optimizer is AdamW on the device"):
        made(precision="bf16-aware", **more)


def test_adamw_as_torch_runs_it_by_default_makes_a_root_of_every_second_moment() -> None:
    fused, foreach = (forecast(made(precision="fp32", optimizer=word)).worst for word in ("adamw", "adamw-foreach"))
    parameters = fused.static.parameters // 4
    phases = [next(m for m in s.timeline() if m.phase is Phase.OPTIMIZER).nbytes for s in (fused, foreach)]
    assert phases == [16 * parameters, 20 * parameters]
    assert fused.static.state == foreach.static.state == 8 * parameters


def test_groups_of_ranks_with_all_of_the_state() -> None:
    plain, groups = (forecast(made(dp=8, zero=1, zero_replicas=n)).worst.static for n in (1, 2))
    assert groups.state == pytest.approx(2 * plain.state, rel=1e-6)
    with pytest.raises(UsageError, match="--zero-replicas 3 does not divide the 8 ranks"):
        made(dp=8, zero=1, zero_replicas=3)


# pipelines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "virtual"), [(2, 1), (2, 4), (4, 2)])
def test_received_inputs_and_their_gradients_stay_between_steps(pp: int, virtual: int) -> None:
    more = {"pp": pp, "virtual_stages": virtual, "micro_batches": 8, "kernels": "megatron"}
    kept, plain = (forecast(made(keep_received=word, **more)).stages for word in (True, False))
    each = 2 * 1024 * 4096
    for index, (one, other) in enumerate(zip(kept, plain, strict=True)):
        receiving = virtual - (index == 0)  # the first chunk of all has the embedding
        after, before = (next(m for m in s.timeline() if m.phase is Phase.AFTER).nbytes for s in (one, other))
        assert after - before == 2 * each * receiving
        around = each * (2 if virtual > 1 else int(index > 0))
        assert one.load.there(Event.BACKWARD) - one.load.there(Event.FORWARD) == around
        assert one.peak.nbytes - other.peak.nbytes >= around


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_the_quick_peak_is_the_timelines(pp: int, virtual: int, micro_batches: int) -> None:
    if pp == 1 and virtual > 1:
        return
    found = forecast(
        made(like="megatron-0.19", pp=pp, virtual_stages=virtual, micro_batches=micro_batches, dp=2, zero=1)
    )
    assert found.worst.peak.nbytes == found.peak_bytes


def test_the_loaders_mask_is_on_the_first_and_the_last_stage() -> None:
    masked, plain = (
        forecast(made(pp=4, micro_batch=2, dataloader_attention_mask=word)).stages for word in (True, False)
    )
    rises = [a.peak.nbytes - b.peak.nbytes for a, b in zip(masked, plain, strict=True)]
    assert rises == [2 * 1024 * 1024, 0, 0, 2 * 1024 * 1024]


# attention ------------------------------------------------------------------------------------------------------------

Q, KV = 2 * 2 * 1024 * 4096, 2 * 2 * 1024 * 1024
"""Bytes of queries, and of keys, of two sequences."""


def test_a_joint_product_is_let_go_of_once_keys_are_rotated() -> None:
    found = saved(made(kernels="megatron", micro_batch=2))
    assert (found["attention query"], found["attention key"], found["attention value"]) == (Q, KV, KV)


@pytest.mark.parametrize(
    ("attention", "batch", "outputs"), [("flash", 2, 1), ("flash-attn", 2, 2), ("flash-attn", 1, 1)]
)
def test_flash_attn_is_given_copies_of_what_is_not_batch_first(attention: str, batch: int, outputs: int) -> None:
    """Its output stays, and so does the copy that the projection reads; of one sequence both are one."""
    found = saved(made(kernels="megatron", micro_batch=batch, attention=attention))
    held = found["attention output"] + found.get("projection input", 0)
    assert held == outputs * Q * batch // 2
    assert (found["attention query"], found["attention key"]) == (Q * batch // 2, KV * batch // 2)


def test_flash_attn_takes_a_window_without_a_mask() -> None:
    """``transformers/masking_utils.py``: ``flash_attention_mask`` makes none, ``sdpa_mask`` one of s × s booleans."""
    request = RunRequest(kernels="huggingface", seq=2048, recompute="full")
    words = ("sdpa", "flash-attn")
    sdpa, flash = (resolve(preset("gemma3-1b"), replace(request, attention=word)).run for word in words)
    assert saved(sdpa)["attention mask"] % 2048**2 == 0
    assert "attention mask" not in saved(flash)
    assert (mask_bytes(sdpa), mask_bytes(flash)) == (2048**2, 0)


def test_context_parallelism_holds_what_its_exchange_makes() -> None:
    ring, p2p, a2a = (
        saved(made(kernels="megatron", micro_batch=2, cp=2, cp_comm_type=word)) for word in ("ring", "p2p", "a2a")
    )
    assert ring == p2p, "rotated keys were copies already"
    assert a2a["attention output"] + a2a["projection input"] == 2 * ring["attention output"] == 2 * Q // 2


# experts --------------------------------------------------------------------------------------------------------------


def mixtral(**request: object) -> Run:
    more = {"seq": 1024, "kernels": "megatron", **request}
    return resolve(preset("mixtral-8x7b"), RunRequest(**more)).run  # type: ignore[arg-type]


def test_tokens_that_all_ranks_gather_have_a_buffer_that_stays() -> None:
    words = {"ep": 4, "dp": 4, "workspaces": "torch-hopper"}
    gathered, sent = (mixtral(dispatcher=word, **words) for word in ("allgather", "alltoall"))
    assert fixed(gathered) - fixed(sent) == 1024 * 4 * 4096 * 2
    alone = fixed(mixtral(dispatcher="allgather", workspaces="torch-hopper"))
    assert alone == 64 * MIB + 32 * MIB + KIB, "one rank gathers nothing; its router's product is the library's"


def test_the_heads_input_is_gathered_into_a_buffer_that_stays() -> None:
    more = {"kernels": "megatron", "tp": 2, "pp": 2, "micro_batch": 3}
    for workspaces, first in (("te-hopper", 0), ("torch-hopper", 2 * 3 * 1024 * 4096)):
        plain, sharded = (made(sp=word, workspaces=workspaces, **more) for word in (False, True))
        found = [fixed(sharded, i) - fixed(plain, i) for i in (0, 1)]
        assert found == [first, 2 * 3 * 1024 * 4096], "where the head is; of Megatron's own layers, everywhere"


def test_one_expert_after_the_other_needs_no_workspace_of_grouped_products() -> None:
    grouped, sequential = (mixtral(workspaces="te-hopper", sequential_experts=word) for word in (False, True))
    assert fixed(grouped) - fixed(sequential) == 4 * (32 * MIB + KIB)


def test_a_deterministic_sum_keeps_what_it_adds() -> None:
    kept, plain = (saved(mixtral(deterministic=word)) for word in (True, False))
    assert kept.pop("expert output") == 2 * 1024 * 4096 * 2
    assert kept == plain


@pytest.mark.parametrize("imbalance", [1.25, 4.0])
def test_rows_of_a_busy_rank_are_a_multiple_of_an_even_share(imbalance: float) -> None:
    busy, even = (saved(mixtral(ep=4, dp=4, expert_imbalance=factor)) for factor in (imbalance, 1.0))
    assert busy["activation input"] == imbalance * even["activation input"]
    with pytest.raises(UsageError, match=r"expected 1 \(even\) to 1, the size of --ep"):
        mixtral(expert_imbalance=imbalance)


def test_the_ledger_says_what_uneven_routing_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--ep", "4", "--dp", "4", "--zero", "3", "--seq", "1024"]
    assert command(["ledger", "mixtral-8x7b", *layout]) == 0
    busy = resolve(preset("mixtral-8x7b"), RunRequest(ep=4, dp=4, zero=3, seq=1024, expert_imbalance=1.25)).run
    assert f"1.25 times its share peaks at {format_bytes(forecast(busy).peak_bytes)}" in capsys.readouterr().err
    assert command(["ledger", "mixtral-8x7b", *layout, "--expert-imbalance", "2"]) == 0
    assert "its share" not in capsys.readouterr().err


def test_experts_may_be_narrower_than_tensor_parallelism() -> None:
    """Over 4 ranks of tp: each expert whole on one, and 4 times as many ranks of experts; rows are the same."""
    split, narrow = mixtral(tp=4, ep=2, dp=2), mixtral(tp=4, ep=8, dp=2, expert_tp=1)
    weights = [
        {w.shape: w.numel for w in layer_region(run.signature, run.model.layers[0]).weights if w.expert}
        for run in (split, narrow)
    ]
    assert weights[0] == weights[1], "half of 8 experts by a quarter, or one expert"
    assert (split.layout.expert_shards, narrow.layout.expert_shards) == (1, 1)
    rows, own = 2 * 1024, 2 * 1024 // 4
    assert saved(split)["activation input"] == rows * 2 * 14336 // 4 * 2
    assert saved(narrow)["activation input"] == own * 2 * 14336 * 2
    with pytest.raises(UsageError, match="--expert-tp 3; expected a divisor of --tp 4"):
        mixtral(tp=4, expert_tp=3)


# --like ---------------------------------------------------------------------------------------------------------------


def test_like_sets_what_a_framework_does_and_other_flags_go_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = resolve(LLAMA, RunRequest(like="megatron-0.19", loss="te"))
    run = asked.run
    assert (str(run.kernels.loss), run.precision.name, run.workspaces.name) == ("te", "bf16-main32", "te-hopper")
    assert "--loss" not in asked.like
    assert "--accumulation fused-dummy" in asked.like
    assert str(resolve(LLAMA, RunRequest(like="torchtitan", tp=2)).run.kernels.loss) == "dtensor"
    shared = resolve(LLAMA, RunRequest(like="huggingface", dp=2))
    assert shared.like is not None
    assert "--gradients buckets" in shared.like
    assert "--gradients buckets" not in (resolve(LLAMA, RunRequest(like="huggingface", dp=2, zero=3)).like or "")
    assert command(["ledger", "llama3-8b", "--like", "nanotron"]) == 0
    assert "--precision bf16-grad32" in capsys.readouterr().out
    with pytest.raises(UsageError, match="got --like 'megatron-lm'; expected one of megatron, megatron-"):
        resolve(LLAMA, RunRequest(like="megatron-lm"))


@pytest.mark.parametrize("name", named("presets"))
def test_each_rule_says_what_can_be_asked(name: str) -> None:
    run = resolve(LLAMA, RunRequest(like=name)).run
    typed = dict(rule(name, tp=1))
    assert resolve(LLAMA, RunRequest(**typed)).run == run


# other people's runs --------------------------------------------------------------------------------------------------


def test_golden_values_of_megatron() -> None:
    rows = [row for row in megatron_golden.rows() if row.name not in megatron_golden.ASIDE_NAMES]
    assert len(rows) == 36 + 16, "dense and with experts"
    assert max(max(row.errors) for row in rows) < 0.024


def test_golden_values_of_a_7b_model() -> None:
    rows = megatron_golden.rows(megatron_golden.LATER)
    assert [round(100 * row.errors[1], 1) for row in rows] == [0.1, 0.1, 0.1, 0.0, 0.0, 0.0]


def test_simumax_runs() -> None:
    assert (
        max(abs(p / m - 1) for row in simumax.rows() for p, m in zip(row.predicted(), row.measured, strict=True))
        < 0.0004
    )


def test_runs_of_megatron_bridge() -> None:
    errors = [row.predicted() / row.gb - 1 for row in bridge.rows()]
    assert [round(100 * error) for error in errors] == [-4, -4, -2, -2, -2, -2, 0, -3]
