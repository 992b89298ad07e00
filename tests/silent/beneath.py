"""State that planning and recording must leave alone, where no table of Python's and no op tells of a write."""

from __future__ import annotations

import ctypes
import decimal
import functools
import hashlib
import io
import itertools
import logging
import mmap
import multiprocessing
import queue
import random
import sqlite3
import sys
import tempfile
import threading
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from silent.harness import Program
from silent.kit import ROWS, WIDTH, case, program, rows
from silent.outside import _ticking, smooth, through, under

LARGE = 2000
"""Numbers in an array that is above what is copied in any case (4,096 bytes)."""


def _routed(s: Any, x: Tensor) -> Tensor:
    """A block without a recording, whose Python may run twice."""
    h = torch.tanh(s.a(x))
    chosen = (x[:, 0] > 0).nonzero().squeeze(1)
    return x + s.b(h.index_add(0, chosen, h[chosen].exp()))


# NumPy ----------------------------------------------------------------------------------------------------------------


@case()
def numpy_counts_in_a_large_buffer() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        s.used.numpy()[0] += 1
        return _routed(s, x)

    return program(run, lambda s, _i: s.register_buffer("used", torch.zeros(LARGE)))


@case()
def numpy_counts_in_a_large_tensor_of_a_closure() -> Program:
    held = torch.zeros(LARGE)

    def tick() -> None:
        np.asarray(held)[0] += 1

    return _ticking(tick, lambda: float(held[0]))


@case()
def numpy_counts_in_a_large_buffer_only_later() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        y = _routed(s, x)
        if s.step >= 2:
            s.used.numpy()[:] += 1
        return y * (1 + s.used[0])

    def init(s: Any, _i: int) -> None:
        s.step = 0
        s.register_buffer("used", torch.zeros(LARGE))

    made = program(run, init)

    def batch(i: int) -> Any:
        for layer in made.model.layers:
            layer.step = i
        return (rows(i),)

    made.batch = batch
    return made


@case()
def numpy_masks_the_batch() -> Program:
    made: dict[int, Tensor] = {}

    def root(net: Any, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x.numpy()[:, 0] *= 0.5
        return through(net, x)

    return under(root, smooth, batch=lambda i: (made.setdefault(i, rows(i, n=ROWS * 2)),))


@case()
def numpy_masks_ids_of_the_batch() -> Program:
    made: dict[int, Tensor] = {}

    def run(s: Any, x: Tensor, ids: Tensor) -> Tensor:
        ids.numpy()[::2] += 1
        return smooth(s, x)

    def batch(i: int) -> Any:
        return rows(i), made.setdefault(i, torch.arange(LARGE))

    return program(run, None, batch, also=lambda: [t.tolist()[:4] for t in made.values()])


@case(works=True)
def numpy_reads_a_large_table() -> Program:
    table = torch.linspace(0, 1, LARGE)

    def run(s: Any, x: Tensor) -> Tensor:
        return _routed(s, x) * float(table.numpy()[s.i])

    def init(s: Any, i: int) -> None:
        s.i = i

    return program(run, init)


@case()
def counts_in_an_array_too_large_to_copy() -> Program:
    held = np.zeros(1 << 22)

    def tick() -> None:
        held[5] += 1

    return _ticking(tick, lambda: float(held[5]))


def _torch_of(held: np.ndarray) -> tuple[Tensor, Any]:
    return torch.from_numpy(held), held


LENT: dict[str, Callable[[int], tuple[Tensor, Any]]] = {
    "numpy": lambda n: (held := torch.zeros(n), held.numpy()),
    "slice": lambda n: (held := torch.zeros(n), held.numpy()[:WIDTH]),
    "dlpack": lambda n: (held := torch.zeros(n), np.from_dlpack(held)),
    "view": lambda n: (held := torch.zeros(n), memoryview(held.numpy())),
    "from_numpy": lambda n: _torch_of(np.zeros(n, dtype=np.float32)),
}
"""A tensor, and what NumPy writes to in its memory."""


def _lent(lend: Callable[[int], tuple[Tensor, Any]], n: int, block: Any, *, buffer: bool, held: str) -> Program:
    """Blocks that read a tensor, and then write to it by an array that was made before planning."""
    others: dict[int, Any] = {}

    def init(s: Any, i: int) -> None:
        tensor, array = lend(n)
        if buffer:
            s.register_buffer("used", tensor)
        else:
            s.used = tensor
        s.i, s.held = i, [array] if held == "list" else array if held == "attribute" else None
        others[i] = array

    def run(s: Any, x: Tensor) -> Tensor:
        y = block(s, x) * (1 + s.used[:WIDTH].mean())
        array = others[s.i] if s.held is None else s.held[0] if isinstance(s.held, list) else s.held
        array[0] += 1
        return y

    return program(run, init, also=lambda: [float(array[0]) for array in others.values()], steps=3)


_LENT = [
    *((name, LARGE, smooth, True, "attribute") for name in LENT),
    *(("numpy", LARGE, block, buffer, "list") for block in (smooth, _routed) for buffer in (True, False)),
    ("numpy", LARGE, _routed, True, "closure"),
    ("numpy", 1 << 22 | 8, _routed, True, "attribute"),  # above what an array of its own is copied up to
]
for _name, _n, _block, _buffer, _held in _LENT:
    _made = functools.partial(_lent, LENT[_name], _n, _block, buffer=_buffer, held=_held)
    _made.__name__ = (
        f"{_name}_of_{_n}_in_{'a_buffer' if _buffer else 'a_tensor'}_by_{_held}_{_block.__name__.strip('_')}"  # type: ignore[attr-defined]
    )
    _made.__module__ = __name__  # type: ignore[attr-defined]
    case(works=True)(_made)


@case(works=True)
def counts_in_a_slice_of_another_array() -> Program:
    def init(s: Any, _i: int) -> None:
        s.whole = np.zeros(2 * LARGE)
        s.part = s.whole[LARGE:]

    def run(s: Any, x: Tensor) -> Tensor:
        s.part[0] += 1
        return smooth(s, x) * (1 + float(s.whole[LARGE]) / 100)

    return program(run, init, steps=3)


# memory that C lends --------------------------------------------------------------------------------------------------


def _counting(add: Callable[[], None], value: Callable[[], float]) -> Program:
    made = _ticking(add, value)
    made.also = lambda: [value()]
    return made


@case()
def counts_in_ctypes() -> Program:
    held = ctypes.c_int(0)

    def tick() -> None:
        held.value += 1

    return _counting(tick, lambda: held.value)


@case()
def counts_in_a_shared_value() -> Program:
    held = multiprocessing.Value("i", 0)

    def tick() -> None:
        held.value += 1

    return _counting(tick, lambda: held.value)


@case()
def counts_in_a_memoryview() -> Program:
    held = memoryview(bytearray(8)).cast("q")

    def tick() -> None:
        held[0] += 1

    return _counting(tick, lambda: held[0])


@case()
def counts_in_a_mapped_file() -> Program:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(64))
        file.flush()
        held = np.memmap(file, dtype="int64", shape=(8,))
        raw = mmap.mmap(file.fileno(), 64)

    def tick() -> None:
        held[0] += 1
        raw[32] += 1

    return _counting(tick, lambda: int(held[0]) + raw[32])


@case()
def sets_the_precision_of_a_decimal_context() -> Program:
    held = decimal.Context(prec=20)

    def tick() -> None:
        held.prec += 1

    return _counting(tick, lambda: held.prec)


# caches and iterators of C --------------------------------------------------------------------------------------------


def _cached(maxsize: int | None, make: Callable[[int], Any]) -> Any:
    return functools.lru_cache(maxsize=maxsize)(lambda n: make(n))


def _behind_a_cache(cached: Any, calls: Callable[[int], Any]) -> Program:
    for n in range(3):
        cached(n)

    def run(s: Any, x: Tensor) -> Tensor:
        return smooth(s, x) * calls(s.i)

    def init(s: Any, i: int) -> None:
        s.i = i

    def seen() -> list[Any]:
        return [cached.cache_info().currsize, [cached.__wrapped__.__code__.co_name]]

    return program(run, init, also=seen)


@case()
def full_cache_of_random_numbers() -> Program:
    cached = _cached(1, lambda _n: random.random())
    return _behind_a_cache(cached, lambda i: cached(i))


@case()
def full_cache_of_random_tensors() -> Program:
    cached = _cached(2, lambda _n: torch.randn(WIDTH))
    return _behind_a_cache(cached, lambda i: cached(i + 10))


@case()
def unbounded_cache_of_lists_that_grow() -> Program:
    cached = _cached(None, lambda n: [n])

    def more(i: int) -> float:
        cached(i).append(1)
        return 1 / len(cached(i))

    return _behind_a_cache(cached, more)


@case()
def takes_from_a_bound_next() -> Program:
    take = itertools.count(1).__next__
    return _ticking(lambda: None, lambda: 1 / take())


@case()
def takes_from_an_iterator_among_defaults() -> Program:
    def run(s: Any, x: Tensor, numbers: Any = itertools.cycle([0.5, 0.7, 0.9])) -> Tensor:  # noqa: B008
        return smooth(s, x) * next(numbers)

    return program(run)


@case()
def takes_from_an_iterator_of_the_class() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        return smooth(s, x) / next(type(s).numbers)

    made = program(run)
    type(made.model.layers[0]).numbers = itertools.count(1)
    return made


@case()
def fills_a_simple_queue() -> Program:
    held: Any = queue.SimpleQueue()
    return _counting(lambda: held.put(1), lambda: held.qsize())


@case()
def writes_to_texts_and_files() -> Program:
    folder = Path(tempfile.mkdtemp())
    text, log = io.StringIO(), (folder / "log").open("w")

    def tick() -> None:
        text.write("x")
        log.write("x")
        log.flush()

    def seen() -> list[Any]:
        return [text.getvalue(), (folder / "log").read_text()]

    made = _ticking(tick, lambda: len(text.getvalue()))
    weakref.finalize(tick, log.close)
    made.also = seen
    return made


@case()
def feeds_a_digest() -> Program:
    held = types.SimpleNamespace(digest=hashlib.sha256())
    made = _ticking(lambda: held.digest.update(b"x"), lambda: held.digest.digest()[0] / 256)
    made.also = lambda: [held.digest.hexdigest()]
    return made


# large containers -----------------------------------------------------------------------------------------------------


def _holding(make: Callable[[], Any], use: Callable[[Any], float]) -> Program:
    held = make()

    def run(s: Any, x: Tensor) -> Tensor:
        return _routed(s, x) * (1 + use(s.vocabulary))

    def init(s: Any, _i: int) -> None:
        s.vocabulary = held

    return program(run, init, steps=3)


@case(works=True)
def reads_a_large_vocabulary() -> Program:
    return _holding(lambda: [(f"t{i}", i) for i in range(5000)], lambda held: held[3][1] / 10)


@case()
def counts_in_a_large_dict() -> Program:
    def use(held: Any) -> float:
        held[4000] += 1
        return held[4000] / 10

    return _holding(lambda: Counter(dict.fromkeys(range(5000), 0)), use)


@case(slow=True)
def counts_deep_in_a_large_list() -> Program:
    def use(held: Any) -> float:
        held[4000][1][0] += 1
        return held[4000][1][0] / 10

    return _holding(lambda: [(i, [0]) for i in range(4500)], use)


@case()
def counts_in_a_large_attribute_by_a_made_up_name() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        held = getattr(s, "".join(("hi", "dden")))
        held[0] += 1
        return _routed(s, x) * (1 + held[0] / 10)

    def init(s: Any, _i: int) -> None:
        s.hidden = [0] * 5000

    return program(run, init)


@case(slow=True)
def more_objects_than_are_looked_at_in_a_step() -> Program:
    def use(held: Any) -> float:
        held[6999].append(1)
        return len(held[6999]) / 10

    return _holding(lambda: [[] for _ in range(7000)], use)


# a loss, threads ------------------------------------------------------------------------------------------------------


class Averaging:
    """A loss with a count and a moving average."""

    def __init__(self) -> None:
        self.count, self.mean, self.by_kind = 0, torch.zeros(()), defaultdict(int)

    def __call__(self, output: Tensor) -> Tensor:
        self.count += 1
        self.by_kind["all"] += 1
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean()
        return output.square().mean() + self.mean


def _with_loss(loss: Any) -> Program:
    made = program(smooth)
    made.model.forward = types.MethodType(lambda net, x: functools.reduce(lambda h, m: m(h), net.layers, x), made.model)

    def step(model: nn.Module, batch: Any, _i: int) -> list[Tensor]:
        found = loss(model(*batch))
        found.backward()
        return [found]

    made.step, made.loss_fn = step, loss
    made.also = lambda: [loss.count, loss.mean, dict(loss.by_kind)]
    return made


@case(works=True)
def loss_with_a_moving_average() -> Program:
    return _with_loss(Averaging())


@case()
def counts_of_each_thread() -> Program:
    held = threading.local()
    held.n = 0

    def tick() -> None:
        held.n += 1

    return _counting(tick, lambda: held.n)


# backwards and connections of a forward's own -------------------------------------------------------------------------


@case(works=True)
def gradient_of_a_side_network() -> Program:
    """`torch.autograd.grad` inside of a block without a recording."""

    def run(s: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            error = s.side[0](x.detach()).square().mean()
            (grad,) = torch.autograd.grad(error, s.side[0].weight)
        return _routed(s, x) * (1 + grad.norm())

    return program(run, lambda s, _i: setattr(s, "side", [nn.Linear(WIDTH, 1)]))


@case()
def database_in_memory() -> Program:
    """Refused by name, before a row is written."""

    def init(s: Any, _i: int) -> None:
        s.database = sqlite3.connect(":memory:")
        s.database.execute("create table t (n int)")

    def run(s: Any, x: Tensor) -> Tensor:
        s.database.execute("insert into t values (1)")
        return smooth(s, x)

    made = program(run, init)
    made.also = lambda: [float(s.database.execute("select count(*) from t").fetchone()[0]) for s in made.model.layers]
    return made


@case(works=True, slow=True)
def containers_and_objects_whose_class_counts() -> Program:
    asked: list[str] = []

    class Told(list[Any]):
        def __len__(self) -> int:
            asked.append("len")
            return super().__len__()

        def __iter__(self) -> Iterator[Any]:
            if sys._getframe(1).f_globals["__name__"] != "copy":  # which the model's own copying asks for
                asked.append("iter")
            return super().__iter__()

    class Lies:
        @property
        def __class__(self) -> type:
            asked.append("class")
            return dict

        @__class__.setter
        def __class__(self, _value: type) -> None:
            raise TypeError

    class Holder:
        def __init__(self) -> None:
            self.told, self.lies = Told([1.0]), Lies()

    def run(s: Any, x: Tensor) -> Tensor:
        s.holder.told[0] = s.holder.told[0] + 1
        return _routed(s, x)

    made = program(run, lambda s, _i: setattr(s, "holder", Holder()))
    made.also = lambda: [float(len(asked)), *(float(s.holder.told[0]) for s in made.model.layers)]
    return made


@case(works=True)
def objects_that_a_list_has_let_go_of() -> Program:
    class Held:
        pass

    def init(s: Any, _i: int) -> None:
        s.newest, s.known, s.calls = [], weakref.WeakValueDictionary(), 0

    def run(s: Any, x: Tensor) -> Tensor:
        held = Held()
        s.calls += 1
        s.known[s.calls] = held
        s.newest.append(held)
        del s.newest[:-2]
        return smooth(s, x)

    made = program(run, init, steps=5)
    made.also = lambda: [float(len(s.known)) for s in made.model.layers]
    return made


@case(works=True)
def message_that_is_logged_once() -> Program:
    said: list[str] = []

    class Logger(logging.LoggerAdapter[logging.Logger]):
        @functools.lru_cache(None)  # noqa: B019
        def warning_once(self, text: str) -> None:
            said.append(text)

    logger = Logger(logging.getLogger("silent"), {})

    def run(s: Any, x: Tensor) -> Tensor:
        logger.warning_once("hello")
        return smooth(s, x)

    made = program(run)
    made.also = lambda: [float(len(said)), float(Logger.warning_once.cache_info().hits)]
    return made
