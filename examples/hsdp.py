"""FSDP2 within replicas: torchrun --nproc-per-node 4 examples/hsdp.py [BUDGET]"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

import jettison


def main(budget=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=512, num_key_value_heads=2, head_dim=32, **shape))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    numbers = torch.Generator().manual_seed(dist.get_rank())
    for number in range(3):
        ids = torch.randint(0, 512, (2, 128), generator=numbers)
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        if number == 0 and budget:
            jettison.auto_checkpoint(model, batch, budget, optimizer=optimizer, keep_output=False)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
