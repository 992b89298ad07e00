"""Every family of the table, three AdamW steps at two budgets, held against plain PyTorch to the bit."""

import pytest

from zoo.entry import Entry
from zoo.harness import prove
from zoo.table import FAST, TABLE

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_table_is_what_it_says() -> None:
    names = [entry.name for entry in TABLE]
    assert len(set(names)) == len(names) >= 90
    assert set(names) > FAST


@pytest.mark.parametrize("entry", [entry for entry in TABLE if entry.name in FAST], ids=str)
def test_small_families_train_the_same_under_two_budgets(entry: Entry) -> None:
    assert not (outcome := prove(entry)).problems, outcome.problems


@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry for entry in TABLE if entry.name not in FAST], ids=str)
def test_families_train_the_same_under_two_budgets(entry: Entry) -> None:
    assert not (outcome := prove(entry)).problems, outcome.problems
