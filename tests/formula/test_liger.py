"""`--kernels liger` beside layers of transformers in which each kernel of Liger's saves what its source says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jettison.core.errors import UsageError
from jettison.families.family import kernels_for
from jettison.formula.region import head_region, layer_region
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.kernels import Loss
from support.formula_cases import FormulaCase
from support.formula_cases import run_of as run_of_case
from support.held_by_autograd import observed_bytes
from support.liger_like import patch
from support.mixtures import MIXTURES

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2")
MIXED = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("family", [*FAMILIES, *MIXED])
def test_a_layer_saves_what_ligers_kernels_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = family == "gemma2" or (family in MIXED and MIXTURES[family].attentions == ("eager",))
    case = FormulaCase(family=family, attention="eager" if eager else "sdpa", precision="fp32")
    run = run_of_case(case)
    kernels = kernels_for(run.model, "liger").with_attention(case.attention).on_cpu()
    ours = replace(run, kernels=kernels)
    found = [layer_region(ours.signature, layer).saved_bytes for layer in ours.model.layers]
    assert found == observed_bytes(case, lambda model: patch(model, monkeypatch))
    assert sum(found) < sum(layer_region(run.signature, layer).saved_bytes for layer in run.model.layers)


def test_other_families_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--kernels liger for gpt2 .*give --kernels huggingface"):
        run_of("gpt2", RunRequest(kernels="liger"))


def test_a_set_like_it_is_of_the_same_families() -> None:
    assert run_of("qwen3-0.6b", RunRequest(kernels="axolotl-liger", lora="r=16")).kernels.fused_adapters
    with pytest.raises(UsageError, match=r"axolotl-liger for gpt2 .*modelled for gemma, gemma2.* qwen3_moe: give"):
        run_of("gpt2", RunRequest(kernels="axolotl-liger"))


@pytest.mark.parametrize(
    ("model", "seq", "rows"),
    [("llama2-7b", 16384, 2048), ("qwen3-0.6b", 32768, 256), ("qwen3-0.6b", 100, 1)],  # the first is its comment's
)
def test_a_chunk_of_its_loss_is_about_as_large_as_the_input(model: str, seq: int, rows: int) -> None:
    run = run_of(model, RunRequest(kernels="liger", seq=seq, precision="bf16-pure"))
    (step,) = [step for step in head_region(run.signature).tape.steps if step.name == "fused_linear_cross_entropy"]
    assert step.outputs[-1].nbytes == rows * run.model.vocab * 2
    assert step.workspace == 0


@pytest.mark.parametrize("name", ["liger", "axolotl", "unsloth"])
def test_gradients_of_both_halves_are_written_over_them(name: str) -> None:
    request = RunRequest(seq=65536, precision="bf16-pure", recompute="full", lora="r=16", loss="fused")
    run = run_of("llama2-7b", replace(request, kernels=name))
    apart = replace(run, kernels=replace(run.kernels, gate_in_place=False))
    half = run.seq * 11008 * 2
    assert half / 2 < forecast(apart).peak_bytes - forecast(run).peak_bytes <= 2 * half  # then another op is the worst


def test_its_loss_is_the_fused_one() -> None:
    assert run_of("llama3-8b", RunRequest(kernels="liger")).kernels.loss is Loss.FUSED
    assert run_of("llama3-8b", RunRequest(kernels="liger", loss="upcast")).kernels.loss is Loss.UPCAST


@pytest.mark.parametrize(
    ("like", "kernels", "loss"),
    [
        ("huggingface", "liger", Loss.FUSED),
        ("deepspeed", "liger", Loss.FUSED),
        ("deepspeed", "pytorch", Loss.UPCAST),
        ("automodel", None, Loss.UPCAST),
        ("automodel", "liger", Loss.UPCAST),
        ("megatron", "megatron", Loss.VOCAB_PARALLEL),
    ],
)
def test_a_preset_with_other_kernels_has_the_loss_of_these(like: str, kernels: str | None, loss: Loss) -> None:
    """Not where they are the preset's own, whose loss it sets."""
    assert run_of("llama3-8b", RunRequest(like=like, kernels=kernels)).kernels.loss is loss
