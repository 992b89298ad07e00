"""Deferred initialization: a model is built on ``meta``, and its weights are made later, one tensor at a time.

NOTE [ Weights later ]
The constructor runs on fake tensors while a dispatch mode records every operator that makes or changes one. The model
then has parameters on ``meta``, which are split and sharded at no cost. `Deferred.fill` runs the recorded operators on
real tensors, in order: every random number is the one that the constructor would have drawn, so the weights are bitwise
those of a full build. A tensor is passed on and freed once no later operator changes or reads it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from jettison.capture.fake_copies import fake_mode
from jettison.capture.op_traits import writes
from jettison.capture.randomness import Streams, default_stream
from jettison.capture.recorder import TensorRef
from jettison.core.errors import JettisonError

_ATEN: Final = torch.ops.aten
_EMPTY: Final = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_strided.default,
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)
_OVERWRITES: Final = frozenset(
    ["copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_", "uniform_", "zero_"]
)
"""Operators whose result does not depend on the former values."""
_REFUSED: Final = frozenset({"set_", "resize_", "resize_as_"})


class NotDeferrable(JettisonError):
    """A constructor has effects that cannot be repeated later; the message names them."""


@dataclass(frozen=True, kw_only=True)
class _Constant:
    tensor: Tensor
    version: int


@dataclass(frozen=True, kw_only=True)
class _ConstructorOp:
    """An operator, its arguments with `TensorRef` in place of tensors, and its new storages."""

    func: Any
    leaves: list[Any]
    spec: Any
    made: tuple[TensorRef | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    draws: bool


@dataclass(kw_only=True)
class _EmptyStorage:
    handle: torch.UntypedStorage  # kept, so that its address stays its own
    nbytes: int
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class _Constructor:
    ops: list[_ConstructorOp]
    storages: list[_EmptyStorage]

    def run(self, finish: Callable[[int, torch.UntypedStorage], None], wanted: Collection[int]) -> None:
        """Make these storages. Each is passed to ``finish`` and freed once no operator changes or reads it any more."""
        ends, lasts = self._needed(wanted)
        held: dict[int, torch.UntypedStorage] = {}
        for number in sorted(ends):
            self._run(self.ops[number], held)
            for storage in sorted(ends[number]):
                made = held.pop(storage)
                if lasts.get(storage) == number:
                    finish(storage, made)
                del made
        for storage in sorted(set(wanted) - lasts.keys()):  # nothing was ever written to it
            finish(storage, self._allocated(storage).fill_(0))

    def draws(self, wanted: Collection[int]) -> bool:
        return any(self.ops[number].draws for number in self._needed(wanted)[0])

    def _needed(self, wanted: Collection[int]) -> tuple[dict[int, set[int]], dict[int, int]]:
        """Operators to run, each with the storages whose last use it is; and the last writing operator of each storage.
        Operators with unneeded results run if they move the random state of a later one.
        """
        live: set[int] = set(wanted)
        ends: dict[int, set[int]] = {}
        lasts: dict[int, int] = {}
        drawn_later = False
        for number in range(len(self.ops) - 1, -1, -1):
            op = self.ops[number]
            if not (op.writes & live or (op.draws and drawn_later)):
                continue
            drawn_later |= op.draws
            touched = op.reads | op.writes
            last = {storage for storage in touched & set(wanted) if storage not in lasts}
            lasts |= dict.fromkeys(last, number)
            ends[number] = {storage for storage in touched if storage not in live} | last
            live -= op.overwrites
            live |= op.reads
        return ends, lasts

    def _run(self, op: _ConstructorOp, held: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                if leaf.buffer not in held:
                    held[leaf.buffer] = self._allocated(leaf.buffer)
                return _at(leaf, held[leaf.buffer])
            if isinstance(leaf, _Constant):
                if leaf.tensor._version != leaf.version:
                    raise NotDeferrable("a tensor that the constructor was given has been written to since")
                return leaf.tensor
            return leaf

        args, kwargs = tree_unflatten([real(leaf) for leaf in op.leaves], op.spec)
        out = op.func(*args, **kwargs)
        for place, tensor in zip(op.made, tree_leaves(out), strict=True):
            if place is None:
                continue
            laid_out = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            if laid_out != (place.size, place.stride, place.offset):
                raise NotDeferrable(f"{op.func} returns other strides than on fake tensors")
            held[place.buffer] = tensor.untyped_storage()

    def _allocated(self, number: int) -> torch.UntypedStorage:
        storage = self.storages[number]
        return torch.empty(storage.nbytes, dtype=torch.uint8, device=storage.device).untyped_storage()


class _ConstructorRecorder(TorchDispatchMode):
    """Records operators. Enter it inside a fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self._numbers: dict[int, int] = {}
        self.program = _Constructor(ops=[], storages=[])

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            with _disable_current_modes():
                return self.value(args[0]).item()
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        before = [self.place(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
        out = func(*args, **kwargs)
        outs = tree_leaves(out)
        if not any(isinstance(leaf, FakeTensor) for leaf in (*given, *outs)):
            return out
        self._note(func, before, spec, writes(func, args, kwargs), outs)
        return out

    def place(self, tensor: Tensor) -> TensorRef:
        """Storage and view of a recorded tensor."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            raise NotDeferrable("it reads a tensor from a file, or from before it began")
        return TensorRef.of(number, tensor)

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor with its values."""
        place = self.place(tensor)
        if self.program.draws({place.buffer}):
            raise NotDeferrable("it looks at a random number")
        found: list[Tensor] = []
        with _disable_current_modes(), torch.no_grad():
            self.program.run(lambda _, storage: found.append(_at(place, storage)), {place.buffer})
        return found[0]

    def _note(self, func: Any, leaves: list[Any], spec: Any, changed: list[Tensor], outs: list[Any]) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _REFUSED:
            raise NotDeferrable(f"it calls {name}")
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise NotDeferrable("it draws from a generator of its own")
        places = {leaf.buffer: leaf for leaf in leaves if isinstance(leaf, TensorRef)}
        made = [self._met(out) for out in outs]
        if func in _EMPTY:
            return
        written = set()
        for tensor in changed:
            if not isinstance(tensor, FakeTensor):
                raise NotDeferrable(f"{name} writes to a tensor from a file, or from before it began")
            written.add(self.place(tensor).buffer)
        new = {place.buffer for place in made if place is not None}
        if not written and not new:
            return  # a view, or a property of a tensor
        overwrites = set(new)
        if name in _OVERWRITES and self._is_whole(changed[0]):
            overwrites |= written
        reads = {number for number in places if number not in written or number not in overwrites}
        reads |= {leaf.buffer for leaf in leaves[1:] if isinstance(leaf, TensorRef)}  # a copy of a part of itself
        self.program.ops.append(
            _ConstructorOp(
                func=func,
                leaves=[
                    _Constant(tensor=leaf, version=leaf._version) if isinstance(leaf, Tensor) else leaf
                    for leaf in leaves
                ],
                spec=spec,
                made=tuple(made),
                reads=frozenset(reads),
                writes=frozenset(written | new),
                overwrites=frozenset(overwrites),
                draws=torch.Tag.nondeterministic_seeded in func.tags,
            )
        )

    def _met(self, tensor: Any) -> TensorRef | None:
        """Reference to a tensor with a new storage, which is noted; None for others."""
        if not isinstance(tensor, FakeTensor):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return None
        self._numbers[storage._cdata] = len(self.program.storages)
        self.program.storages.append(_EmptyStorage(handle=storage, nbytes=storage.nbytes(), device=tensor.device))
        return self.place(tensor)

    def _is_whole(self, tensor: Tensor) -> bool:
        dense: bool = _ATEN.is_non_overlapping_and_dense.default(tensor)
        return dense and tensor.nbytes == self.program.storages[self.place(tensor).buffer].nbytes


@dataclass(kw_only=True)
class Deferred:
    """A model on ``meta``, except for its buffers, and the recorded operators that make its weights."""

    model: nn.Module
    _program: _Constructor
    _parameters: dict[str, TensorRef] = field(default_factory=dict)
    _streams: Streams

    def fill(self, tensors: Mapping[str, Tensor], put: Callable[[Tensor, Tensor], None]) -> None:
        """Call ``put(tensor, values)`` for each of these parameters, by their names in the model, with the full values.
        Raise `NotDeferrable` if a tensor that the constructor was given has changed.

        Random states are set to those before the model was built, and move as in its constructor, up to the last
        operator that is needed.
        """
        wanted: dict[int, list[str]] = {}
        for name in tensors:
            wanted.setdefault(self._parameters[name].buffer, []).append(name)

        def finish(number: int, storage: torch.UntypedStorage) -> None:
            for name in wanted[number]:
                put(tensors[name], _at(self._parameters[name], storage))

        self._streams.restore()
        with torch.no_grad():
            self._program.run(finish, wanted.keys())


def deferred(make: Callable[[], nn.Module]) -> Deferred:
    """Build a model without its weights, and without a change of random states. ``make``: the constructor, on the
    device of the weights. Raise `NotDeferrable` if it cannot be recorded, and whatever it raises on fake tensors.
    """
    mode = fake_mode(allow_non_fake_inputs=True)
    before = Streams.now()
    with warnings.catch_warnings(), mode, _ConstructorRecorder(mode) as recorder:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # of deepcopy
        model = make()
    if default_stream() != before.cpu:
        raise NotDeferrable("it seeds or moves random streams itself")
    out = Deferred(model=model, _program=recorder.program, _streams=before)
    _replace(model, recorder, out._parameters)
    gc.collect()
    for storage in recorder.program.storages:
        if torch._C._storage_Use_Count(storage.handle._cdata) > 1:
            raise NotDeferrable(f"a tensor of {storage.nbytes} bytes is referenced from outside the model's modules")
    return out


def _at(place: TensorRef, storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=place.dtype, device=storage.device).set_(
        storage, place.offset, place.size, place.stride
    )


def _replace(model: nn.Module, recorder: _ConstructorRecorder, parameters: dict[str, TensorRef]) -> None:
    """Replace fake parameters by meta ones, and all other fake tensors of modules by real ones."""
    with recorder.mode:
        plain = {*vars(torch.empty(0)), "_is_param"}
    owners: dict[int, int] = {}
    memo: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, FakeTensor):
            raise NotDeferrable(f"{name} is made outside of torch")
        place = parameters[name] = recorder.place(parameter)
        if owners.setdefault(place.buffer, id(parameter)) != id(parameter):
            raise NotDeferrable(f"{name} is a part of another parameter")
        if id(parameter) not in memo:
            meta = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device="meta")
            memo[id(parameter)] = made = nn.Parameter(meta, requires_grad=parameter.requires_grad)
            for key, value in vars(parameter).items():
                if key not in plain:
                    setattr(made, key, value)

    def real(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in memo:
            memo[id(value)] = recorder.value(value)
        return memo[id(value)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, held in table.items():
                if held is not None:
                    table[key] = real(held)
        for key, held in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                holds = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(held))
                vars(module)[key] = tree_map(real, held) if holds else held
