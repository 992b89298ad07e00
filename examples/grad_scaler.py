"""fp16 under autocast with a gradient scaler: python examples/grad_scaler.py [BUDGET]"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import jettison


def main(budget=None):
    torch.manual_seed(0)
    shape = {"n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def step(model, ids):
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        scaler.scale(loss).backward()
        return loss.detach()

    for number in range(3):
        ids = torch.randint(0, 512, (4, 128))
        if number == 0 and budget:
            jettison.auto_checkpoint(model, ids, budget, optimizer=optimizer, step=step)
        step(model, ids)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
