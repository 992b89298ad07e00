"""Llama under FSDP2, with accumulation: torchrun --nproc-per-node 2 examples/fsdp2_llama.py [BUDGET]"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import jettison

MICRO_BATCHES = 2


def step(model, ids):
    """Forward and backward of one optimizer step, as the loop has them."""
    for number, part in enumerate(ids.chunk(MICRO_BATCHES)):
        model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
        (model(input_ids=part, labels=part, use_cache=False).loss / MICRO_BATCHES).backward()


def main(budget=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    numbers = torch.Generator().manual_seed(dist.get_rank())
    for number in range(3):
        ids = torch.randint(0, 512, (4, 128), generator=numbers)
        if number == 0 and budget:
            jettison.auto_checkpoint(model, ids, budget, optimizer=optimizer, step=step)
        step(model, ids)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
