"""What thousands of ranks say to each other, counted without any of them: store calls, bytes, sockets, collectives.

    python -m benchmarks.ranks [--before COMMIT] [--json benchmarks/results/ranks.json]

The agreement of `jettison.parallel.recompute_agreement`, and the words of `jettison.train.ranks`, run as they are, one
rank after the other in one process, against a store that counts. Ranks speak from the last to the first, so that nobody
waits; what ranks ask while they wait is not counted (NOTE [ Waiting ]). With ``--before`` the agreement of an older
commit is counted the same way; without it, its figures stay as they are in the file.

Sockets are computed (benchmarks/rank_sockets.py); a test compares the formula with real processes.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jettison
from benchmarks.rank_sockets import sockets
from jettison.parallel.recompute_agreement import Round
from jettison.train.rank_plan import RankDecision
from jettison.train.ranks import World

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "ranks.json"
SIZES = (64, 4096, 16384)
TP, PP = 8, 8
REGIONS = 127
"""Of the model that ranks agree on: 126 blocks, as Llama 405B has them, and the rest."""


class Waits(RuntimeError):
    """A rank would wait for what no rank has said."""


class CountingStore:
    """A store in memory. ``rank`` is whose call it is; set it before each."""

    def __init__(self) -> None:
        self.rank = 0
        self.calls: Counter[str] = Counter()
        self.calls_of: Counter[int] = Counter()
        self.bytes_of: Counter[int] = Counter()
        self.longest_key = 0
        self._held: dict[int, tuple[int, bytes]] = {}  # by the key's hash: keys of old are long

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._count("set", [key], len(data))
        self._held[hash(key)] = len(key), data

    def get(self, key: str) -> bytes:
        self._require([key])
        data = self._held[hash(key)][1]
        self._count("get", [key], len(data))
        return data

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._require(keys)
        found = [self._held[hash(key)][1] for key in keys]
        self._count("multi_get", keys, sum(map(len, found)))
        return found

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count("wait", keys, 0)
        self._require(keys)

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys, 0)
        self._require(keys)
        return True

    def delete_key(self, key: str) -> bool:
        self._count("delete", [key], 0)
        return self._held.pop(hash(key), None) is not None

    def found(self) -> dict[str, int]:
        """What was counted."""
        return {
            "calls": self.calls.total(),
            "bytes": self.bytes_of.total(),
            "most_calls_of_a_rank": max(self.calls_of.values()),
            "most_bytes_of_a_rank": max(self.bytes_of.values()),
            "longest_key_bytes": self.longest_key,
            "left_bytes": sum(length + len(data) for length, data in self._held.values()),
        }

    def _require(self, keys: list[str]) -> None:
        missing = [key for key in keys if hash(key) not in self._held]
        if missing:
            raise Waits(f"rank {self.rank} waits for {missing[0][-40:]}")

    def _count(self, name: str, keys: list[str], more: int) -> None:
        self.calls[name] += 1
        self.calls_of[self.rank] += 1
        self.bytes_of[self.rank] += sum(map(len, keys)) + more
        self.longest_key = max(self.longest_key, *map(len, keys))


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the ranks of a group say in one agreement: digests by region; a number each; a plan, by the first."""

    digests: Mapping[str, str]
    plan: str


def now(ranks: Sequence[int], words: Words, store: CountingStore) -> None:
    """One agreement of a group, by the code of this tree."""
    rounds = {rank: Round(tuple(ranks), 300.0, rank=rank, store=store, number=1) for rank in ranks}

    def each(order: Iterable[int], do: Callable[[Round], object]) -> None:
        for store.rank in order:
            do(rounds[store.rank])

    each(reversed(ranks), lambda one: one.send(one.rank, min))
    each(ranks, lambda one: one.receive("0"))
    each(ranks[:1], lambda one: one.publish("plan", words.plan))
    each(ranks[1:], lambda one: one.published("plan"))
    each(reversed(ranks), lambda one: one.send_digests(words.digests))
    each(ranks, lambda one: one.receive_digests("1"))


def before(source: str) -> Callable[[Sequence[int], Words, CountingStore], None]:
    """The same, by an agreement in which the first rank of a group reads what each of the others has set."""
    module = types.ModuleType("agree_before")
    sys.modules[module.__name__] = module
    exec(compile(source, "agree_before", "exec"), module.__dict__)

    def run(ranks: Sequence[int], words: Words, store: CountingStore) -> None:
        asking = types.SimpleNamespace(
            get_rank=lambda: store.rank,
            distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: store),
            DistStoreError=(),
        )
        module.__dict__["distributed"] = asking

        module._rounds.clear()  # type: ignore[attr-defined]
        first = module._Round(tuple(ranks), 300.0)  # type: ignore[attr-defined]

        def each(order: Iterable[int], do: Callable[[Any], object]) -> None:
            for store.rank in order:
                one = copy(first)  # all have one key, which takes long to make
                one.rank = store.rank
                do(one)

        def say_number(one: Any) -> None:
            one.store.set(f"{one.key}/number/{one.rank}", str(one.rank))

        each(ranks[1:], say_number)  # the first half of `least`, and its second: one call waits in between
        each(ranks[:1], lambda one: one.least(one.rank))
        each(ranks[1:], lambda one: one._get("least", 1))
        each(ranks[:1], lambda one: one.hand_out(words.plan))
        each(ranks[1:], lambda one: one.published())
        each(ranks, lambda one: one.send(words.digests))
        each(ranks, lambda one: one.wait())

    return run


def groups(size: int) -> dict[str, list[range]]:
    """Ranks that share parameters: all; those of a pipeline stage (FSDP2 beside tensor parallelism); those that share
    layers.
    """
    stage = size // PP
    return {
        "all": [range(size)],
        "stage": [range(first, first + stage) for first in range(0, size, stage)],
        "tp": [range(first, first + TP) for first in range(0, size, TP)],
    }


def agreements(size: int, words: Words, agree: Callable[[Sequence[int], Words, CountingStore], None]) -> dict[str, Any]:
    """Counts of a job in which every group of one kind agrees once."""
    found = {}
    for name, every in groups(size).items():
        store = CountingStore()
        for ranks in every:
            agree(ranks, words, store)
        found[name] = store.found()
    return found


# what `jettison train` says -------------------------------------------------------------------------------------------


def worlds(size: int, store: CountingStore) -> list[World]:
    """Every rank's."""
    device = torch.device("cpu")
    return [World(store, rank=rank, size=size, device=device, key="jettison/run/0") for rank in range(size)]


def together(size: int) -> dict[str, int]:
    """Did something go wrong anywhere? Asked some fifteen times before the first step, and once a checkpoint."""
    store = CountingStore()
    every = worlds(size, store)
    for world in reversed(every):
        store.rank = world.rank
        topic, _ = world.send(None, lambda found: next((one for one in found if one is not None), None))
    for world in every:
        store.rank = world.rank
        world.receive(topic)
    return store.found()


def handing_out_plans(size: int, decision: RankDecision) -> dict[str, int]:
    """One rank of each stage has a plan for all of it; rank 0 keeps those of all stages."""
    store = CountingStore()
    every = worlds(size, store)
    stages = groups(size)["stage"]
    for stage, ranks in enumerate(stages):
        store.rank = ranks[0]
        every[ranks[0]].publish(f"plan of stage {stage}", decision)
    for stage, ranks in enumerate(stages):
        for store.rank in ranks:
            for known in range(PP) if store.rank == 0 else (stage,):
                every[store.rank].published(f"plan of stage {known}")
    return store.found()


def gathering_plans(size: int, decision: RankDecision) -> dict[str, int]:
    """As it was: an all_gather_object of decisions, for which torch pads what each rank has to the longest."""
    each = size * (len(pickle.dumps(decision)) + 8)
    return {"bytes": size * each, "most_bytes_of_a_rank": each}


def collectives(*, before: bool) -> dict[str, int]:
    """Over all ranks in a step, for what is not the model's: the norm; the flags; each line of the log."""
    return {"a step": 2 if before else 1, "a line of the log": 1 if before else 0}


# the table ------------------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """So many blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        sizes = (16, 32), (32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(*sizes[0]), nn.GELU(), nn.Linear(*sizes[1])) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum()


def planned() -> RankDecision:
    """A plan of as many blocks as ranks are taken to agree on, as a planning rank hands it out."""
    torch.manual_seed(0)
    model, batch = Toy(REGIONS - 1), torch.randn(8, 16)
    parameters = sum(p.nbytes for p in model.parameters())
    with jettison.auto_checkpoint(model, batch, f"{2 * parameters + 300_000}B") as handle:
        assert handle.plan is not None
        return RankDecision(plans=(handle.plan,), likenesses=("0" * 64,))


def count(size: int, decision: RankDecision, source: str | None) -> dict[str, Any]:
    """All figures of so many ranks; ``source`` is of the agreement before, without which only those of now."""
    words = Words(
        digests={f"model.layers.{number}": f"{number:016x}" for number in range(REGIONS)},
        plan=decision.plans[0].to_json(),
    )
    axes = TP, PP, size // (TP * PP)
    found: dict[str, Any] = {
        "now": {
            "agreement": agreements(size, words, now),
            "together": together(size),
            "plans": handing_out_plans(size, decision),
            "sockets": {device: sockets(size, axes, before=False, device=device) for device in ("cpu", "cuda")},
            "collectives": collectives(before=False),
        }
    }
    if source is not None:
        found["before"] = {
            "agreement": agreements(size, words, before(source)),
            "plans": gathering_plans(size, decision),
            "sockets": {device: sockets(size, axes, before=True, device=device) for device in ("cpu", "cuda")},
            "collectives": collectives(before=True),
        }
    return found


def table(found: Mapping[str, Any]) -> str:
    """A row for each figure: before and now, at each number of ranks."""
    sizes = [int(size) for size in found["ranks"]]
    lines = [
        f"| {'ranks'} | {' | '.join(f'{size:,} before | {size:,} now' for size in sizes)} |",
        f"| --- | {' | '.join(['---: | ---:'] * len(sizes))} |",
    ]
    for title, path in ROWS:
        cells = []
        for size in found["ranks"].values():
            cells += [_cell(size.get("before", {}), path), _cell(size["now"], path)]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


ROWS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("one agreement of all: calls of the store", ("agreement", "all", "calls")),
    ("· bytes through the store", ("agreement", "all", "bytes")),
    ("· most calls of a rank", ("agreement", "all", "most_calls_of_a_rank")),
    ("· most bytes of a rank", ("agreement", "all", "most_bytes_of_a_rank")),
    ("· longest key, bytes", ("agreement", "all", "longest_key_bytes")),
    ("· left in the store, bytes", ("agreement", "all", "left_bytes")),
    ("one agreement in each stage (an eighth of the ranks): calls", ("agreement", "stage", "calls")),
    ("· bytes through the store", ("agreement", "stage", "bytes")),
    ("· most calls of a rank", ("agreement", "stage", "most_calls_of_a_rank")),
    ("one agreement in each group of 8: calls", ("agreement", "tp", "calls")),
    ("· bytes through the store", ("agreement", "tp", "bytes")),
    ("`train`: plans reach all ranks, bytes", ("plans", "bytes")),
    ("· most bytes of a rank", ("plans", "most_bytes_of_a_rank")),
    ("`train`: did anything fail? calls of the store", ("together", "calls")),
    ("· bytes through the store", ("together", "bytes")),
    ("· most calls of a rank", ("together", "most_calls_of_a_rank")),
    ("`train` on CPUs: gloo's sockets of rank 0", ("sockets", "cpu", "rank 0")),
    ("· of another rank, at most", ("sockets", "cpu", "another")),
    ("`train` on GPUs: gloo's sockets of rank 0", ("sockets", "cuda", "rank 0")),
    ("· of another rank, at most", ("sockets", "cuda", "another")),
    ("sums over all ranks in a step", ("collectives", "a step")),
    ("· one more for a line of the log", ("collectives", "a line of the log")),
)


def _cell(values: Any, path: Sequence[str]) -> str:
    for name in path:
        values = values.get(name, {}) if isinstance(values, Mapping) else {}
    return f"{values:,}" if isinstance(values, int) else ""


def write(found: Mapping[str, Any], result: Path) -> None:
    """Write the figures, and a table of them."""
    result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = table(found)
    result.with_suffix(".md").write_text(f"# {TITLE}\n\n{found['what']}\n\n{text}", encoding="utf-8")


TITLE = "What thousands of ranks say"


def main(arguments: list[str]) -> None:
    """Count, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", metavar="COMMIT", help="of an agreement without a tree, to be counted as well")
    parser.add_argument("--json", type=Path, default=RESULT)
    given = parser.parse_args(arguments)
    source, known = None, {}
    if given.before:
        place = f"{given.before}:src/jettison/parallel/recompute_agreement.py"
        source = subprocess.run(["git", "show", place], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    elif given.json.exists():
        known = json.loads(given.json.read_text("utf-8"))
    decision = planned()
    found: dict[str, Any] = {
        "what": f"Counted by `python -m benchmarks.ranks`; tp {TP}, pp {PP}, the rest dp; {REGIONS} regions; a plan of "
        f"{len(pickle.dumps(decision)):,} bytes. Before is commit {given.before or known.get('before_commit')}.",
        "before_commit": given.before or known.get("before_commit"),
        "ranks": {},
    }
    for size in SIZES:
        figures = count(size, decision, source)
        if source is None:
            figures["before"] = known.get("ranks", {}).get(str(size), {}).get("before", {})
        found["ranks"][str(size)] = figures
        print(size, json.dumps(figures), flush=True)
    write(found, given.json)


if __name__ == "__main__":
    main(sys.argv[1:])
