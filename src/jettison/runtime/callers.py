"""Callers of a planned forward: its module, a shallow copy of it, a compiler, a transform; and foreign hooks."""

from __future__ import annotations

import copy
import functools
import pydoc
import sys
import types
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import warn

Pack = TypeVar("Pack", bound=Callable[..., Any])

_FILE = nn.Module._call_impl.__code__.co_filename
_NAMES = frozenset(("_call_impl", "inner", "_slow_forward"))  # functions of nn.Module that call ``self.forward``
_READS_LOCALS = frozenset(("locals", "vars", "eval", "exec"))  # which see that copy of a frame's locals
_FAR = 8  # most frames between a compiled module's call and its planned forward


def whose_copy(planned: Any, *, compiled: bool = False) -> nn.Module | None:
    """Return the shallow copy of a planned module whose ``__call__`` is running, if any; a compiler's frames may be in
    between. A shallow copy has the attributes of the original, and so its planned forward, which only knows the
    original; the calling frame tells them apart. A direct ``.forward(...)`` counts as the original's.
    """
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(_FAR if compiled else 1):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name in _NAMES and code.co_filename == _FILE:  # reading other frames' locals would extend their life
            found = frame.f_locals.get("self")
            is_copy = isinstance(found, nn.Module) and found is not planned.module
            return found if is_copy and vars(found).get("forward") is planned else None
        frame = frame.f_back
    return None


def argument_of(function: Callable[..., Any], position: int) -> Any:
    """Positional argument of a Python function that is running; None: it is not, or has dropped the argument."""
    if not isinstance(function, types.FunctionType):  # a method, or an object that is called
        function, position = getattr(function, "__func__", type(function).__call__), position + 1
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not getattr(function, "__code__", None):
        frame = frame.f_back
    if frame is None or position >= frame.f_code.co_argcount or _READS_LOCALS & {*frame.f_code.co_names}:
        return None
    held = frame.f_locals
    found = held.get(frame.f_code.co_varnames[position])
    if isinstance(held, dict):  # before Python 3.13 a copy that stays, and would extend the life of all locals
        held.clear()
    return found


def is_compiled_training() -> bool:
    """Whether `torch.compile` is compiling, with gradients: an exporter takes the plain forward."""
    # torch.compiler.is_exporting() is always true while torch 2.11 compiles
    exporting = torch.compiler._is_exporting_flag
    return torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling() and not exporting


def is_transforming() -> bool:
    """Whether `torch.func` transforms or forward-mode differentiation run, which save no tensors, or others."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


FOREIGN_HOOKS: Final = (
    "under saved-tensor hooks of somebody else's (torch.autograd.graph: save_on_cpu, allow_mutation_on_saved_tensors; "
    "torch.utils.checkpoint), or where torch allows none (disable_saved_tensors_hooks)"
)


def are_hooks_foreign() -> bool:
    """Whether saved tensors pass hooks as `FOREIGN_HOOKS` describes. Our own have a mark: ``of_a_region``."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        return True
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not getattr(top[0], "of_a_region", False)


def switches_hooks_off(error: BaseException) -> bool:
    """Whether an error comes from `torch.autograd.graph.disable_saved_tensors_hooks`."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    return found is not None and found.tb_frame.f_code.co_name == "disable_saved_tensors_hooks"


def of_a_region(pack: Pack) -> Pack:
    """Mark a hook as ours."""
    pack.of_a_region = True  # type: ignore[attr-defined]
    return pack


# copies of a planned model, which train without its plan --------------------------------------------------------------

COPY: Final = "deep copy"
LOADED: Final = "pickled copy"


class CopiedForward:
    """Stands for a copied module's ``forward`` until that runs with gradients, or is planned. ``said`` are the warnings
    that the original's plan has given; ``name`` is empty for the whole model.
    """

    def __init__(self, module: nn.Module, name: str, said: set[str], how: str = COPY) -> None:
        self.module, self.name, self.said, self.how = module, name, said, how
        functools.update_wrapper(self, self.plain, updated=())

    @property
    def plain(self) -> Any:
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            trains_plainly(self.module)
            self._warn()
        return self.plain(*args, **kwargs)

    def _warn(self) -> None:
        if self.how not in self.said:
            self.said.add(self.how)
            warn(
                f"a {self.how} of {self.name or 'the model'} trains without the plan, which belongs to the original: "
                "it keeps what plain autograd keeps, in addition to the original, and the budget does not count it. "
                "Plan the copy as well, or remove() the plan before copying"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_forward(self.module, self.name, self.said, memo)

    def __reduce__(self) -> Any:
        return pickled_forward(self.module, self.name, self.said)


def copied_forward(module: nn.Module, name: str, said: set[str], memo: dict[int, Any]) -> Any:
    """Stand-in for ``forward`` on the deep copy of a module; none for a fake copy, which is not trained."""
    # copying may come back to this function first, through a hook that holds the region
    copied = copy.deepcopy(module, memo)
    first = next(module.parameters(), None)
    if first is not None and isinstance(plain(memo.get(id(first), first)), FakeTensor):
        return types.MethodType(type(module).forward, copied)
    return CopiedForward(copied, name, said)


class _UnpickledCall:
    """Reduction to a function call, which yields the call's result when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __call__(self) -> None:
        """Never called: pickle requires a callable in a function's place."""

    def __reduce__(self) -> Any:
        return self.function, self.args


def pickled_forward(module: nn.Module, name: str, said: set[str]) -> Any:
    """Reduction of ``forward`` for a pickle, as `__reduce__` returns it.

    The file can be read without Jettison: `pydoc.locate` then finds None instead of this module, and ``getattr`` gives
    the forward of the class.
    """
    read = _UnpickledCall(getattr, _UnpickledCall(pydoc.locate, __name__), loaded_forward.__name__, getattr)
    return read, (module, "forward", (name, said))


def loaded_forward(module: nn.Module, _attribute: str, told: tuple[str, set[str]]) -> CopiedForward:
    """Stand-in for a module that is being unpickled, and has only its class yet. One file shares its warnings."""
    name, said = told
    return CopiedForward(module, name, said, LOADED)


def trains_plainly(module: nn.Module) -> None:
    """Give a copy its class's forward back."""
    if isinstance(vars(module).get("forward"), CopiedForward):
        del module.__dict__["forward"]
