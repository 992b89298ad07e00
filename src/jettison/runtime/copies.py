"""Copies of planned modules, deep or unpickled: they train plainly, and warn when they first do.

A plan counts the bytes of one model. A copy (a student, a second run from the same start, a moving average) has
parameters and a step of its own, which no plan covers. Most copies only run without gradients, and need no warning.
"""

from __future__ import annotations

import copy
import functools
import pydoc
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import warn

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
            self._say()
        return self.plain(*args, **kwargs)

    def _say(self) -> None:
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
    """Stand-in for ``forward`` on the deep copy of a module; none for a fake one, which nobody trains."""
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
