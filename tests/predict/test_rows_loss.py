"""A loss over chunks of rows: counted steps of a small model beside the forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jettison.cost.execution import Execution
from jettison.cost.region_kernels import work
from jettison.families.presets import preset
from jettison.formula import loss
from jettison.formula.region import head_region
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.runtime import chunked_loss
from jettison.spec.kernels import Loss
from jettison.spec.precision import PRECISIONS
from support.counted_steps import second_step_bytes
from support.formula_cases import FormulaCase, model_of, run_of


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure", "bf16-autocast"])
@pytest.mark.parametrize("vocabulary", [1024, 16384])
def test_a_loss_over_rows_takes_what_the_forecast_says(precision: str, vocabulary: int) -> None:
    """Logits of the smaller vocabulary are below the size that is cut. Without chunks the larger one has 7 MB more."""
    more = (("num_hidden_layers", 3), ("vocab_size", vocabulary))
    case = FormulaCase(family="gpt2", attention="sdpa", batch=2, sequence=64, more=more)
    model = model_of(case).train()
    model = model.to(torch.bfloat16) if precision == "bf16-pure" else model
    ids = torch.randint(1, vocabulary, (case.batch, case.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-autocast"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    with chunked_loss.holding(True) as hold:
        measured = second_step_bytes(step, model, optimizer, ids)
        assert hold is not None and hold.used == (vocabulary == 16384)
        hold.release()
    run = replace(run_of(case), precision=PRECISIONS[precision], micro_batches=1)
    run = replace(run, kernels=replace(run.kernels, loss=Loss.CHUNKED_CE))
    assert forecast(run).peak_bytes == pytest.approx(measured, rel=0.001)


def test_its_kernels_pass_over_logits_eight_times() -> None:
    """Twice in forward and six times in backward, whatever is held meanwhile."""
    run = resolve(preset("llama3-8b"), RunRequest(seq=4096, loss="chunked-cross-entropy")).run
    listed = work(head_region(run.signature), Execution(), "bfloat16", None)
    logits = 4096 * 128256 * 4
    assert [k.nbytes for k in listed.forward].count(2 * logits) == 1
    assert [k.nbytes for k in listed.backward].count(6 * logits) == 1


def test_chunks_are_cut_as_the_runtime_cuts_them() -> None:
    for name in ("ROWS", "DEVICE_CHUNKS", "CPU_CHUNK_BYTES", "SMALLEST_BYTES"):
        assert getattr(loss, name) == getattr(chunked_loss, name)
