"""Fastest layout, batch and recompute plan for a number of devices, exact over the space.

Order of evaluation and meaning of exact: NOTE [ The order of a search ] in `branch_and_bound`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from jettison.core.errors import JettisonError, UsageError
from jettison.core.progress import Progress, silent
from jettison.core.units import format_bytes
from jettison.search.branch_and_bound import REACH, Hunt, MemoryLimit
from jettison.search.evaluate import Bench, Evaluated, Journal, SearchQuestion
from jettison.search.request import MARGIN
from jettison.search.space import Space
from jettison.spec.hardware import Hardware
from jettison.spec.precision import Optimizer
from jettison.spec.run import Run

ALIKE: Final = 0.01
"""Steps within this share of each other count as equal: ranges are wider."""
MORE_MEMORY: Final = Fraction(11, 10)
MORE_GPUS: Final = (2, 3, 4)
"""Multiples of the devices to try, until a candidate fits."""


class NothingFits(JettisonError, ValueError):
    """No candidate fits."""

    exit_code = 3

    def __init__(
        self, closest: Evaluated, *, candidates: int, advice: str, template: Run, budget_bytes: int | None = None
    ) -> None:
        """Report how many bytes the closest candidate lacks.

        Args:
            template: run that all candidates share. ``budget_bytes``: of their tensors.
        """
        super().__init__(
            f"none of {candidates:,} candidates fits; the closest, {closest.candidate.flags}, lacks "
            f"{format_bytes(closest.lacks)} ({closest.lacks}B): it needs {format_bytes(closest.needed_bytes)} of "
            f"{format_bytes(closest.limit_bytes)}. {advice}"
        )
        self.closest, self.template, self.budget_bytes = closest, template, budget_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WithMore:
    """Fastest candidate with more devices or memory."""

    gpus: int
    memory: Fraction
    best: Evaluated


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """Result of a search.

    Args:
        ranked: the fastest of each setup, in the order of `by_slack`.
        front: Pareto front of step time and memory.
        plain: the best candidate's setup without recomputation, fits or not.
        more_gpus: the fastest with more devices, or the reason why there is none.
        evaluated: number of candidates evaluated now; others were pruned, or known.
        margin: that all candidates leave. ``budget_bytes``: of tensors, if given.
        closest: set if no candidate leaves the margin: the one that lacks least. Listed ones may fit at their low ends.
    """

    space: Space
    ranked: tuple[Evaluated, ...]
    front: tuple[Evaluated, ...]
    plain: Evaluated
    more_memory: WithMore
    more_gpus: WithMore | str
    evaluated: int
    margin: float = 0.0
    budget_bytes: int | None = None
    closest: Evaluated | None = None

    def scaled(self, times: float) -> SearchAnswer:
        """The answer with every step ``times`` as long."""

        def longer(found: Evaluated) -> Evaluated:
            seconds = found.figures.seconds
            return replace(found, figures=replace(found.figures, seconds=seconds and seconds.scaled(times)))

        def more(found: WithMore) -> WithMore:
            return replace(found, best=longer(found.best))

        return replace(
            self,
            ranked=tuple(map(longer, self.ranked)),
            front=tuple(map(longer, self.front)),
            plain=longer(self.plain),
            more_memory=more(self.more_memory),
            more_gpus=self.more_gpus if isinstance(self.more_gpus, str) else more(self.more_gpus),
        )

    @property
    def best(self) -> Evaluated:
        """The first: the fastest, or as fast within `ALIKE` with more room left."""
        return self.ranked[0]

    @property
    def fastest(self) -> Evaluated:
        """Fastest candidate, however little memory it leaves."""
        return min(self.ranked, key=lambda found: found.rank)


def search(
    space: Space,
    hardware: Hardware,
    *,
    budget_bytes: int | None = None,
    margin: float = MARGIN,
    top: int = 10,
    jobs: int = 1,
    journal: Journal | None = None,
    progress: Progress = silent,
) -> SearchAnswer:
    """Find the fastest candidates that fit.

    Args:
        budget_bytes: of tensors on a device, if less than the hardware's usable memory.
        margin: memory kept free, as a share (0 to 1) of the way from the expected allowance to its upper bound.
        top: setups to list.
        jobs: processes; above 1, call it below ``if __name__ == "__main__"``.
        journal: state to resume from, and to append to.
        progress: called with messages.

    If no candidate leaves the margin, the answer lists candidates that may fit.

    Raises:
        NothingFits: no candidate may fit.
        UsageError: the space is empty, or the hardware lacks a figure that an estimate needs.
    """
    if top < 1 or jobs < 1:
        raise UsageError(f"got --top {top} and --jobs {jobs}; expected whole numbers of 1 or more")
    if not 0 <= margin <= 1:
        raise UsageError(f"got --margin {margin:g}; expected 0 (expected allowance) to 1 (upper bound)")
    room = MemoryLimit(hardware=hardware, budget_bytes=budget_bytes, margin=margin)
    question = SearchQuestion(template=space.template, hardware=hardware)
    with ThreadPoolExecutor(1) as background, Bench(question, jobs=jobs, journal=journal) as bench:
        hunt = Hunt(space=space, room=room, bench=bench, top=top, reach=REACH, say=progress)
        hunt.find_named()
        # planners' candidates often wait for one another: meanwhile workers evaluate more devices
        begun = background.submit(_more_gpus, space, room, bench, silent) if hunt.ranked and jobs > 1 else None
        hunt.ask_planner()
        closest, strict = None, room
        if not hunt.ranked:
            closest, room = hunt.closest(), replace(room, may=True)
            hunt = Hunt(space=space, room=room, bench=bench, top=top, reach=REACH, say=progress, least=hunt.least)
            hunt.run()
        if closest is not None and not hunt.ranked:
            raise NothingFits(
                closest,
                candidates=space.size,
                advice=_advice(space, margin, closest),
                template=space.template,
                budget_bytes=budget_bytes,
            )
        ranked, fastest = by_slack(hunt.ranked[:top]), hunt.ranked[0]
        progress("with more memory")
        roomier = replace(room, scale=MORE_MEMORY)
        larger = Hunt(space=space, room=roomier, bench=bench, say=progress, known=fastest, least=hunt.least)
        larger.run()
        progress("with more GPUs")
        more_gpus = _more_gpus(space, strict, bench, progress) if begun is None else begun.result()
        return SearchAnswer(
            space=space,
            ranked=_against(strict, space, ranked),
            front=_against(strict, space, hunt.front),
            plain=_against(strict, space, [hunt.plain(ranked[0].number[0])])[0],
            more_memory=WithMore(gpus=space.gpus, memory=MORE_MEMORY, best=larger.ranked[0]),
            more_gpus=more_gpus,
            evaluated=bench.evaluated,
            margin=margin,
            budget_bytes=budget_bytes,
            closest=closest,
        )


def _against(room: MemoryLimit, space: Space, found: Sequence[Evaluated]) -> tuple[Evaluated, ...]:
    """Return the candidates with limits of this room."""
    return tuple(replace(one, limit_bytes=room.limit_bytes(one.candidate.setup, space)) for one in found)


def by_slack(ranked: Sequence[Evaluated]) -> tuple[Evaluated, ...]:
    """Sort candidates by time; among those within `ALIKE` of the first, the one with most free bytes comes first."""
    found: list[Evaluated] = []
    for one in ranked:
        first = found[0] if found else one
        if one.seconds.step > (1 + ALIKE) * first.seconds.step:
            break
        found.append(one)
    rest = ranked[len(found) :]
    alike = sorted(found, key=lambda one: (one.needed_bytes - one.limit_bytes) // max(1, int(ALIKE * one.limit_bytes)))
    return (*alike, *(by_slack(rest) if rest else ()))


def _more_gpus(space: Space, room: MemoryLimit, bench: Bench, progress: Progress) -> WithMore | str:
    """Return the fastest candidate of the first multiple of devices that fits, or the reason why there is none."""
    why = "nothing fits"
    for times in MORE_GPUS:
        hunt = Hunt(space=replace(space, gpus=times * space.gpus), room=room, bench=bench, say=progress)
        try:
            hunt.run()
        except UsageError as error:  # nothing divides, or the hardware file has no network
            why = str(error)
            continue
        if hunt.ranked:
            return WithMore(gpus=hunt.space.gpus, memory=Fraction(1), best=hunt.ranked[0])
    return why


def _advice(space: Space, margin: float, closest: Evaluated) -> str:
    states, tuning = closest.figures.static_bytes, space.template.tuning
    fewer = [] if space.template.optimizer is Optimizer.ADAM8BIT else ["--optimizer adam8bit"]
    fewer += ["--lora r=16"] if tuning is None else ["--base nf4"] * (not tuning.base.packed)
    if states > closest.limit_bytes:
        said = f"Parameters, gradients and optimizer state alone take {format_bytes(states)}. What makes room: "
        return said + ", ".join(["more GPUs", *fewer])
    ways = ["more GPUs", "a shorter --seq", *fewer] + ([] if True in space.axes.offload else ["--offload"])
    ways += ["a smaller --margin"] if margin else []
    return f"What makes room: {', '.join(ways)}, and fewer fixed axes"
