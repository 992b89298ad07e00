"""Attributes, entries and switches for a time."""

from __future__ import annotations

from typing import Any

import pytest

from jettison.core.objects import ABSENT, set_to, swapped, swapped_entries


class Base:
    size = 1

    def name(self) -> str:
        return "base"


class Derived(Base):
    pass


def test_attributes_are_given_back_to_the_object_its_class_or_nobody() -> None:
    one = Derived()
    one.own = 1  # type: ignore[attr-defined]
    with pytest.raises(KeyError), swapped(one, own=2, name=lambda: "given", new=3):
        assert (one.own, one.name(), one.new) == (2, "given", 3)  # type: ignore[attr-defined]
        raise KeyError
    assert vars(one) == {"own": 1}
    with swapped(Derived, size=2):
        assert (one.size, Base.size) == (2, 1)
    Base.size = 5
    try:
        assert one.name() == "base"
    finally:
        Base.size = 1


def test_entries_are_restored() -> None:
    table: dict[Any, int] = {"a": 1, "b": 2}
    with pytest.raises(KeyError), swapped_entries([(table, "b", 3), (table, "c", 4), (table, "a", ABSENT)]):
        assert table == {"b": 3, "c": 4}
        raise KeyError
    assert table == {"a": 1, "b": 2}
    hooks = {3: "first", 1: "second"}
    with swapped_entries((hooks, number, ABSENT) for number in hooks):
        assert not hooks
    assert list(hooks) == [3, 1]


def test_a_switch_is_put_back_after_an_exception() -> None:
    now = [1]
    with pytest.raises(KeyError), set_to(2, lambda: now[0], lambda value: now.__setitem__(0, value)):
        assert now == [2]
        raise KeyError
    assert now == [1]
