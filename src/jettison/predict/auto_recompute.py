"""`--recompute auto`: for each pipeline stage, the fastest choice of what its layers keep, compute again or offload.

What fits is decided stage by stage: NOTE [ A stage as a step problem ] in `predict.stage_choice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from jettison.core.errors import Infeasible
from jettison.core.units import format_bytes
from jettison.cost.execution import execution_of
from jettison.predict.forecast import Forecast, Stage, forecast
from jettison.predict.stage_choice import Answer, StageChoice
from jettison.predict.stage_time import Timing
from jettison.predict.stages import StageRegion, Staying, kept_by
from jettison.predict.time import recomputing
from jettison.solve.plan import PolicyWord, policy_word
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import Mode
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

    @property
    def overhead_fraction(self) -> float:
        """Recompute as a share of a step without it."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Of all micro-batches on that stage, without bubbles and communication: a lower limit."""
        return (self.seconds + self.plain_seconds) * self.forecast.run.micro_batches

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
StageAnswer = tuple[int, Answer | None]
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
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    offload = run.recompute.offload
    host = hardware.host_memory_bytes if host_budget_bytes is None else host_budget_bytes
    plain = _undecided(run)
    shared: Stages = {} if stages is None else stages
    chosen: dict[str, Staying | None] = {}
    known = {_key(plain.stages[index]): answer for index, answer in solved.items()}
    answers = []
    smallest = 0
    for stage in plain.stages:
        key = _key(stage)
        if key not in known:
            if key not in shared:
                shared[key] = StageChoice(run=plain.run, stage=stage, timing=timing, host_budget_bytes=host)
            known[key] = shared[key].solve(budget_bytes)
        fewest, answer = known[key]
        smallest = max(smallest, fewest)
        if answer is None:
            continue
        answers.append(answer)
        answers[-1] = replace(answer, added_seconds=recomputing(run, stage.index) * answer.added_seconds)
        names = [part.name for chunk in stage.parts for part in chunk]
        chosen.update(zip(names, answer.staying, strict=True))
    if len(answers) < len(plain.stages):
        reason = _reason(offload, host)
        raise Infeasible(minimum_budget_bytes=smallest, budget_bytes=budget_bytes, reason=reason)
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
    plain = _undecided(run)
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    host = hardware.host_memory_bytes
    stages = [plain.stages[index] for index in distinct_stages(run)]
    each = (StageChoice(run=plain.run, stage=stage, timing=timing, host_budget_bytes=host) for stage in stages)
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
    plain = _undecided(run)
    timing = Timing(run=run, hardware=hardware, execution=execution_of(run))
    host = hardware.host_memory_bytes if host_budget_bytes is None else host_budget_bytes
    stage = StageChoice(run=plain.run, stage=plain.stages[index], timing=timing, host_budget_bytes=host)
    return stage.solve(budget_bytes)


@lru_cache(maxsize=4)
def _undecided(run: Run) -> Forecast:
    return forecast(replace(run, recompute=replace(run.recompute, mode=Mode.AUTO)))


def _reason(offload: bool, host: int | None) -> str:
    if not offload:
        return "Every layer computes all that it can again, alone or in a segment with others."
    room = "" if host is None else f", which has {format_bytes(host)} for it"
    return f"Every layer computes all that it can again, alone or with others, or sends it to the host{room}."


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
            if word is PolicyWord.MIXED and not moved and _only_attention(part):
                word = PolicyWord.SELECTIVE
            yield part.name, str(word)


def _only_attention(part: StageRegion) -> bool:
    """Is the attention core all that is computed again?"""
    program = part.region.program
    core = program.recompute_set(kept_by(part.region, Mode.SELECTIVE))
    return set(program.recompute_set(part.kept)) <= set(core)
