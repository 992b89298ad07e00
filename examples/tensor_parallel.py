"""Llama over tensor-parallel ranks: torchrun --nproc-per-node 2 examples/tensor_parallel.py [BUDGET]"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import jettison


def main(budget=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    column, row = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj", "mlp.down_proj")
    plan = dict.fromkeys((*column, "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    plan |= dict.fromkeys(row, RowwiseParallel())
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    numbers = torch.Generator().manual_seed(0)  # all ranks see the same batch
    for number in range(3):
        ids = torch.randint(0, 512, (4, 128), generator=numbers)
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        if number == 0 and budget:
            jettison.auto_checkpoint(model, batch, budget, optimizer=optimizer, keep_output=False)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
