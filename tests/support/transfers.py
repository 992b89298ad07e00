"""Copies between a device and the host, in the order in which offload engines queue them; importing this notes them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from jettison.runtime.offload import Group, OffloadedStorage, OffloadEngine, StorageUse

T = TypeVar("T")


class Direction(StrEnum):
    OUT = "out"
    BACK = "back"


class Transfer(NamedTuple):
    direction: Direction
    nbytes: int


_of_engine: WeakKeyDictionary[OffloadEngine, list[Transfer]] = WeakKeyDictionary()
_of_all: list[list[Transfer]] = []
_send, _load = OffloadEngine.send, OffloadEngine._load


def transfers_of(engine: OffloadEngine) -> list[Transfer]:
    """All copies so far, or since the list was cleared."""
    return _of_engine.setdefault(engine, [])


def transfers_in(run: Callable[[], T]) -> tuple[T, tuple[Transfer, ...]]:
    """Return a function's result, and the copies of all engines meanwhile, such as those of dry runs."""
    _of_all.append([])
    try:
        found = run()
    finally:
        seen = _of_all.pop()
    return found, tuple(seen)


def _note(engine: OffloadEngine, transfer: Transfer) -> None:
    for found in (transfers_of(engine), *_of_all):
        found.append(transfer)


def _sending(engine: OffloadEngine, source: Tensor, group: Group) -> StorageUse:
    before = len(group.moved)
    moved = _send(engine, source, group)
    if len(group.moved) > before:  # else its bytes are on their way already
        _note(engine, Transfer(Direction.OUT, moved.of.span.nbytes))
    return moved


def _loading(engine: OffloadEngine, moved: OffloadedStorage) -> None:
    _load(engine, moved)
    _note(engine, Transfer(Direction.BACK, moved.span.nbytes))


OffloadEngine.send, OffloadEngine._load = _sending, _loading  # type: ignore[method-assign]
