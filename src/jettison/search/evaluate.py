"""Evaluation of a search's candidates: in this process or by workers with caches of their own, and never twice.

A process caches regions, prices and hulls; another one would recompute them. So all items of a key go to the process
that had the first of them, and an idle process takes over only parts that it has not begun: with a common queue two
processes took two thirds more processor time than one.

Results are keyed by a digest of candidate, run and hardware; a journal keeps them in a file.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from jettison import __version__
from jettison.core.errors import Infeasible, UsageError
from jettison.core.files import writing
from jettison.core.objects import grouped
from jettison.core.process import SELDOM, deaf_to_interrupts, end_pool, seldom_collected
from jettison.predict.forecast import Forecast, forecast_sizes
from jettison.predict.time import Estimate, estimate
from jettison.search.auto_recompute import (
    AutoForecast,
    StageAnswer,
    choose,
    distinct_stages,
    layer_policies,
    solve_stage,
)
from jettison.search.bounds import SetupBounds, bound, least_seconds, static_bytes, whole_seconds, whole_static_bytes
from jettison.search.largest_fit import settled
from jettison.search.planner_time_bound import planner_seconds
from jettison.search.space import SearchCandidate, Setup, setup_run
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Layout
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

CHUNKS: Final = 8
"""Parts of a round, per worker."""
AHEAD: Final = 2
"""Most parts submitted to a worker: the one it works on, and the next."""

_Q = TypeVar("_Q")
_T = TypeVar("_T")
_R = TypeVar("_R")
_Chunk = list[int]


class Workers(Generic[_Q]):
    """Pool of ``jobs`` processes. Several threads may use it at once.

    Args:
        question: first argument of every call.
    """

    def __init__(self, question: _Q, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pools = [
            ProcessPoolExecutor(1, mp_context=context, initializer=_start, initargs=(question,)) for _ in range(jobs)
        ]
        self._homes: dict[tuple[object, ...], int] = {}
        with deaf_to_interrupts():
            for pool in self._pools:
                pool.submit(int)  # starts the process

    def end(self, *, now: bool) -> None:
        """End the processes.

        Args:
            now: without waiting for running work.
        """
        for pool in self._pools:
            end_pool(pool, now=now)

    def map(
        self, work: Callable[[_Q, _T], _R], items: Sequence[_T], key: Callable[[_T], tuple[object, ...]]
    ) -> Iterator[dict[int, _R]]:
        """Yield results by the numbers of their items, in parts, as they come."""
        left, fresh = self._shared(items, key)
        running: dict[Future[list[_R]], tuple[int, _Chunk]] = {}

        def give(worker: int) -> None:
            own = left[worker]
            source = own or max(left, key=len)
            if source:
                chunk = source.pop(0 if source is own else -1)
                if source is not own:  # a key belongs to the process that begins it
                    self._homes |= {each: worker for i in chunk if (each := key(items[i])) in fresh}
                asked: Any = (work, [items[i] for i in chunk])
                running[self._pools[worker].submit(_run_chunk, asked)] = worker, chunk

        for _ in range(AHEAD):
            for worker in range(len(self._pools)):
                give(worker)
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                worker, chunk = running.pop(done)
                give(worker)
                yield dict(zip(chunk, done.result(), strict=True))

    def _shared(
        self, items: Sequence[_T], key: Callable[[_T], tuple[object, ...]]
    ) -> tuple[list[list[_Chunk]], set[tuple[object, ...]]]:
        """Divide items among workers: the numbers of each worker's items in parts, and the new keys.

        A new key goes to the worker with fewest items.
        """
        by_key = grouped((key(item), number) for number, item in enumerate(items))
        own: list[list[int]] = [[] for _ in self._pools]
        fresh = {each for each in by_key if each not in self._homes}
        for each in sorted(by_key, key=lambda each: (each in fresh, -len(by_key[each]))):
            home = self._homes.setdefault(each, min(range(len(own)), key=lambda worker: len(own[worker])))
            own[home] += by_key[each]
        size = -(-len(items) // (len(own) * CHUNKS)) or 1
        return [[numbers[at : at + size] for at in range(0, len(numbers), size)] for numbers in own], fresh


# in a worker ----------------------------------------------------------------------------------------------------------

_question: Any = None


def _start(question: object) -> None:
    global _question
    _question = question
    gc.set_threshold(SELDOM)
    atexit.register(os._exit, 0)  # skips freeing the caches object by object
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends this process


def _run_chunk(asked: tuple[Callable[[Any, _T], _R], list[_T]]) -> list[_R]:
    work, items = asked
    return [work(_question, item) for item in items]


NOTED: Final = 16
"""Candidates evaluated in this process before they are written to the journal."""
PLANNER: Final = Recompute(mode=Mode.AUTO)
CERTAIN: Final = 1024
"""Setups that keep workers busy, however many share their regions."""
WORTH_STARTING: Final = 48
"""Smallest round that starts workers; shorter ones run in this process."""

_PARTS: Final = ("compute", "communication", "bubble", "recompute", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Seconds of a step, and their breakdown.

    Args:
        least: lower bound for any plan of the same setup, if this one recomputes nothing.
    """

    step: float
    least: float
    compute: float
    communication: float
    bubble: float
    recompute: float
    other: float
    mfu: float
    tokens_per_second_per_gpu: float

    @classmethod
    def of(cls, found: Estimate) -> Seconds:
        """Make them from an estimate."""
        return cls(
            step=found.step_seconds,
            least=least_seconds(found),
            mfu=found.mfu,
            tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
            **{name: getattr(found.breakdown, name) for name in _PARTS},
        )

    def scaled(self, times: float) -> Seconds:
        """Every part ``times`` as long, such as the expected seconds of modelled ones."""
        longer = {name: times * getattr(self, name) for name in ("step", "least", *_PARTS)}
        rates = {name: getattr(self, name) / times for name in ("mfu", "tokens_per_second_per_gpu")}
        return replace(self, **longer, **rates)

    @property
    def parts(self) -> dict[str, float]:
        """Breakdown by name; the parts add up to the step."""
        return {name: getattr(self, name) for name in _PARTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Bytes of the worst rank, and the seconds of a step if it was timed.

    Args:
        peak_bytes: of the step; if a planner finds nothing that fits, its smallest feasible budget.
        static_bytes: lower bound for any plan of the same setup.
        host_bytes: offloaded to CPU.
        policies: a planner's policies of layers, by stage.
        whole: micro-batches of each window without checkpointing.
    """

    peak_bytes: int
    static_bytes: int
    host_bytes: int = 0
    seconds: Seconds | None = None
    policies: tuple[str, ...] = ()
    whole: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Evaluated candidate.

    Args:
        number: of its setup in the space, and of its plan.
        limit_bytes: for its tensors, on a device.
        host_limit_bytes: for offloaded tensors; None: not stated.
    """

    candidate: SearchCandidate
    figures: Figures
    number: tuple[int, int]
    limit_bytes: int
    host_limit_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """Peak bytes on a device."""
        return self.figures.peak_bytes

    @property
    def over_bytes(self) -> int:
        """Bytes above the limit of the device or of CPU memory; 0 or less if it fits."""
        of_host = 0 if self.host_limit_bytes is None else self.figures.host_bytes - self.host_limit_bytes
        return max(self.figures.peak_bytes - self.limit_bytes, of_host)

    @property
    def fits(self) -> bool:
        """Whether it is within its limits, and was timed."""
        return self.over_bytes <= 0 and self.figures.seconds is not None

    @property
    def seconds(self) -> Seconds:
        """Seconds of a candidate that fits."""
        assert self.figures.seconds is not None
        return self.figures.seconds

    @property
    def rank(self) -> tuple[float, int, tuple[int, int]]:
        """Sort key; smaller is better."""
        return self.seconds.step, self.figures.peak_bytes, self.number


SCHEMA: Final = "jettison.search-state/1"
_HEADER: Final = json.dumps({"schema": SCHEMA})


class Journal:
    """State file of a search: a line of JSON for each evaluated candidate, written as they come. Raise `UsageError` if
    the file is no state of a search, or cannot be written.

    After a crash all complete lines remain valid; a truncated last line is dropped. Other questions (another model,
    other hardware, another version) may share the file: their keys differ.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path, "--state: "):
            self.known, whole = _read(path)
            self._file = path.open("a", encoding="utf-8")
            self._file.truncate(whole)
        if not whole:
            self._file.write(f"{_HEADER}\n")
            self._file.flush()

    def write(self, found: Mapping[str, Figures]) -> None:
        """Append evaluated candidates."""
        if found:
            self._file.writelines(json.dumps({"key": key, **asdict(each)}) + "\n" for key, each in found.items())
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _read(path: Path) -> tuple[dict[str, Figures], int]:
    """Return the figures of all complete lines, and the bytes of these lines."""
    if not path.exists():
        return {}, 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    if (lines and lines[0].decode(errors="replace") != _HEADER) or (
        not lines and not _HEADER.encode().startswith(content)
    ):
        raise UsageError(
            f"--state {path} is not the state of a search; give another file, or one that is not there yet"
        )
    from pydantic import TypeAdapter  # most searches have no file

    known, adapter = {}, TypeAdapter(Figures)
    for number, line in enumerate(lines[1:], 2):
        try:
            known[str(json.loads(line)["key"])] = adapter.validate_json(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(
                f"--state {path}: line {number} is not what a search writes; remove it, or give another file"
            ) from None
    return known, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchQuestion:
    """Run and hardware that all candidates share."""

    template: Run
    hardware: Hardware

    @property
    def digest(self) -> str:
        """Digest, equal on every machine; it includes this package's version, since results may change with it."""
        text = repr((__version__, asdict(self.template), asdict(self.hardware)))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Candidate to evaluate.

    Args:
        limit_bytes: only a candidate within it is timed; None: any.
    """

    candidate: SearchCandidate
    limit_bytes: int | None = None


_Key = tuple[object, ...]


class Evaluator:
    """Evaluates candidates; several threads may use it at once.

    Args:
        jobs: processes.
        journal: earlier results, and the file for new ones.
    """

    def __init__(self, question: SearchQuestion, *, jobs: int = 1, journal: Journal | None = None) -> None:
        self.question = question
        self.jobs = jobs
        self.evaluated = 0
        self._journal = journal
        self._context = question.digest
        self._known: dict[str, Figures] = dict(journal.known) if journal else {}
        self._whole: dict[_Key, float] = {}
        self._statics: dict[_Key, int] = {}
        self._bounds: dict[_Key, SetupBounds] = {}
        self._pool: Workers[SearchQuestion] | None = None
        self._seldom = seldom_collected()
        self._lock = Lock()  # guards results, journal and pool

    def __enter__(self) -> Evaluator:
        self._seldom.__enter__()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._seldom.__exit__(None, None, None)
        if self._pool is not None:
            self._pool.end(now=error is not None)

    def rough(self, setups: Sequence[Setup]) -> list[tuple[float, int]]:
        """Return rough lower bounds of seconds and bytes of any plan of each setup: cheap, and below the sharp ones."""
        if self.jobs > 1 and len(setups) >= CERTAIN:
            self._workers()  # they import while this process prepares the work
        self._add_missing(self._whole, _whole, dict(zip(map(_signature, setups), setups, strict=True)), key=_signature)
        seconds = (one.micro_batches * self._whole[_signature(one)] / one.layout.pp for one in setups)
        return list(zip(seconds, (self._static(one.layout) // one.layout.pp for one in setups), strict=True))

    def _static(self, layout: Layout) -> int:
        """Bytes by rule 3, cached for layouts that share them."""
        key = layout.tp, layout.ep, layout.shards, layout.zero
        if key not in self._statics:
            alike = Layout(tp=layout.tp, ep=layout.ep, dp=layout.shards, zero=layout.zero, reshard=layout.reshard)
            run = replace(self.question.template, layout=alike, micro_batches=1, recompute=Recompute())
            self._statics[key] = whole_static_bytes(run)
        return self._statics[key]

    def bounds(self, setups: Sequence[Setup], modes: tuple[Mode, ...] = (Mode.NONE,)) -> list[SetupBounds]:
        """Return the bounds of each setup, for plans with these policies of layers."""
        keys = [
            (*_signature(setup), lay.dp, lay.pp, lay.zero, lay.gradient_sync, setup.micro_batches, modes)
            for setup in setups
            for lay in (setup.layout,)
        ]
        alike = {key: (setup, modes) for key, setup in zip(keys, setups, strict=True)}
        self._add_missing(self._bounds, _bound, alike, key=lambda one: _signature(one[0]))
        return [self._bounds[key] for key in keys]

    def _add_missing(
        self,
        known: dict[_Key, _R],
        work: Callable[[SearchQuestion, _T], _R],
        asked: Mapping[_Key, _T],
        *,
        key: Callable[[_T], _Key],
    ) -> None:
        """Compute the items that are not in the cache."""
        missing = {name: item for name, item in asked.items() if name not in known}
        known.update(zip(missing, self._map(work, list(missing.values()), key=key), strict=True))

    def planner_bounds(
        self, setups: Sequence[Setup], limits: Sequence[int], planner: Recompute = PLANNER
    ) -> list[float | None]:
        """Least seconds of each planner's choice; None if none fits."""
        asked = [(setup, limit, planner) for setup, limit in zip(setups, limits, strict=True)]
        return self._map(_planner_bound, asked, key=lambda one: _signature(one[0]))

    def figures(self, tasks: Sequence[Task]) -> list[Figures]:
        """Return the bytes and seconds of candidates."""
        names = (f"{self._context} {task.candidate.text}" for task in tasks)
        keys = [hashlib.sha256(name.encode()).hexdigest()[:24] for name in names]
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if not _answers(self._known.get(key), task)}
        fresh_keys = list(missing)

        def note(part: Mapping[int, Figures]) -> None:
            fresh = {fresh_keys[i]: figures for i, figures in part.items()}
            with self._lock:
                self._known |= fresh
                self.evaluated += len(fresh)
                if self._journal is not None:
                    self._journal.write(fresh)

        asked = list(zip(missing.values(), self._solved(list(missing.values())), strict=True))
        self._map(_work, asked, key=lambda one: _signature(one[0].candidate.setup), note=note)
        return [self._known[key] for key in keys]

    def _solved(self, tasks: Sequence[Task]) -> list[dict[int, StageAnswer]]:
        """Solve the stages of planners' candidates on all processes; other candidates, and one process, give none."""
        found: list[dict[int, StageAnswer]] = [{} for _ in tasks]
        if self.jobs == 1:
            return found
        template = self.question.template
        planned = [at for at, task in enumerate(tasks) if task.candidate.is_planned]
        parts = [(at, index) for at in planned for index in distinct_stages(tasks[at].candidate.run(template))]
        stages = [(tasks[at].candidate, index) for at, index in parts]
        answers = self._map(_solve_stage, stages, key=lambda one: (*_signature(one[0].setup), one[1]))
        for (at, index), answer in zip(parts, answers, strict=True):
            found[at][index] = answer
        return found

    def _map(
        self,
        work: Callable[[SearchQuestion, _T], _R],
        items: Sequence[_T],
        *,
        key: Callable[[_T], _Key],
        note: Callable[[Mapping[int, _R]], None] = lambda _part: None,
    ) -> list[_R]:
        """Return results in the order of the items. Items with the same key go to the same process, if possible.

        Args:
            note: called with results by the numbers of their items, as they come.
        """
        found: dict[int, _R] = {}
        if self.jobs == 1 or (self._pool is None and len(items) < WORTH_STARTING):
            for start in range(0, len(items), NOTED):
                part = {i: work(self.question, items[i]) for i in range(start, min(start + NOTED, len(items)))}
                note(part)
                found |= part
            return list(found.values())
        for part in self._workers().map(work, items, key):
            note(part)
            found |= part
        return [found[i] for i in range(len(items))]

    def _workers(self) -> Workers[SearchQuestion]:
        with self._lock:
            if self._pool is None:
                self._pool = Workers(self.question, self.jobs)
            return self._pool


def _signature(setup: Setup) -> _Key:
    """Key that is equal for setups with equal regions."""
    layout = setup.layout
    return layout.tp, layout.sp, layout.cp, layout.ep, layout.shards_parameters, setup.micro_batch


def _answers(known: Figures | None, task: Task) -> bool:
    """Whether the known figures answer the task."""
    if known is None:
        return False
    fits = task.limit_bytes is None or known.peak_bytes <= task.limit_bytes
    return known.seconds is not None or not fits or bool(task.candidate.budgets)


# in a worker ----------------------------------------------------------------------------------------------------------


def _whole(question: SearchQuestion, setup: Setup) -> float:
    return whole_seconds(setup_run(setup, question.template), question.hardware)


def _bound(question: SearchQuestion, asked: tuple[Setup, tuple[Mode, ...]]) -> SetupBounds:
    setup, modes = asked
    return bound(setup_run(setup, question.template), question.hardware, modes)


def _planner_bound(question: SearchQuestion, asked: tuple[Setup, int, Recompute]) -> float | None:
    setup, limit_bytes, planner = asked
    run = setup_run(setup, question.template, Recompute(mode=planner.mode))
    plain = forecast_sizes(run)
    timed = _timed(plain, question.hardware)
    if planner.offload:  # offloading is free as long as its copies overlap with compute
        return least_seconds(timed)
    return planner_seconds(plain, timed, limit_bytes)


def _solve_stage(question: SearchQuestion, asked: tuple[SearchCandidate, int]) -> StageAnswer:
    candidate, index = asked
    return solve_stage(candidate.run(question.template), index, candidate.budgets[0].nbytes, question.hardware)


def _work(question: SearchQuestion, asked: tuple[Task, Mapping[int, StageAnswer]]) -> Figures:
    """Args: asked: a candidate, and its stages that are solved already."""
    task, solved = asked
    candidate = task.candidate
    run = candidate.run(question.template)
    if candidate.recompute.whole:
        run = settled(run, candidate.budgets)
    elif candidate.is_planned:
        return _planned(run, question.hardware, candidate.budgets[0].nbytes, solved)
    found = forecast_sizes(run)
    peak = found.peak_bytes
    fits = task.limit_bytes is None or peak <= task.limit_bytes
    return Figures(
        peak_bytes=peak,
        static_bytes=static_bytes(found),
        host_bytes=found.host_bytes,
        whole=run.recompute.whole,
        seconds=Seconds.of(_timed(found, question.hardware)) if fits else None,
    )


def _timed(found: Forecast, hardware: Hardware) -> Estimate:
    """Estimate the time of a `forecast_sizes`."""
    outlined = None if found.run.compiled else [stage.groups for stage in found.stages]  # compiled ones keep others
    return estimate(found.run, hardware, outlined=outlined)


def _planned(run: Run, hardware: Hardware, budget_bytes: int, solved: Mapping[int, StageAnswer]) -> Figures:
    """Figures of the planner's choice; if nothing fits, with its smallest feasible budget."""
    static = static_bytes(forecast_sizes(run))
    try:
        choice = choose(run, budget_bytes, hardware, solved=solved)
    except Infeasible as error:
        return Figures(peak_bytes=error.minimum_budget_bytes, static_bytes=static)
    return Figures(
        peak_bytes=choice.forecast.peak_bytes,
        static_bytes=static,
        host_bytes=choice.host_bytes,
        policies=tuple(_policies(choice)),
        seconds=Seconds.of(choice.estimate),
    )


def _policies(choice: AutoForecast) -> Iterator[str]:
    """Policies of layers, by stage: "12 mixed, 8 none"."""
    words = dict(layer_policies(choice))
    for stage in choice.forecast.stages:
        counted = Counter(words[part.name] for chunk in stage.parts for part in chunk if part.is_layer)
        yield ", ".join(f"{count} {word}" for word, count in sorted(counted.items()))
