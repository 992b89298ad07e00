"""Tables that embedding and head share, and masks that checkpoints hold, in steps whose every byte is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jettison.predict.forecast import forecast
from jettison.spec.recompute import Recompute
from support.counted_steps import second_step_bytes
from support.formula_cases import FormulaCase, model_of, run_of
from support.pipeline_peaks import loss_of

VOCABULARY = 2048


def counted(case: FormulaCase, micro_batches: int, *, full: bool = False) -> int:
    """Of a step at its highest, without the batch, the optimizer's counters and what no configuration tells."""
    model = model_of(case)
    if full:
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})  # type: ignore[operator]
        model.train()
    ids = torch.randint(1, 64, (case.batch * micro_batches, case.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        for rows in ids.split(case.batch):
            (loss_of(model(input_ids=rows).logits, rows) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    tables = sum(b.nbytes for name, b in model.named_buffers() if "inv_freq" in name)
    return second_step_bytes(step, model, optimizer, ids) - tables


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_a_tied_table_are_added_up_into_a_third(precision: str, micro_batches: int) -> None:
    """With two micro-batches 11 % of the step, and of AdamW's two tensors in 16 bits as much too much before."""
    more = (("vocab_size", VOCABULARY), ("tie_word_embeddings", True))
    case = FormulaCase(family="llama", attention="sdpa", precision=precision, batch=1, sequence=16, more=more)
    run = replace(run_of(case), micro_batches=micro_batches)
    assert forecast(run).peak_bytes == pytest.approx(counted(case, micro_batches), rel=0.001)


def test_checkpoints_hold_the_mask_that_eager_attention_was_given() -> None:
    """b × s × s numbers, 4 % of this step; without checkpoints autograd has no use for them."""
    case = FormulaCase(family="llama", batch=2, sequence=96, more=(("max_position_embeddings", 192),))
    run = run_of(case)
    full = replace(run, recompute=Recompute.parse("full", layers=run.model.depth))
    assert forecast(run).peak_bytes == pytest.approx(counted(case, 1), rel=0.001)
    assert forecast(full).peak_bytes == pytest.approx(counted(case, 1, full=True), rel=0.001)
