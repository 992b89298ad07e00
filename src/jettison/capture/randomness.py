"""The state of a random generator, separate from the drawn numbers: how an op moves it, and how recomputation does.

NOTE [ The state moves by shape ]
An op that draws reads the state and leaves another one. The distance mostly follows from the shapes, strides and dtypes
of its tensors: it draws a fixed number of values. So the state that the next op starts from can be computed without the
values of the first: the op is run once more on scratch memory, which is freed at once. A recording holds this as an op
of its own between states (`Advance`), and the op that draws has the state before it as an input and none as an output.
No op depends on an earlier one only because both draw.

`MOVES_BY_SHAPE` lists these ops; `tests/capture/test_randomness.py` compares each that runs on a CPU with itself on
other values. On CUDA an op reserves its share of the Philox stream on the host, before any value can be read. Ops that
draw until a value fits (`poisson`, `binomial`, `_standard_gamma`) or for some elements only (`rrelu_with_noise`) are
not on the list: recomputation of the state after them reruns them.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.pytrees import op_map
from jettison.capture.state_kinds import StreamState

aten = torch.ops.aten

ADVANCE = "jettison.advance_random_state"
"""Name of the recorded op between two states."""

MOVES_BY_SHAPE = frozenset(
    {
        *("native_dropout", "_fused_dropout", "bernoulli", "bernoulli_", "uniform", "uniform_", "normal", "normal_"),
        *("normal_functional", "exponential", "exponential_", "geometric", "geometric_", "cauchy", "cauchy_"),
        *("log_normal", "log_normal_", "rand", "rand_like", "randn", "randn_like", "random", "random_", "randint"),
        *("randint_like", "randperm", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    }
)
"""Ops of aten, by name."""

MOVES_BY_NUMBER = frozenset({"random", "random_", "randint", "randint_like", "randperm"})
"""Those of them that take two words for a number if the range is above 2^32."""

_READS_VALUES = frozenset({"bernoulli", "bernoulli_", "normal"})
"""Those of them that check probabilities and deviations, for which zero is valid."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory to draw into: of this shape, with these strides, and without values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize

    def make(self, *, zeros: bool) -> Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.zero_() if zeros else made


@dataclass(frozen=True, slots=True)
class Advance:
    """Moves the default generator's state as ``func`` would on arguments like these. Returns nothing.

    A state that can be advanced without drawing (Philox: an offset that each call adds to) belongs here.
    """

    func: Any

    def __str__(self) -> str:
        return f"{ADVANCE}[{self.func}]"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        zeros = op_name(self.func) in _READS_VALUES
        args, kwargs = op_map(lambda v: v.make(zeros=zeros) if v.__class__ is Scratch else v, (args, kwargs))
        self.func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Movement:
    """Call that moves the state: `Advance` or another function, with its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(v.nbytes for v in tree_leaves((self.args, dict(self.kwargs))) if isinstance(v, Scratch))

    @property
    def price_key(self) -> str:
        return f"{self.func}({', '.join(map(str, tree_leaves((self.args, dict(self.kwargs)))))})"


def movement_of(func: Any, args: Any, kwargs: Any, out: Any, device: str, *, numbers_known: bool) -> Movement | None:
    """The call that moves the state as this one did, without its values; None if the values matter, or may.
    ``numbers_known``: plain numbers among the arguments are the same in every step.
    """
    name = op_name(func)
    leaves = tree_leaves((args, kwargs, out))
    if func.namespace != "aten" or name not in MOVES_BY_SHAPE:
        return None
    if name == "randint_like" and func._overloadname.startswith("Tensor"):
        return None  # reads its range out of a tensor
    sizes = (n for v in leaves if isinstance(v, Tensor) for n in (*v.shape, *v.stride()))
    is_symbolic = any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for v in (*leaves, *sizes))
    if is_symbolic or (name in MOVES_BY_NUMBER and not numbers_known):
        return None

    def scratch(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Scratch(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device.type)

    if func is aten.native_dropout.default and device == "cpu" and args[2] is not False:
        # only its draw, without the multiplication; its result is larger than the mask
        return Movement(Advance(aten.bernoulli_.float), (scratch(out[1]), 1 - args[1]))
    args, kwargs = tree_map(scratch, (tuple(args), dict(kwargs)))
    return Movement(Advance(func), args, tuple(kwargs.items()))


def is_private(generator: torch.Generator) -> bool:
    """Whether a generator is not a default one; those are passed around in wrappers of their own."""
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    return all(generator._cdata != default._cdata for default in defaults)


def op_name(func: Any) -> str:
    """Name of an operator, without its namespace and overload."""
    return func._schema.name.split("::")[1]


# default streams of a process -----------------------------------------------------------------------------------------


def outside_torch() -> dict[str, StreamState]:
    """States of Python's and numpy's default streams, by name."""
    found = {"Python's random": StreamState(vars(random)["_inst"])}
    if "numpy.random" in sys.modules:
        found["numpy's random"] = StreamState(sys.modules["numpy.random"].mtrand._rand)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Every default stream's state; the CPU's as no tensor, which budgets count; ``cuda`` is None if unused."""

    cpu: bytes
    cuda: tuple[Tensor, ...] | None
    outside: tuple[StreamState, ...]

    @classmethod
    def now(cls) -> Streams:
        """The states at this moment. Reading those of CUDA synchronizes with every device."""
        states = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else None
        return cls(_bytes_of(torch.get_rng_state()), states, tuple(outside_torch().values()))

    def restore(self) -> None:
        with _disable_current_modes():
            torch.set_rng_state(torch.frombuffer(bytearray(self.cpu), dtype=torch.uint8))
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(list(self.cuda))
        for stream in self.outside:
            stream.put_back()


def forked_streams() -> contextlib.AbstractContextManager[None]:
    """Leave torch's random streams unmoved, so that a repeated draw gives the same numbers."""
    return torch.random.fork_rng(devices=list(range(len(torch.cuda.default_generators))))


@contextlib.contextmanager
def private_randomness(devices: Iterable[str]) -> Iterator[None]:
    """Leave all streams unmoved, those of ``devices`` included; inside, they start from 0."""
    if torch.cuda.is_available() and any(device.startswith("cuda") for device in devices):
        torch.cuda.init()
    with contextlib.ExitStack() as stack:
        stack.callback(Streams.now().restore)
        seed_streams(0)
        yield


def seed_streams(seed: int) -> None:
    # `torch.manual_seed` would also replace the seed of devices that are not in use yet, which nothing restores
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)


def default_stream() -> bytes:
    """State of torch's CPU generator, read past every dispatch and function mode."""
    with torch._C.DisableTorchFunction():
        return _bytes_of(torch.default_generator.get_state())


def _bytes_of(state: Tensor) -> bytes:
    with torch._C.DisableTorchFunction():
        return ctypes.string_at(state.data_ptr(), state.nbytes)
