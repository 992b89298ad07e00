"""A region's two passes under what is decided of it: replays that many forecasts share."""

from __future__ import annotations

from functools import lru_cache

from jettison.formula.liveness import Passes, replay
from jettison.formula.region import Region
from jettison.predict.stages import FULL, StageRegion, kept_by
from jettison.spec.kernels import Loss
from jettison.spec.precision import GradientRule
from jettison.spec.run import Run


def passes_of(part: StageRegion, rule: GradientRule, *, accumulates: bool = False) -> Passes:
    """A region's replay under its policy."""
    if part.chosen is None:
        return named_passes(part.region, part.policy, rule, accumulates)
    return chosen_passes(part.region, part.chosen.buffers, rule, accumulates, part.chosen.framed)


@lru_cache(maxsize=65536)
def named_passes(region: Region, policy: str, rule: GradientRule, accumulates: bool) -> Passes:
    return replay(region, kept_by(region, policy), rule, accumulates=accumulates, framed=policy == FULL)


@lru_cache(maxsize=4096)
def chosen_passes(
    region: Region, kept: frozenset[int], rule: GradientRule, accumulates: bool, framed: bool = False
) -> Passes:
    return replay(region, kept, rule, accumulates=accumulates, framed=framed)


def sums_apart(run: Run) -> bool:
    """Are the gradients of a tied table's two uses added up in a third tensor?

    The engine adds to what came first if nobody else has its storage (``torch/csrc/autograd/input_buffer.cpp``,
    ``can_accumulate_inplace``). The head's product returns a view of its gradient, whose base has it; of several heads,
    or chunks of one, the sum is the engine's own; and a fused loss returns a tensor.
    """
    once = run.kernels.loss not in (Loss.FUSED, Loss.CHUNKED, Loss.LISTED, Loss.DPO) and not run.model.further
    return once and run.model.tied_embeddings and not run.gradient_rule.fused
