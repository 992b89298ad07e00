"""Candidates of a search, worked out: in this process or on several cores, and never twice.

What has been worked out is known by a digest of the candidate, of the run and of the hardware; it can be written to a
file as it comes, and read from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import mul
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Final, TypeVar

from jettison import __version__
from jettison.core.errors import Infeasible, UsageError
from jettison.core.process import seldom_collected
from jettison.predict.auto_recompute import (
    AutoForecast,
    StageAnswer,
    choose,
    distinct_stages,
    layer_policies,
    solve_stage,
)
from jettison.predict.forecast import Forecast, forecast_sizes
from jettison.predict.time import Estimate, estimate
from jettison.predict.units import sent_to_host
from jettison.predict.whole_micro_batches import settled
from jettison.search.bounds import SetupBounds, bound, least_seconds, static_bytes, whole_seconds, whole_static_bytes
from jettison.search.planner_time_bound import planner_seconds
from jettison.search.space import SearchCandidate, Setup, setup_run
from jettison.search.workers import Workers
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Layout
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

NOTED: Final = 16
"""Candidates that are worked out in this process before they are written down."""
PLANNER: Final = Recompute(mode=Mode.AUTO)
CERTAIN: Final = 1024
"""Setups that keep workers busy, whatever they have in common."""
WORTH_STARTING: Final = 48
"""A round with less to do is done here while no worker has been started."""


_PARTS: Final = ("compute", "communication", "bubble", "recompute", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Of a step, and what they go into.

    Args:
        least: of a step of the same setup under any plan, where this is the one that computes nothing again.
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
        """Of an estimate."""
        return cls(
            step=found.step_seconds,
            least=least_seconds(found),
            mfu=found.mfu,
            tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
            **{name: getattr(found.breakdown, name) for name in _PARTS},
        )

    @property
    def parts(self) -> dict[str, float]:
        """By what they go into; they add up to the step."""
        return {name: getattr(self, name) for name in _PARTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Bytes of the worst rank, and the seconds of a step where they were asked for.

    Args:
        peak_bytes: where a planner finds nothing that fits, the fewest bytes that it could have done with.
        static_bytes: of any plan of the same setup, at least.
        host_bytes: of what is offloaded.
        policies: by stage, what a planner does with its layers.
        whole: of each window of micro-batches, those that are kept whole.
    """

    peak_bytes: int
    static_bytes: int
    host_bytes: int = 0
    seconds: Seconds | None = None
    policies: tuple[str, ...] = ()
    whole: int = 0

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Figures:
        """From a line of a state file.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        seconds = document["seconds"]
        return cls(
            peak_bytes=int(document["peak_bytes"]),
            static_bytes=int(document["static_bytes"]),
            host_bytes=int(document["host_bytes"]),
            policies=tuple(map(str, document["policies"])),
            whole=int(document.get("whole", 0)),
            seconds=None if seconds is None else Seconds(**{f.name: float(seconds[f.name]) for f in fields(Seconds)}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A candidate that was worked out.

    Args:
        number: of its setup in the space, and of its plan.
        limit_bytes: for its tensors, on a device.
        host_limit_bytes: for what it offloads; None: not stated.
    """

    candidate: SearchCandidate
    figures: Figures
    number: tuple[int, int]
    limit_bytes: int
    host_limit_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """Its peak."""
        return self.figures.peak_bytes

    @property
    def lacks(self) -> int:
        """Bytes, of the device or of the host; 0 or less where it fits."""
        of_host = 0 if self.host_limit_bytes is None else self.figures.host_bytes - self.host_limit_bytes
        return max(self.figures.peak_bytes - self.limit_bytes, of_host)

    @property
    def fits(self) -> bool:
        """Is there room for it, and was it timed?"""
        return self.lacks <= 0 and self.figures.seconds is not None

    @property
    def seconds(self) -> Seconds:
        """Of one that fits."""
        assert self.figures.seconds is not None
        return self.figures.seconds

    @property
    def rank(self) -> tuple[float, int, tuple[int, int]]:
        """The smaller, the better."""
        return self.seconds.step, self.figures.peak_bytes, self.number


SCHEMA: Final = "jettison.search-state/1"
_HEADER: Final = json.dumps({"schema": SCHEMA})


class Journal:
    """The state file of a search: a line of JSON for each candidate that has been worked out, written as they come.

    Whatever stops the program, all whole lines hold; a last line that was cut off is dropped. Lines of other questions
    (another model, other hardware, another version) may stand in the same file: their keys are other ones.

    Raises:
        UsageError: the file is none of a search's, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.known, whole = _read(path)
            self._file = path.open("a", encoding="utf-8")
            self._file.truncate(whole)
        except OSError as error:
            raise UsageError(
                f"--state {path}: {error.strerror or error}; expected a file that can be written"
            ) from None
        if not whole:
            self._file.write(f"{_HEADER}\n")
            self._file.flush()

    def write(self, found: Mapping[str, Figures]) -> None:
        """Add what has been worked out."""
        if found:
            self._file.writelines(json.dumps({"key": key, **asdict(each)}) + "\n" for key, each in found.items())
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _read(path: Path) -> tuple[dict[str, Figures], int]:
    """What whole lines say, and how many bytes they are."""
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
    known = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            document = json.loads(line)
            known[str(document["key"])] = Figures.read(document)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(
                f"--state {path}: line {number} is not what a search writes; remove it, or give another file"
            ) from None
    return known, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchQuestion:
    """What all candidates have in common."""

    template: Run
    hardware: Hardware

    @property
    def digest(self) -> str:
        """The same wherever it is asked; another version of this package may answer otherwise."""
        text = repr((__version__, asdict(self.template), asdict(self.hardware)))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A candidate to work out.

    Args:
        limit_bytes: it is timed if it fits; None: in any case.
    """

    candidate: SearchCandidate
    limit_bytes: int | None = None


_T = TypeVar("_T")
_R = TypeVar("_R")
_Key = tuple[object, ...]


class Bench:
    """Works out candidates; several threads may ask at once.

    Args:
        jobs: processes.
        journal: what has been worked out before, and where to write what comes.
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
        self._lock = Lock()  # of what is known, written down and started

    def __enter__(self) -> Bench:
        self._seldom.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seldom.__exit__(None, None, None)
        if self._pool is not None:
            self._pool.end(now=error is not None)

    def rough(self, setups: Sequence[Setup]) -> list[tuple[float, int]]:
        """Seconds and bytes of any plan of each setup, in a hurry: no less than the sharp ones."""
        if self.jobs > 1 and len(setups) >= CERTAIN:
            self._workers()  # they import while this process looks what there is to do
        self._once(self._whole, _whole, dict(zip(map(_signature, setups), setups, strict=True)), key=_signature)
        found = []
        for setup in setups:
            count, stages = setup.micro_batches, setup.layout.pp
            found.append((count * self._whole[_signature(setup)] / stages, self._static(setup.layout) // stages))
        return found

    def _static(self, layout: Layout) -> int:
        """Rule 3, of all layouts that share what decides it."""
        key = layout.tp, layout.ep, layout.shards, layout.zero
        if key not in self._statics:
            alike = Layout(tp=layout.tp, ep=layout.ep, dp=layout.shards, zero=layout.zero, reshard=layout.reshard)
            run = replace(self.question.template, layout=alike, micro_batches=1, recompute=Recompute())
            self._statics[key] = whole_static_bytes(run)
        return self._statics[key]

    def bounds(self, setups: Sequence[Setup], modes: tuple[Mode, ...] = (Mode.NONE,)) -> list[SetupBounds]:
        """What plans that treat layers so take of each setup, at least."""
        keys = [
            (*_signature(setup), setup.layout.dp, setup.layout.pp, setup.layout.zero, setup.micro_batches, modes)
            for setup in setups
        ]
        alike = {key: (setup, modes) for key, setup in zip(keys, setups, strict=True)}
        self._once(self._bounds, _bound, alike, key=lambda one: _signature(one[0]))
        return [self._bounds[key] for key in keys]

    def _once(
        self,
        known: dict[_Key, _R],
        work: Callable[[SearchQuestion, _T], _R],
        asked: Mapping[_Key, _T],
        *,
        key: Callable[[_T], _Key],
    ) -> None:
        """Work out what of it is not known."""
        missing = {name: item for name, item in asked.items() if name not in known}
        known.update(zip(missing, self._map(work, list(missing.values()), key=key), strict=True))

    def planner_bounds(
        self, setups: Sequence[Setup], limits: Sequence[int], planner: Recompute = PLANNER
    ) -> list[float | None]:
        """What a planner's choice takes, at least; None where none fits."""
        asked = [(setup, limit, planner) for setup, limit in zip(setups, limits, strict=True)]
        return self._map(_planner_bound, asked, key=lambda one: _signature(one[0]))

    def figures(self, tasks: Sequence[Task]) -> list[Figures]:
        """What the candidates need and take."""
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
        """Of each planner's candidate its stages, shared by all processes; of others, and with one process, none."""
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
        """In the order of the items. Those that share tensors are worked out by the same process, if possible.

        Args:
            note: is given results by the numbers of their items, as they come.
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
    """Setups with the same have the same regions: their region signatures are alike."""
    layout = setup.layout
    return layout.tp, layout.sp, layout.cp, layout.ep, setup.micro_batch


def _answers(known: Figures | None, task: Task) -> bool:
    """Is what is known enough?"""
    if known is None:
        return False
    fits = task.limit_bytes is None or known.peak_bytes <= task.limit_bytes
    return known.seconds is not None or not fits or task.candidate.budget_bytes is not None


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
    if planner.offload:  # what is on the host costs nothing, as long as its copies hide
        return least_seconds(timed)
    return planner_seconds(plain, timed, limit_bytes)


def _solve_stage(question: SearchQuestion, asked: tuple[SearchCandidate, int]) -> StageAnswer:
    candidate, index = asked
    assert candidate.budget_bytes is not None
    return solve_stage(candidate.run(question.template), index, candidate.budget_bytes, question.hardware)


def _work(question: SearchQuestion, asked: tuple[Task, Mapping[int, StageAnswer]]) -> Figures:
    """Args: asked: a candidate, and of its stages those that have been solved."""
    task, solved = asked
    candidate = task.candidate
    run = candidate.run(question.template)
    if candidate.recompute.whole:
        run = settled(run, candidate.budget_bytes)
    elif candidate.budget_bytes is not None:
        return _planned(run, question.hardware, candidate.budget_bytes, solved)
    found = forecast_sizes(run)
    peak = found.peak_bytes
    fits = task.limit_bytes is None or peak <= task.limit_bytes
    return Figures(
        peak_bytes=peak,
        static_bytes=static_bytes(found),
        host_bytes=_host_bytes(run),
        whole=run.recompute.whole,
        seconds=Seconds.of(_timed(found, question.hardware)) if fits else None,
    )


def _timed(found: Forecast, hardware: Hardware) -> Estimate:
    """Of a `forecast_sizes`."""
    return estimate(found.run, hardware, outlined=[stage.groups for stage in found.stages])


def _planned(run: Run, hardware: Hardware, budget_bytes: int, solved: Mapping[int, StageAnswer]) -> Figures:
    """The planner's choice; where there is none, bytes that it could have done with."""
    static = static_bytes(forecast_sizes(run))
    try:
        choice = choose(run, budget_bytes, hardware, solved=solved)
    except Infeasible as error:
        return Figures(peak_bytes=error.minimum_budget_bytes, static_bytes=static)
    kept = {part.name: part.chosen for part in choice.forecast.parts}
    chosen = [kept[name] for name in run.model.layer_names]
    return Figures(
        peak_bytes=choice.forecast.peak_bytes,
        static_bytes=static,
        host_bytes=choice.host_bytes,
        policies=tuple(_policies(choice)),
        seconds=Seconds.of(estimate(choice.forecast.run, hardware, chosen=chosen)),
    )


def _policies(choice: AutoForecast) -> Iterator[str]:
    """By stage, what its layers do: "12 mixed, 8 none"."""
    words = dict(layer_policies(choice))
    for stage in choice.forecast.stages:
        counted = Counter(words[part.name] for chunk in stage.parts for part in chunk if part.is_layer)
        yield ", ".join(f"{count} {word}" for word, count in sorted(counted.items()))


def _host_bytes(run: Run) -> int:
    """What offloading puts on one rank's share of the host, at most."""
    if run.recompute.sent:
        sent = [
            (stage, [sum(sent_to_host(run, own).values()) for own in stage.groups])
            for stage in forecast_sizes(run).stages
        ]
        return max(sum(map(mul, state.alive, own)) for stage, own in sent for state in stage.load.occupancies)
    if not run.recompute.offload:
        return 0
    stays = replace(run, recompute=replace(run.recompute, offload=False))
    return max(stage.activation_bytes for stage in forecast_sizes(stays).stages)
