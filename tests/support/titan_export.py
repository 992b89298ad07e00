"""Run in a process of its own: torchtitan's own model under an exported `PlannedAC`. Prints one JSON line."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from support.stubs import stub_triton

stub_triton()
warnings.filterwarnings("ignore")

ROWS, LENGTH = 4, 256


def made() -> Any:
    """A factory for `jettison plan`: four layers of torchtitan's Llama, with the attention of its own tests."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel").model
    config.layers = [
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, inner_attention=ScaledDotProductAttention.Config())
        )
        for layer in config.layers[:4]
    ]
    torch.manual_seed(0)
    model = config.build()
    model.init_states() if hasattr(model, "init_states") else model.init_weights()
    ids = torch.randint(0, 2048, (ROWS, LENGTH))
    positions = torch.arange(LENGTH).repeat(ROWS, 1)

    def loss(output: Any) -> Any:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten())

    return model, {"tokens": ids, "positions": positions}, loss


def main(file: str) -> None:
    """Plain and planned steps of the same model."""
    from support.export_cases import held_bytes

    sys.path.insert(0, str(Path(file).parent))
    policy = importlib.import_module(Path(file).stem).PlannedAC
    found = []
    for planned in (False, True):
        model, batch, loss_fn = made()
        if planned:
            policy.Config().build().apply(model)
        held, loss = held_bytes(model, batch, loss_fn)
        loss.backward()
        found.append((held, [p.grad.clone() for p in model.parameters()]))
    (plain, before), (held, after) = found
    print(json.dumps({"plain": plain, "held": held, "same": all(map(torch.equal, before, after))}))


if __name__ == "__main__":
    main(sys.argv[1])
