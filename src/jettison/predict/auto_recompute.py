"""`--recompute auto`: for each pipeline stage, the fastest choice of what its layers keep, compute again or offload.

What fits is decided stage by stage: NOTE [ A stage as a step problem ] in `predict.stage_choice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Final

from jettison.core.errors import Infeasible
from jettison.core.units import format_bytes
from jettison.cost.execution import execution_of
from jettison.predict.allowance import Limit
from jettison.predict.forecast import Forecast, Stage, forecast
from jettison.predict.ranges import FitBudget, FitRule, fit_budgets
from jettison.predict.stage_choice import StageChoice, StageOutcome
from jettison.predict.stage_time import Timing
from jettison.predict.stages import Staying, kept_by
from jettison.predict.time import estimate, recomputing
from jettison.predict.whole_micro_batches import largest_window, with_whole
from jettison.solve.plan import PolicyWord, policy_word
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import MOST, Mode
from jettison.spec.run import Run


@dataclass(frozen=True, kw_only=True)
class AutoForecast:
    """A run under the choice, and what the choice costs.

    ``seconds``: of recompute and of waiting for copies (``stalled_seconds``) in one micro-batch on the stage where that
    is most, the mean where some are kept whole; ``plain_seconds``: of a micro-batch's forward and backward there
    without it; both as `hardware` has it.
    ``host_bytes``: of the stage that has most on the host. ``gap``: the share of a step that a better choice could
    still save, at most, of the stage where that is largest.
    """

    forecast: Forecast
    hardware: Hardware
    budget_bytes: int
    minimum_budget_bytes: int
    seconds: float
    stalled_seconds: float
    plain_seconds: float
    host_bytes: int
    host_budget_bytes: int | None
    gap: float
    fit_rule: FitRule = FitRule.BUDGET

    @property
    def overhead_fraction(self) -> float:
        """Recompute as a share of a step without it."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 0.0

    @cached_property
    def step_seconds(self) -> float:
        """A whole step, as `predict.time.estimate` models it."""
        kept = {part.name: part.chosen for part in self.forecast.parts}
        run = self.forecast.run
        return estimate(run, self.hardware, chosen=[kept[name] for name in run.model.layer_names]).step_seconds

    @property
    def segments(self) -> tuple[tuple[str, str], ...]:
        """Runs of layers that hold the first one's input alone: the names of the first and the last, in model order."""
        layers = [part for part in self.forecast.parts if part.is_layer]
        return tuple(
            (part.name, layers[at + part.segment - 1].name)
            for at, part in enumerate(layers)
            if part.segment > 1 and part.first
        )


Stages = dict[tuple[object, ...], StageChoice]
"""What stages can do, by `_key`: the same at every budget."""
StageAnswer = tuple[int, StageOutcome | None]
"""The fewest bytes that a stage is known to fit, and its answer."""


def choose(
    run: Run,
    budget_bytes: int,
    hardware: Hardware,
    *,
    host_budget_bytes: int | None = None,
    stages: Stages | None = None,
    solved: Mapping[int, StageAnswer] = MappingProxyType({}),
) -> AutoForecast:
    """The fastest choice of every stage that keeps each rank at or below ``budget_bytes``.

    Where ``run.recompute.offload`` says so, layers may also send what they save to the host and fetch it back.

    Args:
        hardware: whose prices decide.
        host_budget_bytes: of one rank, for what is offloaded; left out, what the hardware's file says.
        stages: where the same run was asked for at other budgets, on the same hardware: what was found out for them.
        solved: what `solve_stage` said of stages, by their number.

    Raises:
        Infeasible: some stage fits no choice; the error carries a budget that all stages fit.
        UsageError: the run itself makes no sense, or the hardware's file lacks a figure.
    """
    plain, offload = _undecided(run), run.recompute.offload
    host = hardware.host_memory_bytes if host_budget_bytes is None else host_budget_bytes
    shared: Stages = {} if stages is None else stages
    chosen: dict[str, Staying | None] = {}
    known = {_key(plain.stages[index]): answer for index, answer in solved.items()}
    answers = []
    smallest = 0
    for stage in plain.stages:
        key = _key(stage)
        if key not in known:
            if key not in shared:
                shared[key] = _choice(run, stage, hardware, host)
            known[key] = shared[key].solve(budget_bytes)
        fewest, answer = known[key]
        smallest = max(smallest, fewest)
        if answer is not None:
            answers.append(replace(answer, added_seconds=recomputing(run, stage.index) * answer.added_seconds))
            names = [part.name for chunk in stage.parts for part in chunk]
            chosen.update(zip(names, answer.staying, strict=True))
    if len(answers) < len(plain.stages):
        how = "Every layer computes all that it can again, alone or in a segment with others."
        if offload:
            room = "" if host is None else f", which has {format_bytes(host)} for it"
            how = f"Every layer computes all that it can again, alone or with others, or sends it to the host{room}."
        raise Infeasible(minimum_budget_bytes=smallest, budget_bytes=budget_bytes, reason=how)
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    by_layer = [chosen.get(name) for name in run.model.layer_names]
    most = max(answers, key=lambda answer: answer.added_seconds)
    return AutoForecast(
        forecast=forecast(plain.run, by_layer),
        hardware=hardware,
        budget_bytes=budget_bytes,
        minimum_budget_bytes=smallest,
        seconds=most.added_seconds,
        stalled_seconds=most.stalled_seconds,
        plain_seconds=max(_plain_seconds(timing, stage) for stage in plain.stages),
        host_bytes=max(answer.host_bytes for answer in answers),
        host_budget_bytes=host if offload else None,
        gap=max(answer.gap for answer in answers),
    )


def smallest_budget(run: Run, hardware: Hardware) -> int:
    """The fewest bytes of allocations on each rank for which `choose` has an answer."""
    stages = (_undecided(run).stages[index] for index in distinct_stages(run))
    each = (_choice(run, stage, hardware, hardware.host_memory_bytes) for stage in stages)
    return max(one.smallest_budget_bytes for one in each)


def distinct_stages(run: Run) -> list[int]:
    """Stages that have to be solved: no earlier one is alike."""
    first: dict[tuple[object, ...], int] = {}
    for stage in _undecided(run).stages:
        first.setdefault(_key(stage), stage.index)
    return list(first.values())


def solve_stage(
    run: Run, index: int, budget_bytes: int, hardware: Hardware, *, host_budget_bytes: int | None = None
) -> StageAnswer:
    """One stage of `choose`, which several processes can so share."""
    host = hardware.host_memory_bytes if host_budget_bytes is None else host_budget_bytes
    return _choice(run, _undecided(run).stages[index], hardware, host).solve(budget_bytes)


def _choice(run: Run, stage: Stage, hardware: Hardware, host_budget_bytes: int | None) -> StageChoice:
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    return StageChoice(run=_undecided(run).run, stage=stage, timing=timing, host_budget_bytes=host_budget_bytes)


@lru_cache(maxsize=4)
def _undecided(run: Run) -> Forecast:
    return forecast(replace(run, recompute=replace(run.recompute, mode=Mode.AUTO)))


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
    load = stage.load
    beside = load.fixed, load.sent, load.received, load.receives, load.lifetimes, load.transfers
    states = tuple((o.forward, o.weight, o.learned, o.reduced, o.step.work, o.step.chunk) for o in load.occupancies)
    return groups, states, beside


def layer_policies(answer: AutoForecast) -> Iterator[tuple[str, str]]:
    """(layer, none, selective, full, offload or mixed): what the choice amounts to."""
    for part in answer.forecast.parts:
        if part.is_layer:
            moved = frozenset() if part.chosen is None else part.chosen.moved
            word = policy_word(part.region.program, part.kept, moved)
            if word is PolicyWord.MIXED and not moved:
                program = part.region.program
                core = program.recompute_set(kept_by(part.region, Mode.SELECTIVE))
                if set(program.recompute_set(part.kept)) <= set(core):  # all that is recomputed
                    word = PolicyWord.SELECTIVE
            yield part.name, str(word)


# beside micro-batches that are kept whole -----------------------------------------------------------------------------
#
# With more of them whole there is less room for the others, which recompute more. Neither the bytes nor the seconds of
# that are a convex function of the number, so some numbers are tried, and then those between the best one and its
# neighbours, until none is left.

TRIED: Final = 6
"""Numbers at first, from none to all of the first stage's window."""


def choose_within(run: Run, limit: Limit, hardware: Hardware, *, host_budget_bytes: int | None = None) -> AutoForecast:
    """Choose within a budget; for a GPU within the first of `fit_budgets` with a choice.

    Raises:
        Infeasible, UsageError: see `choose`; for a GPU, of bytes that may fit.
    """
    *surer, last = fit_budgets(run, limit)
    stages: Stages = {}

    def chosen(budget: FitBudget) -> AutoForecast:
        made = choose_with_whole(run, budget.nbytes, hardware, host_budget_bytes=host_budget_bytes, stages=stages)
        return replace(made, fit_rule=budget.rule)

    for budget in surer:
        with suppress(Infeasible):
            return chosen(budget)
    return chosen(last)


def choose_with_whole(
    run: Run,
    budget_bytes: int,
    hardware: Hardware,
    *,
    host_budget_bytes: int | None = None,
    stages: Stages | None = None,
) -> AutoForecast:
    """`choose`; where `MOST` are asked for, with the number of micro-batches kept whole that makes the fastest step.

    Raises:
        Infeasible, UsageError: see `choose`.
    """
    if run.recompute.whole != MOST:
        return choose(run, budget_bytes, hardware, host_budget_bytes=host_budget_bytes, stages=stages)
    known: dict[int, tuple[float, AutoForecast | None]] = {}

    def seconds(whole: int) -> float:
        if whole not in known:
            known[whole] = _tried(with_whole(run, whole), budget_bytes, hardware)
        return known[whole][0]

    plain = choose(with_whole(run, 0), budget_bytes, hardware)
    known[0] = plain.step_seconds, plain
    size = largest_window(run)
    tried = sorted({size * i // (TRIED - 1) for i in range(TRIED)})
    while True:
        best = min(tried, key=seconds)
        at = tried.index(best)
        beside = [(best + tried[i]) // 2 for i in (at - 1, at + 1) if 0 <= i < len(tried)]
        fresh = [whole for whole in beside if whole not in tried]
        if not fresh:
            found = known[best][1]
            assert found is not None, "without any whole it fits"
            return found
        tried = sorted({*tried, *fresh})


def _tried(run: Run, budget_bytes: int, hardware: Hardware) -> tuple[float, AutoForecast | None]:
    try:
        found = choose(run, budget_bytes, hardware)
    except Infeasible:
        return float("inf"), None
    return found.step_seconds, found
