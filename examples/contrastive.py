"""A contrastive loss over two views of a batch: python examples/contrastive.py [BUDGET]"""

import sys

import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import ViTConfig, ViTModel

import jettison


def step(model, views):
    """InfoNCE (arXiv 1807.03748): both forwards wait for one backward."""
    first, second = (normalize(model(pixel_values=view).last_hidden_state[:, 0]) for view in views)
    loss = cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))
    loss.backward()
    return loss.detach()


def main(budget=None):
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = ViTModel(ViTConfig(image_size=32, patch_size=4, **shape), add_pooling_layer=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for number in range(3):
        views = torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32)
        if number == 0 and budget:
            jettison.auto_checkpoint(model, views, budget, optimizer=optimizer, step=step)
        step(model, views)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
