"""A region's two passes under what is decided of it: replays that many forecasts share."""

from __future__ import annotations

from functools import lru_cache

from jettison.formula.liveness import Passes, replay
from jettison.formula.region import Region
from jettison.predict.stages import FULL, StageRegion, kept_by
from jettison.spec.precision import GradientRule


def passes_of(part: StageRegion, rule: GradientRule, *, accumulates: bool = False) -> Passes:
    """A region's replay under its policy."""
    if part.chosen is None:
        return named_passes(part.region, part.policy, rule, accumulates)
    return chosen_passes(part.region, part.chosen.buffers, rule, accumulates)


@lru_cache(maxsize=65536)
def named_passes(region: Region, policy: str, rule: GradientRule, accumulates: bool) -> Passes:
    return replay(region, kept_by(region, policy), rule, accumulates=accumulates, framed=policy == FULL)


@lru_cache(maxsize=4096)
def chosen_passes(region: Region, kept: frozenset[int], rule: GradientRule, accumulates: bool) -> Passes:
    return replay(region, kept, rule, accumulates=accumulates)
