"""A step of a small model with checkpoints, every byte counted, beside the forecast."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmarks.accuracy import cached
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from jettison.predict.forecast import forecast
from jettison.spec.precision import PRECISIONS
from jettison.spec.recompute import Recompute
from support.counted_steps import language_step, second_step_bytes
from support.formula_cases import VOCABULARY, FormulaCase, model_of, run_of
from support.pipeline_peaks import loss_of

CASE = FormulaCase(family="llama", attention="sdpa", batch=2, sequence=64, more=(("num_hidden_layers", 3),))


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure", "bf16-autocast"])
def test_what_a_checkpoint_was_given_stays_until_its_backward_is_over(precision: str) -> None:
    """Of bf16 the norm saves a copy in fp32, so that only the checkpoint has the layer's input: 16 KiB, 1.4 %."""
    model = model_of(CASE)
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()
    ids = torch.randint(1, VOCABULARY, (CASE.batch, CASE.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    step = language_step(model, optimizer, ids, autocast=precision == "bf16-autocast")
    measured = second_step_bytes(step, model, optimizer, ids)
    run = replace(
        run_of(CASE), recompute=Recompute.parse("full", layers=3), precision=PRECISIONS[precision], micro_batches=1
    )
    assert forecast(run).peak_bytes == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "olmo2"])
def test_torchs_selective_contexts_hold_outputs_that_nobody_reads(family: str) -> None:
    """Until their turn in the second forward; what comes behind the last saved tensor has none."""
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    case = replace(CASE, family=family, more=((depth, 3),))
    model = model_of(case)
    ops = torch.ops.aten
    attention = ops._scaled_dot_product_flash_attention_for_cpu.default
    listed = [ops.mm.default, ops.addmm.default, ops.bmm.default, ops.baddbmm.default, attention]
    contexts = partial(create_selective_checkpoint_contexts, listed)
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    model.activation_checkpointing_enable(options)
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured = second_step_bytes(step, model, optimizer, ids)
    run = replace(run_of(case), recompute=Recompute.parse("selective-op", layers=3), micro_batches=1)
    assert forecast(run, cached(run)).peak_bytes == pytest.approx(measured, rel=0.002)
