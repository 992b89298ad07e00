"""Which layouts draw the dropout masks of one process (docs/train-guarantees.md), by the first loss of each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from jettison.cli.train import train
from jettison.train.recipe import BatchSection, LayoutSection, LogSection, ModelSection, TrainRecipe
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

SIZES = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": 32}
GPT2 = {"model_type": "gpt2", "dtype": "float32", "bos_token_id": None, "eos_token_id": None, **SIZES}
TWO: dict[str, dict[str, Any]] = {
    "dp": {},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sp": False},
    "cp": {"cp": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2},
    "zero-bubble": {"pp": 2, "schedule": "zero-bubble"},
    "two stages a rank": {"pp": 2, "virtual_stages": 2},
    "zero-bubble, two stages a rank": {"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble"},
}
FOUR: dict[str, dict[str, Any]] = {
    "replicas": {"zero": 3, "shards": 2},
    "tp without sp, replicas": {"tp": 2, "sp": False, "zero": 3, "shards": 1},
    "four stages": {"pp": 4},
}
SAME, OTHER = 1e-6, 1e-5  # rounding, and what masks of another seed change


def first_losses(args: dict[str, Any]) -> dict[str, float]:
    """On every rank: of the first step, without dropout (its share 0 says which is noise) and with it."""
    found = {}
    for name, (model, layout) in args["runs"].items():
        made = TrainRecipe(
            model=ModelSection(**model),
            layout=LayoutSection(**layout),
            batch=BatchSection(global_batch=8, micro_batch=2, seq=32),
            steps=1,
            log=LogSection(folder=f"{args['folder']}/{name}", memory_steps=0),
        )
        loss = train(made).first_loss
        assert loss is not None
        found[name] = loss
    return found


def gpt(dropout: float) -> dict[str, Any]:
    return {"architecture": "gpt", "layers": 4, "hidden": 32, "heads": 4, "dropout": dropout}


def gpt2(folder: Path, attention: float) -> dict[str, Any]:
    """transformers' GPT-2, with dropout outside of attention, and perhaps inside."""
    path = folder / f"gpt2-{attention}.json"
    path.write_text(json.dumps(GPT2 | {"attn_pdrop": attention, "embd_pdrop": 0.3, "resid_pdrop": 0.3}))
    return {"config": str(path), "attention": "eager"}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """By layout, and "one" for one process; "plain" before its name: without dropout."""
    folder = tmp_path_factory.mktemp("dropout")
    outside, everywhere = gpt2(folder, 0.0), gpt2(folder, 0.3)
    of_tp = {"gpt2 outside, tp without sp": (outside, TWO["tp without sp"])}
    of_tp |= {"gpt2 everywhere, tp without sp": (everywhere, TWO["tp without sp"])}
    runs: dict[int, dict[str, Any]] = {
        1: {"one": (gpt(0.3), {}), "gpt2 outside, one": (outside, {}), "gpt2 everywhere, one": (everywhere, {})},
        2: {name: (gpt(0.3), layout) for name, layout in TWO.items()} | of_tp,
        4: {name: (gpt(0.3), layout) for name, layout in FOUR.items()},
    }
    for ways, layouts in ((1, {"one": {}}), (2, TWO), (4, FOUR)):
        runs[ways] |= {f"plain {name}": (gpt(0.0), layout) for name, layout in layouts.items()}
    found: dict[str, float] = {}
    for ways, of_ranks in runs.items():
        args = {"folder": str(folder), "runs": of_ranks}
        found |= first_losses(args) if ways == 1 else run_ranks(first_losses, ways, args)[0]
    return found


def same(a: float, b: float) -> bool:
    """Are they equal but for rounding? Nothing in between is let pass."""
    difference = abs(a - b) / abs(b)
    assert difference < SAME or difference > OTHER, (a, b)
    return difference < SAME


def test_without_dropout_all_layouts_are_one(losses: dict[str, float]) -> None:
    """So what differs below is masks."""
    assert all(same(losses[f"plain {name}"], losses["plain one"]) for name in (*TWO, *FOUR))
    assert not same(losses["one"], losses["plain one"])


def test_which_layouts_have_the_masks_of_one_process(losses: dict[str, float]) -> None:
    alike = {name for name in (*TWO, *FOUR) if same(losses[name], losses["one"])}
    assert alike == {"dp", "zero 2", "zero 3", "replicas"}


def test_which_have_those_of_each_other(losses: dict[str, float]) -> None:
    """Streams are seeded by micro-batch and stage, whatever the schedule, and whoever has the stage."""
    assert same(losses["gpipe"], losses["1f1b"]) and same(losses["zero-bubble"], losses["1f1b"])
    assert same(losses["two stages a rank"], losses["four stages"])
    assert same(losses["zero-bubble, two stages a rank"], losses["four stages"])
    assert not same(losses["four stages"], losses["1f1b"])
    assert same(losses["tp without sp, replicas"], losses["tp without sp"])
    assert not same(losses["tp"], losses["tp without sp"])


def test_without_sequence_parallelism_only_attention_draws_others(losses: dict[str, float]) -> None:
    """Each rank lends it a stream; a model that has no dropout there has one process's masks."""
    assert same(losses["gpt2 outside, tp without sp"], losses["gpt2 outside, one"])
    assert not same(losses["gpt2 everywhere, tp without sp"], losses["gpt2 everywhere, one"])
