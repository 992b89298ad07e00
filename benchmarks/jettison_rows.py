"""Jettison's own rows: at a rival's measured peak, and with everything kept but the hooks on.

Imported lazily, so that the harness runs, and says what is missing, where the package cannot do it yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from benchmarks.models import Batch
from benchmarks.rivals import Handle, Rival
from jettison.core.units import Bytes


def at_peak(name: str, budget_bytes: int, **options: Any) -> Rival:
    """`jettison.auto_checkpoint` under a budget of a rival's measured peak; ``options`` are its further ones."""

    def apply(model: nn.Module, batch: Batch) -> Handle:
        import jettison

        return jettison.auto_checkpoint(model, batch, memory_budget=Bytes(budget_bytes), keep_output=False, **options)

    words = "".join(f", {word}={value}" for word, value in options.items() if value is not None)
    return Rival(name=f"jettison at the peak of: {name}{words}", apply=apply)


def keep_all() -> Rival:
    """Hooks on, nothing recomputed: the price of the bookkeeping alone."""

    def apply(model: nn.Module, batch: Batch) -> Handle:
        import jettison

        return jettison.apply(model, policy="none", batch=batch)

    return Rival(name="jettison keep-all (hooks on)", apply=apply)


def under(policy: str) -> Rival:
    """A policy by name, on the regions that it finds (the layer of a one-layer model is named)."""

    def apply(model: nn.Module, batch: Batch) -> Handle:
        import jettison

        regions = [name for name, _ in model.named_children()]
        return jettison.apply(model, policy=policy, batch=batch, regions=regions)

    return Rival(name=f"jettison, {policy}", apply=apply)


@contextmanager
def stopwatch(model: nn.Module) -> Iterator[list[float]]:
    """Seconds of each recomputed op of a planned model meanwhile, on a CPU: less bookkeeping does not change them."""
    from jettison.runtime.recompute_code import RecomputeCode

    seconds: list[float] = []

    def timing(_op: Callable[..., Any], calls: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = calls(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return out

        return timed

    RecomputeCode.through = staticmethod(timing)
    _write_anew(model)
    try:
        yield seconds
    finally:
        RecomputeCode.through = None
        _write_anew(model)


def _write_anew(model: nn.Module) -> None:
    for module in model.modules():
        recordings = getattr(vars(module).get("forward"), "recordings", None)
        for prepared in recordings.prepared.values() if recordings is not None else ():
            vars(prepared.recipe or prepared).pop("code", None)


def attempt(rival: Rival, model: nn.Module, batch: Batch, say: Callable[[str], None]) -> Handle | None:
    """Apply, or say why the row is left out."""
    try:
        return rival.apply(model, batch)
    except (ImportError, AttributeError) as missing:
        say(f"{rival.name}: left out, the package lacks it ({missing})")
    except Exception as failure:  # an infeasible budget is a result, not a crash of the benchmark
        say(f"{rival.name}: left out, {type(failure).__name__}: {failure}")
    return None
