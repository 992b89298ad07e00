"""How long the solver and the search take, against what is asked of them on two cores.

    python -m benchmarks.planning_times [--sections solver stages search] [--jobs 2]

Deep stages are those of tests/support/offload_cases.py: 128 layers, four micro-batches in flight, six budgets from the
smallest on. `stages` plans Llama-3 405B over 16 stages. Seconds are the processor's, since they say more than the clock
where others are at work; of a search both are printed. Exit code 1 where one is above what is asked, by the clock for a
search, or a gap above half a percent.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from jettison.cli.search import search
from jettison.core.units import GIB
from jettison.predict.forecast import available_bytes
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search.auto_recompute import choose as plan_stages
from jettison.search.search import SearchRequest
from jettison.solve.shortest_path import least_of, walks
from jettison.solve.solver import choose
from jettison.spec.hardware import hardware
from jettison.spec.recompute import Mode, Recompute
from support.offload_cases import deep_offload

MORE_GIB = (0, 2, 10, 40, 120, 200)
HOSTS = (None, 100, 60)
LIMITS = {"alike": 0.5, "different": 5.0, "stages": 3.0, "search": 10.0}
MOST_GAP = 0.005

_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    what: str
    seconds: float
    limit: float
    gap: float
    beside: str = ""

    @property
    def met(self) -> bool:
        """Is it?"""
        return self.seconds <= self.limit and self.gap <= MOST_GAP

    def __str__(self) -> str:
        word = "" if self.met else "  MISSED"
        return f"{self.what:70} {self.seconds:6.2f} s of {self.limit:4.1f}  gap {self.gap:.3%}{self.beside}{word}"


def timed(work: Callable[[], _R]) -> tuple[_R, float]:
    """With seconds of the processor."""
    begin = time.process_time()
    found = work()
    return found, time.process_time() - begin


def solver() -> Iterator[Row]:
    """128 layers at each budget."""
    for kind in ("alike", "different"):
        for host in HOSTS:
            problem = deep_offload(same=kind == "alike", host_gib=host)
            least = least_of(walks(problem))
            for more in MORE_GIB:
                found, seconds = timed(lambda problem=problem, budget=least + more * GIB: choose(problem, budget))
                room = "any host" if host is None else f"{host} GiB of the host"
                what = f"128 {kind} layers, {room}, {more} GiB above the least"
                yield Row(what=what, seconds=seconds, limit=LIMITS[kind], gap=found.gap)


def stages() -> Iterator[Row]:
    """Llama-3 405B, all 16 stages."""
    device = hardware("h100-80gb")
    asked = RunRequest(tp=8, pp=16, dp=8, micro_batch=1, micro_batches=16, seq=8192)
    run = resolve(model_spec("llama3-405b"), asked).run
    for offload, host in ((False, None), (True, None), (True, 4), (True, 16)):
        planned = replace(run, recompute=Recompute(mode=Mode.AUTO, offload=offload))
        budget, limit = available_bytes(device, planned), None if host is None else host * GIB
        found, seconds = timed(
            lambda run=planned, budget=budget, limit=limit: plan_stages(run, budget, device, host_budget_bytes=limit)
        )
        copies = "no copies" if not offload else "copies" if host is None else f"copies, {host} GiB of the host"
        what = f"Llama-3 405B over 16 stages, {copies}"
        yield Row(what=what, seconds=seconds, limit=LIMITS["stages"], gap=found.gap)


def searches(jobs: int) -> Iterator[Row]:
    """GPT-3 on 64 A100."""
    clock, before = time.perf_counter(), _processor_seconds()
    report = search("gpt-175b", SearchRequest(), gpus=64, gpu="a100-80gb", global_batch=64, jobs=jobs)
    wall, spent = time.perf_counter() - clock, _processor_seconds() - before
    beside = f"  {spent:.1f} s of the processor, {report.answer.evaluated} candidates worked out"
    what = f"search GPT-3 on 64 A100, {jobs} processes, by the clock"
    yield Row(what=what, seconds=wall, limit=LIMITS["search"], gap=0.0, beside=beside)


def _processor_seconds() -> float:
    """Of this process and of those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> int:
    """Print rows as they come; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", default=["solver", "stages", "search"])
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    sections = {"solver": solver, "stages": stages, "search": lambda: searches(asked.jobs)}
    met = True
    choose(deep_offload(same=True, count=8), 60 * GIB)  # the first call loads the solver
    for name in asked.sections:
        for row in sections[name]():
            print(row, flush=True)
            met = met and row.met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
