"""The explorer's panels about steps: what each stage does and holds on one clock, and how long iterations take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jettison.core.errors import Infeasible
from jettison.memory.schedule import Work
from jettison.predict.allowance import available_bytes
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.played import BACKWARD, PlayedStage, copies, play
from jettison.predict.residuals import sure_of
from jettison.report.explain import region_roles
from jettison.report.explorer_models import answered, flags_text, line, rounded, run_of, usual_layout
from jettison.spec.hardware import Hardware, hardware

GPU: Final = "h100-80gb"
MODEL: Final = "llama3-8b"
LAYOUTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("4 stages, 1F1B", {"pp": 4, "micro_batches": 8}),
    ("4 stages, 1F1B, everything computed again", {"pp": 4, "micro_batches": 8, "recompute": "full"}),
    ("4 stages, interleaved 1F1B, 2 virtual stages each", {"pp": 4, "virtual_stages": 2, "micro_batches": 8}),
    ("4 stages, GPipe", {"pp": 4, "micro_batches": 8, "schedule": "gpipe"}),
    ("1 stage, FSDP over 8", {"dp": 8, "zero": 3, "seq": 8192, "micro_batches": 2}),
    (
        "1 stage, FSDP over 8, planned with offload",
        {"dp": 8, "zero": 3, "seq": 8192, "micro_batch": 2, "micro_batches": 2, "recompute": "auto", "offload": True},
    ),
)
LEAST_SHARE: Final = 0.01
"""Share of the bytes that are held, below which a role is one of the others."""


def step_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By layout, every stage's passes, what they hold, and the peak taken apart."""
    asked = [(f"{MODEL}: {name}", MODEL, flags) for name, flags in LAYOUTS]
    for model in models:
        layout = usual_layout(model, hardware(GPU)) | {"recompute": "full"}
        asked.insert(0, (f"{model}, everything computed again", model, layout))
    return {"layouts": [_layout(name, model, flags) for name, model, flags in asked]}


def _layout(name: str, model: str, flags: dict[str, Any]) -> dict[str, Any]:
    device = hardware(GPU)
    memory, time = answered(run_of(model, **flags), device)
    return {
        "name": name,
        "gpu": GPU,
        "usable_bytes": device.usable_bytes,
        "available_bytes": available_bytes(device, memory.run),
        "step_seconds": rounded(time.step_seconds),
        "peak_bytes": memory.peak_bytes,
        "command": line("estimate", model, {"gpu": GPU} | flags),
        "stages": [
            _stage(memory, stage, played, device)
            for stage, played in zip(memory.stages, play(memory, time), strict=True)
        ],
    }


def _stage(memory: Forecast, stage: Stage, played: PlayedStage, device: Hardware) -> dict[str, Any]:
    return {
        "fixed": played.fixed,
        "state": played.state,
        "gradients": played.gradient_bytes,
        "transient": played.optimizer_transient,
        "optimizer": [rounded(seconds) for seconds in played.optimizer],
        "ledger_peak": stage.peak.nbytes,
        "profiles": [
            {
                "again": round(profile.again, 6),
                "units": [
                    [u.where, round(u.share, 6), u.held, u.gradients, u.transient, u.moved] for u in profile.units
                ],
            }
            for profile in played.profiles
        ],
        "passes": [
            [
                int(each.timed.step.work is not Work.FORWARD),
                each.timed.step.micro_batch,
                each.timed.step.chunk,
                rounded(each.timed.start),
                rounded(each.timed.end),
                each.profile,
                each.held,
                each.gradients,
            ]
            for each in played.passes
        ],
        "copies": [
            [int(c.to_host), c.where, c.micro_batch, rounded(c.start), rounded(c.end), c.nbytes]
            for c in copies(played, device)
        ],
        "roles": _held_roles(memory, stage, played),
    }


def _held_roles(memory: Forecast, stage: Stage, played: PlayedStage) -> list[tuple[str, int]]:
    """Bytes held for backward at the peak, by role, largest first.

    What other micro-batches hold is whole; of the one at work, the regions up to the one at work: a forward has made
    what regions before it keep, a backward has let go of those after it. Segments hold the input of their first layer,
    by whatever name it has there.
    """
    at = played.peak
    current = next(p for p in played.passes if p.timed.start <= at.start < p.timed.end)
    alive: Counter[int] = Counter()
    for each in played.passes:
        if each is current:
            break
        alive[each.timed.step.chunk] += -1 if each.timed.step.work is Work.BACKWARD else 1
    total: Counter[str] = Counter()
    for chunk, count in alive.items():
        for _, roles in _unit_roles(memory, stage, chunk):
            total.update({role: count * nbytes for role, nbytes in roles.items()})
    units = _unit_roles(memory, stage, current.timed.step.chunk)
    place = [name for name, _ in units].index(at.where)
    forward = current.profile % (BACKWARD + 1) == 0
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
                sent = part.kept if part.chosen is None else part.chosen.moved
                known[key] = region_roles(part, mesh, part.kept if whole else part.kept - sent)
            found.append((name, known[key]))
    return found


# Iteration times: full recomputation, selective with sequence parallelism, and the planner's choice -------------------

PAPER_GPU: Final = "a100-80gb"
PARTS: Final = ("compute", "communication", "bubble", "recompute", "other")
PAPER: Final = "arXiv 2205.05198"


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One model of Tables 3 and 5, on A100s of 80 GB; tests hold it against tests/facts.

    Args:
        asked: its layout and batch, as flags.
        mfu, hfu: of selective recomputation with sequence parallelism, as fractions.
    """

    model: str
    asked: dict[str, Any]
    full_seconds: float
    selective_seconds: float
    mfu: float
    hfu: float


def _published(model: str, full: float, selective: float, mfu: float, hfu: float, **asked: Any) -> Iteration:
    found = {"tp": 8, **asked}
    return Iteration(model=model, asked=found, full_seconds=full, selective_seconds=selective, mfu=mfu, hfu=hfu)


ITERATIONS: Final = {
    "22B": _published("gpt-22b", 1.42, 1.10, 0.415, 0.437, micro_batch=4),
    "175B": _published("gpt-175b", 18.13, 13.75, 0.514, 0.528, pp=8, virtual_stages=3, micro_batches=64),
    "530B": _published("gpt-530b", 49.05, 37.83, 0.560, 0.570, pp=35, virtual_stages=3, micro_batches=280),
    "1T": _published("gpt-1t", 94.42, 71.49, 0.563, 0.570, pp=64, micro_batches=512),
}
"""Tables 3 and 5."""
WAYS: Final = (
    ("full", "everything computed again", {"recompute": "full"}),
    ("selective", "selective, sequence parallelism", {"recompute": "selective"}),
    ("auto", "the planner's choice", {"recompute": "auto"}),
)
"""The first without sequence parallelism, as in the paper; the others with it, where there is tensor parallelism."""


def time_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model and way: seconds of a step and their parts, MFU, HFU, the peak, and what was published."""
    found = [_iterations(name, one.model, PAPER_GPU, one.asked, one) for name, one in ITERATIONS.items()]
    found += [_iterations(model, model, GPU, usual_layout(model, hardware(GPU)), None) for model in models]
    return {"parts": list(PARTS), "ways": [{"key": key, "label": label} for key, label, _ in WAYS], "models": found}


def _iterations(name: str, model: str, gpu: str, asked: dict[str, Any], published: Iteration | None) -> dict[str, Any]:
    device = hardware(gpu)
    run = run_of(model, **asked)
    return {
        "name": name,
        "gpu": gpu,
        "gpus": run.layout.world,
        "layout": flags_text(asked),
        "source": PAPER if published else None,
        "published_mfu": published.mfu if published else None,
        "published_hfu": published.hfu if published else None,
        "rows": list(_rows(model, device, asked, published)),
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
        parts = time.breakdown
        yield row | {
            "seconds": rounded(time.step_seconds),
            "range": [rounded(end) for end in sure_of(time).seconds(time.step_seconds)],
            "parts": [rounded(getattr(parts, name)) for name in PARTS],
            "mfu": round(time.mfu, 6),
            "hfu": round(time.hfu, 6),
            "peak_bytes": memory.peak_bytes,
            "fits": memory.peak_bytes <= available_bytes(device, memory.run),
        }
