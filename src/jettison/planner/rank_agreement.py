"""Ranks that plan a step together: their groups, and one outcome for all of them.

Ranks that share parameters follow one plan (NOTE [ Agreement ]). Pipeline stages have their own plans, and so may
replicas, which only average their gradients; but none of them may begin while another has no plan.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.model_trace import ModelTrace
from jettison.core.errors import Infeasible
from jettison.dryrun.user_step import Scheduled, stages_of
from jettison.parallel.recompute_agreement import Agreement, BudgetVerdict, Group, groups_for, ranks_in
from jettison.planner.apply import likeness
from jettison.planner.handle import Applied
from jettison.planner.kept_plans import KeptPlans
from jettison.solve.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanningRanks:
    """Exchanges of one call of `auto_checkpoint`, with ranks that share parameters and follow one plan, that average
    gradients, and that run other stages of its pipelines. Nothing waits before the first. Each raises `PlanMismatch` if
    a rank failed, or did not arrive in time.
    """

    sharing: Agreement
    replicas: Agreement
    stages: Agreement

    def least(self, budget_bytes: int) -> int:
        """The smallest budget of ranks with a common or an equal plan. When it returns, all ranks are ready to plan."""
        self.stages.least(0)
        return self.sharing.least(self.replicas.least(budget_bytes))

    def reached(self, names: Collection[str]) -> set[str]:
        """Parameters that the step of any rank reaches, among ranks that average gradients."""
        return set(self.sharing.union(self.replicas.union(names)))

    def follow(self, kept: KeptPlans | None) -> bool:
        """Do all ranks reuse kept plans? All call this. One that gets its plan can, unless it once kept its own."""
        makes = self.sharing.leads and self.replicas.leads  # its own plans, or plans for others
        here = not makes if kept is None else bool(kept.plans) or not (makes or kept.file.exists())
        number = self.replicas.least(self.stages.least(int(here)))
        return bool(self.sharing.least(number))

    def plans(self, make: Callable[[], list[Plan]], traces: Sequence[ModelTrace]) -> list[Plan] | str:
        """Plans of this rank, or the text of another rank's plans for the same step. A replica may have another batch,
        and then plans for itself. Raise `Infeasible` on all ranks that would have followed them if there are none.
        """

        def tell(made: list[Plan] | str) -> str:
            if isinstance(made, str):
                return made
            return json.dumps([[plan.to_json() for plan in made], [likeness(trace) for trace in traces]])

        def from_a_replica() -> list[Plan] | str:
            said = self.replicas.first(make, tell)
            if isinstance(said, str) and json.loads(said)[1] != [likeness(trace) for trace in traces]:
                return make()
            return said

        return self.sharing.first(from_a_replica, tell)

    def settled(self, make: Callable[[], Applied]) -> Applied:
        """Apply the plans once all ranks have some: NOTE [ One refusal ]. Raise `Infeasible` if a rank has none."""
        applied: Applied | None = None
        try:
            applied = make()
            verdict = BudgetVerdict.fits(plan.minimum_budget_bytes for plan in applied.plans)
        except Infeasible as error:
            if not (self.replicas.rounds or self.stages.rounds):
                raise
            verdict = BudgetVerdict.refuses(error, distributed.get_rank())
        try:
            verdict = self.stages.settled(self.replicas.settled(verdict))
            if verdict.error is not None:
                raise verdict.error
        except BaseException:
            if applied is not None:
                applied.remove()
            raise
        assert applied is not None
        return applied


@contextlib.contextmanager
def together(models: Sequence[nn.Module | Scheduled], group: Group | None) -> Iterator[PlanningRanks]:
    """Context in which a failure of this rank is sent to the others, so that they do not wait. ``group``: ranks that
    follow one plan, if the models do not show it. `UnsupportedModule` for stages other than `PipelineStage`.
    """
    schedules = [stages_of(one) for one in models if not isinstance(one, nn.Module)]
    modules = [one for one in models if isinstance(one, nn.Module)]
    modules += [stage.submod for stages in schedules for stage in stages]
    sharing = {ranks for one in modules for ranks in groups_for(one, group)}
    copies = {ranks_in(one.process_group) for one in modules if isinstance(one, DistributedDataParallel)}
    pipelines = {ranks_in(stages[0].group or distributed.group.WORLD) for stages in schedules if stages}
    with (
        Agreement(_outermost(pipelines)) as stages,
        Agreement(_outermost(copies, sharing)) as replicas,
        Agreement(_outermost(sharing)) as shared,
    ):
        yield PlanningRanks(sharing=shared, replicas=replicas, stages=stages)


def _outermost(groups: set[tuple[int, ...]], others: Collection[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """Groups of more than one rank that no larger group, nor one of ``others``, contains."""
    return [
        ranks
        for ranks in groups
        if len(ranks) > 1
        and not any(set(ranks) < set(other) for other in groups)
        and not any(set(ranks) <= set(other) for other in others)
    ]
