"""Batches of another length at each step, padded to one of four: python examples/lengths.py [BUDGET]"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import jettison

LENGTHS = (32, 64, 96, 128)


def batch_of(length):
    ids = torch.randint(0, 512, (4, length))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def main(budget=None):
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if budget:
        *shorter, longest = ({"input_ids": ids, "labels": ids, "use_cache": False} for ids in map(empty, LENGTHS))
        jettison.auto_checkpoint(model, longest, budget, optimizer=optimizer, keep_output=False, shapes=shorter)
    for number in range(6):
        batch = batch_of(LENGTHS[-1] if number == 1 else LENGTHS[torch.randint(4, ())])
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def empty(length):
    """Ids of this length, without values."""
    return torch.empty(4, length, dtype=torch.int64, device="meta")


if __name__ == "__main__":
    main(*sys.argv[1:])
