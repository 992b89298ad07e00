"""State that C keeps: seen, put back, or out of reach before it moves; and large containers, looked into in C."""

from __future__ import annotations

import bz2
import collections
import contextlib
import contextvars
import csv
import ctypes
import datetime
import decimal
import fractions
import functools
import io
import itertools
import logging
import mmap
import multiprocessing
import operator
import pickle
import queue
import random
import re
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._prims.rng_prims import run_and_save_rng_state

from jettison.capture.bytecode_names import is_foreign
from jettison.capture.isolation import WritesUndone, leaving_nothing
from jettison.capture.module_guards import MOST_ITEMS, ModuleGuard
from jettison.capture.reachable_state import MANY, Reach
from jettison.capture.state_kinds import CacheState, Untouchable, stand_in, state_of, worth_a_look
from jettison.core.errors import UnsupportedModule
from jettison.dryrun.counter import AllocationCounter

# lru_cache ------------------------------------------------------------------------------------------------------------


def _cached(maxsize: int | None, *, typed: bool) -> Any:
    offset = 3

    @functools.lru_cache(maxsize=maxsize, typed=typed)
    def cached(*args: Any, **kwargs: Any) -> list[Any]:
        return [offset, args, kwargs]

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((1,), {}), (("a",), {}), ((1.5,), {"k": 2})]
    calls += [((1, 2), {"z": 3, "y": 4}), ((1,), {}), (((1, 2),), {}), ((), {}), ((), {})]
    for args, kwargs in calls:
        cached(*args, **kwargs)
    return cached


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("maxsize", [None, 0, 1, 2, 5, 100])
def test_a_cache_is_what_it_was(maxsize: int | None, typed: bool) -> None:
    """Keys, the very results, and which of them is the oldest; whether or not it was full."""
    cached = _cached(maxsize, typed=typed)
    before, info, entries = CacheState(cached), cached.cache_info(), CacheState(cached).entries()
    for call in (lambda: cached(9), lambda: cached(1), lambda: cached(8, r=3), lambda: cached()):
        call()
    before.put_back()
    after = CacheState(cached).entries()
    assert cached.cache_info().currsize == info.currsize
    assert len(after) == info.currsize
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(after, entries, strict=True))
    assert cached(77) == [3, (77,), {}]  # and it runs its own code


def test_a_cache_of_what_c_runs_says_what_it_forgot() -> None:
    cached: Any = functools.lru_cache(2)(max)
    cached(1, 2)
    before = CacheState(cached)
    cached(3, 4)
    before.put_back()
    assert cached.cache_info().currsize == 1
    cached(3, 4)
    full = CacheState(cached)
    cached(5, 6)
    with pytest.raises(UnsupportedModule, match="lru_cache"):
        full.put_back()


# memory, contexts, texts ----------------------------------------------------------------------------------------------


def _poke(holder: Any) -> None:
    with memoryview(holder) as view, view.cast("B") as flat:
        flat[0] ^= 1


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "a number of ctypes": (lambda: ctypes.c_int(3), _poke),
    "a text of ctypes": (lambda: ctypes.create_string_buffer(8), _poke),
    "a shared value": (lambda: multiprocessing.Value("i", 1).get_obj(), _poke),
    "a shared array": (lambda: multiprocessing.RawArray("i", 3), _poke),
    "a map": (lambda: mmap.mmap(-1, 16), _poke),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_c_keeps_is_put_back(kind: str) -> None:
    make, move = KEPT[kind]
    holder = make()
    state = state_of(holder)
    assert state is not None and state.is_unchanged()
    move(holder)
    assert not state.is_unchanged()
    state.put_back()
    assert state.is_unchanged()


def test_a_tensor_of_another_size_gets_back_its_memory() -> None:
    held = torch.arange(4.0)
    with WritesUndone():
        held.resize_(100).fill_(1)
    assert held.untyped_storage().nbytes() == 16
    assert held.tolist() == [0, 1, 2, 3]


def test_memory_that_a_tensor_gave_to_numpy_is_put_back_while_other_threads_begin_and_end() -> None:
    inside, go_on, held = threading.Event(), threading.Event(), [torch.zeros(4), torch.zeros(4)]
    own = vars(Tensor).copy()

    def first() -> None:
        with WritesUndone():
            inside.set()
            go_on.wait()
        inside.set()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    inside.clear()
    with WritesUndone():
        held[0].numpy()[:] = 1
        go_on.set()
        inside.wait()
        held[1].numpy()[:] = 1
    thread.join()
    assert not any(tensor.any() for tensor in held)
    assert vars(Tensor) == own


def test_what_a_table_of_pandas_holds_in_c_goes_with_what_it_holds_in_lists() -> None:
    held = pytest.importorskip("pandas").DataFrame({"n": [1.0, 2.0, 3.0]})
    before = held.copy(deep=True)
    with leaving_nothing([], [[held]]):
        held["m"] = held["n"] * 2
        held.loc[1, "n"] = 5
    assert len(held._mgr.blocks) == len(held.columns) == 1
    assert held.equals(before)


USED = {
    "rows": lambda: csv.reader([]),
    "pickle": lambda: pickle.Pickler(io.BytesIO()),
    "bz2": bz2.BZ2Compressor,
    "stream": lambda: pytest.importorskip("pyarrow").BufferOutputStream(),
    "queue": queue.SimpleQueue,
    "queue of Python's": queue.Queue,
    "semaphore": multiprocessing.Semaphore,
    "event of processes": multiprocessing.Event,
}
LEFT = {
    "random": lambda: random.Random(3),
    "numbers": lambda: np.random.default_rng(3),
    "lock": threading.Lock,
    "pattern": lambda: re.compile("a"),
    "struct": lambda: struct.Struct("i"),
    "turns": lambda: collections.deque(),
    "number": lambda: decimal.Decimal(1),
    "day": lambda: datetime.date(2026, 1, 1),
    "path": lambda: Path("."),
    "variable": lambda: contextvars.ContextVar("a"),
    "getter": lambda: operator.itemgetter(1),
    "memory": lambda: ctypes.c_int(1),
    "array": lambda: np.zeros(3),
    "kind": lambda: np.dtype("f4"),
    "generator": torch.Generator,
    "lru": lambda: functools.lru_cache(len),
    "log": lambda: logging.getLogger("a"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "tree": lambda: ElementTree.Element("a"),
    "text": lambda: io.StringIO("a"),
    "set": set,
    "csv": lambda: csv.writer(io.StringIO()),
    "over bytes": lambda: io.TextIOWrapper(io.BytesIO()),
}


@pytest.mark.parametrize("kind", [*USED, *LEFT])
def test_only_what_moves_and_refuses_a_copy_is_out_of_reach(kind: str) -> None:
    made = stand_in({**USED, **LEFT}[kind]())
    assert (type(made) is Untouchable) == (kind in USED)


# set aside ------------------------------------------------------------------------------------------------------------

ITERATORS: list[Callable[[], Any]] = [
    lambda: itertools.count(3),
    lambda: itertools.cycle([1, 2, 3]),
    lambda: iter([1, 2, 3]),
    lambda: iter({1: 2, 3: 4}),
    lambda: zip([1, 2], [3, 4], strict=False),
    lambda: map(str, [1, 2]),
    lambda: enumerate("abc"),
    lambda: itertools.chain([1], [2], [3]),
    lambda: itertools.islice([1, 2, 3], 2),
    lambda: itertools.accumulate([1, 2, 3]),
]


@pytest.mark.parametrize("make", ITERATORS)
def test_a_run_takes_from_a_copy(make: Callable[[], Any]) -> None:
    """And the copy is as far as the iterator, which does not move."""
    iterator = make()
    next(iterator)
    copied = stand_in(iterator)
    taken = [next(copied, None) for _ in range(2)]
    assert taken == [next(iterator, None) for _ in range(2)]


def test_what_cannot_be_copied_refuses_before_it_moves() -> None:
    module = nn.Linear(2, 2)
    module.held = held = (n for n in range(3))
    with pytest.raises(UnsupportedModule, match="has not been touched"), leaving_nothing([module]):
        next(module.held)
    assert module.held is held
    assert next(held) == 0


def test_a_queue_of_another_thread_is_refused() -> None:
    """As that of a writer of logs: what a run puts there is under way at once, and whoever waits for more must not be
    forgotten.
    """
    module = nn.Linear(2, 2)
    module.rows = queue.Queue()
    got: list[int] = []

    def take() -> None:
        while (one := module.rows.get()) is not None:
            got.append(one)
            module.rows.task_done()

    thread = threading.Thread(target=take)
    thread.start()
    with (
        pytest.raises(UnsupportedModule, match=r"a queue\.Queue.*has not been touched"),
        leaving_nothing([module]),
        contextlib.suppress(Exception),
    ):
        module.rows.put(1)
    module.rows.put(2)
    module.rows.join()
    module.rows.put(None)
    thread.join()
    assert got == [2]


def test_views_of_a_large_array_can_be_written_to_again() -> None:
    """Found in any order: no view can be made so before what it views."""
    module = nn.Linear(2, 2)
    rows = np.zeros(3_000_000)
    module.first, module.rows, module.last = rows[:-1], rows, rows[1:]
    with leaving_nothing([module]):
        for held in (module.first, module.rows, module.last):
            assert not held.flags.writeable
    assert module.first.flags.writeable and module.rows.flags.writeable and module.last.flags.writeable


def test_an_array_that_is_too_large_is_refused_once() -> None:
    """A recording runs inside of the planning that undoes it: the message of the first is the message."""
    module, copied = nn.Linear(2, 2), nn.Linear(2, 2)
    module.rows, copied.rows = np.zeros(3_000_000), np.zeros(3_000_000)
    with (
        pytest.raises(UnsupportedModule, match=r"arrays of 24000000 bytes.*write to a copy") as caught,
        leaving_nothing([copied]),
        leaving_nothing([module]),
    ):
        module.rows[0] = 1
    assert str(caught.value).count("write to a copy") == 1
    assert module.rows.flags.writeable and module.rows[0] == 0


def test_defaults_of_a_function_that_are_replaced_go_back() -> None:
    def counts(first: int = 0, *, n: int = 0) -> None:
        counts.__defaults__, counts.__kwdefaults__ = (first + 1,), {"n": n + 1}

    def none_so_far(first: int) -> int:
        none_so_far.__defaults__ = (first,)
        return first

    module = nn.Linear(2, 2)
    module.functions = [counts, none_so_far]
    keywords = counts.__kwdefaults__
    with leaving_nothing([module]):
        counts()
        none_so_far(1)
        assert (counts.__defaults__, counts.__kwdefaults__, none_so_far.__defaults__) == ((1,), {"n": 1}, (1,))
    assert counts.__defaults__ == (0,) and counts.__kwdefaults__ is keywords == {"n": 0}
    assert none_so_far.__defaults__ is None


def test_what_refuses_keeps_nothing_else_from_going_back() -> None:
    module = nn.Linear(2, 2)
    module.next, module.seen = iter([1]), [1]
    reach = Reach([module])
    next(module.next)
    module.seen.append(2)
    with pytest.raises(UnsupportedModule, match="takes from a list_iterator"):
        reach.restore()
    assert module.seen == [1]


def test_a_process_is_refused() -> None:
    module = nn.Linear(2, 2)
    with subprocess.Popen([sys.executable, "-c", ""]) as module.child:
        with pytest.raises(UnsupportedModule, match="has not been touched"), leaving_nothing([module]):
            module.child.poll()
        assert module.child.returncode is None


def test_an_operator_of_higher_order_is_one_op() -> None:
    """A function that was compiled has them for random states, FlexAttention for itself."""
    x = torch.ones(1000)
    with WritesUndone():
        run_and_save_rng_state(torch.ops.aten.bernoulli.p, x, 0.5)
    with AllocationCounter([x]) as counter:
        state, drawn = run_and_save_rng_state(torch.ops.aten.bernoulli.p, x, 0.5)
    assert counter.live_bytes == x.nbytes + state.nbytes + drawn.nbytes


def test_a_thread_that_waits_is_not_forgotten() -> None:
    module = nn.Linear(2, 2)
    module.ask, answered = threading.Event(), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(2):
            module.ask.wait()
            module.ask.clear()
            answered.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with leaving_nothing([module]):
        module.ask.set()
        assert answered.acquire(timeout=60)
    module.ask.set()
    assert answered.acquire(timeout=60)
    thread.join()


def test_a_thread_goes_on_with_what_is_refused_here() -> None:
    held = Untouchable("list", [3])
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(held.pop()))
    thread.start()
    thread.join()
    assert got == [3]
    with pytest.raises(UnsupportedModule, match="has not been touched"):
        held.pop()


def _entries() -> dict[str, tuple[Any, Callable[[Any], object], Callable[[Any], object]]]:
    """Objects of libraries that C alone knows, a change to each, and what they have."""
    tokenizers, multidict = pytest.importorskip("tokenizers"), pytest.importorskip("multidict")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}))
    text = io.StringIO("a")
    text.seek(1)
    return {
        "text": (text, lambda one: one.write("b"), lambda one: (one.getvalue(), one.tell())),
        "decimal": (decimal.Context(prec=9), lambda one: setattr(one, "prec", 3), lambda one: one.prec),
        "tree": (ElementTree.Element("a"), lambda tree: ElementTree.SubElement(tree, "b"), ElementTree.tostring),
        "words": (words, lambda one: one.add_tokens(["b"]), lambda one: one.get_vocab_size()),
        "table": (multidict.MultiDict(), lambda table: table.add("b", 1), lambda table: list(table.items())),
    }


@pytest.mark.parametrize("kind", ["text", "decimal", "tree", "words", "table"])
def test_a_run_changes_a_copy_of_what_c_alone_knows(kind: str) -> None:
    held, change, look = _entries()[kind]
    module = nn.Linear(2, 2)
    module.held, before = held, look(held)
    with leaving_nothing([module]):
        change(module.held)
        assert look(module.held) != before
    assert module.held is held and look(held) == before


def test_a_file_gets_nothing(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with (tmp_path / "log").open("w") as module.log:
        module.log.write("a")
        with leaving_nothing([module]):
            module.log.write("b")
            module.log.flush()
        module.log.write("c")
    assert (tmp_path / "log").read_text() == "ac"
    assert not isinstance(module.log, Untouchable)


# large containers -----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, entries: int) -> None:
        super().__init__()
        self.unnamed = [[i] for i in range(entries)]
        self.looked_at = [(i, (str(i), (i, 2.0))) for i in range(entries)]

    def forward(self) -> Any:
        return self.looked_at[0]


class Dynamic(Holder):
    def forward(self) -> Any:
        return getattr(self, "un" + "named")[0]


def test_values_that_cannot_change_are_not_looked_at_one_by_one() -> None:
    inner: list[int] = []
    assert worth_a_look([1, "a", (2, (3.0, None)), frozenset((1, (2,)))]) == []
    assert worth_a_look([1, ((inner,), 2)]) == [inner]
    assert Reach([Holder(MANY * 8)]).values < 100


def test_an_attribute_that_no_code_names_is_looked_at_where_names_are_made_up() -> None:
    few, many = Reach([Dynamic(4)]).values, Reach([Dynamic(MANY * 2)]).values
    assert many - few > MANY
    module = Dynamic(MANY * 2)
    with leaving_nothing([module]):
        module()[0] = 5
    assert module.unnamed[0] == [0]


def test_a_walk_knows_large_containers_of_the_one_before() -> None:
    module, known = Holder(MANY * 2), {}  # type: ignore[var-annotated]
    Reach([module], known=known)
    looked_at = id(module.looked_at)  # others may be known: torch keeps large containers after it has compiled
    first = known[looked_at]
    Reach([module], known=known)
    assert known[looked_at] is first
    module.looked_at[3] = (0, ("", (0, 0.0)))
    Reach([module], known=known)
    assert known[looked_at] is not first
    module.looked_at = []
    Reach([module], known=known)
    assert looked_at not in known


def test_a_guard_looks_at_the_length_of_a_long_list_alone() -> None:
    module = Holder(MOST_ITEMS + 1)
    guard = ModuleGuard(module)
    assert not any(len(sequence) for sequence, _ in guard.sequences)
    module.unnamed.append([1])
    assert not guard.holds()


# packages -------------------------------------------------------------------------------------------------------------


def test_where_the_code_lies_decides_whose_a_package_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two packages with one name, and of Python's own, the installed ones are no model's."""
    for name in ("datasets", "token", "yaml"):
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / name / "__init__.py")
        monkeypatch.setitem(sys.modules, name, module)
        assert not is_foreign(name) and not is_foreign(f"{name}.part")
    monkeypatch.undo()
    assert all(
        map(is_foreign, ("torch.nn", "numpy", "jettison.capture", "itertools", "sys", "json", "packaging.version"))
    )
    assert not is_foreign("curriculum")
