"""Models whose embedding and head PEFT trains in full: the described step and the dry run of the live model."""

from dataclasses import replace

import pytest
import torch

import jettison
from formula.test_formula_adapters import FULL, TIED, adapted, tuned
from jettison.predict.forecast import forecast
from jettison.spec.fine_tuning import TABLE, Tuning
from support.formula_cases import VOCABULARY, FormulaCase


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning", "ignore:.*is_gradient_check:FutureWarning")
@pytest.mark.parametrize("full", FULL, ids=lambda full: "+".join(sorted(full)))
@pytest.mark.parametrize("family", ["llama", TIED])
def test_a_described_step_is_the_dry_run_of_the_live_model(family: str, full: frozenset[str]) -> None:
    case = FormulaCase(family=family, attention="sdpa", batch=4, sequence=64)
    tuning = Tuning(rank=4, inputs_need_gradients=TABLE in full, full=full)
    model = adapted(case, tuning).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    applied = jettison.auto_checkpoint(model, {"input_ids": ids, "labels": ids}, "1GiB", optimizer=optimizer)
    assert applied.plan is not None
    run = replace(tuned(case, tuning), keep_logits=True)  # a loop of the model and its batch holds the output
    assert applied.plan.predicted.peak_bytes == pytest.approx(forecast(run).peak_bytes, rel=0.003)
