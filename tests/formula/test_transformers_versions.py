"""Losses of older versions of transformers, put into models of today's: bytes of a whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.family import kernels_for
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.spec.precision import PRECISIONS, Optimizer
from jettison.spec.run import Run
from jettison.spec.tuning import Tuning
from support.formula_cases import spec_of

BATCH, SEQUENCE, VOCABULARY = 2, 32, 8192


def loss_of_4_48(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Of 4.46 to 4.48: the caller has 16-bit logits, this frame fp32 ones."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1))


class WideHead(nn.Linear):
    """The head of a model that casts its logits itself, until 4.45."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits in fp32, whose 16-bit form nobody has a name for."""
        return super().forward(x).float()


def llama_of(version: str, *, lora: bool) -> tuple[nn.Module, Run]:
    """A model with the loss of a version, and the described run."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).train()
    spec, tuning = spec_of(config), None
    if version != "today":
        model.loss_function = loss_of_4_48
    if version == "4.45":
        model.lm_head.__class__ = WideHead
    if lora:
        peft = pytest.importorskip("peft")
        options = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
        tuning = Tuning(rank=4)
        spec = replace(spec, layers=(replace(spec.layers[0], detached=True), *spec.layers[1:]))
    name = "huggingface" if version == "today" else f"huggingface-{version}"
    kernels = kernels_for(spec, name).with_attention("sdpa").on_cpu()
    run = Run(
        model=spec,
        seq=SEQUENCE,
        micro_batch=BATCH,
        kernels=kernels,
        precision=PRECISIONS["bf16-pure"],
        optimizer=Optimizer.NONE,
        tuning=tuning,
    )
    return model, run


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("version", ["today", "4.48", "4.45"])
def test_the_peak_of_a_step_with_a_versions_loss(version: str, lora: bool) -> None:
    """Logits decide it: 10, 14 and 12 bytes each; the head's input has a name where a frozen head does not keep it."""
    model, run = llama_of(version, lora=lora)
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    with AllocationCounter(static_tensors(model, ids)) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert forecast(run).peak_bytes == pytest.approx(counter.peak_bytes, abs=1024), "less than a row of logits"


def test_families_differ_where_their_code_did() -> None:
    """GPT-NeoX had a loss of its own to 4.48; before 4.46 half of the families cast no logits."""
    casts = {
        version: [
            kernels_for(preset(name), f"huggingface-{version}").loss_float32
            for name in ("llama3-8b", "gpt-neox-20b", "gpt2")
        ]
        for version in ("4.57", "4.48", "4.45", "4.30")
    }
    assert casts == {
        "4.57": [True, True, True],
        "4.48": [True, False, False],
        "4.45": [True, False, False],
        "4.30": [False, False, False],
    }
