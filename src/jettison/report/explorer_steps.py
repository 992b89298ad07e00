"""The explorer's panels about steps: what each stage does and holds on one clock, and how long iterations take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from jettison.core.errors import Infeasible
from jettison.memory.schedule import PASSES, DeviceAction, Work
from jettison.memory.step import StageAction, actions
from jettison.predict.forecast import Forecast, Stage, available_bytes, replayed_load
from jettison.predict.ranges import time_residual
from jettison.predict.stage_units import sent_to_host
from jettison.predict.time import Breakdown
from jettison.report.explain import region_roles
from jettison.report.explorer_models import (
    GPU,
    MODEL,
    answered,
    explorer_table,
    flags_text,
    line,
    rounded,
    run_of,
    usual_layout,
)
from jettison.report.step_slices import PassSlices, SliceKind, host_copies, step_slices
from jettison.spec.hardware import Hardware, hardware

LAYOUTS: Final[Mapping[str, dict[str, Any]]] = explorer_table("step_layouts")
LEAST_SHARE: Final = 0.01
"""Share of the bytes that are held, below which a role is one of the others."""


def step_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By layout, every stage's passes, what they hold, and a breakdown of the peak."""
    full = {"recompute": "full"}
    asked = [(f"{name}, full recomputation", name, usual_layout(name, hardware(GPU)) | full) for name in models]
    asked += [(f"{MODEL}: {name}", MODEL, flags) for name, flags in LAYOUTS.items()]
    return {"layouts": [_layout(name, model, flags) for name, model, flags in asked]}


def _layout(name: str, model: str, flags: dict[str, Any]) -> dict[str, Any]:
    device = hardware(GPU)
    memory, time = answered(run_of(model, **flags), device)
    slices = step_slices(memory, time)
    return {
        "name": name,
        "gpu": GPU,
        "usable_bytes": device.usable_bytes,
        "available_bytes": available_bytes(device, memory.run),
        "step_seconds": rounded(time.step_seconds),
        "peak_bytes": memory.peak_bytes,
        "command": line("estimate", model, {"gpu": GPU} | flags),
        "stages": [StagePasses(memory, stage, slices[stage.index]).document(device) for stage in memory.stages],
    }


class Instant(NamedTuple):
    """Bytes of one unit's worst moment, without parameters and state; without an action: of the optimizer."""

    one: StageAction | None
    where: str
    gradients: int
    held: int
    transient: int

    @property
    def nbytes(self) -> int:
        """Altogether."""
        return self.gradients + self.held + self.transient


class StagePasses:
    """One stage over a step: its passes on the clock, each with the bytes of its units.

    Args:
        passes: as `report.step_slices.step_slices` has them.
    """

    def __init__(self, memory: Forecast, stage: Stage, passes: Sequence[PassSlices]) -> None:
        self.memory, self.stage, self.all_slices = memory, stage, passes
        self.load = replayed_load(memory.run, stage)
        self.actions = [one for one in actions(self.load).actions if one.kind.work in PASSES]
        self.passes = list(zip(self.actions, (own for own in passes if own.step is not None), strict=True))
        self.sent = [sent_to_host(memory.run, chunk) for chunk in stage.groups]

    def held(self, one: StageAction) -> int:
        """Return bytes before a pass, without parameters, state and gradients."""
        return one.level - self.load.fixed - self.load.state - one.gradients

    @cached_property
    def instants(self) -> tuple[Instant, ...]:
        """Every unit of every pass, and the optimizer."""
        found = [
            Instant(one, name, one.gradients + made, self.held(one) + held, rise)
            for one in self.actions
            for name, held, made, rise in _unit_rows(one)
        ]
        return (*found, Instant(None, "", self.load.gradient_bytes, 0, self.load.optimizer_transient))

    @cached_property
    def peak(self) -> Instant:
        """The first of the highest, from the second step on."""
        return max(self.instants, key=lambda instant: instant.nbytes)

    def document(self, device: Hardware) -> dict[str, Any]:
        """Return what a page draws."""
        load = self.load
        optimizer = next(s for s in reversed(self.all_slices[-1].slices) if s.kind is SliceKind.OPTIMIZER)
        kinds: dict[DeviceAction, int] = {}
        profiles: list[dict[str, Any]] = []
        passes: list[list[Any]] = []
        for one, own in self.passes:
            kind = one.kind
            if kind not in kinds:
                kinds[kind] = len(profiles)
                profiles.append(self._profile(one, own))
            when = [rounded(ns / 1e9) for ns in (own.begin_ns, own.end_ns)]
            back = int(kind.work is not Work.FORWARD)
            chunk = kind.chunk % load.order.own
            passes.append([back, one.micro_batch, chunk, *when, kinds[kind], self.held(one), one.gradients])
        return {
            "fixed": load.fixed,
            "state": load.state,
            "gradients": load.gradient_bytes,
            "transient": load.optimizer_transient,
            "optimizer": [rounded(ns / 1e9) for ns in (optimizer.begin_ns, optimizer.end_ns)],
            "ledger_peak": self.stage.peak.nbytes,
            "profiles": profiles,
            "passes": passes,
            "copies": [
                [int(c.to_host), c.name, c.micro_batch, rounded(c.begin_ns / 1e9), rounded(c.end_ns / 1e9), c.nbytes]
                for c in host_copies(self.stage, self.all_slices, self.sent, device)
            ],
            "roles": _held_roles(self),
        }

    def _profile(self, one: StageAction, own: PassSlices) -> dict[str, Any]:
        """Return the recomputed share and the units of passes of one kind."""
        length, times = own.end_ns - own.begin_ns, own.times(one.units)
        last = max(end for _, end in times.values())
        again = sum(s.end_ns - s.begin_ns for s in own.slices if s.kind is SliceKind.RECOMPUTE)
        sent = {} if one.kind.work is Work.WEIGHT else self.sent[one.kind.chunk % self.load.order.own]
        units = [
            [where, round((times[where][1] - own.begin_ns) / (last - own.begin_ns), 6), *rest, sent.get(where, 0)]
            for where, *rest in _unit_rows(one)
        ]
        return {"again": round(again / length, 6), "units": units}


def _unit_rows(one: StageAction) -> Iterator[tuple[str, int, int, int]]:
    """By unit of a pass, what more is held when it comes to it, what gradients more, and how high it rises above."""
    held = made = 0
    for where, own in groupby(((name, piece) for piece in one.pieces for name in piece.names), itemgetter(0)):
        before, rise = (held, made), 0
        for _, piece in own:  # steps of a second half: the highest
            rise = max(rise, held + made - sum(before) + piece.peak)
            held += piece.net - piece.gradients
            made += piece.gradients
        yield where, *before, rise


def _held_roles(played: StagePasses) -> list[tuple[str, int]]:
    """Bytes held for backward at the peak, by role, largest first.

    What other micro-batches hold is whole; of the one at work, the regions up to the one at work: a forward has made
    what regions before it keep, a backward has let go of those after it. Segments hold the input of their first layer,
    by whatever name it has there.
    """
    memory, stage, at, own = played.memory, played.stage, played.peak, played.load.order.own
    alive, total = Counter[int](), Counter[str]()
    for one in played.actions:
        if one is at.one:
            break
        alive[one.kind.chunk % own] += {Work.FORWARD: 1, Work.WEIGHT: 0}.get(one.kind.work, -1)
    for chunk, count in alive.items():
        for _, roles in _unit_roles(memory, stage, chunk):
            total.update({role: count * nbytes for role, nbytes in roles.items()})
    if at.one is not None:
        units = _unit_roles(memory, stage, at.one.kind.chunk % own)
        place = [name for name, _ in units].index(at.where)
        forward = at.one.kind.work is Work.FORWARD
        for _, roles in units[:place] if forward else units[place + 1 :]:
            (total.update if forward else total.subtract)(roles)
    rest = at.held - sum(total.values())
    if rest:
        total["outputs sent on"] += rest
    large = [(role, n) for role, n in total.most_common() if n >= LEAST_SHARE * max(1, at.held)]
    if others := at.held - sum(n for _, n in large):
        large.append(("others", others))
    return large


def _unit_roles(memory: Forecast, stage: Stage, chunk: int) -> list[tuple[str, Counter[str]]]:
    """By unit of a chunk, what stays of it on the device; the last layer of a chunk sends nothing."""
    mesh, offload = memory.run.layout.mesh_sizes, memory.run.recompute.offload
    parts = {part.name: part for part in stage.parts[chunk]}
    known: dict[tuple[object, ...], Counter[str]] = {}
    found = []
    for unit in stage.load.chunks[chunk]:
        for name in unit.names:
            part = parts[name.partition(" to ")[0]]
            key = part.region, part.kept, part.chosen, unit.resident
            if key not in known:
                whole = not offload or unit.resident == part.region.program.kept_bytes(part.kept)
                sent = part.kept if part.chosen is None else part.chosen.offloaded
                known[key] = region_roles(part, mesh, part.kept if whole else part.kept - sent)
            found.append((name, known[key]))
    return found


# Iteration times: full recomputation, selective with sequence parallelism, and the planner's choice -------------------

PAPER_GPU: Final = "a100-80gb"
PAPER: Final = "arXiv 2205.05198"


class Iteration(NamedTuple):
    """One model of Tables 3 and 5, on A100s of 80 GB; tests hold it against tests/facts.

    Args:
        asked: its layout and batch, as flags.
        mfu, hfu: of selective recomputation with sequence parallelism, as fractions.
    """

    model: str
    full_seconds: float
    selective_seconds: float
    mfu: float
    hfu: float
    asked: dict[str, Any]


ITERATIONS: Final = {name: Iteration(**row) for name, row in explorer_table("iterations").items()}
"""Tables 3 and 5."""
WAYS: Final = (
    ("full", "full recomputation", {"recompute": "full"}),
    ("selective", "selective, sequence parallelism", {"recompute": "selective"}),
    ("auto", "the planner's choice", {"recompute": "auto"}),
)
"""The first without sequence parallelism, as in the paper; the others with it, where there is tensor parallelism."""


def time_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model and way: seconds of a step and their parts, MFU, HFU, the peak, and what was published."""
    found = [_iterations(name, one.model, PAPER_GPU, one.asked, one) for name, one in ITERATIONS.items()]
    found += [_iterations(model, model, GPU, usual_layout(model, hardware(GPU)), None) for model in models]
    parts = [field.name for field in fields(Breakdown)]
    return {"parts": parts, "ways": [{"key": key, "label": label} for key, label, _ in WAYS], "models": found}


def _iterations(name: str, model: str, gpu: str, asked: dict[str, Any], published: Iteration | None) -> dict[str, Any]:
    return {
        "name": name,
        "gpu": gpu,
        "gpus": run_of(model, **asked).layout.world,
        "layout": flags_text(asked),
        "source": PAPER if published else None,
        "published_mfu": published.mfu if published else None,
        "published_hfu": published.hfu if published else None,
        "rows": list(_rows(model, hardware(gpu), asked, published)),
    }


def _rows(model: str, device: Hardware, asked: dict[str, Any], published: Iteration | None) -> Iterator[dict[str, Any]]:
    stated = {"full": published.full_seconds, "selective": published.selective_seconds} if published else {}
    for key, _, flags in WAYS:
        flags = asked | ({"sp": False} if key == "full" and asked.get("tp", 1) > 1 else {}) | flags
        run = run_of(model, **flags)
        row: dict[str, Any] = {
            "way": key,
            "published_seconds": stated.get(key),
            "command": line("estimate", model, {"gpu": device.name} | flags),
        }
        try:
            memory, time = answered(run, device)
        except Infeasible as error:
            yield row | {"seconds": None, "range": None, "minimum_bytes": error.minimum_budget_bytes}
            continue
        residual = time_residual(time.run, time.hardware.name)
        yield row | {
            "seconds": rounded(time.step_seconds),
            "expected": rounded(time.step_seconds * residual.expected),
            "range": [rounded(end) for end in residual.of(time.step_seconds).ends],
            "parts": [rounded(seconds) for seconds in astuple(time.breakdown)],
            "mfu": round(time.mfu / residual.expected, 6),
            "hfu": round(time.hfu / residual.expected, 6),
            "peak_bytes": memory.peak_bytes,
            "fits": memory.peak_bytes <= available_bytes(device, memory.run),
        }
