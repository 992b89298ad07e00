"""LoRA under DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp_lora.py [BUDGET]"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import jettison


def main(budget=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj"], lora_dropout=0.1)
    model = DistributedDataParallel(get_peft_model(base, lora))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    numbers = torch.Generator().manual_seed(dist.get_rank())
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
