"""What `jettison estimate` says: a document for programs, tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.units import format_bytes, format_change, format_flops, format_percent, format_seconds
from jettison.cost.flops import Counting, tokens
from jettison.predict.forecast import Forecast
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.residuals import Sureness, sure_of
from jettison.predict.run_request import Resolved
from jettison.predict.stage_time import StageSeconds
from jettison.predict.time import Estimate
from jettison.predict.training_cost import NOTHING_WANTED, TrainingCost, Wanted, training_cost
from jettison.report.fitted import FittedTable
from jettison.report.ledger_table import MOST_STAGES, batch_text, frozen_text, host_text, layout_text, tuning_text
from jettison.report.parts import device_notes, exact, facts_table, titled
from jettison.report.schemas import shaped
from jettison.report.summary import request_document
from jettison.spec.kernels import Scans

if TYPE_CHECKING:  # asked for rarely
    from jettison.report.alternatives import LayerOffload, Option, Trade, Trilemma

SCHEMA = "jettison.estimate/1"
PARTS = ("compute", "communication", "bubble", "recompute", "other")


@dataclass(frozen=True, kw_only=True)
class EstimateReport:
    """An estimate, the peak of the same run, and what `--explain` adds.

    Args:
        eager_memory: why the peak is of eager layers although they are compiled; empty where it is not.
    """

    model: str
    asked: Resolved
    found: Estimate
    memory: Forecast
    available_bytes: int
    trilemma: Trilemma | None = None
    wanted: Wanted = NOTHING_WANTED
    eager_memory: str = ""

    @property
    def sure(self) -> Sureness:
        """How sure the time of a step is."""
        return sure_of(self.found)

    @property
    def training(self) -> TrainingCost | None:
        """What so many tokens take, where that was asked."""
        return training_cost(
            self.wanted,
            step_seconds=self.found.step_seconds,
            step_tokens=tokens(self.found.run),
            gpus=self.found.run.layout.world,
            sure=self.sure,
        )

    @property
    def fits(self) -> bool:
        """Does the peak leave the device its allowance?"""
        return self.memory.peak_bytes <= self.available_bytes

    @property
    def warnings(self) -> Iterator[str]:
        """What a reader should know before believing it."""
        yield from self.found.run.model.left_out
        if not self.fits:
            yield (
                f"this run does not fit {self.found.hardware.name}: its peak of {format_bytes(self.memory.peak_bytes)} "
                f"is more than the {format_bytes(self.available_bytes)} left for tensors"
            )
        if self.eager_memory:
            yield f"the peak is of layers that are not compiled: {self.eager_memory}"
        run = self.found.run
        if run.kernels.scans is Scans.WRITTEN and any(layer.scan is not None for layer in run.model.described):
            yield (
                "scans that are written out op by op were never timed: their part of this time is of kernels and bytes "
                "alone, and was held against no run; --scans fused has timed ones, of Mamba 2 and the gated delta rule"
            )
        if self.found.hardware.reached_source.startswith("estimated"):
            yield f"how much of its peaks {self.found.hardware.name} reaches is estimated, not measured"
        yield from device_notes(self.found.hardware, self.found.run)
        if self.found.hardware.note:
            yield f"{self.found.hardware.name}: {self.found.hardware.note}"

    def document(self) -> dict[str, Any]:
        """For programs. Seconds are of one step on the busiest stage, bytes of the worst rank."""
        found, run = self.found, self.found.run
        device, sure = found.hardware.under(found.execution.stack), self.sure
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.model,
            "request": request_document(self.asked),
            "gpu": found.hardware.name,
            "gpus": run.layout.world,
            "recompute": str(run.recompute),
            "whole_micro_batches": run.recompute.whole,
            "fusion": str(found.execution.fusion),
            "stack": found.execution.stack,
            "step_seconds": found.step_seconds,
            "step_range_seconds": list(sure.seconds(found.step_seconds)),
            "sureness": sure.document(),
            "training": None if self.training is None else self.training.document(),
            "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
            "mfu": found.mfu,
            "hfu": found.hfu,
            "mfu_by": {str(counting): found.mfu_by(counting) for counting in Counting},
            "model_flops": found.model_flops(),
            "hardware_flops": found.hardware_flops,
            "breakdown": {f"{name}_seconds": getattr(found.breakdown, name) for name in PARTS},
            "busiest_stage": found.busiest,
            "stages": [_stage(found, index) for index in range(len(found.stages))],
            "peak_bytes": self.memory.peak_bytes,
            "host_states": None if self.memory.host_states is None else asdict(self.memory.host_states),
            "available_bytes": self.available_bytes,
            "fits": self.fits,
            "reached": {name: share for name, share in asdict(device.reached).items() if share is not None},
            "reached_source": device.reached_source,
            "warnings": list(self.warnings),
        }
        if self.trilemma is not None:
            document |= _explanation(self.trilemma)
        return shaped(document)

    def table(self) -> RenderableType:
        """For people."""
        tables: list[RenderableType] = [facts_table(list(_facts(self))), _parts_table(self.found)]
        if len(self.found.stages) > 1:
            tables.append(_stages_table(self.found))
        if self.trilemma is not None:
            tables += _explanation_tables(self.trilemma)
        return Group(*(part for table in tables for part in ("", table)))


# for programs ---------------------------------------------------------------------------------------------------------


def _stage(found: Estimate, index: int) -> dict[str, Any]:
    stage = found.stages[index]
    return {
        "stage": index,
        "busy_seconds": found.replay.busy[index],
        "bubble_seconds": found.replay.bubble[index],
        "forward_seconds": sum(stage.forward),
        "backward_seconds": sum(stage.backward),
        "recompute_seconds": sum(part.seconds for part in stage.again),
        "end_seconds": stage.end,
        "optimizer_seconds": stage.optimizer,
    }


def _explanation(trilemma: Trilemma) -> dict[str, Any]:
    from jettison.report.alternatives import LINKS

    return {
        "kinds": [{"kind": str(kind), "seconds": seconds} for kind, seconds in trilemma.kinds],
        "options": [asdict(option) for option in trilemma.options],
        "links": [asdict(link) for link in LINKS],
        "trades": [asdict(trade) | {"links": list(trade.links)} for trade in trilemma.trades],
        "offload": None if trilemma.offload is None else _offload(trilemma.offload),
        "sentences": list(trilemma.sentences),
    }


def _offload(offload: LayerOffload) -> dict[str, Any]:
    return asdict(offload) | {
        "hides": offload.hides,
        "break_even_bytes_per_second": offload.break_even_bytes_per_second,
    }


# for people -----------------------------------------------------------------------------------------------------------


def _facts(report: EstimateReport) -> Iterator[tuple[str, str]]:
    found, run = report.found, report.found.run
    yield "model", f"{report.model} on {run.layout.world} x {found.hardware.name}"
    yield "layout", layout_text(run.layout)
    yield "batch", batch_text(report.asked)
    if run.tuning is not None:
        yield "trained", tuning_text(run)
    for beside in frozen_bytes(run):
        yield str(beside.beside.role), frozen_text(beside)
    if (text := host_text(run, report.memory.host_states)) is not None:
        yield "on the host", text
    yield ("recompute", f"{run.recompute.words}; fusion {found.execution.fusion}")
    yield "step", format_seconds(found.step_seconds)
    yield "range", report.sure.words(found.step_seconds)
    yield "throughput", f"{found.tokens_per_second_per_gpu:,.0f} tokens a second on each GPU"
    palm = found.mfu_by(Counting.PALM)
    by = f"{format_percent(palm)} by {4 if run.tuning else 6}N + 12Lhs"
    yield "MFU", f"{format_percent(found.mfu)} ({by}); HFU {format_percent(found.hfu)}"
    yield "model FLOPs", f"{format_flops(found.model_flops())} a step; {format_flops(found.hardware_flops)} run"
    if report.training is not None:
        yield "training", f"{report.training.amount}: {report.training.duration}"
        yield "cost", report.training.expense
    verdict = "fits" if report.fits else "DOES NOT FIT"
    yield "peak", f"{exact(report.memory.peak_bytes)}: {verdict} in {format_bytes(report.available_bytes)}"


def _parts_table(found: Estimate) -> FittedTable:
    of = f" of stage {found.busiest}" if len(found.stages) > 1 else ""
    table = titled(f"Where the time{of} goes", ("part",), ("seconds", "share"))
    for name in PARTS:
        seconds = getattr(found.breakdown, name)
        table.add_row(name, format_seconds(seconds), format_percent(seconds / found.step_seconds))
    table.add_section()
    table.add_row("step", format_seconds(found.step_seconds), "")
    return table


def _stages_table(found: Estimate) -> FittedTable:
    right = ("forward", "backward", "of it again", "busy", "bubble", "optimizer")
    table = titled("Pipeline stages: one micro-batch, and a whole step", ("stage",), right)
    rows = [(_cells(found, i), i) for i in range(len(found.stages))]
    groups = [[i for _, i in same] for _, same in groupby(rows, key=lambda row: row[0])]
    half = MOST_STAGES // 2
    shown = groups if len(groups) <= MOST_STAGES else groups[:half] + groups[-half:]
    for members in shown:
        name = str(members[0]) if len(members) == 1 else f"{members[0]} to {members[-1]}"
        table.add_row(name, *_cells(found, members[0]), style="bold" if found.busiest in members else "")
    return table


def _cells(found: Estimate, index: int) -> tuple[str, ...]:
    stage: StageSeconds = found.stages[index]
    seconds = (sum(stage.forward), sum(stage.backward), sum(part.seconds for part in stage.again))
    step = (found.replay.busy[index], found.replay.bubble[index], stage.optimizer)
    return tuple(map(format_seconds, (*seconds, *step)))


def _explanation_tables(trilemma: Trilemma) -> Iterator[RenderableType]:
    kinds = titled("What the compute is", ("kernels",), ("seconds", "share"))
    whole = sum(seconds for _, seconds in trilemma.kinds) or 1.0
    for kind, seconds in trilemma.kinds:
        kinds.add_row(str(kind), format_seconds(seconds), format_percent(seconds / whole))
    yield kinds
    yield _options_table(trilemma.options)
    yield _trades_table(trilemma.trades, moved=trilemma.offload is not None)
    if trilemma.offload is not None:
        yield _ways_table(trilemma.offload)
    yield Group(*(Text(line) for line in trilemma.sentences))


def _options_table(options: tuple[Option, ...]) -> FittedTable:
    table = titled("Ways to keep activations", ("recompute",), ("step", "against none", "MFU", "peak", "fits"))
    plain = next(option.step_seconds for option in options if option.recompute == "none")
    for option in options:
        name = f"{option.recompute} (as it is)" if option.current else option.recompute
        table.add_row(
            name,
            format_seconds(option.step_seconds),
            format_change(option.step_seconds / plain - 1),
            format_percent(option.mfu),
            format_bytes(option.peak_bytes),
            "yes" if option.fits else "no",
            style="bold" if option.current else "",
        )
    return table


def _ways_table(offload: LayerOffload) -> FittedTable:
    """A whole layer over each link."""
    even = f"{offload.break_even_bytes_per_second / 1e9:,.0f} GB/s"
    title = (
        f"A layer's {format_bytes(offload.layer_bytes)}: computed again in {format_seconds(offload.again_seconds)}, "
        f"as quick as moved at {even}"
    )
    table = titled(title, ("link",), ("GB/s one way", "out", "out and back", "hides", "quicker unhidden"))
    for way in offload.ways:
        table.add_row(
            way.link.name,
            f"{way.link.bytes_per_second / 1e9:,.0f}",
            format_seconds(way.one_way_seconds),
            format_seconds(2 * way.one_way_seconds),
            "yes" if way.hides else "no",
            "yes" if way.quicker else "no",
        )
    return table


def _trades_table(trades: tuple[Trade, ...], *, moved: bool) -> FittedTable:
    """Args: moved: there is a host to move it to."""
    if not moved:
        table = titled("What a layer saves", ("tensor", "read by"), ("bytes", "computed again"))
        for trade in trades:
            table.add_row(trade.role, trade.path, format_bytes(trade.nbytes), _again(trade))
        return table
    right = ("bytes", "again", "one way to the host", "break-even link")
    table = titled("What a layer saves: computed again or moved", ("tensor", "read by"), right)
    table.add_column("moving is quicker over")
    for trade in trades:
        way = "" if trade.moved_seconds is None else format_seconds(trade.moved_seconds)
        limit = trade.break_even_bytes_per_second
        even = "" if limit is None else f"{limit / 1e9:,.0f} GB/s"
        links = f"{trade.links[0]} and quicker" if trade.links else "none"
        links = "any" if trade.again_seconds is None else links
        table.add_row(trade.role, trade.path, format_bytes(trade.nbytes), _again(trade), way, even, links)
    return table


def _again(trade: Trade) -> str:
    return "never" if trade.again_seconds is None else format_seconds(trade.again_seconds)
