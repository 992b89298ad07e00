"""Bases in four bits as PEFT and TRL prepare them, on models of transformers: bytes of a step.

bitsandbytes needs a GPU. Its layer and PEFT's adapter around it are written here as their code has them, with a matrix
of zeros in the place of the one that is unpacked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from jettison.core.errors import UsageError
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.fine_tuning import HEAD, TABLE, Base, Tuning, Upcast
from jettison.spec.run import Run
from support.formula_cases import spec_of
from support.quantized_bases import COMPUTE, RANK, checkpointed, described, replace_linear_layers, step_peak, tiny_llama


class Unpacking(torch.autograd.Function):
    """bitsandbytes, ``autograd/_functions.py``, ``MatMul4Bit``: each pass makes the matrix again, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        """Gemm with a matrix in the dtype of x."""
        ctx.shape = shape
        return nn.functional.linear(x, torch.zeros(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x."""
        return gradient @ torch.zeros(ctx.shape, dtype=gradient.dtype), None, None


class Adapted4bit(nn.Module):
    """``bnb.nn.Linear4bit.forward`` within PEFT's ``tuners/lora/bnb.py``, ``Linear4bit.forward``."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.shape = tuple(plain.weight.shape)
        nbytes = Base.NF4_DOUBLE.packed_bytes(plain.weight.numel(), self.shape[0])
        self.packed = nn.Parameter(torch.zeros(nbytes, dtype=torch.uint8), requires_grad=False)
        self.lora_A = nn.Linear(self.shape[1], RANK, bias=False)
        self.lora_B = nn.Linear(RANK, self.shape[0], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product, and what the adapter adds."""
        result = Unpacking.apply(x.to(COMPUTE), self.packed, self.shape).to(x.dtype)
        result = result.clone()
        output = self.lora_B(self.lora_A(x)) * 2.0
        result = result + output
        return result


def prepared(upcast: Upcast, vocabulary: int, recompute: str, full: frozenset[str] = frozenset()) -> tuple[Any, Run]:
    """A model as a trainer prepares it, and the described run."""
    config, model = tiny_llama(vocabulary, 64, 224)
    model.requires_grad_(False)
    for parameter in model.parameters() if upcast is not Upcast.NONE else ():
        parameter.data = parameter.data.to(torch.float32)  # prepare_model_for_kbit_training
    replace_linear_layers(model, Adapted4bit)
    if upcast is Upcast.NORMS:  # peft_module_casting_to_bf16
        model.lm_head.to(COMPUTE)
        model.model.embed_tokens.to(COMPUTE)
    for owner, name in ((model.model, TABLE), (model, HEAD)):
        if name in full:
            setattr(owner, name, ModulesToSaveWrapper(getattr(owner, name), "default"))
            getattr(owner, name).set_adapter("default")
    spec = spec_of(config)
    if upcast is Upcast.NORMS:
        spec = replace(spec, layers=(replace(spec.layers[0], low_precision=True), *spec.layers[1:]))
    tuning = Tuning(rank=RANK, base=Base.NF4_DOUBLE, upcast=upcast, inputs_need_gradients=True, full=full)
    return checkpointed(model, recompute), described(spec, recompute, tuning)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("vocabulary", [64, 4096])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("upcast", list(Upcast))
@pytest.mark.parametrize("full", [frozenset(), frozenset({TABLE, HEAD})], ids=sorted)
def test_the_peak_of_a_step_of_a_prepared_base(
    upcast: Upcast, recompute: str, vocabulary: int, full: frozenset[str]
) -> None:
    """In the loss, or in a layer; with embedding and head trained in full, in the dtype that they are prepared in."""
    model, run = prepared(upcast, vocabulary, recompute, full)
    peak = step_peak(model, vocabulary)
    assert forecast(run).peak_bytes == pytest.approx(peak, abs=8192), "a fourth of a hidden state"


def test_a_trainer_of_that_time_prepares_what_it_does_not_shard() -> None:
    """TRL to 0.26; the plugin of fms-acceleration casts nothing, and says so."""
    model = preset("llama3-8b")
    ways = {
        "trl": RunRequest(like="huggingface-4.48", lora="16", base="nf4"),
        "said": RunRequest(like="huggingface-4.48", lora="16", base="nf4", kbit_upcast="none"),
        "shards": RunRequest(like="huggingface-4.48", lora="16", base="nf4", dp=2, zero=3),
        "eight": RunRequest(like="huggingface-4.48", lora="16", base="int8"),
        "pure": RunRequest(like="huggingface-4.48", lora="16", base="nf4", precision="bf16-pure"),
        "today": RunRequest(like="huggingface", lora="16", base="nf4"),
    }
    found = {name: resolve(model, request).run.tuning for name, request in ways.items()}
    assert {name: str(each.upcast) for name, each in found.items() if each} == {
        "trl": "norms", "said": "none", "shards": "none", "eight": "none", "pure": "none", "today": "none"
    }  # fmt: skip


def test_what_is_prepared_is_in_four_bits_under_autocast() -> None:
    with pytest.raises(UsageError, match="without an unsharded 4-bit base under autocast"):
        resolve(preset("llama3-8b"), RunRequest(lora="16", base="nf4", kbit_upcast="all", precision="bf16-pure"))
    with pytest.raises(UsageError, match="got --kbit-upcast without adapters"):
        resolve(preset("llama3-8b"), RunRequest(kbit_upcast="all"))
