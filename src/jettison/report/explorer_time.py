"""The explorer's iteration times: full recomputation, selective with sequence parallelism, and the planner's choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from jettison.core.errors import Infeasible
from jettison.predict.allowance import available_bytes
from jettison.predict.residuals import sure_of
from jettison.report.explorer_common import answered, line, rounded, run_of, usual_layout
from jettison.spec.hardware import Hardware, hardware

PAPER_GPU: Final = "a100-80gb"
USUAL_GPU: Final = "h100-80gb"
PARTS: Final = ("compute", "communication", "bubble", "recompute", "other")
WAYS: Final = (
    ("full", "everything computed again", {"recompute": "full"}),
    ("selective", "selective, sequence parallelism", {"recompute": "selective"}),
    ("auto", "the planner's choice", {"recompute": "auto"}),
)
"""The first without sequence parallelism, as in the paper; the others with it, where there is tensor parallelism."""


def time_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model and way: seconds of a step and their parts, MFU, HFU, the peak, and what was published."""
    found = [_model(name, one.model, PAPER_GPU, dict(one.asked), one) for name, one in ITERATIONS.items()]
    for model in models:
        found.append(_model(model, model, USUAL_GPU, usual_layout(model, hardware(USUAL_GPU)), None))
    return {"parts": list(PARTS), "ways": [{"key": key, "label": label} for key, label, _ in WAYS], "models": found}


def _model(name: str, model: str, gpu: str, asked: dict[str, Any], published: Iteration | None) -> dict[str, Any]:
    device = hardware(gpu)
    run = run_of(model, **asked)
    return {
        "name": name,
        "gpu": gpu,
        "gpus": run.layout.world,
        "layout": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in asked.items()) or "one device",
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


# published ------------------------------------------------------------------------------------------------------------
#
# Measured figures of arXiv 2205.05198 that pages show beside ours; tests hold them against tests/facts


PAPER: Final = "arXiv 2205.05198"


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One model of Tables 3 and 5, on A100s of 80 GB.

    Args:
        asked: its layout and batch, as flags.
        mfu, hfu: of selective recomputation with sequence parallelism, as fractions.
    """

    model: str
    asked: MappingProxyType[str, Any]
    full_seconds: float
    selective_seconds: float
    mfu: float
    hfu: float


def _row(
    model: str,
    pp: int,
    virtual: int,
    batch: int,
    micro_batch: int,
    full: float,
    selective: float,
    mfu: float,
    hfu: float,
) -> Iteration:
    asked: dict[str, Any] = {"tp": 8}
    asked |= {"pp": pp} if pp > 1 else {}
    asked |= {"virtual_stages": virtual} if virtual > 1 else {}
    asked |= {"micro_batch": micro_batch} if micro_batch > 1 else {}
    asked |= {"micro_batches": batch // micro_batch} if batch > micro_batch else {}
    return Iteration(
        model=model, asked=MappingProxyType(asked), full_seconds=full, selective_seconds=selective, mfu=mfu, hfu=hfu
    )


ITERATIONS: Final = MappingProxyType(
    {
        "22B": _row("gpt-22b", 1, 1, 4, 4, 1.42, 1.10, 0.415, 0.437),
        "175B": _row("gpt-175b", 8, 3, 64, 1, 18.13, 13.75, 0.514, 0.528),
        "530B": _row("gpt-530b", 35, 3, 280, 1, 49.05, 37.83, 0.560, 0.570),
        "1T": _row("gpt-1t", 64, 1, 512, 1, 94.42, 71.49, 0.563, 0.570),
    }
)
"""Tables 3 and 5."""
