"""A tiny recipe, its log, and `jettison train` of it in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    TrainRecipe,
)

TESTS = Path(__file__).resolve().parents[1]


def tiny(folder: Path, **more: Any) -> TrainRecipe:
    """8 steps of a model with dropout, two micro-batches each."""
    values: dict[str, Any] = {
        "model": ModelSection(factory="support.train_models:tiny"),
        "batch": BatchSection(global_batch=4, micro_batch=2, seq=32),
        "steps": 8,
        "optimizer": OptimizerSection(lr=3e-3, warmup_steps=2),
        "checkpoint": CheckpointSection(folder=str(folder / "ck"), every=2),
        "log": LogSection(folder=str(folder / "log"), memory_steps=0),
    }
    return TrainRecipe(**values | more)


def gpt(folder: Path, **more: Any) -> TrainRecipe:
    """A GPT with eager attention and dropout: one that has something to drop."""
    model = ModelSection(
        architecture="gpt", layers=3, hidden=64, heads=4, dropout=0.1, attention="eager", code="huggingface"
    )
    values = {"model": model, "checkpoint": CheckpointSection(), "log": LogSection(folder=str(folder / "log"))}
    return tiny(folder, **values | {"steps": 2, "batch": BatchSection(global_batch=4, micro_batch=4, seq=64)} | more)


def lines(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    text = (folder / "log" / "log.jsonl").read_text("utf-8")
    return [entry for entry in map(json.loads, text.splitlines()) if entry["event"] == event]


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in lines(folder)]


def command(recipe: TrainRecipe, folder: Path) -> list[str]:
    """`jettison train` in a process of its own."""
    (folder / "recipes_of_test.py").write_text(f"from jettison.train.recipe import *\nmade = {recipe!r}\n")
    return [sys.executable, "-m", "jettison", "train", "recipes_of_test:made"]


def environment(folder: Path, **more: str) -> Mapping[str, str]:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), str(folder)])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def tensors_of(path: Path) -> dict[str, list[float]]:
    """A checkpoint's tensors, through torch's own converter."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = path.parent / "whole.pt"
    dcp_to_torch_save(path, file)
    return {name: value.flatten().tolist() for name, value in torch.load(file, weights_only=True).items()}
