"""The explorer's front: the fastest plan at each budget, what each does with every tensor, and what a GiB is worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from jettison.errors import Infeasible
from jettison.explain.layer_reasons import AGAIN, HERE, THERE, tensor_name, whereabouts
from jettison.explain.what_if import flips
from jettison.predict.allowance import available_bytes
from jettison.predict.auto_recompute import AutoForecast, Stages, choose
from jettison.predict.forecast import forecast
from jettison.predict.stages import StageRegion
from jettison.report.explorer_common import line, rounded, run_of, usual_layout
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.run import Run
from jettison.units import GIB

GPU: Final = "h100-80gb"
MODEL: Final = "llama3-8b"
ASKED: Final[dict[str, Any]] = {"dp": 8, "zero": 3, "seq": 8192, "micro_batch": 1}
WAYS: Final = (("kept or computed again", False), ("kept, computed again or on the host", True))
LETTERS: Final = {HERE: "k", AGAIN: "a", THERE: "h"}
MOST, MOST_ASKED = 48, 8
"""Budgets of a sweep, a GiB or more apart, of `MODEL` and of models that were asked for: a plan may take seconds."""
MOST_FLIPS: Final = 5


def front_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model, the sweep with and without the host; of `MODEL` where none is asked for."""
    if not models:
        return {"models": [_model(MODEL, ASKED, MOST)]}
    return {"models": [_model(model, usual_layout(model, hardware(GPU)), MOST_ASKED) for model in models]}


def _model(model: str, asked: dict[str, Any], most: int) -> dict[str, Any]:
    device = hardware(GPU)
    run = run_of(model, **asked)
    return {
        "name": model,
        "gpu": GPU,
        "layout": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in asked.items()) or "one device",
        "available_bytes": available_bytes(device, run),
        "plain_peak_bytes": forecast(run).peak_bytes,
        "layers": list(run.model.layer_names),
        "ways": [_sweep(model, asked, device, label, most, offload=offload) for label, offload in WAYS],
    }


def budgets(smallest: int, largest: int, most: int) -> list[int]:
    """The smallest budget, and whole GiB from there to one that everything fits, at most so many of them."""
    low, high = -(-smallest // GIB), -(-largest // GIB)
    step = max(1, -(-(high - low) // most))
    return [smallest, *(gib * GIB for gib in range(low + (low * GIB == smallest), high + step, step))]


def _sweep(
    model: str, asked: dict[str, Any], device: Hardware, label: str, most: int, *, offload: bool
) -> dict[str, Any]:
    flags = asked | {"offload": offload}
    run = run_of(model, recompute="auto", **flags)
    smallest = _smallest(run, device)
    plans: list[AutoForecast] = []
    stages: Stages = {}
    for budget in budgets(smallest, forecast(run_of(model, **asked)).peak_bytes, most):
        plans.append(choose(run, budget, device, stages=stages))
        if plans[-1].seconds <= 0.0:  # more memory buys nothing
            break
    tensors, patterns, rows = _grids(plans)
    return {
        "label": label,
        "offload": offload,
        "command": line("plan", model, {"gpu": GPU} | flags),
        "minimum_bytes": smallest,
        "tensors": tensors,
        "patterns": patterns,
        "points": [_point(plan, before, row) for plan, before, row in zip(plans, [None, *plans], rows, strict=False)],
    }


def _smallest(run: Run, device: Hardware) -> int:
    try:
        return choose(run, GIB, device).minimum_budget_bytes
    except Infeasible as error:
        return error.minimum_budget_bytes


def _point(plan: AutoForecast, before: AutoForecast | None, row: list[list[int]]) -> dict[str, Any]:
    changed = [] if before is None else list(flips(before, plan))
    return {
        "budget": plan.budget_bytes,
        "peak": plan.forecast.peak_bytes,
        "seconds": rounded(plan.step_seconds),
        "again": rounded(plan.seconds - plan.stalled_seconds),
        "stalled": rounded(plan.stalled_seconds),
        "host": plan.host_bytes,
        "gap": round(plan.gap, 6),
        "grid": row,
        "flips": [[f.tensor, f.before, f.after, len(f.layers), f.nbytes] for f in changed[:MOST_FLIPS]],
        "more": max(0, len(changed) - MOST_FLIPS),
    }


def _grids(plans: Sequence[AutoForecast]) -> tuple[list[dict[str, Any]], list[str], list[list[list[int]]]]:
    """Tensors of a layer; what layers do with them, a letter each; and by plan runs of layers that do the same."""
    tensors = _tensors(next(part for part in plans[0].forecast.parts if part.is_layer))
    patterns: dict[str, int] = {}
    rows = []
    for plan in plans:
        own = [patterns.setdefault(_pattern(part, tensors), len(patterns)) for part in _layers(plan)]
        rows.append([[len(list(same)), number] for number, same in groupby(own)])
    return [{"name": t["name"], "nbytes": t["nbytes"]} for t in tensors], list(patterns), rows


def _layers(plan: AutoForecast) -> dict[StageRegion, None]:
    named = {part.name: part for part in plan.forecast.parts if part.is_layer}
    return dict.fromkeys(named[name] for name in plan.forecast.run.model.layer_names)


def _tensors(part: StageRegion) -> list[dict[str, Any]]:
    """In the order in which a forward makes them; several of one name are numbered."""
    found: list[dict[str, Any]] = []
    for buffer in whereabouts(part):
        name = tensor_name(part.region, buffer)
        times = sum(1 for each in found if each["role"] == name)
        nbytes = part.region.program.buffers[buffer].nbytes
        found.append({"role": name, "name": f"{name} {times + 1}" if times else name, "nbytes": nbytes})
    return found


def _pattern(part: StageRegion, tensors: Sequence[dict[str, Any]]) -> str:
    """By name, since layers of several kinds have other buffers; a dot where a layer has no such tensor."""
    found: dict[str, str] = {}
    for buffer, place in whereabouts(part).items():
        name = tensor_name(part.region, buffer)
        times = sum(1 for key in found if key == name or key.rpartition(" ")[0] == name)
        found[f"{name} {times + 1}" if times else name] = LETTERS[place]
    return "".join(found.get(t["name"], ".") for t in tensors)
