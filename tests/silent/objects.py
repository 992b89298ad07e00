"""Python objects of many kinds that a block counts in, and whose count its output depends on."""

from __future__ import annotations

import array
import collections
import concurrent.futures
import contextvars
import copy
import csv
import ctypes
import enum
import functools
import heapq
import hmac
import importlib
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import queue
import random
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from typing import Any, ClassVar
from xml.etree import ElementTree

import numpy as np
import pydantic
import pytest
import torch
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import WIDTH, case, program, rows
from silent.outside import smooth, through, under

Counting = tuple[Callable[[], object], Callable[[], float]]
"""What a block does in each call, and a number that depends on how often that was."""
KINDS: dict[str, Callable[[], Counting]] = {}
_GLOBAL = {"n": 0}
_NUMBER = 0


def kind(make: Callable[[], Counting]) -> Callable[[], Counting]:
    KINDS[make.__name__] = make
    return make


def _routed(s: Any, x: Tensor) -> Tensor:
    """A block without a recording, whose Python may run twice."""
    h = torch.tanh(s.a(x))
    chosen = (x[:, 0] > 0).nonzero().squeeze(1)
    return x + s.b(h.index_add(0, chosen, h[chosen].exp()))


def _counts(make: Callable[[], Counting], block: Callable[[Any, Tensor], Tensor]) -> Callable[[], Program]:
    def made() -> Program:
        tick, value = make()

        def run(s: Any, x: Tensor) -> Tensor:
            tick()
            return block(s, x) * (1 + value() / 100)

        return program(run, also=lambda: [float(value())], steps=3)

    return made


def _set(holder: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(holder, name, getattr(holder, name) + 1)


@kind
def attribute_of_a_class() -> Counting:
    class Held:
        n: ClassVar[int] = 0

    return _set(Held, "n"), lambda: Held.n


@kind
def attribute_of_a_metaclass() -> Counting:
    class Meta(type):
        n = 0

    class Held(metaclass=Meta):
        pass

    return lambda: setattr(type(Held), "n", type(Held).n + 1), lambda: type(Held).n


@kind
def dict_of_the_module() -> Counting:
    _GLOBAL["n"] = 0
    held = _GLOBAL.copy()
    return lambda: held.update(n=held["n"] + 1), lambda: held["n"]


@kind
def property_with_a_setter() -> Counting:
    class Held:
        def __init__(self) -> None:
            self._n = 0

        @property
        def n(self) -> int:
            return self._n

        @n.setter
        def n(self, value: int) -> None:
            self._n = value

    held = Held()
    return _set(held, "n"), lambda: held.n


@kind
def descriptor_with_a_table_of_its_own() -> Counting:
    class Count:
        def __init__(self) -> None:
            self.by_id: dict[int, int] = {}

        def __get__(self, held: Any, _owner: Any = None) -> Any:
            return self if held is None else self.by_id.get(id(held), 0)

        def __set__(self, held: Any, value: int) -> None:
            self.by_id[id(held)] = value

    class Held:
        n = Count()

    held = Held()
    return _set(held, "n"), lambda: held.n


@kind
def slots_below_slots() -> Counting:
    class Base:
        __slots__ = ("_n",)

    class Held(Base):
        __slots__ = ("__m",)

        def __init__(self) -> None:
            self._n, self.__m = 0, 0

        def tick(self) -> None:
            self._n += 1
            self.__m += 2

        def value(self) -> int:
            return self._n + self.__m

    held = Held()
    return held.tick, held.value


@kind
def weak_reference() -> Counting:
    class Held:
        n = 0

    held = Held()
    ref = weakref.ref(held)
    return lambda: setattr(ref(), "n", ref().n + 1), lambda h=held: h.n  # type: ignore[misc, union-attr]


@kind
def weak_dictionary() -> Counting:
    class Key:
        pass

    key = Key()
    table: Any = weakref.WeakKeyDictionary({key: 0})
    return lambda: table.__setitem__(key, table[key] + 1), lambda: table[key]


@kind
def proxy_of_an_object() -> Counting:
    held = types.SimpleNamespace(n=0)

    class Held:
        n = 0

    real = Held()
    proxy = weakref.proxy(real)
    held.real = real
    return lambda: setattr(proxy, "n", proxy.n + 1), lambda: held.real.n


@kind
def generator_that_is_sent_to() -> Counting:
    def counting() -> Iterator[int]:
        n = 0
        while True:
            yield n
            n += 1

    given = counting()
    seen = [0]
    return lambda: seen.__setitem__(0, next(given)), lambda: seen[0]


@kind
def iterator_of_an_own_class() -> Counting:
    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.n += 1
            return self.n

    given = Counter()
    return lambda: next(given), lambda: given.n


@kind
def several_iterators_of_one() -> Counting:
    first, second = itertools.tee(itertools.count())
    last = [0]
    return lambda: last.__setitem__(0, next(first) + next(second)), lambda: last[0]


@kind
def local_of_a_thread() -> Counting:
    held = threading.local()
    held.n = 0
    return _set(held, "n"), lambda: held.n


@kind
def context_variable() -> Counting:
    held: Any = contextvars.ContextVar("held", default=0)
    return lambda: held.set(held.get() + 1), lambda: held.get()


@kind
def object_in_a_context_variable() -> Counting:
    held: Any = contextvars.ContextVar("held")
    held.set([0])
    return lambda: held.get().append(1), lambda: len(held.get())


@kind
def handler_of_a_log() -> Counting:
    class Listing(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    log, handler = logging.Logger("silent"), Listing()
    log.addHandler(handler)
    return lambda: log.warning("x"), lambda: len(handler.lines)


@kind
def log_in_a_file() -> Counting:
    path = tempfile.mkstemp()[1]
    log = logging.Logger("silent")
    handler = logging.FileHandler(path)
    log.addHandler(handler)
    weakref.finalize(log, handler.close)
    return lambda: log.warning("x"), lambda: os.path.getsize(path)


@kind
def tree_of_xml() -> Counting:
    held = ElementTree.Element("run")
    return lambda: held.append(ElementTree.Element("step")), lambda: len(held)


@kind
def event_of_processes() -> Counting:
    held = multiprocessing.Event()
    return held.set, lambda: float(held.is_set())


@kind
def deque_that_turns() -> Counting:
    held = collections.deque(range(5), maxlen=5)
    return lambda: held.rotate(1), lambda: held[0]


@kind
def counter() -> Counting:
    held: Any = collections.Counter()
    return lambda: held.update("ab"), lambda: held["a"]


@kind
def default_dict() -> Counting:
    held: Any = collections.defaultdict(lambda: collections.defaultdict(int))
    return lambda: held["a"].__setitem__("b", held["a"]["b"] + 1), lambda: held["a"]["b"]


@kind
def order_of_a_dict() -> Counting:
    held = collections.OrderedDict.fromkeys(range(7))
    return lambda: held.move_to_end(next(iter(held))), lambda: next(iter(held))


@kind
def view_of_a_dict() -> Counting:
    held: dict[int, int] = {}
    items = held.items()
    return lambda: items.mapping is None or held.update({len(items): 1}), lambda: len(items)


@kind
def chain_of_maps() -> Counting:
    held: Any = collections.ChainMap({}, {"n": 0})
    return lambda: held.__setitem__("n", held["n"] + 1), lambda: held["n"]


@kind
def heap() -> Counting:
    held = list(range(20))
    return lambda: heapq.heappop(held), lambda: held[0]


@kind
def array_of_numbers() -> Counting:
    held = array.array("q", [0])
    return lambda: held.append(1), lambda: len(held)


@kind
def bytes_that_grow() -> Counting:
    held = bytearray()
    return lambda: held.extend(b"a"), lambda: len(held)


@kind
def memory_of_several_processes() -> Counting:
    held = shared_memory.SharedMemory(create=True, size=8)
    held.unlink()  # it lives as long as it is mapped
    return lambda: held.buf.__setitem__(0, held.buf[0] + 1), lambda: held.buf[0]


@kind
def generator_of_numpy() -> Counting:
    held, last = np.random.default_rng(3), [0.0]
    return lambda: last.__setitem__(0, held.random()), lambda: last[0]


@kind
def random_of_pythons() -> Counting:
    held, last = random.Random(3), [0.0]
    return lambda: last.__setitem__(0, held.random()), lambda: last[0]


@kind
def generator_of_torch() -> Counting:
    held, last = torch.Generator().manual_seed(3), [0.0]
    return lambda: last.__setitem__(0, held.initial_seed()), lambda: last[0]


@kind
def record_of_numpy() -> Counting:
    held = np.zeros(3, dtype=[("n", "i8"), ("x", "f4")])
    return lambda: held["n"].__setitem__(1, held["n"][1] + 1), lambda: held["n"][1]


@kind
def view_of_an_array() -> Counting:
    held = np.zeros((4, 4))
    part = held[1:, 1:]
    return lambda: part.__iadd__(1), lambda: held[3, 3]


@kind
def array_of_objects() -> Counting:
    held = np.array([[0], None], dtype=object)
    return lambda: held[0].append(1), lambda: len(held[0])


@kind
def variable_of_the_environment() -> Counting:
    os.environ["SILENT_N"] = "0"
    mine = types.SimpleNamespace(n="0")

    def tick() -> None:
        os.environ["SILENT_N"] = mine.n
        mine.n = str(int(os.environ["SILENT_N"]) + 1)

    return tick, lambda: int(mine.n)


@kind
def property_that_is_cached() -> Counting:
    class Held:
        made = 0

        @functools.cached_property
        def once(self) -> int:
            self.made += 1
            return self.made

        def tick(self) -> None:
            _ = self.once
            del self.once

    held = Held()
    return held.tick, lambda: held.made


@kind
def dispatch_by_type() -> Counting:
    held = [0]

    @functools.singledispatch
    def tick(_value: Any) -> None:
        held[0] += 1

    @tick.register
    def _(_value: int) -> None:
        held[0] += 2

    return lambda: tick(1), lambda: held[0]


@kind
def default_of_a_function() -> Counting:
    def tick(seen: list[int] = []) -> int:  # noqa: B006
        seen.append(1)
        return len(seen)

    return tick, lambda: len(tick.__defaults__[0])  # type: ignore[index]


@kind
def default_by_name() -> Counting:
    def tick(*, seen: dict[str, int] = {}) -> None:  # noqa: B006
        seen["n"] = seen.get("n", 0) + 1

    return tick, lambda: tick.__kwdefaults__.get("seen", {}).get("n", 0)  # type: ignore[union-attr]


@kind
def keyword_of_a_partial() -> Counting:
    def tick(held: list[int], more: list[int]) -> None:
        held.append(1)
        more.append(1)

    held: list[int] = []
    bound = functools.partial(tick, held, more=[])
    return bound, lambda: len(held) + len(bound.keywords["more"])


@kind
def dataclass_in_a_tuple() -> Counting:
    @dataclass(slots=True)
    class Inner:
        n: int = 0

    @dataclass(frozen=True)
    class Outer:
        parts: tuple[Inner, ...] = field(default_factory=lambda: (Inner(), Inner()))

    held = Outer()
    return _set(held.parts[1], "n"), lambda: held.parts[1].n


@kind
def member_of_an_enum() -> Counting:
    class Kind(enum.Enum):
        A = "a"

    Kind.A.n = 0  # type: ignore[attr-defined]
    return lambda: setattr(Kind.A, "n", Kind.A.n + 1), lambda: Kind.A.n  # type: ignore[attr-defined]


@kind
def set_of_strings() -> Counting:
    held: set[str] = set()
    return lambda: held.add(str(len(held))), lambda: len(held)


@kind
def subclass_of_a_dict() -> Counting:
    class Held(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            return self.get(key, 0) * 2

    held = Held(n=0)
    return lambda: dict.__setitem__(held, "n", dict.get(held, "n", 0) + 1), lambda: held["n"]


@kind
def subclass_of_a_list_with_attributes() -> Counting:
    class Held(list[int]):
        n = 0

    held = Held()
    return lambda: (held.append(1), setattr(held, "n", held.n + 1)), lambda: held.n + len(held)


@kind
def queue_that_turns() -> Counting:
    held: Any = queue.SimpleQueue()
    for n in (1, 2):
        held.put(n)
    last = [0]

    def tick() -> None:
        last[0] = held.get()
        held.put(last[0] + 1)

    return tick, lambda: last[0]


@kind
def list_in_a_queue() -> Counting:
    held, inside = queue.SimpleQueue(), [0]  # type: ignore[var-annotated]
    held.put(inside)

    def tick() -> None:
        one = held.get()
        one[0] += 1
        held.put(one)

    return tick, lambda: inside[0]


@kind
def seed_that_spawns() -> Counting:
    held, last = np.random.default_rng(3), [0.0]
    return lambda: last.__setitem__(0, held.spawn(1)[0].random()), lambda: last[0]


@kind
def seed_of_a_seed() -> Counting:
    held = np.random.SeedSequence(3)
    return lambda: held.spawn(1), lambda: held.n_children_spawned


@kind
def array_that_grows() -> Counting:
    held = np.zeros(3)

    def tick() -> None:
        held.resize(held.size + 1, refcheck=False)
        held[-1] = 1

    return tick, lambda: held.sum()


@kind
def array_of_another_shape() -> Counting:
    held, last = np.zeros((2, 3)), [0]

    def tick() -> None:
        last[0] = held.shape[0]
        held.resize(held.shape[::-1], refcheck=False)

    return tick, lambda: last[0]


@kind
def array_that_is_read_only_at_times() -> Counting:
    held, last = np.ones(3), [0]

    def tick() -> None:
        last[0] = int(held.flags.writeable)
        held.flags.writeable = not last[0]

    return tick, lambda: last[0]


@kind
def iterator_over_an_array() -> Counting:
    held, last = np.arange(1000.0).flat, [0.0]
    return lambda: last.__setitem__(0, next(held)), lambda: last[0]


@kind
def pointer_to_a_structure() -> Counting:
    class Held(ctypes.Structure):
        _fields_: ClassVar[Any] = [("n", ctypes.c_int)]

    pointer = ctypes.pointer(Held())

    def tick() -> None:
        pointer.contents.n += 1

    return tick, lambda: pointer.contents.n


@kind
def pointer_that_was_cast() -> Counting:
    pointer = ctypes.cast((ctypes.c_int * 4)(), ctypes.POINTER(ctypes.c_int))
    return lambda: pointer.__setitem__(1, pointer[1] + 1), lambda: pointer[1]


@kind
def digest_with_a_key() -> Counting:
    held = hmac.new(b"k", digestmod="md5")
    return lambda: held.update(b"a"), lambda: held.digest()[0]


@kind
def digest_of_a_library() -> Counting:
    held = pytest.importorskip("xxhash").xxh64()
    return lambda: held.update(b"a"), lambda: held.intdigest() % 100


@kind
def rows_of_csv() -> Counting:
    text = io.StringIO()
    held = csv.writer(text)
    return lambda: held.writerow([1, 2]), lambda: len(text.getvalue())


@kind
def rows_in_a_file() -> Counting:
    path = tempfile.mkstemp()[1]
    file = open(path, "w", buffering=1)  # noqa: SIM115
    held = csv.writer(file)

    def tick() -> None:
        held.writerow([1, 2])

    weakref.finalize(tick, file.close)
    return tick, lambda: os.path.getsize(path)


@kind
def rows_of_a_csv_that_is_read() -> Counting:
    held, last = csv.reader(f"{n}" for n in range(1000)), [0]
    return lambda: last.__setitem__(0, int(next(held)[0])), lambda: last[0]


@kind
def text_over_bytes() -> Counting:
    held = io.TextIOWrapper(io.BytesIO(), write_through=True)
    return lambda: held.write("a"), lambda: len(held.buffer.getvalue())  # type: ignore[attr-defined]


@kind
def bytes_of_a_pickler() -> Counting:
    held = io.BytesIO()
    pickler = pickle.Pickler(held)
    return lambda: pickler.dump([1]), lambda: len(held.getvalue())


@kind
def attributes_that_are_exchanged() -> Counting:
    class Holder:
        def __init__(self) -> None:
            self.n = 0

        def tick(self) -> None:
            self.__dict__ = {"n": self.n + 1}

    held = Holder()
    return held.tick, lambda: held.n


@kind
def model_of_pydantic() -> Counting:
    held = _Configuration()

    def tick() -> None:
        held.n += 1
        held.more = held.n
        held._calls += 1
        held.seen.append(held.n)

    return tick, lambda: held.n + getattr(held, "more", 0) + held._calls + len(held.seen)


class _Configuration(pydantic.BaseModel):
    """Each assignment, which is validated, gives it another ``__dict__``."""

    model_config = pydantic.ConfigDict(validate_assignment=True, extra="allow")
    n: int = 0
    seen: list[int] = []
    _calls: int = pydantic.PrivateAttr(default=0)


@kind
def object_that_calls() -> Counting:
    class Held:
        def __init__(self) -> None:
            self.history: list[Any] = []

        def __call__(self) -> None:
            self.history.append(copy.copy(self.history))

    held = Held()
    return held, lambda: len(held.history)


for _name, _make in KINDS.items():
    for _block in (smooth, _routed):
        _made = _counts(_make, _block)
        _made.__name__ = f"{_name}_{_block.__name__.strip('_')}"
        _made.__module__ = __name__
        case(slow=_block is _routed)(_made)


# modules --------------------------------------------------------------------------------------------------------------


@case(works=True)
def cumulative_batch_norm() -> Program:
    return program(lambda s, x: smooth(s, s.n(x)), lambda s, _i: setattr(s, "n", nn.BatchNorm1d(WIDTH, momentum=None)))


@case(works=True)
def spectral_norm_of_a_block() -> Program:
    def init(s: Any, _i: int) -> None:
        s.a = nn.utils.parametrizations.spectral_norm(s.a)

    return program(smooth, init)


@case(works=True)
def spectral_norm_of_old() -> Program:
    def init(s: Any, _i: int) -> None:
        s.a = nn.utils.spectral_norm(s.a)

    return program(_routed, init)


@case()
def default_dtype_set_in_a_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.n += 1
        torch.set_default_dtype(torch.float64 if s.n % 2 else torch.float32)
        y = smooth(s, x) * torch.ones(()).to(x.dtype)
        torch.set_default_dtype(torch.float32)
        return y

    return program(run, lambda s, _i: setattr(s, "n", 0))


@case()
def table_of_pandas() -> Program:
    pandas = pytest.importorskip("pandas")
    held = pandas.DataFrame({"n": [0.0, 0.0], "name": ["a", "b"]})

    def run(s: Any, x: Tensor) -> Tensor:
        held.loc[1, "n"] += 1
        return smooth(s, x) * (1 + float(held.loc[1, "n"]) / 100)

    return program(run, also=lambda: [float(held.loc[1, "n"])])


@case()
def table_of_pandas_that_gains_a_column_and_loses_a_row() -> Program:
    def init(s: Any, _i: int) -> None:
        s.table = pytest.importorskip("pandas").DataFrame({"n": [1.0, 2.0, 3.0]})

    def run(s: Any, x: Tensor) -> Tensor:
        s.table["m"] = s.table["n"] * 2
        if len(s.table) > 2:
            s.table.drop(index=s.table.index[-1], inplace=True)
        return _routed(s, x) * (1 + len(s.table) / 100)

    made = program(run, init)
    made.also = lambda: [[float(len(s.table._mgr.blocks) + s.table.sum().sum()) for s in made.model.layers]]
    return made


@case()
def average_of_weights_inside_the_forward() -> Program:
    def root(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, p in zip(net.kept, net.parameters(), strict=False):
                kept.numpy()[...] = 0.9 * kept.numpy() + 0.1 * p.detach().numpy()
        return through(net, x) * (1 + sum(k.mean() for k in net.kept))

    made = under(root, smooth, batch=lambda i: (rows(i),))
    made.model.kept = [p.detach().clone() for p in made.model.parameters()]
    return made


_LOCKED: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], int]]] = {
    "event": (threading.Event, lambda held: held.clear() if held.is_set() else held.set(), lambda held: held.is_set()),
    "semaphore": (lambda: threading.Semaphore(1000), lambda held: held.acquire(), lambda held: held._value),
}


@case(works=True)
def block_that_holds_a_lock() -> Program:
    def init(s: Any, _i: int) -> None:
        s.lock, s.n, s.log = threading.Lock(), 0, []
        s.held = {name: make() for name, (make, _, _) in _LOCKED.items()}

    def run(s: Any, x: Tensor) -> Tensor:
        with s.lock:
            s.n += 1
        s.log.append(1)
        for name, (_, use, _) in _LOCKED.items():
            use(s.held[name])
        return smooth(s, x)

    made = program(run, init)
    made.also = lambda: [
        [float(s.n), float(len(s.log)), *(float(read(s.held[name])) for name, (_, _, read) in _LOCKED.items())]
        for s in made.model.layers
    ]
    return made


@case(works=True)
def buffer_that_a_block_replaces() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.mean = s.mean * 0.9 + x.detach().mean(0)
        return _routed(s, x) * (1 + 0.01 * s.mean)

    return program(run, lambda s, _i: s.register_buffer("mean", torch.zeros(WIDTH)))


@case(works=True)
def buffer_that_a_block_without_a_recording_writes_to_by_numpy() -> Program:
    def init(s: Any, _i: int) -> None:
        s.register_buffer("mean", torch.zeros(WIDTH))
        s.view = s.mean.numpy()

    def run(s: Any, x: Tensor) -> Tensor:
        s.view += 1
        return _routed(s, x) * (1 + 0.01 * s.mean)

    return program(run, init)


@case(works=True, slow=True)
def module_that_a_forward_imports() -> Program:
    """A warm-up that is counted in a module of code, whose first import is in the forward."""
    folder = tempfile.mkdtemp()
    name = f"warm_up_{next(_NUMBERS)}"
    with open(os.path.join(folder, f"{name}.py"), "w") as file:
        file.write(
            "import torch\nCALLS, SEEN, MEAN = 0, [], torch.zeros(())\n"
            "def beta(x):\n    global CALLS, MEAN\n    CALLS += 1\n    SEEN.append(CALLS)\n"
            "    MEAN = 0.9 * MEAN + 0.1 * x.detach().mean()\n"
            "    return (0.1 if CALLS <= 4 else 1.0) + MEAN\n"
        )

    def run(s: Any, x: Tensor) -> Tensor:
        sys.path.insert(0, folder)
        try:
            beta = importlib.import_module(name).beta
        finally:
            sys.path.remove(folder)
        return smooth(s, x) * beta(x)

    def seen() -> list[float]:
        module = sys.modules.get(name)
        return [0.0, 0.0, 0.0] if module is None else [float(module.CALLS), float(len(module.SEEN)), float(module.MEAN)]

    return program(run, also=seen)


_NUMBERS = itertools.count()


@case()
def value_that_a_thread_reads() -> Program:
    """Modes are a thread's own: planning sees nothing of what another thread does."""
    workers = concurrent.futures.ThreadPoolExecutor(1)

    def run(s: Any, x: Tensor) -> Tensor:
        given = x.detach()
        return smooth(s, x) * (1 + workers.submit(lambda: given.mean().item()).result())

    made = program(run, steps=2)
    weakref.finalize(made.model, workers.shutdown, wait=False)
    return made


@case(works=True)
def list_of_the_batch_that_is_popped() -> Program:
    def root(net: Any, x: Tensor, meta: dict[str, list[float]]) -> Tensor:
        meta["seen"].append(1.0)
        return through(net, x) * meta["scales"].pop()

    return under(root, smooth, batch=lambda i: (rows(i), {"scales": [1.0, 0.5, 2.0], "seen": []}))


@case(works=True)
def tensor_class_that_counts_what_it_is_asked() -> Program:
    class Told(Tensor):
        asked: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.asked.append(func.__name__)
            return super().__torch_function__(func, kinds, args, kwargs or {})

    def init(s: Any, _i: int) -> None:
        s.told = torch.ones(WIDTH).as_subclass(Told)

    def run(s: Any, x: Tensor) -> Tensor:
        return smooth(s, x) * (1 + (x.detach() * s.told).sum().as_subclass(Tensor) * 1e-3)

    made = program(run, init, steps=2)
    made.also = lambda: [float(len(Told.asked))]
    return made
