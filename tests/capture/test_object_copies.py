"""Objects that a model holds and that no copy may be made of: planning shares them, and they are as they were."""

from __future__ import annotations

import copy
import ctypes
import gc
import multiprocessing
import os
import shutil
import tempfile
import types
import weakref
import zipfile
from collections.abc import Callable
from io import BytesIO
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.fake_copies import fake_copy, fake_mode
from jettison.verify.differences import independent_copy


class Spilled:
    """A directory that goes with the object."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp()
        (Path(self.path) / "rows").write_bytes(b"1")

    def __del__(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Handle:
    freed = 0

    def __del__(self) -> None:
        type(self).freed += 1


class SlottedHandle(Handle):
    __slots__ = ("number",)

    freed = 0


class Watched:
    """What `weakref.finalize` is told of by its holder's constructor, and a copy's `__setstate__`."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp()
        self.__setstate__(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.end = weakref.finalize(self, shutil.rmtree, self.path)


class Refusing:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("one of a kind")


class Proxy:
    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Dotted(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Closed(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("not for you")


class Frozen:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        object.__setattr__(self, "rows", [])

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class HandsOff:
    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("hands off")
        return object.__getattribute__(self, name)


class Block(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.up, self.down, self.held = nn.Linear(8, 16), nn.Linear(16, 8), held

    def forward(self, x: Tensor) -> Tensor:
        self.held  # noqa: B018  # named by code, so that it is looked at
        return x + self.down(torch.tanh(self.up(x)))


class OwnBlock(Block):
    """A module that has a finalizer itself."""

    freed = 0

    def __del__(self) -> None:
        type(self).freed += 1


def nested(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def linked(levels: int) -> Any:
    made = None
    for _ in range(levels):
        made = types.SimpleNamespace(next=made)
    return made


def unlinked() -> SharedMemory:
    memory = SharedMemory(create=True, size=16)
    memory.unlink()
    return memory


def exists(held: Any) -> bool:
    return os.path.exists(getattr(held, "path", None) or held.name)


def planned(held: Any, block: type[Block] = Block) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(block(held), block([held]))
    jettison.apply(model, "full", batch=(torch.ones(4, 8),), loss_fn=Tensor.sum)
    gc.collect()
    return model


RESOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]] = {
    "directory": (Spilled, exists),
    "handle": (Handle, lambda _: Handle.freed == 0),
    "slots": (SlottedHandle, lambda _: SlottedHandle.freed == 0),
    "finalize": (Watched, exists),
    "named file": (tempfile.NamedTemporaryFile, exists),
    "temporary directory": (tempfile.TemporaryDirectory, exists),
    "archive": (lambda: zipfile.ZipFile(BytesIO(), "w"), lambda held: held.fp.tell() == 0),
    "unlinked memory": (unlinked, lambda held: bytes(held.buf[:1]) == b"\0"),
    "connection": (lambda: multiprocessing.Pipe()[0], lambda held: os.fstat(held.fileno()) is not None),
}


@pytest.mark.parametrize("name", RESOURCES)
def test_finalizers_do_not_run_before_the_model_dies(name: str) -> None:
    make, is_there = RESOURCES[name]
    held = make()
    model = planned(held)
    assert is_there(held)
    model(torch.ones(4, 8)).sum().backward()
    assert is_there(held)
    if isinstance(held, tempfile.TemporaryDirectory):
        held.cleanup()  # it warns where nobody does


@pytest.mark.parametrize("block", [Block, OwnBlock])
def test_an_independent_copy_has_no_finalizers(block: type[Block]) -> None:
    held = Spilled()
    model = nn.Sequential(block(held), block([held]))
    gc.collect()
    before = OwnBlock.freed  # by models of other tests
    copied = independent_copy(model)
    assert copied[0].held is held and copied[0].up.weight is not model[0].up.weight
    del copied
    gc.collect()
    assert exists(held) and OwnBlock.freed == before


def test_a_module_with_a_finalizer_is_copied_without_it() -> None:
    gc.collect()
    before = OwnBlock.freed
    model = planned(None, OwnBlock)
    copied = fake_copy(model, fake_mode())
    assert isinstance(copied[0], OwnBlock) and copied[0] is not model[0]
    assert type(copied[0]).__qualname__ == "OwnBlock"
    del copied
    gc.collect()
    assert OwnBlock.freed == before


HELD: dict[str, Callable[[], Any]] = {
    "refuses": Refusing,
    "within": lambda: {"rows": [1, Refusing()]},
    "proxy": lambda: Proxy(types.SimpleNamespace(count=0)),
    "dotted": lambda: Dotted(a=1),
    "items raise": lambda: Closed(a=1),
    "frozen": Frozen,
    "generator": lambda: (row for row in [1]),
    "module of code": lambda: types,
    "hands off": HandsOff,
    "nested": lambda: nested(5000),
    "linked": lambda: linked(5000),
    "queue": multiprocessing.Queue,
    "lock": multiprocessing.Lock,
    "pointer": lambda: ctypes.pointer(ctypes.c_int(1)),
    "objects": lambda: np.array([Refusing(), {}], dtype=object),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_only_held_does_not_stop_a_plan(name: str) -> None:
    model = planned(HELD[name]())
    plain = nn.Sequential(Block(None), Block(None))
    plain.load_state_dict(model.state_dict())
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    model(x).sum().backward()
    plain(x).sum().backward()
    gradients = [parameter.grad for parameter in plain.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_only_what_refuses_is_shared() -> None:
    refusing, rows = Refusing(), [1, 2]
    model = Block({"holder": types.SimpleNamespace(refusing=refusing, rows=rows)})
    held = fake_copy(model, fake_mode()).held["holder"]
    assert held.refusing is refusing
    assert held.rows == rows and held.rows is not rows


def test_what_is_nested_deep_is_copied() -> None:
    model = Block([linked(5000), 1])
    copied = fake_copy(model, fake_mode())
    assert copied.held[0] is not model.held[0] and copied.held[0].next is not model.held[0].next


def test_a_module_that_refuses_is_named() -> None:
    class Alone(Block):
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("one of a kind")

    with pytest.raises(jettison.UnsupportedModule, match="one of a kind"):
        fake_copy(nn.Sequential(Alone(None)), fake_mode())
    with pytest.raises(ValueError, match="one of a kind"):
        copy.deepcopy(Alone(None))


def test_a_copy_that_refuses_keeps_nothing_of_its_callers() -> None:
    """They may be in the middle of a step, with all of its tensors."""

    def called() -> weakref.ref[Handle]:
        held = Handle()
        fake_copy(Block(Refusing()), fake_mode())
        return weakref.ref(held)

    called()  # torch imports, whose frames live on
    gc.collect()
    gc.disable()
    try:
        assert called()() is None
    finally:
        gc.enable()
