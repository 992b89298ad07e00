"""`--kernels liger` beside layers of transformers in which each kernel of Liger's saves what its source says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jettison.core.errors import UsageError
from jettison.families.family import kernels_for
from jettison.formula.region import layer_region
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import run_of
from jettison.spec.kernels import Loss
from support.formula_cases import FormulaCase
from support.formula_cases import run_of as run_of_case
from support.held_by_autograd import observed_bytes
from support.liger_like import patch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_saves_what_ligers_kernels_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FormulaCase(family=family, attention="eager" if family == "gemma2" else "sdpa", precision="fp32")
    run = run_of_case(case)
    kernels = kernels_for(run.model, "liger").with_attention(case.attention).on_cpu()
    ours = replace(run, kernels=kernels)
    found = [layer_region(ours.signature, layer).saved_bytes for layer in ours.model.layers]
    assert found == observed_bytes(case, lambda model: patch(model, monkeypatch))
    assert sum(found) < sum(layer_region(run.signature, layer).saved_bytes for layer in run.model.layers)


def test_other_families_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--kernels liger for gpt2 .*give --kernels huggingface"):
        run_of("gpt2", RunRequest(kernels="liger"))


def test_its_loss_is_the_fused_one() -> None:
    assert run_of("llama3-8b", RunRequest(kernels="liger")).kernels.loss is Loss.FUSED
    assert run_of("llama3-8b", RunRequest(kernels="liger", loss="upcast")).kernels.loss is Loss.UPCAST
