"""Small Llamas of transformers over quantized bases under adapters: the model, the described run, a step's peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.family import kernels_for
from jettison.spec.fine_tuning import Tuning
from jettison.spec.model import ModelSpec
from jettison.spec.precision import PRECISIONS, Optimizer
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run

BATCH, SEQUENCE, RANK, LAYERS = 2, 128, 4, 4
COMPUTE = torch.bfloat16


def tiny_llama(vocabulary: int, hidden: int, width: int) -> tuple[LlamaConfig, Any]:
    """A configuration and its model in training mode, in 16 bits."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        use_cache=False,
    )
    return config, LlamaForCausalLM(config).to(COMPUTE).train()


def replace_linear_layers(model: Any, made: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each linear layer of the decoder by another module."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, made(child))


def checkpointed(model: Any, recompute: str) -> Any:
    """The model as a trainer runs it, with gradients of the embedding's output."""
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.enable_input_require_grads()
    return model


def described(spec: ModelSpec, recompute: str, tuning: Tuning) -> Run:
    """The run of `step_peak`."""
    return Run(
        model=spec,
        seq=SEQUENCE,
        micro_batch=BATCH,
        kernels=kernels_for(spec, "huggingface").with_attention("sdpa").on_cpu(),
        precision=PRECISIONS["bf16-autocast"],
        optimizer=Optimizer.NONE,
        tuning=tuning,
        recompute=Recompute.parse(recompute, layers=LAYERS),
    )


def step_peak(model: Any, vocabulary: int) -> int:
    """Peak of allocated bytes in the second step under autocast."""
    ids = torch.randint(1, vocabulary, (BATCH, SEQUENCE))

    def step() -> None:
        with torch.autocast("cpu", COMPUTE):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    step()
    with AllocationCounter(static_tensors(model, ids)) as counter:
        step()
    return counter.peak_bytes
