"""The explorer's links: computing again, sending away, or both, by the bandwidth between device and host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from jettison.errors import Infeasible
from jettison.explain.trilemma import LINKS, trades
from jettison.predict.allowance import available_bytes
from jettison.predict.auto_recompute import choose
from jettison.predict.forecast import forecast
from jettison.predict.time import estimate
from jettison.report.explorer_common import line, planned, rounded, run_of, usual_layout
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import Recompute

GPU: Final = "h100-80gb"
MODEL: Final = "llama3-8b"
ASKED: Final[dict[str, Any]] = {"dp": 8, "zero": 3, "seq": 8192, "micro_batch": 4}
GIGABYTES: Final = (8, 16, 32, 64, 128, 225, 450)
"""A second, in one direction: the links of `LINKS`, and some between and below them."""


def offload_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model and bandwidth, seconds of a step when tensors are computed again, all sent away, or either; of `MODEL`
    where none is asked for."""
    asked = [(model, usual_layout(model, hardware(GPU))) for model in models] or [(MODEL, ASKED)]
    links = [{"name": link.name, "gigabytes": link.bytes_per_second / 1e9} for link in LINKS]
    return {"links": links, "models": [_model(model, flags) for model, flags in asked]}


def _model(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    device = hardware(GPU)
    plain = run_of(model, **asked)
    return {
        "name": model,
        "gpu": GPU,
        "own": (device.host_bytes_per_second or 0) / 1e9,
        "host_bytes": device.host_memory_bytes,
        "budget": available_bytes(device, plain),
        "layout": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in asked.items()) or "one device",
        "none_seconds": rounded(estimate(plain, device).step_seconds),
        "none_peak": forecast(plain).peak_bytes,
        "again": _planned(model, asked, device, offload=False),
        "rows": [_row(model, asked, replace(device, host_bytes_per_second=gb * 10**9), gb) for gb in GIGABYTES],
        "tensors": list(_tensors(model, asked, device)),
    }


def _row(model: str, asked: dict[str, Any], device: Hardware, gigabytes: int) -> dict[str, Any]:
    everything = replace(run_of(model, **asked), recompute=Recompute(offload=True))
    return {
        "gigabytes": gigabytes,
        "reached": round(gigabytes * device.reached.host, 3),
        "all_seconds": rounded(estimate(everything, device).step_seconds),
        "all_peak": forecast(everything).peak_bytes,
        "mix": _planned(model, asked, device, offload=True),
    }


def _planned(model: str, asked: dict[str, Any], device: Hardware, *, offload: bool) -> dict[str, Any]:
    """A plan on what the device leaves; its seconds are those that ``plan`` states, and a whole step's."""
    run = run_of(model, recompute="auto", offload=offload, **asked)
    command = (
        _command(model, asked, device) if offload else line("plan", model, {"gpu": GPU} | asked | {"offload": False})
    )
    try:
        choice = choose(run, available_bytes(device, run), device)
    except Infeasible as error:
        return {"seconds": None, "minimum_bytes": error.minimum_budget_bytes, "command": command}
    memory, time = planned(choice)
    program = next(part for part in memory.parts if part.is_layer)
    return {
        "seconds": rounded(time.step_seconds),
        "planned_seconds": rounded(choice.step_seconds),
        "peak": memory.peak_bytes,
        "host": choice.host_bytes,
        "again": rounded(choice.seconds - choice.stalled_seconds),
        "stalled": rounded(choice.stalled_seconds),
        "layer": program.name,
        "command": command,
    }


def _command(model: str, asked: dict[str, Any], device: Hardware) -> str:
    """A hardware file with another link, and the plan on it."""
    rate = (device.host_bytes_per_second or 0) // 10**9
    files = "\"$(python -c 'import jettison.spec as s; print(*s.__path__)')\""
    edit = f"sed 's/^host = .*/host = {rate}/' {files}/hardware_data/{GPU}.toml > link.toml"
    return f"{edit} && {line('plan', model, {'gpu': 'link.toml'} | asked)}"


def _tensors(model: str, asked: dict[str, Any], device: Hardware) -> Iterator[list[Any]]:
    for trade in trades(run_of(model, **asked), device):
        limit = trade.break_even_bytes_per_second
        again = None if trade.again_seconds is None else rounded(trade.again_seconds)
        yield [trade.role, trade.nbytes, again, None if limit is None else round(limit / 1e9, 3)]
