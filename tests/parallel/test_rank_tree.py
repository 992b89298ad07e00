"""Words of many ranks: who speaks to whom, what it costs at any number of them, what is said when some go wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from benchmarks.ranks import CountingStore, Waits, Words, now, together, worlds
from torch import distributed as dist

from jettison.core.errors import Infeasible, JettisonError, PlanMismatch, UsageError
from jettison.parallel.recompute_agreement import Agreement, BudgetVerdict, Round
from jettison.parallel.store_exchange import FAN, children, listed
from jettison.train.ranks import RankLost, World
from support.patience import PATIENCE

DIGESTS = {f"blocks.{number}": "0" * 16 for number in range(12)} | {"": "1" * 16}


def parent(place: int) -> int:
    """A place with its last digit in base 16 that is not 0 set to 0."""
    span = FAN
    while place % span == 0:
        span *= FAN
    return place - place % span


def branch(place: int, size: int) -> list[int]:
    return [place, *(p for child in children(place, size) for p in branch(child, size))]


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 64, 257, 1000, 4097])
def test_every_branch_stands_side_by_side(size: int) -> None:
    levels = next(n for n in range(9) if FAN**n >= size)
    for place in range(size):
        below = children(place, size)
        assert len(below) <= (FAN - 1) * levels and all(parent(child) == place for child in below)
    assert branch(0, size) == list(range(size))


def inner(size: int) -> int:
    """Ranks, beside the first, that hear others."""
    return sum(bool(children(place, size)) for place in range(1, size))


@pytest.mark.parametrize(("size", "fan_in"), [(64, 18), (1000, 33)])
def test_an_agreement_costs_a_few_calls_a_rank(size: int, fan_in: int) -> None:
    """Whole numbers at any number of ranks: here for two; `python -m benchmarks.ranks` has more."""
    assert fan_in == len(children(0, size))
    store = CountingStore()
    now(range(size), Words(digests=DIGESTS, plan="p" * 5000), store)
    others, hears = size - 1, inner(size)
    assert store.calls == {
        "set": 2 * (others + hears) + 3,  # a number and a digest, a word of being there; two verdicts and the plan
        "check": 2 * (hears + 1 + size) + others,
        "multi_get": 2 * (hears + 1),
        "get": 2 * size + others,
        "delete": 2 * (others + hears) + 2,  # the first rank takes away the plan and the first verdict
    }
    assert store.longest_key == len("jettison/0123456789abcdef/1/1/+") + len(str(FAN * (others // FAN)))
    kinds = {rank: 13 if rank == 0 else 18 if children(rank, size) else 10 for rank in range(size)}
    assert store.calls_of == kinds, "whoever hears others, however many, calls eight times more than who does not"
    assert store.found()["left_bytes"] < 50
    # the first rank hears 32 bytes from each below it, not what all ranks have
    assert store.bytes_of[0] < 2 * fan_in * 100 + 500


def test_words_of_a_run_cost_no_more() -> None:
    found = {size: together(size) for size in (64, 1000)}
    for size, counted in found.items():
        hears = inner(size)
        assert counted["calls"] == 4 * size + 4 * hears + 1, size
        assert counted["most_calls_of_a_rank"] == 8
        assert counted["bytes"] < 160 * size


def test_a_rank_that_would_wait_is_seen() -> None:
    """The count is of ranks that do not wait, so it must not hide that one does."""
    store = CountingStore()
    with pytest.raises(Waits):
        Round((0, 1), 300.0, rank=0, store=store, number=1).send_digests(DIGESTS)


def test_ranks_in_words() -> None:
    assert [listed([3]), listed([0, 1]), listed([2, 0, 1, 7])] == ["3", "0, 1", "0 to 2, 7"]
    assert listed(range(16384)) == "0 to 16383"
    assert listed(range(0, 8192, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 4,088 more"


# ranks that go wrong: threads that really wait ------------------------------------------------------------------------


def on_threads(size: int, do: Callable[[int, Any], Any], *, away: tuple[int, ...] = ()) -> dict[int, Any]:
    """What each rank returned or raised, with one store for all."""
    store, found = dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            found[rank] = do(rank, store)
        except JettisonError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size) if rank not in away]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found.keys() == set(range(size)) - set(away)
    return found


def agreeing(
    size: int, digests: Callable[[int], Mapping[str, str]], *, seconds: float = 300.0, ranks: tuple[int, ...] = ()
) -> Callable[[int, Any], None]:
    """An agreement of a group, as `Agreement` goes through it."""

    def agree(place: int, store: Any) -> None:
        group = ranks or tuple(range(size))
        one = Round(group, seconds, rank=group[place], store=store, number=1)
        one.receive_digests(one.send_digests(digests(place)))

    return agree


def test_the_ranks_that_differ_and_the_region_are_named_on_all() -> None:
    def digests(rank: int) -> Mapping[str, str]:
        return DIGESTS | {"blocks.3": "2" * 16, "blocks.7": "2" * 16} if rank in (17, 18, 19, 34) else DIGESTS

    assert set(on_threads(40, agreeing(40, lambda _: DIGESTS)).values()) == {None}
    found = on_threads(40, agreeing(40, digests))
    assert {type(error) for error in found.values()} == {PlanMismatch}
    (said,) = {str(error) for error in found.values()}
    assert said.startswith(
        "ranks 17 to 19, 34 would run another plan than ranks 0 to 16, 20 to 33, 35 to 39; they differ first in "
        "blocks.3. Ranks that share a model"
    )


def test_global_ranks_are_named_and_not_places() -> None:
    ranks = tuple(range(3, 163, 8))
    found = on_threads(20, agreeing(20, lambda place: DIGESTS | {"": "2" * 16} if place == 4 else DIGESTS, ranks=ranks))
    (said,) = {str(error) for error in found.values()}
    assert said.startswith("rank 35 would run another plan than ranks 3, 11, 19, 27, 43, 51, 59, 67 and 11 more; ")
    assert "they differ first in the part around the blocks" in said


def test_as_many_plans_as_ranks_are_said_in_one_line() -> None:
    found = on_threads(40, agreeing(40, lambda rank: {"blocks.0": str(rank)}))
    (said,) = {str(error) for error in found.values()}
    assert said.startswith("ranks 1 to 39 would run another plan than rank 0; they differ first in blocks.0")


def test_ranks_that_never_come_are_named_and_those_that_wait_for_them_are_not() -> None:
    """16 and 32 hear others; 17 to 31 have come, and so have 33 and those after it."""
    found = on_threads(40, agreeing(40, lambda _: DIGESTS, seconds=1.0), away=(5, 16, 38))
    (said,) = {str(error) for error in found.values()}
    assert said.startswith("ranks 5, 16, 38 did not say within 1 s which plan to run; every one of ranks 0 to 39 must")


def test_without_the_first_rank_it_is_named() -> None:
    found = on_threads(20, agreeing(20, lambda _: DIGESTS, seconds=0.5), away=(0,))
    assert all(str(error).startswith("rank 0 did not say within 0.5 s") for error in found.values())


@pytest.mark.parametrize("failing", [0, 16, 33])
@pytest.mark.parametrize("first", ["number", "plan", "digests"])
def test_a_rank_that_fails_tells_all_at_once(failing: int, first: str) -> None:
    """Whatever the others wait for, and whoever hears whom."""

    def agree(rank: int, store: Any) -> str | None:
        one = Round(tuple(range(40)), PATIENCE, rank=rank, store=store, number=1)
        if rank == failing:
            one.give_up("UsageError: nonsense")
            return None
        if first == "number":
            one.merged(7, min)
        elif first == "plan" and failing == 0:
            one.published("plan")
        one.receive_digests(one.send_digests(DIGESTS))
        return None

    found = on_threads(40, agree)
    assert found.pop(failing) is None
    text = f"rank {failing} has no plan, so none of ranks 0 to 39 starts: UsageError: nonsense"
    assert {str(error) for error in found.values()} == {text}


def test_the_least_number_and_a_plan_reach_all() -> None:
    def agree(rank: int, store: Any) -> tuple[int, str]:
        one = Round(tuple(range(40)), PATIENCE, rank=rank, store=store, number=1)
        least = one.merged(1000 - rank if rank < 23 else 5000, min)
        if rank == 0:
            one.publish("plan", "plan" * 1000)
        return least, one.published("plan")

    assert set(on_threads(40, agree).values()) == {(978, "plan" * 1000)}


def agreement(rank: int, groups: Sequence[tuple[int, ...]], store: Any) -> Agreement:
    """As `Agreement` is on this rank, in those of the groups that it is in."""
    one = Agreement(())
    one.rounds = [Round(g, 300.0, rank=rank, store=store, number=1) for g in sorted(groups) if rank in g]
    return one


PAIRS, COLUMNS = [(0, 1), (2, 3), (4, 5)], [(0, 2, 4), (1, 3, 5)]


@pytest.mark.parametrize("nested", [True, False])
def test_ranks_in_two_groups_have_one_plan(nested: bool) -> None:
    """Tensor parallelism in pairs, and as many replicas of each rank: two ranks are the first of their pair."""

    def agree(rank: int, store: Any) -> str:
        if not nested:
            return agreement(rank, PAIRS + COLUMNS, store).first(lambda: f"of {rank}", lambda plan: plan)
        pair, column = agreement(rank, PAIRS, store), agreement(rank, COLUMNS, store)
        return pair.first(lambda: column.first(lambda: f"of {rank}", lambda plan: plan), lambda plan: plan)

    assert set(on_threads(6, agree).values()) == {"of 0"}


def test_ranks_in_two_groups_have_one_least_number() -> None:
    def agree(rank: int, store: Any) -> int:
        return agreement(rank, PAIRS, store).least(agreement(rank, COLUMNS, store).least(100 - rank))

    assert set(on_threads(6, agree).values()) == {95}


def refusal(needs: int, budget: int = 10) -> Infeasible:
    return Infeasible(minimum_budget_bytes=needs, budget_bytes=budget, reason="The loss sets the peak.")


def test_what_the_first_rank_refuses_all_refuse() -> None:
    def agree(rank: int, store: Any) -> None:
        def make() -> str:
            assert rank == 0
            raise refusal(70)

        with agreement(rank, [(0, 1), (2, 3), (0, 2), (1, 3)], store) as one:
            one.first(make, lambda plan: plan)

    found = on_threads(4, agree)
    assert {type(error) for error in found.values()} == {Infeasible}
    assert {str(error) for error in found.values()} == {str(refusal(70))}


@pytest.mark.parametrize("size", [2, 40])
def test_one_refusal_is_that_of_all_with_what_all_of_them_need(size: int) -> None:
    """Rank 1 has no plan, another one has but would need more; what is asked for next fits both."""

    def agree(rank: int, store: Any) -> BudgetVerdict:
        fits = BudgetVerdict.fits([30, 90 if rank == size - 2 else 40])
        own = BudgetVerdict.refuses(refusal(70), rank) if rank == 1 else fits
        with agreement(rank, [tuple(range(size))], store) as one:
            return one.settled(own)

    found = on_threads(size, agree)
    (said,) = {str(verdict.error) for verdict in found.values()}
    assert said.startswith("no plan fits a budget of 10 B (10B); the smallest feasible budget is 90 B. This is what ra")
    assert {verdict.needs_bytes for verdict in found.values()} == {90}


def test_of_two_refusals_the_larger_is_said() -> None:
    def agree(rank: int, store: Any) -> BudgetVerdict:
        return agreement(rank, [(0, 1, 2)], store).settled(BudgetVerdict.refuses(refusal(70 + rank, 10 + rank), rank))

    for verdict in on_threads(3, agree).values():
        assert verdict.error is not None
        assert (verdict.error.minimum_budget_bytes, verdict.error.budget_bytes) == (72, 12)
        assert "rank 2 says" in str(verdict.error)


def test_ranks_that_all_have_plans_refuse_nothing() -> None:
    found = on_threads(3, lambda rank, store: agreement(rank, [(0, 1, 2)], store).settled(BudgetVerdict.fits([rank])))
    assert all(verdict == BudgetVerdict(needs_bytes=2) and verdict.error is None for verdict in found.values())


# a run's words --------------------------------------------------------------------------------------------------------


def world(rank: int, size: int, store: Any, seconds: float = 300.0) -> World:
    return World(store, rank=rank, size=size, device=torch.device("cpu"), key="run", seconds=seconds)


def test_what_ranks_of_a_run_say_comes_to_the_same_on_all() -> None:
    stores = []

    def talk(rank: int, store: Any) -> list[Any]:
        stores.append(store)
        one = world(rank, 20, store)
        found: list[Any] = [
            one.most(rank % 7),
            one.first(f"of {rank}" if rank > 16 else None),
            one.first(None),
            one.from_leader(lambda: {"rank": rank}),
            one.merged([rank], lambda a, b: a + b),
        ]
        whole = one.gathered([rank], lambda a, b: a + b)
        assert whole == (list(range(20)) if rank == 0 else None)
        if rank == 13:
            one.publish("of one", 13)
        found.append(one.published("of one"))

        def fails() -> None:
            if rank in (7, 18):
                raise UsageError(f"on {rank}")

        with pytest.raises(UsageError) as error:
            one.together(fails)
        found.append(str(error.value) if rank != 18 else "on 7")
        return [*found, one.together(lambda: 3)]

    expected = [6, "of 17", None, {"rank": 0}, list(range(20)), 13, "on 7", 3]
    assert all(found == expected for found in on_threads(20, talk).values())
    assert stores[0].num_keys() == 1, "the last verdict; everything else is gone"


def test_a_run_that_misses_a_rank_names_it() -> None:
    found = on_threads(20, lambda rank, store: world(rank, 20, store, seconds=0.5).together(lambda: rank), away=(17,))
    assert {type(error) for error in found.values()} == {RankLost}
    (said,) = {str(error).split("; ")[0] for error in found.values()}
    assert said == "rank 17 did not answer within the timeout of 0.5 s, and the others cannot go on without"


def test_worlds_of_the_benchmark_are_those_of_a_run() -> None:
    store = CountingStore()
    assert [one.rank for one in worlds(3, store)] == [0, 1, 2] and worlds(1, store)[0].most(4) == 4
