"""Agreement of ranks that communicate inside a model: they must recompute the same ops, or their collectives hang.

NOTE [ Agreement ]
Before the first step every rank sends digests of the ops that it will recompute, region by region, and all learn
whether they are equal: 32 bytes each, compared on their way up a tree of ranks (NOTE [ A tree of ranks ]) in the store
of `torch.distributed`, where a missing rank is named after a timeout and a collective would hang. If digests differ,
the first rank publishes its digests by region, and each other rank the region in which it differs.

All ranks go through their groups in the order of the groups' ranks, so that no two wait for each other. A rank gets its
plan from the group whose first rank is the lowest, and publishes it in groups where it is the first itself. Ranks that
share parameters only from the first step on (FSDP2 may come after the plan) are compared as that step begins. Shapes
are not compared: a dim that is not divisible is sharded unevenly, and DTensor pads on some ranks only.

NOTE [ One refusal ]
If one rank alone raised `Infeasible`, it would plan again with another budget, while the others wait in their first
step. So all ranks raise the same `Infeasible`, with the smallest budget under which all of them find a plan.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.fsdp2 import sharded_parameters
from jettison.capture.model_trace import ModelTrace
from jettison.capture.op_traits import is_collective
from jettison.capture.tensor_subclasses import Wrapping, wrapping
from jettison.core.errors import Infeasible, PlanMismatch
from jettison.parallel.store_exchange import Ranks, Store, listed, ranks_in_words
from jettison.runtime.planned_forward import PlannedForward

TIMEOUT_SECONDS = 300.0
"""Seconds that a rank waits for others that still trace or plan. A difference is seen as soon as all are there."""

Made = TypeVar("Made")
PADDING = frozenset({"aten.constant_pad_nd.default"})
PLAN = "the plan as a whole"

Group: TypeAlias = Any  # a ProcessGroup or a DeviceMesh
_rounds: defaultdict[tuple[int, ...], int] = defaultdict(int)


@dataclass(frozen=True, slots=True)
class Summary:
    """Digests of a rank's regions; the last of them is the model itself."""

    regions: Sequence[PlannedForward]
    digests: Mapping[str, str]


def summary(regions: Sequence[PlannedForward], plan: Any = None) -> Summary:
    """A digest by region of the ops that its backward recomputes, in order; and of the plan, if there is one."""
    found: dict[str, str] = {}
    for region in regions:
        name = region.name
        while name in found:  # of another model of the same step
            name += "'"
        found[name] = hashlib.sha256(json.dumps(list(_repeated(region))).encode()).hexdigest()[:16]
    return Summary(regions, found if plan is None else found | {PLAN: plan.hash})


def ranks_in(group: Group) -> tuple[int, ...]:
    """Global ranks of a group or a mesh, ascending."""
    if isinstance(group, DeviceMesh):
        return tuple(sorted(map(int, group.mesh.flatten().tolist())))
    return tuple(sorted(distributed.get_process_group_ranks(group)))


def groups_for(model: nn.Module, group: Group | None = None) -> list[tuple[int, ...]]:
    """The ranks that must agree with this one: ``group``, or those that hold parts of the model's parameters (DTensors:
    tensor parallel, FSDP2), without groups inside larger ones. Empty for a model of plain tensors.
    """
    if group is not None:
        return [ranks_in(group)]
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    parameters = [*model.parameters(), *sharded_parameters(model)]  # during a forward FSDP shows whole ones
    meshes = {wrap.spec.mesh for p in parameters if type(wrap := wrapping(p)) is Wrapping}
    groups = {ranks_in(mesh) for mesh in meshes}
    return sorted(g for g in groups if len(g) > 1 and not any(set(g) < set(other) for other in groups))


def talking_groups(traces: Iterable[ModelTrace]) -> set[tuple[int, ...]]:
    """Groups of the functional collectives that models call in their traces, whether or not parameters name them.

    Their ranks must follow one plan: a collective that only one rank recomputes in backward would be matched with
    another collective of the other ranks. Fake groups are left out.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return set()
    groups = {str(name): group for group, name in distributed.distributed_c10d._world.pg_names.items()}
    named = [groups[value] for value in _given(traces) if isinstance(value, str) and value in groups]
    found = {ranks_in(group) for group in named if distributed.get_backend(group) != "fake"}
    return {ranks for ranks in found if len(ranks) > 1}


def _given(traces: Iterable[ModelTrace]) -> Iterator[Any]:
    for one in traces:
        yield from _given(one.more)
        for region in (one.root, *(cls.trace for cls in one.classes.values())):
            for call in region.calls:
                if is_collective(call.func):
                    yield from (*call.args, *call.kwargs.values())


@dataclass(frozen=True, kw_only=True)
class BudgetVerdict:
    """Whether plans fit, of one rank, or of several together."""

    needs_bytes: int  # the smallest budget under which all of them have plans
    refused: dict[str, Any] | None = None  # arguments of the `Infeasible` of one that has none

    @classmethod
    def fits(cls, minimum_budget_bytes: Iterable[int]) -> BudgetVerdict:
        """Verdict of a rank that has plans, which also fit these budgets."""
        return cls(needs_bytes=max(minimum_budget_bytes, default=0))

    @classmethod
    def refuses(cls, error: Infeasible, rank: int | None = None) -> BudgetVerdict:
        """Verdict of a rank without a plan; the ``rank`` is named if each of the others has its own plan."""
        reason = error.reason if rank is None else f"This is what rank {rank} says. {error.reason}".strip()
        needs, budget = int(error.minimum_budget_bytes), int(error.budget_bytes)
        return cls(needs_bytes=needs, refused={"minimum_budget_bytes": needs, "budget_bytes": budget, "reason": reason})

    @property
    def error(self) -> Infeasible | None:
        """Error that all ranks raise if one has no plan."""
        if self.refused is None:
            return None
        return Infeasible(**self.refused | {"minimum_budget_bytes": self.needs_bytes})

    def __or__(self, other: BudgetVerdict) -> BudgetVerdict:
        """Verdict of the ranks of both. Of several that have no plan the one that needs most is named."""
        refused = [one.refused for one in (self, other) if one.refused is not None]
        return BudgetVerdict(
            needs_bytes=max(self.needs_bytes, other.needs_bytes),
            refused=max(refused, key=lambda one: one["minimum_budget_bytes"], default=None),
        )


class Agreement:
    """One comparison, in each of several groups. Enter it before the work whose result is compared: if that fails, the
    other ranks get the reason instead of waiting. Without groups it does nothing. Methods raise `PlanMismatch` if a
    rank fails, or is too late.
    """

    def __init__(self, groups: Iterable[tuple[int, ...]], *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self.rounds = [_next_round(ranks, timeout_seconds) for ranks in sorted(groups)]

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            for each in self.rounds:
                each.give_up(f"{type(error).__name__}: {error}")

    def check(self, said: Summary) -> None:
        """Send the summary, and wait until all ranks of every group have sent an equal one; else raise `PlanMismatch`.
        Ranks that share parameters only from the first step on are compared then.
        """
        for each in self.rounds:
            each.receive_digests(each.send_digests(said.digests))
        known = [each.ranks for each in self.rounds]
        said.regions[-1].before_first = partial(_check_newcomers, said, known, self.timeout_seconds)

    def _merged(self, own: Made, merge: Callable[[Made, Made], Made]) -> Made:
        for each in self.rounds:
            own = each.merged(own, merge)
        return own

    def settled(self, own: BudgetVerdict) -> BudgetVerdict:
        """Combined verdict of this rank and all others. An agreement calls this or `check`, not both."""
        own = self._merged(own, operator.or_)
        for each in self.rounds:
            each.over = True
        return own

    @property
    def leads(self) -> bool:
        """Whether this rank makes the value that `first` returns on all ranks."""
        return not self.rounds or self.rounds[0].leads

    def least(self, number: int) -> int:
        """Minimum over all ranks; also a barrier."""
        return self._merged(number, min)

    def also(self, groups: Iterable[tuple[int, ...]], number: int = 0) -> int:
        """Add the ranks of other groups, which follow the same plan, unless they are in it already. Return the minimum
        of a number over all of them; also a barrier."""
        known = [set(each.ranks) for each in self.rounds]
        new = [ranks for ranks in sorted(groups) if not any(set(ranks) <= other for other in known)]
        added = [_next_round(ranks, self.timeout_seconds) for ranks in new]
        self.rounds = sorted([*self.rounds, *added], key=lambda one: one.ranks)
        for each in added:
            number = each.merged(number, min)
        return number

    def union(self, own: Iterable[Made]) -> list[Made]:
        """Return the union of all ranks' items, in the same order on all ranks."""
        return sorted(self._merged(set(own), operator.or_), key=repr)

    def first(self, make: Callable[[], Made], tell: Callable[[Made], str]) -> Made | str:
        """Result of ``make`` on the first rank of the group; on the others what ``publish`` says of it. Without a group
        every rank is the first. All raise ``make``'s `Infeasible`; `PlanMismatch` if it failed there, or was too late.
        """
        made: Made | None = None
        said: BudgetVerdict | str = ""
        if not self.leads:
            said = self.rounds[0].published("plan")
        else:
            try:
                made = make()
            except Infeasible as error:
                said = BudgetVerdict.refuses(error)
            else:
                said = tell(made) if self.rounds else ""
        for each in self.rounds:
            if each.leads:
                each.publish("plan", said)
        if isinstance(said, BudgetVerdict):
            for each in self.rounds:
                each.over = True
            raise said.error or AssertionError
        return said if made is None else made

    def among(self, ranks: tuple[int, ...]) -> Round | None:
        """The round of a group, if it is one of the agreement's."""
        return next((each for each in self.rounds if each.ranks == ranks), None)


def _check_newcomers(said: Summary, known: list[tuple[int, ...]], timeout_seconds: float) -> None:
    """Compare within the groups that were not there when the plan was applied."""
    with _disable_current_modes():  # the step may be watched; a mesh reads its ranks from a tensor
        groups = groups_for(said.regions[-1].model)
        new = [ranks for ranks in groups if not any(set(ranks) <= set(others) for others in known)]
        with Agreement(new, timeout_seconds=timeout_seconds) as agreement:
            agreement.check(said)


def _next_round(ranks: tuple[int, ...], timeout_seconds: float) -> Round:
    """Number of a group's next round, equal on all of its ranks, so that two rounds never share keys."""
    _rounds[ranks] += 1
    store = distributed.distributed_c10d._get_default_store()
    return Round(ranks, timeout_seconds, rank=distributed.get_rank(), store=store, number=_rounds[ranks])


class Round(Ranks):
    """One rank's part in a group's ``number``-th agreement: digests, and before them perhaps a number and a plan."""

    def __init__(self, ranks: tuple[int, ...], timeout_seconds: float, *, rank: int, store: Store, number: int) -> None:
        key = f"jettison/{hashlib.sha256(','.join(map(str, ranks)).encode()).hexdigest()[:16]}/{number}"
        super().__init__(store, place=ranks.index(rank), size=len(ranks), key=key, seconds=timeout_seconds)
        self.ranks, self.rank, self.over = ranks, rank, False
        self._digests: Mapping[str, str] = {}

    def lost(self, why: str) -> PlanMismatch:
        """`PlanMismatch`, if other ranks fail or are missing."""
        self.over = True
        return PlanMismatch(why)

    def missing(self, places: Sequence[int]) -> str:
        return (
            f"{ranks_in_words(self.ranks[place] for place in places)} did not say within {self.seconds:g} s which plan "
            f"to run; every one of ranks {listed(self.ranks)} must apply one, and as often as the others"
        )

    def send_digests(self, said: Mapping[str, str]) -> str:
        """Send a digest by region, see `summary`; return the key of the other half."""
        self._digests = said
        own = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()
        topic, _ = self.send(own, lambda heard: heard[0] if len(set(heard)) == 1 else b"", bool)
        return topic

    def receive_digests(self, topic: str) -> None:
        """Wait until all ranks have sent theirs. Raises `PlanMismatch` on every rank if they differ."""
        is_same: bool = self.receive(topic)
        self.over = True
        if not is_same:
            raise PlanMismatch(self._difference())

    def read_published(self, topic: str, who: str) -> Any:
        """Value that a rank (``who``) published. Raise `PlanMismatch` if a rank failed, or is too late."""
        if not self.arrives(topic):
            raise PlanMismatch(
                f"{who} said nothing within {self.seconds:g} s; all of ranks {listed(self.ranks)} have to call "
                "auto_checkpoint at the same place"
            )
        return self.published(topic)

    def give_up(self, why: str) -> None:
        """Mark this rank as failed."""
        if not self.over:
            self.over = True
            self.fail(f"{ranks_in_words([self.rank])} has no plan, so none of ranks {listed(self.ranks)} starts: {why}")

    def _difference(self) -> str:
        """The ranks that differ from the first one, and the region in which the first of them does."""
        differ = self.differing(self._digests)
        others = {self.ranks[place] for place, *_ in differ}
        return (
            f"{ranks_in_words(others)} would run another plan than {ranks_in_words(set(self.ranks) - others)}; they "
            f"differ first in {differ[0][1] or 'the part around the blocks'}. Ranks that share a model compute the "
            "same ops again: give all of them one plan or one policy, and batches of one shape"
        )


def _repeated(region: PlannedForward) -> Iterable[Any]:
    """Names of the ops that backward recomputes; the treatment of a region without a program."""
    yield region.plan.link.is_alone
    for prepared in region.recordings.prepared.values():
        recipe = prepared.recipe
        if recipe is None:
            yield region.plan.policy.word
        else:
            names = [recipe.trace.program.ops[i].name for i in recipe.recomputed_ops]
            yield [name for name in names if name not in PADDING]
            if recipe.moved:
                yield [move.host_bytes for move in recipe.moved.values()]
