"""Ranks that communicate inside a model must compute the same ops again, or one waits for ever for another.

NOTE [ Agreement ]
Before the first step every rank says what it is about to compute again, region by region, and all of them learn whether
they say the same. They talk through the key-value store of `torch.distributed`, not by a collective: a rank that never
comes is named after a time, where a collective would hang, and nothing is sent over the wires that the step will use.
The first rank of a group compares; the others wait for its verdict, so that n ranks cost the store 2 n messages.

FSDP2 may come after the plan. Its gathers take turns with what is computed again, so ranks whose plans differ would
wait for each other for ever. The model's own region therefore looks once more as its first step begins, and has the
ranks compared that share parameters by now.

Shapes are not compared. A dim that does not divide is sharded unevenly, and DTensor then pads on some ranks only: the
ops that are computed again must be the same, padding aside, but not their sizes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.sharded import sharded_parameters
from jettison.capture.tensor_subclasses import wrapping
from jettison.errors import PlanMismatch
from jettison.runtime.planned import PlannedForward

TIMEOUT_SECONDS = 300.0
"""How long a rank waits for others that still trace or plan. A difference is seen as soon as all are there."""

Made = TypeVar("Made")
PADDING = frozenset({"aten.constant_pad_nd.default"})
PLAN = "the plan as a whole"
_FAILED = "failed!"  # no name of a module

Group: TypeAlias = Any  # a ProcessGroup or a DeviceMesh
_rounds: defaultdict[tuple[int, ...], int] = defaultdict(int)


class PlannedModel(Protocol):
    """What `jettison.apply` returns."""

    @property
    def regions(self) -> list[PlannedForward]: ...
    @property
    def plan(self) -> Any: ...


def check_agreement(applied: PlannedModel, group: Group, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Compare what is applied on this rank with what the other ranks of the group apply; all of them must call this.

    Raises:
        PlanMismatch: on every rank, naming the ranks that differ and the first region in which they do, or the ranks
            that did not come in time. Or the message of the rank that failed before it could say anything.
    """
    with Agreement([ranks_in(group)], timeout_seconds=timeout_seconds) as agreement:
        agreement.check(summary(applied.regions, applied.plan))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a rank says of its regions; the last of them is the model itself."""

    regions: Sequence[PlannedForward]
    digests: Mapping[str, str]


def summary(regions: Sequence[PlannedForward], plan: Any = None) -> Summary:
    """A digest by region of what its backward computes again, in order; and of the plan, where there is one."""
    found: dict[str, str] = {}
    for region in regions:
        name = region.name
        while name in found:  # of another model of the same step
            name += "'"
        found[name] = _digest(list(_repeated(region)))
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
    meshes = {wrap.spec.mesh for p in parameters if (wrap := wrapping(p)) is not None}
    groups = {ranks_in(mesh) for mesh in meshes}
    return sorted(g for g in groups if len(g) > 1 and not any(set(g) < set(other) for other in groups))


class Agreement:
    """One comparison, in each of several groups. Entered before the work whose result is compared: if that fails, the
    other ranks learn why instead of waiting. With no groups it does nothing.
    """

    def __init__(self, groups: Iterable[tuple[int, ...]], *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self.rounds = [_Round(ranks, timeout_seconds) for ranks in groups]
        self._said = False

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not self._said:
            for each in self.rounds:
                each.give_up(f"{type(error).__name__}: {error}")

    def check(self, said: Summary) -> None:
        """Say it, and wait until all ranks of every group are known to say the same. Where parameters are shared with
        other ranks by the time of the first step, these are compared then.

        Raises:
            PlanMismatch: they do not.
        """
        self._said = True
        for each in self.rounds:
            each.say(said.digests)
        for each in self.rounds:
            each.wait()
        known = [each.ranks for each in self.rounds]
        said.regions[-1].before_first = partial(_check_newcomers, said, known, self.timeout_seconds)

    def done(self) -> None:
        """Wait until all ranks of every group have come so far. An agreement says this or `check`, not both.

        Raises:
            PlanMismatch: one failed, or did not come in time.
        """
        self._said = True
        for each in self.rounds:
            each.say({PLAN: "done"})
        for each in self.rounds:
            each.wait()

    def least(self, number: int) -> int:
        """The smallest that any rank of the first group has.

        Raises:
            PlanMismatch: a rank did not come in time.
        """
        return self.rounds[0].least(number) if self.rounds else number

    def first(self, make: Callable[[], Made], tell: Callable[[Made], str]) -> Made | str:
        """What ``make`` returns, on the first rank of the group; on the others what ``tell`` says of it.

        Of several groups the first one counts. Without a group every rank is the first.

        Raises:
            PlanMismatch: it failed there, or took longer than the timeout.
        """
        if self.rounds and not self.rounds[0].leads:
            return self.rounds[0].told()
        made = make()
        if self.rounds:
            self.rounds[0].hand_out(tell(made))
        return made


def _check_newcomers(said: Summary, known: list[tuple[int, ...]], timeout_seconds: float) -> None:
    """Compare within the groups that were not there when the plan was applied."""
    with _disable_current_modes():  # the step may be watched; a mesh reads its ranks from a tensor
        groups = groups_for(said.regions[-1].model)
        new = [ranks for ranks in groups if not any(set(ranks) <= set(others) for others in known)]
        with Agreement(new, timeout_seconds=timeout_seconds) as agreement:
            agreement.check(said)


class _Round:
    """One agreement of one group. All ranks count their rounds alike, so that the keys of two never meet."""

    def __init__(self, ranks: tuple[int, ...], timeout_seconds: float) -> None:
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self.rank = distributed.get_rank()
        _rounds[ranks] += 1
        self.key = f"jettison/{','.join(map(str, ranks))}/{_rounds[ranks]}"
        self.store = distributed.distributed_c10d._get_default_store()

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def say(self, said: Mapping[str, str]) -> None:
        self.store.set(f"{self.key}/{self.rank}", json.dumps(said, sort_keys=True))

    def give_up(self, why: str) -> None:
        """This rank will say nothing."""
        self.say({_FAILED: why})
        if self.leads:
            self.store.set(f"{self.key}/text", json.dumps({_FAILED: why}))
            self.store.set(f"{self.key}/verdict", self._no_plan(self.rank, why))

    def wait(self) -> None:
        if self.leads:
            verdict = self._compare()
            self.store.set(f"{self.key}/verdict", verdict)
        else:
            heard = self._get("verdict", self.timeout_seconds * 1.1 + 1)  # the leader's own time comes first
            verdict = _absent([self.ranks[0]], self) if heard is None else heard
        if verdict:
            raise PlanMismatch(verdict)

    def least(self, number: int) -> int:
        """Every rank says its own; the leader looks through them, and says which is the smallest."""
        self.store.set(f"{self.key}/number/{self.rank}", str(number))
        if self.leads:
            said = {rank: self._get(f"number/{rank}", self.timeout_seconds) for rank in self.ranks}
            absent = [rank for rank, text in said.items() if text is None]
            if absent:
                raise PlanMismatch(_absent(absent, self))
            self.store.set(f"{self.key}/least", str(min(int(text) for text in said.values() if text is not None)))
        found = self._get("least", self.timeout_seconds * 1.1 + 1)
        if found is None:
            raise PlanMismatch(_absent([self.ranks[0]], self))
        return int(found)

    def hand_out(self, text: str) -> None:
        self.store.set(f"{self.key}/text", json.dumps({"text": text}))

    def told(self) -> str:
        got = json.loads(self._get("text", self.timeout_seconds) or "{}")
        if "text" in got:
            return str(got["text"])
        leader = self.ranks[0]
        raise PlanMismatch(self._no_plan(leader, got[_FAILED]) if got else _absent([leader], self))

    def _get(self, what: str, seconds: float) -> str | None:
        """What was set; None where nothing was in time."""
        key = f"{self.key}/{what}"
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except distributed.DistStoreError:
            return None
        return str(self.store.get(key).decode())

    def _compare(self) -> str:
        """What is wrong; empty where nothing is."""
        end = time.monotonic() + self.timeout_seconds
        found = {rank: self._get(str(rank), max(0.05, end - time.monotonic())) for rank in self.ranks}
        absent = [rank for rank, text in found.items() if text is None]
        if absent:
            return _absent(absent, self)
        said = {rank: json.loads(text) for rank, text in found.items() if text is not None}
        failed = {rank: it[_FAILED] for rank, it in said.items() if _FAILED in it}
        for rank, why in failed.items():
            return self._no_plan(rank, why)
        return _difference(said)

    def _no_plan(self, rank: int, why: str) -> str:
        return f"rank {rank} has no plan, so none of ranks {_listed(self.ranks)} starts: {why}"


def _difference(said: Mapping[int, Mapping[str, str]]) -> str:
    by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, it in said.items():
        by_text[json.dumps(it, sort_keys=True)].append(rank)
    if len(by_text) == 1:
        return ""
    camps = sorted(by_text.values(), key=lambda ranks: (-len(ranks), ranks))
    most, others = camps[0], sorted(rank for camp in camps[1:] for rank in camp)
    a, b = said[most[0]], said[camps[1][0]]
    where = next(name for name in (*a, *b) if a.get(name) != b.get(name))
    return (
        f"{_ranks(others)} would run another plan than {_ranks(most)}; they differ first in "
        f"{where or 'the part around the blocks'}. Ranks that share a model compute the same ops again: give all of "
        "them one plan or one policy, and batches of one shape"
    )


def _absent(ranks: list[int], round_: _Round) -> str:
    return (
        f"{_ranks(ranks)} did not say within {round_.timeout_seconds:g} s which plan to run; every one of ranks "
        f"{_listed(round_.ranks)} must apply one, and as often as the others"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _repeated(region: PlannedForward) -> Iterable[Any]:
    """The ops that backward computes again, by name; how else a region is treated where it has no program."""
    yield region.way.link.is_alone
    for prepared in region.recordings.prepared.values():
        recipe = prepared.recipe
        if recipe is None:
            yield region.way.policy.word
        else:
            names = [recipe.trace.program.ops[i].name for i in recipe.recomputed_ops]
            yield [name for name in names if name not in PADDING]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


__all__ = ["Agreement", "check_agreement", "groups_for", "ranks_in", "summary"]
