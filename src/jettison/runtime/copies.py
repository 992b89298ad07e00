"""Deep copies of planned modules, and what comes back from a pickle: they train plainly, and say so when they first do.

A plan counts the bytes of one model. A copy (a student, a second run of the same start, a moving average) has
parameters and a step of its own, which nobody planned. Most copies only run without gradients, and need no word.
"""

from __future__ import annotations

import copy
import functools
import pydoc
import types
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.tensor_subclasses import plain

COPY: Final = "deep copy"
LOADED: Final = "pickled copy"


class CopiedForward:
    """In the place of a copied module's ``forward`` until that runs with gradients, or is planned. ``said`` is what the
    original's plan has said already; ``name`` is empty for the whole model.
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
            warnings.warn(
                f"a {self.how} of {self.name or 'the model'} trains without the plan, which belongs to the original: "
                "it keeps what plain autograd keeps, beside what the original has, and the budget does not count it. "
                "Plan the copy as well, or remove() the plan before copying",
                stacklevel=3,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_forward(self.module, self.name, self.said, memo)

    def __reduce__(self) -> Any:
        return pickled_forward(self.module, self.name, self.said)


def copied_forward(module: nn.Module, name: str, said: set[str], memo: dict[int, Any]) -> Any:
    """What stands for ``forward`` on the deep copy of a module: what has no memory is no model that anybody trains."""
    # which may come by here first, through a hook that holds the region
    copied = copy.deepcopy(module, memo)
    first = next(module.parameters(), None)
    if first is not None and isinstance(plain(memo.get(id(first), first)), FakeTensor):
        return types.MethodType(type(module).forward, copied)
    return CopiedForward(copied, name, said)


class _UnpickledCall:
    """What a call gives where a pickle is read."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __call__(self) -> None:
        """Nobody does: pickles take only what can be called in a function's place."""

    def __reduce__(self) -> Any:
        return self.function, self.args


def pickled_forward(module: nn.Module, name: str, said: set[str]) -> Any:
    """What stands for ``forward`` in a pickle, as `__reduce__` says it.

    A file is read without Jettison, too: `pydoc.locate` finds None there instead of this module, and the forward of the
    class is what ``getattr`` gives.
    """
    read = _UnpickledCall(getattr, _UnpickledCall(pydoc.locate, __name__), loaded_forward.__name__, getattr)
    return read, (module, "forward", (name, said))


def loaded_forward(module: nn.Module, _attribute: str, told: tuple[str, set[str]]) -> CopiedForward:
    """For a module that is being read, and has nothing but its class yet. All of one file share what they said."""
    name, said = told
    return CopiedForward(module, name, said, LOADED)


def trains_plainly(module: nn.Module) -> None:
    """A copy has its class's forward again."""
    if isinstance(vars(module).get("forward"), CopiedForward):
        del module.__dict__["forward"]
