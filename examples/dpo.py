"""Direct preference optimisation with a frozen reference model: python examples/dpo.py [BUDGET]"""

import copy
import sys

import torch
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

import jettison

BETA = 0.1


def log_probability(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return -cross_entropy(logits.mT, ids[:, 1:], reduction="none").sum(1)


def step(policy, reference, pairs):
    """arXiv 2305.18290, equation 7: two forwards of each model, and one backward."""
    chosen, rejected = pairs
    margin = log_probability(policy, chosen) - log_probability(policy, rejected)
    with torch.no_grad():
        before = log_probability(reference, chosen) - log_probability(reference, rejected)
    loss = -logsigmoid(BETA * (margin - before)).mean()
    loss.backward()
    return loss.detach()


def main(budget=None):
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-4)
    for number in range(3):
        pairs = torch.randint(0, 512, (4, 128)), torch.randint(0, 512, (4, 128))
        if number == 0 and budget:
            models = (policy, reference)
            jettison.auto_checkpoint(policy, pairs, budget, optimizer=optimizer, step=step, models=models)
        step(policy, reference, pairs)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
