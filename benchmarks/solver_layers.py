"""Gain of each layer of the solver: problems solved with it, and again with it switched off.

    python -m benchmarks.solver_layers [--sources described live chains] [--layers duals rounding ...]

*described*: stages of five models as `plan` asks about them, at two budgets, without copies and with 0 GiB to all of
the host's memory. *live*: small models that were traced. *chains*: 128 layers, alike and different, and random ones. A
row a layer: seconds that plans add (the sum, and how many plans got slower or faster), the largest gap, and the
processor's seconds. Plans and gaps are the same on every machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from jettison.core.errors import Infeasible
from jettison.core.units import GIB, MIB, Bytes
from jettison.predict.forecast import available_bytes
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search import auto_recompute
from jettison.solve import bound, host_budget, label_setting, solver
from jettison.solve.problem import Link, ProblemRegion, RegionOption, RootOption, StepProblem
from jettison.solve.shortest_path import least_of, walks
from jettison.spec.hardware import hardware
from jettison.spec.recompute import Mode, Recompute
from support.offload_cases import deep_offload
from support.plan_cases import deep_problem

Asked: TypeAlias = tuple[str, StepProblem, int]
"""Label, problem, and the budget in bytes."""

RUNS: Mapping[str, tuple[str, RunRequest]] = {
    "llama3-405b": ("h100-80gb", RunRequest(tp=8, pp=16, dp=8, micro_batch=1, micro_batches=16, seq=8192)),
    "gpt-175b": ("a100-80gb", RunRequest(tp=8, pp=8, dp=1, micro_batch=1, micro_batches=8, seq=2048)),
    "gemma2-27b": ("h100-80gb", RunRequest(tp=4, pp=2, dp=2, zero=1, micro_batch=1, micro_batches=4, seq=8192)),
    "qwen3-30b-a3b": (
        "h100-80gb",
        RunRequest(tp=2, pp=2, dp=8, ep=8, zero=1, micro_batch=1, micro_batches=4, seq=8192),
    ),
    "llama3-8b": ("h100-80gb", RunRequest(tp=1, dp=8, zero=3, micro_batch=1, seq=32768)),
}
LEAST, MOST_GAP = 1e-12, 0.005
"""Seconds that tell two plans apart, and the gap that a solution should have."""
HOSTS = (None, 0, 4, 16, 60, 1 << 10)
"""GiB of the host; None: no copies."""


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[StepProblem, int]]]:
    """What planners ask the solver."""
    asked: list[tuple[StepProblem, int]] = []
    choose = solver.choose

    def note(problem: StepProblem, budget: int, **known: Any) -> solver.Solution:
        asked.append((problem, budget))
        found: solver.Solution = choose(problem, budget, **known)
        return found

    with mock.patch.object(solver, "choose", note):
        yield asked


def described() -> Iterator[Asked]:
    """What the planner of described runs asks last about the first, a middle and the last stage."""
    for name, (device, request) in RUNS.items():
        run, gpu = resolve(model_spec(name), request).run, hardware(device)
        for host in HOSTS:
            planned = dataclasses.replace(run, recompute=Recompute(mode=Mode.AUTO, offload=host is not None))
            limit = None if host is None else host * GIB
            for share in (1.0, 0.85):
                with recorded() as asked, contextlib.suppress(Infeasible):
                    budget = int(share * available_bytes(gpu, planned))
                    auto_recompute.choose(planned, budget, gpu, host_budget_bytes=limit)
                latest = list({id(problem): (problem, budget) for problem, budget in asked}.values())
                for at in sorted({0, len(latest) // 2, len(latest) - 1}):
                    yield (f"{name}, {share:.0%}, host {host}", *latest[at])


def live() -> Iterator[Asked]:
    """Small models in the flesh at three budgets: without copies, and with room on the host for all and for some."""
    import torch

    import jettison
    from jettison.models.reference import Gpt, GptConfig, Llama, LlamaConfig

    link = dataclasses.replace(hardware("h100-80gb"), host_bytes_per_second=20_000_000_000)
    ids = torch.zeros((2, 256), dtype=torch.long)
    gpt = Gpt(GptConfig(layers=8, hidden=128, heads=4, vocab=512, positions=256))
    llama = Llama(LlamaConfig(layers=8, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=512))
    for name, model in (("live GPT", gpt), ("live Llama", llama)):
        traced = jettison.trace(model, (ids, ids))
        for host in (None, "4MiB", "64MiB", "1GiB"):
            more: dict[str, Any] = {} if host is None else {"offload": True, "host_budget": host, "hardware": link}
            with recorded() as asked:
                least = 0
                try:
                    jettison.plan(traced, Bytes(1), measure=False, **more)
                except Infeasible as error:
                    least = error.minimum_budget_bytes
                for share in (1.02, 1.15, 1.4):
                    with contextlib.suppress(Infeasible):
                        jettison.plan(traced, Bytes(int(least * share)), measure=False, **more)
            yield from ((f"{name}, host {host}", problem, budget) for problem, budget in asked[-3:])


def chains() -> Iterator[Asked]:
    """128 layers, and random chains of 8 to 40 regions."""
    for same in (True, False):
        for host in (None, 30, 60, 100):
            problem = deep_offload(same=same, host_gib=host)
            least = least_of(walks(problem))
            for more in (0, 2, 10, 40, 120):
                yield f"128 {'alike' if same else 'different'}, host {host}", problem, least + more * GIB
        problem = deep_problem(same=same, gradient=0)
        least = least_of(walks(problem))
        for part in (1.0, 1.1, 1.5):
            yield f"128 {'alike' if same else 'different'}, no copies", problem, int(least * part)
    for seed in range(60):
        rng = random.Random(seed)
        problem = _random(rng)
        with contextlib.suppress(ValueError):
            least = least_of(walks(problem))
            yield "random", problem, least + rng.randrange(0, 600 * MIB)


def _random(rng: random.Random) -> StepProblem:
    """Different layers, some with segments, under a host's budget that binds for most."""
    count = rng.randrange(8, 41)
    regions = []
    for r in range(count):
        everything, seconds = rng.randrange(20 * MIB, 200 * MIB), rng.uniform(1e-3, 9e-3)
        options = []
        for n in range(rng.randrange(2, 9)):
            held = rng.uniform(0.02, 1.0)
            moved = 0 if r == count - 1 else int(everything * rng.choice([0, 0, 0.2, 0.5]) * held)
            total = int(everything * held)
            options.append(
                RegionOption(
                    key=str(n),
                    resident_bytes=total - moved,
                    forward_peak_bytes=total + rng.randrange(MIB, 30 * MIB),
                    backward_peak_bytes=everything - total + rng.randrange(MIB, 60 * MIB),
                    seconds=seconds * (1 - held) ** rng.uniform(1, 2.5),
                    offloaded_bytes=moved,
                )
            )
        regions.append(
            ProblemRegion(
                name=f"{r}",
                class_key=f"{r}",
                options=tuple(options),
                gradient_bytes=rng.choice([0, 5 * MIB]),
                forward_seconds=rng.uniform(1e-3, 6e-3),
                backward_seconds=rng.uniform(2e-3, 12e-3),
            )
        )
    zeros = (0,) * count
    roots = tuple(
        RootOption(
            key=f"root {n}",
            held_forward_bytes=zeros,
            held_backward_bytes=zeros,
            loss_peak_bytes=(3 - n) * 200 * MIB,
            tail_peak_bytes=50 * MIB,
            seconds=2e-3 * n,
        )
        for n in range(rng.choice([1, 1, 2]))
    )
    return StepProblem(
        static_bytes=GIB,
        optimizer_peak_bytes=0,
        regions=tuple(regions),
        root=roots,
        plain_seconds=sum(region.forward_seconds + region.backward_seconds for region in regions),
        link=Link(bytes_per_second=rng.choice([5e9, 25e9]), host_budget_bytes=rng.randrange(0, 40 * count) * MIB),
    )


# layers ---------------------------------------------------------------------------------------------------------------


def _zeros(budgeted: bound.BudgetedWalk) -> bound.Relaxation:
    return bound.Relaxation(multipliers=bound.Multipliers(device=[0.0] * (budgeted.walk.count + 1)))


Off: TypeAlias = tuple[Any, str, Any]
"""A module or class, a name in it, and what stands there instead."""

_NO_NUMPY: Sequence[Off] = ((label_setting, "np", None), (host_budget, "np", None))
_NO_HIGHS: Sequence[Off] = ((solver, "relaxation", _zeros),)
_NO_ROUNDING: Sequence[Off] = ((solver, "rounded", lambda *_: iter(())),)

LAYERS: Mapping[str, Sequence[Off]] = {
    "duals": _NO_HIGHS,
    "rounding": _NO_ROUNDING,
    "leaving large ones unproven": ((solver, "LARGE", 1 << 60),),
    "numpy": _NO_NUMPY,
    "numpy and HiGHS": (*_NO_NUMPY, *_NO_HIGHS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solved:
    """One problem's plan."""

    seconds: float
    gap: float
    spent: float


def solve(problem: StepProblem, budget: int) -> Solved | None:
    """None where no plan fits or none was found."""
    begin = time.process_time()
    try:
        found = solver.choose(problem, budget)
    except Infeasible:
        return None
    return Solved(seconds=found.levels.seconds, gap=found.gap, spent=time.process_time() - begin)


def without(layer: str) -> contextlib.AbstractContextManager[Any]:
    """The solver without a layer."""
    stack = contextlib.ExitStack()
    for where, name, instead in LAYERS[layer]:
        stack.enter_context(mock.patch.object(where, name, instead))
    return stack


def compare(asked: Sequence[Asked], layer: str | None, base: Sequence[Solved | None]) -> list[Solved | None]:
    """Solve all without a layer and print the row."""
    with without(layer) if layer else contextlib.nullcontext():
        found = [solve(problem, budget) for _, problem, budget in asked]
    pairs = [(a, b) for a, b in zip(base or found, found, strict=True) if a is not None]
    both = [(a, b) for a, b in pairs if b is not None]
    slower = [b.seconds / a.seconds - 1 for a, b in both if b.seconds > a.seconds + LEAST]
    faster = sum(b.seconds < a.seconds - LEAST for a, b in both)
    solved = [b for _, b in both]
    print(
        f"| {layer or 'nothing':32} | {sum(b.seconds for b in solved):10.4f} | {len(slower):3} | {faster:3} "
        f"| {max(slower, default=0.0):8.2%} | {len(pairs) - len(both):3} | {max(b.gap for b in solved):8.3%} "
        f"| {sum(b.gap > MOST_GAP for b in solved):3} | {sum(b.spent for b in solved):7.2f} |",
        flush=True,
    )
    return found


SOURCES: Mapping[str, Callable[[], Iterator[Asked]]] = {"described": described, "live": live, "chains": chains}


def main() -> None:
    """Print a table for each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="*", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    given = parser.parse_args()
    solver.choose(deep_offload(same=True, count=8), 60 * GIB)  # the first call loads HiGHS
    for source in given.sources:
        asked = list(SOURCES[source]())
        print(f"\n{source}: {len(asked)} problems\n")
        print("| without | added s | slower | faster | most | no plan | largest gap | gap > 0.5 % | CPU s |")
        print("| --- " * 9 + "|")
        base = compare(asked, None, [])
        for layer in given.layers:
            compare(asked, layer, base)


if __name__ == "__main__":
    main()
