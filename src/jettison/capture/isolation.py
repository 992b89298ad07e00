"""Isolation of runs on fake tensors: all state that a forward changes is restored.

The module is a copy, and so are the objects among its arguments. A copy does not cover tables that the code reaches by
name or closure (side stores, functions with a cache) and the random streams of Python and numpy: they are restored, and
a recording that drew from such a stream is refused, since it cannot hold the numbers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from jettison.capture.op_traits import writes
from jettison.capture.pytrees import op_leaves
from jettison.capture.randomness import outside_torch
from jettison.capture.reachable_state import Reach
from jettison.capture.state_kinds import (
    MOST_BYTES,
    AttributeState,
    ReadOnly,
    StreamState,
    TensorState,
    is_lent,
    looks_at,
)
from jettison.capture.tensor_subclasses import desugars, memory_key
from jettison.core.errors import TraceError, UnsupportedModule
from jettison.core.objects import ABSENT, swapped_entries


class Isolation(Reach):
    """All Python state that a run on fake tensors may change, random streams and leaves included."""

    def __init__(self, modules: Iterable[nn.Module], values: Iterable[Any]) -> None:
        values = list(values)
        super().__init__(modules, [*values, nn.utils.parametrize._cache])
        leaves = [value for value in values if isinstance(value, Tensor) and value.is_leaf]
        self.states += [AttributeState(leaf, "requires_grad") for leaf in leaves]  # a model of forces changes it
        self.outside = outside_torch()
        self.states += self.outside.values()

    def refuse_unseen(self) -> None:
        """Raise `TraceError` for what no recording holds: draws from unknown streams, NumPy's writes to a tensor."""
        if moved := [name for name, stream in self.outside.items() if not stream.is_unchanged()]:
            raise TraceError(f"it draws from {' and '.join(moved)}")
        if drawn := [state.holder for state in self.of(StreamState) if not state.is_unchanged()]:
            raise TraceError(f"a {type(drawn[0]).__name__} was drawn from: a generator of its own")
        tensors = [state.holder for state in self.of(TensorState)]
        for array in [state.holder for state in self.arrays() if not state.is_unchanged()]:
            if is_lent(array) or any(looks_at(array, tensor) for tensor in tensors):
                raise TraceError(
                    f"NumPy writes to the memory of a tensor (an array of {array.nbytes} bytes), which no op tells"
                )


@contextlib.contextmanager
def leaving_nothing(
    modules: Iterable[nn.Module], values: Iterable[Any] = (), replaced: Iterable[tuple[Any, Any]] = ()
) -> Iterator[Isolation]:
    """Restore Python's state after the run; values of tensors are restored by `undo`. ``replaced``: pairs of an object
    and what the run finds in its place. Raise `UnsupportedModule` if changed state cannot be restored.
    """
    state = Isolation(modules, values)
    state.replace(replaced)
    state.set_aside()
    try:
        yield state
    except (ValueError, TraceError) as error:
        told = isinstance(error, UnsupportedModule)  # by a recording inside of this one
        if not told and "read-only" in str(error) and (arrays := state.of(ReadOnly)):
            sizes = ", ".join(str(array.holder.nbytes) for array in arrays)
            raise UnsupportedModule(
                f"the forward writes to a numpy array that outlives it ({error}). Planning and recording run the "
                f"forward once more, and arrays of more than {MOST_BYTES} bytes cannot be put back, so it has not been "
                f"touched (arrays of {sizes} bytes are in reach): write to a copy, or to a tensor"
            ) from error
        raise
    finally:
        state.restore()
    if state.refused:  # the run's code has caught it
        raise state.refused[0]


@contextlib.contextmanager
def without_our_hooks() -> Iterator[None]:
    """Remove our saved-tensor hooks within the context: `torch.func` refuses to run under any."""
    autograd: Any = torch._C._autograd
    taken = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        if not str(getattr(top[0], "__module__", "")).startswith("jettison."):
            break
        taken.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def without_plans(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run the own forwards of the module and its submodules, where an earlier plan has replaced them."""
    found: list[Any] = [(vars(one), vars(one).get("forward")) for one in module.modules()]
    planned = [(table, own) for table, own in found if hasattr(own, "of_a_region") and hasattr(own, "had_own")]
    return swapped_entries((table, "forward", own.forward if own.had_own else ABSENT) for table, own in planned)


@contextlib.contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Remove the gradients of the module's parameters; what is added within the context is discarded."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def forward_of(module: nn.Module, fake_model: nn.Module) -> Callable[..., Any]:
    """The fake copy's own forward: its class's, or the instance's replacement for it."""
    kind: Any = type(module)
    own: Any = vars(fake_model).get("forward", types.MethodType(kind.forward, fake_model))
    return own.forward if getattr(own, "of_a_region", False) else own  # that a plan replaces


# memory of tensors ----------------------------------------------------------------------------------------------------
#
# A forward may write to any tensor that Python reaches: its batch, a counter in a closure, statistics in an attribute,
# a weight that is renormalised. No walk through Python's state finds them all, but every write is an op: existing
# memory that an op is about to write to is copied first and restored at the end. NumPy and others get a tensor's memory
# without an op: that is copied when they ask for it (`handed_out`).


class Undo:
    """Copies memory before it is written to, and restores it."""

    def __init__(self) -> None:
        self._own: set[int] = set()  # storages that the run has allocated
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> its bytes, and a copy of them
        self._counted: dict[int, tuple[Tensor, int, bool]] = {}  # a tensor, its version, whether it had no history
        self._shaped: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor, and the memory that it viewed
        self._handed: set[int] = set()  # storages that were accessed without an op, perhaps only read

    @property
    def wrote(self) -> bool:
        return any(map(self._is_written, self._memory))

    def has_written(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was written to, and will be restored."""
        key = memory_key(tensor)
        return key in self._memory and self._is_written(key)

    def _is_written(self, key: int) -> bool:
        with _disable_current_modes(), torch.no_grad():
            return key not in self._handed or not torch.equal(*self._memory[key])

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Exempt these tensors from restoring."""
        self._own.update(found for found in map(memory_key, tensors) if found is not None)

    def note(self, tensors: Iterable[Tensor], *, handed: bool = False) -> None:
        """Copy the memory of tensors that are about to be written to, or ``handed`` to code that may write to them."""
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):  # its own storage cannot be read
                self.note((getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]), handed=handed)
                continue
            key = memory_key(tensor)
            if key is None or key in self._own:
                continue
            if not handed:
                self._handed.discard(key)
            elif key not in self._memory:
                self._handed.add(key)
            base = tensor._base if tensor._base is not None else tensor
            if not base.is_inference():  # tensors may share memory, each with its own version counter (``.data``)
                self._counted.setdefault(id(base), (base, base._version, base.grad_fn is None))
            if id(tensor) not in self._shaped:
                with _disable_current_modes():
                    self._shaped[id(tensor)] = tensor, tensor.detach()
            if key not in self._memory:
                # made in inference mode, the view of it could not be written to outside of that mode
                with _disable_current_modes(), torch.no_grad(), torch.inference_mode(False):
                    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                    self._memory[key] = memory, memory.clone()

    def made(self, given: Iterable[Any], out: Any) -> None:
        """Note an op's results: storages that no argument has are the run's own."""
        known = {memory_key(leaf) for leaf in given if isinstance(leaf, Tensor)}
        made = {memory_key(leaf) for leaf in op_leaves(out) if isinstance(leaf, Tensor)}
        self._own.update(key for key in made - known if key is not None)

    def restore(self) -> None:
        """Restore everything: values, version counters, and tensors that had no history."""
        with _disable_current_modes(), torch.no_grad():
            for memory, copy in self._memory.values():
                if (storage := memory.untyped_storage()).nbytes() != copy.nbytes:  # of a tensor with another size
                    storage.resize_(copy.nbytes)
                memory.copy_(copy)
            for tensor, was in self._shaped.values():
                if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (was.data_ptr(), was.shape, was.stride()):
                    tensor.data = was
            for tensor, version, had_none in self._counted.values():
                if had_none and tensor.grad_fn is not None:
                    tensor.detach_()
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for noted in (self._memory, self._counted, self._shaped, self._handed):
            noted.clear()


class WritesUndone(TorchDispatchMode):
    """Dispatch mode of a run on real tensors that restores those that existed before."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.undo = Undo()
        self._until_left = contextlib.ExitStack()

    def __enter__(self) -> WritesUndone:
        self._until_left.enter_context(handed_out(self.undo))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._until_left.close()
        self.undo.restore()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if desugars(types):
            return NotImplemented
        self.undo.note(writes(func, args, kwargs))
        out = func(*args, **kwargs)
        self.undo.made(op_leaves(args, kwargs), out)
        return out


# memory that tensors give away ----------------------------------------------------------------------------------------

_WAYS_OUT = ("numpy", "__array__", "__dlpack__", "data_ptr")
"""Methods of a tensor that give its memory away."""
_UNDOING: list[tuple[int, Undo]] = []  # with their threads; the running one is its thread's last
_PATCHES = contextlib.ExitStack()  # of `Tensor`, while any thread is undoing
_LOCK = threading.RLock()


@contextlib.contextmanager
def handed_out(undo: Undo) -> Iterator[None]:
    """Copy memory that a tensor gives away (to NumPy, by DLPack, as an address) before it can be written to."""
    this = threading.get_ident(), undo
    with _LOCK:
        for name in () if _UNDOING else _WAYS_OUT:
            own = vars(Tensor).get(name)  # None: inherited from a base class
            _PATCHES.callback(*((delattr, Tensor, name) if own is None else (setattr, Tensor, name, own)))
            setattr(Tensor, name, _noting_memory(getattr(Tensor, name)))
        _UNDOING.append(this)
    try:
        yield
    finally:
        with _LOCK:
            _UNDOING.remove(this)
            if not _UNDOING:
                _PATCHES.close()


def _noting_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor) and method.__name__ in ("numpy", "__array__"):
            number = torch.ops.aten._local_scalar_dense.default(tensor)  # as for `item`: made up, or an error
            with _disable_current_modes():
                return method(torch.full(tensor.shape, number, dtype=tensor.dtype), *args, **kwargs)
        # torch and Jettison ask for addresses to compare them
        asks = sys._getframe(1).f_globals.get("__name__", "")
        undos = [undo for thread, undo in tuple(_UNDOING) if thread == threading.get_ident()]
        if undos and asks.partition(".")[0] not in ("torch", "jettison"):
            undos[-1].note([tensor], handed=True)
        return method(tensor, *args, **kwargs)

    return noting
