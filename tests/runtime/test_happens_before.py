"""Schedules with races that other people's engines had, each told from the one that mends it; and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from support.happens_before import Bytes, HappensBefore

A, CLONE, POOL, BACK = Bytes("activation"), Bytes("clone"), Bytes("pinned"), Bytes("reloaded")
COMPUTE, OUT, IN, SIDE = "compute", "out", "in", "side"


class Schedule(HappensBefore):
    """In the words that engines are written in."""

    def after(self, stream: str, other: str) -> None:
        """``stream.wait_stream(other)``."""
        self.wait(stream, self.record(other))

    def op(self, stream: str, what: str, reads: Bytes | None = None, writes: Bytes | None = None) -> None:
        """One kernel or copy."""
        self.run(stream, what, reads=[reads] if reads else [], writes=[writes] if writes else [])


def megatron_7398(s: Schedule, mended: bool) -> None:
    """NVIDIA/Megatron-LM#7398: an unpack that beats its prefetch copies back where it is, and waits for nothing."""
    s.op(COMPUTE, "forward", writes=A)
    s.after(OUT, COMPUTE)
    s.op(OUT, "copy out", reads=A, writes=POOL)
    offloaded = s.record(OUT)
    if mended:
        s.wait(COMPUTE, offloaded)
    s.op(COMPUTE, "inline reload", reads=POOL, writes=BACK)
    s.op(COMPUTE, "backward", reads=BACK)


def trl_7195_stream(s: Schedule, mended: bool) -> None:
    """huggingface/trl#7195, first: the compute stream is remembered from the start, and ops run in another one."""
    s.op(SIDE, "forward", writes=A)
    s.after(OUT, SIDE if mended else COMPUTE)
    s.op(OUT, "copy out", reads=A, writes=POOL)


def trl_7195_clone(s: Schedule, mended: bool) -> None:
    """huggingface/trl#7195, second: cloned in the transfer stream, read where backward runs."""
    s.op(COMPUTE, "forward", writes=A)
    if mended:
        s.op(COMPUTE, "clone", reads=A, writes=CLONE)
    s.after(OUT, COMPUTE)
    if not mended:
        s.op(OUT, "clone", reads=A, writes=CLONE)
    s.op(OUT, "copy out", reads=CLONE, writes=POOL)
    s.op(COMPUTE, "backward takes the stash", reads=CLONE)


def axolotl_3833(s: Schedule, mended: bool) -> None:
    """axolotl#3833: the clone lies in the transfer stream's memory; freed, the next copy back lands there."""
    maker = COMPUTE if mended else OUT
    s.op(COMPUTE, "forward", writes=A)
    s.after(OUT, COMPUTE)
    s.op(maker, "clone", reads=A, writes=CLONE)
    s.after(OUT, maker)
    s.op(OUT, "copy out", reads=CLONE, writes=POOL)
    s.after(COMPUTE, OUT)
    s.op(COMPUTE, "backward takes the stash", reads=CLONE)
    s.free(maker, CLONE.block, 1)


def torchtitan_2581(s: Schedule, mended: bool) -> None:
    """torchtitan#2581: within ``with stream(s)`` the current stream is ``s``: it waits for itself, and the next step's
    copy out lands on what the last step's copy back still reads.
    """
    s.op(COMPUTE, "forward", writes=A)
    s.after(OUT, COMPUTE)
    s.op(OUT, "copy out", reads=A, writes=POOL)
    s.after(IN, OUT)
    s.op(IN, "copy back", reads=POOL, writes=BACK)
    s.after(COMPUTE, IN)
    s.op(COMPUTE, "backward", reads=BACK)
    s.op(COMPUTE, "forward of the next step", writes=CLONE)
    s.after(OUT, COMPUTE if mended else OUT)
    s.op(OUT, "copy out of the next step", reads=CLONE, writes=POOL)


def early_reuse(s: Schedule, mended: bool) -> None:
    """meta-pytorch/torchtune#1867: nothing holds the source, and the allocator hands it to the next op."""
    s.op(COMPUTE, "forward", writes=A)
    s.after(OUT, COMPUTE)
    s.op(OUT, "copy out", reads=A, writes=POOL)
    if mended:
        s.after(COMPUTE, OUT)
    s.free(COMPUTE, A.block, 1)


def late_reload(s: Schedule, mended: bool) -> None:
    """A buffer that is allocated in the compute stream may still be in use there when its copy begins."""
    s.op(COMPUTE, "an op before the allocation", writes=BACK)
    if mended:
        s.after(IN, COMPUTE)
    s.op(IN, "copy back", reads=POOL, writes=BACK)


PUBLISHED: list[Callable[[Schedule, bool], None]] = [
    megatron_7398,
    trl_7195_stream,
    trl_7195_clone,
    axolotl_3833,
    torchtitan_2581,
    early_reuse,
    late_reload,
]


@pytest.mark.parametrize("schedule", PUBLISHED, ids=lambda f: f.__name__)
def test_published_races_are_rejected(schedule: Callable[[Schedule, bool], None]) -> None:
    broken, mended = Schedule(), Schedule()
    schedule(broken, False)
    schedule(mended, True)
    assert broken.races
    assert "is not ordered after" in str(broken.races[0])
    assert not mended.races


def test_what_a_race_is_called() -> None:
    s = Schedule()
    megatron_7398(s, False)
    assert str(s.races[0]) == "inline reload (compute) is not ordered after copy out (out), and uses the same memory"


def test_ranges_that_share_no_byte_do_not_race() -> None:
    s = Schedule()
    s.op(OUT, "left", writes=Bytes("slab", 0, 512))
    s.op(IN, "right", writes=Bytes("slab", 512, 1024))
    assert not s.races
    s.op(IN, "across", reads=Bytes("slab", 500, 513))
    assert [race.earlier.what for race in s.races] == ["left"]


def test_reads_do_not_race_with_reads() -> None:
    s = Schedule()
    s.op(COMPUTE, "write", writes=A)
    for stream in (OUT, IN):
        s.after(stream, COMPUTE)
        s.op(stream, "read", reads=A)
    assert not s.races
    s.after(COMPUTE, OUT)
    s.op(COMPUTE, "write again", writes=A)
    assert [race.earlier.stream for race in s.races] == [IN]


def test_order_is_transitive_and_by_event_not_by_stream() -> None:
    s = Schedule()
    s.op(COMPUTE, "write", writes=A)
    s.after(OUT, COMPUTE)
    early = s.record(OUT)
    s.op(OUT, "more", writes=POOL)
    s.wait(IN, early)
    s.op(IN, "read what compute wrote", reads=A)
    assert not s.races
    s.op(IN, "read what out wrote after the event", reads=POOL)
    assert len(s.races) == 1


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_agree_with_reachability(seed: int) -> None:
    """Vector clocks against the definition: a path of edges between two ops."""
    chance = random.Random(seed)
    s = HappensBefore()
    streams, blocks = ["a", "b", "c"], ["x", "y"]
    ops: list[tuple[str, str, bool]] = []
    last: dict[str, set[int]] = {stream: set() for stream in streams}
    events: list[tuple[dict[str, int], set[int]]] = []
    wrong = set()
    for _ in range(120):
        stream = chance.choice(streams)
        kind = chance.random()
        if kind < 0.2:
            events.append((s.record(stream), set(last[stream])))
        elif kind < 0.5 and events:
            clock, past = chance.choice(events)
            s.wait(stream, clock)
            last[stream] |= past
        else:
            block, writes = chance.choice(blocks), chance.random() < 0.4
            where = [Bytes(block)]
            number = len(ops)
            s.run(stream, str(number), writes=where if writes else [], reads=[] if writes else where)
            for other, (_, b, w) in enumerate(ops):
                if b == block and (w or writes) and other not in last[stream]:
                    wrong.add((number, other))
            ops.append((stream, block, writes))
            last[stream].add(number)
    found = {(int(race.later.what), int(race.earlier.what)) for race in s.races}
    assert found <= wrong
    # of what an op races with the last writes are told, and behind the first race order means nothing
    assert min((later for later, _ in found), default=None) == min((later for later, _ in wrong), default=None)
