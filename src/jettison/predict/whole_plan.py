"""A planner's choice beside micro-batches that are kept whole: how many of each window pay best.

With more of them whole there is less room for the others, which compute more again. Neither the bytes nor the seconds
of that are a convex function of the number, so some numbers are tried, and then those between the best one and its
neighbours, until none is left.
"""

from __future__ import annotations

from typing import Final

from jettison.core.errors import Infeasible
from jettison.predict.auto_recompute import AutoForecast, choose
from jettison.predict.time import estimate
from jettison.predict.whole_micro_batches import largest_window, with_whole
from jettison.spec.hardware import Hardware
from jettison.spec.recompute import MOST
from jettison.spec.run import Run

TRIED: Final = 6
"""Numbers at first, from none to all of the first stage's window."""


def choose_with_whole(
    run: Run, budget_bytes: int, hardware: Hardware, *, host_budget_bytes: int | None = None
) -> AutoForecast:
    """`choose`; where `MOST` are asked for, with the number of micro-batches kept whole that makes the fastest step.

    Raises:
        Infeasible, UsageError: see `choose`.
    """
    if run.recompute.whole != MOST:
        return choose(run, budget_bytes, hardware, host_budget_bytes=host_budget_bytes)
    known: dict[int, tuple[float, AutoForecast | None]] = {}

    def seconds(whole: int) -> float:
        if whole not in known:
            known[whole] = _tried(with_whole(run, whole), budget_bytes, hardware)
        return known[whole][0]

    plain = choose(with_whole(run, 0), budget_bytes, hardware)
    known[0] = _step_seconds(plain), plain
    size = largest_window(run)
    tried = sorted({size * i // (TRIED - 1) for i in range(TRIED)})
    while True:
        best = min(tried, key=seconds)
        at = tried.index(best)
        beside = [(best + tried[i]) // 2 for i in (at - 1, at + 1) if 0 <= i < len(tried)]
        fresh = [whole for whole in beside if whole not in tried]
        if not fresh:
            found = known[best][1]
            assert found is not None, "without any whole it fits"
            return found
        tried = sorted({*tried, *fresh})


def _tried(run: Run, budget_bytes: int, hardware: Hardware) -> tuple[float, AutoForecast | None]:
    try:
        found = choose(run, budget_bytes, hardware)
    except Infeasible:
        return float("inf"), None
    return _step_seconds(found), found


def _step_seconds(found: AutoForecast) -> float:
    kept = {part.name: part.chosen for part in found.forecast.parts}
    run = found.forecast.run
    return estimate(run, found.hardware, chosen=[kept[name] for name in run.model.layer_names]).step_seconds
