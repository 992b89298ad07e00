"""The questions of the lesson, each a function that gives rows of numbers and, above them, the facts that they show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .clock import Machine
from .fp8 import replay
from .network import Network, Step, chain, transformer
from .ops import Mix, Scores
from .policies import Plan, block, every, keep_all, offloaded, selective
from .rules import rules
from .toy import matmuls_of
from .training import Outcome, dry_run, train_step

Rows = list[dict[str, Any]]
Found = tuple[dict[str, Any], Rows]
GB = 1e9
LINKS = {"PCIe 4": 32e9, "PCIe 5": 64e9, "half an NVLink-C2C": 225e9, "NVLink-C2C": 450e9}


def saved(**sizes: Any) -> Found:
    """What one block keeps for its backward, tensor by tensor."""
    network = transformer(layers=1, **sizes)
    readers = {name: type(step.op).__name__ for step in reversed(network.steps) for name in step.reads}
    found = dry_run(network, keep_all(network))
    rows = [
        {"tensor": name.removeprefix("0."), "read by the backward of": readers[name], "bytes": size}
        for name, size in found.held.items()
    ]
    core = sum(found.held.get(f"0.{name}", 0) for name in network.core)
    facts = {"bytes": found.held_bytes, "bytes / sbh": found.held_bytes / (math.prod(network.shape))}
    facts |= {"forward FLOPs": found.forward_flops}
    if network.core:
        flops = sum(
            step.op.flops(*_shapes(step, network)) for step in network.steps if isinstance(step.op, Scores | Mix)
        )
        facts |= {"the core's share of FLOPs": flops / found.forward_flops}
        facts |= {"the core's share of bytes": core / found.held_bytes}
        facts |= {"the core outweighs the rest from s": _crossover(sizes)}
    return facts, rows


def _shapes(step: Step, network: Network) -> list[tuple[int, ...]]:
    """Of the core's operands, which are b s h, or b a s s for probabilities."""
    (b, s, _), heads = network.shape, getattr(step.op, "heads", 1)
    is_wide = [name.endswith(("probabilities", "dropped")) for name in step.inputs]
    return [(b, heads, s, s) if wide else network.shape for wide in is_wide]


def _crossover(sizes: dict[str, Any]) -> int:
    """The first sequence at which the core is more than half of a block's bytes, by halving."""

    def is_more(s: int) -> bool:
        network = transformer(layers=1, **{**sizes, "s": s})
        whole, rest = (dry_run(network, plan(network)).held_bytes for plan in (keep_all, selective))
        return whole > 2 * rest

    low, high = 1, 2**24
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_more(middle) else (middle + 1, high)
    return low


def gradients(*, layers: int = 4) -> Found:
    """Each policy beside keeping everything, and that beside differences of the loss."""
    network = transformer(layers=layers, b=2, s=6, h=8, heads=2)
    arrays = network.drawn()
    plain = train_step(network, keep_all(network), arrays)
    rows: Rows = []
    for plan in _plans(network):
        found = train_step(network, plan, arrays)
        same = all(np.array_equal(found.gradients[name], grad) for name, grad in plain.gradients.items())
        rows.append({"plan": plan.name, "gradients identical": same, "held bytes": found.held_bytes})
    return {"within 1e-8 of differences of the loss": _beside_differences(network, arrays, plain) < 1e-8}, rows


def _plans(network: Network) -> list[Plan]:
    segments = [every(network, k) for k in range(1, len(network.layers) + 1)]
    blocks = [block(network, n) for n in range(1, len(network.layers))]
    plans = [keep_all(network), *segments, *blocks, selective(network)]
    return [*plans, *(offloaded(network, plan) for plan in (plans[0], plans[1], plans[-1]))]


def _beside_differences(network: Network, arrays: Any, plain: Outcome, step: float = 1e-6) -> float:
    """Of each parameter along one direction: (loss(p + e) - loss(p - e)) / 2e, as a share of the longest gradient."""
    parameters, x, target = arrays
    draw, worst = np.random.default_rng(5), 0.0
    for name, parameter in parameters.items():
        way = draw.standard_normal(parameter.shape)
        way /= np.linalg.norm(way)
        high, low = (
            train_step(network, keep_all(network), (parameters | {name: parameter + sign * step * way}, x, target)).loss
            for sign in (1, -1)
        )
        worst = max(worst, abs((high - low) / (2 * step) - float((plain.gradients[name] * way).sum())))
    return worst / max(float(np.linalg.norm(grad)) for grad in plain.gradients.values())


def sweep(network: Network, *, to_the_end: bool = False) -> Found:
    """Segments of k layers: every k up to 16, and then one in four."""
    unit = dry_run(network, every(network, len(network.layers))).held_bytes
    rows: Rows = []
    for k in _segments(len(network.layers)):
        found = dry_run(network, every(network, k, to_the_end=to_the_end))
        rows.append(
            {
                "k": k,
                "held": found.held_bytes / unit,
                "peak": found.peak_values_bytes / unit,
                "overhead": found.overhead,
                "peak bytes": found.peak_values_bytes,
            }
        )
    plain = dry_run(network, keep_all(network))
    least = min(row["peak bytes"] for row in rows)
    best = [row["k"] for row in rows if row["peak bytes"] == least]
    layer = plain.held_bytes / unit / len(network.layers)
    facts = {"unit bytes": unit, "kept, no segments": plain.held_bytes / unit, "kept by a layer": layer}
    root = math.sqrt(len(network.layers) / layer)
    knee = {"smallest peak from k": best[0], "to k": best[-1], "smallest peak": least / unit}
    return facts | knee | {"sqrt(n / kept by a layer)": root}, rows


def _segments(layers: int) -> list[int]:
    return [k for k in range(1, layers + 1) if k <= 16 or k % 4 == 0 or k == layers]


def policies(network: Network, *, to_the_end: bool = False) -> Found:
    """What each policy holds, needs at most and computes again."""
    n = len(network.layers)
    plans = [keep_all(network)]
    if network.core:
        plans.append(selective(network, to_the_end=to_the_end))
    plans += [block(network, n * part // 4, to_the_end=to_the_end) for part in (1, 2, 3)]
    plans += [every(network, k, to_the_end=to_the_end) for k in (1, 2, 4, 8, n) if k <= n]
    plain = dry_run(network, plans[0])
    rows = [_policy_row(dry_run(network, plan), plain) for plan in plans]
    return {"layers": n, "bytes without": plain.held_bytes}, rows


def _policy_row(found: Outcome, plain: Outcome) -> dict[str, Any]:
    return {
        "plan": found.plan,
        "held GB": found.held_bytes / GB,
        "of none": found.held_bytes / plain.held_bytes,
        "peak GB": found.peak_values_bytes / GB,
        "overhead": found.overhead,
        "seconds / none": found.seconds / plain.seconds,
    }


def offload(network: Network) -> Found:
    """Seconds of a step by link: no checkpointing, recomputation, offload; and where the last two break even."""

    def seconds(plan: Plan, link: float) -> float:
        return dry_run(network, plan, Machine(link_bytes_per_second=link)).seconds

    full = every(network, 1)
    away = offloaded(network, keep_all(network))
    plain, again = dry_run(network, keep_all(network)), dry_run(network, full)
    rows: Rows = []
    for name, link in LINKS.items():
        sent, inputs = (
            dry_run(network, plan, Machine(link_bytes_per_second=link)) for plan in (away, offloaded(network, full))
        )
        row = {"link": name, "GB/s": link / GB, "offloaded": sent.seconds, "of it waiting": sent.waited_seconds}
        rows.append(row | {"full": again.seconds, "full, inputs offloaded": inputs.seconds, "none": plain.seconds})
    even = _lowest(lambda link: seconds(away, link) <= again.seconds)
    hidden = _lowest(lambda link: seconds(away, link) <= plain.seconds * 1.001)
    facts = {"break-even GB/s": even / GB, "hides from GB/s": hidden / GB}
    sent = dry_run(network, away)
    facts |= {
        "host GB": sent.host_bytes / GB,
        "device GB": sent.held_bytes / GB,
        "full holds GB": again.held_bytes / GB,
    }
    moved = 2 * sent.host_bytes / (again.seconds - plain.seconds)
    return facts | {"break-even GB/s if nothing overlapped": moved / GB}, rows


def _lowest(is_enough: Callable[[float], bool]) -> float:
    """The slowest link that is enough, to a thousandth."""
    low, high = 1e8, 1e14
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def fp8(*, snapshot: bool, history: int = 4) -> Found:
    """Delayed scaling under checkpoints: does a second run take the first one's scale?"""
    rows = [
        {
            "step": row.step,
            "scale": row.scale,
            "recomputed with": row.again_scale,
            "gradients identical": row.gradients_identical,
            "worst": row.worst,
        }
        for row in replay(snapshot=snapshot, history=history)
    ]
    wrong = [row for row in rows if not row["gradients identical"]]
    return {"steps": len(rows), "wrong steps": len(wrong), "worst": max(row["worst"] for row in rows)}, rows


def toy(*, layers: int, k: int) -> Found:
    """Matmuls of the toy's two methods, and of a step that keeps what backward reads."""
    found = matmuls_of(layers, k)
    rows = [{"method": name, "matmuls": count, "of needed": count / found["needed"]} for name, count in found.items()]
    return {"overhead of its own baseline": found["called checkpointed"] / found["called plain"] - 1}, rows


def taught() -> Found:
    """Rules of thumb beside what the engine counts."""
    rows = [
        {
            "rule": rule.words,
            "taught": rule.taught,
            "counted": rule.counted,
            "counted / taught": rule.counted / rule.taught,
        }
        for rule in rules()
    ]
    return {"sizes": "64 layers, b = 1, s = h = 8192, 64 heads, two bytes a value"}, rows


def networks(kind: str, **sizes: Any) -> Network:
    """By its name on the command line."""
    if kind == "chain":
        return chain(layers=sizes["layers"], b=sizes["b"] * sizes["s"], h=sizes["h"], dtype=sizes["dtype"])
    return transformer(**sizes)
