"""A pipeline of torch's, one stage a rank: torchrun --nproc-per-node 2 examples/pipeline.py [BUDGET]"""

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import Qwen3Config, Qwen3ForCausalLM

import jettison


class Stage(nn.Module):  # some of a model's layers; the first stage starts from ids, the last one ends in logits
    def __init__(self, whole, rank, ranks):
        super().__init__()
        share = len(whole.model.layers) // ranks
        self.rotary, self.layers = whole.model.rotary_emb, whole.model.layers[rank * share : (rank + 1) * share]
        self.embed = whole.model.embed_tokens if rank == 0 else nn.Identity()
        self.head = nn.Sequential(whole.model.norm, whole.lm_head) if rank == ranks - 1 else nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        places = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        for layer in self.layers:
            x = layer(x, position_embeddings=places)
        return self.head(x)


def next_word(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main(budget=None):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    whole = Qwen3ForCausalLM(Qwen3Config(vocab_size=512, num_key_value_heads=2, head_dim=32, **shape))
    stage = PipelineStage(Stage(whole, rank, ranks), rank, ranks, torch.device("cpu"))
    del whole
    schedule = Schedule1F1B(stage, 8, next_word)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), 1e-3)

    def step(schedule, ids):
        schedule.step(*[ids] * (rank == 0), target=ids if rank == ranks - 1 else None, return_outputs=False)

    for number in range(3):
        ids = torch.randint(0, 512, (16, 128))  # the same on all ranks
        if number == 0 and budget:
            jettison.auto_checkpoint(schedule, ids, budget, optimizer=optimizer, step=step)
        step(schedule, ids)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
