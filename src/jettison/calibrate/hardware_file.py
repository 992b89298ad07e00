"""A calibration as a hardware file, which `jettison.spec.hardware.hardware` reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from jettison.calibrate.fit import NEVER, Calibration
from jettison.spec.hardware import Hardware
from jettison.units import MIB


def hardware_toml(found: Calibration) -> str:
    """The file's text; what each product took and what an estimate would say of it are comments at the end."""
    return "\n".join([*_head(found.hardware), *_sections(found.hardware), *_comments(found)]) + "\n"


def _head(h: Hardware) -> Iterator[str]:
    yield f"name = {_quoted(h.name)}"
    yield f'memory = "{h.memory_bytes // MIB}MiB"'
    yield f'usable = "{h.usable_bytes // MIB}MiB"'
    if h.host_memory_bytes is not None:
        yield f'host_memory = "{h.host_memory_bytes // MIB}MiB"'
    yield f"units = {h.units}"
    yield f"node = {h.node}"
    if h.synchronous:
        yield "synchronous = true"
    yield f"source = {_quoted(h.source)}"
    yield f"usable_source = {_quoted(h.usable_source)}"
    for key in ("reached_source", "delays_source"):
        yield f"{key} = {_quoted(h.source)}"


def _sections(h: Hardware) -> Iterator[str]:
    rates = {name: rate / 1e12 for name, rate in asdict(h.flops_per_second).items() if rate is not None}
    widths = {
        "memory": h.memory_bytes_per_second,
        "link": h.link_bytes_per_second,
        "host": h.host_bytes_per_second,
        "network": h.network_bytes_per_second,
    }
    yield from _section("teraflops", rates)
    yield from _section("gigabytes_per_second", {name: w / 1e9 for name, w in widths.items() if w is not None})
    yield from _section("reached", {name: share for name, share in asdict(h.reached).items() if share is not None})
    yield from _section("microseconds", {name: s * 1e6 for name, s in asdict(h.delays).items() if s})
    edges = {name: found for name, found in asdict(h.edges).items() if found is not None}
    if edges:
        yield "\n[edges]"
        yield from (f"{name} = [{', '.join(map(_number, found.values()))}]" for name, found in edges.items())


def _section(name: str, values: dict[str, float]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    for key, value in values.items():
        note = "  # nothing is waited for" if name == "microseconds" and value <= NEVER * 1e6 else ""
        yield f"{key} = {_number(value)}{note}"


def _number(value: float) -> str:
    """Four digits; TOML knows no exponent without a point, so none is written."""
    return (
        f"{value:.9f}".rstrip("0").rstrip(".")
        if value < 0.001
        else f"{float(f'{value:.4g}'):.6f}".rstrip("0").rstrip(".")
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _comments(found: Calibration) -> Iterator[str]:
    yield ""
    yield f"# Measured in {found.took_seconds:.0f} s. Products: GFLOP/s, and estimated over measured seconds."
    for c in found.comparisons:
        p = c.product
        rate = p.flops / c.seconds / 1e9
        yield f"# {p.dtype:9} {p.m:6} x {p.n:6} x {p.k:6}  {rate:10.1f}  {c.estimated_seconds / c.seconds:5.2f}"
