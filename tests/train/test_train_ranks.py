"""`jettison train` on real ranks: the same curve on one and on two, through kill -9, signals and other layouts.

Every launch is the command itself under torchrun; what it did is read from its log and its checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.parallel.styles import can_split_backward
from jettison.solve.plan import Plan
from jettison.train import setup
from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    LayoutSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    PlanSection,
    TrainRecipe,
)
from support.patience import PATIENCE
from support.rank_server import Launch
from support.ranks import torchrun

TESTS = Path(__file__).resolve().parents[1]
STEPS = 8
_NOWHERE = CheckpointSection()


def recipe(folder: Path, *, factory: str = "support.train_models:tiny64", steps: int = STEPS) -> TrainRecipe:
    """fp64 with dropout; on two ranks each has two micro-batches a step."""
    return TrainRecipe(
        model=ModelSection(factory=factory),
        batch=BatchSection(global_batch=8, micro_batch=2, seq=32),
        steps=steps,
        optimizer=OptimizerSection(lr=3e-3, warmup_steps=2, decay_steps=STEPS),
        checkpoint=CheckpointSection(folder=str(folder / "ck"), every=2, keep=9),
        log=LogSection(folder=str(folder / "log"), memory_steps=0),
    )


@contextmanager
def launched(made: TrainRecipe, folder: Path, ranks: int, **environment: str) -> Iterator[Launch]:
    """`torchrun -m jettison train`; nothing of it is left afterwards."""
    folder.mkdir(exist_ok=True)
    (folder / "recipes_of_test.py").write_text(f"from jettison.train.recipe import *\nmade = {made!r}\n")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), str(folder)])
    whole: Mapping[str, str] = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    process = Launch([*torchrun(ranks)[1:], "-m", "jettison", "train", "recipes_of_test:made"], whole)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def finished(made: TrainRecipe, folder: Path, ranks: int = 2, **environment: str) -> tuple[int, str]:
    """Exit code and everything that was written."""
    with launched(made, folder, ranks, **environment) as process:
        out, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, out


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    entries = map(json.loads, (folder / "log" / "log.jsonl").read_text("utf-8").splitlines())
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in entries if e["event"] == "step"}


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ck").iterdir())


def latest(folder: Path) -> int:
    return max(int(path.parent.name.removeprefix("step-")) for path in (folder / "ck").glob("step-????????/run.json"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    code, out = finished(recipe(folder), folder)
    assert code == 0, out
    assert out.splitlines()[0] == f"done: {STEPS} steps", out  # said once, and no warning
    return folder


def test_two_ranks_are_one_process(whole: Path, tmp_path: Path) -> None:
    """Every loss and the norm of every gradient, with dropout: micro-batches have the seeds of their positions."""
    train(recipe(tmp_path))
    alone, together = curve(tmp_path), curve(whole)
    assert list(alone) == list(together) == list(range(1, STEPS + 1))
    for step in alone:
        assert together[step] == pytest.approx(alone[step], rel=1e-12)


def test_kill_9_in_a_step_and_in_a_save(whole: Path, tmp_path: Path) -> None:
    """The curve goes on as if nothing had happened, to the bit: the same data, the same dropout."""
    made = recipe(tmp_path)
    code, out = finished(made, tmp_path, JETTISON_FAULT="kill-step:1:6")
    assert code != 0 and "another rank has gone during step 6" in out
    assert max(curve(tmp_path)) == 5
    newest = latest(tmp_path)
    assert newest in (2, 4)  # the second may have been on its way

    code, out = finished(made, tmp_path, JETTISON_FAULT="kill-save:1:2")
    assert code != 0
    assert latest(tmp_path) == newest + 2  # the first save of that process; the second one was never finished
    assert (tmp_path / "ck" / f"step-{newest + 2:08d}" / "run.json").exists()

    code, out = finished(made, tmp_path)
    assert code == 0, out
    said = [line for line in out.splitlines() if not line.startswith("warning: ")]  # of locks, where rank 0 was killed
    assert "resumed at " in said[0]
    assert curve(tmp_path) == curve(whole)
    assert not [name for name in saved(tmp_path) if name.endswith(".partial")]
    assert latest(tmp_path) == STEPS


def test_resuming_on_another_number_of_ranks(whole: Path, tmp_path: Path) -> None:
    """From two ranks to one: the same sequences, and the same dropout, since micro-batches are the same."""
    shutil.copytree(whole / "ck", tmp_path / "ck")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "ck" / f"step-{step:08d}")
    result = train(recipe(tmp_path), must_resume=True)
    assert result.resumed_step == 4
    for step, values in curve(tmp_path).items():
        assert values == pytest.approx(curve(whole)[step], rel=1e-12)


def test_tensor_parallel_ranks_under_a_budget(tmp_path: Path) -> None:
    """Two ranks that share each layer have one process's curve; one process goes on from their checkpoint."""
    model = ModelSection(architecture="gpt", layers=3, hidden=64, heads=4)  # without dropout: each rank draws its own
    batch = BatchSection(global_batch=4, micro_batch=4, seq=64)
    alone = replace(recipe(tmp_path / "alone"), model=model, batch=batch)
    train(alone)
    shared = replace(recipe(tmp_path / "shared", steps=4), model=model, batch=batch, layout=LayoutSection(tp=2))
    log = LogSection(folder=str(tmp_path / "some" / "log"))
    made = replace(shared, plan=PlanSection(budget="3.2MiB"), log=log)
    code, out = finished(made, tmp_path / "some")
    assert code == 0, out
    end = json.loads((tmp_path / "some" / "log" / "log.jsonl").read_text().splitlines()[-1])
    assert max(end["second_step_peak_bytes"].values()) <= 3.2 * 2**20
    assert end["predicted_peak_bytes"] <= 3.2 * 2**20
    result = train(replace(recipe(tmp_path / "shared"), model=model, batch=batch), must_resume=True)
    assert result.resumed_step == 4
    expected = curve(tmp_path / "alone")
    for step, values in (curve(tmp_path / "some") | curve(tmp_path / "shared")).items():
        assert values == pytest.approx(expected[step], rel=2e-4)


@pytest.mark.slow
def test_ranks_that_share_parameters_send_tensors_to_their_host(tmp_path: Path, slow_memory: Path) -> None:
    made = recipe(tmp_path / "plain", steps=3)
    made = replace(made, model=ModelSection(architecture="gpt", layers=4, hidden=64, heads=4, dropout=0.1))
    made = replace(made, batch=BatchSection(global_batch=8, micro_batch=4, seq=64), layout=LayoutSection(zero=3))
    code, out = finished(made, tmp_path / "plain")
    assert code == 0, out
    log = LogSection(folder=str(tmp_path / "sent" / "log"))
    section = PlanSection(budget="4.4MiB", offload=True, gpu=str(slow_memory))
    made = replace(made, checkpoint=CheckpointSection(), plan=section, log=log)
    code, out = finished(made, tmp_path / "sent")
    assert code == 0, out
    assert curve(tmp_path / "sent") == curve(tmp_path / "plain")
    plan = Plan.from_json((tmp_path / "sent" / "log" / "plan.json").read_text())
    assert any(entry.offloaded for entry in plan.layers)
    end = json.loads((tmp_path / "sent" / "log" / "log.jsonl").read_text().splitlines()[-1])
    assert max(end["second_step_peak_bytes"].values()) <= 4.4 * 2**20


@pytest.mark.slow
def test_four_ranks_change_their_layout_and_keep_their_curve(tmp_path: Path) -> None:
    """Pipeline beside tensor parallelism, then FSDP beside it, each with a policy of its own, from one checkpoint."""
    model = ModelSection(architecture="gpt", layers=4, hidden=64, heads=4)
    batch = BatchSection(global_batch=8, micro_batch=2, seq=64)
    train(replace(recipe(tmp_path / "alone", steps=6), model=model, batch=batch))
    pipeline = LayoutSection(pp=2, tp=2, schedule="zero-bubble", sp=can_split_backward())
    for steps, layout, policy in ((3, pipeline, "full"), (6, LayoutSection(tp=2, zero=3), "selective")):
        made = replace(recipe(tmp_path, steps=steps), model=model, batch=batch, layout=layout)
        code, out = finished(replace(made, plan=PlanSection(policy=policy)), tmp_path, ranks=4)
        assert code == 0, out
    assert "resumed at 3" in out
    expected, found = curve(tmp_path / "alone"), curve(tmp_path)
    assert list(found) == list(range(1, 7))
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-4)


def test_layers_that_torch_would_lose_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 does, for sequence-parallel ones under a schedule that splits backward; what is offered is taken."""
    monkeypatch.setattr(setup, "can_split_backward", lambda: False)
    lost = LayoutSection(pp=2, tp=2, schedule="zero-bubble")
    with pytest.raises(UsageError, match="expected sp = false with the schedule zero-bubble, the schedule 1f1b, or"):
        setup._layout(replace(recipe(tmp_path), layout=lost), 4)
    for changed in (replace(lost, sp=False), replace(lost, schedule="1f1b")):
        assert setup._layout(replace(recipe(tmp_path), layout=changed), 4)[0].tp == 2


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_replicas_of_shards_are_one_process(tmp_path: Path, zero: Literal[2, 3]) -> None:
    """Two replicas, each spread over two ranks; one process has their curve, and goes on from their checkpoint."""
    made = recipe(tmp_path, steps=4)
    made = replace(made, batch=replace(made.batch, micro_batch=1))  # each rank has two in a step
    train(replace(recipe(tmp_path / "alone"), batch=made.batch))
    code, out = finished(replace(made, layout=LayoutSection(zero=zero, shards=2)), tmp_path, ranks=4)
    assert code == 0, out
    result = train(replace(recipe(tmp_path), batch=made.batch), must_resume=True)
    assert result.resumed_step == 4
    expected, found = curve(tmp_path / "alone"), curve(tmp_path)
    assert list(found) == list(range(1, STEPS + 1))
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.slow)])
def test_autocast_in_a_pipeline(tmp_path: Path, schedule: Literal["1f1b", "zero-bubble"]) -> None:
    """Forwards of all stages are under it, and backwards are not: the first loss of one process to the bit."""
    model = ModelSection(architecture="gpt", layers=4, hidden=64, heads=4)
    batch = BatchSection(global_batch=8, micro_batch=2, seq=64)
    alone = replace(recipe(tmp_path / "alone", steps=3), model=model, batch=batch, precision="bf16-autocast")
    train(alone)
    train(replace(alone, precision="fp32", log=LogSection(folder=str(tmp_path / "wide" / "log")), checkpoint=_NOWHERE))
    layout, plan = LayoutSection(pp=2, schedule=schedule), PlanSection(policy="full")
    made = replace(recipe(tmp_path, steps=3), model=model, batch=batch, precision="bf16-autocast")
    code, out = finished(replace(made, layout=layout, plan=plan), tmp_path)
    assert code == 0, out
    expected, found, wide = curve(tmp_path / "alone"), curve(tmp_path), curve(tmp_path / "wide")
    assert found[1][0] == expected[1][0] != wide[1][0]
    assert found[1][1] == pytest.approx(expected[1][1], rel=1e-6)  # gradients are added up in another order
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-3)


@pytest.mark.parametrize("layers", [(3, 1), pytest.param((0, 4), marks=pytest.mark.slow)])
def test_an_uneven_pipeline_under_a_budget(tmp_path: Path, layers: tuple[int, ...]) -> None:
    """One process's curve; the stage with more layers predicts more, and no rank takes more than was predicted."""
    model = ModelSection(architecture="gpt", layers=4, hidden=64, heads=4)
    batch = BatchSection(global_batch=8, micro_batch=2, seq=64)
    alone = replace(recipe(tmp_path / "alone", steps=3), model=model, batch=batch)
    train(alone)
    layout = LayoutSection(pp=2, stage_layers=layers)
    made = replace(recipe(tmp_path, steps=3), model=model, batch=batch, layout=layout, plan=PlanSection(budget="16MiB"))
    code, out = finished(replace(made, log=replace(made.log, memory_steps=1)), tmp_path)
    assert code == 0, out
    expected, found = curve(tmp_path / "alone"), curve(tmp_path)
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-5)
    assert "predicted" in out


def test_a_signal_to_the_launcher(tmp_path: Path) -> None:
    """Both ranks finish the same step and save, though only the launcher was told."""
    made = replace(recipe(tmp_path, steps=10_000), checkpoint=CheckpointSection(folder=str(tmp_path / "ck")))
    with launched(made, tmp_path, 2, JETTISON_FAULT="slow:1:0.1") as process:
        end = time.monotonic() + PATIENCE
        while not (tmp_path / "log" / "log.jsonl").exists() or len(curve(tmp_path)) < 2:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
    assert "stopped by SIGTERM after " in out
    last = max(curve(tmp_path))
    assert latest(tmp_path) == last


def test_a_recipe_for_other_ranks_is_a_usage_error(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    wrong = replace(made, batch=replace(made.batch, global_batch=6))
    code, out = finished(wrong, tmp_path)
    assert code != 0
    assert "no multiple of micro_batch x dp = 2 x 2 = 4" in out
    assert out.count("jettison: batch:") == 1
    assert not (tmp_path / "ck").exists()
