"""A calibration for people and for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jettison.calibrate.fit import Calibration
from jettison.units import format_bytes

DOUBTFUL = 0.25
"""Products that differ so much from what the figures say were disturbed."""


def doubtful(found: Calibration) -> str | None:
    """What to say of figures that do not describe what was measured."""
    if found.error <= DOUBTFUL:
        return None
    return (
        f"note: half of the products took {found.error:.0%} more or less than these figures say: the machine was "
        "busy, or its clock changes; measure again when it is quiet"
    )


def figures(found: Calibration) -> list[tuple[str, str]]:
    """(name, value) pairs for people."""
    h = found.hardware
    rows = [("device", h.name), ("memory", f"{format_bytes(h.usable_bytes)} of {format_bytes(h.memory_bytes)} usable")]
    rates = asdict(h.flops_per_second)
    rows += [(f"{dtype} products", f"{rate / 1e12:.4g} TFLOP/s") for dtype, rate in rates.items() if rate is not None]
    reached = h.reached
    rows += [
        (
            "estimates count on",
            f"{reached.matmul:.0%} of it for products, {reached.attention:.0%} for attention, "
            f"{reached.attention_backward:.0%} for its backward",
        ),
        ("products off by", f"{found.error:.0%} (median of {len(found.comparisons)})"),
    ]
    if h.memory_bytes_per_second is not None:
        width = h.memory_bytes_per_second / 1e9
        rows.append(("memory bandwidth", f"{width:.4g} GB/s, {reached.memory:.0%} of it in a training step"))
    for name, value in (("host link", h.host_bytes_per_second), ("link between ranks", h.link_bytes_per_second)):
        if value is not None:
            rows.append((name, f"{value / 1e9:.4g} GB/s"))
    rows.append(("a kernel costs", f"{h.delays.kernel * 1e6:.3g} µs beside its work"))
    rows.append(("a hook costs", f"{h.delays.hook * 1e6:.3g} µs for each tensor that a planned layer saves"))
    return [*rows, ("measured in", f"{found.took_seconds:.0f} s")]


def calibration_document(found: Calibration) -> dict[str, Any]:
    """Plain data, every product included."""
    compared = [
        {**asdict(c.product), "seconds": c.seconds, "estimated_seconds": c.estimated_seconds} for c in found.comparisons
    ]
    return {
        "schema": "jettison.calibration/1",
        "hardware": asdict(found.hardware),
        "took_seconds": found.took_seconds,
        "products": compared,
        "request": None,
    }
