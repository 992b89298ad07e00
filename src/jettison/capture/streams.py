"""The random streams of a process: torch's default generators, Python's `random` and numpy's."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture.snapshots import is_a


@dataclass(frozen=True, slots=True, eq=False)
class OutsideTorch:
    """Where Python's and numpy's default streams stand."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> OutsideTorch:
        """The states at this moment."""
        return cls(random.getstate(), numpy_state())

    def restore(self) -> None:
        """Put both back to where they stood."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def moved(self) -> tuple[str, ...]:
        """Names of those that stand elsewhere now."""
        found = [] if random.getstate() == self.python else ["Python's random"]
        if pickle.dumps(numpy_state()) != pickle.dumps(self.numpy):
            found.append("numpy's random")
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Where every default stream stands. ``cuda`` is None where CUDA is not in use.

    The CPU's is no tensor: it would count against a budget, and a step without a plan has none.
    """

    cpu: bytes
    cuda: tuple[Tensor, ...] | None
    outside: OutsideTorch

    @classmethod
    def now(cls) -> Streams:
        """The states at this moment. Reading those of CUDA costs a wait for every device."""
        states = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else None
        return cls(_bytes_of(torch.get_rng_state()), states, OutsideTorch.now())

    def restore(self) -> None:
        """Put every stream back to where it stood."""
        with _disable_current_modes():
            torch.set_rng_state(torch.frombuffer(bytearray(self.cpu), dtype=torch.uint8))
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(list(self.cuda))
        self.outside.restore()


def seed_streams(seed: int) -> None:
    """Start every default stream from a number."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)


def default_stream() -> bytes:
    """Where torch's generator on the CPU stands, read past every dispatch and function mode."""
    with torch._C.DisableTorchFunction():
        return _bytes_of(torch.default_generator.get_state())


def _bytes_of(state: Tensor) -> bytes:
    with torch._C.DisableTorchFunction():
        return ctypes.string_at(state.data_ptr(), state.nbytes)


def numpy_state() -> Any:
    """Of numpy's global generator; None where nobody has imported it."""
    module = sys.modules.get("numpy.random")
    return None if module is None else module.get_state()


def stream_state(stream: Any) -> Any:
    """The state of one generator object of Python's, torch's or numpy's, in a form that can be compared."""
    if is_a(stream, random.Random):
        return stream.getstate()
    if is_a(stream, torch.Generator):
        return bytes(stream.get_state().tolist())
    if hasattr(stream, "bit_generator") or hasattr(stream, "random_raw"):
        bits = getattr(stream, "bit_generator", stream)
        return pickle.dumps((bits.state, _spawned(getattr(bits, "seed_seq", None))))
    if _is_seed(stream):
        return pickle.dumps(_spawned(stream))
    return pickle.dumps(stream.get_state(legacy=False))


def set_stream_state(stream: Any, state: Any) -> None:
    """Put a generator object back to where `stream_state` found it."""
    if is_a(stream, random.Random):
        stream.setstate(state)
    elif is_a(stream, torch.Generator):
        stream.set_state(torch.tensor(list(state), dtype=torch.uint8))
    elif hasattr(stream, "bit_generator") or hasattr(stream, "random_raw"):
        bits = getattr(stream, "bit_generator", stream)
        bits.state, spawned = pickle.loads(state)
        if spawned is not None:
            _spawn_again(bits.seed_seq, spawned)
    elif _is_seed(stream):
        _spawn_again(stream, pickle.loads(state))
    else:
        stream.set_state(pickle.loads(state))


def is_stream(value: Any) -> bool:
    """Whether a value is a random generator with a state of its own."""
    numpy = sys.modules.get("numpy.random")
    if is_a(value, random.SystemRandom):
        return False  # has no state
    return is_a(value, random.Random | torch.Generator) or (
        numpy is not None and is_a(value, numpy.Generator | numpy.RandomState | numpy.BitGenerator | numpy.SeedSequence)
    )


def _is_seed(value: Any) -> bool:
    """Whether it is numpy's: each child that is spawned from it has a number of its own."""
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and is_a(value, numpy.SeedSequence)


def _spawned(seed: Any) -> Any:
    return seed.state if _is_seed(seed) else None


def _spawn_again(seed: Any, state: dict[str, Any]) -> None:
    if seed.state != state:
        seed.__init__(**state)  # no other way sets how many children there are
