"""`--recompute auto`: for each pipeline stage, the fastest choice of what its layers keep that fits a budget.

NOTE [ A stage as a step problem ]
The planner of a single step (`solve.chain`) counts each region's held bytes once. A stage with n micro-batches in
flight holds them n times at the start of a backward, so they are given n times. That is exact for the last region's
backward, where the peak mostly is, and too little for earlier ones, whose successors still hold n - 1 of them. The
choice is therefore played through the stage's real timeline, which is the judge (`solve.refine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jettison.cost.execution import execution_of
from jettison.cost.layer import PriceModel
from jettison.errors import Infeasible
from jettison.formula.region import Region
from jettison.ledger.timeline import Unit
from jettison.predict.forecast import Forecast, Stage, forecast
from jettison.predict.stage_time import Timing
from jettison.predict.stages import MIXED, RegionGroup, StageRegion
from jettison.predict.timeline_units import units
from jettison.solve.chain import choose as choose_options
from jettison.solve.frontier import FrontierPoint, pareto_frontier, plain_point
from jettison.solve.moves import minimum_budget
from jettison.solve.problem import ProblemRegion, RegionOption, RootOption, StepProblem
from jettison.solve.refine import fastest, refine
from jettison.spec.hardware import Hardware
from jettison.spec.run import Gradients, Mode, Recompute, Run

Chosen = dict[str, frozenset[int]]
"""Layer -> buffers kept; a layer that is not named keeps everything."""


@dataclass(frozen=True, kw_only=True)
class AutoForecast:
    """A run under the choice, and what the choice costs.

    ``seconds``: of recompute in one micro-batch's backward on the stage that computes most again; ``plain_seconds``: of
    a micro-batch's forward and backward there without it; both as `hardware` has it. ``gap``: the share of a step that
    a better choice could still save, at most, of the stage where that is largest.
    """

    forecast: Forecast
    hardware: Hardware
    budget_bytes: int
    minimum_budget_bytes: int
    seconds: float
    plain_seconds: float
    gap: float

    @property
    def overhead_fraction(self) -> float:
        """Recompute as a share of a step without it."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Of all micro-batches on that stage, without bubbles and communication: a lower limit."""
        return (self.seconds + self.plain_seconds) * self.forecast.run.micro_batches


def choose(run: Run, budget_bytes: int, hardware: Hardware) -> AutoForecast:
    """The fastest choice of every stage that keeps each rank at or below ``budget_bytes``.

    Args:
        hardware: whose prices decide.

    Raises:
        Infeasible: some stage fits no choice; the error carries a budget that all stages fit.
        UsageError: the run itself makes no sense, or the hardware's file lacks a figure.
    """
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    plain = forecast(replace(run, recompute=Recompute(mode=Mode.AUTO)))
    chosen: Chosen = {}
    known: dict[tuple[object, ...], tuple[int, _Answer | None]] = {}
    answers = []
    smallest = 0
    for stage in plain.stages:
        key = _key(stage)
        if key not in known:
            known[key] = _StageChoice(run=plain.run, stage=stage, timing=timing).solve(budget_bytes)
        fewest, answer = known[key]
        smallest = max(smallest, fewest)
        if answer is None:
            continue
        answers.append(answer)
        names = [part.name for chunk in stage.parts for part in chunk]
        chosen.update({name: kept for name, kept in zip(names, answer.kept, strict=True) if kept is not None})
    if len(answers) < len(plain.stages):
        raise Infeasible(
            minimum_budget_bytes=smallest,
            budget_bytes=budget_bytes,
            reason="Every layer computes all that it can again.",
        )
    by_layer = [chosen.get(name) for name in run.model.layer_names]
    return AutoForecast(
        forecast=forecast(plain.run, by_layer),
        hardware=hardware,
        budget_bytes=budget_bytes,
        minimum_budget_bytes=smallest,
        seconds=max(answer.added_seconds for answer in answers),
        plain_seconds=max(_plain_seconds(timing, stage) for stage in plain.stages),
        gap=max(answer.gap for answer in answers),
    )


def _plain_seconds(timing: Timing, stage: Stage) -> float:
    """A forward and a backward that computes nothing again."""
    total = 0.0
    for group in (group for chunk in stage.groups for group in chunk):
        took = timing.prices(group.part.layer).seconds(group.part.region)
        total += len(group.names) * (took.forward.seconds + took.backward.seconds)
    return total


def _key(stage: Stage) -> tuple[object, ...]:
    """Stages with equal keys have equal answers."""
    groups = tuple((group.part.region, len(group.names)) for chunk in stage.groups for group in chunk)
    return groups, tuple((o.forward, o.weight) for o in stage.load.occupancies), stage.load.fixed, stage.load.sent


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """By part of the stage what it keeps, or None for everything; and the peak by its timeline."""

    kept: tuple[frozenset[int] | None, ...]
    needs: int
    level: int
    added_seconds: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class _StageChoice:
    """One stage's problem. See NOTE [ A stage as a step problem ]."""

    run: Run
    stage: Stage
    timing: Timing

    @property
    def parts(self) -> list[StageRegion]:
        return [part for chunk in self.stage.parts for part in chunk]

    def solve(self, budget_bytes: int) -> tuple[int, _Answer | None]:
        """The fewest bytes that the stage is known to fit, and the fastest answer that fits."""
        points = self._points()
        problem = self._problem(points)
        smallest = self._kept(points, tuple(options[0].key for options in points))
        minimum = self._peak(smallest)
        seconds = sum(options[0].seconds for options in points)
        least = _Answer(kept=smallest, needs=minimum, level=minimum, added_seconds=seconds, gap=1.0)

        def ask(asked: int) -> _Answer:
            found = choose_options(problem, asked)
            kept = self._kept(points, found.choice.regions)
            return _Answer(
                kept=kept,
                needs=self._peak(kept),
                level=found.levels.peak_bytes,
                added_seconds=found.certificate.objective_seconds,
                gap=found.certificate.gap,
            )

        found = [least, *refine(ask, budget_bytes, minimum_budget(problem))]
        if all(one.needs > budget_bytes for one in found):
            return minimum, None  # the answer that any budget leads to
        best = fastest(found, budget_bytes)
        return min(minimum, best.needs), best

    def _points(self) -> list[tuple[FrontierPoint, ...]]:
        """What each part can keep, fewest bytes first; only layers have a choice."""
        known: dict[tuple[PriceModel, Region], tuple[FrontierPoint, ...]] = {}

        def of(part: StageRegion) -> tuple[FrontierPoint, ...]:
            prices, region = self.timing.prices(part.layer), part.region
            if (prices, region) not in known:
                known[prices, region] = pareto_frontier(region.program, prices.op_seconds(region))
            return known[prices, region]

        return [of(part) if part.is_layer else (plain_point(part.region.program),) for part in self.parts]

    def _problem(self, points: Sequence[tuple[FrontierPoint, ...]]) -> StepProblem:
        load = self.stage.load
        fresh = load.gradients is Gradients.ONE_BY_ONE and load.micro_batches == 1
        static = load.fixed + load.state + (0 if fresh else load.gradient_bytes)
        regions = tuple(self._region(part, options, fresh) for part, options in zip(self.parts, points, strict=True))
        nothing = (0,) * len(regions)
        root = RootOption(
            key="",
            held_forward_bytes=nothing,
            held_backward_bytes=nothing,
            loss_peak_bytes=0,
            tail_peak_bytes=0,
            seconds=0.0,
        )
        optimizer = load.gradient_bytes if fresh else 0
        return StepProblem(
            static_bytes=static,
            optimizer_peak_bytes=optimizer + load.optimizer_transient,
            regions=regions,
            root=(root,),
        )

    def _region(self, part: StageRegion, options: Sequence[FrontierPoint], fresh: bool) -> ProblemRegion:
        chunk = next(i for i, parts in enumerate(self.stage.parts) if any(p.name == part.name for p in parts))
        copies = max(o.forward[chunk] + o.weight[chunk] for o in self.stage.load.occupancies)
        made = []
        for point in options:
            unit = self._unit(part, point)
            rise = unit.backward_peak if fresh else unit.adding_peak
            made.append(
                RegionOption(
                    key=point.key,
                    resident_bytes=copies * unit.resident,
                    forward_peak_bytes=unit.forward_peak,
                    backward_peak_bytes=rise,
                    seconds=point.seconds,
                )
            )
        gradient = self._unit(part, options[-1]).gradient if fresh else 0
        return ProblemRegion(name=part.name, class_key=part.name, options=tuple(made), gradient_bytes=gradient)

    def _unit(self, part: StageRegion, point: FrontierPoint) -> Unit:
        kept = replace(part, policy=MIXED, chosen=point.kept) if part.is_layer else part
        return units(self.run, [RegionGroup(part=kept, names=(part.name,))])[0]

    def _kept(
        self, points: Sequence[tuple[FrontierPoint, ...]], keys: Sequence[str]
    ) -> tuple[frozenset[int] | None, ...]:
        return tuple(
            next(point.kept for point in options if point.key == key) if part.is_layer else None
            for part, options, key in zip(self.parts, points, keys, strict=True)
        )

    def _peak(self, kept: Sequence[frozenset[int] | None]) -> int:
        """Of the stage, by its timeline."""
        by_name = {part.name: buffers for part, buffers in zip(self.parts, kept, strict=True)}
        chosen = [by_name.get(name) for name in self.run.model.layer_names]
        return forecast(self.run, chosen).stages[self.stage.index].peak.nbytes


def layer_policies(answer: AutoForecast) -> Iterator[tuple[str, str]]:
    """(layer, none, full or mixed): what the choice amounts to."""
    from jettison.solve.plan import policy_word

    for part in answer.forecast.parts:
        if part.is_layer:
            yield part.name, str(policy_word(part.region.program, part.kept))
