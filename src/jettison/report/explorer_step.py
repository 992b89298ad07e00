"""The explorer's step: what each stage does and holds, on one clock, and what its peak is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from jettison.memory.schedule import Work
from jettison.memory.unit import Unit
from jettison.predict.allowance import available_bytes
from jettison.predict.forecast import Forecast, Stage
from jettison.predict.played import BACKWARD, Instant, PassProfile, PlayedStage, copies, play
from jettison.predict.stages import StageRegion
from jettison.report.explain import region_roles
from jettison.report.explorer_common import answered, line, rounded, run_of, usual_layout
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
"""Of the bytes that are held, below which a role is one of the others."""


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
    stages = play(memory, time)
    return {
        "name": name,
        "gpu": GPU,
        "usable_bytes": device.usable_bytes,
        "available_bytes": available_bytes(device, memory.run),
        "step_seconds": rounded(time.step_seconds),
        "peak_bytes": memory.peak_bytes,
        "command": line("estimate", model, {"gpu": GPU} | flags),
        "stages": [_stage(memory, stage, own, device) for stage, own in zip(memory.stages, stages, strict=True)],
    }


def _stage(memory: Forecast, stage: Stage, played: PlayedStage, device: Hardware) -> dict[str, Any]:
    highest = played.peak
    return {
        "fixed": played.fixed,
        "state": played.state,
        "gradients": played.gradient_bytes,
        "transient": played.optimizer_transient,
        "optimizer": [rounded(seconds) for seconds in played.optimizer],
        "ledger_peak": stage.peak.nbytes,
        "profiles": [_profile(profile) for profile in played.profiles],
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
        "roles": held_roles(memory, stage, played, highest),
    }


def _profile(profile: PassProfile) -> dict[str, Any]:
    return {
        "again": round(profile.again, 6),
        "units": [[u.where, round(u.share, 6), u.held, u.gradients, u.transient, u.moved] for u in profile.units],
    }


def held_roles(memory: Forecast, stage: Stage, played: PlayedStage, at: Instant) -> list[list[Any]]:
    """What is held for backward at an instant, by role, largest first.

    What other micro-batches hold is whole; of the one at work, the regions up to the one at work. Segments hold the
    input of their first layer, by whatever name it has there.
    """
    mesh = memory.run.layout.mesh_sizes
    current = next(p for p in played.passes if p.timed.start <= at.start < p.timed.end)
    alive: Counter[int] = Counter()
    for each in played.passes:
        if each is current:
            break
        alive[each.timed.step.chunk] += -1 if each.timed.step.work is Work.BACKWARD else 1
    total: Counter[str] = Counter()
    for chunk, count in alive.items():
        for _, roles in _unit_roles(memory, stage, chunk, mesh):
            total.update({role: count * nbytes for role, nbytes in roles.items()})
    _at_work(total, memory, stage, current.profile, current.timed.step.chunk, at.where, mesh)
    rest = at.held - sum(total.values())
    if rest:
        total["outputs sent on"] += rest
    smallest = LEAST_SHARE * max(1, at.held)
    large = [[role, nbytes] for role, nbytes in total.most_common() if nbytes >= smallest]
    others = at.held - sum(n for _, n in total.items() if n >= smallest)
    return [*large, *([["others", others]] if others else [])]


def _at_work(
    total: Counter[str], memory: Forecast, stage: Stage, profile: int, chunk: int, where: str, mesh: dict[str, int]
) -> None:
    """A forward has made what regions before ``where`` keep; a backward has let go of those after it."""
    units = list(_unit_roles(memory, stage, chunk, mesh))
    names = [name for name, _ in units]
    place = names.index(where)
    if profile % (BACKWARD + 1) == 0:
        for _, roles in units[:place]:
            total.update(roles)
    else:
        for _, roles in units[place + 1 :]:
            total.subtract(roles)


def _staying(memory: Forecast, part: StageRegion, unit: Unit) -> frozenset[int]:
    """Buffers that stay on the device; the last layer of a chunk sends nothing."""
    if unit.resident == part.region.program.kept_bytes(part.kept) or not memory.run.recompute.offload:
        return part.kept
    return part.kept - (part.kept if part.chosen is None else part.chosen.moved)


def _unit_roles(memory: Forecast, stage: Stage, chunk: int, mesh: dict[str, int]) -> list[tuple[str, Counter[str]]]:
    """By unit of a chunk, what stays of it on the device."""
    roles = {part.name: part for part in stage.parts[chunk]}
    known: dict[tuple[object, ...], Counter[str]] = {}
    found = []
    for unit in stage.load.chunks[chunk]:
        for name in unit.names:
            part = roles[name.partition(" to ")[0]]
            key = part.region, part.kept, part.chosen, unit.resident
            if key not in known:
                known[key] = region_roles(part, mesh, _staying(memory, part, unit))
            found.append((name, known[key]))
    return found
