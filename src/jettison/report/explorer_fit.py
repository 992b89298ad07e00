"""The explorer's matrix: which model fits which GPU under which layout, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from jettison.errors import UsageError
from jettison.predict.allowance import available_bytes
from jettison.predict.forecast import Forecast, forecast
from jettison.report.explorer_common import line, run_of
from jettison.spec.hardware import hardware

MODELS: Final = ("llama3-8b", "mixtral-8x7b", "llama3-70b", "gpt-175b", "llama3-405b", "deepseek-v3")
GPUS: Final = ("rtx4090-24gb", "l40s-48gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "gb200-192gb")
LAYOUTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("8 GPUs: FSDP", {"dp": 8, "zero": 3}),
    ("8 GPUs: tensor parallel", {"tp": 8}),
    ("64 GPUs: FSDP", {"dp": 64, "zero": 3}),
    ("64 GPUs: 8-way tensor parallel, FSDP over 8", {"tp": 8, "dp": 8, "zero": 3}),
    ("512 GPUs: 8-way tensor parallel, FSDP over 64", {"tp": 8, "dp": 64, "zero": 3}),
)
MODES: Final = ("none", "selective-op", "full")


def fit_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By layout, mode and model the peak, and by layout and GPU what there is for it."""
    names = [*models, *(name for name in MODELS if name not in models)]
    devices = [hardware(name) for name in GPUS]
    return {
        "models": names,
        "gpus": [{"name": device.name, "usable": device.usable_bytes} for device in devices],
        "modes": list(MODES),
        "layouts": [
            {
                "name": name,
                "flags": flags,
                "available": _available(flags),
                "peaks": {mode: [_peak(model, flags, mode) for model in names] for mode in MODES},
                "commands": [line("ledger", model, flags) for model in names],
            }
            for name, flags in LAYOUTS
        ],
    }


def _available(flags: dict[str, Any]) -> list[int]:
    """What each GPU leaves for tensors, beside what it holds for this layout."""
    run = run_of(MODELS[0], **flags)
    return [available_bytes(hardware(name), run) for name in GPUS]


def _peak(model: str, flags: dict[str, Any], mode: str) -> list[Any] | str:
    """The peak and its phase; or the reason why there is none."""
    try:
        found = forecast(run_of(model, recompute=mode, **flags))
    except UsageError as error:
        return str(error)
    return [found.peak_bytes, *_why(found)]


def _why(found: Forecast) -> Iterator[Any]:
    """What stays whatever is computed again: parameters, gradients and optimizer state; and what else there is."""
    load = found.worst.load
    always = load.fixed + load.state + load.gradient_bytes
    yield min(always, found.peak_bytes)
    yield str(found.worst.peak.phase)
