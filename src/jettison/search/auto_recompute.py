"""`--recompute auto`: the fastest plan of kept, recomputed and offloaded tensors for each pipeline stage.

Each stage is planned separately: NOTE [ A stage as a step problem ] in `search.stage_choice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Final

from jettison.core.errors import Infeasible
from jettison.core.objects import OnDemand
from jettison.core.units import format_bytes
from jettison.cost.execution import execution_of
from jettison.ledger.program import Source
from jettison.predict.forecast import Forecast, Stage, forecast
from jettison.predict.ranges import fit_budgets, most_bytes
from jettison.predict.stages import KeptBuffers, kept_by, pipeline_shape
from jettison.predict.time import Estimate, Timing, estimate, recomputing
from jettison.search.largest_fit import with_whole
from jettison.search.stage_choice import StageChoice, StageOutcome
from jettison.solve.plan import PolicyName, policy_name
from jettison.spec.device_allowance import FitBudget, FitRule, Limit
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import MOST, Mode
from jettison.spec.run import Run


@dataclass(frozen=True, kw_only=True)
class AutoForecast:
    """A planned run, and the cost of its plan.

    ``seconds``: recompute and stalls of copies (``stalled_seconds``) in one micro-batch on the stage with most, the
    mean over micro-batches with and without checkpointing; ``plain_seconds``: a micro-batch's forward and backward
    there without it; both on `hardware`.
    ``host_bytes``: of the stage with most offloaded. ``gap``: the largest share of a step by which a stage's plan may
    be slower than the optimum.
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
        """Recompute and stalls as a share of a step without them."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Step time by `predict.time.estimate`."""
        return self.estimate.step_seconds

    @cached_property
    def estimate(self) -> Estimate:
        """Times of a step under the choice."""
        return estimate(self.forecast.run, self.hardware, chosen=self.chosen)

    @property
    def chosen(self) -> list[KeptBuffers | None]:
        """Kept buffers of each layer, in model order."""
        return [part.chosen for part in self.forecast.parts if part.is_layer]

    @property
    def segments(self) -> tuple[tuple[str, str], ...]:
        """Names of the first and last layer of each segment, which keeps only its input, in model order."""
        layers = [part for part in self.forecast.parts if part.is_layer]
        return tuple(
            (part.name, layers[at + part.layers - 1].name)
            for at, part in enumerate(layers)
            if part.layers > 1 and part.first
        )


StageAnswer = tuple[int, StageOutcome | None]
"""Smallest budget that a stage is known to fit, and its plan."""


def choose(
    run: Run,
    budget_bytes: int,
    hardware: Hardware,
    *,
    host_budget_bytes: int | None = None,
    solved: Mapping[int, StageAnswer] = MappingProxyType({}),
) -> AutoForecast:
    """Return the fastest plan of every stage whose peak is at most ``budget_bytes``.

    With ``run.recompute.offload``, layers may also offload saved tensors to CPU.

    Args:
        hardware: device of the cost model.
        host_budget_bytes: of one rank, for offloaded tensors; None: the hardware file's.
        solved: results of `solve_stage`, by stage.

    Raises:
        Infeasible: some stage has no plan; the error carries a budget that all stages fit.
        UsageError: an invalid run, or a figure missing in the hardware's file.
    """
    plain, offload = _undecided(run), run.recompute.offload
    host = hardware.host_memory_bytes if host_budget_bytes is None else host_budget_bytes
    problems = _problems(run, hardware, host)
    chosen: dict[str, KeptBuffers | None] = {}
    known = {id(problems[index]): answer for index, answer in solved.items()}
    answers = []
    smallest = 0
    for stage, problem in zip(plain.stages, problems, strict=True):
        if id(problem) not in known:
            known[id(problem)] = problem.solve(budget_bytes)
        fewest, answer = known[id(problem)]
        smallest = max(smallest, fewest)
        if answer is not None:
            answers.append(replace(answer, added_seconds=recomputing(run, stage.index) * answer.added_seconds))
            names = [part.name for chunk in stage.parts for part in chunk]
            chosen.update(zip(names, answer.kept_buffers, strict=True))
    if len(answers) < len(plain.stages):
        room = "CPU memory" if host is None else f"{format_bytes(host)} of CPU memory"
        how = "There every layer recomputes all that it can, alone or in a segment of several"
        how += f", or offloads it to {room}." if offload else "."
        raise Infeasible(minimum_budget_bytes=smallest, budget_bytes=budget_bytes, reason=how)
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    items = ([item for chunk in stage.groups for item in timing.items(chunk)] for stage in plain.stages)
    by_layer = [chosen.get(name) for name in run.model.layer_names]
    most = max(answers, key=lambda answer: answer.added_seconds)
    return AutoForecast(
        forecast=forecast(plain.run, by_layer),
        hardware=hardware,
        budget_bytes=budget_bytes,
        minimum_budget_bytes=smallest,
        seconds=most.added_seconds,
        stalled_seconds=most.stalled_seconds,
        plain_seconds=max(
            sum(item.count * sum(part.seconds for part in item.seconds) for item in own) for own in items
        ),
        host_bytes=max(answer.host_bytes for answer in answers),
        host_budget_bytes=host if offload else None,
        gap=max(answer.gap for answer in answers),
    )


def smallest_budget(run: Run, hardware: Hardware) -> int:
    """Return the smallest budget for which `choose` finds a plan."""
    return max(each.least.needs for each in _problems(run, hardware, hardware.host_memory_bytes))


def distinct_stages(run: Run) -> list[int]:
    """Stages that have to be solved: the first of equal ones."""
    keys = list(map(_key, _undecided(run).stages))
    return [keys.index(key) for key in dict.fromkeys(keys)]


def solve_stage(run: Run, index: int, budget_bytes: int, hardware: Hardware) -> StageAnswer:
    """Solve one stage of `choose`, so that several processes can share the work."""
    return _problems(run, hardware, hardware.host_memory_bytes)[index].solve(budget_bytes)


@lru_cache(maxsize=4)
def _problems(run: Run, hardware: Hardware, host_budget_bytes: int | None) -> tuple[StageChoice, ...]:
    """Planning problem of each stage, for any budget; equal stages share one."""
    timing, plain = Timing(run=run, hardware=hardware, execution=execution_of(run)), _undecided(run)
    known: dict[tuple[object, ...], StageChoice] = {}
    for stage in plain.stages:
        problem = StageChoice(run=plain.run, stage=stage, timing=timing, host_budget_bytes=host_budget_bytes)
        known.setdefault(_key(stage), problem)
    return tuple(known[_key(stage)] for stage in plain.stages)


@lru_cache(maxsize=4)
def _undecided(run: Run) -> Forecast:
    return forecast(replace(run, recompute=replace(run.recompute, mode=Mode.AUTO)))


def _key(stage: Stage) -> tuple[object, ...]:
    """Key of a stage; equal keys have equal plans."""
    groups = tuple((group.part.region, len(group.names)) for chunk in stage.groups for group in chunk)
    load = stage.load
    buffers = load.fixed, load.sent, load.received, load.receives, load.lifetimes, load.transfers
    states = tuple((o.forward, o.weight, o.learned, o.reduced, o.step.work, o.step.chunk) for o in load.occupancies)
    return groups, states, buffers


def layer_policies(answer: AutoForecast) -> Iterator[tuple[str, str]]:
    """Yield (layer, none, selective, full, offload or per-tensor) for each layer of a plan."""
    for part in answer.forecast.parts:
        if part.is_layer:
            moved = frozenset() if part.chosen is None else part.chosen.offloaded
            program = part.program
            word = policy_name(program, part.kept, moved)
            if word is PolicyName.PER_TENSOR and not moved:
                given = {b for b, buffer in enumerate(program.buffers) if buffer.source is Source.INPUT}
                core = program.recompute_set(kept_by(part.region, Mode.SELECTIVE) | given)
                if set(program.recompute_set(part.kept)) <= set(core):  # all that is recomputed
                    word = PolicyName.SELECTIVE
            yield part.name, str(word)


# with micro-batches without checkpointing -----------------------------------------------------------------------------
#
# The more of them, the less memory is left for the others, which recompute more. Neither bytes nor seconds are convex
# in their number, so several numbers are tried, then those between the best one and its neighbours, until none is left.

TRIED: Final = 6
"""Numbers to try first, from 0 to the first stage's window."""


def choose_within(run: Run, limit: Limit, hardware: Hardware, *, host_budget_bytes: int | None = None) -> AutoForecast:
    """Choose within a budget; for a GPU within the first of `fit_budgets` with a choice, else the least that may fit.

    Raises:
        Infeasible, UsageError: see `choose`; for a GPU, where even the low end of the smallest choice does not fit.
    """
    *surer, last = fit_budgets(run, limit)

    def chosen(budget: FitBudget) -> AutoForecast:
        made = choose_with_whole(run, budget.nbytes, hardware, host_budget_bytes=host_budget_bytes)
        return replace(made, fit_rule=budget.rule)

    for budget in surer:
        with suppress(Infeasible):
            return chosen(budget)
    try:
        return chosen(last)
    except Infeasible as refused:
        smallest = refused.minimum_budget_bytes
        usable = limit.device_bytes if limit.budget_bytes is None else None  # a budget is kept to
        if usable is None or smallest > most_bytes(run, run.layout, usable_bytes=usable, budget_bytes=None):
            raise
        return chosen(replace(last, nbytes=smallest))


def choose_with_whole(
    run: Run, budget_bytes: int, hardware: Hardware, *, host_budget_bytes: int | None = None
) -> AutoForecast:
    """`choose`; for `MOST`, with the number of micro-batches without checkpointing of the fastest step.

    Raises:
        Infeasible, UsageError: see `choose`.
    """
    if run.recompute.whole != MOST:
        return choose(run, budget_bytes, hardware, host_budget_bytes=host_budget_bytes)
    known = OnDemand[int, tuple[float, AutoForecast | None]](
        lambda n: _tried(with_whole(run, n), budget_bytes, hardware)
    )
    plain = choose(with_whole(run, 0), budget_bytes, hardware)
    known[0] = plain.step_seconds, plain
    size = pipeline_shape(run).window(0)
    tried = sorted({size * i // (TRIED - 1) for i in range(TRIED)})
    while True:
        best = min(tried, key=lambda whole: known[whole][0])
        at = tried.index(best)
        between = [(best + tried[i]) // 2 for i in (at - 1, at + 1) if 0 <= i < len(tried)]
        fresh = [whole for whole in between if whole not in tried]
        if not fresh:
            found = known[best][1]
            assert found is not None, "it fits with all of them checkpointed"
            return found
        tried = sorted({*tried, *fresh})


def _tried(run: Run, budget_bytes: int, hardware: Hardware) -> tuple[float, AutoForecast | None]:
    try:
        found = choose(run, budget_bytes, hardware)
    except Infeasible:
        return float("inf"), None
    return found.step_seconds, found
