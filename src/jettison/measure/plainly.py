"""A model without the checkpointing and offloading that somebody else put on it, and nothing else changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor


@dataclass(kw_only=True)
class LeftOut:
    """How often something was to be dropped or moved, and was not.

    Args:
        hooks: regions under saved-tensor hooks: checkpoints without reentrant autograd, ``save_on_cpu``, the offloading
            of TRL, torchtune and Transformer Engine.
        reentrant: checkpoints that run as a function of autograd.
    """

    hooks: int = 0
    reentrant: int = 0

    @property
    def nothing(self) -> bool:
        """Whether the model trains plainly by itself."""
        return not (self.hooks or self.reentrant)


@contextlib.contextmanager
def plainly() -> Iterator[LeftOut]:
    """Inside, autograd keeps every tensor that it saves: saved-tensor hooks are not installed, and what
    `torch.utils.checkpoint` is given just runs. Random numbers are drawn as before.

    What drops or moves tensors in an autograd function of its own (Megatron's, DeepSpeed's) still does.
    """
    found = LeftOut()
    hooks: Any = torch._C._autograd
    push, pop = hooks._push_saved_tensors_default_hooks, hooks._pop_saved_tensors_default_hooks
    reentrant = checkpoints.CheckpointFunction

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _keeps_random_state: bool, *args: Any) -> Any:
            found.reentrant += 1
            return function(*args)

    def leave_out(*_: Callable[[Tensor], Any]) -> None:
        found.hooks += 1

    hooks._push_saved_tensors_default_hooks, hooks._pop_saved_tensors_default_hooks = leave_out, lambda: None
    checkpoints.CheckpointFunction = Plain
    try:
        yield found
    finally:
        hooks._push_saved_tensors_default_hooks, hooks._pop_saved_tensors_default_hooks = push, pop
        checkpoints.CheckpointFunction = reentrant
