"""Findings of a round of published runs, by whole numbers."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from benchmarks import accuracy, blind_runs

from jettison.core.errors import UsageError
from jettison.memory.span import Phase
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.time import estimate
from jettison.report.timeline_files import step_trace
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.hardware import hardware
from jettison.spec.layout import ZeroBuckets
from jettison.spec.precision import Gradients

ROWS = blind_runs.rows()


def found(model: str = "llama-1b-mha", **words: Any) -> Forecast:
    return forecast(run_of(model, RunRequest(seq=1024, **words)))


def after(answer: Forecast, phase: Phase) -> int:
    return next(m.nbytes for m in answer.worst.timeline() if m.phase is phase)


# gradients that are added to a wider buffer ---------------------------------------------------------------------------


def test_gradients_that_are_added_outlive_no_backward() -> None:
    """20 bytes a parameter in a backward, 18 between passes: the sum in fp32 is there for good."""
    answer, before = found(like="nanotron"), found(like="nanotron", gradients="upfront")
    parameters = answer.parameters
    assert after(answer, Phase.AFTER) == after(before, Phase.AFTER) - 2 * parameters
    assert after(answer, Phase.BEFORE) == after(answer, Phase.AFTER)
    assert answer.worst.load.gradients is Gradients.ACCUMULATOR
    assert answer.worst.load.gradient_bytes == 0


def test_each_micro_batch_makes_them_anew() -> None:
    """One more micro-batch of the same stage changes nothing; where gradients stay, the second backward has them."""
    one, two = (found(like="nanotron", micro_batches=n, recompute="full").peak_bytes for n in (1, 2))
    assert one == two
    stays = [found(like="nanotron", gradients="upfront", micro_batches=n).peak_bytes for n in (1, 2)]
    assert min(stays) > one


def test_backwards_end_has_all_of_them() -> None:
    """With full recompute the peak is where the last gradients come."""
    answer = found(like="nanotron", recompute="full", micro_batch=1)
    backward = max(m.nbytes for m in answer.worst.timeline() if m.phase is Phase.BACKWARD)
    assert backward >= after(answer, Phase.AFTER) + 2 * answer.parameters


@pytest.mark.parametrize("words", [{"micro_batches": 2}, {"pp": 2, "micro_batches": 3}])
def test_the_played_step_is_the_ledgers(words: dict[str, int]) -> None:
    run = run_of("llama-1b-mha", RunRequest(seq=1024, like="nanotron", **words))  # type: ignore[arg-type]
    answer = forecast(run)
    trace = step_trace("", answer, estimate(run, hardware("h100-80gb")))
    assert max(stage.peak_bytes for stage in trace.memory) == answer.peak_bytes


def test_there_has_to_be_a_buffer() -> None:
    with pytest.raises(UsageError, match="--gradients fp32-accumulator with --precision bf16, which has no second"):
        found(gradients="added", precision="bf16")


# DeepSpeed's step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "dp"), [(1, 4), (2, 4), (3, 4), (3, 1)])
def test_a_step_has_copies_of_its_gradients(zero: int, dp: int) -> None:
    """Flat in 16 bits, then in fp32: 6 bytes for each element that a rank steps for, up to a billion under ZeRO 3."""
    words: dict[str, Any] = {"model": "llama3-8b", "like": "deepspeed", "zero": zero, "dp": dp}
    ours, fused = found(**words), found(**words, optimizer="adamw")
    elements = ours.worst.static.master // 4
    group = min(elements, ZeroBuckets().sub_group) if zero == 3 else elements
    assert after(ours, Phase.OPTIMIZER) - after(fused, Phase.OPTIMIZER) == 6 * group


def test_a_narrow_master_is_copied_once() -> None:
    words: dict[str, Any] = {"model": "llama3-8b", "like": "deepspeed", "zero": 3, "dp": 16}
    narrow, wide = found(**words, precision="bf16-master16"), found(**words)
    elements = narrow.worst.static.master // 2
    assert narrow.worst.static.state == 3 * 2 * elements  # itself and both moments
    assert wide.worst.static.state == 3 * 4 * elements
    assert after(narrow, Phase.OPTIMIZER) - after(narrow, Phase.AFTER) == 2 * elements


def test_shards_of_gradients_have_a_buffer_under_zero_3() -> None:
    run = run_of("llama3-8b", RunRequest(like="deepspeed", zero=3, dp=4))
    assert run.gradients is Gradients.UPFRONT
    assert run_of("llama3-8b", RunRequest(like="deepspeed", zero=2, dp=4)).gradients is Gradients.ONE_BY_ONE
    on_host = run_of("llama3-8b", RunRequest(like="deepspeed", zero=3, dp=4, offload_optimizer="deepspeed"))
    assert on_host.gradients is Gradients.ONE_BY_ONE  # the buffer is there, too


# norms of torch before July 2025 --------------------------------------------------------------------------------------


def test_an_rms_norm_of_other_ops_keeps_its_wide_input_and_what_its_weight_scales() -> None:
    """4 + 2 bytes an element, where the kernel keeps 2: twice a layer, and once before the head.

    Keys and values, of 8 heads, are copied for each of 32.
    """
    words: dict[str, Any] = {"model": "llama3-8b", "precision": "bf16-pure"}
    old, new = (found(**words, kernels=name).ledger().total_bytes() for name in ("pytorch-2.8", "pytorch"))
    assert old - new == (2 * 32 + 1) * (4 + 2 - 2) * 1024 * 4096 + 32 * 2 * 2 * (32 - 8) * 128 * 1024


# the rows -------------------------------------------------------------------------------------------------------------


def test_allocated_peaks_of_nanotron() -> None:
    chosen = [r for r in ROWS if "nanotron" in r.facts["source"] and not r.of_time and r.now is not None]
    errors = [abs(row.error(row.now) or 0.0) for row in chosen]
    assert len(errors) == 19
    assert max(errors) < 0.006
    assert median(errors) < 0.0015


def test_allocated_peaks_of_deepspeed() -> None:
    chosen = [r for r in ROWS if "DeepSpeed" in r.facts["source"] and not r.of_time]
    assert [row.facts["figure"] for row in chosen] == ["allocated"] * 3
    assert [abs(row.error(row.now) or 0.0) < limit for row, limit in zip(chosen, (0.01, 0.06, 0.02), strict=True)] == [
        True
    ] * 3


def test_what_is_refused_is_known() -> None:
    refused = {row.facts["looked"] for row in ROWS if not row.of_time and row.now is None}
    assert refused == {"loss-alone", "dpo", "titan-reserved"}
    looked = {row.facts["looked"] for path in accuracy.BLIND for row in blind_runs.rows(path)}
    assert looked - {"", *accuracy.NOT_COUNTED} == blind_runs.WHY.keys() - accuracy.NOT_COUNTED.keys()


def test_rows_are_asked_as_the_command_line_has_them() -> None:
    for number in (0, 40, 90, 120):
        row = [each for each in ROWS if not each.of_time][number % 71]
        if row.now is not None:
            command = row.facts["mended"] or row.facts["command"]
            assert blind_runs.answered("ledger", command) == row.now * row.unit


# logits that a loop references ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernels", "nbytes"), [("huggingface", 2), ("huggingface-4.45", 4)])
def test_a_loop_that_references_logits_keeps_them_as_the_model_returned_them(kernels: str, nbytes: int) -> None:
    """transformers 4.31 to 4.45 casts them to fp32 and returns those."""
    words = {"kernels": kernels, "loss": "in-loop", "precision": "bf16-pure", "recompute": "full"}
    held, freed = (found(keep_logits=keep, **words).peak_bytes for keep in (True, False))
    assert held - freed == nbytes * 1024 * 131072
