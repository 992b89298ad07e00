"""One rank is asked to stop: all stop after the same step, with no message for it; and what gloo groups open."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from benchmarks.rank_sockets import checkpoint_sockets
from test_train_ranks import curve, finished, latest, recipe
from torch.distributed import distributed_c10d as c10d

from jettison.cli.train import train
from jettison.train import loop
from jettison.train.recipe import BatchSection, CheckpointSection, LayoutSection, ModelSection, TrainRecipe
from support.patience import PATIENCE
from support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, ranks: int) -> None:
    """The signal comes in the middle of step 3 of the last rank; the others hear of it in that step's sum."""
    whole, cut = (replace(recipe(tmp_path / name, steps=6), batch=_batch(ranks)) for name in ("whole", "cut"))
    cut = replace(cut, checkpoint=CheckpointSection(folder=str(tmp_path / "cut" / "ck")))  # none but the last
    code, out = finished(whole, tmp_path / "whole", ranks)
    assert code == 0, out
    code, out = finished(cut, tmp_path / "cut", ranks, JETTISON_FAULT=f"term-step:{ranks - 1}:3")
    assert code == 0, out
    assert "stopped by a signal to another rank after 3 steps" in out.splitlines()[0], out
    assert latest(tmp_path / "cut") == 3 and list(curve(tmp_path / "cut")) == [1, 2, 3]
    code, out = finished(cut, tmp_path / "cut", ranks)
    assert code == 0 and "resumed at 3" in out, out
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole"), "to the bit"


def _batch(ranks: int) -> BatchSection:
    """Two micro-batches a rank, as the fault counts them."""
    return BatchSection(global_batch=4 * ranks, micro_batch=2, seq=32)


# collectives and sockets ----------------------------------------------------------------------------------------------


@contextmanager
def counting(counts: list[dict[str, int]]) -> Iterator[None]:
    """What every group of this rank has begun when a step begins."""
    before = loop.set_rate

    def look(*args: Any) -> None:
        groups = [group for group in c10d._world.pg_map if "fake" not in c10d.get_backend(group)]
        counts.append({g.group_name: g._get_sequence_number_for_group() for g in groups if g.size() == size})
        before(*args)

    size = torch.distributed.get_world_size()
    loop.set_rate = look  # type: ignore[attr-defined]
    try:
        yield
    finally:
        loop.set_rate = before  # type: ignore[attr-defined]


def four(args: dict[str, Any]) -> dict[str, Any]:
    """On each rank: the collectives over all ranks of each step, where the model's own go over other groups."""
    made = TrainRecipe(
        model=ModelSection(architecture="gpt", layers=2, hidden=32, heads=4),
        batch=BatchSection(global_batch=4, micro_batch=2, seq=16),
        steps=5,
        layout=LayoutSection(tp=2, zero=2),
        checkpoint=CheckpointSection(folder=str(Path(args["folder"]) / "ck")),
        log=replace(recipe(Path(args["folder"])).log, every=1),
    )
    counts: list[dict[str, int]] = []
    with counting(counts):
        train(made)
    steps = [sum(later[name] - earlier[name] for name in later) for earlier, later in itertools.pairwise(counts)]
    return {"groups": len(counts[0]), "steps": steps}


def test_a_step_has_one_sum_over_all_ranks(tmp_path: Path) -> None:
    """It was two, and three where a line of the log was written: of the norm, of flags, of the loss."""
    for rank in run_ranks(four, 4, {"folder": str(tmp_path)}):
        assert rank["groups"] == 2, "that of the steps, and that of checkpoints"
        assert rank["steps"] == [1, 1, 1, 1]


@pytest.mark.slow
def test_sockets_of_a_checkpoint_are_those_that_the_benchmark_computes() -> None:
    """Eight processes save and load with torch's checkpoints, over groups as a run makes them."""
    command = [sys.executable, "-m", "benchmarks.rank_sockets", "8"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["steps"]) == 2, "two neighbours in a ring"
    assert found["checkpoint"][0] == 7
    assert max(found["checkpoint"][1:]) <= checkpoint_sockets(8) == 5
    assert found["at once"] == [7] * 8
