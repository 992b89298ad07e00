"""What workers are given, and that nothing is lost on the way."""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jettison.core.units import GIB
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.search.auto_recompute import choose, distinct_stages, solve_stage
from jettison.search.evaluate import CHUNKS, Workers
from jettison.spec.hardware import hardware
from jettison.spec.recompute import Mode, Recompute


@pytest.fixture
def workers() -> Iterator[Workers[int]]:
    made = Workers(100, 2)
    yield made
    made.end(now=True)
    assert not multiprocessing.active_children()


def added(question: int, item: str) -> tuple[int, int]:
    if item == "x":
        raise ValueError("got x")
    return question + len(item), os.getpid()


def first_letter(item: str) -> tuple[str]:
    return (item[0],)


def test_nothing_is_lost_and_errors_come_back(workers: Workers[int]) -> None:
    items = [letter * (1 + n % 5) for n, letter in enumerate("abcde" * 9)]
    found: dict[int, tuple[int, int]] = {}
    for part in workers.map(added, items, first_letter):
        assert not found.keys() & part.keys()
        found |= part
    assert [found[i][0] for i in range(len(items))] == [100 + len(item) for item in items]
    assert {pid for _, pid in found.values()} <= {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(ValueError, match="got x"):
        list(workers.map(added, ["a", "x"], first_letter))


def test_items_of_a_key_have_a_home(workers: Workers[int]) -> None:
    """New keys go to who has least, the largest first; keys that are known stay where they are."""
    left, fresh = workers._shared(list("abacabac") * 4, first_letter)
    assert [sorted(i for chunk in own for i in chunk) for own in left] == [
        [i for i in range(32) if i % 2 == 0],
        [i for i in range(32) if i % 2],
    ]
    assert fresh == {("a",), ("b",), ("c",)}
    assert {len(chunk) for own in left for chunk in own} == {32 // (2 * CHUNKS)}
    left, fresh = workers._shared(list("cccda"), first_letter)
    assert [[i for chunk in own for i in chunk] for own in left] == [[4, 3], [0, 1, 2]]
    assert fresh == {("d",)}


def test_stages_that_are_solved_one_by_one_make_the_same_plan() -> None:
    device = hardware("a100-80gb")
    run = resolve(model_spec("gpt2"), RunRequest(pp=3, micro_batch=8, micro_batches=6, seq=1024)).run
    run = replace(run, recompute=Recompute(mode=Mode.AUTO))
    budget = 6 * GIB
    stages = distinct_stages(run)
    assert stages == [0, 1, 2], "each has another number of micro-batches in flight"
    solved = {index: solve_stage(run, index, budget, device) for index in stages}
    plans = [choose(run, budget, device, solved=solved), choose(run, budget, device)]
    first, second = ((plan.seconds, [(part.name, part.kept) for part in plan.forecast.parts]) for plan in plans)
    assert first == second
    roomier = {**solved, 2: solve_stage(run, 2, 60 * GIB, device)}
    assert first[0] > 0
    assert choose(run, budget, device, solved=roomier).seconds != first[0], "what was solved is not solved again"
