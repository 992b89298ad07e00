"""Estimates of a step, and the cost of a training run: a document for programs, tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.documents import document, part
from jettison.core.errors import UsageError
from jettison.core.units import format_bytes, format_change, format_flops, format_percent, format_seconds
from jettison.cost.flops import Counting, tokens
from jettison.predict.forecast import Forecast
from jettison.predict.ranges import Residual, RunFigures, figures, time_residual, unlike_anchor
from jettison.predict.time import Estimate
from jettison.report.ledger import MOST_STAGES, idle, request_document, run_facts
from jettison.report.tables import FittedTable, device_notes, exact, facts, grid
from jettison.request.resolve import Resolved
from jettison.spec.device_allowance import FitRule, FitVerdict, Range
from jettison.spec.kernels import SsmKernels

if TYPE_CHECKING:
    from jettison.report.alternatives import LayerOffload, RecomputeOption, StepAlternatives, Trade

DAY_SECONDS = 86400
HOUR_SECONDS = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBudget:
    """Tokens of a training run and the price of a GPU hour. `UsageError` for a number not above 0, or no tokens."""

    tokens: float | None = None
    price_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        if self.price_per_gpu_hour is not None and self.tokens is None:
            raise UsageError("got --price-per-gpu-hour without --tokens; give the tokens, such as --tokens 1e12")
        for name, value in (("tokens", self.tokens), ("price-per-gpu-hour", self.price_per_gpu_hour)):
            if value is not None and not (isfinite(value) and value > 0):
                raise UsageError(
                    f"got --{name} {value:g}; expected a number above 0, such as 1e12 tokens or a price of 2.5"
                )


NOTHING_WANTED: Final = TrainingBudget()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCost:
    """Cost of a training run under one layout; prices are in the currency of the price of an hour.

    Args:
        steps: number of steps, rounded up.
        seconds: of all of them.
    """

    tokens: float
    gpus: int
    steps: int
    seconds: Range
    price_per_gpu_hour: float | None

    def gpu_hours(self, seconds: float) -> float:
        """GPU hours of all devices for a duration."""
        return self.gpus * seconds / HOUR_SECONDS

    def price(self, seconds: float) -> float | None:
        """Price of these; None without a price of an hour."""
        return None if self.price_per_gpu_hour is None else self.gpu_hours(seconds) * self.price_per_gpu_hour

    @property
    def duration(self) -> str:
        """Days, for tables."""
        days = self.seconds.words(lambda seconds: f"{seconds / DAY_SECONDS:,.1f}")
        return f"{days.replace(' (', ' days (')} on {self.gpus} GPUs"

    @property
    def expense(self) -> str:
        """GPU hours, and their price if an hour has one, for tables."""
        hours, each = f"{self.gpu_hours(self.seconds.expected):,.0f} GPU hours", self.price_per_gpu_hour
        if each is None:
            return hours
        return f"{hours} for {self.seconds.words(lambda seconds: f'{self.gpu_hours(seconds) * each:,.0f}')}"

    @property
    def amount(self) -> str:
        """Tokens and steps, for tables."""
        return f"{self.tokens:.4g} tokens".replace("e+", "e") + f" in {self.steps:,} steps"

    def document(self) -> dict[str, Any]:
        """JSON document; ranges have the low and the high end."""
        seconds, ends = self.seconds.expected, self.seconds.ends
        return part(
            "Training",
            self,
            days=seconds / DAY_SECONDS,
            days_range=[end / DAY_SECONDS for end in ends],
            gpu_hours=self.gpu_hours(seconds),
            gpu_hours_range=list(map(self.gpu_hours, ends)),
            price=self.price(seconds),
            price_range=None if self.price_per_gpu_hour is None else list(map(self.price, ends)),
        )


def training_cost(
    wanted: TrainingBudget, *, step_seconds: float, step_tokens: int, gpus: int, sure: Residual
) -> TrainingCost | None:
    """Return the cost of a training run; None without a number of tokens."""
    if wanted.tokens is None:
        return None
    steps = ceil(wanted.tokens / step_tokens)
    return TrainingCost(
        tokens=wanted.tokens,
        gpus=gpus,
        steps=steps,
        seconds=sure.of(steps * step_seconds),
        price_per_gpu_hour=wanted.price_per_gpu_hour,
    )


@dataclass(frozen=True, kw_only=True)
class EstimateReport:
    """An estimate, the peak of the same run, and what `--explain` adds.

    Args:
        fit_rule: what a planner's choice was held to.
        eager_memory: why the peak is of eager layers although they are compiled; empty where it is not.
    """

    model: str
    asked: Resolved
    found: Estimate
    memory: Forecast
    available_bytes: int
    alternatives: StepAlternatives | None = None
    wanted: TrainingBudget = NOTHING_WANTED
    eager_memory: str = ""
    fit_rule: FitRule | None = None

    @property
    def sure(self) -> Residual:
        """Range of the step's time."""
        return time_residual(self.found.run, self.found.hardware.name)

    @property
    def training(self) -> TrainingCost | None:
        """Days and price of so many tokens, where they were asked for."""
        return training_cost(
            self.wanted,
            step_seconds=self.found.step_seconds,
            step_tokens=tokens(self.found.run),
            gpus=self.found.run.layout.world,
            sure=self.sure,
        )

    @property
    def figures(self) -> RunFigures:
        """Allocated, reserved and device bytes, and the step's time."""
        found = self.found
        return figures(found.run, self.memory.peak_bytes, hardware=found.hardware.name, step_seconds=found.step_seconds)

    @property
    def verdict(self) -> FitVerdict:
        """Whether it fits the device."""
        return self.figures.verdict(usable_bytes=self.found.hardware.usable_bytes)

    @property
    def warnings(self) -> Iterator[str]:
        """Warnings for a reader."""
        run, device = self.found.run, self.found.hardware
        yield from (*run.model.left_out, *idle(self.asked))
        yield from unlike_anchor(run, device.name)
        if self.verdict is not FitVerdict.FITS:
            usable, needs = format_bytes(device.usable_bytes), self.figures.needs
            doubt = "is too close to call on" if self.verdict is FitVerdict.CLOSE else "does not fit"
            yield f"this run {doubt} {device.name}, where {usable} are usable: it needs {needs}"
        if self.eager_memory:
            yield f"the peak is of layers that are not compiled: {self.eager_memory}"
        if run.kernels.ssm_kernels is SsmKernels.EAGER and any(layer.scan is not None for layer in run.model.described):
            yield (
                "no measured run has state-space or linear-attention layers without fused kernels: their time "
                "is counted from kernels and bytes; --ssm-kernels fused has measured rates (state space "
                "duality, gated delta rule)"
            )
        yield from device_notes(device, run)
        if device.note:
            yield f"{device.name}: {device.note}"

    def document(self) -> dict[str, Any]:
        """For programs. Seconds are of one step on the busiest stage, bytes of the worst rank."""
        found, run = self.found, self.found.run
        device, replay = found.hardware.under(found.execution.stack), found.replay
        return document(
            "jettison.estimate/1",
            self,
            found,
            found.execution,
            device,
            self.memory,
            self.alternatives,
            request=request_document(self.asked),
            gpu=found.hardware.name,
            gpus=run.layout.world,
            recompute=str(run.recompute),
            micro_batches_without_recompute=run.recompute.whole,
            step_range_seconds=self.sure.of(found.step_seconds).ends,
            prediction_error=self.sure,
            mfu_by={str(counting): found.mfu_by(counting) for counting in Counting},
            model_flops=found.model_flops(),
            breakdown={f"{name}_seconds": seconds for name, seconds in asdict(found.breakdown).items()},
            busiest_stage=found.busiest,
            stages=[
                part(
                    "EstimateStage",
                    stage=index,
                    busy_seconds=replay.busy[index],
                    bubble_seconds=replay.bubble[index],
                    forward_seconds=sum(stage.forward),
                    backward_seconds=sum(stage.backward),
                    recompute_seconds=sum(part.seconds for part in stage.again),
                    end_seconds=stage.end,
                    optimizer_seconds=stage.optimizer,
                )
                for index, stage in enumerate(found.stages)
            ],
            fits=self.memory.peak_bytes <= self.available_bytes,
            reached={name: share for name, share in asdict(device.reached).items() if share is not None},
            warnings=list(self.warnings),
            kinds=self.alternatives
            and [part("KindSeconds", kind=kind, seconds=seconds) for kind, seconds in self.alternatives.kinds],
        )

    def table(self) -> RenderableType:
        """For people."""
        tables: list[RenderableType] = [facts(_facts(self)), _parts_table(self.found)]
        if len(self.found.stages) > 1:
            tables.append(_stages_table(self.found))
        if self.alternatives is not None:
            tables += _explanation_tables(self.alternatives)
        return Group(*(part for table in tables for part in ("", table)))


def _facts(report: EstimateReport) -> Iterator[tuple[str, str]]:
    found, run = report.found, report.found.run
    yield "model", f"{report.model} on {run.layout.world} x {found.hardware.name}"
    yield from run_facts(report.asked, report.memory.offloaded_optimizer)
    held_to = "" if report.fit_rule is None else f", {report.fit_rule.words}"
    yield "recompute", f"{run.recompute.words}{held_to}; fusion {found.execution.fusion}"
    took = report.figures.step_seconds
    assert took is not None  # of an estimate
    tokens_per_second = found.tokens_per_second_per_gpu * found.step_seconds
    yield "step", f"{took.words(format_seconds)}: {report.sure.words}"
    yield "as modelled", f"{format_seconds(found.step_seconds)}, to which the parts below add up"
    yield (
        "throughput",
        f"{tokens_per_second / took.expected:,.0f} tokens a second on each GPU "
        f"({tokens_per_second / took.high:,.0f} to {tokens_per_second / took.low:,.0f})",
    )
    mfu, palm, hfu = (
        format_percent(u / report.sure.expected) for u in (found.mfu, found.mfu_by(Counting.PALM), found.hfu)
    )
    yield "MFU", f"{mfu} ({palm} by {4 if run.tuning else 6}N + 12Lhs); HFU {hfu}"
    yield "model FLOPs", f"{format_flops(found.model_flops())} a step; {format_flops(found.hardware_flops)} run"
    if report.training is not None:
        yield "training", f"{report.training.amount}: {report.training.duration}"
        yield "cost", report.training.expense
    yield "peak", f"{exact(report.memory.peak_bytes)}, {format_bytes(report.available_bytes)} left for tensors"
    yield from ((name, text) for name, text in report.figures.rows() if name != "step time")
    yield (
        "verdict",
        f"{report.verdict.said} in the {format_bytes(found.hardware.usable_bytes)} of {found.hardware.name}",
    )


def _parts_table(found: Estimate) -> FittedTable:
    of = f" of stage {found.busiest}" if len(found.stages) > 1 else ""
    table = grid(f"Where the time{of} goes", ("part",), ("seconds", "share"))
    for name, seconds in asdict(found.breakdown).items():
        table.add_row(name, format_seconds(seconds), format_percent(seconds / found.step_seconds))
    table.add_section()
    table.add_row("step, as modelled", format_seconds(found.step_seconds), "")
    return table


def _stages_table(found: Estimate) -> FittedTable:
    """Neighbours that are alike as one row; of many rows, the first and the last."""
    cells = []
    for stage, busy, bubble in zip(found.stages, found.replay.busy, found.replay.bubble, strict=True):
        passes = sum(stage.forward), sum(stage.backward), sum(part.seconds for part in stage.again)
        cells.append([*map(format_seconds, (*passes, busy, bubble, stage.optimizer))])
    groups = [[i for i, _ in same] for _, same in groupby(enumerate(cells), key=lambda each: each[1])]
    half = MOST_STAGES // 2
    shown = groups if len(groups) <= MOST_STAGES else groups[:half] + groups[-half:]
    return grid(
        "Pipeline stages: one micro-batch, and a whole step",
        ("stage",),
        ("forward", "backward", "of it again", "busy", "bubble", "optimizer"),
        [(f"{of[0]} to {of[-1]}" if len(of) > 1 else str(of[0]), *cells[of[0]]) for of in shown],
        bold=[index for index, of in enumerate(shown) if found.busiest in of],
    )


def _explanation_tables(alternatives: StepAlternatives) -> Iterator[RenderableType]:
    whole = sum(seconds for _, seconds in alternatives.kinds) or 1.0
    kinds = alternatives.kinds
    rows = [(str(kind), format_seconds(seconds), format_percent(seconds / whole)) for kind, seconds in kinds]
    yield grid("Compute by kind of kernel", ("kernels",), ("seconds", "share"), rows)
    yield _options_table(alternatives.options)
    yield _trades_table(alternatives.trades, linked=alternatives.offload is not None)
    if alternatives.offload is not None:
        yield _transfers_table(alternatives.offload)
    yield Group(*(Text(line) for line in alternatives.sentences))


def _options_table(options: tuple[RecomputeOption, ...]) -> FittedTable:
    plain = next(option.step_seconds for option in options if option.recompute == "none")
    table = grid("Recompute settings", ("recompute",), ("step", "vs none", "MFU", "peak", "fits"))
    for option in options:
        table.add_row(
            f"{option.recompute} (as it is)" if option.current else option.recompute,
            format_seconds(option.step_seconds),
            format_change(option.step_seconds / plain - 1),
            format_percent(option.mfu),
            format_bytes(option.peak_bytes),
            "no" if option.rule is None else option.rule.words,
            style="bold" if option.current else "",
        )
    return table


def _transfers_table(offload: LayerOffload) -> FittedTable:
    """A whole layer over each link."""
    title = (
        f"A layer's {format_bytes(offload.layer_bytes)}: recomputed in {format_seconds(offload.recompute_seconds)}, "
        f"as fast as offloaded at {offload.break_even_bytes_per_second / 1e9:,.0f} GB/s"
    )
    table = grid(title, ("link",), ("GB/s, one direction", "one transfer", "both", "hidden", "beats recompute"))
    for trip in offload.links:
        width, out = f"{trip.link.bytes_per_second / 1e9:,.0f}", trip.transfer_seconds
        said = ("yes" if holds else "no" for holds in (trip.hidden, trip.beats_recompute))
        table.add_row(trip.link.name, width, format_seconds(out), format_seconds(2 * out), *said)
    return table


def _trades_table(trades: tuple[Trade, ...], *, linked: bool) -> FittedTable:
    """Args: linked: the device has a link to CPU."""
    rows = []
    for trade in trades:
        again = "never" if trade.recompute_seconds is None else format_seconds(trade.recompute_seconds)
        way = "" if trade.transfer_seconds is None else format_seconds(trade.transfer_seconds)
        limit = trade.break_even_bytes_per_second
        even = "" if limit is None else f"{limit / 1e9:,.0f} GB/s"
        links = f"{trade.links[0]} and faster" if trade.links else "none"
        links = "any" if trade.recompute_seconds is None else links
        rows.append((trade.role, trade.path, format_bytes(trade.nbytes), again, way, even, links))
    left = ("tensor", "read by")
    if not linked:
        return grid("Saved tensors of a layer", left, ("bytes", "recomputed"), [row[:4] for row in rows])
    right = ("bytes", "recompute", "transfer to CPU", "break-even link")
    return grid("Saved tensors of a layer: recompute or offload", left, right, rows, last=("offload wins over",))
