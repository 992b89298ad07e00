"""What stands around the blocks of a page: the names and the files that its code and its commands take for given.

A block is known by its first line. What is in no world is not run, and says why.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Names = dict[str, Any]
Setup = Callable[[Path], Names]


def nothing(_folder: Path) -> Names:
    return {}


@dataclass(frozen=True, kw_only=True)
class World:
    """Of a block.

    Args:
        setup: makes files in a folder, where the block runs, and returns names.
        slow: it takes more than two seconds.
        measured: what it prints was measured: figures are not compared.
        code: that a command exits with.
    """

    setup: Setup = nothing
    slow: bool = False
    measured: bool = False
    code: int = 0


@dataclass(frozen=True, kw_only=True)
class Page:
    """Blocks of a page by first line: how they are run, or why not (a test that does, or a reason)."""

    run: Mapping[str, World] = field(default_factory=dict)
    not_here: Mapping[str, str] = field(default_factory=dict)


# models ---------------------------------------------------------------------------------------------------------------


def _llama(**more: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=128, **more
    )
    return LlamaForCausalLM(config)


def a_model(_folder: Path) -> Names:
    """A model, its batch by name, its optimizer; a function."""
    import torch

    import jettison

    model = _llama()
    ids = torch.randint(0, 128, (2, 32))
    batch = {"input_ids": ids, "labels": ids}
    return {
        "torch": torch,
        "jettison": jettison,
        "model": model,
        "batch": batch,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "function": lambda x: torch.nn.functional.gelu(x) * x,
        "x": torch.randn(8, 8, requires_grad=True),
    }


def accumulating(folder: Path) -> Names:
    """A model of tensors that returns its loss."""
    import torch
    from transformers.utils import ModelOutput

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> ModelOutput:
            for layer in self.layers:
                x = x + layer(x)
            return ModelOutput(loss=x.square().mean())

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    return a_model(folder) | {"model": model, "batch": torch.randn(16, 32), "optimizer": optimizer}


def guarded(folder: Path) -> Names:
    """A model under a plan, and its step."""
    names = a_model(folder)

    def step(model: Any, batch: Any) -> None:
        model(**batch).loss.backward()

    handle = names["jettison"].auto_checkpoint(names["model"], names["batch"], "8GiB")
    return names | {"handle": handle, "step": step}


def watched(folder: Path) -> Names:
    names = a_model(folder)

    def train_step(model: Any, batch: Any) -> None:
        model(**batch).loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    return names | {"batches": [names["batch"]] * 3, "train_step": train_step}


# files ----------------------------------------------------------------------------------------------------------------


def _module(folder: Path, name: str, text: str) -> None:
    """A file that commands import."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")


TOWER = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tower():
    return Net(), torch.randn(192, 32)
"""

MOE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))
        self.register_buffer("tokens_per_expert", torch.zeros(4))

    def forward(self, x):
        weight, chosen = self.router(x).topk(2)
        self.tokens_per_expert += torch.nn.functional.one_hot(chosen, 4).sum((0, 1))
        return x + torch.einsum("nd,nkde,nk->ne", x, self.experts[chosen], weight.softmax(-1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def build():
    torch.manual_seed(0)
    return Net(), torch.randn(32, 16)
"""

LOOP = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4))
optimizer = torch.optim.AdamW(blocks.parameters())
for _ in range(20):
    x = torch.randn(256, 128, requires_grad=True)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def tower(folder: Path) -> Names:
    _module(folder, "my_models", TOWER)
    return {}


def tower_planned(folder: Path) -> Names:
    from support.consoles import said

    tower(folder)
    assert said("jettison plan my_models:tower --budget 1000KiB --out plan.json").code == 0
    return {}


def moe(folder: Path) -> Names:
    _module(folder, "moe", MOE)
    return {}


def values(folder: Path) -> Names:
    text = (Path(__file__).parents[1] / "verbs" / "test_values.py").read_text(encoding="utf-8")
    _module(folder, "value_models", text)
    return {}


def loop(folder: Path) -> Names:
    _module(folder, "loop", LOOP)
    return {}


def log_of_pieces(folder: Path) -> Names:
    from support.planted_memory import message, traceback

    calls = "/opt/python/site-packages/torch/nn/modules/module.py", 1780, "_call_impl"
    frames = ("/home/me/train.py", 3, "<module>"), calls, ("/home/me/model.py", 12, "forward")
    sizes = {"asked": "2.00", "free": "1.20", "allocated": "60.00", "unused": "16.50", "used": "77.94"}
    (folder / "run.log").write_text(traceback(*frames) + message(**sizes), encoding="utf-8")
    return {}


def leaking(folder: Path) -> Names:
    from support.planted_memory import MIB, Tape

    tape = Tape()
    tape.begin(keep=3 * MIB)
    for _ in range(10):
        tape.step(keep=3 * MIB)
    tape.alloc(8 * MIB)
    tape.oom(8 * MIB, 2 * MIB)
    (folder / "leak.pickle").write_bytes(pickle.dumps(tape.content()))
    return {}


def traced_on_a_gpu(folder: Path) -> Names:
    from support.planted_traces import planted

    content = planted(layers=24, recompute=True, reduces=True, exposed=True, state_appears=True)
    (folder / "rank0.json").write_text(json.dumps(content), encoding="utf-8")
    return {}


def small_config(folder: Path) -> Names:
    from transformers import LlamaConfig

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(vocab_size=128, **shape).save_pretrained(folder)
    return {}


def traced(folder: Path) -> Names:
    from support.consoles import said

    small_config(folder)
    assert said("jettison ledger config.json --trace --seq 32 --precision fp32 --out traced.json").code == 0
    return {}


def exported(folder: Path) -> Names:
    from support.consoles import said

    words = "jettison plan gpt-22b --tp 8 --micro-batch 4 --kernels megatron --budget 55GiB --out plan.json"
    assert said(words).code == 0
    return {}


def snapshots(folder: Path) -> Names:
    from support.consoles import said

    common = "jettison estimate gpt-22b --tp 8 --pp 4 --micro-batches 8 --gpu a100-80gb --snapshot"
    for flags in ("before.pickle --recompute none", "after.pickle --recompute selective"):
        assert said(f"{common} {flags}").code == 0
    return {}


def snapshots_and_a_model(folder: Path) -> Names:
    snapshots(folder)
    return a_model(folder)


def documents(folder: Path) -> Names:
    """A plan, its proof, two plans of a kind, and a run's log folder."""
    from support.consoles import said

    tower_planned(folder)
    recipe = (Path(__file__).parents[2] / "recipes" / "one-process.toml").read_text(encoding="utf-8")
    (folder / "short.toml").write_text(recipe.replace("out/one-process", "out/two-ranks"), encoding="utf-8")
    described = "jettison plan gpt-22b --tp 8 --budget"
    for words in (
        "jettison verify plan.json --rounds 1 --out proof.json",
        f"{described} 60GiB --out before.json",
        f"{described} 50GiB --out after.json",
        "jettison train short.toml --steps 3",
    ):
        found = said(words)
        assert found.code == 0, (words, found.err)
    return {}
