"""Slabs, laid out ahead; what they take from the host; and what is said where the host has not so much."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import HostBudgetExceeded, UsageError
from jettison.runtime import host_memory
from jettison.runtime.device import Imagined, Slab, power_of_two, whole_pages
from jettison.runtime.host_pool import ALIGNMENT_BYTES, PARTS, FirstFit, HostPool, Lifetime, laid_out, usable

UNIT = ALIGNMENT_BYTES


class Rounding(Imagined):
    """Pins as torch's allocator does, and remembers."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.pinned: list[int] = []
        self.waited: list[object] = []

    def wait(self, stream: object, event: object) -> None:
        self.waited.append(event)

    def pin(self, nbytes: int) -> Slab:
        self.pinned.append(nbytes)
        return Slab(None, self.rounded(nbytes), self.rounded(nbytes))


def lives(*triples: tuple[int, int, int]) -> list[Lifetime]:
    return [Lifetime(nbytes=n, begins=a, ends=b) for n, a, b in triples]


def test_a_forward_and_its_backward_are_a_stack() -> None:
    layout = laid_out(lives((UNIT, 0, 6), (3 * UNIT, 1, 5), (100, 2, 4)))
    assert layout.offsets == (0, UNIT, 4 * UNIT)
    assert layout.nbytes == 5 * UNIT


def test_what_is_over_makes_room() -> None:
    """Two micro-batches, one after the other, lie in the same place."""
    layout = laid_out(lives((UNIT, 0, 2), (2 * UNIT, 2, 3), (UNIT, 3, 4)))
    assert layout.offsets == (0, 0, 0)
    assert layout.nbytes == 2 * UNIT


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    memory = FirstFit(6 * UNIT)
    assert [memory.take(n * UNIT) for n in (1, 2, 1)] == [0, UNIT, 3 * UNIT]
    memory.give(UNIT)
    assert memory.take(3 * UNIT) is None
    assert memory.take(UNIT + 1) == UNIT
    assert memory.take(2 * UNIT) == 4 * UNIT
    assert memory.take(1) is None


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(1, 20)), max_size=12))
def test_no_two_that_live_together_overlap(drawn: list[tuple[int, int, int]]) -> None:
    asked = lives(*((n, a, a + length) for n, a, length in drawn))
    layout = laid_out(asked)
    for i, one in enumerate(asked):
        assert layout.offsets[i] % UNIT == 0
        assert layout.offsets[i] + one.nbytes <= layout.nbytes
        for j, other in enumerate(asked[:i]):
            if one.begins < other.ends and other.begins < one.ends:
                apart = (layout.offsets[i] + one.nbytes <= layout.offsets[j]) or (
                    layout.offsets[j] + other.nbytes <= layout.offsets[i]
                )
                assert apart, (i, j)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=10))
def test_a_step_finds_the_places_that_were_laid_out(sizes: list[int]) -> None:
    count = len(sizes)
    layout = laid_out(lives(*((n, i, 2 * count - i) for i, n in enumerate(sizes))))
    device = Rounding()
    pool = HostPool(device, left=None)
    pool.reserve(layout.nbytes)
    for _ in range(2):
        spans = [pool.take(n) for n in sizes]
        assert tuple(span.offset for span in spans) == layout.offsets
        for span in reversed(spans):
            pool.give(span, None)
    assert device.pinned == [layout.nbytes]
    assert (pool.live_bytes, pool.peak_bytes) == (0, sum(sizes))


def nested(sizes: list[int]) -> list[Lifetime]:
    """What a forward sends, and its backward has back in reverse."""
    return lives(*((n, i, 2 * len(sizes) - i) for i, n in enumerate(sizes)))


def test_slabs_take_little_more_than_what_lies_in_them() -> None:
    """TRAPS 22: one slab of 33 MiB, or of 48, takes 64."""
    mib = 1 << 20
    layout = laid_out(nested([mib] * 33), power_of_two)
    assert layout.slabs == (32 * mib, mib)
    assert layout.numbers == (0,) * 32 + (1,)
    assert laid_out(nested([mib] * 48), power_of_two).slabs == (32 * mib, 16 * mib)
    assert laid_out(nested([3 * mib] * 16), power_of_two).slabs == (32 * mib, 16 * mib, 4 * mib)  # ten, five, one
    assert laid_out(nested([48 * mib]), power_of_two).slabs == (48 * mib,)  # one tensor has one slab
    assert laid_out(nested([mib] * 33), whole_pages).slabs == (33 * mib,)
    assert laid_out(nested([mib] * 64), power_of_two).slabs == (64 * mib,)
    assert laid_out([], power_of_two).slabs == ()


@given(st.lists(st.tuples(st.integers(1, 1 << 16), st.integers(0, 20), st.integers(1, 20)), max_size=12))
def test_slabs_hold_everything_and_take_no_more_than_one(drawn: list[tuple[int, int, int]]) -> None:
    asked = lives(*((n, a, a + length) for n, a, length in drawn))
    layout, one = laid_out(asked, power_of_two), laid_out(asked)
    assert sum(map(power_of_two, layout.slabs)) <= power_of_two(one.nbytes)
    for i, life in enumerate(asked):
        assert layout.offsets[i] + life.nbytes <= layout.slabs[layout.numbers[i]]
        for j, other in enumerate(asked[:i]):
            if life.begins < other.ends and other.begins < life.ends and layout.numbers[i] == layout.numbers[j]:
                first, second = sorted(((layout.offsets[i], life.nbytes), (layout.offsets[j], other.nbytes)))
                assert first[0] + first[1] <= second[0], (i, j)


@given(st.lists(st.integers(1, 1 << 16), min_size=1, max_size=12))
def test_a_step_finds_the_places_in_its_slabs(sizes: list[int]) -> None:
    layout = laid_out(nested(sizes), power_of_two)
    device = Rounding()
    pool = HostPool(device, sum(map(power_of_two, layout.slabs)), left=None)
    pool.reserve(*layout.slabs)
    slabs = [room.slab for room in pool._rooms]
    for _ in range(2):
        pool.reserve(*layout.slabs)  # are there
        spans = [pool.take(n) for n in sizes]
        assert tuple(span.offset for span in spans) == layout.offsets
        assert [slabs.index(span.slab) for span in spans] == list(layout.numbers)
        for span in reversed(spans):
            pool.give(span, None)
    assert device.pinned == list(layout.slabs)
    assert pool.real_bytes == sum(map(power_of_two, layout.slabs))


@given(st.integers(0, 1 << 40))
def test_what_a_budget_holds_in_slabs(budget: int) -> None:
    assert usable(budget, whole_pages) == budget // 4096 * 4096
    found = usable(budget, power_of_two)
    assert found <= budget < found + max(1, found * 2 // PARTS + 1)


def test_another_forward_takes_as_many_slabs_once_more() -> None:
    mib = 1 << 20
    device = Rounding()
    pool = HostPool(device, 7 * mib, left=None)
    pool.reserve(2 * mib, mib)
    taken = [pool.take(mib) for _ in range(4)]
    assert device.pinned == [2 * mib, mib, 2 * mib, mib]
    taken += [pool.take(mib) for _ in range(2)]
    assert pool.take(mib).slab not in [span.slab for span in taken]  # there is room for one alone
    assert pool.real_bytes == 7 * mib
    with pytest.raises(HostBudgetExceeded):
        pool.take(1)


def test_more_than_was_planned_takes_one_more_slab() -> None:
    device = Rounding()
    pool = HostPool(device, 1 << 20, left=None)
    pool.reserve(3 * UNIT)  # of which four can be had, since pinning rounds up
    first = [pool.take(2 * UNIT), pool.take(2 * UNIT)]
    second = pool.take(2 * UNIT)
    assert first[0].slab is first[1].slab is not second.slab
    assert device.pinned == [3 * UNIT, 3 * UNIT]
    assert pool.real_bytes == 8 * UNIT


def test_a_larger_step_has_a_slab_in_the_place_of_the_first_one() -> None:
    """Once the copies that still read it are over; a smaller step needs none of its own."""
    device = Rounding()
    pool = HostPool(device, 16 * UNIT, left=None)
    pool.reserve(4 * UNIT)
    pool.give(pool.take(UNIT), "read")
    pool.reserve(3 * UNIT)
    assert device.pinned == [4 * UNIT]
    pool.reserve(9 * UNIT)
    assert device.pinned == [4 * UNIT, 9 * UNIT] and device.waited == ["read"]
    assert pool.real_bytes == 16 * UNIT
    taken = pool.take(UNIT)
    with pytest.raises(HostBudgetExceeded):
        pool.reserve(17 * UNIT)  # what is taken stays
    assert taken.slab.real_bytes == 16 * UNIT


def test_what_pinning_rounds_up_to_is_what_counts() -> None:
    """TRAPS 22: 65 MiB pinned take 128."""
    mib = 1 << 20
    pool = HostPool(Rounding(), 127 * mib, left=None)
    with pytest.raises(HostBudgetExceeded) as raised:
        pool.reserve(65 * mib)
    assert raised.value.real_bytes == 128 * mib
    assert raised.value.exit_code == 3
    text = str(raised.value)
    assert "\n" not in text
    assert "need 65.00 MiB" in text and "128.00 MiB as pinning rounds it up" in text
    assert "the host budget is 127.00 MiB" in text
    HostPool(Rounding(), 128 * mib, left=None).reserve(65 * mib)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == text


def test_more_than_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "meminfo").write_text("MemAvailable:    1024 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "GROUP", tmp_path)
    HostPool(Rounding(), 1 << 40).reserve(1 << 20)
    for budget in (None, 1 << 40):
        with pytest.raises(HostBudgetExceeded, match=r"what this machine has for it is 1\.00 MiB"):
            HostPool(Rounding(), budget).reserve((1 << 20) + 1)


def test_a_machine_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "nothing")
    with pytest.raises(UsageError, match="give the budget in bytes"):
        HostPool(Rounding()).reserve(1)
    HostPool(Rounding(), 4096).reserve(1)


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="got a host budget of -1 bytes"):
        HostPool(Rounding(), -1)
    with pytest.raises(ValueError, match="expected some, for some time"):
        Lifetime(nbytes=0, begins=0, ends=1)
    with pytest.raises(ValueError, match="expected some, for some time"):
        Lifetime(nbytes=1, begins=1, ends=1)


def test_whoever_gets_a_place_waits_for_the_copies_that_read_it() -> None:
    pool = HostPool(Rounding(), left=None)
    pool.reserve(4 * UNIT)
    left, right = pool.take(UNIT), pool.take(UNIT)
    pool.give(left, "read left")
    pool.give(right, "read right")
    across = pool.take(2 * UNIT)
    assert across.read_until == ("read left", "read right")
    pool.give(across, None)  # nobody read it, and what was sent there came after both
    assert pool.take(UNIT).read_until == ()
