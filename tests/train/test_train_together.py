"""Ranks that go wrong alone: each is named, all say the same, and the same job can train again."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from test_train_ranks import curve, finished
from test_train_ranks import recipe as tiny
from torch import distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from jettison.cli.train import train
from jettison.core.errors import JettisonError
from jettison.train.ranks import World
from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    DataSection,
    LayoutSection,
    LogSection,
    ModelSection,
    TrainRecipe,
)
from support.patience import PATIENCE
from support.ranks import run_ranks

GPT = ModelSection(architecture="gpt", layers=2, hidden=32, heads=4)
HUB = replace(GPT, code="huggingface", attention="sdpa")
WHOLE, HALVES = (BatchSection(global_batch=4, micro_batch=size, seq=16) for size in (4, 2))


def recipe(folder: Path, **more: Any) -> TrainRecipe:
    values: dict[str, Any] = {
        "model": GPT,
        "batch": BatchSection(global_batch=4, micro_batch=2, seq=16),
        "steps": 3,
        "checkpoint": CheckpointSection(folder=str(folder / "ck"), every=1, keep=9),
        "log": LogSection(folder=str(folder / "log"), memory_steps=0),
    }
    return TrainRecipe(**values | more)


class Spoilt(nn.Module):
    """Its second loss on rank 1 is NaN; gradients are of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(self.head(self.words(input_ids)).flatten(0, 1), labels.flatten())
        return loss * float("nan") if self.calls == 2 and os.environ["RANK"] == "1" else loss


class Asleep(Spoilt):
    """Rank 1 does not come back from its first forward until the other has given up."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        end = time.monotonic() + PATIENCE / 2
        while os.environ["RANK"] == "1" and not Path("given up").exists() and time.monotonic() < end:
            time.sleep(0.05)
        return super().forward(input_ids, labels)


ASLEEP = ModelSection(factory="test_train_together:Asleep")
SPOILT = ModelSection(factory="test_train_together:Spoilt")


def refused(made: TrainRecipe) -> str:
    """What is said, and of which kind it is."""
    try:
        train(made)
    except JettisonError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def texts(folder: Path) -> dict[str, str]:
    """Each rank has another file under one name: of another length, or with another token in the middle."""
    rank, out = int(os.environ["RANK"]), {}
    for name, change in (("shorter", lambda data: data[:-1]), ("middle", lambda data: [*data[:500], 1, *data[501:]])):
        place = folder / name / str(rank)
        place.mkdir(parents=True)
        os.chdir(place)
        data = [7] * 1000
        Path("text.bin").write_bytes(bytes(change(data) if rank else data))
        out[name] = refused(recipe(folder / name, data=DataSection(kind="bytes", files=("text.bin",))))
    os.chdir(folder)
    return out


def probe(folder: Path) -> str:
    """Rank 1 alone cannot write."""
    from jettison.train import run_folder

    before: Callable[..., None] = run_folder.write_durably

    def full(path: Path, text: str) -> None:
        if path.name == "probe-1.partial":
            raise OSError(28, "No space left on device")
        before(path, text)

    run_folder.write_durably = full
    try:
        return refused(recipe(folder / "probe"))
    finally:
        run_folder.write_durably = before


def held() -> dict[str, int]:
    """What a run could leave behind in its process."""
    gc.collect()
    found = {"groups": len(c10d._world.pg_map), "threads": threading.active_count()}
    if torch.__version__ < "2.13":  # DTensor's ops leak their meshes there, with their sockets and a tensor of ranks
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gc asks every object what it is
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    return found | {"files": len(os.listdir("/proc/self/fd")), "tensors": tensors}


def again(folder: Path) -> list[dict[str, int]]:
    """Runs of two kinds in one job, three times."""
    counts = []
    for turn in range(3):
        for name, layout in (("fsdp", LayoutSection(zero=3)), ("pp", LayoutSection(pp=2))):
            assert train(recipe(folder / f"{turn}{name}", layout=layout)).steps == 3
        counts.append(held())
    return counts


def own_groups(folder: Path, timeout: str) -> list[Any]:
    """As under torchrun: each run makes its process group and leaves nothing of it. In the last one a rank hangs."""
    dist.destroy_process_group()
    out: list[Any] = [train(recipe(folder / f"own{turn}", steps=1)).steps for turn in range(2)]
    os.chdir(folder)
    out += [refused(recipe(folder / "asleep", model=ASLEEP, timeout=timeout)), Path("given up").exists(), timeout]
    Path("given up").touch()
    assert not dist.is_initialized()
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore("others", store), rank=rank, world_size=size)
    return out


def alone(args: dict[str, Any]) -> dict[str, Any]:
    """On each of two ranks."""
    folder = Path(args["folder"])
    start = time.monotonic()
    out: dict[str, Any] = {"again": again(folder), "texts": texts(folder), "probe": probe(folder)}
    seconds = [(time.monotonic() - start) / 6]  # of a whole run, on this machine now
    dist.broadcast_object_list(seconds)
    out["own"] = own_groups(folder, f"{max(2, round(seconds[0]))}s")
    train(recipe(folder / "there", model=HUB, layout=LayoutSection(tp=2), batch=WHOLE, steps=2))
    for name, layout in (("tp", LayoutSection(tp=2)), ("tp-zero", LayoutSection(zero=3))):
        train(recipe(folder / name, model=HUB, layout=layout, batch=WHOLE if layout.tp > 1 else HALVES, steps=4))
    out["stop"] = refused(recipe(folder / "stop", model=SPOILT))
    skipped = train(recipe(folder / "skip", model=SPOILT, on_nan="skip"))
    out["skip"] = [skipped.steps, skipped.skipped_steps]
    out["loss"] = [skipped.last_loss, train(recipe(folder / "skip", model=SPOILT, steps=4)).first_loss]
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("together")
    train(recipe(folder / "one", model=HUB, batch=WHOLE, steps=2))
    for name in ("tp", "tp-zero"):
        shutil.copytree(folder / "one" / "ck", folder / name / "ck")
    out = run_ranks(alone, 2, {"folder": str(folder)})
    for name in ("one", "there"):
        train(recipe(folder / name, model=HUB, batch=WHOLE, steps=4), must_resume=True)
    return [*out, {name: curve(folder / name) for name in ("one", "there", "tp", "tp-zero")}]


@pytest.fixture(scope="module")
def ranks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return found[:2]


def test_ranks_with_other_texts_under_one_name_are_named(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["texts"]["shorter"].startswith("UsageError: data: rank 1 has another text than rank 0: 999 tokens")
        assert "rank 1 has another text than rank 0: 1000 tokens and 1000, of which some" in rank["texts"]["middle"]


def test_a_rank_that_cannot_write_is_heard_of_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["probe"].startswith("UsageError: checkpoint.folder: cannot write to ")
        assert "No space left on device" in rank["probe"]


def test_ranks_stop_and_skip_together(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["stop"].startswith("NotFinite: step 2: the loss is nan on rank 1, the norm of the gradient nan")
        assert "step-00000001" in rank["stop"]
        assert rank["skip"] == [3, 1]
        assert all(0 < loss < 10 for loss in rank["loss"])
    assert ranks[0]["loss"] == ranks[1]["loss"]


def test_a_job_can_train_again_and_again(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        _, second, third = rank["again"]
        assert third == second
        assert rank["own"][:2] == [1, 1]


def test_gpt2_goes_on_from_one_process_to_two_ranks_and_back(found: list[dict[str, Any]]) -> None:
    """Tensor parallelism cuts its projection of q, k and v in three: a checkpoint has it in either form."""
    curves = found[2]
    whole = curves["one"]
    assert list(whole) == [1, 2, 3, 4] and list(curves["tp"]) == list(curves["tp-zero"]) == [3, 4]
    for name in ("there", "tp", "tp-zero"):
        for step, values in curves[name].items():
            assert values == pytest.approx(whole[step], rel=1e-4), (name, step)


# who hangs ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_hangs_is_named_within_the_timeout(ranks: list[dict[str, Any]]) -> None:
    """One waits for the other no longer than was said; the other finds itself alone when it wakes up."""
    (said, late, timeout), (other, _, _) = (rank["own"][2:] for rank in ranks)
    assert said.startswith(
        f'RankLost: rank 1 did not come within timeout = "{timeout}", and the others wait in step 1; '
    )
    assert not late, "it waited until the other woke up"
    assert other.startswith("RankLost: another rank has gone during step 1: ")


@pytest.mark.slow
def test_the_command_names_a_rank_that_hangs(tmp_path: Path) -> None:
    made = replace(tiny(tmp_path, steps=2), timeout="15s")
    code, out = finished(made, tmp_path, JETTISON_FAULT=f"slow:1:{PATIENCE}")
    assert code != 0
    said = [line for line in out.splitlines() if line.startswith("jettison: rank 1 did not come within timeout")]
    assert said and 'timeout = "15s", and the others wait in step 1' in said[0], out
    assert "internal error" not in out and "rank 0 did" not in out


def test_whoever_waits_for_a_rank_that_waits_is_not_named() -> None:
    """0 waits for 1, and 2 for 0, in groups of their own; 3 has lost a connection and left. All but 1 time out."""
    store, found = dist.HashStore(), dict[int, list[int]]()
    timed, lost = RuntimeError("Timed out waiting 2000ms for recv"), RuntimeError("Connection closed by peer")

    def fails(rank: int, error: RuntimeError) -> None:
        world = World(store, rank=rank, size=4, device=torch.device("cpu"), key="run", seconds=1.0)
        found[rank] = world.absent(error)

    threads = [threading.Thread(target=fails, args=args) for args in ((0, timed), (2, timed), (3, lost))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [1], 2: [1], 3: []}
