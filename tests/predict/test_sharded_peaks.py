"""FSDP2 on real ranks beside the forecast under ZeRO 3: whole models, and frozen ones beside adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
pytest.importorskip("peft")

from jettison.core.errors import UsageError
from jettison.families.presets import preset
from jettison.predict.forecast import Forecast, forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.fine_tuning import Tuning
from jettison.spec.kernels import Loss
from jettison.spec.layout import GradientSync, Layout, Reshard
from jettison.spec.precision import PRECISIONS
from jettison.spec.recompute import Recompute
from support.formula_cases import run_of
from support.ranks import run_ranks
from support.sharded_peaks import RANK, Case, peaks

ROTARY_BYTES = 64
"""Of ``inv_freq`` and its twin, which no configuration tells."""
SMALL = {"batch": 1, "sequence": 16}
"""A batch beside which weights and gradients are most of what there is."""
SIZES: list[dict[str, Any]] = [{}, SMALL, SMALL | {"vocabulary": 2048}]
UNSHARDED: list[dict[str, Any]] = [
    {},
    {"mixed": True},
    {"mixed": True, "reduced": "bfloat16"},
    {"full": True},
    {"full": True, "mixed": True},
    {"outer": True},
    {"outer": True, "mixed": True, "reduced": "bfloat16"},
    {"reshard": "never"},
]
TWO = [
    Case(),
    Case(full=True),
    Case(micro_batches=3),
    Case(adapters=True),
    Case(adapters=True, full=True),
    Case(mixed=True),
    Case(full=True, mixed=True),
    Case(reshard="never"),
    Case(reshard="torchtitan"),
    Case(outer=True),
    Case(outer=True, mixed=True),
    Case(reshard="never", mixed=True, micro_batches=2),
    Case(**SMALL),
    Case(**SMALL, mixed=True),
    Case(**SMALL, full=True, mixed=True),
    Case(**SMALL, reshard="never"),
    Case(**SMALL, outer=True),
    Case(**SMALL, outer=True, reshard="never"),
    Case(**SMALL, ffn=16),
    Case(**SMALL, ffn=16, reshard="torchtitan"),
    Case(**SMALL, ffn=16, outer=True),
    Case(segment=2),
    Case(segment=3),
    Case(**SMALL, segment=2),
    Case(**SMALL, segment=3),
    Case(**SMALL, segment=2, mixed=True, ffn=512),
    Case(**SMALL, segment=3, reshard="never", mixed=True, ffn=512),
    # the table and the head are the largest groups, and their gradients wait for their own reduction
    Case(**SMALL, vocabulary=2048),
    Case(**SMALL, vocabulary=2048, mixed=True, micro_batches=2),
    Case(**SMALL, vocabulary=2048, mixed=True, reshard="never"),
    Case(**SMALL, vocabulary=2048, mixed=True, outer=True),
    Case(**SMALL, vocabulary=2048, outer=True, tied=True),
    Case(**SMALL, vocabulary=2048, mixed=True, outer=True, tied=True, micro_batches=2),
    # gradients are unsharded until the last micro-batch
    *(Case(last=True, micro_batches=n, **size, **how) for n in (2, 3) for size in SIZES for how in UNSHARDED),
    Case(last=True, micro_batches=3, **SMALL, segment=2, mixed=True),
    Case(last=True, micro_batches=3, **SMALL, vocabulary=2048, mixed=True, outer=True, tied=True),
]
FOUR = [
    Case(**SMALL, mixed=True),
    Case(**SMALL, ffn=16, micro_batches=2),
    Case(reshard="never"),
    Case(outer=True),
    Case(reshard="2"),
    Case(**SMALL, reshard="2"),
    Case(**SMALL, reshard="2", mixed=True, micro_batches=2),
    Case(**SMALL, reshard="2", mixed=True, segment=2),
    Case(**SMALL, replicas=2, ffn=16, mixed=True, micro_batches=2),
    Case(**SMALL, replicas=2, ffn=16, outer=True, micro_batches=2, segment=2),
    *(
        Case(**SMALL, last=last, micro_batches=2, replicas=2, mixed=True, reduced="bfloat16", outer=outer)
        for last in (False, True)
        for outer in (False, True)
    ),
]


def described(case: Case, ranks: int) -> Forecast:
    """What the ledger says of a case."""
    run = run_of(case.formula)
    if case.outer or case.flat:  # whose group is sharded before the loss, which the loop makes
        run = replace(run, kernels=replace(run.kernels, loss=Loss.IN_LOOP))
    if case.adapters:
        first = replace(run.model.layers[0], detached=not case.full)
        model = replace(run.model, layers=(first, *run.model.layers[1:]))
        run = replace(run, model=model, tuning=Tuning(rank=RANK, inputs_need_gradients=case.full))
    number = int(case.reshard) if case.reshard.isdecimal() else 0
    how = Reshard.ALWAYS if number else Reshard(case.reshard)
    layout = Layout(
        dp=ranks,
        zero=3,
        reshard=how,
        reshard_ranks=number,
        fsdp_wrap_layers_only=case.outer,
        flat_parameters=case.flat,
        zero_replicas=case.replicas,
        gradient_sync=GradientSync.LAST if case.last else GradientSync.EACH,
    )
    word = f"every:{case.segment}" if case.segment > 1 else "full" if case.full else "none"
    mode = Recompute.parse(word, layers=run.model.depth)
    precision = replace(PRECISIONS["bf16-autocast"], reduced=case.reduced) if case.mixed else PRECISIONS["fp32"]
    return forecast(replace(run, layout=layout, micro_batches=case.micro_batches, recompute=mode, precision=precision))


def compared(cases: list[Case], ranks: int) -> dict[Case, tuple[int, float]]:
    """Of each case, bytes too many between steps, and how far the peak is off; every rank has the same."""
    (found, *others) = run_ranks(peaks, ranks, {"cases": [case.told() for case in cases]})
    assert all(other == found for other in others)
    off: dict[Case, tuple[int, float]] = {}
    for case, got in zip(cases, found, strict=True):
        (stage,) = described(case, ranks).stages
        before = stage.timeline()[0].nbytes + ROTARY_BYTES - got["before"]
        off[case] = before, (stage.peak.nbytes + ROTARY_BYTES) / got["peak"] - 1
    return off


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "ranks"), [(TWO, 2), (FOUR, 4)], ids=["two", "four"])
def test_shards_and_peaks_are_those_of_real_ranks(cases: list[Case], ranks: int) -> None:
    for case, (before, peak) in compared(cases, ranks).items():
        assert before == 0, case
        assert abs(peak) < 0.001, (case, peak)


def test_what_is_gathered_needs_zero_three() -> None:
    for words in ({"reshard_after_forward": "never"}, {"fsdp_wrap_layers_only": True, "zero": 2}):
        with pytest.raises(UsageError, match="it needs --zero 3"):
            resolve(preset("llama3-8b"), RunRequest(dp=2, **words))
    with pytest.raises(UsageError, match="in a pipeline embedding and head have FSDP groups"):
        resolve(preset("llama3-8b"), RunRequest(dp=2, pp=2, zero=3, fsdp_wrap_layers_only=True))
    for ranks in ("1", "3", "8", "16"):
        with pytest.raises(UsageError, match="a divisor of 8, the ranks"):
            resolve(preset("llama3-8b"), RunRequest(dp=8, zero=3, reshard_after_forward=ranks))
    with pytest.raises(UsageError, match="always, torchtitan, never"):
        resolve(preset("llama3-8b"), RunRequest(dp=2, zero=3, reshard_after_forward="sometimes"))


def test_torchtitan_without_zero_three_gathers_nothing() -> None:
    run = resolve(preset("llama3-8b"), RunRequest(like="torchtitan", dp=2, zero=1)).run
    assert run.layout.reshard is Reshard.ALWAYS
    assert resolve(preset("llama3-8b"), RunRequest(like="torchtitan", dp=2)).run.layout.reshard is Reshard.BUT_FIRST


def _peak(**words: Any) -> int:
    return forecast(resolve(preset("llama3-8b"), RunRequest(dp=8, zero=3, precision="bf16", **words)).run).peak_bytes


def test_weights_that_stay_whole_are_there_when_the_loss_is() -> None:
    """At its peak, the loss: two bytes a parameter of layers and head, and of the embedding."""
    always, never = (_peak(recompute="full", seq=8192, reshard_after_forward=word) for word in ("always", "never"))
    head = 2 * 4096 * (128256 + 1)
    assert never - always == 2 * (8_030_261_248)
    assert _peak(recompute="full", seq=8192, reshard_after_forward="torchtitan") - always == head


def test_a_stage_has_them_while_micro_batches_are_in_flight() -> None:
    layout = {"pp": 2, "micro_batches": 8}
    found = {}
    for word in ("always", "never", "torchtitan"):
        asked = RunRequest(dp=2, zero=3, seq=2048, reshard_after_forward=word, **layout)
        found[word] = forecast(resolve(preset("llama3-8b"), asked).run).stages[0]
    assert found["never"].timeline()[0] == found["always"].timeline()[0]  # between steps there are shards
    assert found["never"].peak.nbytes > found["always"].peak.nbytes
    assert found["torchtitan"].peak == found["never"].peak
    last, always = (
        forecast(resolve(preset("llama3-8b"), replace(asked, recompute="full", reshard_after_forward=word)).run)
        for word in ("never", "always")
    )
    weights = sum(part.static.gathered for part in last.stages[1].parts[0])
    assert last.stages[1].peak.nbytes - always.stages[1].peak.nbytes == weights  # at the loss, where else none is
