"""The figures of docs/lesson, from the same functions that the command line prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import studies
from .clock import Machine
from .fp8 import replay
from .network import chain, transformer
from .policies import every, keep_all, offloaded
from .svg import Axis, Note, Series, bars, lines
from .training import dry_run

WIDE: dict[str, Any] = {"b": 1, "s": 8192, "h": 8192, "heads": 64, "dtype": "float16"}
GPT3: dict[str, Any] = {
    "b": 1,
    "s": 2048,
    "h": 12288,
    "heads": 96,
    "dropout": 0.1,
    "attention": "eager",
    "dtype": "float16",
}


def write(folder: str | Path) -> list[Path]:
    """All of them, into a folder that is there."""
    drawings = {
        "block": block(),
        "step": step(),
        "chain": chain_sweep(),
        "layers": layer_sweep(),
        "policies": policies(),
        "offload": offload(),
        "fp8": fp8(),
    }
    paths = []
    for name, text in drawings.items():
        paths.append(Path(folder) / f"{name}.svg")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def block() -> str:
    """What one block of GPT-3 keeps."""
    _, rows = studies.saved(**GPT3)
    values = [(row["tensor"], row["bytes"], f"{row['bytes'] / 1e6:,.0f} MB") for row in rows]
    return bars("What one block keeps for its backward: GPT-3, 2048 tokens", "bytes of each saved tensor", values)


def step() -> str:
    """Bytes over a step, under three plans."""
    network = transformer(layers=8, attention="fused", **WIDE)
    series = []
    for plan in (keep_all(network), every(network, 1), every(network, 4)):
        history = dry_run(network, plan).history_bytes
        points = [(100 * number / (len(history) - 1), size / 1e9) for number, size in enumerate(history)]
        series.append(Series(name=plan.name, points=points, is_marked=False))
    x = Axis(label="steps of forward and backward, %", low=0, high=100, ticks=(0, 25, 50, 75, 100))
    y = Axis(label="values of forward, GB", low=0, high=24, ticks=(0, 6, 12, 18, 24))
    return lines("Bytes over a step: 8 layers, 8192 tokens, 8192 wide", x, y, series)


def chain_sweep() -> str:
    """Segments of a chain of matmuls, and the knee."""
    facts, rows = studies.sweep(chain(layers=64, b=16, h=64, dtype="float16"))
    held, peak = ([(row["k"], row[name]) for row in rows] for name in ("held", "peak"))
    x = Axis(label="k, layers in a segment", low=1, high=64, ticks=(1, 2, 4, 8, 16, 32, 64), is_log=True)
    y = Axis(label="values, in inputs of a layer", low=0, high=70, ticks=(0, 10, 20, 30, 40, 50, 60, 70))
    series = [Series(name="held between passes", points=held), Series(name="peak", points=peak)]
    note = Note(words=f"{facts['smallest peak']:g} at k = 8", at=(8, facts["smallest peak"]))
    return lines("64 matmuls of one width: the knee is at the square root", x, y, series, [note])


def layer_sweep() -> str:
    """Segments of transformer blocks: the knee is elsewhere."""
    facts, rows = studies.sweep(transformer(layers=64, attention="fused", **WIDE))
    held, peak = ([(row["k"], row[name]) for row in rows] for name in ("held", "peak"))
    x = Axis(label="k, layers in a segment", low=1, high=64, ticks=(1, 2, 4, 8, 16, 32, 64), is_log=True)
    y = Axis(label="values, in inputs of a layer", low=1, high=10_000, ticks=(1, 10, 100, 1000), is_log=True)
    series = [Series(name="held between passes", points=held), Series(name="peak", points=peak)]
    note = Note(
        words=f"{facts['smallest peak']:g} at k = {facts['smallest peak from k']}", at=(2, facts["smallest peak"])
    )
    return lines("64 transformer layers, each keeping 17 inputs", x, y, series, [note])


def policies() -> str:
    """Peak against work, for layers that checkpoint some, all, or by segments."""
    network = transformer(layers=32, attention="fused", **WIDE)
    _, rows = studies.policies(network)
    by_name = {row["plan"]: (100 * row["overhead"], row["peak GB"]) for row in rows}
    blocks = ["none", *(f"block:{n}" for n in (8, 16, 24)), "full"]
    segments = ["full", *(f"every:{k}" for k in (2, 4, 8, 32))]
    series = [
        Series(name="block:n, none to full", points=[by_name[name] for name in blocks]),
        Series(name="every:k, full to every:32", points=[by_name[name] for name in segments]),
    ]
    x = Axis(label="recomputed FLOPs, % of a step", low=0, high=35, ticks=(0, 10, 20, 30))
    y = Axis(label="most values at one moment, GB", low=0, high=100, ticks=(0, 25, 50, 75, 100))
    notes = [Note(words="full", at=by_name["full"])]
    return lines("32 layers: fewer bytes for more work, until segments grow", x, y, series, notes)


def offload() -> str:
    """Seconds by link."""
    network = transformer(layers=32, attention="fused", **WIDE)
    away, links = offloaded(network, keep_all(network)), [8 * 2 ** (n / 2) for n in range(14)]
    plain, again = (dry_run(network, plan).seconds for plan in (keep_all(network), every(network, 1)))
    sent = [(link, dry_run(network, away, Machine(link_bytes_per_second=link * 1e9)).seconds) for link in links]
    ends = (links[0], links[-1])
    series = [
        Series(name="all kept tensors offloaded", points=sent),
        Series(name="recomputed (full)", points=[(link, again) for link in ends], is_marked=False),
        Series(name="no checkpointing", points=[(link, plain) for link in ends], is_marked=False),
    ]
    even = studies.offload(network)[0]["break-even GB/s"]
    x = Axis(
        label="link to CPU memory, GB/s one way", low=8, high=724, ticks=(8, 16, 32, 64, 128, 256, 512), is_log=True
    )
    y = Axis(label="seconds of a step", low=0, high=20, ticks=(0, 5, 10, 15, 20))
    note = Note(words=f"{even:.0f} GB/s", at=(even, again))
    return lines("Offload or recompute: 32 layers, 8192 tokens, an A100's data sheet", x, y, series, [note])


def fp8() -> str:
    """The scale of a layer in forward, and in its recomputation."""
    rows = replay(snapshot=False)
    series = [
        Series(name="no checkpointing", points=[(row.step, row.scale) for row in rows]),
        Series(name="in recomputation", points=[(row.step, row.again_scale) for row in rows]),
    ]
    x = Axis(label="step; the input of step 3 is eight times as large", low=0, high=11, ticks=range(12))
    y = Axis(label="FP8 scale of the first layer", low=0, high=200, ticks=(0, 50, 100, 150, 200))
    return lines("Delayed scaling, recomputed with the current scale", x, y, series)
