"""A frozen FP8 base under PEFT's adapters: transformers' own layers, whose kernels on a GPU are stood in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import finegrained_fp8

from jettison.core.errors import UsageError
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.family import kernels_for
from jettison.predict.forecast import forecast
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import run_of
from jettison.spec.precision import PRECISIONS, Optimizer
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from jettison.spec.tuning import Base, Tuning
from support.formula_cases import spec_of

BATCH, SEQUENCE, RANK, LAYERS, VOCABULARY = 2, 128, 4, 4, 64
NARROW = torch.bfloat16


def fp8_linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Allocations of the GEMM: the quantized input, and the output."""
    quantized = torch.zeros_like(x, dtype=torch.float8_e4m3fn)
    return x.new_zeros(*quantized.shape[:-1], weight.shape[0])


def prepared(recompute: str) -> tuple[Any, Run]:
    """A model with FP8 matrices and fp32 adapters, and the described run."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).to(NARROW).train()
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                layer = finegrained_fp8.FP8Linear(child.in_features, child.out_features, block_size=(128, 128))
                nn.init.ones_(layer.weight_scale_inv)
                layer.weight.data = torch.zeros(layer.weight.shape, dtype=torch.float8_e4m3fn)
                setattr(module, name, layer)
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.enable_input_require_grads()
    spec = spec_of(config)
    run = Run(
        model=spec,
        seq=SEQUENCE,
        micro_batch=BATCH,
        kernels=kernels_for(spec, "huggingface").with_attention("sdpa").on_cpu(),
        precision=PRECISIONS["bf16-autocast"],
        optimizer=Optimizer.NONE,
        tuning=Tuning(rank=RANK, base=Base.FP8, inputs_need_gradients=True, wide=True),
        recompute=Recompute.parse(recompute, layers=LAYERS),
    )
    return model, run


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_step(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)
    model, run = prepared(recompute)
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))

    def step() -> None:
        with torch.autocast("cpu", NARROW):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    step()
    static = static_tensors(model, ids)
    with AllocationCounter(static) as counter:
        step()
    answer = forecast(run)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    assert answer.worst.static.parameters == own
    assert answer.peak_bytes == pytest.approx(counter.peak_bytes, abs=8192)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"model": "mixtral-8x7b"}, "whose FP8 experts"),
        ({"zero": 3, "dp": 2}, "with --zero 3"),
        ({"kernels": "unsloth"}, "whose fused adapters dequantize"),
    ],
)
def test_what_is_refused(words: dict[str, Any], message: str) -> None:
    model = words.pop("model", "llama3-8b")
    with pytest.raises(UsageError, match=f"got --base fp8 .*{message}"):
        run_of(model, RunRequest(seq=1024, lora="16", base="fp8", **words))
