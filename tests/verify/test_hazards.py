"""Models with a planted way to be silently wrong: each is seen in its block, now or for later; healthy ones are not."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from jettison.cli.doctor import environment_notes
from jettison.cli.doctor_model import Hazard, Sighting, look_for_hazards
from jettison.cli.main import run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks in turn; ``again``: torch's checkpoint around each."""

    def __init__(self, *blocks: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(blocks), again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.sum()


class Python(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Numpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(np.random.rand())


class OwnGenerator(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(8, generator=torch.Generator().manual_seed(1))


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Routes(Block):
    def forward(self, x: Tensor) -> Tensor:
        values, _ = self.up(x).topk(8, dim=-1)
        return x + values


class Writes(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.up.weight.mul_(1.0)
        return y


class WritesArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        y = self.blocks[1](x)
        with torch.no_grad():
            x.add_(1)
        return y.sum()


class Captures(Block):
    kept: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if self.kept:
            return x + self.kept[0]
        self.kept.append(super().forward(x))
        return self.kept[0] * 1.0


class Chosen(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class Cast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Nested(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda pair, _, block=block: block(pair[0]), [x, x], x, use_reentrant=True)
        return x.sum()


def kinds(model: nn.Module) -> list[Sighting]:
    return list(look_for_hazards(model, torch.ones(4, 8, requires_grad=True)))


def captures() -> Stack:
    blocks = [Captures(), Captures()]
    kept: list[Tensor] = []
    for block in blocks:
        block.kept = kept
    return Stack(*blocks)


def tied() -> Cast:
    model = Cast(Block(), Block())
    model.blocks[1].up = model.blocks[0].up  # type: ignore[union-attr]
    return model


PLANTED: dict[str, tuple[Any, Hazard, str]] = {
    "Python's random": (lambda: Stack(Python(), Python()), Hazard.RANDOM, "Python's random"),
    "numpy's random": (lambda: Stack(Numpy(), Numpy()), Hazard.RANDOM, "numpy's random"),
    "a generator of its own": (lambda: Stack(OwnGenerator(), OwnGenerator()), Hazard.RANDOM, "rand draws"),
    "counters": (lambda: Stack(Counts(), Counts()), Hazard.BUFFERS, "norm.running_mean"),
    "a router": (lambda: Stack(Routes(), Routes()), Hazard.CHOICE, "topk"),
    "a written parameter": (lambda: Stack(Writes(), Block(), Block()), Hazard.WRITTEN, "blocks.0.up.weight"),
    "a written argument": (WritesArguments, Hazard.WRITTEN, "an argument [4, 8]"),
    "a tensor past the arguments": (captures, Hazard.CAPTURED, "reads [4, 8] of blocks.0"),
    "a context around the blocks": (lambda: Chosen(Block(), Block()), Hazard.CONTEXT, "kernels"),
    "shared weights under autocast": (tied, Hazard.SHARED, "up.weight is also blocks.1.up.weight"),
    "a list given to a reentrant checkpoint": (lambda: Nested(Block(), Block()), Hazard.NESTED, "[4, 8]"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_planted_hazard_is_seen_alone(name: str) -> None:
    make, hazard, text = PLANTED[name]
    seen = kinds(make())
    assert {one.hazard for one in seen} == {hazard}, seen
    assert text in seen[0].what


def test_what_runs_again_is_at_risk_now() -> None:
    assert {one.now for one in kinds(Stack(Counts(), Counts()))} == {False}
    seen = kinds(Stack(Counts(), Counts(), again=True))
    assert [(one.hazard, one.block, one.now) for one in seen] == [
        (Hazard.BUFFERS, "blocks.0", True),
        (Hazard.BUFFERS, "blocks.1", True),
    ]


HEALTHY: dict[str, Any] = {
    "plain": lambda: Stack(Block(), Block()),
    "checkpointed": lambda: Stack(Block(), Block(), again=True),
    "torch's dropout": lambda: Stack(*[nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(2)], again=True),
    "autocast without shared weights": lambda: Cast(Block(), Block()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_has_none(name: str) -> None:
    assert kinds(HEALTHY[name]()) == []


def test_a_written_argument_is_the_blocks() -> None:
    assert [one.block for one in kinds(WritesArguments())] == ["blocks.1"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "hazard_models", sys.modules[__name__])
    assert run(["doctor", "--model", "hazard_models:counting"]) == 0
    said = capsys.readouterr().out
    assert "buffers, and it is recomputed in backward: blocks.0 to 1 (2)" in said
    assert "jettison verify hazard_models:counting --given" in said
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 16, **shape}))
    assert run(["doctor", "--model", str(config), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["findings"]) == ("jettison.doctor_model/1", [])
    assert run(["doctor", "--model", "hazard_models:nothing"]) == 2
    assert run(["doctor", "--model", "x:y", "--oom", "z"]) == 2


def counting() -> tuple[nn.Module, Tensor]:
    return Stack(Counts(), Counts(), again=True), torch.ones(4, 8, requires_grad=True)


def test_notes_about_the_environment() -> None:
    fine = {"CUDA_LAUNCH_BLOCKING": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
    assert environment_notes({**fine, "OMP_NUM_THREADS": "4"}, 4) == []
    bad = {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True", "OMP_NUM_THREADS": "8"}
    assert [name for name, _ in environment_notes(bad, 4)] == list(bad)
