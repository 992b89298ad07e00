"""The explorer's front: the fastest plan at each budget, what each does with every tensor, and what a GiB is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from jettison.core.errors import Infeasible
from jettison.core.units import GIB
from jettison.formula.region import Region
from jettison.predict.allowance import available_bytes
from jettison.predict.auto_recompute import AutoForecast, Stages, choose
from jettison.predict.forecast import forecast
from jettison.predict.stages import StageRegion
from jettison.report.alternatives import AGAIN, HERE, THERE, flips, tensor_name, whereabouts
from jettison.report.explorer_common import line, rounded, run_of, usual_layout
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.run import Run

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
    shown = next(part for part in plans[0].forecast.parts if part.is_layer)
    named: dict[Region, Named] = {shown.region: _named(shown)}  # plans of a sweep share their regions
    names = list(named[shown.region].values())
    patterns: dict[str, int] = {}
    rows = []
    for plan in plans:
        own = []
        for part in _layers(plan):
            if part.region not in named:
                named[part.region] = _named(part)
            own.append(patterns.setdefault(_pattern(part, named[part.region], names), len(patterns)))
        rows.append([[len(list(same)), number] for number, same in groupby(own)])
    buffers = shown.region.program.buffers
    tensors = [{"name": name, "nbytes": buffers[buffer].nbytes} for buffer, name in named[shown.region].items()]
    return tensors, list(patterns), rows


def _layers(plan: AutoForecast) -> dict[StageRegion, None]:
    named = {part.name: part for part in plan.forecast.parts if part.is_layer}
    return dict.fromkeys(named[name] for name in plan.forecast.run.model.layer_names)


Named = Mapping[int, str]
"""What the saved tensors of a region are called, by buffer, in the order in which a forward makes them."""


def _named(part: StageRegion) -> Named:
    """Several of one name are numbered."""
    found: dict[int, str] = {}
    times: Counter[str] = Counter()
    for buffer in whereabouts(part):
        name = tensor_name(part.region, buffer)
        found[buffer] = f"{name} {times[name] + 1}" if times[name] else name
        times[name] += 1
    return found


def _pattern(part: StageRegion, named: Named, names: Sequence[str]) -> str:
    """By name, since layers of several kinds have other buffers; a dot where a layer has no such tensor."""
    found = {named[buffer]: LETTERS[place] for buffer, place in whereabouts(part).items()}
    return "".join(found.get(name, ".") for name in names)
