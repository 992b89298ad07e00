"""The explorer's segments: checkpoints every k layers, in the first n layers, or in one layer in k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from jettison.predict.forecast import forecast
from jettison.predict.stages import FULL, NONE, kept_by
from jettison.report.explain import FORWARDS_OF_A_STEP, recomputed_flops
from jettison.report.explorer_common import line, run_of, with_recompute
from jettison.spec.recompute import round_sqrt
from jettison.spec.run import Run

MODELS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("llama3-70b", {"seq": 8192, "micro_batch": 4}),
    ("gpt-175b", {"tp": 8}),
    ("llama3-8b", {"seq": 8192}),
)
KINDS: Final = ("every", "block", "interval")
CLAIMED: Final = ((1, 43e9, 0.0), (4, 11e9, 0.19), (8, 5.4e9, 0.29), (80, None, 0.33))
"""Of an explainer, for Llama 3 70B with s = 8192 and b = 4 (docs/contradictions.md): a checkpoint every N layers, bytes
of activations, share of a step that recompute adds."""


def segments_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """By model and kind, for every number from 1 to L: bytes that stay, bytes of the open segment, the peak, FLOPs."""
    asked: list[tuple[str, dict[str, Any]]] = [*((model, {}) for model in models), *(MODELS[:1] if models else MODELS)]
    return {
        "models": [_model(model, dict(flags)) for model, flags in asked],
        "claims": {"model": "llama3-70b", "rows": [list(row) for row in CLAIMED]},
    }


def _model(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    run = run_of(model, **flags)
    layer = next(part for part in forecast(run).parts if part.is_layer)
    plain = layer.region.program.kept_bytes(kept_by(layer.region, NONE))
    whole = layer.region.program.kept_bytes(kept_by(layer.region, FULL))
    return {
        "name": model,
        "layers": run.model.depth,
        "sqrt": round_sqrt(run.model.depth),
        "layer_bytes": plain,
        "input_bytes": whole,
        "none": _numbers(run),
        "commands": {kind: line("ledger", model, flags, f"--recompute {kind}:{{number}} --explain") for kind in KINDS},
        "kinds": {kind: list(_kind(run, kind)) for kind in KINDS},
    }


def _kind(run: Run, kind: str) -> Iterator[list[Any]]:
    for number in range(1, run.model.depth + 1):
        yield [number, *_numbers(with_recompute(run, f"{kind}:{number}"))]


def _numbers(run: Run) -> list[Any]:
    """Bytes that the layers of the worst stage hold between passes; the most that stands above them in a layer's or
    segment's backward; the peak of a step; and what is computed again, as a share of a step's FLOPs."""
    found = forecast(run)
    units = [unit for chunk in found.worst.load.chunks for unit in chunk if unit.names[0].startswith("layers.")]
    held = sum(len(unit.names) * unit.resident for unit in units)
    opened = max(unit.backward_peak for unit in units)
    forward = sum(part.region.flops for part in found.parts)
    again = sum(recomputed_flops(found)) / (FORWARDS_OF_A_STEP * forward)
    return [held, opened, found.peak_bytes, round(again, 6)]
