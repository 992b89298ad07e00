"""Rules of thumb that lessons teach, as they are taught, beside what the engine counts for the same sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .network import Network, chain, transformer
from .policies import every, keep_all, selective
from .training import Outcome, dry_run

SIZES: dict[str, Any] = {"b": 1, "s": 8192, "h": 8192, "heads": 64, "dtype": "float16"}
LAYERS, K = 64, 8
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``taught`` is what the rule gives, ``counted`` what the engine finds."""

    words: str
    taught: float
    counted: float


def twelve(*, layers: int, b: int, s: int, h: int, width_bytes: int = 2) -> int:
    """Bytes, if a layer kept 12 values for each element of its input."""
    return layers * 12 * b * s * h * width_bytes


def inputs_held(*, layers: int, k: int, b: int, s: int, h: int, width_bytes: int = 2) -> int:
    """Bytes, if a layer inside the open segment took no more than its input does."""
    return (layers // k + k) * b * s * h * width_bytes


def overhead(again: float = 1.0) -> float:
    """Of a step of three forwards, if backward is two of them."""
    return again / 3


def best_segment(layers: int) -> int:
    """If a layer inside the open segment took no more than its input does."""
    return round(math.sqrt(layers))


def rules() -> list[Rule]:
    """64 layers of 8192 tokens, 8192 wide, two bytes a value; attention in one kernel unless its core is meant."""
    fused = transformer(layers=LAYERS, attention="fused", **SIZES)
    eager = transformer(layers=LAYERS, **SIZES)
    matmuls = chain(layers=LAYERS, b=8192, h=8192, dtype="float16")
    sizes = {name: SIZES[name] for name in ("b", "s", "h")}
    plain, plain_eager = dry_run(fused, keep_all(fused)), dry_run(eager, keep_all(eager))
    one = dry_run(fused, every(fused, LAYERS)).held_bytes
    layer = plain.held_bytes / LAYERS
    found = [
        Rule(words="MB of a layer: 12 values", taught=twelve(layers=1, **sizes) / MB, counted=layer / MB),
        Rule(words="the same with eager attention", taught=twelve(layers=1, **sizes) / MB, counted=_mb(plain_eager)),
        Rule(words="MB of 64 layers", taught=twelve(layers=LAYERS, **sizes) / MB, counted=plain.held_bytes / MB),
        Rule(words="a layer's input, of what it keeps", taught=1 / 10, counted=one / layer),
        Rule(words="MB under every:8", taught=inputs_held(layers=LAYERS, k=K, **sizes) / MB, counted=_peak(fused, K)),
        Rule(words="the same for GEMMs alone", taught=2 * K * one / MB, counted=_peak(matmuls, K)),
        Rule(words="best k", taught=best_segment(LAYERS), counted=_best(fused)),
    ]
    return [*found, *_work(eager, plain_eager)]


def _work(eager: Network, plain: Outcome) -> list[Rule]:
    full, stopped = (dry_run(eager, every(eager, 1, to_the_end=end)).overhead for end in (True, False))
    core, asked = (dry_run(eager, selective(eager, to_the_end=end)) for end in (True, False))
    share = core.again_flops / plain.forward_flops
    return [
        Rule(words="FLOPs of full, of a step", taught=overhead(), counted=full),
        Rule(words="where it stops when backward has enough", taught=overhead(), counted=stopped),
        Rule(words="the core, of a forward", taught=0.15, counted=share),
        Rule(words="FLOPs of selective, of a step", taught=overhead(0.15), counted=core.overhead),
        Rule(words="where it stops when backward has enough", taught=overhead(0.15), counted=asked.overhead),
    ]


def _mb(found: Outcome) -> float:
    return found.held_bytes / LAYERS / MB


def _peak(network: Network, k: int) -> float:
    return dry_run(network, every(network, k)).peak_values_bytes / MB


def _best(network: Network) -> int:
    return min(range(1, 2 * K + 1), key=lambda k: _peak(network, k))
