"""The explorer's panels about plans: budgets, segments, links to CPU memory, and which model fits which GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from jettison.core.errors import Infeasible, UsageError
from jettison.core.units import GIB
from jettison.cost.flops import PASSES
from jettison.families.presets import shown
from jettison.formula.region import Region
from jettison.predict.forecast import available_bytes, forecast
from jettison.predict.ranges import figures
from jettison.predict.stages import FULL, NONE, StageRegion, kept_by
from jettison.predict.time import estimate
from jettison.report.alternatives import KEPT, LINKS, OFFLOADED, RECOMPUTED, buffer_policies, flips, tensor_name, trades
from jettison.report.explain import recomputed_flops
from jettison.report.explorer_models import GPU, MODEL, explorer_table, flags_text, line, rounded, run_of, usual_layout
from jettison.search.auto_recompute import AutoForecast, choose, smallest_budget
from jettison.spec.device_allowance import FitVerdict
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import Recompute, round_sqrt
from jettison.spec.run import Run

# The front: the fastest plan at each budget, what each does with every tensor, and what a GiB is worth ----------------

FRONT_FLAGS: Final[dict[str, Any]] = {"dp": 8, "zero": 3, "seq": 8192, "micro_batch": 1}
LETTERS: Final = {KEPT: "k", RECOMPUTED: "a", OFFLOADED: "h"}
MOST, MOST_ASKED = 48, 8
"""Budgets of a sweep, a GiB or more apart, of `MODEL` and of models that were asked for: a plan may take seconds."""
MOST_FLIPS: Final = 5


def front_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model, the sweep with and without the host; of `MODEL` where none is asked for."""
    found = [_front(model, usual_layout(model, hardware(GPU)), MOST_ASKED) for model in models]
    return {"models": found or [_front(MODEL, FRONT_FLAGS, MOST)]}


def _front(model: str, asked: dict[str, Any], most: int) -> dict[str, Any]:
    device, run = hardware(GPU), run_of(model, **asked)
    return {
        "name": model,
        "gpu": GPU,
        "layout": flags_text(asked),
        "available_bytes": available_bytes(device, run),
        "plain_peak_bytes": forecast(run).peak_bytes,
        "layers": list(run.model.layer_names),
        "ways": [
            _sweep(model, asked, device, "kept or recomputed", most, offload=False),
            _sweep(model, asked, device, "kept, recomputed or offloaded", most, offload=True),
        ],
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
    smallest = smallest_budget(run, device)
    plans: list[AutoForecast] = []
    for budget in budgets(smallest, forecast(run_of(model, **asked)).peak_bytes, most):
        plans.append(choose(run, budget, device))
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
    named: dict[Region, Mapping[int, str]] = {shown.region: _named(shown)}  # plans of a sweep share their regions
    patterns: dict[str, int] = {}

    def pattern(part: StageRegion) -> int:
        """By name, since layers of several kinds have other buffers; a dot where a layer has no such tensor."""
        if part.region not in named:
            named[part.region] = _named(part)
        letters = {named[part.region][buffer]: LETTERS[place] for buffer, place in buffer_policies(part).items()}
        text = "".join(letters.get(name, ".") for name in named[shown.region].values())
        return patterns.setdefault(text, len(patterns))

    rows = []
    for plan in plans:
        own = (part for part in plan.forecast.parts if part.is_layer)
        rows.append([[len(list(same)), number] for number, same in groupby(map(pattern, own))])
    buffers = shown.region.program.buffers
    tensors = [{"name": name, "nbytes": buffers[buffer].nbytes} for buffer, name in named[shown.region].items()]
    return tensors, list(patterns), rows


def _named(part: StageRegion) -> Mapping[int, str]:
    """Saved tensors by buffer, in the order in which a forward makes them; several of one name are numbered."""
    found: dict[int, str] = {}
    times: Counter[str] = Counter()
    for buffer in buffer_policies(part):
        name = tensor_name(part.region, buffer)
        found[buffer] = f"{name} {times[name] + 1}" if times[name] else name
        times[name] += 1
    return found


# Segments: checkpoints every k layers, in the first n layers, or in one layer in k ------------------------------------

SEGMENT_MODELS: Final[Mapping[str, dict[str, Any]]] = explorer_table("segment_models")
KINDS: Final = ("every", "block", "interval")
CLAIMED: Final = ((1, 43e9, 0.0), (4, 11e9, 0.19), (8, 5.4e9, 0.29), (80, None, 0.33))
"""Claims for Llama 3 70B, s = 8192, b = 4 (docs/contradictions.md): layers a checkpoint, bytes, recompute share."""


def segments_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model and kind, for every number from 1 to L: bytes that stay, bytes of the open segment, the peak, FLOPs."""
    asked: list[tuple[str, dict[str, Any]]] = [(model, {}) for model in models]
    asked += list(SEGMENT_MODELS.items())[: 1 if models else None]
    return {
        "models": [_segments(model, flags) for model, flags in asked],
        "claims": {"model": "llama3-70b", "rows": [list(row) for row in CLAIMED]},
    }


def _segments(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    run = run_of(model, **flags)
    layer = next(part for part in forecast(run).parts if part.is_layer)
    program = layer.region.program

    def row(kind: str, number: int) -> list[Any]:
        recompute = Recompute.parse(f"{kind}:{number}", layers=run.model.depth)
        return [number, *_numbers(replace(run, recompute=recompute))]

    return {
        "name": model,
        "layers": run.model.depth,
        "sqrt": round_sqrt(run.model.depth),
        "layer_bytes": program.kept_bytes(kept_by(layer.region, NONE)),
        "input_bytes": program.kept_bytes(kept_by(layer.region, FULL)),
        "none": _numbers(run),
        "commands": {kind: line("ledger", model, flags, f"--recompute {kind}:{{number}} --explain") for kind in KINDS},
        "kinds": {kind: [row(kind, number) for number in range(1, run.model.depth + 1)] for kind in KINDS},
    }


def _numbers(run: Run) -> list[Any]:
    """Bytes that the layers of the worst stage hold between passes; the most that stands above them in a layer's or
    segment's backward; the peak of a step; and what is recomputed, as a share of a step's FLOPs."""
    found = forecast(run)
    units = [unit for chunk in found.worst.load.chunks for unit in chunk if unit.names[0].startswith("layers.")]
    held = sum(len(unit.names) * unit.resident for unit in units)
    opened = max(unit.backward_peak for unit in units)
    forward = sum(part.region.flops for part in found.parts)
    again = sum(recomputed_flops(found)) / (PASSES * forward)
    return [held, opened, found.peak_bytes, round(again, 6)]


# Links: recomputation, offloading, or both, by the bandwidth between device and host ------------------------------

OFFLOAD_FLAGS: Final[dict[str, Any]] = {"dp": 8, "zero": 3, "seq": 8192, "micro_batch": 4}
GIGABYTES: Final = (8, 16, 32, 64, 128, 225, 450)
"""A second, in one direction: the links of `LINKS`, and some between and below them."""


def offload_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds of a step by model and bandwidth: recompute, offload, or either; of `MODEL` if none is asked for."""
    asked = [(model, usual_layout(model, hardware(GPU))) for model in models] or [(MODEL, OFFLOAD_FLAGS)]
    links = [{"name": link.name, "gigabytes": link.bytes_per_second / 1e9} for link in LINKS]
    return {"links": links, "models": [_offload(model, flags) for model, flags in asked]}


def _offload(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    device, plain = hardware(GPU), run_of(model, **asked)
    everything = replace(plain, recompute=Recompute(offload=True))

    def row(gigabytes: int) -> dict[str, Any]:
        linked = replace(device, host_bytes_per_second=gigabytes * 10**9)
        return {
            "gigabytes": gigabytes,
            "reached": round(gigabytes * device.reached.host, 3),
            "all_seconds": rounded(estimate(everything, linked).step_seconds),
            "all_peak": forecast(everything).peak_bytes,
            "mix": _planned(model, asked, linked, offload=True),
        }

    tensors = []
    for trade in trades(plain, device):
        limit = trade.break_even_bytes_per_second
        again = None if trade.recompute_seconds is None else rounded(trade.recompute_seconds)
        tensors.append([trade.role, trade.nbytes, again, None if limit is None else round(limit / 1e9, 3)])
    return {
        "name": model,
        "gpu": GPU,
        "own": (device.host_bytes_per_second or 0) / 1e9,
        "host_bytes": device.host_memory_bytes,
        "budget": available_bytes(device, plain),
        "layout": flags_text(asked),
        "none_seconds": rounded(estimate(plain, device).step_seconds),
        "none_peak": forecast(plain).peak_bytes,
        "again": _planned(model, asked, device, offload=False),
        "rows": [row(gigabytes) for gigabytes in GIGABYTES],
        "tensors": tensors,
    }


def _planned(model: str, asked: dict[str, Any], device: Hardware, *, offload: bool) -> dict[str, Any]:
    """A plan on what the device leaves; its seconds are those that ``plan`` states, and a whole step's."""
    run = run_of(model, recompute="auto", offload=offload, **asked)
    left = available_bytes(device, run)
    asked = asked | {"budget": f"{left}B"}
    rate = (device.host_bytes_per_second or 0) // 10**9
    gpu: dict[str, Any] = {"gpu": f"{GPU},host={rate}" if offload else GPU}
    command = line("plan", model, gpu | asked | ({} if offload else {"offload": False}))
    try:
        choice = choose(run, left, device)
    except Infeasible as error:
        return {"seconds": None, "minimum_bytes": error.minimum_budget_bytes, "command": command}
    return {
        "seconds": rounded(choice.step_seconds),
        "planned_seconds": rounded(choice.step_seconds),
        "peak": choice.forecast.peak_bytes,
        "host": choice.host_bytes,
        "again": rounded(choice.seconds - choice.stalled_seconds),
        "stalled": rounded(choice.stalled_seconds),
        "layer": next(part for part in choice.forecast.parts if part.is_layer).name,
        "command": command,
    }


# The matrix: which model fits which GPU under which layout, and by how much -------------------------------------------

GPUS: Final = ("rtx4090-24gb", "l40s-48gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "gb200-192gb")
FIT_LAYOUTS: Final[Mapping[str, dict[str, Any]]] = explorer_table("fit_layouts")
MODES: Final = ("none", "selective-op", "full")


def fit_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By layout, mode and model the peak and its verdict on each GPU; by layout and GPU the bytes for tensors."""
    names = list(dict.fromkeys([*models, *shown()]))
    devices = [hardware(name) for name in GPUS]
    return {
        "models": names,
        "gpus": [{"name": device.name, "usable": device.usable_bytes} for device in devices],
        "modes": list(MODES),
        "layouts": [
            {
                "name": name,
                "flags": flags,
                "available": [available_bytes(device, run_of(shown()[0], **flags)) for device in devices],
                "peaks": {mode: [_peak(model, flags, mode, devices) for model in names] for mode in MODES},
                "commands": [line("ledger", model, flags) for model in names],
            }
            for name, flags in FIT_LAYOUTS.items()
        ],
    }


def _peak(model: str, flags: dict[str, Any], mode: str, devices: Sequence[Hardware]) -> list[Any] | str:
    """The peak, its part that no recompute changes (parameters, gradients, optimizer state), its phase, and the number
    of its verdict on each device; or the reason why there is none."""
    try:
        found = forecast(run_of(model, recompute=mode, **flags))
    except UsageError as error:
        return str(error)
    load, stated = found.worst.load, figures(found.run, found.peak_bytes)
    always = min(load.fixed + load.state + load.gradient_bytes, found.peak_bytes)
    verdicts = [list(FitVerdict).index(stated.verdict(usable_bytes=device.usable_bytes)) for device in devices]
    return [found.peak_bytes, always, str(found.worst.peak.phase), verdicts]
