"""Losses of older versions of transformers, put into models of today's: bytes of a whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.family import kernels_for
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.fine_tuning import Tuning
from jettison.spec.precision import PRECISIONS, Optimizer
from jettison.spec.run import Run
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


class Expert(nn.Module):
    """``MixtralBlockSparseTop2MLP``."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of one expert."""
        x = nn.functional.silu(self.w1(x)) * self.w3(x)
        return self.w2(x)


class Experts(nn.Module):
    """``MixtralSparseMoeBlock`` of 4.48, whose tokens are spread evenly here."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        made = (Expert(config.hidden_size, config.intermediate_size) for _ in range(config.num_local_experts))
        self.experts = nn.ModuleList(made)

    def forward(self, hidden: Tensor) -> Tensor:
        """The weighted sum over each token's experts."""
        shape, count = hidden.shape, len(self.experts)
        hidden = hidden.view(-1, shape[-1])
        weights = nn.functional.softmax(self.gate(hidden), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, 2, dim=-1)
        chosen = (torch.arange(chosen.numel()) % count).view_as(chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        final = torch.zeros(hidden.shape, dtype=hidden.dtype)
        mask = nn.functional.one_hot(chosen, num_classes=count).permute(2, 1, 0)
        for number in range(count):
            place, rows = torch.where(mask[number])
            state = hidden[None, rows].reshape(-1, shape[-1])
            state = self.experts[number](state) * weights[rows, place, None]
            final.index_add_(0, rows, state.to(hidden.dtype))
        return final.reshape(shape)


def test_the_peak_of_a_step_with_experts_in_a_list() -> None:
    """One expert's gradients at a time, beside what all of them have saved."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        use_cache=False,
    )
    model: Any = MixtralForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = Experts(config)
    model = model.to(torch.bfloat16).train()
    ids = torch.randint(1, 64, (2, 512))
    with AllocationCounter(static_tensors(model, ids)) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    spec = spec_of(config)
    run = Run(
        model=spec,
        seq=512,
        micro_batch=2,
        kernels=kernels_for(spec, "huggingface-4.57").with_attention("sdpa").on_cpu(),
        precision=PRECISIONS["bf16-pure"],
        optimizer=Optimizer.NONE,
    )
    assert forecast(run).peak_bytes == pytest.approx(counter.peak_bytes, rel=0.001)


def test_experts_in_a_list_are_packed() -> None:
    """Mixtral 8x7B: 32 layers of 8 experts of three matrices in four bits; one tensor of all experts is not packed."""
    request = RunRequest(seq=128, lora="r=16,targets=q_proj", base="nf4", kbit_upcast="none", recompute="full")
    sizes = [
        forecast(resolve(preset("mixtral-8x7b"), replace(request, like=like)).run).stages[0].static.parameters
        for like in ("huggingface-4.57", "huggingface")
    ]
    numbers = 4096 * 14336
    packed = numbers // 2 + 4 * numbers // 64 + 64
    assert sizes[1] - sizes[0] == 32 * 8 * 3 * (2 * numbers - packed)
