"""Training loops on a CUDA device, planned and plain, in a process of their own: prints what differs, as JSON."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import jettison

STEPS = 3


def llama() -> nn.Module:
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=500, **shape))


def gpt2() -> nn.Module:
    """With dropout, which draws from the device's random stream."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=64, n_layer=3, n_head=4, n_positions=64))


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = {"llama": llama, "gpt2": gpt2}[name]().to("cuda", dtype).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[list[int], Any]:
    """Peak of each step, and all that training leaves."""
    torch.manual_seed(5)
    peaks, losses = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        gradients = [p.grad.cpu() for p in model.parameters()]
        optimizer.zero_grad()
    return peaks, [*losses, *gradients, *(t.cpu() for t in model.state_dict().values()), torch.cuda.get_rng_state()]


def main(name: str, dtype: str, offload: str) -> dict[str, Any]:
    torch.manual_seed(1)
    ids = torch.randint(0, 500, (4, 64)).cuda()
    plain, plain_optimizer = made(name, getattr(torch, dtype))
    plain_peaks, expected = trained(plain, plain_optimizer, ids)
    del plain, plain_optimizer
    model, optimizer = made(name, getattr(torch, dtype))
    batch = {"input_ids": ids, "labels": ids}
    asked = {"optimizer": optimizer, "offload": offload == "yes", "check": "full"}
    try:
        jettison.auto_checkpoint(model, batch, "1KiB", **asked)
        raise AssertionError("1 KiB holds no step")
    except jettison.Infeasible as error:
        smallest = error.minimum_budget_bytes
    handle = jettison.auto_checkpoint(model, batch, smallest, **asked)
    predicted = handle.plan.predicted.peak_bytes
    peaks, got = trained(model, optimizer, ids)
    return {
        "plain_peak_bytes": max(plain_peaks),
        "budget_bytes": smallest,
        "predicted_bytes": predicted,
        "peak_bytes": max(peaks),
        "differing": sum(not torch.equal(a, b) for a, b in zip(got, expected, strict=True)),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
