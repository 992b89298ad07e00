"""Plans made anew by several ranks together, when parameters are trained that were frozen.

A rank cannot plan by itself where it shares parameters with others, or runs a stage of a pipeline: ranks compare what
they will recompute, and stages tell each other what they return. So all of them take the old plan off and plan again,
as in the first call of `auto_checkpoint`, before the step in which it matters begins (`Applied.expect`).

Ranks that share parameters see the same change by themselves. Stages of a pipeline have parameters of their own: they
ask each other in every call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from jettison.errors import Infeasible
from jettison.parallel.agree import Agreement
from jettison.planner.handle import Applied, figures
from jettison.planner.rank_batches import stretched
from jettison.progress import Progress, reported
from jettison.runtime.batch_shape import BatchShape
from jettison.units import format_bytes


@dataclass(kw_only=True, eq=False)
class Thawing:
    """When a handle's plan is made anew, and how.

    Args:
        modules: that are planned.
        stages: groups of ranks that run other stages.
        shapes: of batches that were planned for, where ranks share parameters.
        make: plans for these batches, under another budget where one is given.
    """

    modules: Sequence[nn.Module]
    stages: Sequence[tuple[int, ...]]
    shapes: Sequence[BatchShape]
    budget_bytes: int
    make: Callable[[Sequence[Any], int | None], Applied]
    progress: Progress
    frozen: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.frozen = [p for one in self.modules for p in one.parameters() if not p.requires_grad]

    def meet(self, handle: Applied, batch: Any) -> None:
        """Plan again, on all ranks, where some parameter is trained that the plan takes to be frozen.

        Raises:
            PlanMismatch: a rank failed, or did not come in time.
        """
        thawed = sum(p.requires_grad for p in self.frozen)
        with Agreement(self.stages) as stages:
            if stages.least(int(not thawed)):
                return
        batches = [batch, *(stretched(batch, shape) for shape in self.shapes)]
        handle.remove()
        least_bytes: int | None = None
        with reported(self.progress, f"planning again, {thawed} more parameters are trained") as done:
            try:
                made = self.make(batches, None)
            except Infeasible as error:
                made = self.make(batches, least_bytes := error.minimum_budget_bytes)
            done(f"planned again: {figures(made)}")
        handle._become(made)
        if least_bytes is not None:
            warnings.warn(
                f"the step with {thawed} more parameters trained does not fit into {format_bytes(self.budget_bytes)}: "
                f"the smallest plan for it needs {format_bytes(least_bytes)}, and is what it runs "
                "under. Use a smaller batch, or a larger budget",
                stacklevel=3,
            )
