"""Cached replays of a region's forward and backward under its policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from jettison.formula.liveness import Passes, replay
from jettison.formula.region import HEAD, Region
from jettison.predict.stages import CONTEXTS, FULL, PARTS, StageRegion, kept_by, outline
from jettison.solve.policy import ops_of_parts
from jettison.spec.precision import GradientRule
from jettison.spec.recompute import Mode
from jettison.spec.run import Run


def passes_of(part: StageRegion, rule: GradientRule, *, accumulates: bool = False) -> Passes:
    """Return a region's replay under its policy."""
    if part.held:
        return replay(part.region, part.kept, rule, accumulates=accumulates, held=part.held)
    if part.chosen is None:
        return named_passes(part.region, part.policy, rule, accumulates)
    return chosen_passes(part.region, part.chosen.buffers, rule, accumulates)


@lru_cache(maxsize=65536)
def named_passes(region: Region, policy: str, rule: GradientRule, accumulates: bool) -> Passes:
    kept = kept_by(region, policy)
    frames, reentrant = named_frames(region, policy), rule.reentrant and policy == FULL
    return replay(region, kept, rule, accumulates=accumulates, frames=frames, reentrant=reentrant)


def named_frames(region: Region, policy: str) -> Sequence[frozenset[int]]:
    """Ops of each checkpoint of a named policy."""
    if policy == PARTS:
        return ops_of_parts(region.program)
    return (frozenset(range(len(region.program.ops))),) if policy == FULL or policy in CONTEXTS else ()


@lru_cache(maxsize=4096)
def chosen_passes(region: Region, kept: frozenset[int], rule: GradientRule, accumulates: bool) -> Passes:
    return replay(region, kept, rule, accumulates=accumulates)


@lru_cache(maxsize=1024)
def cached_segments(run: Run) -> int:
    """Bytes that the caching allocator has in segments, and that are unallocated at the peak: NOTE [ Cached segments ]
    in `ranges`. A plan that is yet to be chosen is taken for full recomputation."""
    logits, layer = 0, 0
    for part in {group.part for chunks in outline(run) for chunk in chunks for group in chunk}:
        policy = FULL if part.is_layer and run.recompute.mode is Mode.AUTO else part.policy
        passes = named_passes(part.region, policy, run.gradient_rule, False)
        if part.is_layer:
            layer = max(layer, passes.forward_peak - passes.resident + part.static.gathered)
        elif part.name == HEAD:
            logits = passes.forward_peak // 5
    return logits + layer
