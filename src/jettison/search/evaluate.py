"""Candidates of a search, worked out: in this process or on several cores, and never twice.

What has been worked out is known by a digest of the candidate, of the run and of the hardware; it can be written to a
file as it comes, and read from there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import mul
from threading import Lock
from types import TracebackType
from typing import Final, TypeVar

from jettison import __version__
from jettison.core.errors import Infeasible
from jettison.core.process import seldom_collected
from jettison.predict.auto_recompute import (
    AutoForecast,
    StageAnswer,
    choose,
    distinct_stages,
    layer_policies,
    solve_stage,
)
from jettison.predict.forecast import Forecast, Stage, forecast_sizes
from jettison.predict.time import Estimate, estimate
from jettison.predict.units import sent_to_host
from jettison.predict.whole_micro_batches import settled
from jettison.search.bounds import Bounds, bound, least_seconds, static_bytes, whole_seconds, whole_static_bytes
from jettison.search.figures import Figures, Seconds
from jettison.search.journal import Journal
from jettison.search.planner_time_bound import planner_seconds
from jettison.search.space import Candidate, Setup, setup_run
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
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

    candidate: Candidate
    limit_bytes: int | None = None


_T = TypeVar("_T")
_R = TypeVar("_R")


class Bench:
    """Works out candidates; several threads may ask at once.

    Args:
        jobs: processes.
        journal: what has been worked out before, and where to write what comes.
    """

    def __init__(self, question: Question, *, jobs: int = 1, journal: Journal | None = None) -> None:
        self.question = question
        self.jobs = jobs
        self.evaluated = 0
        self._journal = journal
        self._context = question.digest
        self._known: dict[str, Figures] = dict(journal.known) if journal else {}
        self._whole: dict[tuple[object, ...], float] = {}
        self._statics: dict[tuple[object, ...], int] = {}
        self._bounds: dict[tuple[object, ...], Bounds] = {}
        self._pool: Workers[Question] | None = None
        self._seldom = seldom_collected()
        self._lock = Lock()  # of what is known, written down and started

    def __enter__(self) -> Bench:
        self._seldom.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seldom.__exit__(None, None, None)
        if self._pool is None:
            return
        self._pool.end(now=error is not None)

    def rough(self, setups: Sequence[Setup]) -> list[tuple[float, int]]:
        """Seconds and bytes of any plan of each setup, in a hurry: no less than the sharp ones."""
        if self.jobs > 1 and len(setups) >= CERTAIN:
            self._workers()  # they import while this process looks what there is to do
        scenes = dict(zip(map(_scene, setups), setups, strict=True))
        missing = {scene: setup for scene, setup in scenes.items() if scene not in self._whole}
        self._whole.update(zip(missing, self._map(_whole, list(missing.values()), key=_scene), strict=True))
        found = []
        for setup in setups:
            count, stages = setup.micro_batches, setup.layout.pp
            found.append((count * self._whole[_scene(setup)] / stages, self._static(setup.layout) // stages))
        return found

    def _static(self, layout: Layout) -> int:
        """Rule 3, of all layouts that share what decides it."""
        key = layout.tp, layout.ep, layout.shards, layout.zero
        if key not in self._statics:
            alike = Layout(tp=layout.tp, ep=layout.ep, dp=layout.shards, zero=layout.zero, reshard=layout.reshard)
            run = replace(self.question.template, layout=alike, micro_batches=1, recompute=Recompute())
            self._statics[key] = whole_static_bytes(run)
        return self._statics[key]

    def bounds(self, setups: Sequence[Setup], modes: tuple[Mode, ...] = (Mode.NONE,)) -> list[Bounds]:
        """What plans that treat layers so take of each setup, at least."""
        keys = [(*_bounded(setup), modes) for setup in setups]
        alike = dict(zip(keys, setups, strict=True))
        missing = {key: (setup, modes) for key, setup in alike.items() if key not in self._bounds}
        found = self._map(_bound, list(missing.values()), key=lambda one: _scene(one[0]))
        self._bounds.update(zip(missing, found, strict=True))
        return [self._bounds[key] for key in keys]

    def planner_bounds(
        self, setups: Sequence[Setup], limits: Sequence[int], planner: Recompute = PLANNER
    ) -> list[float | None]:
        """What a planner's choice takes, at least; None where none fits."""
        asked = [(setup, limit, planner) for setup, limit in zip(setups, limits, strict=True)]
        return self._map(_planner_bound, asked, key=lambda one: _scene(one[0]))

    def figures(self, tasks: Sequence[Task]) -> list[Figures]:
        """What the candidates need and take."""
        keys = [self._key(task.candidate) for task in tasks]
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if not _answers(self._known.get(key), task)}
        names = list(missing)

        def note(part: Mapping[int, Figures]) -> None:
            fresh = {names[i]: figures for i, figures in part.items()}
            with self._lock:
                self._known |= fresh
                self.evaluated += len(fresh)
                if self._journal is not None:
                    self._journal.write(fresh)

        asked = list(zip(missing.values(), self._solved(list(missing.values())), strict=True))
        self._map(_work, asked, key=lambda one: _scene(one[0].candidate.setup), note=note)
        return [self._known[key] for key in keys]

    def _solved(self, tasks: Sequence[Task]) -> list[dict[int, StageAnswer]]:
        """Of each planner's candidate its stages, shared by all processes; of others, and with one process, none."""
        found: list[dict[int, StageAnswer]] = [{} for _ in tasks]
        if self.jobs == 1:
            return found
        template = self.question.template
        planned = [at for at, task in enumerate(tasks) if _is_planned(task.candidate)]
        parts = [(at, index) for at in planned for index in distinct_stages(tasks[at].candidate.run(template))]
        stages = [(tasks[at].candidate, index) for at, index in parts]
        answers = self._map(_solve_stage, stages, key=lambda one: (*_scene(one[0].setup), one[1]))
        for (at, index), answer in zip(parts, answers, strict=True):
            found[at][index] = answer
        return found

    def _key(self, candidate: Candidate) -> str:
        return hashlib.sha256(f"{self._context} {candidate.text}".encode()).hexdigest()[:24]

    def _map(
        self,
        work: Callable[[Question, _T], _R],
        items: Sequence[_T],
        *,
        key: Callable[[_T], tuple[object, ...]],
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

    def _workers(self) -> Workers[Question]:
        with self._lock:
            if self._pool is None:
                self._pool = Workers(self.question, self.jobs)
            return self._pool


def _scene(setup: Setup) -> tuple[object, ...]:
    """Setups with the same have the same regions."""
    layout = setup.layout
    return layout.tp, layout.sp, layout.cp, layout.ep, setup.micro_batch


def _bounded(setup: Setup) -> tuple[object, ...]:
    """Setups with the same have the same bounds."""
    return *_scene(setup), setup.layout.dp, setup.layout.pp, setup.layout.zero, setup.micro_batches


def _answers(known: Figures | None, task: Task) -> bool:
    """Is what is known enough?"""
    if known is None:
        return False
    fits = task.limit_bytes is None or known.peak_bytes <= task.limit_bytes
    return known.seconds is not None or not fits or task.candidate.budget_bytes is not None


# in a worker ----------------------------------------------------------------------------------------------------------


def _whole(question: Question, setup: Setup) -> float:
    return whole_seconds(setup_run(setup, question.template), question.hardware)


def _bound(question: Question, asked: tuple[Setup, tuple[Mode, ...]]) -> Bounds:
    setup, modes = asked
    return bound(setup_run(setup, question.template), question.hardware, modes)


def _planner_bound(question: Question, asked: tuple[Setup, int, Recompute]) -> float | None:
    setup, limit_bytes, planner = asked
    run = setup_run(setup, question.template, Recompute(mode=planner.mode))
    plain = forecast_sizes(run)
    timed = _timed(plain, question.hardware)
    if planner.offload:  # what is on the host costs nothing, as long as its copies hide
        return least_seconds(timed)
    return planner_seconds(plain, timed, limit_bytes)


def _is_planned(candidate: Candidate) -> bool:
    """Does a planner choose for it?"""
    return candidate.budget_bytes is not None and not candidate.recompute.whole


def _solve_stage(question: Question, asked: tuple[Candidate, int]) -> StageAnswer:
    candidate, index = asked
    assert candidate.budget_bytes is not None
    return solve_stage(candidate.run(question.template), index, candidate.budget_bytes, question.hardware)


def _work(question: Question, asked: tuple[Task, Mapping[int, StageAnswer]]) -> Figures:
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
        seconds=_seconds(_timed(found, question.hardware)) if fits else None,
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
        seconds=_seconds(estimate(choice.forecast.run, hardware, chosen=chosen)),
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
        return max(_sent_bytes(run, stage) for stage in forecast_sizes(run).stages)
    if not run.recompute.offload:
        return 0
    stays: Forecast = forecast_sizes(replace(run, recompute=replace(run.recompute, offload=False)))
    return max(stage.activation_bytes for stage in stays.stages)


def _sent_bytes(run: Run, stage: Stage) -> int:
    """By lists of modules, of all micro-batches in flight on a stage."""
    sent = [sum(sent_to_host(run, chunk).values()) for chunk in stage.groups]
    return max(sum(map(mul, state.alive, sent)) for state in stage.load.occupancies)


def _seconds(found: Estimate) -> Seconds:
    parts = found.breakdown
    return Seconds(
        step=found.step_seconds,
        least=least_seconds(found),
        compute=parts.compute,
        communication=parts.communication,
        bubble=parts.bubble,
        recompute=parts.recompute,
        other=parts.other,
        mfu=found.mfu,
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
    )
