"""Answers of searches: a document for programs; for people the fastest, why, and what more would buy.

Texts and tables have the expected step time, as `plan`'s and `estimate`'s; ``step_seconds`` is the modelled one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.documents import document, part
from jettison.core.objects import summary
from jettison.core.units import format_bytes, format_count, format_percent, format_ratio, format_seconds
from jettison.predict.ranges import Residual, RunFigures, figures, time_residual, unlike_anchor
from jettison.report.estimate import NOTHING_WANTED, TrainingBudget, TrainingCost, training_cost
from jettison.report.tables import FittedTable, device_notes, facts, grid, signed
from jettison.search.branch_and_bound import REACH
from jettison.search.evaluate import Evaluated, Seconds
from jettison.search.search import ALIKE, ANY, NothingFits, SearchAnswer, WithMore
from jettison.spec.device_allowance import FitVerdict, available_to
from jettison.spec.frameworks import named
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.layout import Layout, Schedule
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

SCHEMA: Final = "jettison.search/1"
SHOWN_ON_FRONT: Final = 12
"""Rows of the front for people; the document has all."""
STEP_OF_FRONT: Final = 0.02
"""A row of the front for people takes less memory than the row before it by this share, at least."""
MOST_STAGES: Final = 8
"""Stages of a planner's choice in words; the document has all."""
WORTH_SAYING: Final = 0.002
"""Share of a step: smaller differences are not spelled out."""


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """An answer, and what was asked.

    Args:
        seconds: that the search took.
        request: what was asked, by field.
    """

    model: str
    hardware: Hardware
    answer: SearchAnswer
    seconds: float
    wanted: TrainingBudget = NOTHING_WANTED
    request: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        best = self.answer.best
        return summary(
            self,
            f"{self.model} on {self.answer.space.gpus} × {self.hardware.name}: {best.candidate.setup.layout!r}, "
            f"{format_seconds(self.sure.expected * best.seconds.step)} a step",
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Parts of the configuration that are not in the figures, and how an anchor differs."""
        template = self.answer.space.template
        found = (*template.model.left_out, *unlike_anchor(template, self.hardware.name), *self._beyond_preset())
        if (closest := self.answer.closest) is None:
            return found
        lacks = f"the closest, {closest.candidate.flags}, lacks {format_bytes(closest.over_bytes)}"
        return (*found, f"nothing is expected to fit ({lacks}): those listed are {FitVerdict.CLOSE}")

    def _beyond_preset(self) -> Iterator[str]:
        """Say that plans of any framework are listed, though a framework preset was given."""
        own = named("presets").get(self.request.get("like", ""), {}).get("folder")
        if own in named("runs") and self.request.get("runs_on") is None:
            yield f"a flag asks for what {own} cannot run: plans are of any framework; --runs-on {own} names the flag"

    @property
    def sure(self) -> Residual:
        """Range of the times: all candidates are of one kind."""
        return time_residual(self.answer.space.template, self.hardware.name)

    def figures(self, found: Evaluated) -> RunFigures:
        """Figures of a candidate."""
        return candidate_figures(found, self.answer.space.template, self.hardware)

    def verdict(self, found: Evaluated) -> FitVerdict:
        """Whether a candidate fits the device, and the budget for its tensors."""
        budget = self.answer.budget_bytes
        return self.figures(found).verdict(usable_bytes=self.hardware.usable_bytes, budget_bytes=budget)

    @property
    def trainings(self) -> tuple[TrainingCost, ...]:
        """Days and price of so many tokens with the fastest, and with the fastest on more devices."""
        space, more = self.answer.space, self.answer.more_gpus
        chosen = [(space.gpus, self.answer.best)] + ([(more.gpus, more.best)] if isinstance(more, WithMore) else [])
        common: dict[str, Any] = {"step_tokens": space.global_batch * space.template.seq, "sure": self.sure}
        found = (training_cost(self.wanted, step_seconds=x.seconds.step, gpus=gpus, **common) for gpus, x in chosen)
        return tuple(one for one in found if one is not None)

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.search/1``; candidates are ranked, the fastest first."""
        answer = self.answer
        space, template, more_gpus = answer.space, answer.space.template, answer.more_gpus
        return document(
            SCHEMA,
            self,
            answer,
            space,
            template,
            template.kernels,
            gpu=self.hardware.name,
            precision=template.precision.name,
            kernels=template.kernels.name,
            space=part("SearchedSpace", layouts=len(space.setups), candidates=space.size),
            feasible=True,
            closest=None if answer.closest is None else self._candidate(answer.closest),
            over_budget_bytes=answer.closest and answer.closest.over_bytes,
            prediction_error=self.sure,
            trainings=self.trainings or None,
            candidates=[self._candidate(found) for found in answer.ranked],
            pareto_front=[self._candidate(found) for found in answer.front],
            pareto_front_slowdown=REACH,
            runner_up=[self._loss(found) for found in rivals(answer)],
            without_recompute=self._candidate(answer.plain),
            more_memory=self._more(answer.more_memory),
            more_gpus=self._more(more_gpus) if isinstance(more_gpus, WithMore) else None,
            explanation=list(self.sentences()),
        )

    def _candidate(self, found: Evaluated) -> dict[str, Any]:
        return _candidate(found, self.sure, self.figures(found), self.verdict(found))

    def _more(self, more: WithMore) -> dict[str, Any]:
        saved = self.answer.fastest.seconds.step - more.best.seconds.step
        candidate = self._candidate(more.best)
        return part("MoreResources", more, memory=float(more.memory), saved_seconds=saved, candidate=candidate)

    def _loss(self, rival: Evaluated) -> dict[str, Any]:
        """Cost of a rival over the best: seconds by part, and bytes."""
        best, ours, theirs = self.answer.best, self.figures(self.answer.best), self.figures(rival)
        parts = {f"{name}_seconds": rival.seconds.parts[name] - took for name, took in best.seconds.parts.items()}
        return part(
            "RivalLoss",
            rival.candidate,
            lost_seconds=rival.seconds.step - best.seconds.step,
            more=parts,
            summary=_difference(*(found.scaled(self.sure.expected) for found in (best.seconds, rival.seconds))),
            more_allocated_bytes=rival.needed_bytes - best.needed_bytes,
            more_device_bytes=round(theirs.device.expected - ours.device.expected),
            memory_summary=self._memory(rival),
        )

    def _memory(self, rival: Evaluated) -> str:
        """Memory of a rival compared with the best's, and their verdicts where these differ."""
        best = self.answer.best
        allocated = signed(rival.needed_bytes - best.needed_bytes)
        device = signed(round(self.figures(rival).device.expected - self.figures(best).device.expected))
        verdicts = self.verdict(best), self.verdict(rival)
        differ = "" if verdicts[0] is verdicts[1] else f"; plan 1: {verdicts[0]}, this one: {verdicts[1]}"
        return f"{allocated} allocated, {device} on the device{differ}"

    def sentences(self) -> Iterator[str]:
        """The answer in words, and which candidate fits without doubt where the first may not."""
        yield from sentences(self.answer.scaled(self.sure.expected), self._memory)
        doubtful = self.verdict(self.answer.best)
        if doubtful is FitVerdict.FITS:
            return
        needs = self.figures(self.answer.best).needs
        every = sorted((*self.answer.ranked, *self.answer.front), key=lambda found: found.rank)
        sure = next((found for found in every if self.verdict(found) is FitVerdict.FITS), None)
        other = "none of these fits without doubt"
        if sure is not None:
            took = format_seconds(self.sure.expected * sure.seconds.step)
            other = f"the first that fits without doubt is {sure.candidate.flags}, {took}"
        yield f"Whether the fastest fits is {doubtful}: it needs {needs}; {other}."

    def table(self) -> RenderableType:
        """The fastest, why, and the front."""
        answer, count = self.answer, len(self.answer.ranked)
        order = f"; within {format_percent(ALIKE)} of each other, the one with more free memory comes first"
        several = f"The fastest {count}, one plan each{order}"
        ranking = _table(several if count > 1 else "The fastest", answer.ranked, self)
        front = _table("Pareto front: memory against step time", _thinned(answer.front), self)
        return Group(facts(self._facts()), "", ranking, "", *(Text(line) for line in self.sentences()), "", front)

    def _facts(self) -> Iterator[tuple[str, str]]:
        answer, device = self.answer, self.hardware
        space, template = answer.space, answer.space.template
        yield "model", f"{self.model}, sequences of {template.seq}, global batch {space.global_batch}"
        yield "devices", f"{space.gpus} x {device.name}, {format_bytes(answer.best.limit_bytes)} for tensors"
        yield (
            "searched",
            f"{space.size:,} plans of {len(space.setups):,} layouts with their batches; "
            f"{answer.evaluated:,} candidates evaluated in {format_seconds(self.seconds)}",
        )
        if (framework := self.request.get("runs_on")) not in (None, ANY):
            yield "runs on", f"{framework}: layouts and recompute modes that it can run (--runs-on {ANY}: all)"
        if answer.margin:
            where, stack = (device, answer.best.candidate.setup.layout, template.kernels.device), template.stack
            free = available_to(*where, stack=stack) - available_to(*where, answer.margin, stack=stack)
            yield (
                "margin",
                f"{format_bytes(free)} stay free in addition to the expected contexts, communicators and fragments: "
                f"{format_percent(answer.margin)} of the way to their upper bound (--margin)",
            )
        yield from (("note", text) for text in device_notes(device, template))
        if device.note:
            yield "note", device.note
        yield "expected", f"{self.sure.of(answer.best.seconds.step).words(format_seconds)}: {self.sure.words}"
        yield from training_facts(self.trainings)


def nothing_document(
    model: str, gpus: int, gpu: str, error: NothingFits, request: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A document where nothing fits: the closest candidate and the bytes that it lacks."""
    device = hardware(gpu)
    ranges = candidate_figures(error.closest, error.template, device)
    verdict = ranges.verdict(usable_bytes=device.usable_bytes, budget_bytes=error.budget_bytes)
    return document(
        SCHEMA,
        model=model,
        request=dict(request or {}),
        gpus=gpus,
        gpu=gpu,
        feasible=False,
        candidates=[],
        closest=_candidate(error.closest, None, ranges, verdict),
        over_budget_bytes=error.closest.over_bytes,
    )


def rivals(answer: SearchAnswer) -> Iterator[Evaluated]:
    """The second, and the first of those listed whose devices are divided otherwise, where that is another one."""
    yield from answer.ranked[1:2]
    mesh = _mesh(answer.best)
    others = (found for found in answer.ranked[2:] if _mesh(found) != mesh)
    if len(answer.ranked) > 1 and _mesh(answer.ranked[1]) == mesh:
        yield from (found for found, _ in zip(others, range(1), strict=False))


def sentences(answer: SearchAnswer, memory: Callable[[Evaluated], str]) -> Iterator[str]:
    """The answer in words; ``memory`` are those for a rival's bytes."""
    best = answer.best
    parts = sorted(((took, name) for name, took in best.seconds.parts.items() if took > 0), key=lambda part: -part[0])
    shares = [f"{_WORDS.get(name, name)} {format_percent(took / best.seconds.step)}" for took, name in parts]
    yield f"The fastest, {best.candidate.flags}: {', '.join(shares)}."
    yield from _recompute(answer)
    for found in rivals(answer):
        place = f"Plan {answer.ranked.index(found) + 1}"
        if found.seconds.step < best.seconds.step:
            less = format_bytes(found.limit_bytes - found.needed_bytes)
            yield f"{place}, {found.candidate.flags}, is as fast within {format_percent(ALIKE)}, and leaves {less}."
        else:
            yield f"{place}, {found.candidate.flags}, loses {_difference(best.seconds, found.seconds)}."
        yield f"Memory of {place.lower()} against plan 1: {memory(found)}."
    yield _more_memory(answer)
    yield _more_gpus(answer)


def _recompute(answer: SearchAnswer) -> Iterator[str]:
    best, plain = answer.best, answer.plain
    if best.candidate.recompute.mode is Mode.NONE:
        return
    saved = best.seconds.step - plain.seconds.step
    lacks = f"lacks {format_bytes(plain.over_bytes)}" if plain.over_bytes > 0 else "fits"
    yield (
        f"Without recompute it would take {format_seconds(plain.seconds.step)}, {format_seconds(saved)} less, and "
        f"{lacks}: {format_bytes(plain.needed_bytes)}."
    )
    if policies := best.figures.policies:
        stages = "; ".join(f"stage {i}: {words}" for i, words in enumerate(policies[:MOST_STAGES]))
        more = "" if len(policies) <= MOST_STAGES else "; ..."
        yield (
            f"The planner's layers, {stages}{more}. `jettison plan` with these flags and "
            f"--budget {best.candidate.budgets[0].nbytes}B has all of them."
        )


def _more_memory(answer: SearchAnswer) -> str:
    best, found = answer.fastest, answer.more_memory.best
    share = format_percent(float(answer.more_memory.memory) - 1)
    saved = best.seconds.step - found.seconds.step
    if saved <= 0:
        return f"{share} more memory would buy nothing: this stays the fastest."
    return (
        f"{share} more memory would buy {format_seconds(saved)} ({format_percent(saved / best.seconds.step)}), with "
        f"{found.candidate.flags}."
    )


def _more_gpus(answer: SearchAnswer) -> str:
    more, best = answer.more_gpus, answer.fastest
    if isinstance(more, str):
        return f"Nothing was found for more devices: {more}."
    faster = best.seconds.step / more.best.seconds.step
    linear = faster * answer.space.gpus / more.gpus
    return (
        f"{more.gpus} devices would take {format_seconds(more.best.seconds.step)} with {more.best.candidate.flags}: "
        f"{format_ratio(faster)} as fast, {format_percent(linear)} scaling efficiency."
    )


def _difference(best: Seconds, other: Seconds) -> str:
    """Seconds in words: what costs it more, and what less."""
    lost, least, parts = other.step - best.step, WORTH_SAYING * best.step, other.parts
    changes = sorted((parts[name] - took, _WORDS.get(name, name)) for name, took in best.parts.items())
    more = [f"{format_seconds(change)} more {word}" for change, word in reversed(changes) if change > least]
    less = [f"{format_seconds(-change)} less {word}" for change, word in changes if change < -least]
    words = ", but ".join(", ".join(words) for words in (more, less) if words)
    return f"{format_seconds(lost)} ({format_percent(lost / best.step)}): {words or 'a little of everything'}"


_WORDS: Final = {"communication": "exposed communication", "other": "optimizer and dispatch"}


def _mesh(found: Evaluated) -> tuple[int, ...]:
    layout = found.candidate.setup.layout
    return layout.tp, layout.pp, layout.cp, layout.ep


def _table(title: str, rows: Sequence[Evaluated], report: SearchReport) -> FittedTable:
    """Axes that are 1 throughout have no column."""
    layouts = [found.candidate.setup.layout for found in rows]
    axes = [
        (name, [value(layout) for layout in layouts])
        for name, value in _AXES
        if name in ("tp", "pp", "dp") or any(value(layout) not in ("1", "0", "") for layout in layouts)
    ]
    columns = ("batch", "step", "range", "MFU", "tokens/s/GPU", "allocated", "device")
    table = grid(title, ("", "recompute", "fits"), (*(name for name, _ in axes), *columns))
    for number, found in enumerate(rows):
        setup, modelled, whole = found.candidate.setup, found.seconds, found.figures.whole
        seconds = modelled.scaled(report.sure.expected)
        table.add_row(
            str(number + 1),
            replace(found.candidate.recompute, whole=0).words
            + (f", {whole} whole" if whole else "")
            + (f", sync {setup.sync}" if setup.sync else ""),
            _SHORT[report.verdict(found)],
            *(values[number] for _, values in axes),
            f"{setup.micro_batch} x {setup.micro_batches}",
            format_seconds(seconds.step),
            _between(report.sure.of(modelled.step).ends),
            format_percent(seconds.mfu),
            format_count(round(seconds.tokens_per_second_per_gpu)),
            format_bytes(found.needed_bytes),
            format_bytes(round(report.figures(found).device.expected)),
            style="bold" if number == 0 else "",
        )
    return table


_SHORT: Final = {FitVerdict.FITS: "yes", FitVerdict.CLOSE: "close", FitVerdict.DOES_NOT_FIT: "no"}


def _between(ends: tuple[float, float]) -> str:
    """A range, with its unit where the ends have two."""
    low, high = map(format_seconds, ends)
    number, unit = low.rsplit(" ", 1)
    return f"{number}-{high.removesuffix(f' {unit}')}" if high.endswith(f" {unit}") else f"{low} - {high}"


def training_facts(found: Sequence[TrainingCost]) -> Iterator[tuple[str, str]]:
    """Training on the devices that were asked for; on the cheapest; and on the fastest, where those are others."""
    if not found:
        return
    asked = found[0]
    cheapest = min(found, key=lambda one: one.gpu_hours(one.seconds.expected))
    fastest = min(found, key=lambda one: one.seconds.expected)
    yield "training", asked.amount
    if asked not in (cheapest, fastest):
        yield "as asked", f"{asked.duration}, {asked.expense}"
    if cheapest is not fastest:
        yield "cheapest", f"{cheapest.duration}, {cheapest.expense}"
    name = "fastest" if cheapest is not fastest else "cheapest and fastest"
    yield name, f"{fastest.duration}, {fastest.expense}"


_AXES: Final[tuple[tuple[str, Callable[[Layout], str]], ...]] = (
    ("tp", lambda layout: str(layout.tp)),
    ("sp", lambda layout: "no" if layout.tp > 1 and not layout.sp else ""),
    ("pp", lambda layout: str(layout.pp)),
    ("virtual", lambda layout: str(layout.virtual_stages)),
    ("layers", lambda layout: ",".join(map(str, layout.stage_layers))),
    ("schedule", lambda layout: "" if layout.schedule is Schedule.ONE_F_ONE_B else str(layout.schedule)),
    ("cp", lambda layout: str(layout.cp)),
    ("ep", lambda layout: str(layout.ep)),
    ("dp", lambda layout: str(layout.dp)),
    ("zero", lambda layout: str(layout.zero)),
)


def _thinned(front: Sequence[Evaluated]) -> list[Evaluated]:
    """Rows far enough apart to be told from one another."""
    kept: list[Evaluated] = []
    for found in front:
        if not kept or found.needed_bytes < (1 - STEP_OF_FRONT) * kept[-1].needed_bytes:
            kept.append(found)
    return kept[:SHOWN_ON_FRONT]


def candidate_figures(found: Evaluated, template: Run, hardware: Hardware) -> RunFigures:
    """Allocated, reserved and device bytes of a candidate, and its step's time where it was timed."""
    took = None if found.figures.seconds is None else found.figures.seconds.step
    return figures(found.candidate.run(template), found.needed_bytes, hardware=hardware.name, step_seconds=took)


def _candidate(found: Evaluated, sure: Residual | None, ranges: RunFigures, verdict: FitVerdict) -> dict[str, Any]:
    setup, recompute, counted = found.candidate.setup, found.candidate.recompute, found.figures
    chosen, seconds, layout = bool(counted.policies), counted.seconds, setup.layout
    plan = part(
        "CandidatePlan",
        recompute,
        recompute=str(recompute),
        offload_modules=recompute.sent,
        micro_batches_without_recompute=counted.whole if recompute.whole else None,
        budget_bytes=found.candidate.budgets[0].nbytes if chosen else None,
        fit_rule=found.candidate.budgets[0].rule if chosen else None,
        stages=counted.policies if chosen else None,
    )
    return part(
        "SearchedCandidate",
        seconds,
        found.candidate,
        setup,
        counted,
        found,
        layout=part("SearchedLayout", layout, stage_layers=layout.stage_layers or None),
        plan=plan,
        available_bytes=found.limit_bytes,
        figures=ranges,
        verdict=verdict,
        host_bytes=counted.host_bytes if recompute.to_host else None,
        step_seconds=seconds and seconds.step,
        step_range_seconds=sure.of(seconds.step).ends if seconds and sure else None,
        breakdown=seconds and {f"{name}_seconds": took for name, took in seconds.parts.items()},
    )
