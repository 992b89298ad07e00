"""``python -m planner.random_cases [--cases N] [--seed S] [--workers W] [--only SEED] [--host] [--out FILE]``, from the
folder of tests.

Trains cases by chance next to independent copies without a plan. In every step gradients, parameters, buffers, the
loss and the random streams have to be the same to the bit, and the measured peak no higher than the budget. A refusal
in words is fair, and counted by kind; so is a warning that the budget may not hold. Whatever else happens is a failure:
a line each, with the seed, and exit code 1. With ``--host`` tensors may also wait there: the recorder stands in for the
device and looks for races, and what is pinned is no more than the case's budget for it. A plan that stated a peak more
than 2 % from the measured one is named, with its case.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[2])] * (str(Path(__file__).parents[2]) not in sys.path)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import jettison
from jettison.core.errors import Infeasible, TraceError, UnsupportedModule, UsageError
from jettison.core.units import Bytes
from jettison.planner import cpu_offload
from jettison.spec.hardware import Hardware, usual_hardware
from jettison.spec.kernels import Device
from support.our_warnings import is_ours
from support.patience import PATIENCE
from support.random_programs import Case, Program, draw, draw_moving, program_of
from support.random_steps import Loop, loop_of, train, world
from support.stated_peaks import WISHED, Stated, Watcher
from support.transfers import transfers_of
from zoo.harness import Step, differences, state_differences, state_of, streams

REFUSALS = (UnsupportedModule, UsageError, TraceError)
FINE, FAILED = "fine", "failed"
SEEDS_APART = 1_000_000


@dataclass(kw_only=True)
class Found:
    """What came of a case.

    Args:
        outcome: `FINE`, `FAILED`; ``refused`` and the kind of error; ``said``, a budget that did not hold and was said
            not to; ``unfair``, where plain PyTorch does not train it twice the same way.
        closest: the highest share of the budget that a step took.
        stated: the peak that each plan stated, beside the highest of the steps under it.
        varies: values or chance decide what a step of it runs, so that no step need be as the one that was planned.
        moved: copies to the host and back.
    """

    case: Case
    outcome: str = FINE
    notes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    budget_bytes: int = 0
    smallest_bytes: int = 0
    plain_bytes: int = 0
    closest: float = 0.0
    stated: list[Stated] = field(default_factory=list)
    varies: bool = False
    moved: int = 0
    seconds: float = 0.0

    @property
    def furthest(self) -> float:
        """The share by which a stated peak was furthest from what was measured, with its sign."""
        return max((one.off for one in self.stated), key=abs, default=0.0)

    def fail(self, note: str) -> None:
        """One more thing that must not be."""
        self.outcome = FAILED
        self.notes.append(note)


def judge(case: Case) -> Found:
    """Train the case with and without a plan, and compare."""
    found = Found(case=case)
    began = time.perf_counter()
    threads = torch.get_num_threads()
    usual = cpu_offload.MOVE_SECONDS, cpu_offload.SMALLEST_BYTES
    cpu_offload.MOVE_SECONDS, cpu_offload.SMALLEST_BYTES = (0.0, 1)  # so that small things move
    torch.set_num_threads(1)  # sums over threads are not in a fixed order
    gc.collect()
    gc.freeze()  # what imports have made need not be walked by every measurement
    try:
        with warnings.catch_warnings(), world(case):
            warnings.simplefilter("ignore")
            _judge(case, found)
    finally:
        torch.set_num_threads(threads)
        cpu_offload.MOVE_SECONDS, cpu_offload.SMALLEST_BYTES = usual
    found.seconds = time.perf_counter() - began
    return found


def _judge(case: Case, found: Found) -> None:
    try:
        program = program_of(case)
        plain = train(case, program, loop_of(case, program))
    except Exception as error:
        found.outcome, found.notes = "unfair", [f"does not run without a plan: {_words(error)}"]
        return
    if not all(step.loss.isfinite().all() for step in plain):
        found.outcome, found.notes = "unfair", ["its loss is not finite without a plan"]
        return
    found.varies = program.says_more
    found.plain_bytes = max(step.peak_bytes for step in plain)
    loop = loop_of(case, program)
    doing = "planning"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            handle = _planned(case, program, loop, found)
            doing = "training"
            met: dict[int, int] = {}
            watcher = Watcher(handle, loop, _planned_for(case, program))

            def tell(batch: Any, step: int) -> None:
                met[step] = len(loop.planning)
                if loop.step is not None:
                    handle.expect(batch)
                    met[step] = len(loop.planning)

            done = train(case, program, loop, tell, watcher.ended)
            met[program.steps] = len(loop.planning)
        except REFUSALS as error:
            if doing == "planning":
                found.outcome, found.notes = f"refused: {type(error).__name__}", [_words(error)]
            else:
                found.fail(f"{doing}: {_words(error)}")
            return
        except Exception as error:
            found.fail(f"{doing}: {_words(error)}")
            return
    found.said = sorted({str(w.message).splitlines()[0] for w in said if is_ours(w)})
    _compare(case, program, found, done, plain)
    _look_at_host(case, found, handle)
    planned_in = {step for step in range(program.steps) if met[step + 1] > met[step] and loop.step is None}
    _hold(found, done, planned_in, program, handle)
    found.stated = watcher.compared(done, planned_in)
    handle.remove()


def _compare(case: Case, program: Program, found: Found, done: list[Step], plain: list[Step]) -> None:
    """Bits, and whether plain PyTorch has the same ones twice where they differ."""
    unequal = differences(done, plain)
    if not unequal:
        return
    again = differences(train(case, program, loop_of(case, program)), plain)
    if again:
        found.outcome, found.notes = "unfair", [f"trains in another way each time: {again[0]}"]
    else:
        found.fail(unequal[0])


def _look_at_host(case: Case, found: Found, handle: Any) -> None:
    """What was pinned, and what is left there."""
    engines = {id(r.offload): r.offload for r in handle.regions if getattr(r, "offload", None) is not None}
    found.moved = sum(len(transfers_of(engine)) for engine in engines.values())
    pinned = sum(engine.pool.real_bytes for engine in engines.values())
    if case.host and pinned > case.host:
        found.fail(f"{pinned} bytes are pinned; the host gives {case.host}")
    if any(engine.pool.live_bytes for engine in engines.values()):
        found.fail("something is left on the host")


def _hold(found: Found, done: list[Step], planned_in: set[int], program: Program, handle: Any) -> None:
    """Peaks against the budget, or against the plan that a batch was said to need. Steps in which was planned are for
    gradients alone: kernels are tried out in them.
    """
    said = any("budget" in text or "does not fit into" in text for text in found.said)
    for number, step in enumerate(done):
        if number in planned_in:
            continue
        found.closest = max(found.closest, step.peak_bytes / found.budget_bytes)
        if step.peak_bytes <= found.budget_bytes:
            continue
        note = f"step {number}: {step.peak_bytes - found.budget_bytes} bytes over {found.budget_bytes}"
        if not said:
            found.fail(note)
            continue
        found.outcome = "said" if found.outcome == FINE else found.outcome
        found.notes.append(note)
        needed = max((one.peak_bytes for one in handle.shapes()), default=0)
        planned_for = all("does not fit into" in text for text in found.said if "budget" in text)
        if planned_for and step.peak_bytes > needed and not program.says_more:
            found.fail(f"step {number}: {step.peak_bytes - needed} bytes over what its own plan states, {needed}")


def _planned(case: Case, program: Program, loop: Loop, found: Found) -> Any:
    """Ask for a byte; the refusal names the smallest budget. Then for the case's."""
    before = [state_of(module) for module in loop.modules], streams()
    largest = max(range(program.steps), key=lambda step: case.shapes[step][0] * case.shapes[step][1])
    try:
        _ask(case, program, loop, 1)
        raise AssertionError("a budget of one byte was accepted")
    except Infeasible as refused:
        found.smallest_bytes = least = refused.minimum_budget_bytes
    if case.wrapper in ("changing", "changing step") and largest:
        try:
            _ask(case, program, loop, 1, first=largest)
        except Infeasible as refused:
            least = max(least, refused.minimum_budget_bytes)
    budget: int | str
    if case.budget == "below":
        budget = int(found.smallest_bytes * random.Random(case.seed).uniform(0.3, 0.999))
        try:
            _ask(case, program, loop, budget).remove()  # now and then there is a plan below what is always enough
        except Infeasible as refused:
            budget = refused.minimum_budget_bytes
    elif isinstance(case.budget, str):
        budget = case.budget
    else:
        budget = least + int(case.budget * max(0, found.plain_bytes - least))
    found.budget_bytes = budget if isinstance(budget, int) else sys.maxsize
    handle = _ask(case, program, loop, budget)
    if isinstance(budget, str):
        assert handle.budget, "a budget that is not in bytes has words"
    touched = [d for m, was in zip(loop.modules, before[0], strict=True) for d in state_differences(state_of(m), was)]
    touched += [f"the stream of {name}" for name, at in streams().items() if before[1][name] != at]
    if touched:
        found.fail(f"planning changed {'; '.join(touched[:3])}")
    loop.planning.clear()
    return handle


def _ask(case: Case, program: Program, loop: Loop, budget: int | str, *, first: int = 0) -> Any:
    """`auto_checkpoint`, as the case has it."""
    more: dict[str, Any] = {}
    if case.link:
        more = {"offload": True, "host_budget": Bytes(case.host) if case.host else None, "hardware": _linked(case.link)}
    if loop.step is not None:
        more["step"] = loop.step
    else:
        more |= {"loss_fn": program.loss_fn, "keep_output": case.keep_output}
    if case.wrapper == "models":
        more["models"] = loop.models
    if case.wrapper == "shapes":
        more["shapes"] = _planned_for(case, program)[1:]
    return jettison.auto_checkpoint(
        loop.models[0],
        program.batch(first),
        budget if isinstance(budget, str) else Bytes(budget),
        optimizer=loop.optimizer,
        check=case.check,
        gradients_preallocated=case.gradients_preallocated,
        progress=loop.planning.append,
        **more,
    )


def _planned_for(case: Case, program: Program) -> list[Any]:
    """Batches that the first plan is made for."""
    return [program.batch(step) for step in range(program.steps if case.wrapper == "shapes" else 1)]


def _linked(bytes_per_second: float) -> Hardware:
    """This machine, with a way to a host."""
    return replace(usual_hardware(Device.CPU), host_bytes_per_second=int(bytes_per_second))


def _words(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    first = str(error).strip().splitlines()
    if os.environ.get("TRACEBACKS"):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {first[0][:300] if first else ''} ({Path(where.filename).name}:{where.lineno})"


def shrunk(case: Case) -> Case:
    """A simpler case that fails as well: each part of it as usual, where that still fails."""
    simpler: list[dict[str, Any]] = [{"wrapper": "plain", "how": "once"}, {"shapes": case.shapes[:1] * 3}]
    usual = {f.name: f.default for f in fields(case) if f.name not in ("seed", "source", "shapes", "budget")}
    simpler += [{name: value} for name, value in usual.items()] + [
        {"layers": 1},
        {"budget": 0.0},
        {"optimizer": "none"},
    ]
    for change in simpler:
        less = replace(case, **change)
        if less != case and judge(less).outcome == FAILED:
            case = less
    return case


def run(
    seeds: Iterable[int], workers: int, *, quiet: bool = False, moving: bool = False, out: Path | None = None
) -> list[Found]:
    """Judge the cases of these seeds, each in one of so many processes; failures and progress are printed.

    Args:
        out: where each case is written down at once, as a line of JSON.
    """
    seeds, found = list(seeds), []
    began = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_judged, number, moving): number for number in seeds}
        for future in concurrent.futures.as_completed(waiting):
            number = waiting[future]
            try:
                one = future.result()
            except Exception as error:
                case = (draw_moving if moving else draw)(number)
                one = Found(case=case, outcome=FAILED, notes=[f"its process: {_words(error)}"])
            found.append(one)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps({**asdict(one), "furthest": one.furthest}, default=str) + "\n")
            if one.outcome != FINE and not quiet:
                print(f"{one.outcome}, seed {number}: {'; '.join(one.notes)} [{one.case}]", flush=True)
            if abs(one.furthest) > WISHED and not quiet:
                print(f"far, seed {number}: {_far(one)['kind']} {_far(one)['stated']} [{one.case}]", flush=True)
            if not quiet:
                done = f"{len(found)} of {len(seeds)} in {time.perf_counter() - began:.0f} s"
                print(f"{done}: seed {number} {one.outcome}, {one.case.source} {one.case.wrapper}", flush=True)
    return found


def _judged(number: int, moving: bool = False) -> Found:
    """In a process of its own: what hangs is a failure that says where."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not done after {PATIENCE} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        return judge((draw_moving if moving else draw)(number))
    finally:
        signal.alarm(0)


def summary(found: list[Found]) -> dict[str, Any]:
    """Counts, and what failed."""
    return {
        "cases": len(found),
        "outcomes": dict(Counter(one.outcome for one in found)),
        "wrappers": dict(Counter(one.case.wrapper for one in found if one.outcome == FINE)),
        "refused": dict(Counter(one.notes[0][:120] for one in found if one.outcome.startswith("refused"))),
        "cases that moved": sum(one.moved > 0 for one in found),
        "furthest from the prediction": max((one.furthest for one in found), key=abs, default=0.0),
        "compared with what was stated": sum(any(not each.bounds for each in one.stated) for one in found),
        "bounded by what was stated": sum(
            bool(one.stated) and all(each.bounds for each in one.stated) for one in found
        ),
        "far from what was stated": [_far(one) for one in found if abs(one.furthest) > WISHED],
        "highest share of a budget": max((one.closest for one in found if one.outcome == FINE), default=0.0),
        "failures": [{"case": asdict(one.case), "notes": one.notes} for one in found if one.outcome == FAILED],
    }


def _far(one: Found) -> dict[str, Any]:
    return {
        "seed": one.case.seed,
        "outcome": one.outcome,
        "kind": "values or chance decide what runs" if one.varies else "",
        "wrapper": one.case.wrapper,
        "source": one.case.source,
        "stated": [str(each) for each in one.stated if abs(each.off) > WISHED],
        "said": one.said,
    }


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(prog="python -m planner.random_cases", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="cases of another seed are others")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--host", action="store_true", help="tensors may wait on the host")
    parser.add_argument("--only", type=int, metavar="SEED", help="one case, by the seed that a failure names")
    parser.add_argument("--shrink", action="store_true", help="with --only: look for a simpler case that fails")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a line of JSON a case, added as it ends")
    options = parser.parse_args()
    if options.only is not None:
        case = (draw_moving if options.host else draw)(options.only)
        if options.shrink:
            case = shrunk(case)
        found = [judge(case)]
        print(json.dumps(asdict(found[0]), default=str, indent=2))
    else:
        first = options.seed * SEEDS_APART
        found = run(range(first, first + options.cases), options.workers, moving=options.host, out=options.out)
    print(json.dumps(summary(found), indent=2))
    return int(any(one.outcome == FAILED for one in found))


if __name__ == "__main__":
    sys.exit(main())
