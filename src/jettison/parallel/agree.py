"""Ranks that communicate inside a model must compute the same ops again, or one waits for ever for another.

NOTE [ Agreement ]
Before the first step every rank says what it is about to compute again, region by region, and all of them learn whether
they say the same. They talk through the key-value store of `torch.distributed`, not by a collective: a rank that never
comes is named after a time, where a collective would hang, and nothing is sent over the wires that the step will use.
What is said are digests, 32 bytes a rank, which are compared on their way up a tree (NOTE [ A tree of ranks ]). Where
they differ, one rank of each of the two largest camps says what its digest was made of, so that all learn which region
it is.

A rank may be in several groups. It takes them in the order of their ranks, as all do, so that no two wait for each
other. A plan goes from group to group: a rank has it from that of its groups whose first rank is the lowest, and hands
it out in those where it is the first itself. So it comes from lower ranks only, and all have one that is handed out.

FSDP2 may come after the plan. Its gathers take turns with what is computed again, so ranks whose plans differ would
wait for each other for ever. The model's own region therefore looks once more as its first step begins, and has the
ranks compared that share parameters by now.

Shapes are not compared. A dim that does not divide is sharded unevenly, and DTensor then pads on some ranks only: the
ops that are computed again must be the same, padding aside, but not their sizes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.sharded import sharded_parameters
from jettison.capture.tensor_subclasses import Wrapping, wrapping
from jettison.errors import Infeasible, PlanMismatch
from jettison.parallel import verdict as verdicts
from jettison.parallel.camps import DIGEST_BYTES, Camp, camps_of, listed, merged, ranks_in_words
from jettison.parallel.rank_tree import RankFailed, RanksMissing, RankTree, Store
from jettison.parallel.verdict import Verdict
from jettison.runtime.planned import PlannedForward

TIMEOUT_SECONDS = 300.0
"""How long a rank waits for others that still trace or plan. A difference is seen as soon as all are there."""

Made = TypeVar("Made")
PADDING = frozenset({"aten.constant_pad_nd.default"})
PLAN = "the plan as a whole"
_SAME: Final = b"same"
_REFUSED: Final = "refused "

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
    meshes = {wrap.spec.mesh for p in parameters if type(wrap := wrapping(p)) is Wrapping}
    groups = {ranks_in(mesh) for mesh in meshes}
    return sorted(g for g in groups if len(g) > 1 and not any(set(g) < set(other) for other in groups))


class Agreement:
    """One comparison, in each of several groups. Entered before the work whose result is compared: if that fails, the
    other ranks learn why instead of waiting. With no groups it does nothing.
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
        """Say it, and wait until all ranks of every group are known to say the same. Where parameters are shared with
        other ranks by the time of the first step, these are compared then.

        Raises:
            PlanMismatch: they do not.
        """
        self._compare(said.digests)
        known = [each.ranks for each in self.rounds]
        said.regions[-1].before_first = partial(_check_newcomers, said, known, self.timeout_seconds)

    def _compare(self, digests: Mapping[str, str]) -> None:
        for each in self.rounds:
            each.say(digests)
            each.wait()

    def settled(self, own: Verdict) -> Verdict:
        """What this rank's verdict and those of all others come to. An agreement says this or `check`, not both.

        Raises:
            PlanMismatch: a rank failed, or did not come in time.
        """
        for each in self.rounds:
            own = each.settle(own)
        for each in self.rounds:
            each.over = True
        return own

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that makes what `first` hands out."""
        return not self.rounds or self.rounds[0].tree.leads

    def least(self, number: int, topic: str = "least") -> int:
        """The smallest that any rank has. None of them goes on before all are there.

        Args:
            topic: of the question; each is asked once.

        Raises:
            PlanMismatch: a rank failed, or did not come in time.
        """
        for each in self.rounds:
            each.say_number(number, topic)
            number = each.least(topic)
        return number

    def also(self, groups: Iterable[tuple[int, ...]], number: int = 0) -> int:
        """Ranks of further groups, unless they are in it already: with them, too, this rank has one plan. All of them
        have come so far when this returns.

        Returns:
            The smallest number that any of them has.

        Raises:
            PlanMismatch: a rank failed, or did not come in time.
        """
        known = [set(each.ranks) for each in self.rounds]
        new = [ranks for ranks in sorted(groups) if not any(set(ranks) <= other for other in known)]
        added = [_next_round(ranks, self.timeout_seconds) for ranks in new]
        self.rounds = sorted([*self.rounds, *added], key=lambda one: one.ranks)
        for each in added:
            each.say_number(number)
            number = each.least()
        return number

    def union(self, own: Collection[str]) -> list[str]:
        """Return the union of all ranks' words, in one order for all.

        Raises:
            PlanMismatch: a rank failed, or did not come in time.
        """
        found = sorted(set(own))
        for each in self.rounds:
            found = each.union(found)
        return found

    def first(self, make: Callable[[], Made], tell: Callable[[Made], str]) -> Made | str:
        """What ``make`` returns, on the first rank of the group; on the others what ``tell`` says of it. Without a
        group every rank is the first.

        Raises:
            Infeasible: of ``make``, on all of them.
            PlanMismatch: it failed there, or took longer than the timeout.
        """
        made: Made | None = None
        if not self.leads:
            said = self.rounds[0].told()
        else:
            try:
                made = make()
            except Infeasible as error:
                said = _REFUSED + Verdict.refuses(error).written().decode()
            else:
                said = tell(made) if self.rounds else ""
        for each in self.rounds:
            if each.tree.leads:
                each.hand_out(said)
        if said.startswith(_REFUSED):
            for each in self.rounds:
                each.over = True
            raise verdicts.read(said.removeprefix(_REFUSED)).error or AssertionError
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
    """All ranks of a group count its rounds alike, so that the keys of two never meet."""
    _rounds[ranks] += 1
    store = distributed.distributed_c10d._get_default_store()
    return Round(ranks, timeout_seconds, rank=distributed.get_rank(), store=store, number=_rounds[ranks])


class Round:
    """One rank's part in one agreement of one group: digests, and before them perhaps a number, and a plan.

    Args:
        number: of the group's rounds in this process.
    """

    def __init__(self, ranks: tuple[int, ...], timeout_seconds: float, *, rank: int, store: Store, number: int) -> None:
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self.rank = rank
        key = f"jettison/{_group_key(ranks)}/{number}"
        self.tree = RankTree(store, place=ranks.index(rank), size=len(ranks), key=key, seconds=timeout_seconds)
        self._digests: Mapping[str, str] = {}
        self.over = False

    def say(self, said: Mapping[str, str]) -> None:
        """A digest by region; see `summary`."""
        self._digests = said
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()
        with self._words():
            word = self.tree.say("digest", digest, merged(self.tree.size))
        if word is not None:
            self.tree.tell("digest", _SAME if len(word) == DIGEST_BYTES else word)

    def wait(self) -> None:
        """For the first rank's verdict.

        Raises:
            PlanMismatch: on every rank.
        """
        with self._words():
            verdict = self.tree.hear("digest")
            self.over = True
            if verdict != _SAME:
                raise PlanMismatch(self._difference(verdict))

    def say_number(self, number: int, topic: str = "least") -> None:
        """Of which the smallest is wanted."""
        with self._words():
            word = self.tree.say(topic, str(number).encode(), lambda words: min((word for _, word in words), key=int))
        if word is not None:
            self.tree.tell(topic, word)

    def least(self, topic: str = "least") -> int:
        """The smallest that was said."""
        with self._words():
            return int(self.tree.hear(topic))

    def union(self, own: Sequence[str]) -> list[str]:
        """Return the sorted union of all ranks' words."""

        def merge(words: Sequence[tuple[int, bytes]]) -> bytes:
            return json.dumps(sorted({one for _, word in words for one in json.loads(word)})).encode()

        with self._words():
            word = self.tree.say("union", json.dumps(list(own)).encode(), merge)
        if word is not None:
            self.tree.tell("union", word)
        with self._words():
            return [str(one) for one in json.loads(self.tree.hear("union"))]

    def settle(self, own: Verdict) -> Verdict:
        """What all verdicts come to."""
        with self._words():
            word = self.tree.say("verdict", own.written(), verdicts.merged)
        if word is not None:
            self.tree.tell("verdict", word)
        with self._words():
            return verdicts.read(self.tree.hear("verdict"))

    def tell(self, topic: str, value: bytes) -> None:
        """Tell the others something between what all of them say."""
        self.tree.tell(topic, value)

    def hear_of(self, topic: str, who: str) -> bytes:
        """What a rank tells of a topic.

        Args:
            who: it is, in words.

        Raises:
            PlanMismatch: it did not in time, or some rank has failed.
        """
        with self._words():
            try:
                return self.tree.told(topic)
            except RanksMissing:
                raise PlanMismatch(
                    f"{who} said nothing within {self.timeout_seconds:g} s; all of ranks {listed(self.ranks)} have to "
                    "call auto_checkpoint at the same place"
                ) from None

    def hand_out(self, text: str) -> None:
        """On the first rank."""
        self.tree.tell("text", zlib.compress(text.encode()))

    def told(self) -> str:
        """What the first rank hands out."""
        with self._words():
            return zlib.decompress(self.tree.told("text")).decode()

    def give_up(self, why: str) -> None:
        """This rank will say nothing."""
        if not self.over:
            self.over = True
            self.tree.fail(
                f"{ranks_in_words([self.rank])} has no plan, so none of ranks {listed(self.ranks)} starts: {why}"
            )

    @contextmanager
    def _words(self) -> Iterator[None]:
        """Others that fail or stay away are a `PlanMismatch`."""
        try:
            yield
        except RankFailed as error:
            self.over = True
            raise PlanMismatch(str(error)) from None
        except RanksMissing as error:
            self.over = True
            text = (
                f"{ranks_in_words(self.ranks[place] for place in error.places)} did not say within "
                f"{self.timeout_seconds:g} s which plan to run; every one of ranks {listed(self.ranks)} must apply "
                "one, and as often as the others"
            )
            if self.tree.leads:
                self.tree.fail(text)
            raise PlanMismatch(text) from None

    def _difference(self, verdict: bytes) -> str:
        """What is wrong, in words: a rank of each of the two largest camps knows where they differ."""
        most, *others = camps_of(verdict, range(self.tree.size))
        one, other = most.runs[0][0], others[0].runs[0][0]
        if self.tree.place == one:
            self.tree.tell("digests", zlib.compress(json.dumps(self._digests).encode()))
        if self.tree.place == other:
            theirs: Mapping[str, str] = json.loads(zlib.decompress(self.tree.told("digests")))
            where = next(name for name in (*theirs, *self._digests) if theirs.get(name) != self._digests.get(name))
            self.tree.tell("where", where.encode())
        where = self.tree.told("where").decode()
        differing = ranks_in_words(self._in(*others), sum(camp.count for camp in others))
        return (
            f"{differing} would run another plan than {ranks_in_words(self._in(most), most.count)}; they differ first "
            f"in {where or 'the part around the blocks'}. Ranks that share a model compute the same ops again: give "
            "all of them one plan or one policy, and batches of one shape"
        )

    def _in(self, *camps: Camp) -> Iterator[int]:
        for first, last in (run for camp in camps for run in camp.runs):
            yield from self.ranks[first : last + 1]


@cache
def _group_key(ranks: tuple[int, ...]) -> str:
    """A short name of a group, however many they are."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


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
            if recipe.moved:
                yield [move.host_bytes for move in recipe.moved.values()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


__all__ = ["Agreement", "check_agreement", "groups_for", "ranks_in", "summary"]
