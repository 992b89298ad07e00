"""Every family of the table, three AdamW steps at two budgets, held against plain PyTorch to the bit."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from zoo.entry import Entry
from zoo.harness import prove
from zoo.table import TABLE

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = [entry for entry in TABLE if entry.fast]


def test_the_table_is_what_it_says() -> None:
    names = [entry.name for entry in TABLE]
    assert len(set(names)) == len(names) >= 90


@pytest.mark.parametrize("entry", FAST, ids=str)
def test_a_dozen_families_train_the_same_under_two_budgets(entry: Entry) -> None:
    assert not (outcome := prove(entry)).problems, outcome.problems


@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry for entry in TABLE if not entry.fast], ids=str)
def test_families_train_the_same_under_two_budgets(entry: Entry) -> None:
    assert not (outcome := prove(entry)).problems, outcome.problems
