"""A frozen FP8 base under PEFT's adapters: transformers' own layers, whose kernels on a GPU are stood in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8

from jettison.core.errors import UsageError
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.fine_tuning import Base, Tuning
from jettison.spec.run import Run
from support.formula_cases import spec_of
from support.quantized_bases import RANK, checkpointed, described, replace_linear_layers, step_peak, tiny_llama

VOCABULARY = 64


def fp8_linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Allocations of the GEMM: the quantized input, and the output."""
    quantized = torch.zeros_like(x, dtype=torch.float8_e4m3fn)
    return x.new_zeros(*quantized.shape[:-1], weight.shape[0])


def fp8_layer(plain: nn.Linear) -> nn.Module:
    """transformers' linear layer over a matrix of zeros."""
    layer = finegrained_fp8.FP8Linear(plain.in_features, plain.out_features, block_size=(128, 128))
    nn.init.ones_(layer.weight_scale_inv)
    layer.weight.data = torch.zeros(layer.weight.shape, dtype=torch.float8_e4m3fn)
    return layer


def prepared(recompute: str) -> tuple[Any, Run]:
    """A model with FP8 matrices and fp32 adapters, and the described run."""
    config, model = tiny_llama(VOCABULARY, 256, 896)
    replace_linear_layers(model, fp8_layer)
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    tuning = Tuning(rank=RANK, base=Base.FP8, inputs_need_gradients=True, wide=True)
    return checkpointed(model, recompute), described(spec_of(config), recompute, tuning)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_step(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)
    model, run = prepared(recompute)
    peak = step_peak(model, VOCABULARY)
    answer = forecast(run)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    assert answer.worst.static.parameters == own
    assert answer.peak_bytes == pytest.approx(peak, abs=8192)


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
