"""Slabs, laid out ahead; what they take from the host; and what is said where the host has not so much."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.errors import HostBudgetExceeded, UsageError
from jettison.runtime import offload
from jettison.runtime.device import Slab, StreamDevice, power_of_two, whole_pages
from jettison.runtime.offload import ALIGNMENT_BYTES, PARTS, HostPool, SlabRanges, slabs_for, usable

UNIT = ALIGNMENT_BYTES


class Rounding(StreamDevice):
    """Pins as torch's allocator does, and remembers."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.pinned: list[int] = []
        self.waited: list[object] = []

    def wait(self, stream: object, event: object) -> None:
        self.waited.append(event)

    def pin(self, nbytes: int) -> Slab:
        self.pinned.append(nbytes)
        return Slab(None, self.rounded(nbytes))


def test_a_forward_sends_all_before_anything_comes_back() -> None:
    assert slabs_for([UNIT, 3 * UNIT, 100]) == (5 * UNIT,)
    assert slabs_for([]) == ()


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    memory = SlabRanges(Slab(None, 6 * UNIT))
    assert [memory.take(n * UNIT) for n in (1, 2, 1)] == [0, UNIT, 3 * UNIT]
    memory.give(UNIT)
    assert memory.take(3 * UNIT) is None
    assert memory.take(UNIT + 1) == UNIT
    assert memory.take(2 * UNIT) == 4 * UNIT
    assert memory.take(1) is None


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=10))
def test_a_step_finds_room_in_its_slab(sizes: list[int]) -> None:
    (slab,) = slabs_for(sizes)
    device = Rounding()
    pool = HostPool(device, left=None)
    pool.reserve(slab)
    for _ in range(2):
        spans = [pool.take(n) for n in sizes]
        assert [span.offset % UNIT for span in spans] == [0] * len(sizes)
        assert spans[-1].offset + sizes[-1] <= slab
        for span in reversed(spans):
            pool.give(span, None)
    assert device.pinned == [slab]
    assert (pool.live_bytes, pool.peak_bytes) == (0, sum(sizes))


def test_slabs_take_little_more_than_what_lies_in_them() -> None:
    """TRAPS 22: one slab of 33 MiB, or of 48, takes 64."""
    mib = 1 << 20
    assert slabs_for([mib] * 33, power_of_two) == (32 * mib, mib)
    assert slabs_for([mib] * 48, power_of_two) == (32 * mib, 16 * mib)
    assert slabs_for([3 * mib] * 16, power_of_two) == (32 * mib, 16 * mib, 4 * mib)  # ten, five, one
    assert slabs_for([48 * mib], power_of_two) == (48 * mib,)  # one tensor has one slab
    assert slabs_for([mib] * 33, whole_pages) == (33 * mib,)
    assert slabs_for([mib] * 64, power_of_two) == (64 * mib,)
    assert slabs_for([], power_of_two) == ()


@given(st.lists(st.integers(1, 1 << 16), min_size=1, max_size=12))
def test_a_step_finds_room_in_its_slabs(sizes: list[int]) -> None:
    slabs, (one,) = slabs_for(sizes, power_of_two), slabs_for(sizes)
    assert sum(map(power_of_two, slabs)) <= power_of_two(one)
    device = Rounding()
    pool = HostPool(device, sum(map(power_of_two, slabs)), left=None)
    pool.reserve(*slabs)
    for _ in range(2):
        pool.reserve(*slabs)  # are there
        spans = [pool.take(n) for n in sizes]
        for room in pool._rooms:
            inside = [span for span in spans if span.slab is room.slab]
            ends = [span.offset + span.nbytes for span in inside]
            assert all(end <= after.offset for end, after in zip(ends, inside[1:], strict=False))
            assert max(ends, default=0) <= room.slab.nbytes
        for span in reversed(spans):
            pool.give(span, None)
    assert device.pinned == list(slabs)
    assert pool.real_bytes == sum(map(power_of_two, slabs))


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
    assert taken.slab.nbytes == 16 * UNIT


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
    monkeypatch.setattr(offload, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(offload, "GROUP", tmp_path)
    HostPool(Rounding(), 1 << 40).reserve(1 << 20)
    for budget in (None, 1 << 40):
        with pytest.raises(HostBudgetExceeded, match=r"what this machine has for it is 1\.00 MiB"):
            HostPool(Rounding(), budget).reserve((1 << 20) + 1)


def test_a_machine_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MEMINFO", tmp_path / "nothing")
    with pytest.raises(UsageError, match="give the budget in bytes"):
        HostPool(Rounding()).reserve(1)
    HostPool(Rounding(), 4096).reserve(1)


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="got a host budget of -1 bytes"):
        HostPool(Rounding(), -1)


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
