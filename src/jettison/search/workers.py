"""Worker processes of a search, each with its own caches.

A process caches regions, prices and hulls; another one would recompute them. So all items of a key go to the process
that had the first of them, and an idle process takes over only parts that it has not begun: with a common queue two
processes took two thirds more processor time than one.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, Final, Generic, TypeVar

from jettison.core.process import SELDOM, deaf_to_interrupts, end_pool

CHUNKS: Final = 8
"""Parts of a round, per worker."""
AHEAD: Final = 2
"""Most parts submitted to a worker: the one it works on, and the next."""

_Q = TypeVar("_Q")
_T = TypeVar("_T")
_R = TypeVar("_R")
_Chunk = list[int]


class Workers(Generic[_Q]):
    """Pool of ``jobs`` processes. Several threads may use it at once.

    Args:
        question: first argument of every call.
    """

    def __init__(self, question: _Q, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pools = [
            ProcessPoolExecutor(1, mp_context=context, initializer=_start, initargs=(question,)) for _ in range(jobs)
        ]
        self._homes: dict[tuple[object, ...], int] = {}
        with deaf_to_interrupts():
            for pool in self._pools:
                pool.submit(int)  # starts the process

    def end(self, *, now: bool) -> None:
        """End the processes.

        Args:
            now: without waiting for running work.
        """
        for pool in self._pools:
            end_pool(pool, now=now)

    def map(
        self, work: Callable[[_Q, _T], _R], items: Sequence[_T], key: Callable[[_T], tuple[object, ...]]
    ) -> Iterator[dict[int, _R]]:
        """Yield results by the numbers of their items, in parts, as they come."""
        left, fresh = self._shared(items, key)
        running: dict[Future[list[_R]], tuple[int, _Chunk]] = {}

        def give(worker: int) -> None:
            own = left[worker]
            source = own or max(left, key=len)
            if source:
                chunk = source.pop(0 if source is own else -1)
                if source is not own:  # a key belongs to the process that begins it
                    self._homes |= {each: worker for i in chunk if (each := key(items[i])) in fresh}
                asked: Any = (work, [items[i] for i in chunk])
                running[self._pools[worker].submit(_several, asked)] = worker, chunk

        for _ in range(AHEAD):
            for worker in range(len(self._pools)):
                give(worker)
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                worker, chunk = running.pop(done)
                give(worker)
                yield dict(zip(chunk, done.result(), strict=True))

    def _shared(
        self, items: Sequence[_T], key: Callable[[_T], tuple[object, ...]]
    ) -> tuple[list[list[_Chunk]], set[tuple[object, ...]]]:
        """Divide items among workers: the numbers of each worker's items in parts, and the new keys.

        A new key goes to the worker with fewest items.
        """
        by_key: dict[tuple[object, ...], list[int]] = {}
        for number, item in enumerate(items):
            by_key.setdefault(key(item), []).append(number)
        own: list[list[int]] = [[] for _ in self._pools]
        fresh = {each for each in by_key if each not in self._homes}
        for each in sorted(by_key, key=lambda each: (each in fresh, -len(by_key[each]))):
            home = self._homes.setdefault(each, min(range(len(own)), key=lambda worker: len(own[worker])))
            own[home] += by_key[each]
        size = -(-len(items) // (len(own) * CHUNKS)) or 1
        return [[numbers[at : at + size] for at in range(0, len(numbers), size)] for numbers in own], fresh


# in a worker ----------------------------------------------------------------------------------------------------------

_question: Any = None


def _start(question: object) -> None:
    global _question
    _question = question
    gc.set_threshold(SELDOM)
    atexit.register(os._exit, 0)  # skips freeing the caches object by object
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends this process


def _several(asked: tuple[Callable[[Any, _T], _R], list[_T]]) -> list[_R]:
    work, items = asked
    return [work(_question, item) for item in items]
