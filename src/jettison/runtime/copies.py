"""Deep copies of planned modules: they train plainly, and say so when they first do.

A plan counts the bytes of one model. A copy (a student, a second run of the same start, a moving average) has
parameters and a step of its own, which nobody planned. Most copies only run without gradients, and need no word.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.tensor_subclasses import plain

COPY: Final = "deep copy"


class CopiedForward:
    """In the place of a copied module's ``forward`` until that runs with gradients, or is planned.

    Args:
        module: the copy.
        name: of the original's region; empty for the whole model.
        said: what the original's plan has said already. A plan that is removed has nothing more to say.
    """

    def __init__(self, module: nn.Module, name: str, said: set[str]) -> None:
        self.module, self.name, self.said = module, name, said
        functools.update_wrapper(self, self.plain, updated=())

    @property
    def plain(self) -> Any:
        """The forward of the copy's class."""
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            trains_plainly(self.module)
            self._say()
        return self.plain(*args, **kwargs)

    def _say(self) -> None:
        if COPY not in self.said:
            self.said.add(COPY)
            warnings.warn(
                f"a deep copy of {self.name or 'the model'} trains without the plan, which belongs to the original: it "
                "keeps what plain autograd keeps, beside what the original has, and the budget does not count it. Plan "
                "the copy as well, or remove() the plan before copying",
                stacklevel=3,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_forward(self.module, self.name, self.said, memo)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")


def copied_forward(module: nn.Module, name: str, said: set[str], memo: dict[int, Any]) -> Any:
    """What stands for ``forward`` on the deep copy of a module: what has no memory is no model that anybody trains."""
    # which may come by here first, through a hook that holds the region
    copied = copy.deepcopy(module, memo)
    first = next(module.parameters(), None)
    if first is not None and isinstance(plain(memo.get(id(first), first)), FakeTensor):
        return types.MethodType(type(module).forward, copied)
    return CopiedForward(copied, name, said)


def trains_plainly(module: nn.Module) -> None:
    """A copy has its class's forward again."""
    if isinstance(vars(module).get("forward"), CopiedForward):
        del module.__dict__["forward"]
